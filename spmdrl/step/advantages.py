"""Advantages: rewards, compared within prompt groups or credited token by token, and what a critic learns from them.

Every rank gathers the rewards of the whole step and computes all groups, so that nothing depends on which rank sampled
a rollout or trains on it. Ranks of a share hold the same micro-batches and compute the same: collectives are over the
data mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import ESTIMATORS, gae, moments, whiten
from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.metrics import ExplainedVariance, Mean, Metrics, merge_all
from spmdrl.algo.rewards import with_final_rewards
from spmdrl.algo.segments import on_tokens, sequence_sums
from spmdrl.algo.value import fit_sums
from spmdrl.config import AdvantageConfig, Config
from spmdrl.dist.collectives import gather_rows, sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.coefficients import KL_IN_REWARD
from spmdrl.step.batch import Batch
from spmdrl.types import FILLING, MicroBatch


@dataclass(frozen=True, slots=True)
class _Penalised:
    """A micro-batch with what the reward takes off its tokens; tensors are [T] float64, 0 outside loss_mask."""

    micro_batch: MicroBatch
    divergence: Tensor  # nats, of the policy from the reference; 0 where there is no reference
    penalty: Tensor  # -kl_coef times the divergence

    @property
    def token_rewards(self) -> Tensor:
        """[T] float64: the penalty at each loss token, plus the rollout's reward at the last one."""
        micro_batch = self.micro_batch
        rewards = _rounded(micro_batch.rewards)
        return with_final_rewards(self.penalty, rewards, micro_batch.loss_mask, micro_batch.cu_seqlens)


def add_advantages(batch: Batch, cfg: Config, coefficients: Mapping[str, float], meshes: Meshes) -> Batch:
    """Add `advantages`, and `returns` where there is a critic. Every rank that trains must call this.

    `coefficients` are those that the run adapts: see `learn/coefficients.py`.
    """
    if not batch.micro_batches:  # alike on all ranks: a step without any prompt group
        return batch
    kl_coef = coefficients.get(KL_IN_REWARD, cfg.reward.kl_coef)
    parts = [_penalised(micro_batch, cfg.reward.kl_estimator, kl_coef) for micro_batch in batch.micro_batches]
    estimate = _by_token if ESTIMATORS[cfg.advantage.estimator].per_token else _by_group
    columns, of_sequences = estimate(parts, cfg, meshes.data)
    completed = [_completed(part, column, cfg) for part, column in zip(parts, columns, strict=True)]
    metrics = [_reward_metrics(part, cfg) for part in parts]
    if cfg.has_critic:
        metrics += [_critic_metrics(micro_batch) for micro_batch in completed]
    return replace(
        batch.with_micro_batches(completed),
        metrics=merge_all([batch.metrics, *metrics]) if meshes.speaks_for_data else batch.metrics,
        advantages=of_sequences,
    )


def group_advantages(rewards: Tensor, cfg: AdvantageConfig, **columns: Tensor) -> Tensor:
    """Advantages [P, G] of rewards [P, G] by the estimator named, which takes what it needs of the columns:
    num_tokens [P, G], the rollouts' loss tokens, and greedy_rewards [P]."""
    estimator = ESTIMATORS[cfg.estimator]
    return estimator.function(rewards, **{name: columns[name] for name in estimator.needs}, **cfg.settings)


def _penalised(micro_batch: MicroBatch, estimator: str, kl_coef: float) -> _Penalised:
    old, reference = micro_batch.old_logprobs, micro_batch.ref_logprobs
    if old is None or reference is None:
        divergence = torch.zeros(len(micro_batch.token_ids), dtype=torch.float64)
    else:
        divergence = kl_at_loss_tokens(old.double(), reference.double(), micro_batch.loss_mask, estimator=estimator)
    return _Penalised(micro_batch, divergence, -kl_coef * divergence)


def _rounded(rewards: Tensor) -> Tensor:
    """Round float64 rewards to float32, the precision of the divergence that they are added to."""
    return rewards.float().double()


def _by_group(parts: list[_Penalised], cfg: Config, mesh: DeviceMesh) -> tuple[list[Tensor], dict[int, float]]:
    """Advantages [T] float64 of each part, and those of all sequences by index: one for each rollout."""
    sequences = _gathered([_reward_rows(part, cfg) for part in parts], mesh)
    assert torch.equal(sequences[:, 0], torch.arange(len(sequences)).double()), "a sequence is missing, or there twice"
    _, rewards, num_tokens, greedy = (column.view(-1, cfg.rollout.group_size) for column in sequences.T.contiguous())
    advantages = group_advantages(rewards, cfg.advantage, num_tokens=num_tokens, greedy_rewards=greedy[:, 0])
    if cfg.advantage.whitens:
        advantages = whiten(advantages, moments(advantages, num_tokens))
    with_filling = torch.cat([advantages.flatten(), advantages.new_zeros(1)])  # at FILLING, which is -1
    columns = [
        on_tokens(with_filling[torch.tensor(m.sequence_index)], m.cu_seqlens, len(m.token_ids))
        for m in (part.micro_batch for part in parts)
    ]
    return columns, dict(enumerate(advantages.flatten().tolist()))


