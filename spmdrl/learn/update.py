"""The update: forward, backward and one optimizer step for each mini-batch.

Losses are sums. A token's weight in the loss (`MicroBatch.loss_weights`) already holds the one denominator of the
mini-batch over all ranks, and FSDP only sums gradients, so nothing here divides by a number of tokens, micro-batches or
ranks: the gradient is the same however the mini-batch is divided. Ranks of one share (cp, tp) compute the same loss,
and the backward pass of context and tensor parallelism gives each its part of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.algo.metrics import Balance, Deferred, Max, Mean, Metric, Metrics, fetched, merge_all
from spmdrl.dist.collectives import sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.correction import effective_fraction, worst_of
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import Objective, ObjectiveFunction
from spmdrl.learn.optim import set_learning_rates
from spmdrl.model.policy import PackedModel
from spmdrl.model.sharding import reshard
from spmdrl.types import MicroBatch, MiniBatch, TrainingDiverged


def update(learner: Learner, mini_batches: list[MiniBatch], meshes: Meshes, *, step: int) -> Metrics:
    """Take one optimizer step on each mini-batch in turn, then let followers follow; every rank that trains calls it.

    Updates are numbered by step and mini-batch, so that the learning rate does not depend on which are skipped:
    - those of an empty mini-batch, which is empty on every rank;
    - within a step, the first update beyond the learner's KL limit and all that follow;
    - those whose gradients overflow in float16, which lowers the loss scale;
    - those of the learner's frozen steps, whose metrics are computed without an update.

    Raises TrainingDiverged on every rank when the loss or a gradient is not finite on any, or a mismatch limit is
    exceeded: that update changes no weights.
    """
    if step <= learner.frozen_steps:
        return measure(learner, mini_batches, meshes)
    first_number = (step - 1) * len(mini_batches) + 1
    beyond_kl_limit, is_first = False, True
    parts: list[Metrics] = []
    for number, mini_batch in enumerate(mini_batches, start=first_number):
        if not mini_batch:
            continue
        if not beyond_kl_limit:
            result = _optimizer_step(learner, mini_batch, meshes, step=step, number=number, is_first=is_first)
            beyond_kl_limit, is_first = result.beyond_kl_limit, False
            parts.append(result.metrics)
        if learner.guards and learner.guards.stop_kl_nats is not None:
            parts.append({f"{learner.area}/left_out_fraction": Mean(float(beyond_kl_limit), 1.0)})
    follow(learner, step=step)
    return merge_all(parts) if meshes.is_data_leader else {}


def follow(learner: Learner, *, step: int) -> None:
    """Let the copies of the learner's model follow it after a step; every rank that trains must call this."""
    if learner.followers:
        reshard(learner.model)  # without an update, a pass before it may have left weights gathered
    for follower in learner.followers.values():
        follower.follow(learner.model, step)


@torch.no_grad()
def measure(learner: Learner, mini_batches: list[MiniBatch], meshes: Meshes) -> Metrics:
    """Compute the objective's metrics without an update; every rank that trains must call this."""
    device = torch.device(meshes.training.device_type)
    metrics: list[Metrics] = []
    for mini_batch in mini_batches:
        parts = []
        for micro_batch in mini_batch:
            on_device = micro_batch.to(device)
            parts.append(_reduced(learner.objective(learner.model(micro_batch), on_device), on_device))
        metrics += fetched(parts)
    reshard(learner.model)  # what computes next needs the memory
    return merge_all(metrics) if meshes.is_data_leader else {}


@dataclass(slots=True)
class Accumulated:
    """Results of the backward passes before an optimizer step, besides gradients, on this rank."""

    losses: list[Tensor] = field(default_factory=list)  # [] each, of micro-batches
    metrics: list[dict[str, Deferred]] = field(default_factory=list)
    expert_loads: list[Tensor] = field(default_factory=list)  # [L, E] each


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one optimizer step."""

    metrics: Metrics
    beyond_kl_limit: bool = False  # then it changed no weights, and the step's later updates are skipped


def _optimizer_step(
    learner: Learner, mini_batch: MiniBatch, meshes: Meshes, *, step: int, number: int, is_first: bool
) -> Result:
    learner.optimizer.zero_grad(set_to_none=True)
    done = Accumulated()
    forward_backward(learner, learner.objective, mini_batch, meshes, done)
    return optimizer_step(learner, done, meshes, step=step, number=number, is_first=is_first)


def forward_backward(
    learner: Learner, objective: ObjectiveFunction, mini_batch: MiniBatch, meshes: Meshes, done: Accumulated
) -> None:
    """Add the gradients of this rank's micro-batches to those that are there; every rank that trains must call this."""
    device, scale = torch.device(meshes.training.device_type), learner.loss_scale.scale
    with learner.model.summing_gradients():
        for micro_batch in mini_batch:
            on_device = micro_batch.to(device)
            result = objective(learner.model(micro_batch), on_device)
            (result.loss_sum * scale).backward()
            done.losses.append(result.loss_sum.detach())
            done.metrics.append(_reduced(result, on_device))
            if result.expert_loads is not None:
                done.expert_loads.append(result.expert_loads)


