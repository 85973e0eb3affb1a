"""Accuracy on held-out prompts, answered by the engine with the weights of the last refit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.algo.metrics import Mean, Metrics
from spmdrl.step.episodes import held_out_episode_metrics
from spmdrl.types import RewardOutcome, Rollout

_ROUNDING = 1e-6  # of a sum of weighted terms


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    metrics: Metrics  # this rank's part
    samples: Sequence[Mapping[str, Any]] = ()  # rows of answers, the same on every rank


def eval_metrics(outcomes: Iterable[tuple[Rollout, RewardOutcome]], *, success_at: float) -> Metrics:
    """Metrics of an evaluation. Accuracy is the share of responses whose reward is `success_at` or more."""
    outcomes = list(outcomes)

    def accuracy(part: Sequence[tuple[Rollout, RewardOutcome]]) -> Mean:
        return Mean.of(float(outcome.reward >= success_at - _ROUNDING) for _, outcome in part)

    metrics: Metrics = {
        "eval/accuracy": accuracy(outcomes),
        "eval/reward": Mean.of(outcome.reward for _, outcome in outcomes),
        "eval/response_tokens": Mean.of(float(rollout.num_sampled) for rollout, _ in outcomes),
        "eval/truncated_fraction": Mean.of(float(rollout.is_truncated) for rollout, _ in outcomes),
    }
    for task in sorted({rollout.prompt.task for rollout, _ in outcomes}):
        metrics[f"eval/accuracy_{task}"] = accuracy([item for item in outcomes if item[0].prompt.task == task])
    return metrics | held_out_episode_metrics(rollout for rollout, _ in outcomes)
