"""Advantages, choices and losses: the same however a step is cut, and those of the oracle."""

from __future__ import annotations

import dataclasses
import math
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl import checkpoint
from spmdrl.algo.advantage import returns
from spmdrl.algo.formula import POLICY_LOSSES
from spmdrl.algo.metrics import scalars
from spmdrl.algo.seeds import mix, uniform
from spmdrl.algo.sequences import on_tokens
from spmdrl.config import Config, OptimConfig, ParallelConfig, RewardConfig
from spmdrl.config.rewards import ExactReward
from spmdrl.dist.collectives import gather_objects, merge_over
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner, UpdateGuards
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.model.policy import TokenLogprobs
from spmdrl.step.advantages import add_advantages, advantage_problems
from spmdrl.step.batch import Batch, build_batch, to_sequences
from spmdrl.step.correction import select_by_covariance
from spmdrl.step.rewards import limit_failures, shape_rewards
from spmdrl.types import (
    MicroBatch,
    Prompt,
    Response,
    RewardedRollout,
    RewardOutcome,
    Rollout,
    Sequence,
    Span,
    TrainingDiverged,
)
from tests.helpers import oracle
from tests.helpers.batches import completed
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import model_config, plan_for
from tests.helpers.groups import COUNT, GROUP_SIZE, SEED, everywhere, groups_config
from tests.helpers.models import save_llama
from tests.helpers.ranks import run_ranks
from tests.helpers.rollouts import one_turn
from tests.helpers.sequences import random_sequences

KL = {"kl_coef": 0.3}
CREDITS: list[dict[str, Any]] = [
    {"advantage": {"estimator": "reinforce_plus_plus"}},
    {"advantage": {"estimator": "reinforce_plus_plus", "discount": 0.9}, "reward": KL | {"kl_estimator": "k3"}},
    {"advantage": {"estimator": "reinforce_plus_plus", "whiten": False}, "reward": KL},
    {"advantage": {"estimator": "gae", "discount": 0.9, "gae_lambda": 0.8}, "reward": KL},
    {"advantage": {"estimator": "gae", "whiten": False}},
    {"advantage": {"estimator": "grpo"}, "reward": KL},
    {"advantage": {"estimator": "rloo", "whiten": True}, "reward": KL | {"kl_estimator": "k2"}},
    {"advantage": {"estimator": "pass_at_k", "k": 2}, "reward": KL},
    {"advantage": {"estimator": "opo"}, "reward": KL},
]
COMPARED: list[dict[str, Any]] = [
    {"advantage": {"estimator": "grpo", "whiten": True}},
    {"advantage": {"estimator": "reinforce_plus_plus_baseline"}},
    {"advantage": {"estimator": "opo", "whiten": True}, "reward": {"overlong_tokens": 20}},
    {"advantage": {"estimator": "pass_at_k", "k": 3}, "reward": {"overlong_tokens": 30, "overlong_penalty": 0.5}},
    {"advantage": {"estimator": "remax"}},
    {"advantage": {"estimator": "remax", "whiten": True}, "reward": {"overlong_tokens": 20}},
]
GREEDY_TOKENS = 30  # of each group's greedy response
LOSSES: list[dict[str, Any]] = [
    {"kind": name, "updates_per_step": 2} | ({"cov_fraction": 0.1} if kind.cov_selection else {})
    for name, kind in POLICY_LOSSES.items()
]
LAYOUTS = [(1, {}), (2, {}), (2, {"cp": 2})]
Found = list[dict[int, list[float]]]  # of each case: the values at a sequence's loss tokens, by sequence index


def sampled(index: int, length: int, purpose: int) -> Tensor:
    """Log-probabilities [length] float32 that belong to a sequence and its tokens, wherever those are."""
    return -3 * uniform(torch.full((length,), mix(index, purpose)), torch.arange(length))


def with_logprobs(micro_batch: MicroBatch) -> MicroBatch:
    names = ("old_logprobs", "ref_logprobs", "values")
    columns = [
        [sampled(i, n, purpose) for i, n in zip(micro_batch.sequence_index, micro_batch.seqlens, strict=True)]
        for purpose in range(len(names))
    ]
    return micro_batch.with_columns({name: torch.cat(column) for name, column in zip(names, columns, strict=True)})


