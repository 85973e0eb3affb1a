"""Outcomes become rewarded rollouts, and their metrics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import centre, normalized_terms, overlong_penalty
from spmdrl.algo.metrics import Correlation, Mean, Metrics, RootMean, Total, Values
from spmdrl.algo.sequences import on_tokens
from spmdrl.config import Config, RewardConfig
from spmdrl.conversation import Observation
from spmdrl.dist.collectives import sum_over
from spmdrl.step.samples import cached_fraction, episode_metrics
from spmdrl.types import (
    MicroBatch,
    RewardedRollout,
    RewardOutcome,
    Rollout,
    TrainingDiverged,
    Trajectory,
    TurnSpan,
)

# The turns of a rollout, as training credits them.


STATE_BITS = 52  # of a hash of a state or a role: they travel between ranks as float64 too
_SUMMARIZED = "a summary is asked for"  # the state of these turns: what they do is no action in their environment


def turn_spans(rollout: Rollout, weight: float) -> Iterator[tuple[TurnSpan, ...]]:
    """Yield the turns of each trajectory; `weight` is what the environment's rewards count in the rollout's."""
    number, read, rewards = 0, rollout.initial_observation, _turn_rewards(rollout)
    for trajectory in rollout.trajectories:
        spans = []
        for turn, (start, end) in zip(trajectory.turns, _sampled_spans(trajectory), strict=True):
            # A turn in which nothing was sampled has no token to reward: what it earned is the whole rollout's.
            reward = weight * rewards[number] if end > start else 0.0
            state = state_of(Observation(state=_SUMMARIZED) if turn.is_summary else read)
            role, team = _role_and_team(read)
            spans.append(
                TurnSpan(
                    number=number,
                    start=start,
                    end=end,
                    reward=reward,
                    state=state,
                    role=role,
                    team=team,
                    newest=end - turn.response.spans[-1].num_tokens if len(turn.response.spans) > 1 else 0,
                )
            )
            number, read = number + 1, read if turn.is_summary else turn.observation
        yield tuple(spans)


def _role_and_team(read: Observation | None) -> tuple[int, int]:
    """Hash the role that an observation names, and the team that `solver/2` is a member of: what its last slash
    follows."""
    if read is None or read.role is None:
        return 0, 0
    team, slash, _ = read.role.rpartition("/")
    return _hash(read.role.encode()), _hash(team.encode()) if slash else 0


def _turn_rewards(rollout: Rollout) -> list[float]:
    """Return the reward of each turn: its observation's, and what its role is given after its last turn."""
    rewards = [0.0] * len(rollout.turns)
    last_turns: dict[str | None, int] = {}
    read = rollout.initial_observation
    for number, turn in enumerate(rollout.turns):
        last_turns[read.role if read is not None else None] = number
        if turn.observation is not None:
            rewards[number] += turn.observation.reward
            for role, reward in turn.observation.role_rewards.items():
                rewards[last_turns[role]] += reward
        read = read if turn.is_summary else turn.observation
    return rewards


def _hash(content: bytes, *others: bytes) -> int:
    """A whole number of `STATE_BITS` bits."""
    digest = hashlib.sha256(content)
    for other in others:
        digest.update(other)
    return int.from_bytes(digest.digest()[:8], "little") >> (64 - STATE_BITS)


