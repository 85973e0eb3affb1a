"""Outcomes become rewarded rollouts, and what can be said of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from spmdrl.algo.metrics import Mean, Metrics, Total, Values
from spmdrl.algo.rewards import overlong_penalty
from spmdrl.config import Config
from spmdrl.step.episodes import episode_metrics
from spmdrl.types import RewardedRollout, RewardOutcome, Rollout

_MAX_REASONS = 10  # that are shown in one step


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
    return [
        RewardedRollout(
            index=index_of(rollout),
            rollout=rollout,
            outcome=outcome,
            baseline=baselines.get(rollout.prompt.prompt_id),
        )
        for rollout, outcome in shaped
        if not rollout.is_baseline
    ]


def _with_overlong_penalty(rollout: Rollout, outcome: RewardOutcome, cfg: Config) -> RewardOutcome:
    """The reward less what the response's length costs, which becomes a part of its own."""
    if not cfg.reward.overlong_tokens:
        return outcome
    penalty = overlong_penalty(
        rollout.num_sampled,
        max_tokens=cfg.rollout.max_response_tokens,
        buffer_tokens=cfg.reward.overlong_tokens,
    ) * (cfg.reward.overlong_penalty or 1.0)
    return dataclasses.replace(outcome, reward=outcome.reward + penalty, parts=outcome.parts | {"overlong": penalty})


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
        "rollout/prompt_tokens": Mean.of(float(len(r.rollout.prompt.token_ids)) for r in rewarded),
        "rollout/truncated_fraction": Mean.of(float(r.rollout.is_truncated) for r in rewarded),
    }
    if baselines:
        metrics["rollout/greedy_reward_mean"] = Mean.of(outcome.reward for outcome in baselines.values())
    for task in sorted({r.rollout.prompt.task for r in rewarded}):
        metrics[f"reward/mean_{task}"] = Mean.of(r.outcome.reward for r in rewarded if r.rollout.prompt.task == task)
    for part in sorted({name for r in rewarded for name in r.outcome.parts}):
        metrics[f"reward/part_{part}"] = Mean.of(r.outcome.parts[part] for r in rewarded if part in r.outcome.parts)
    return metrics | episode_metrics(r.rollout for r in rewarded)


def failure_lines(step: int, rewarded: Sequence[RewardedRollout]) -> list[str]:
    """A sentence for each of the most frequent reasons why rewards of this rank could not be computed, such as a worker
    that died, and one for the rest."""
    reasons = Counter(r.outcome.failure for r in rewarded if r.outcome.failure is not None)
    shown = reasons.most_common(_MAX_REASONS)
    told = [f"step {step}: {count} of this rank's rewards are 0: {reason}" for reason, count in shown]
    if others := reasons.total() - sum(count for _, count in shown):
        told.append(f"step {step}: {others} of this rank's rewards are 0 for other reasons")
    return told