def every_third(micro_batch: MicroBatch) -> Tensor:
    """[T] bool, True on every third of the step's sequences."""
    third = torch.tensor([index % 3 == 0 for index in micro_batch.sequence_index])
    return on_tokens(third, micro_batch.cu_seqlens, len(micro_batch.token_ids))


def with_rejections(m: MicroBatch) -> MicroBatch:
    return m.with_columns({"loss_weights": torch.where(every_third(m), 0.0, m.loss_weights)})


def with_absences(m: MicroBatch) -> MicroBatch:
    return m.with_columns({"loss_mask": m.loss_mask & ~every_third(m)})


def outcome(sequence: Sequence) -> tuple[Rollout, RewardOutcome]:
    """The sequence as a rollout with its reward."""
    prompt_id, sample_index = divmod(sequence.index, GROUP_SIZE)
    prompt = Prompt(prompt_id=prompt_id, token_ids=(5,), text="", answer=None, task="", metadata={})
    n = sum(sequence.loss_mask)
    response = Response(token_ids=(5,) * n, logprobs=(-1.0,) * n, finish_reason="stop", spans=(Span(0, n),))
    rollout = one_turn(prompt, response, sample_index=sample_index)
    return rollout, RewardOutcome(reward=sequence.reward, parts={})


def greedy_outcome(prompt_id: int) -> tuple[Rollout, RewardOutcome]:
    """The greedy response of a prompt, whose reward is the prompt's number."""
    response = Sequence(
        index=prompt_id * GROUP_SIZE,
        token_ids=(5,) * GREEDY_TOKENS,
        loss_mask=(True,) * GREEDY_TOKENS,
        rollout_logprobs=(-1.0,) * GREEDY_TOKENS,
        reward=float(prompt_id),
    )
    rollout, reward = outcome(response)
    return dataclasses.replace(rollout, sample_index=GROUP_SIZE, is_baseline=True), reward


