"""Accuracy on held-out prompts, answered by the engine with the weights of the last refit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algo.evaluation import pass_at_k, reported_ks
from spmdrl.algo.metrics import Max, Mean, Metrics, ShareBound
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end, to_sequences
from spmdrl.step.samples import held_out_episode_metrics
from spmdrl.types import MicroBatch, Prompt, RewardedRollout, RewardOutcome, Rollout

# The mismatch floor: how far engine and trainer are apart on the same few prompts, with the same weights.
#
# Digests say that the engine holds the trainer's numbers; this says that it computes with them what the trainer does.
# What `mismatch/...` shows beyond this floor comes from stale tokens, not from kernels.


def probe_batches(probes: Sequence[Rollout], meshes: Meshes) -> list[MicroBatch]:
    """Give every rank micro-batches of the probes of all ranks; every rank that trains must call this with its own.
    Each probe has a micro-batch: together they could exceed the token budget."""
    unrewarded = RewardOutcome(reward=0.0, parts={})
    mine = to_sequences((RewardedRollout(index=0, rollout=x, outcome=unrewarded) for x in probes), meshes.training)
    sequences = [sequence for part in gather_objects(meshes.training, mine) for sequence in part]
    num_shares, multiple = meshes.data.size(), meshes.model.cp.size()
    shares = (sequences[first : first + num_shares] for first in range(0, len(sequences), num_shares))
    return [lay_end_to_end(share[meshes.data.get_local_rank() :][:1], {}, multiple=multiple) for share in shares]


@torch.no_grad()
def probe_metrics(policy: Policy, probes: Sequence[MicroBatch], meshes: Meshes) -> Metrics:
    """Compare logprobs of the probes, sampled with the weights that the policy has now; every rank that trains must
    call this with its `probe_batches`."""
    distances = [torch.empty(0)]
    for batch in probes:
        distances.append((policy(batch).logprobs.cpu() - batch.rollout_logprobs).abs()[batch.loss_mask])
    distance = torch.cat(distances)
    if not distance.numel() or not meshes.is_data_leader:
        return {}
    return {
        "refit/probe_mean_abs_nats": Mean(float(distance.sum()), float(distance.numel())),
        "refit/probe_max_abs_nats": Max(float(distance.max())),
    }


_ROUNDING = 1e-6  # of a sum of weighted terms


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    metrics: Metrics  # this rank's part
    samples: Sequence[Mapping[str, Any]] = ()  # rows of answers, the same on every rank


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A held-out prompt with what was sampled for it."""

    answers: tuple[tuple[Rollout, RewardOutcome], ...]
    right: tuple[bool, ...]  # of each: its reward is that from which a response counts as right

    @property
    def prompt(self) -> Prompt:
        return self.answers[0][0].prompt

    @property
    def share(self) -> float:
        """The share of its responses that are right."""
        return sum(self.right) / len(self.right)


def scored_prompts(outcomes: Iterable[tuple[Rollout, RewardOutcome]], *, success_at: float) -> list[ScoredPrompt]:
    """Gather the responses to each prompt, in the order of their first."""
    answers: dict[int, list[tuple[Rollout, RewardOutcome]]] = {}
    for rollout, outcome in outcomes:
        answers.setdefault(rollout.prompt.prompt_id, []).append((rollout, outcome))

    def is_right(rollout: Rollout, outcome: RewardOutcome) -> bool:
        least = success_at if rollout.prompt.rule is None else 1.0
        return outcome.reward >= least - _ROUNDING

    return [ScoredPrompt(tuple(found), tuple(is_right(*one) for one in found)) for found in answers.values()]


def eval_metrics(outcomes: Iterable[tuple[Rollout, RewardOutcome]], *, success_at: float) -> Metrics:
    """Metrics of an evaluation. Accuracy is the share of responses whose reward is `success_at` or more, in
    evaluation sets 1; its interval takes prompts as units."""
    prompts = scored_prompts(outcomes, success_at=success_at)
    outcomes = [answer for prompt in prompts for answer in prompt.answers]

    def accuracy(part: Iterable[ScoredPrompt]) -> Mean:
        return Mean.of(float(is_right) for prompt in part for is_right in prompt.right)

    low, high = ShareBound.both(prompt.share for prompt in prompts)
    metrics: Metrics = {
        "eval/accuracy": accuracy(prompts),
        "eval/ci95_low": low,
        "eval/ci95_high": high,
        "eval/reward": Mean.of(outcome.reward for _, outcome in outcomes),
        "eval/response_tokens": Mean.of(float(rollout.num_sampled) for rollout, _ in outcomes),
        "eval/truncated_fraction": Mean.of(float(rollout.is_truncated) for rollout, _ in outcomes),
    }
    for k in reported_ks(min((len(prompt.right) for prompt in prompts), default=1)):
        metrics[f"eval/pass_at_{k}"] = Mean.of(pass_at_k(sum(one.right), len(one.right), k) for one in prompts)
    for task in sorted({prompt.prompt.task for prompt in prompts}):
        metrics[f"eval/accuracy_{task}"] = accuracy(one for one in prompts if one.prompt.task == task)
    return metrics | held_out_episode_metrics(rollout for rollout, _ in outcomes)
