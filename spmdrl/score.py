"""Rollouts become rewards and advantages, group by group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import group_advantages, moments, whiten
from spmdrl.config import AdvantageConfig
from spmdrl.dist.collectives import sum_over
from spmdrl.metrics import Mean, Metrics, Total, Values
from spmdrl.types import RewardOutcome, Rollout, ScoredRollout

Outcome = tuple[Rollout, RewardOutcome]


def score_groups(outcomes: Iterable[Outcome], cfg: AdvantageConfig, mesh: DeviceMesh) -> list[ScoredRollout]:
    """Give each rollout its advantage; prompt-major order, samples in order within their group.

    Groups are whole on their rank. Only whitening looks beyond it, by one all-reduce that every rank joins.
    """
    ordered = sorted(outcomes, key=lambda outcome: (outcome[0].prompt.prompt_id, outcome[0].sample_index))
    num_groups = len({rollout.prompt.prompt_id for rollout, _ in ordered})
    advantages = torch.tensor([outcome.reward for _, outcome in ordered], dtype=torch.float64)
    if num_groups:  # a rank that was slow, or that shares an engine which another rank leads, has none
        advantages = group_advantages(
            advantages.view(num_groups, -1), estimator=cfg.estimator, divide_by_std=cfg.divide_by_std is not False
        ).flatten()
    if cfg.estimator == "reinforce_plus_plus_baseline":
        advantages = _whiten_globally(advantages, [rollout for rollout, _ in ordered], mesh)
    return [
        ScoredRollout(rollout=rollout, outcome=outcome, advantage=advantage)
        for (rollout, outcome), advantage in zip(ordered, advantages.tolist(), strict=True)
    ]


def _whiten_globally(advantages: torch.Tensor, rollouts: Sequence[Rollout], mesh: DeviceMesh) -> torch.Tensor:
    """Mean 0 and deviation 1 over the loss tokens of all ranks."""
    tokens = torch.tensor([len(rollout.response.token_ids) for rollout in rollouts], dtype=advantages.dtype)
    total, squares, count = sum_over(mesh, torch.stack(moments(advantages, tokens))).tolist()
    if not count:
        return advantages
    mean = total / count
    return whiten(advantages, mean=mean, std=math.sqrt(max(0.0, squares / count - mean * mean)))


def rollout_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """What the step's rollouts of this rank looked like."""
    responses = [s.rollout.response for s in scored]
    groups: dict[int, set[float]] = {}
    for s in scored:
        groups.setdefault(s.rollout.prompt.prompt_id, set()).add(s.outcome.reward)
    metrics: Metrics = {
        "reward/mean": Values(tuple(s.outcome.reward for s in scored)),
        # Of all groups with rewards: under dynamic sampling the collector adds those that it dropped.
        "reward/equal_groups_fraction": Mean.of(float(len(rewards) == 1) for rewards in groups.values()),
        "reward/failed_count": Total(float(sum(s.outcome.failure is not None for s in scored))),
        "rollout/response_tokens": Values(tuple(float(len(r.token_ids)) for r in responses)),
        "rollout/prompt_tokens": Mean.of(float(len(s.rollout.prompt.token_ids)) for s in scored),
        "rollout/truncated_fraction": Mean.of(float(r.finish_reason == "length") for r in responses),
    }
    for task in sorted({s.rollout.prompt.task for s in scored}):
        metrics[f"reward/mean_{task}"] = Mean.of(s.outcome.reward for s in scored if s.rollout.prompt.task == task)
    for part in sorted({name for s in scored for name in s.outcome.parts}):
        metrics[f"reward/part_{part}"] = Mean.of(s.outcome.parts[part] for s in scored if part in s.outcome.parts)
    return metrics


def failures(scored: Sequence[ScoredRollout]) -> Counter[str]:
    """Rewards that could not be computed, counted by reason."""
    return Counter(s.outcome.failure for s in scored if s.outcome.failure is not None)
