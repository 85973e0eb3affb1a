"""Advantages: rewards, compared within prompt groups or credited by turn or token, and what a critic learns from them.

Every rank gathers the rewards of the whole step and computes all groups, so that nothing depends on which rank sampled
a rollout or trains on it. Ranks of a share hold the same micro-batches and compute the same: collectives are over the
data mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.advantage import gae, moments, whiten, with_final_rewards
from spmdrl.algo.formula import Estimator
from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.losses import fit_sums
from spmdrl.algo.metrics import ExplainedVariance, Mean, Metric, Metrics, merge_all
from spmdrl.algo.sequences import on_tokens, sequence_sums
from spmdrl.config import AdvantageConfig, Config
from spmdrl.dist.collectives import gather_rows, raise_on_all_ranks, sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.coefficients import KL_IN_REWARD
from spmdrl.learn.objective import example_micro_batch
from spmdrl.step.batch import Batch
from spmdrl.step.rewards import on_turns, rewards_by_turn, turn_columns, turn_rows
from spmdrl.step.teachers import penalty, sampled_metrics
from spmdrl.types import PADDING_INDEX, MicroBatch, UserError
from spmdrl.user_code import argument_problems, call, load, with_metrics

TURNS_SHOWN = 4  # the first ones of a rollout, which have metrics of their own
# The columns of a micro-batch that an estimator of tokens can ask for, next to token_rewards and those of its turns.
TOKEN_COLUMNS = ("rewards", "rollout_logprobs", "loss_mask", "cu_seqlens", "positions", "token_ids")


@dataclass(frozen=True, slots=True)
class _Penalised:
    """A micro-batch with what the reward takes off its tokens; tensors are [T] float64, 0 outside loss_mask."""

    micro_batch: MicroBatch
    divergence: Tensor  # nats, of the policy from the reference; 0 where there is no reference
    penalty: Tensor  # -kl_coef times the divergence

    def owned_by(self, algorithm: int) -> _Penalised:
        """Return it as the algorithm at this place sees it."""
        micro_batch = self.micro_batch.owned_by(algorithm)
        own = micro_batch.loss_mask
        return _Penalised(micro_batch, *(torch.where(own, x, 0.0) for x in (self.divergence, self.penalty)))

    @property
    def token_rewards(self) -> Tensor:
        """[T] float64: the penalty at each loss token, plus each turn's reward at the turn's last one, plus the rest of
        the rollout's reward at the sequence's last one, with what the parts after it earn."""
        micro_batch = self.micro_batch
        of_turns, earned = rewards_by_turn(micro_batch)
        rest = _rounded(micro_batch.rewards) - earned
        return with_final_rewards(self.penalty, rest, micro_batch.loss_mask, micro_batch.cu_seqlens) + of_turns


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The advantages of one algorithm's rollouts; 0 for those of others."""

    columns: list[Tensor]  # [T] float64 of each micro-batch
    of_rollouts: dict[int, float]  # of all of the step, by index
    metrics: Metrics = field(default_factory=dict)


def add_advantages(batch: Batch, cfg: Config, coefficients: Mapping[str, float], meshes: Meshes) -> Batch:
    """Add `advantages`, and `returns` where there is a critic. Every rank that trains must call this.

    `coefficients` are those that the run adapts: see `learn/coefficients.py`.
    """
    if not batch.micro_batches:  # alike on all ranks: a step without any prompt group
        return batch
    kl_coef = coefficients.get(KL_IN_REWARD, cfg.reward.kl_coef)
    parts = [_penalised(micro_batch, cfg.reward.kl_estimator, kl_coef) for micro_batch in batch.micro_batches]
    found = [_under(parts, cfg.under(one), place, meshes.data) for place, one in enumerate(cfg.algorithms)]
    columns, of_rollouts = found[0].columns, found[0].of_rollouts
    for one in found[1:]:  # 0 wherever another algorithm has its own
        columns = [column + others for column, others in zip(columns, one.columns, strict=True)]
        of_rollouts = {index: value + one.of_rollouts[index] for index, value in of_rollouts.items()}
    completed = [_completed(part, column, cfg) for part, column in zip(parts, columns, strict=True)]
    metrics = [
        *(one.metrics for one in found),
        *_source_metrics(completed, cfg),
        *(_reward_metrics(part, cfg) | sampled_metrics(part.micro_batch) for part in parts),
    ]
    if cfg.environment is not None:
        metrics += [_turn_metrics(micro_batch) for micro_batch in completed]
    if cfg.has_critic:
        metrics += [_critic_metrics(micro_batch) for micro_batch in completed]
    return replace(
        batch.with_micro_batches(completed),
        metrics=merge_all([batch.metrics, *metrics]) if meshes.is_data_leader else batch.metrics,
        advantages=of_rollouts,
    )