def _sampled_spans(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    end = 0
    for turn in trajectory.turns:
        start = end + len(turn.context_ids)
        end = start + len(turn.response.token_ids)
        yield start, end


def state_of(read: Observation | None) -> int:
    """Hash what the policy read last: the state that its environment named, else the messages and their images; 0 where
    it read nothing, which is the beginning that a prompt's rollouts share."""
    if read is None or (read.state is None and not read.messages):
        return 0
    said = json.dumps(read.messages if read.state is None else read.state, sort_keys=True).encode()
    return _hash(said, *(hashlib.sha256(image).digest() for image in read.images if read.state is None))


def turn_columns(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """[T] each, of the tokens that the policy sampled: `turn`, int64, its number in the rollout, else -1; and
    `turn_rewards`, float64, what the environment gave for that turn, else 0."""
    numbers = torch.full_like(micro_batch.token_ids, -1)
    rewards = torch.zeros(len(numbers), dtype=torch.float64)
    for _, turn, tokens in _placed(micro_batch):
        numbers[tokens] = turn.number
        rewards[tokens] = turn.reward
    return {"turn": numbers, "turn_rewards": rewards}


def rewards_by_turn(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """[T] float64 each: what the environment gave for a turn, on the last loss token of that turn and 0 elsewhere; and
    on all tokens of a sequence what its rollout's turns have earned, up to its last one."""
    at_ends = torch.zeros(len(micro_batch.token_ids), dtype=torch.float64)
    for _, turn, tokens in _placed(micro_batch):
        if turn.end > turn.start:
            at_ends[tokens.stop - 1] = turn.reward
    earned = torch.zeros(len(micro_batch.seqlens), dtype=torch.float64)
    for place, (before, turns) in enumerate(zip(micro_batch.prior_turn_rewards, micro_batch.turns, strict=True)):
        earned[place] = before + sum(turn.reward for turn in turns)
    return torch.where(micro_batch.loss_mask, at_ends, 0.0), on_tokens(earned, micro_batch.cu_seqlens, len(at_ends))


def turn_rows(micro_batch: MicroBatch) -> Tensor:
    """[N, 7] float64, a row for each turn in which something was sampled: its rollout's index, its number there, its
    loss tokens, reward, state, role and team."""
    rows = [
        (index, turn.number, int(micro_batch.loss_mask[tokens].sum()), turn.reward, turn.state, turn.role, turn.team)
        for index, turn, tokens in _placed(micro_batch)
        if turn.end > turn.start
    ]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 7)


def on_turns(micro_batch: MicroBatch, values: Mapping[tuple[int, int], float]) -> Tensor:
    """[T] float64: the value of each turn, by its rollout's index and its number there, on the tokens that the policy
    sampled in it; 0 elsewhere."""
    column = torch.zeros(len(micro_batch.token_ids), dtype=torch.float64)
    for index, turn, tokens in _placed(micro_batch):
        column[tokens] = values.get((index, turn.number), 0.0)
    return column


def _placed(micro_batch: MicroBatch) -> Iterator[tuple[int, TurnSpan, slice]]:
    """Yield the turns of all sequences: their rollout's index, and the places of their tokens in the micro-batch."""
    firsts = micro_batch.cu_seqlens[:-1].tolist()
    for index, turns, first in zip(micro_batch.sequence_index, micro_batch.turns, firsts, strict=True):
        yield from ((index, turn, slice(first + turn.start, first + turn.end)) for turn in turns)


OVERLONG = "overlong"  # the part of a reward that its response's length costs
_MAX_REASONS = 3  # that are shown in one step


def shape_rewards(
    outcomes: Iterable[tuple[Rollout, RewardOutcome]], index_of: Callable[[Rollout], int], cfg: Config
) -> list[RewardedRollout]:
    """Take the overlong penalty off every reward, and give each rollout the greedy response of its prompt, if there is
    one, as its baseline.

    Prompt-major order, samples in order within their group. Baselines are not trained on: the result is without them.
    """
    ordered = sorted(outcomes, key=lambda outcome: (outcome[0].prompt.prompt_id, outcome[0].sample_index))
    shaped = [(rollout, _with_overlong_penalty(rollout, outcome, cfg)) for rollout, outcome in ordered]
    baselines = {rollout.prompt.prompt_id: outcome for rollout, outcome in shaped if rollout.is_baseline}
    shaped = [(rollout, outcome) for rollout, outcome in shaped if not rollout.is_baseline]
    algorithms, places = cfg.algorithms, cfg.algorithm_places
    per_term = [algorithms[places.get(r.prompt.task, 0)].advantage.formula.per_term for r, _ in shaped]
    normalized = _normalized([outcome for _, outcome in shaped], cfg) if any(per_term) else None
    return [
        RewardedRollout(
            index=index_of(rollout),
            rollout=rollout,
            outcome=outcome,
            baseline=baselines.get(rollout.prompt.prompt_id),
            normalized=normalized[place] if normalized is not None and per_term[place] else None,
        )
        for place, (rollout, outcome) in enumerate(shaped)
    ]


def _normalized(outcomes: Sequence[RewardOutcome], cfg: Config) -> list[float]:
    """The sums of the normalized terms of whole groups, in order."""
    terms, weights = _terms(outcomes, cfg)
    return normalized_terms(torch.stack([*terms.values()]), weights).flatten().tolist()


def _terms(outcomes: Sequence[RewardOutcome], cfg: Config) -> tuple[dict[str, Tensor], list[float]]:
    """[P, G] float64 of each term of the rewards of whole groups, by name, and the weights: 0 where it does not count,
    because its gate is closed or the reward has failed. What length costs is one of them."""
    weights = {name: term.weight for name, term in cfg.reward.named.items()}
    if cfg.reward.overlong_tokens:
        weights[OVERLONG] = 1.0
    counted = [outcome.parts | cfg.reward.gated(outcome.parts) for outcome in outcomes]
    columns = {name: [parts.get(name, 0.0) for parts in counted] for name in weights}
    shape = (-1, cfg.rollout.group_size)
    return {name: torch.tensor(x, dtype=torch.float64).view(shape) for name, x in columns.items()}, [*weights.values()]


def _with_overlong_penalty(rollout: Rollout, outcome: RewardOutcome, cfg: Config) -> RewardOutcome:
    """The reward less what the response's length costs, which becomes a part of its own."""
    if not cfg.reward.overlong_tokens:
        return outcome
    penalty = overlong_penalty(
        rollout.num_sampled,
        max_tokens=cfg.rollout.max_response_tokens,
        buffer_tokens=cfg.reward.overlong_tokens,
    ) * (cfg.reward.overlong_penalty or 1.0)
    return dataclasses.replace(outcome, reward=outcome.reward + penalty, parts=outcome.parts | {OVERLONG: penalty})


def step_metrics(rewarded: Sequence[RewardedRollout], cfg: Config) -> Metrics:
    """Metrics of this rank's rollouts and rewards, and of the terms of rewards; none of rewards where none is set."""
    metrics = rollout_metrics(rewarded) | term_metrics(rewarded, cfg)
    return {name: x for name, x in metrics.items() if cfg.reward.has_any or not name.startswith("reward/")}


def rollout_metrics(rewarded: Sequence[RewardedRollout]) -> Metrics:
    """Metrics of this rank's rollouts and rewards."""
    baselines = {r.rollout.prompt.prompt_id: r.baseline for r in rewarded if r.baseline is not None}
    groups = {prompt_id: {outcome.reward} for prompt_id, outcome in baselines.items()}
    for r in rewarded:
        groups.setdefault(r.rollout.prompt.prompt_id, set()).add(r.outcome.reward)
    outcomes = [*(r.outcome for r in rewarded), *baselines.values()]
    metrics: Metrics = {
        "reward/mean": Values(tuple(r.outcome.reward for r in rewarded)),
        # Over all groups with rewards: under dynamic sampling the collector adds those that it dropped.
        "reward/equal_groups_fraction": Mean.of(float(len(rewards) == 1) for rewards in groups.values()),
        "reward/failed_count": Total(float(sum(outcome.failure is not None for outcome in outcomes))),
        "rollout/response_tokens": Values(tuple(float(r.rollout.num_sampled) for r in rewarded)),
        # Of what was sampled: the collector adds what it has thrown away because it was late.
        "rollout/sampled_tokens": Mean.of(float(r.rollout.num_sampled) for r in rewarded),
        "reward/sampled_mean": Mean.of(r.outcome.reward for r in rewarded),
        "rollout/prompt_tokens": Mean.of(float(len(r.rollout.prompt.token_ids)) for r in rewarded),
        "rollout/truncated_fraction": Mean.of(float(r.rollout.is_truncated) for r in rewarded),
        "speed/cached_fraction": cached_fraction(r.rollout for r in rewarded),
    }
    if baselines:
        metrics["rollout/greedy_reward_mean"] = Mean.of(outcome.reward for outcome in baselines.values())
    for task in sorted({r.rollout.prompt.task for r in rewarded}):
        metrics[f"reward/mean_{task}"] = Mean.of(r.outcome.reward for r in rewarded if r.rollout.prompt.task == task)
    for part in sorted({name for r in rewarded for name in r.outcome.parts}):
        metrics[f"reward/part_{part}"] = Mean.of(r.outcome.parts[part] for r in rewarded if part in r.outcome.parts)
    return metrics | episode_metrics(r.rollout for r in rewarded)


def term_metrics(rewarded: Sequence[RewardedRollout], cfg: Config) -> Metrics:
    """How the terms of this rank's rewards differ within their groups: each one's standard deviation, and its
    correlation with what all others count together. None of groups of one."""
    if not rewarded or cfg.rollout.group_size == 1:
        return {}
    terms, weights = _terms([one.outcome for one in rewarded], cfg)
    if len(terms) < 2:
        return {}
    counted = {name: weight * centre(term) for (name, term), weight in zip(terms.items(), weights, strict=True)}
    metrics: Metrics = {}
    for name, term in terms.items():
        own, others = centre(term), sum((x for other, x in counted.items() if other != name), torch.zeros_like(term))
        squares, products, of_others = (float(x.sum()) for x in (own * own, own * others, others * others))
        metrics[f"reward/std_{name}"] = RootMean(squares, own.numel())
        metrics[f"reward/agreement_{name}"] = Correlation(products, squares, of_others)
    return metrics


def limit_failures(rewarded: Sequence[RewardedRollout], cfg: RewardConfig, mesh: DeviceMesh, *, step: int) -> None:
    """Raise TrainingDiverged on every rank of the mesh when more of the step's rewards have failed than may; every rank
    must call this with its own."""
    if cfg.max_failed_fraction == 1.0:
        return
    mine = [sum(one.outcome.failure is not None for one in rewarded), len(rewarded)]
    failed, total = sum_over(mesh, torch.tensor(mine, dtype=torch.float64)).tolist()
    if failed > cfg.max_failed_fraction * total:
        raise TrainingDiverged(
            f"step {step}: {failed:.0f} of {total:.0f} rewards failed, and reward.max_failed_fraction = "
            f"{cfg.max_failed_fraction:g}; no weights were changed"
        )


def failure_lines(step: int, rewarded: Sequence[RewardedRollout]) -> list[str]:
    """A sentence for each of the most frequent reasons why rewards of this rank could not be computed, such as a worker
    that died, and one for the rest."""
    reasons = Counter(r.outcome.failure for r in rewarded if r.outcome.failure is not None)
    shown = reasons.most_common(_MAX_REASONS)
    lines = [f"step {step}: {count} of this rank's rewards are 0: {reason}" for reason, count in shown]
    if others := reasons.total() - sum(count for _, count in shown):
        left = f"{len(reasons) - len(shown)} other reasons, in `failure` of samples.jsonl"
        lines.append(f"step {step}: {others} of this rank's rewards are 0 for {left}")
    return lines
