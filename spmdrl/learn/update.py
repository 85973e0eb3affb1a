"""The update: forward, backward and one optimizer step per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.algo.metrics import Max, Mean, Metrics, merge_all
from spmdrl.config import OptimConfig
from spmdrl.dist.collectives import sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.limits import Guard
from spmdrl.learn.mismatch import effective_fraction, worst_of
from spmdrl.learn.objective import Objective, ObjectiveFunction
from spmdrl.learn.optim import make_optimizer, set_learning_rate
from spmdrl.model.load import reshard
from spmdrl.model.policy import PackedModel
from spmdrl.types import MicroBatch, MiniBatch, TrainingDiverged


@dataclass(slots=True)
class LossScale:
    """Dynamic scaling of the loss, so that float16 gradients do not underflow; 1 and inert for other dtypes.

    An overflow halves the scale and leaves the weights alone; `growth_interval` updates without one double it.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_interval: int = 200
    good_updates: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScale:
        """2^16 for float16, else none."""
        return cls(scale=65536.0, dynamic=True) if dtype == torch.float16 else cls()

    def overflowed(self) -> bool:
        """Called when gradients are not finite: True when the scale is to blame and has been lowered."""
        if not self.dynamic or self.scale <= 1.0:
            return False
        self.scale, self.good_updates = self.scale / 2, 0
        return True

    def succeeded(self) -> None:
        """Called after an optimizer step."""
        self.good_updates += 1
        if self.dynamic and self.good_updates % self.growth_interval == 0:
            self.scale *= 2


@dataclass(frozen=True, slots=True)
class Learner:
    """What training changes of one model: weights, the optimizer's state, the loss scale, adapted coefficients."""

    model: PackedModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    optim: OptimConfig
    num_updates: int  # optimizer steps of the whole run
    area: str = "update"  # what its metrics are under
    frozen_steps: int = 0  # at the start, in which it learns nothing
    coefficients: dict[str, float] = field(default_factory=dict)  # see `coefficients.py`; changed in place

    @classmethod
    def start(
        cls,
        model: PackedModel,
        optim: OptimConfig,
        *,
        num_updates: int,
        dtype: torch.dtype,
        area: str = "update",
        frozen_steps: int = 0,
        coefficients: Mapping[str, float] = MappingProxyType({}),
    ) -> Learner:
        """A learner that has learned nothing yet; `dtype` is that of forward and backward."""
        optimizer, scale = make_optimizer(model, optim), LossScale.for_dtype(dtype)
        return cls(model, optimizer, scale, optim, num_updates, area, frozen_steps, dict(coefficients))


def update(
    learner: Learner,
    mini_batches: list[MiniBatch],
    objective: ObjectiveFunction,
    meshes: Meshes,
    *,
    step: int,
    guard: Guard | None = None,
) -> Metrics:
    """One optimizer step on each mini-batch in turn; every rank that trains takes part.

    A mini-batch that is empty, as it then is on every rank, moves nothing but is counted: the learning rate stays tied
    to the step. So is one that is left out: the first of which the guard says that the policy has gone too far, and
    those after it, and all of the learner's frozen steps, in which the objective's numbers are reported all the same.

    Raises TrainingDiverged on every rank when the loss or a gradient is not finite anywhere, and when the guard
    objects.
    """
    if step <= learner.frozen_steps:
        return _measured(learner, mini_batches, objective, meshes)
    first, stopped = (step - 1) * len(mini_batches) + 1, False
    parts: list[Metrics] = []
    for number, mini_batch in enumerate(mini_batches, start=first):
        if mini_batch and not stopped:
            cause = f"step {step}, update {number}"
            check = partial(guard.check, first=not parts, cause=cause) if guard else None
            metrics, stopped = _optimizer_step(
                learner, mini_batch, objective, meshes, number=number, cause=cause, check=check
            )
            parts.append(metrics)
        if mini_batch and guard and guard.stop_kl_nats is not None:
            parts.append({f"{learner.area}/left_out_fraction": Mean(float(stopped), 1.0)})
    return merge_all(parts) if meshes.speaks_for_data else {}


@torch.no_grad()
def _measured(learner: Learner, mini_batches: list[MiniBatch], objective: ObjectiveFunction, meshes: Meshes) -> Metrics:
    """What the objective says about the mini-batches, without an update."""
    device = torch.device(meshes.training.device_type)
    metrics: list[Metrics] = []
    for micro_batch in (pack for mini_batch in mini_batches for pack in mini_batch):
        on_device = micro_batch.to(device)
        metrics.append(_reduced(objective(learner.model(on_device), on_device), on_device))
    reshard(learner.model)  # what is updated next needs the memory
    return merge_all(metrics) if meshes.speaks_for_data else {}