def _compared() -> list[dict[int, tuple[float, float, list[float]]]]:
    """(reward, advantage, those of its tokens) of all rollouts, for each of COMPARED; groups are dealt like cards."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        plan = plan_for(COUNT, world.num_ranks, prompts_per_step=COUNT // GROUP_SIZE)
        mine = [s for s in random_sequences(COUNT) if s.index // GROUP_SIZE % world.num_ranks == world.rank]
        found = []
        for case in COMPARED:
            cfg, outcomes = groups_config(**case), [outcome(sequence) for sequence in mine]
            if cfg.advantage.compares_with_greedy:
                outcomes += [greedy_outcome(prompt_id) for prompt_id in {s.index // GROUP_SIZE for s in mine}]
            rewarded = {r.index: r for r in shape_rewards(reversed(outcomes), index_of, cfg)}
            assert list(rewarded) == [sequence.index for sequence in mine]
            sequences = to_sequences(rewarded.values(), meshes.training)
            batch = add_advantages(build_batch(sequences, plan, meshes, aggregation="token_mean"), cfg, {}, meshes)
            assert len(batch.advantages) == COUNT, "every rank knows all advantages"
            of_tokens = everywhere([(m.advantages, m) for m in batch.micro_batches], meshes)
            rewards = {i: r for part in gather_objects(meshes.training, _rewards(rewarded)) for i, r in part.items()}
            found.append({i: (rewards[i], batch.advantages[i], of_tokens[i]) for i in range(COUNT)})
        _limit(list(rewarded.values()), meshes)
        return found


def _limit(mine: list[RewardedRollout], meshes: Meshes) -> None:
    """Where two of all rewards have failed, on the first rank, a limit below that ends the step on every rank."""
    failed = RewardOutcome(reward=0.0, parts={}, failure="timeout")
    if meshes.training.get_local_rank() == 0:
        mine = [dataclasses.replace(one, outcome=failed) if place < 2 else one for place, one in enumerate(mine)]
    for share, ends in ((2 / COUNT, False), (1.99 / COUNT, True), (1.0, False)):
        cfg = RewardConfig(terms=(ExactReward(kind="exact"),), max_failed_fraction=share)
        with pytest.raises(TrainingDiverged, match=f"2 of {COUNT} rewards failed") if ends else nullcontext():
            limit_failures(mine, cfg, meshes.training, step=1)


def _rewards(rewarded: dict[int, RewardedRollout]) -> dict[int, float]:
    return {index: one.outcome.reward for index, one in rewarded.items()}


def index_of(rollout: Rollout) -> int:
    return rollout.prompt.prompt_id * GROUP_SIZE + rollout.sample_index


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_group_advantages_are_those_of_the_oracle_on_any_ranks(num_ranks: int) -> None:
    sequences = random_sequences(COUNT)
    lengths = [sum(sequence.loss_mask) for sequence in sequences]
    for case, found in zip(COMPARED, run_ranks(num_ranks, _compared)[0], strict=True):
        cfg = groups_config(**case)
        rewards = [sequence.reward for sequence in sequences]
        greedy = [float(prompt_id) for prompt_id in range(COUNT // GROUP_SIZE)]
        if first := cfg.reward.overlong_tokens:
            free, height = cfg.rollout.max_response_tokens - first, cfg.reward.overlong_penalty or 1.0
            rewards = [r - height * max(0, n - free) / first for r, n in zip(rewards, lengths, strict=True)]
            greedy = [r - height * max(0, GREEDY_TOKENS - free) / first for r in greedy]
        groups = [slice(i, i + GROUP_SIZE) for i in range(0, COUNT, GROUP_SIZE)]
        name, settings = cfg.advantage.estimator, cfg.advantage.settings
        rows = [
            oracle.group_advantages(rewards[g], name, lengths=lengths[g], greedy=baseline, **settings)
            for g, baseline in zip(groups, greedy, strict=True)
        ]
        advantages = [advantage for row in rows for advantage in row]
        if cfg.advantage.whitens:
            advantages = oracle.whiten(advantages, lengths, 1e-6)
        for index, (reward, advantage, of_tokens) in found.items():
            assert reward == pytest.approx(rewards[index], abs=1e-9)
            assert advantage == pytest.approx(advantages[index], abs=1e-9)
            assert of_tokens == pytest.approx([advantage] * lengths[index], rel=1e-6)


def twice_the_mean(rewards, num_tokens, scale):
    """An estimator of groups, as a user might write it."""
    centred = scale * (rewards - rewards.mean(dim=1, keepdim=True))
    return centred, {"spread": rewards.std(dim=1), "tokens": float(num_tokens.sum())}


def from_here_on(token_rewards, loss_mask, cu_seqlens):
    """An estimator of tokens: `reinforce_plus_plus` without whitening."""
    advantages = returns(token_rewards, loss_mask, cu_seqlens, discount=1.0)
    return advantages, {"positive": (advantages > 0).float()}


def only_num_tokens(num_tokens):
    return num_tokens


def a_number(rewards):
    return 0.0


def a_divider(rewards):
    return rewards / 0.0


def asks_the_critic(token_rewards, values):
    return token_rewards - values


def _users(case: dict[str, Any]) -> tuple[dict[int, list[float]], dict[str, float]]:
    """Advantages and their metrics by an estimator of the user's."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        plan = plan_for(COUNT, world.num_ranks, prompts_per_step=COUNT // GROUP_SIZE)
        batch = build_batch(
            random_sequences(COUNT)[world.rank :: world.num_ranks], plan, meshes, aggregation="constant"
        )
        batch = batch.with_micro_batches(map(with_logprobs, batch.micro_batches))
        batch = add_advantages(batch, groups_config(**case), {}, meshes)
        metrics = scalars(merge_over(meshes.training, batch.metrics))
        values = {name: value for name, value in metrics.items() if name.startswith("advantage/")}
        return everywhere([(m.advantages, m) for m in batch.micro_batches], meshes), values


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_estimator_of_the_users_sees_the_whole_step(num_ranks: int) -> None:
    sequences = random_sequences(COUNT)
    of_groups = {"advantage": {"estimator": f"{__name__}:twice_the_mean", "params": {"scale": 2.0}}}
    (found, metrics), *_ = run_ranks(num_ranks, _users, of_groups)
    rewards = [s.reward for s in sequences]
    groups = [rewards[i : i + GROUP_SIZE] for i in range(0, COUNT, GROUP_SIZE)]
    expected = [2 * (r - statistics.fmean(group)) for group in groups for r in group]
    assert_same({s.index: [a] * sum(s.loss_mask) for s, a in zip(sequences, expected, strict=True)}, found)
    assert metrics == {
        "advantage/spread": pytest.approx(statistics.fmean(map(statistics.stdev, groups))),
        "advantage/tokens": sum(sum(s.loss_mask) for s in sequences),
    }
    of_tokens = {"advantage": {"estimator": f"{__name__}:from_here_on"}, "reward": KL}
    (found, metrics), *_ = run_ranks(num_ranks, _users, of_tokens)
    assert_same(credited_by_hand(groups_config(**CREDITS[2])), found)
    values = [value for of_sequence in found.values() for value in of_sequence]
    assert metrics == {"advantage/positive": pytest.approx(statistics.fmean(value > 0 for value in values))}


