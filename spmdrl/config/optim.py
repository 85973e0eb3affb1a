"""Tables about the optimizer, and about the critic that has one of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spmdrl.config.base import BelowOne, Fraction, NonNegative, Positive, Section


class OptimConfig(Section):
    name: str = "adamw"
    """`adamw` (fused where it works), `sgd`, or `package.module:Class`."""
    lr: Positive
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """`adamw` only."""
    eps: Positive = 1e-8
    """`adamw` only."""
    momentum: BelowOne = 0.0
    """`sgd` only."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for an optimizer named by `package.module:Class`."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up; `wsd` stays at the peak, then falls linearly over the last `decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps from 0 to the peak."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """`wsd` only: length of the fall."""
    min_lr_fraction: Fraction = 0.0
    """The schedule never goes below this times `lr` after warm-up."""
    state_on_host: bool = False
    """Keep the optimizer's state in pinned host memory and bring it to the device for a block of parameters at a time.
    The optimizer must treat each parameter by itself, as all of torch's but LBFGS do."""

    @model_validator(mode="after")
    def _settings_belong_to_the_optimizer(self) -> OptimConfig:
        used = {"adamw": {"betas", "eps"}, "sgd": {"momentum"}}.get(self.name, {"params"})
        for setting in ("betas", "eps", "momentum", "params"):
            if setting not in used and getattr(self, setting) != type(self).model_fields[setting].get_default(
                call_default_factory=True
            ):
                raise ValueError(f'{setting} has no meaning for name = "{self.name}"; remove it')
        return self

    @model_validator(mode="after")
    def _there_is_state_to_keep(self) -> OptimConfig:
        if self.state_on_host and self.name == "sgd" and self.momentum == 0:
            raise ValueError(
                'state_on_host = true has nothing to keep on the host: name = "sgd" with momentum = 0 has no state; '
                "remove it"
            )
        return self

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> OptimConfig:
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f'schedule = "{self.schedule}" with decay_steps = {self.decay_steps}: decay_steps is the length of the '
                'fall of schedule = "wsd"; set both or neither'
            )
        return self


class CriticConfig(Section):
    path: str | None = None
    """A directory as `model.path` takes one, of a model for the same tokens; its language head is replaced by a head of
    values, 0 at first. Unset: `model.path`. The other settings of `[model]` hold for both."""
    lr: Positive | None = None
    """Peak learning rate of the critic. Unset: `optim.lr`. Of `[optim]` all that is not set here holds for both."""
    weight_decay: NonNegative | None = None
    """Unset: `optim.weight_decay`."""
    max_grad_norm: Positive | None = None
    """Unset: `optim.max_grad_norm`."""
    clip_value: Annotated[float, Field(gt=0.0)] = 0.2
    """How far, in units of the reward, a step's updates may move a value before its loss stops falling; `inf` clips
    nothing."""
    gae_lambda: Fraction | None = None
    """That of the returns which the critic learns; 1 makes them what was rewarded. Unset: `advantage.gae_lambda`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the critic learns and the policy stays what it is."""