def _reward_rows(part: _Penalised, cfg: Config) -> Tensor:
    """[S, 4] float64: place in the step's order, reward with its penalties, loss tokens, the greedy reward."""
    micro_batch, first_tokens = part.micro_batch, part.micro_batch.cu_seqlens[:-1].long()
    rewards = micro_batch.rewards[first_tokens]
    if cfg.reward.kl_coef > 0:
        rewards = _rounded(rewards) + sequence_sums(part.penalty, micro_batch.cu_seqlens)
    num_tokens = sequence_sums(micro_batch.loss_mask.double(), micro_batch.cu_seqlens)
    return torch.stack([_indices(micro_batch), rewards, num_tokens, micro_batch.baseline_rewards[first_tokens]], dim=1)


def _by_token(parts: list[_Penalised], cfg: Config, mesh: DeviceMesh) -> tuple[list[Tensor], dict[int, float]]:
    """Advantages [T] float64 of each part, and their means over the loss tokens of all sequences by index."""
    advantages = [_token_advantages(part, cfg.advantage) for part in parts]
    masks = [part.micro_batch.loss_mask for part in parts]
    if cfg.advantage.whitens:
        mine = sum(map(moments, advantages, masks), torch.zeros(3, dtype=torch.float64))
        sums = sum_over(mesh, mine)
        advantages = [whiten(column, sums) for column in advantages]
    rows = [_mean_rows(part.micro_batch, column) for part, column in zip(parts, advantages, strict=True)]
    return advantages, {int(index): mean for index, mean in _gathered(rows, mesh).tolist()}


def _token_advantages(part: _Penalised, cfg: AdvantageConfig) -> Tensor:
    micro_batch, estimator = part.micro_batch, ESTIMATORS[cfg.estimator]
    return estimator.function(
        part.token_rewards,
        micro_batch.loss_mask,
        micro_batch.cu_seqlens,
        **{name: getattr(micro_batch, name).double() for name in estimator.needs},
        **cfg.settings,
    )


def _mean_rows(micro_batch: MicroBatch, advantages: Tensor) -> Tensor:
    """[S, 2] float64: place in the step's order, mean advantage of the loss tokens; 0 where there are none."""
    mask, cu_seqlens = micro_batch.loss_mask, micro_batch.cu_seqlens
    totals = sequence_sums(torch.where(mask, advantages, 0.0), cu_seqlens)
    return torch.stack([_indices(micro_batch), totals / sequence_sums(mask.double(), cu_seqlens).clamp(min=1)], dim=1)


def _indices(micro_batch: MicroBatch) -> Tensor:
    return torch.tensor(micro_batch.sequence_index, dtype=torch.float64)


def _gathered(rows: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """[N, k]: the rows [S, k] of all ranks' sequences in the step's order, which their first entry is; no filling."""
    mine = torch.cat(rows)
    everyone = torch.cat(gather_rows(mesh, mine[mine[:, 0] != FILLING]))
    return everyone[everyone[:, 0].argsort()]


def _completed(part: _Penalised, advantages: Tensor, cfg: Config) -> MicroBatch:
    """The micro-batch with advantages and, for a critic, returns: its values plus advantages that are not whitened."""
    micro_batch = part.micro_batch
    mask = micro_batch.loss_mask
    columns = {"advantages": torch.where(mask, advantages, 0.0).float()}
    if cfg.has_critic:
        assert micro_batch.values is not None, "the critic has not been run"
        values, settings = micro_batch.values.double(), cfg.advantage.settings | {"gae_lambda": cfg.critic_gae_lambda}
        generalized = gae(part.token_rewards, mask, micro_batch.cu_seqlens, values=values, **settings)
        columns["returns"] = torch.where(mask, generalized + values, 0.0).float()
    return micro_batch.with_columns(columns)


def _reward_metrics(part: _Penalised, cfg: Config) -> Metrics:
    num_tokens = float(part.micro_batch.loss_mask.sum())
    if cfg.reward.kl_coef == 0 or not num_tokens:
        return {}
    return {f"reward/{cfg.reward.kl_estimator}_ref_nats": Mean(float(part.divergence.sum()), num_tokens)}


def _critic_metrics(micro_batch: MicroBatch) -> Metrics:
    """How well the critic's values, from before it sees the step's rewards, predict its returns."""
    assert micro_batch.values is not None and micro_batch.returns is not None
    sums = [float(x) for x in fit_sums(micro_batch.returns, micro_batch.values, micro_batch.loss_mask)]
    returns, _, errors, _, count = sums
    return {
        "critic/explained_variance": ExplainedVariance(*sums),
        "critic/value_mean": Mean(returns - errors, count),
        "critic/return_mean": Mean(returns, count),
    }