@pytest.mark.parametrize(
    ("function", "tables", "sentence"),
    [
        ("twice_the_mean", {}, "asks for scale, which is neither a column nor in params; columns are rewards, num_tok"),
        ("twice_the_meen", {}, "has no function or class twice_the_meen; did you mean twice_the_mean?"),
        ("only_num_tokens", {}, "takes neither rewards, [P, G] of the groups, nor token_rewards, [T] of the tokens"),
        ("a_number", {}, "returned float; return an advantage for each reward, [2, 4]"),
        ("a_divider", {}, "returned advantages that are not finite"),
        (
            "asks_the_critic",
            {},
            "asks for values, which is neither a column nor in params; columns are token_rewards, ",
        ),
        ("from_here_on", {"loss": {"kind": "gspo"}}, 'gives each token an advantage, but loss.kind = "gspo" knows'),
        ("from_here_on", {"rollout": {"dynamic_sampling": True}}, "but rollout.dynamic_sampling = true drops groups"),
    ],
)
def test_what_is_no_estimator_is_refused(function: str, tables: dict[str, Any], sentence: str) -> None:
    cfg = groups_config(advantage={"estimator": f"{__name__}:{function}"}, **tables)
    (problem,) = advantage_problems(cfg)
    assert problem.startswith(f'advantage.estimator = "{__name__}:{function}"') and sentence in problem


def test_settings_of_estimators_are_not_mixed_up() -> None:
    users = {"estimator": "package.module:function"}
    for advantage, sentence in (
        ({"estimator": "gropo"}, 'is not known; use one of "grpo", '),
        (users | {"k": 2}, "k has no meaning for estimator"),
        ({"estimator": "grpo", "params": {"k": 2}}, 'params has no meaning for estimator = "grpo"'),
    ):
        with pytest.raises(ValueError, match=sentence):
            groups_config(advantage=advantage)
    assert groups_config(advantage=users | {"params": {"k": 2}}, rollout={"group_size": 1}).advantage.settings == {
        "k": 2
    }