def advantage_problems(cfg: Config) -> Iterator[str]:
    """Try an estimator of the user's on a few rewards, and yield a sentence for what is wrong with it."""
    if not cfg.advantage.is_custom:
        return
    setting = f'advantage.estimator = "{cfg.advantage.estimator}"'
    try:
        estimator = _estimator(cfg.advantage)
    except ValueError as error:
        yield f"{setting}: {error}"
        return
    part = _penalised(example_micro_batch(cfg), cfg.reward.kl_estimator, cfg.reward.kl_coef)
    rewards = torch.linspace(0.0, 1.0, 2 * cfg.rollout.group_size, dtype=torch.float64).view(2, -1)
    by_name = _token_columns(part) if estimator.per_token else _group_columns(rewards, torch.full_like(rewards, 3.0))
    if sentences := list(argument_problems(estimator.function, by_name, cfg.advantage.params)):
        yield from (f"{setting}: {sentence}" for sentence in sentences)
        return
    if not {"rewards", "token_rewards"} & set(estimator.needs):
        yield f"{setting} takes neither rewards, [P, G] of the groups, nor token_rewards, [T] of the tokens"
        return
    if estimator.per_token and cfg.loss.formula is not None and cfg.loss.formula.per_sequence:
        yield (
            f'{setting} gives each token an advantage, but loss.kind = "{cfg.loss.kind}" knows one for all tokens of a '
            "response; change one of them"
        )
    if estimator.per_token and cfg.rollout.dynamic_sampling:
        yield (
            f"{setting} gives each token an advantage, but rollout.dynamic_sampling = true drops groups of equal "
            "rewards, which do teach something then; remove one of them"
        )
    try:
        _estimated(estimator, cfg.advantage, by_name)
    except UserError as error:
        yield str(error)
    except Exception as error:  # the function is the user's: calling it can raise anything
        yield f"{setting} does not work: {type(error).__name__}: {error}"


def _estimator(cfg: AdvantageConfig) -> Estimator:
    """The estimator with what its function takes. Raises ValueError when that is the user's and cannot be loaded."""
    if not cfg.is_custom:
        return cfg.formula
    return replace(cfg.formula, name=cfg.estimator, needs=tuple(inspect.signature(load(cfg.estimator)).parameters))