def optimizer_step(
    learner: Learner, done: Accumulated, meshes: Meshes, *, step: int, number: int, is_first: bool
) -> Result:
    """Check the limits, then take an optimizer step with the gradients that are there, and clear them.

    `number` counts the run's optimizer steps from 1; `is_first` is True for the step's first update. Every rank that
    trains must call this. Raises TrainingDiverged on all of them, as `update`.
    """
    device, optimizer, scale = torch.device(meshes.training.device_type), learner.optimizer, learner.loss_scale.scale
    area, where = learner.area, f"step {step}, update {number}"
    clear_gradients = partial(optimizer.zero_grad, set_to_none=True)
    # Ranks of a share computed the same loss: each of the n adds an nth, so that the sum over all ranks counts it once.
    local_loss = torch.stack(done.losses).sum() / meshes.ranks_per_share
    local_square = _squared_norm(learner.model, num_ranks=meshes.training.size(), device=device)
    loss, squared_norm = sum_over(meshes.training, torch.stack([local_loss, local_square])).tolist()
    grad_norm = math.sqrt(squared_norm) / scale
    rates = set_learning_rates(optimizer, learner.optim, update=number, num_updates=learner.num_updates)
    metrics = merge_all(fetched(done.metrics)) | {f"{area}/loss": Mean(loss, 1.0)}
    metrics |= {f"{area}/lr{'' if pattern is None else f'/{pattern}'}": Mean(x, 1.0) for pattern, x in rates.items()}
    metrics |= {f"{area}/{name}": Mean(value, 1.0) for name, value in learner.coefficients.items()}

    # A collective: the limits are on the metrics of all ranks. They come first, because a mismatch explains a loss that
    # is not finite.
    beyond_kl_limit = learner.guards is not None and learner.guards.check(metrics, is_first=is_first, where=where)
    if not math.isfinite(loss):
        raise TrainingDiverged(f"{where}: the loss is {loss}; no weights were changed")
    if beyond_kl_limit:
        clear_gradients()
        return Result(metrics, beyond_kl_limit=True)
    if not math.isfinite(grad_norm):
        if not learner.loss_scale.overflowed():
            raise TrainingDiverged(f"{where}: the gradient norm is {grad_norm}; no weights were changed")
        clear_gradients()
        return Result(metrics | {f"{area}/overflow_fraction": Mean(1.0, 1.0)})

    # One factor clips the gradients and takes the loss scale off them again.
    factor = min(1.0, learner.optim.max_grad_norm / (grad_norm + 1e-6)) / scale
    if factor != 1.0:
        gradients = (parameter.grad for parameter in learner.model.parameters())
        torch._foreach_mul_([grad.to_local() for grad in gradients if isinstance(grad, DTensor)], factor)
    optimizer.step()
    _balance_experts(learner, done.expert_loads, meshes)
    learner.model.refresh()
    clear_gradients()
    learner.loss_scale.succeeded()
    if learner.loss_scale.dynamic:
        metrics |= {f"{area}/overflow_fraction": Mean(0.0, 1.0), f"{area}/loss_scale": Mean(scale, 1.0)}
    return Result(metrics | {f"{area}/grad_norm": Mean(grad_norm, 1.0)})


def _balance_experts(learner: Learner, loads: list[Tensor], meshes: Meshes) -> None:
    """Move the biases of experts by the loads of a mini-batch on all ranks, where that is asked for.

    Ranks of a share have the same loads.
    """
    rate, routers = learner.optim.expert_bias_rate, learner.model.routers
    if rate is not None and routers is not None:
        routers.balance(sum_over(meshes.data, torch.stack(loads).sum(0)), rate=rate)


def _squared_norm(model: PackedModel, *, num_ranks: int, device: torch.device) -> Tensor:
    """This rank's part of the squared 2-norm of the whole gradient, which is the sum over the `num_ranks` that train.

    Parameters lie on different meshes, and several ranks may hold the same shard. A shard that n ranks hold counts an
    nth on each of them.
    """
    parts: dict[int, list[Tensor]] = {}  # by the number of ranks that hold the same shard
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            gradient = parameter.grad
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            num_shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
            parts.setdefault(num_ranks // num_shards, []).append(gradient.to_local())
    squares = [
        torch.stack(torch._foreach_norm(gradients)).square().sum() / copies for copies, gradients in parts.items()
    ]
    return torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)


def _reduced(result: Objective, micro_batch: MicroBatch) -> dict[str, Deferred]:
    """Reduce an objective's per-token values over the loss tokens of one micro-batch, without a wait for the device."""
    loss_mask = micro_batch.loss_mask
    columns = torch.stack([*result.means.values(), *result.peaks.values()])
    columns = torch.where(loss_mask, columns, 0.0)
    means = torch.stack([columns.sum(-1).double(), loss_mask.sum().double().expand(len(columns))], 1)
    highest = columns.amax(-1)
    metrics = {name: Deferred(mean, _mean) for name, mean in zip(result.means, means.unbind(), strict=False)}
    peaks = highest[len(result.means) :].unbind()
    metrics |= {name: Deferred(peak, lambda x: Max(*x)) for name, peak in zip(result.peaks, peaks, strict=True)}
    metrics |= {name: worst_of(values, micro_batch) for name, values in result.worst.items()}
    for name, (values, where) in result.elsewhere.items():
        metrics[name] = Deferred(
            torch.stack([torch.where(where, values, 0.0).sum().double(), where.sum().double()]), _mean
        )
    if (loads := result.expert_loads) is not None:
        metrics["experts/max_load_ratio"] = Deferred(loads, partial(_balance, True, loads.shape[1]))
        metrics["experts/load_entropy_fraction"] = Deferred(loads, partial(_balance, False, loads.shape[1]))
    return metrics | {name: effective_fraction(*weights) for name, weights in result.weights.items()}


def _balance(is_peak: bool, num_experts: int, loads: list[float]) -> Metric:
    return Balance(is_peak, num_experts, tuple(loads))


def _mean(numbers: list[float]) -> Metric:
    return Mean(*numbers)