def _found(layout: dict[str, int]) -> tuple[Found, Found, Found]:
    """Advantages of CREDITS; choices and gradients of LOSSES."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world, ParallelConfig(**layout))
        plan = plan_for(
            COUNT,
            world.num_ranks,
            prompts_per_step=COUNT // GROUP_SIZE,
            updates_per_step=2,
            rollouts_per_mini_batch=COUNT // 2,
            ranks_per_share=meshes.ranks_per_share,
        )
        mine = [sequence for sequence in random_sequences(COUNT) if sequence.index % world.num_ranks == world.rank]
        batch = build_batch(mine, plan, meshes, aggregation="sequence_mean_token_mean")
        batch = batch.with_micro_batches(map(with_logprobs, batch.micro_batches))
        nothing = Batch([[], []], {})
        credits, choices, gradients = [], [], []
        for case in CREDITS:
            assert add_advantages(nothing, groups_config(**case), {}, meshes) == nothing, "a step without groups"
            credited = add_advantages(batch, groups_config(**case), {}, meshes)
            credits.append(everywhere([(m.advantages, m) for m in credited.micro_batches], meshes))
            means = {index: statistics.fmean(values) for index, values in credits[-1].items()}
            assert credited.advantages == pytest.approx(means, rel=1e-5, abs=1e-6)
        batch = completed(batch, meshes)
        for case in LOSSES:
            cfg = groups_config(loss=case).loss
            chosen = select_by_covariance(batch, [cfg], meshes, seed=SEED).micro_batches
            rejected, absent = (
                select_by_covariance(
                    batch.with_micro_batches(map(leave, batch.micro_batches)), [cfg], meshes, seed=SEED
                )
                for leave in (with_rejections, with_absences)
            )
            assert all(
                m.cov_selected is other.cov_selected is None or torch.equal(m.cov_selected, other.cov_selected)
                for m, other in zip(rejected.micro_batches, absent.micro_batches, strict=True)
            ), "what is rejected takes part in the choice"
            none = [torch.zeros_like(m.loss_mask) if m.cov_selected is None else m.cov_selected for m in chosen]
            choices.append(everywhere(list(zip(none, chosen, strict=True)), meshes))
            gradients.append(everywhere([(gradient(m, PolicyObjective(cfg)), m) for m in chosen], meshes))
        return credits, choices, gradients


def gradient(m: MicroBatch, objective: PolicyObjective) -> Tensor:
    now = torch.cat([sampled(i, n, 3) for i, n in zip(m.sequence_index, m.seqlens, strict=True)]).requires_grad_()
    loss = objective(TokenLogprobs(now, torch.zeros_like(now)), m).loss_sum
    return torch.autograd.grad(loss, now)[0]


@pytest.fixture(scope="module")
def found() -> list[tuple[Found, Found, Found]]:
    """By layout; every rank is told everything, so one speaks for all."""
    return [run_ranks(num_ranks, _found, layout)[0] for num_ranks, layout in LAYOUTS]


def assert_same(one: dict[int, list[float]], other: dict[int, list[float]], bound: float = 1e-6) -> None:
    assert one.keys() == other.keys() == set(range(COUNT))
    for index, values in one.items():
        assert other[index] == pytest.approx(values, rel=bound, abs=bound)


def tokens(sequence: Sequence, purpose: int) -> list[float]:
    """Log-probabilities as if sampled for a sequence's loss tokens."""
    return sampled(sequence.index, len(sequence.token_ids), purpose)[torch.tensor(sequence.loss_mask)].tolist()


def credited_by_hand(cfg: Config) -> dict[int, list[float]]:
    """Rewards less the divergence, then the estimator, then whitening, all of it written out."""
    sequences = random_sequences(COUNT)
    penalties = []
    for sequence in sequences:
        pairs = zip(tokens(sequence, 0), tokens(sequence, 1), strict=True)
        penalties.append([-cfg.reward.kl_coef * oracle.kl(o, r, cfg.reward.kl_estimator) for o, r in pairs])
    advantages: list[list[float]] = []
    if cfg.advantage.estimator in ("reinforce_plus_plus", "gae"):
        for sequence, penalty in zip(sequences, penalties, strict=True):
            rewards = [*penalty[:-1], penalty[-1] + sequence.reward]
            if cfg.has_critic:
                advantages.append(oracle.gae(rewards, tokens(sequence, 2), *cfg.advantage.settings.values()))
            else:
                advantages.append(oracle.returns(rewards, cfg.advantage.settings["discount"]))
    else:
        totals = [s.reward + math.fsum(penalty) for s, penalty in zip(sequences, penalties, strict=True)]
        for first in range(0, COUNT, GROUP_SIZE):
            group = slice(first, first + GROUP_SIZE)
            lengths = [len(penalty) for penalty in penalties[group]]
            settings = cfg.advantage.settings
            row = oracle.group_advantages(totals[group], cfg.advantage.estimator, lengths=lengths, **settings)
            advantages += [[advantage] * n for advantage, n in zip(row, lengths, strict=True)]
    if cfg.advantage.whitens:
        everything = [advantage for sequence in advantages for advantage in sequence]
        mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
        advantages = [[(a - mean) / (deviation + 1e-6) for a in sequence] for sequence in advantages]
    return dict(enumerate(advantages))


