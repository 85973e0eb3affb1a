"""What can be said of tokens only when they have been scored: KL in the reward, advantages token by token, choices.

Micro-batches come from `prepare.add_logprobs`. Ranks of a share hold the same ones and compute the same; sums and
gathers are over the data mesh, so that nothing depends on how the step was cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import ESTIMATORS, gae, with_final_rewards
from spmdrl.algo.covariance import chosen_tokens, covariances, highest, num_chosen
from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.metrics import ExplainedVariance, Mean, Metrics, merge_all
from spmdrl.algo.seeds import mix
from spmdrl.algo.segments import on_tokens, sequence_sums
from spmdrl.algo.value import fit_sums
from spmdrl.config import Config, LossConfig
from spmdrl.dist.collectives import gather_rows, sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.coefficients import KL_IN_REWARD
from spmdrl.step.batch import FILLING, MiniBatch
from spmdrl.step.score import group_advantages, whitened
from spmdrl.types import MicroBatch


def assign_credit(
    mini_batches: list[MiniBatch], cfg: Config, coefficients: Mapping[str, float], meshes: Meshes
) -> tuple[list[MiniBatch], Metrics]:
    """Make advantages of rewards where that needs scored tokens; elsewhere they are what they were.

    Every rank that trains must call this. Until then `MicroBatch.advantages` hold the reward of each token's rollout.
    """
    if not cfg.advantages_need_scores:
        return mini_batches, {}
    packs = [micro_batch for mini_batch in mini_batches for micro_batch in mini_batch]
    masks = [pack.loss_mask for pack in packs]
    coef, estimator = coefficients.get(KL_IN_REWARD, cfg.reward.kl_coef), ESTIMATORS[cfg.advantage.estimator]
    divergences = [_divergence(pack, cfg.reward.kl_estimator) for pack in packs]
    penalties = [-coef * divergence for divergence in divergences]
    rewards = [
        with_final_rewards(penalty, pack.advantages.double(), pack.loss_mask, pack.cu_seqlens)
        for pack, penalty in zip(packs, penalties, strict=True)
    ]
    if estimator.per_token:
        advantages = [
            estimator.function(
                reward,
                pack.loss_mask,
                pack.cu_seqlens,
                **{name: getattr(pack, name).double() for name in estimator.needs},
                **cfg.advantage.settings,
            )
            for pack, reward in zip(packs, rewards, strict=True)
        ]
    else:
        advantages = _of_groups(packs, penalties, cfg, meshes.data)
    if cfg.advantage.whitens:
        advantages = whitened(advantages, masks, meshes.data)
    credited = [
        pack.with_columns({"advantages": torch.where(pack.loss_mask, advantage, 0.0).float()})
        for pack, advantage in zip(packs, advantages, strict=True)
    ]
    metrics: Metrics = {}
    if cfg.has_critic:
        credited = [_with_returns(pack, reward, cfg) for pack, reward in zip(credited, rewards, strict=True)]
        metrics |= merge_all([_fit(pack) for pack in credited])
    num_tokens = sum(int(mask.sum()) for mask in masks)
    if cfg.reward.kl_coef > 0 and num_tokens:
        total = sum(float(divergence.sum()) for divergence in divergences)
        metrics[f"reward/{cfg.reward.kl_estimator}_ref_nats"] = Mean(total, float(num_tokens))
    in_order = iter(credited)
    cut_again = [[next(in_order) for _ in mini_batch] for mini_batch in mini_batches]
    return cut_again, metrics if meshes.speaks_for_data else {}


def _with_returns(pack: MicroBatch, token_rewards: Tensor, cfg: Config) -> MicroBatch:
    """With what the critic learns: its value and the generalized advantage, which is not whitened here."""
    assert pack.values is not None, "the critic was not asked"
    values, settings = pack.values.double(), cfg.advantage.settings | {"gae_lambda": cfg.critic_gae_lambda}
    advantages = gae(token_rewards, pack.loss_mask, pack.cu_seqlens, values=values, **settings)
    return pack.with_columns({"returns": torch.where(pack.loss_mask, advantages + values, 0.0).float()})


def _fit(pack: MicroBatch) -> Metrics:
    """How well the critic's values, from before it sees the step's rewards, say what its returns are."""
    assert pack.values is not None and pack.returns is not None
    sums = [float(x) for x in fit_sums(pack.returns, pack.values, pack.loss_mask)]
    returns, _, errors, _, count = sums
    return {
        "critic/explained_variance": ExplainedVariance(*sums),
        "critic/value_mean": Mean(returns - errors, count),
        "critic/return_mean": Mean(returns, count),
    }


def _divergence(pack: MicroBatch, estimator: str) -> Tensor:
    """[T] float64, nats: policy to reference at loss tokens; 0 when the reward knows no reference."""
    if pack.old_logprobs is None or pack.ref_logprobs is None:
        return torch.zeros(len(pack.token_ids), dtype=torch.float64)
    old, reference = pack.old_logprobs.double(), pack.ref_logprobs.double()
    return kl_at_loss_tokens(old, reference, pack.loss_mask, estimator=estimator)


def _of_groups(packs: list[MicroBatch], penalties: list[Tensor], cfg: Config, mesh: DeviceMesh) -> list[Tensor]:
    """[T] float64 of each pack: group estimators on rewards from which the sum of the penalties is taken.

    Groups are spread over the ranks by now, so every rank is told all rewards and computes all groups.
    """
    rows = [_reward_rows(pack, penalty) for pack, penalty in zip(packs, penalties, strict=True)]
    mine = torch.cat([torch.empty(0, 3, dtype=torch.float64), *rows])
    everyone = torch.cat(gather_rows(mesh, mine[mine[:, 0] != FILLING]))
    in_order = everyone[everyone[:, 0].argsort()]
    _, rewards, num_tokens = (column.view(-1, cfg.rollout.group_size) for column in in_order.T.contiguous())
    advantages = group_advantages(rewards, cfg.advantage, num_tokens=num_tokens).flatten()
    assert torch.equal(in_order[:, 0], torch.arange(len(in_order)).double()), "a sequence is missing, or there twice"
    with_filling = torch.cat([advantages, advantages.new_zeros(1)])  # at FILLING, which is -1
    return [
        on_tokens(with_filling[torch.tensor(pack.sequence_index)], pack.cu_seqlens, len(pack.token_ids))
        for pack in packs
    ]


def _reward_rows(pack: MicroBatch, penalty: Tensor) -> Tensor:
    """[S, 3] float64: place in the step's order, reward with its penalties, loss tokens."""
    return torch.stack(
        [
            torch.tensor(pack.sequence_index, dtype=torch.float64),
            pack.advantages[pack.cu_seqlens[:-1].long()].double() + sequence_sums(penalty, pack.cu_seqlens),
            sequence_sums(pack.loss_mask.double(), pack.cu_seqlens),
        ],
        dim=1,
    )


