"""Rollouts become rewards and advantages, group by group."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import ESTIMATORS, moments, whiten
from spmdrl.algo.control import overlong_penalty
from spmdrl.algo.metrics import Mean, Metrics, Total, Values
from spmdrl.config import AdvantageConfig, Config
from spmdrl.dist.collectives import sum_over
from spmdrl.types import RewardedRollout, RewardOutcome, Rollout

Outcome = tuple[Rollout, RewardOutcome]


def score_groups(outcomes: Iterable[Outcome], cfg: Config, mesh: DeviceMesh) -> list[RewardedRollout]:
    """Give each rollout its advantage; prompt-major order, samples in order within their group.

    Baselines are compared with, and are none of the results. Where the advantage needs log-probabilities it is the
    reward here, and `credit.assign_credit` makes an advantage of it. Groups are whole on their rank. Only whitening
    looks beyond it, by one all-reduce that every rank joins.
    """
    ordered = sorted(outcomes, key=lambda outcome: (outcome[0].prompt.prompt_id, outcome[0].sample_index))
    shaped = [_with_overlong_penalty(rollout, outcome, cfg) for rollout, outcome in ordered]
    baselines = {rollout.prompt.prompt_id: outcome for rollout, outcome in shaped if rollout.is_baseline}
    trained = [(rollout, outcome) for rollout, outcome in shaped if not rollout.is_baseline]
    advantages = torch.tensor([outcome.reward for _, outcome in trained], dtype=torch.float64)
    num_tokens = torch.tensor([len(rollout.response.token_ids) for rollout, _ in trained], dtype=torch.float64)
    if not cfg.advantages_need_scores:
        num_groups = len({rollout.prompt.prompt_id for rollout, _ in trained})
        if num_groups:  # a rank that was slow, or that shares an engine which another rank leads, has none
            by_group = group_advantages(
                advantages.view(num_groups, -1),
                cfg.advantage,
                num_tokens=num_tokens.view(num_groups, -1),
                greedy_rewards=torch.tensor([outcome.reward for outcome in baselines.values()], dtype=torch.float64),
            )
            advantages = by_group.flatten()
        if cfg.advantage.whitens:
            (advantages,) = whitened([advantages], [num_tokens], mesh)
    return [
        RewardedRollout(
            rollout=rollout, outcome=outcome, advantage=advantage, baseline=baselines.get(rollout.prompt.prompt_id)
        )
        for (rollout, outcome), advantage in zip(trained, advantages.tolist(), strict=True)
    ]


def group_advantages(rewards: Tensor, cfg: AdvantageConfig, **columns: Tensor) -> Tensor:
    """Advantages [P, G] of rewards [P, G] by the estimator named, which takes what it needs of the columns:
    num_tokens [P, G], the rollouts' loss tokens, and greedy_rewards [P]."""
    estimator = ESTIMATORS[cfg.estimator]
    return estimator.function(rewards, **{name: columns[name] for name in estimator.needs}, **cfg.settings)


def whitened(advantages: Sequence[Tensor], weights: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Mean 0 and deviation 1 over the loss tokens of all ranks, each advantage counting by its weight.

    Every rank of the mesh must call this; advantages are float64, in as many parts as a rank likes.
    """
    parts = [torch.stack(moments(*part)) for part in zip(advantages, weights, strict=True)]
    total, squares, count = sum_over(mesh, sum(parts, torch.zeros(3, dtype=torch.float64))).tolist()
    if not count:
        return list(advantages)
    mean = total / count
    std = math.sqrt(max(0.0, squares / count - mean * mean))
    return [whiten(part, mean=mean, std=std) for part in advantages]


def _with_overlong_penalty(rollout: Rollout, outcome: RewardOutcome, cfg: Config) -> Outcome:
    """The reward less what the response's length costs, which is a part of its own."""
    if not cfg.reward.overlong_tokens:
        return rollout, outcome
    penalty = overlong_penalty(
        len(rollout.response.token_ids),
        max_tokens=cfg.rollout.max_response_tokens,
        buffer_tokens=cfg.reward.overlong_tokens,
    ) * (cfg.reward.overlong_penalty or 1.0)
    shaped = dataclasses.replace(outcome, reward=outcome.reward + penalty, parts=outcome.parts | {"overlong": penalty})
    return rollout, shaped


def rollout_metrics(scored: Sequence[RewardedRollout]) -> Metrics:
    """What the step's rollouts of this rank looked like."""
    responses = [s.rollout.response for s in scored]
    baselines = {s.rollout.prompt.prompt_id: s.baseline for s in scored if s.baseline is not None}
    groups = {prompt_id: {outcome.reward} for prompt_id, outcome in baselines.items()}
    for s in scored:
        groups.setdefault(s.rollout.prompt.prompt_id, set()).add(s.outcome.reward)
    outcomes = [*(s.outcome for s in scored), *baselines.values()]
    metrics: Metrics = {
        "reward/mean": Values(tuple(s.outcome.reward for s in scored)),
        # Of all groups with rewards: under dynamic sampling the collector adds those that it dropped.
        "reward/equal_groups_fraction": Mean.of(float(len(rewards) == 1) for rewards in groups.values()),
        "reward/failed_count": Total(float(sum(outcome.failure is not None for outcome in outcomes))),
        "rollout/response_tokens": Values(tuple(float(len(r.token_ids)) for r in responses)),
        "rollout/prompt_tokens": Mean.of(float(len(s.rollout.prompt.token_ids)) for s in scored),
        "rollout/truncated_fraction": Mean.of(float(r.finish_reason == "length") for r in responses),
    }
    if baselines:
        metrics["rollout/greedy_reward_mean"] = Mean.of(outcome.reward for outcome in baselines.values())
    for task in sorted({s.rollout.prompt.task for s in scored}):
        metrics[f"reward/mean_{task}"] = Mean.of(s.outcome.reward for s in scored if s.rollout.prompt.task == task)
    for part in sorted({name for s in scored for name in s.outcome.parts}):
        metrics[f"reward/part_{part}"] = Mean.of(s.outcome.parts[part] for s in scored if part in s.outcome.parts)
    return metrics


def failure_lines(step: int, scored: Sequence[RewardedRollout]) -> list[str]:
    """A sentence for each reason why rewards of this rank could not be computed, such as a worker that died."""
    reasons = Counter(s.outcome.failure for s in scored if s.outcome.failure is not None)
    return [f"step {step}: {count} of this rank's rewards are 0: {reason}" for reason, count in reasons.items()]