def _optimizer_step(
    learner: Learner,
    mini_batch: MiniBatch,
    objective: ObjectiveFunction,
    meshes: Meshes,
    *,
    number: int,
    cause: str,
    check: Callable[[Metrics], bool] | None,
) -> tuple[Metrics, bool]:
    """Forward and backward on this rank's micro-batches, then one step, unless `check`, which sees what this rank
    measured, says on all ranks that the policy has gone too far: then the second value is True. `number` counts
    optimizer steps from 1."""
    device, optimizer, scale = torch.device(meshes.training.device_type), learner.optimizer, learner.loss_scale.scale
    losses: list[Tensor] = []
    parts: list[Metrics] = []
    optimizer.zero_grad(set_to_none=True)
    for micro_batch in mini_batch:
        on_device = micro_batch.to(device)
        result = objective(learner.model(on_device), on_device)
        (result.loss_sum * scale).backward()
        losses.append(result.loss_sum.detach())
        parts.append(_reduced(result, on_device))

    gradients = _local_gradients(learner.model)
    local_sums = torch.stack(
        [
            torch.stack(losses).sum() / meshes.ranks_per_share,
            _squared_norm(learner.model, num_ranks=meshes.training.size(), device=device),
        ]
    )
    loss, squared_norm = sum_over(meshes.training, local_sums).tolist()
    grad_norm = math.sqrt(squared_norm) / scale if squared_norm >= 0 else math.nan
    lr = set_learning_rate(optimizer, learner.optim, update=number, num_updates=learner.num_updates)
    area = learner.area
    metrics = merge_all(parts) | {f"{area}/loss": Mean(loss, 1.0), f"{area}/lr": Mean(lr, 1.0)}
    metrics |= {f"{area}/{name}": Mean(value, 1.0) for name, value in learner.coefficients.items()}

    too_far = check is not None and check(metrics)
    if not math.isfinite(loss):
        raise TrainingDiverged(f"{cause}: the loss is {loss}; no weights were changed")
    if too_far:
        optimizer.zero_grad(set_to_none=True)
        return metrics, True
    if not math.isfinite(grad_norm):
        if not learner.loss_scale.overflowed():
            raise TrainingDiverged(f"{cause}: the gradient norm is {grad_norm}; no weights were changed")
        optimizer.zero_grad(set_to_none=True)
        return metrics | {f"{area}/overflow_fraction": Mean(1.0, 1.0)}, False

    factor = min(1.0, learner.optim.max_grad_norm / (grad_norm + 1e-6)) / scale
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    learner.loss_scale.succeeded()
    if learner.loss_scale.dynamic:
        metrics |= {f"{area}/overflow_fraction": Mean(0.0, 1.0), f"{area}/loss_scale": Mean(scale, 1.0)}
    return metrics | {f"{area}/grad_norm": Mean(grad_norm, 1.0)}, False


def _local_gradients(model: PackedModel) -> list[Tensor]:
    """This rank's shards of the gradients."""
    return [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]


def _squared_norm(model: PackedModel, *, num_ranks: int, device: torch.device) -> Tensor:
    """This rank's part of the square of the gradient's 2-norm; the sum over the `num_ranks` that train is all of it.

    Parameters lie on different meshes, and some on several ranks alike: what n ranks hold counts an nth on each.
    """
    parts: dict[int, list[Tensor]] = {}  # by the number of ranks that hold the same
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


def _reduced(result: Objective, micro_batch: MicroBatch) -> Metrics:
    """What an objective says about the loss tokens of one micro-batch; waits for the device."""
    loss_mask = micro_batch.loss_mask
    names, peaks = list(result.means), list(result.peaks)
    columns = torch.stack([*result.means.values(), *result.peaks.values()])
    columns = torch.where(loss_mask, columns, 0.0)
    sums, highest = columns.sum(-1).tolist(), columns.amax(-1).tolist()
    count = float(loss_mask.sum())
    metrics: Metrics = {name: Mean(total, count) for name, total in zip(names, sums, strict=False)}
    metrics |= {name: Max(peak) for name, peak in zip(peaks, highest[len(names) :], strict=True)}
    metrics |= {name: worst_of(values, micro_batch) for name, values in result.worst.items()}
    return metrics | {name: effective_fraction(weights, loss_mask) for name, weights in result.weights.items()}
