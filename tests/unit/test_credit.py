"""Rollouts of several turns and trajectories: their rewards, advantages and loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.metrics import Mean, fetched, merge_all, scalars
from spmdrl.config import LossConfig
from spmdrl.conversation import Action, Message, Observation, ToolCall
from spmdrl.dist.exchange import SequenceInfo
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import _reduced
from spmdrl.model.policy import TokenLogprobs
from spmdrl.step.advantages import _penalised, _token_columns
from spmdrl.step.batch import _Weighting, _weights, lay_end_to_end, to_sequences
from spmdrl.step.evaluate import eval_metrics
from spmdrl.step.rewards import rollout_metrics, state_of
from spmdrl.step.samples import ENDS
from spmdrl.types import (
    ImageSpan,
    MicroBatch,
    RewardedRollout,
    RewardOutcome,
    Sequence,
    Trajectory,
    Turn,
    TurnSpan,
)
from tests.helpers import oracle
from tests.helpers.configs import plan_for
from tests.helpers.episodes import FAILED, MASKED, UNSAMPLED, random_episodes
from tests.helpers.models import VOCABULARY
from tests.helpers.sequences import random_sequences

ALONE: Any = SimpleNamespace(size=lambda: 1)  # the mesh of one rank
WEIGHT = 0.5


def sequences_of(rewarded: list[RewardedRollout], weight: float = WEIGHT) -> list[Sequence]:
    return to_sequences(rewarded, ALONE, turn_weight=weight)


def test_turns_are_the_tokens_that_were_sampled() -> None:
    rewarded = random_episodes(2, 4, weight=WEIGHT)
    sequences = sequences_of(rewarded)
    assert [s.place for s in sequences] == [
        (r.index, part) for r in rewarded for part in range(len(r.rollout.trajectories))
    ]
    assert any(s.segment > 0 for s in sequences)
    for _, parts in itertools.groupby(sequences, key=lambda s: s.index):
        number, earned = 0, 0.0
        for s in parts:
            rollout = rewarded[s.index].rollout
            assert s.prior_turn_rewards == earned
            for span, turn in zip(s.turns, rollout.trajectories[s.segment].turns, strict=True):
                assert span.number == number and s.token_ids[span.start : span.end] == turn.response.token_ids
                given = 0.0 if turn.observation is None or s.index == FAILED else turn.observation.reward
                assert span.reward == WEIGHT * given
                number, earned = number + 1, earned + span.reward
            sampled = {place for span in s.turns for place in range(span.start, span.end)}
            trained = set() if s.index == MASKED else sampled
            assert trained == {place for place, is_trained in enumerate(s.loss_mask) if is_trained}
            read = {place for start, end in s.observation_spans for place in range(start, end)}
            first = s.turns[0].start
            assert read == (set(range(first, len(s.token_ids))) - sampled if trained else set())


def test_a_state_is_its_name_or_else_the_messages() -> None:
    said: tuple[Message, ...] = ({"role": "tool", "content": "3"},)
    assert state_of(Observation(messages=said)) == state_of(Observation(messages=said, reward=2.0))
    assert state_of(Observation(messages=said, state="a")) == state_of(Observation(state="a"))
    assert len({state_of(x) for x in (None, Observation(messages=said), Observation(state="a"))}) == 3
    assert state_of(Observation()) == state_of(None) == 0
    assert 0 <= state_of(Observation(state="a")) < 2**52


def test_returns_are_what_the_rest_of_the_episode_earns() -> None:
    rewarded = random_episodes(4, 4, weight=WEIGHT)
    seen = 0
    for s in sequences_of(rewarded):
        if not any(s.loss_mask):
            continue
        rollout, outcome = rewarded[s.index].rollout, rewarded[s.index].outcome
        token_rewards = token_columns(lay_end_to_end([s], {}))["token_rewards"]
        found = oracle.returns(token_rewards[torch.tensor(s.loss_mask)].tolist(), 1.0)
        earned = [0.0 if s.index == FAILED else WEIGHT * turn.observation.reward for turn in rollout.turns]  # type: ignore[union-attr]
        expected = [
            outcome.reward - math.fsum(earned[: span.number]) for span in s.turns for _ in range(span.start, span.end)
        ]
        assert found == pytest.approx(expected, abs=1e-6)
        seen += s.segment > 0
    assert seen


def token_columns(micro_batch: MicroBatch) -> dict[str, Tensor]:
    return _token_columns(_penalised(micro_batch, "k1", 0.0))


def test_estimators_see_turns() -> None:
    sequences = sequences_of(random_episodes(2, 4))
    columns = token_columns(lay_end_to_end(sequences, {}, multiple=7))
    first = 0
    for s in sequences:
        numbers, rewards = [-1] * len(s.token_ids), [0.0] * len(s.token_ids)
        for span in s.turns:
            numbers[span.start : span.end] = [span.number] * (span.end - span.start)
            rewards[span.start : span.end] = [span.reward] * (span.end - span.start)
        assert columns["turn"][first : first + len(numbers)].tolist() == numbers
        assert columns["turn_rewards"][first : first + len(numbers)].tolist() == rewards
        first += len(numbers)
    assert (columns["turn"][first:] == -1).all()


def test_the_reward_of_one_turn_is_on_its_last_token_to_the_last_bit() -> None:
    sequences = random_sequences(8)
    micro_batch = lay_end_to_end(sequences, {})
    token_rewards = token_columns(micro_batch)["token_rewards"]
    expected = torch.zeros(len(token_rewards), dtype=torch.float64)
    for end, s in zip(micro_batch.cu_seqlens[1:].tolist(), sequences, strict=True):
        expected[end - 1] = float(torch.tensor(s.reward).float())
    assert torch.equal(token_rewards, expected)


def logprobs_of(logits: Tensor, micro_batch: MicroBatch, wanted: Tensor) -> TokenLogprobs:
    """Log-probabilities and entropies as a model computes them: of the wanted tokens, each from the row before it."""
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax[:-1].gather(1, micro_batch.token_ids[1:, None]).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)[:-1]
    shifted = (torch.cat([x.new_zeros(1), x]) for x in (logprobs, entropy))
    return TokenLogprobs(*(torch.where(wanted & (micro_batch.positions != 0), x, 0.0) for x in shifted))


def test_an_algorithm_counts_what_environments_say_in_its_own_sequences_alone() -> None:
    infos = [
        SequenceInfo(index=n, num_tokens=20, num_loss_tokens=loss, num_read_tokens=read, rank=0, algorithm=place)
        for n, (loss, read, place) in enumerate([(4, 3, 0), (6, 5, 0), (2, 7, 1), (3, 0, 1)])
    ]
    weightings = [_Weighting("token_mean", 0.4), _Weighting("sequence_mean_token_mean", 0.7, weight=2.0)]
    loss, more = _weights(infos, plan_for(4, 1), weightings, None)
    assert loss == pytest.approx({0: 1 / 10, 1: 1 / 10, 2: 2 / (2 * 2), 3: 2 / (2 * 3)})
    assert more["environment"] == pytest.approx({0: 0.4 / 8, 1: 2 * 0.7 / 7})


def test_what_environments_say_has_a_loss_of_its_own_and_all_else_no_gradient() -> None:
    coef = 0.3
    sequences = sequences_of(random_episodes(2, 4))
    num_read = sum(end - start for s in sequences for start, end in s.observation_spans)
    assert num_read and not any(s.observation_spans for s in sequences if s.index == MASKED)
    weights = {s.index: 0.01 for s in sequences}
    plain = lay_end_to_end(sequences, weights, multiple=7)
    assert plain.environment_weights is None and torch.equal(plain.predicted, plain.loss_mask)
    echo = lay_end_to_end(sequences, weights, multiple=7, environment={0: coef / num_read})
    said = echo.environment_weights != 0
    assert said.sum() == num_read and not (said & echo.loss_mask).any()
    assert torch.equal(echo.predicted, echo.loss_mask | said)
    advantages = torch.linspace(-1, 1, len(plain.token_ids))  # also of tokens that are not trained
    objective = PolicyObjective(LossConfig(entropy_coef=0.1))
    everywhere = torch.ones_like(said)
    logits = torch.randn(len(said), VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = {}
    for name, micro_batch in {"plain": plain, "echo": echo}.items():
        with_advantages = dataclasses.replace(micro_batch, advantages=advantages)
        # Log-probabilities of all tokens: the loss itself must leave out those that do not count.
        result = objective(logprobs_of(logits, micro_batch, everywhere), with_advantages)
        (gradients[name],) = torch.autograd.grad(result.loss_sum, logits)
        counted = torch.cat([micro_batch.predicted[1:], torch.tensor([False])])  # rows that predict what counts
        assert (gradients[name][~counted] == 0).all()
        assert (gradients[name][counted].abs().amax(-1) > 0).all()
    cross_entropy = logits.detach().softmax(-1)
    rows = torch.nonzero(said).flatten() - 1
    cross_entropy[rows, echo.token_ids[rows + 1]] -= 1.0
    expected = torch.zeros_like(cross_entropy)
    expected[rows] = coef / num_read * cross_entropy[rows]
    torch.testing.assert_close(gradients["echo"] - gradients["plain"], expected, rtol=1e-5, atol=1e-7)
    (reduced,) = fetched([_reduced(result, echo)])
    reported = reduced["loss/environment_nats"]
    losses = -logits.detach().log_softmax(-1)[rows, echo.token_ids[rows + 1]]
    assert reported == Mean(pytest.approx(float(losses.sum()), rel=1e-5), num_read)


def test_placeholders_are_no_text_that_a_policy_learns_to_predict() -> None:
    images = tuple(
        ImageSpan(digest="0" * 32, start=start, num_tokens=number, grid=(1, 2, 2))
        for start, number in ((0, 2), (5, 1), (7, 2), (9, 3))
    )
    turns = (TurnSpan(number=0, start=3, end=5), TurnSpan(number=1, start=14, end=16))
    mask = tuple(any(turn.start <= place < turn.end for turn in turns) for place in range(16))
    sequence = Sequence(
        index=0,
        token_ids=(5,) * 16,
        loss_mask=mask,
        rollout_logprobs=(0.0,) * 16,
        reward=0.0,
        turns=turns,
        images=images,
    )
    assert sequence.observation_spans == [(5, 5), (6, 7), (9, 9), (12, 14)]
    assert dataclasses.replace(sequence, images=()).observation_spans == [(5, 14)]


def test_metrics_of_episodes_are_those_of_all_ranks_together() -> None:
    rewarded = [*random_episodes(2, 4), with_calls(random_episodes(3, 4)[8])]
    metrics = scalars(rollout_metrics(rewarded))
    cut = scalars(merge_all([rollout_metrics(rewarded[:3]), rollout_metrics(rewarded[3:])]))
    names = [name for name in metrics if name.startswith(("episode/", "environment/"))]
    assert all(metrics[name] == pytest.approx(cut[name], nan_ok=True) for name in names)
    turns = [sum(bool(turn.response.token_ids) for turn in r.rollout.turns) for r in rewarded]
    assert turns[UNSAMPLED] == 0 and metrics["episode/turns"] == sum(turns) / 9
    assert sum(metrics[f"episode/end_{end}_fraction"] for end in ENDS) == pytest.approx(1.0)
    assert metrics["episode/end_environment_error_fraction"] == 1 / 9 and metrics["episode/failed_count"] == 1
    assert metrics["episode/tool_calls"] == 2 / 9 and metrics["episode/malformed_calls_count"] == 1
    assert metrics["episode/tool_errors_count"] == 1 and metrics["environment/moves"] == 2.0
    assert metrics["episode/masked_fraction"] == 1 / 9
    held_out = eval_metrics([(r.rollout, r.outcome) for r in rewarded], success_at=1.0)
    assert scalars(held_out)["eval/turns"] == metrics["episode/turns"]
    assert scalars(held_out)["eval/environment_moves"] == 2.0


def test_a_group_is_not_equal_where_its_greedy_response_is_another() -> None:
    def group(prompt_id: int, rewards: tuple[float, ...], greedy: float) -> list[RewardedRollout]:
        rollout = random_episodes(2, 4)[0].rollout
        of_group = dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, prompt_id=prompt_id))
        outcomes = [RewardOutcome(reward=reward, parts={}) for reward in (*rewards, greedy)]
        return [
            RewardedRollout(index=0, rollout=of_group, outcome=outcome, baseline=outcomes[-1])
            for outcome in outcomes[:-1]
        ]

    rewarded = [*group(0, (1.0, 1.0), 0.5), *group(1, (0.0, 0.0), 0.0), *group(2, (0.0, 1.0), 1.0)]
    metrics = scalars(rollout_metrics(rewarded))
    assert metrics["reward/equal_groups_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout/greedy_reward_mean"] == 0.5 and metrics["reward/mean"] == 0.5


def with_calls(rewarded: RewardedRollout) -> RewardedRollout:
    """A rollout whose two turns call a tool, once in a way that nobody can read."""
    turn = rewarded.rollout.turns[0]
    calls = (ToolCall(name="add", arguments={}), ToolCall(name="add", arguments={"a": 1}))
    turns: tuple[Turn, ...] = (
        dataclasses.replace(
            turn,
            action=Action(text="", tool_calls=calls),
            observation=Observation(metrics={"moves": 1.0}, tool_errors=1),
        ),
        dataclasses.replace(
            turn,
            action=Action(text="", malformed="no JSON"),
            observation=Observation(metrics={"moves": 2.0}, done=True),
        ),
    )
    rollout = dataclasses.replace(rewarded.rollout, trajectories=(Trajectory(turns=turns),))
    return dataclasses.replace(rewarded, rollout=rollout)