@pytest.mark.parametrize("number", range(len(CREDITS)), ids=[str(case) for case in CREDITS])
def test_token_and_penalised_advantages_are_those_of_the_oracle_on_any_ranks(found: Any, number: int) -> None:
    expected = credited_by_hand(groups_config(**CREDITS[number]))
    for credits, _, _ in found:
        assert_same(expected, credits[number])


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[case["kind"] for case in LOSSES])
def test_choices_and_gradients_do_not_depend_on_the_cut(found: Any, number: int) -> None:
    (_, choices, gradients), *others = found
    assert any(any(values) for values in choices[number].values()) is ("cov_fraction" in LOSSES[number])
    assert any(any(values) for values in gradients[number].values())
    for _, other_choices, other_gradients in others:
        assert choices[number] == other_choices[number]
        assert_same(gradients[number], other_gradients[number])


def test_kl_cov_chooses_the_greatest_covariances_of_each_mini_batch(found: Any) -> None:
    number = [case["kind"] for case in LOSSES].index("kl_cov")
    sequences = random_sequences(COUNT)
    for half in (sequences[: COUNT // 2], sequences[COUNT // 2 :]):
        logprobs = [tokens(sequence, 0) for sequence in half]
        pairs = [(o, sequence.reward) for sequence, old in zip(half, logprobs, strict=True) for o in old]
        means = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
        covariances = [(o - means[0]) * (a - means[1]) for o, a in pairs]
        expected = oracle.chosen(covariances, len(pairs) // 10)
        chosen = [bool(x) for sequence in half for x in found[0][1][number][sequence.index]]
        assert chosen == expected and any(chosen)


def _stopped(path: str, folder: str) -> Any:
    """Weights after two updates of which the second may be left out, and after the first alone."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        plan = plan_for(8, world.num_ranks, updates_per_step=2, rollouts_per_mini_batch=4, num_updates=2)
        mine = random_sequences(8)[world.rank :: world.num_ranks]
        batch = build_batch(mine, plan, meshes, aggregation="token_mean")
        objective = PolicyObjective(groups_config().loss)
        results = []
        for stop, kept in ((1e-9, 2), (None, 1), (1e9, 2)):
            policy = load_policy(model_config(path), meshes.model, temperature=1.0)
            start = {"entropy_coef": 0.25}
            learner = Learner(
                policy,
                OptimConfig(name="sgd", lr=1.0),
                objective,
                num_updates=2,
                dtype=torch.float32,
                guards=UpdateGuards(mesh=meshes.training, stop_kl_nats=stop),
                coefficients=start,
            )
            prepared = completed(batch, meshes, policy).mini_batches[:kept]
            metrics = update(learner, prepared, meshes, step=1)
            weights = torch.cat([p.full_tensor().detach().flatten() for p in policy.parameters()])  # type: ignore[attr-defined]
            left_out = metrics["update/left_out_fraction"].value() if stop else 0.0
            results.append((weights, left_out, metrics["update/k3_old_nats"].value()))
        learner.coefficients["entropy_coef"] = 0.5
        save_and_wait(folder, {"policy": learner}, meshes, step=1)
        coefficients = []
        for names in (("entropy_coef", "kl_in_reward_coef"), ()):
            learner.coefficients.clear()
            learner.coefficients.update(dict.fromkeys(names, 0.1))
            checkpoint.restore(Path(folder), {"policy": learner}, meshes.training, step=1)
            coefficients.append(dict(learner.coefficients))
        del policy, learner
        return results, coefficients


def test_updates_end_on_all_ranks_once_the_policy_has_gone_too_far(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "llama")
    (results, coefficients), (others, _) = run_ranks(2, _stopped, path, str(tmp_path / "checkpoints"))
    (stopped, fraction, drift), (first, _, no_drift), (both, none, _) = results
    assert torch.equal(stopped, first) and not torch.equal(both, first)
    assert (fraction, none) == (0.5, 0.0)
    assert no_drift == 0.0 and drift > 1e-9
    assert all(torch.equal(one[0], other[0]) for one, other in zip(results, others, strict=True))
    # What this launch adapts comes from the checkpoint where that has it; what it does not adapt stays away.
    assert coefficients == [{"entropy_coef": 0.5, "kl_in_reward_coef": 0.1}, {}]