def _estimated(
    estimator: Estimator, cfg: AdvantageConfig, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Advantages float64, shaped as the rewards, and metrics. Raises UserError where the user's function errs."""
    advantages, metrics = with_metrics(call(estimator.function, columns, cfg.settings))
    if cfg.is_custom:
        shape = columns["token_rewards" if estimator.per_token else "rewards"].shape
        if not isinstance(advantages, Tensor) or advantages.shape != shape:
            found = list(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
            raise UserError(
                f'advantage.estimator = "{cfg.estimator}" returned {found}; return an advantage for each reward, '
                f"{list(shape)}"
            )
        seen = advantages[columns["loss_mask"]] if estimator.per_token else advantages
        if not seen.isfinite().all():
            raise UserError(f'advantage.estimator = "{cfg.estimator}" returned advantages that are not finite')
    return advantages.double(), metrics


def _under(parts: list[_Penalised], cfg: Config, place: int, mesh: DeviceMesh) -> _Estimate:
    """Estimate the advantages of the rollouts whose algorithm is at this place, with `cfg`, the run under it."""
    estimator = _estimator(cfg.advantage)
    estimate = _by_token if estimator.per_token else _by_turn if estimator.per_turn else _by_group
    return estimate([part.owned_by(place) for part in parts], estimator, cfg, place, mesh)


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


def _by_group(parts: list[_Penalised], estimator: Estimator, cfg: Config, place: int, mesh: DeviceMesh) -> _Estimate:
    """Estimate one advantage for each rollout; of groups that another algorithm has, it is 0."""
    (rewards, num_tokens, greedy), is_own = _of_groups(parts, cfg, place, mesh)
    advantages, metrics = torch.zeros_like(rewards), dict[str, Metric]()
    if is_own.any():
        rewards, num_tokens, greedy = rewards[is_own], num_tokens[is_own], greedy[is_own]
        columns = _group_columns(rewards, num_tokens) | {"greedy_rewards": greedy[:, 0]}
        own, reported = _estimated(estimator, cfg.advantage, columns)
        advantages[is_own] = whiten(own, moments(own, num_tokens)) if cfg.advantage.whitens else own
        metrics = {name: Mean.of(torch.as_tensor(values).flatten().tolist()) for name, values in reported.items()}
    with_filling = torch.cat([advantages.flatten(), advantages.new_zeros(1)])  # at PADDING_INDEX, which is -1
    on_tokens_of_parts = [
        on_tokens(with_filling[torch.tensor(m.sequence_index)], m.cu_seqlens, len(m.token_ids))
        for m in (part.micro_batch for part in parts)
    ]
    return _Estimate(on_tokens_of_parts, dict(enumerate(advantages.flatten().tolist())), _named(metrics))


def _by_turn(parts: list[_Penalised], estimator: Estimator, cfg: Config, place: int, mesh: DeviceMesh) -> _Estimate:
    """Estimate one advantage for each turn; there are no metrics."""
    (rewards, _, _), is_own = _of_groups(parts, cfg, place, mesh)
    rows = _gathered([turn_rows(part.micro_batch) for part in parts], mesh)
    of_turns: dict[tuple[int, int], float] = {}
    if is_own.any():
        group_size = cfg.rollout.group_size
        rows = rows[is_own[rows[:, 0].long() // group_size]]
        turn_rollouts, numbers, num_tokens, turn_rewards, turn_states, turn_roles, turn_teams = rows.T.contiguous()
        index = turn_rollouts.long()
        columns = {
            "rewards": rewards[is_own],
            "turn_rewards": turn_rewards,
            "turn_rollouts": (is_own.cumsum(0) - 1)[index // group_size] * group_size + index % group_size,
            "turn_states": turn_states.long(),
            "turn_roles": turn_roles.long(),
            "turn_teams": turn_teams.long(),
        }
        advantages, _ = _estimated(estimator, cfg.advantage, columns)
        if cfg.advantage.whitens:
            advantages = whiten(advantages, moments(advantages, num_tokens))
        keys = zip(index.tolist(), numbers.long().tolist(), strict=True)
        of_turns = dict(zip(keys, advantages.tolist(), strict=True))
    on_tokens_of_parts = [on_turns(part.micro_batch, of_turns) for part in parts]
    return _Estimate(on_tokens_of_parts, _means(parts, on_tokens_of_parts, mesh))


def _group_columns(rewards: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
    return {"rewards": rewards, "num_tokens": num_tokens}


def _of_groups(parts: list[_Penalised], cfg: Config, place: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """[3, P, G] float64, of all rollouts: reward with its penalties, loss tokens, the greedy reward; and [P] bool, the
    groups whose algorithm is at this place."""
    rows = _gathered([_reward_rows(part, cfg) for part in parts], mesh)
    index, part_number, rewards, penalties, num_tokens, greedy, algorithm = rows.T.contiguous()
    offsets = _offsets(index, part_number)
    firsts = offsets[:-1]
    columns = [rewards[firsts] + sequence_sums(penalties, offsets), sequence_sums(num_tokens, offsets), greedy[firsts]]
    group_size = cfg.rollout.group_size
    return torch.stack(columns).view(3, -1, group_size), algorithm[firsts].view(-1, group_size)[:, 0] == place


def _offsets(index: Tensor, part_number: Tensor) -> Tensor:
    """[n+1] int64: where the rows of each of n rollouts begin, and their number; rows are in the step's order."""
    firsts = torch.nonzero(part_number == 0).flatten()
    of_row = (part_number == 0).cumsum(0) - 1
    in_order = torch.equal(index, of_row.double())
    assert in_order and torch.equal(part_number, (torch.arange(len(index)) - firsts[of_row]).double()), (
        "a sequence is missing, or there twice"
    )
    return torch.cat([firsts, torch.tensor([len(index)])])


def _reward_rows(part: _Penalised, cfg: Config) -> Tensor:
    """[S, 7] float64: place in the step's order, reward, its penalties, loss tokens, the greedy reward, place of the
    algorithm."""
    micro_batch, first_tokens = part.micro_batch, part.micro_batch.cu_seqlens[:-1].long()
    rewards = micro_batch.rewards[first_tokens]
    penalties = sequence_sums(part.penalty, micro_batch.cu_seqlens)
    num_tokens = sequence_sums(micro_batch.loss_mask.double(), micro_batch.cu_seqlens)
    columns = [
        _rounded(rewards) if cfg.reward.kl_coef > 0 else rewards,
        penalties,
        num_tokens,
        micro_batch.baseline_rewards[first_tokens],
        torch.tensor(micro_batch.sequence_algorithm, dtype=torch.float64),
    ]
    return torch.cat([_places(micro_batch), torch.stack(columns, dim=1)], dim=1)


def _by_token(parts: list[_Penalised], estimator: Estimator, cfg: Config, place: int, mesh: DeviceMesh) -> _Estimate:
    """Estimate an advantage for each token; those of rollouts are the means over their loss tokens."""
    with raise_on_all_ranks(mesh) if cfg.advantage.is_custom else nullcontext():
        estimated = [_estimated(estimator, cfg.advantage, _token_columns(part)) for part in parts]
    masks = [part.micro_batch.loss_mask for part in parts]
    advantages = [torch.where(mask, column, 0.0) for mask, (column, _) in zip(masks, estimated, strict=True)]
    if cfg.advantage.whitens:
        sums = sum_over(mesh, sum(map(moments, advantages, masks), torch.zeros(3, dtype=torch.float64)))
        advantages = [torch.where(mask, whiten(x, sums), 0.0) for mask, x in zip(masks, advantages, strict=True)]
    metrics: list[Metrics] = [
        {name: Mean.of(values[mask].tolist()) for name, values in reported.items()}
        for mask, (_, reported) in zip(masks, estimated, strict=True)
    ]
    return _Estimate(advantages, _means(parts, advantages, mesh), _named(merge_all(metrics)))


def _token_columns(part: _Penalised) -> dict[str, Tensor]:
    """The columns that an estimator of tokens can ask for; values are among them where there is a critic."""
    columns = {name: part.micro_batch.columns[name] for name in TOKEN_COLUMNS if name in part.micro_batch.columns}
    if part.micro_batch.values is not None:
        columns["values"] = part.micro_batch.values.double()
    return {"token_rewards": part.token_rewards} | columns | turn_columns(part.micro_batch)


def _named(metrics: Metrics) -> Metrics:
    return {f"advantage/{name}": metric for name, metric in metrics.items()}


def _means(parts: list[_Penalised], advantages: list[Tensor], mesh: DeviceMesh) -> dict[int, float]:
    """The mean advantage of the loss tokens of each of the step's rollouts, by index; 0 where there are none."""
    rows = [_sum_rows(part.micro_batch, column) for part, column in zip(parts, advantages, strict=True)]
    index, part_number, totals, counts = _gathered(rows, mesh).T.contiguous()
    offsets = _offsets(index, part_number)
    means = sequence_sums(totals, offsets) / sequence_sums(counts, offsets).clamp(min=1)
    return dict(enumerate(means.tolist()))


def _sum_rows(micro_batch: MicroBatch, advantages: Tensor) -> Tensor:
    """[S, 4] float64: place in the step's order, sum of the advantages of the loss tokens, number of these."""
    mask, cu_seqlens = micro_batch.loss_mask, micro_batch.cu_seqlens
    sums = [sequence_sums(values, cu_seqlens) for values in (torch.where(mask, advantages, 0.0), mask.double())]
    return torch.cat([_places(micro_batch), torch.stack(sums, dim=1)], dim=1)


def _places(micro_batch: MicroBatch) -> Tensor:
    return torch.tensor(micro_batch.places, dtype=torch.float64)


def _gathered(rows: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """[N, k]: the rows of all ranks in the step's order, which their first two entries are; no filling."""
    mine = torch.cat(rows)
    everyone = torch.cat(gather_rows(mesh, mine[mine[:, 0] != PADDING_INDEX]))
    for column in (1, 0):
        everyone = everyone[everyone[:, column].argsort(stable=True)]
    return everyone


def _completed(part: _Penalised, advantages: Tensor, cfg: Config) -> MicroBatch:
    """The micro-batch with advantages, less the divergence from its teacher at sampled tokens; and with a critic's
    returns: its values plus advantages that are not whitened."""
    micro_batch = part.micro_batch
    mask = micro_batch.loss_mask
    if cfg.distill is not None:
        advantages = advantages - penalty(micro_batch)
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


def _source_metrics(micro_batches: list[MicroBatch], cfg: Config) -> Iterator[Metrics]:
    """Yield the mean size of the advantages of each algorithm's loss tokens, where there are several."""
    algorithms = cfg.algorithms
    for place, one in enumerate(algorithms if len(algorithms) > 1 else ()):
        for micro_batch in () if one.name is None else micro_batches:
            assert micro_batch.advantages is not None
            size = micro_batch.advantages[micro_batch.owned_by(place).loss_mask].abs().double()
            yield {f"advantage/size_{one.name}": Mean(float(size.sum()), float(len(size)))}


def _turn_metrics(micro_batch: MicroBatch) -> Metrics:
    """The mean advantage of the loss tokens of each of a rollout's first turns."""
    assert micro_batch.advantages is not None
    turn = turn_columns(micro_batch)["turn"]
    found = {number: micro_batch.advantages[micro_batch.loss_mask & (turn == number)] for number in range(TURNS_SHOWN)}
    return {
        f"advantage/turn_{number}_mean": Mean(float(values.double().sum()), float(len(values)))
        for number, values in found.items()
        if len(values)
    }


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
