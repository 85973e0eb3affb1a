"""Tables about the optimizer, and about the critic that has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from spmdrl.config.base import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    Section,
    rule,
    unused_settings,
)

NormLimit = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]  # nothing is multiplied by it; 1e30 clips nothing


class OptimConfig(Section):
    name: str = "adamw"
    """`adamw` (fused where it works), `sgd`, or a class of yours, `package.module:Class` or `path/file.py:Class`."""
    lr: Positive
    """Peak learning rate."""
    rates: dict[str, NonNegative] = Field(default_factory=dict)
    """Peak learning rates of parameters that do not learn at `lr`, by patterns of their names in the base model, as in
    `model.freeze`, such as `{ "visual.*" = 1e-7 }`; no parameter may match two. The schedule scales them too, and 0
    leaves weights as they are. A critic has them as well, where it has such parameters."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """`adamw` only."""
    eps: Positive = 1e-8
    """`adamw` only."""
    momentum: BelowOne = 0.0
    """`sgd` only."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a class of yours."""
    max_grad_norm: NormLimit = 1.0
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up; `wsd` stays at the peak, then falls linearly over the last `decay_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the peak."""
    decay_steps: NonNegativeInt = 0
    """`wsd` only: length of the fall."""
    min_lr_fraction: Fraction = 0.0
    """The schedule never goes below this times `lr` after warm-up."""
    expert_bias_rate: Positive | None = None
    """Mixtures that choose experts by scores with a bias, such as DeepSeek-V3: after each update, the bias of an
    expert that had fewer of its loss tokens than the mean of its layer is raised by this, and that of one with more is
    lowered (arXiv:2408.15664). 0.001 is usual. Unset: biases stay as they are."""
    state_on_host: bool = False
    """Keep the optimizer's state in pinned host memory and bring it to the device for a block of parameters at a time.
    The optimizer must treat each parameter by itself, as all of torch's but LBFGS do."""


@rule(OptimConfig)
def settings_belong_to_the_optimizer(optim: OptimConfig) -> Iterator[str]:
    used = {"adamw": ["betas", "eps"], "sgd": ["momentum"]}.get(optim.name, ["params"])
    others = [name for name in ("betas", "eps", "momentum", "params") if name not in used]
    yield from unused_settings(optim, others, f'name = "{optim.name}"')


@rule(OptimConfig)
def state_on_host_needs_state(optim: OptimConfig) -> Iterator[str]:
    if optim.state_on_host and optim.name == "sgd" and optim.momentum == 0:
        yield (
            'state_on_host = true has nothing to keep on the host: name = "sgd" with momentum = 0 has no state; '
            "remove it"
        )


@rule(OptimConfig)
def decay_steps_belong_to_wsd(optim: OptimConfig) -> Iterator[str]:
    if (optim.schedule == "wsd") != (optim.decay_steps > 0):
        yield (
            f'schedule = "{optim.schedule}" with decay_steps = {optim.decay_steps}: decay_steps is the length of the '
            'fall of schedule = "wsd"; set both or neither'
        )


class CriticConfig(Section):
    path: PathText | None = None
    """A model directory, as for `model.path`, with the same tokens. Its language head is replaced by a value head that
    starts at 0. Unset: `model.path`. The other settings of `[model]` hold for both."""
    lr: Positive | None = None
    """Peak learning rate of the critic. Unset: `optim.lr`. Settings of `[optim]` that are not here hold for both."""
    weight_decay: NonNegative | None = None
    """Weight decay of the critic. Unset: `optim.weight_decay`."""
    max_grad_norm: NormLimit | None = None
    """Largest gradient norm of the critic. Unset: `optim.max_grad_norm`."""
    clip_value: Annotated[float, Field(gt=0.0)] = 0.2
    """Clip range of a value around its value before the step's updates, in units of the reward; `inf` clips nothing."""
    gae_lambda: Fraction | None = None
    """`gae_lambda` of the returns that the critic learns; 1 makes them the rewards. Unset: `advantage.gae_lambda`."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which the critic learns and the policy does not change."""
