"""A learner: one model with all that its training changes, and the rules by which it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spmdrl.config import OptimConfig
from spmdrl.learn.limits import Limits
from spmdrl.learn.objective import ObjectiveFunction
from spmdrl.learn.optim import make_optimizer
from spmdrl.model.policy import PackedModel
from spmdrl.model.rates import patterns_of


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
        """Start at 2^16 for float16, else at an inert 1."""
        return cls(scale=65536.0, dynamic=True) if dtype == torch.float16 else cls()

    def overflowed(self) -> bool:
        """Note that gradients are not finite. Returns True when the scale is to blame; it has been lowered then."""
        if not self.dynamic or self.scale <= 1.0:
            return False
        self.scale, self.good_updates = self.scale / 2, 0
        return True

    def succeeded(self) -> None:
        """Note that an optimizer step was taken."""
        self.good_updates += 1
        if self.dynamic and self.good_updates % self.growth_interval == 0:
            self.scale *= 2


@dataclass(frozen=True, slots=True)
class Learner:
    """One model in training: its optimizer and loss scale, what it minimises, and the limits it keeps."""

    model: PackedModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    optim: OptimConfig
    objective: ObjectiveFunction
    num_updates: int  # optimizer steps of the whole run
    limits: Limits | None = None
    area: str = "update"  # the first part of its metrics' names
    frozen_steps: int = 0  # at the start, in which it learns nothing
    coefficients: dict[str, float] = field(default_factory=dict)  # see `coefficients.py`; changed in place

    @classmethod
    def start(
        cls,
        model: PackedModel,
        optim: OptimConfig,
        objective: ObjectiveFunction,
        *,
        num_updates: int,
        dtype: torch.dtype,
        limits: Limits | None = None,
        area: str = "update",
        frozen_steps: int = 0,
        coefficients: dict[str, float] | None = None,
    ) -> Learner:
        """Make a learner that has learned nothing yet; `dtype` is that of forward and backward."""
        return cls(
            model=model,
            optimizer=make_optimizer(model, optim, patterns_of(model.model, optim.rates)),
            loss_scale=LossScale.for_dtype(dtype),
            optim=optim,
            objective=objective,
            num_updates=num_updates,
            limits=limits,
            area=area,
            frozen_steps=frozen_steps,
            coefficients={} if coefficients is None else coefficients,
        )