def choose_tokens(mini_batches: list[MiniBatch], cfg: LossConfig, mesh: DeviceMesh, *, seed: int) -> list[MiniBatch]:
    """Choose the tokens that the loss treats apart, where it does: `algo.covariance`. What was rejected is not asked.

    Every rank of the data mesh must call this. With the step's `seed` the choice is the same however it is cut.
    """
    if not cfg.choice:
        return mini_batches
    return [
        _with_choice(mini_batch, cfg, mesh, seed=mix(seed, number)) if mini_batch else mini_batch
        for number, mini_batch in enumerate(mini_batches)
    ]


def _with_choice(mini_batch: MiniBatch, cfg: LossConfig, mesh: DeviceMesh, *, seed: int) -> MiniBatch:
    assert cfg.formula is not None and cfg.formula.prioritise is not None
    settings = cfg.choice
    fraction = settings.pop("cov_fraction")
    logprobs, advantages, seeds, positions = (
        torch.cat(column) for column in zip(*_columns(mini_batch, seed), strict=True)
    )
    sums = torch.stack([logprobs.sum(), advantages.sum(), logprobs.new_tensor(len(logprobs))])
    logprob, advantage, num_tokens = sum_over(mesh, sums).tolist()
    covariance = covariances(
        logprobs,
        advantages,
        mean_logprob=logprob / max(1.0, num_tokens),
        mean_advantage=advantage / max(1.0, num_tokens),
    )
    priorities = cfg.formula.prioritise(covariance, seeds, positions, **settings)
    count = num_chosen(int(num_tokens), fraction)
    candidates = torch.cat(gather_rows(mesh, highest(priorities, count)[:, None])).flatten()
    chosen = chosen_tokens(priorities, float(highest(candidates, count)[-1])) if count else priorities > 0
    masks = [_counted(pack) for pack in mini_batch]
    parts = chosen.split([int(mask.sum()) for mask in masks])
    return [
        pack.with_columns({"chosen": torch.zeros_like(mask).masked_scatter(mask, part)})
        for pack, mask, part in zip(mini_batch, masks, parts, strict=True)
    ]


def _counted(pack: MicroBatch) -> Tensor:
    """[T] bool: the loss tokens that a correction has not rejected."""
    return pack.loss_mask & (pack.loss_weights != 0)


def _columns(mini_batch: MiniBatch, seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of the tokens that count: old_logprobs and advantages (float64), the sequence's seed, the place in it."""
    columns = []
    for pack in mini_batch:
        assert pack.old_logprobs is not None, "covariances are of the policy before its update"
        of_sequence = torch.tensor([mix(seed, index) for index in pack.sequence_index])
        seeds = on_tokens(of_sequence, pack.cu_seqlens, len(pack.token_ids))
        tokens = (pack.old_logprobs.double(), pack.advantages.double(), seeds, pack.positions)
        columns.append(tuple(column[_counted(pack)] for column in tokens))
    return columns  # type: ignore[return-value]  # four of them each
