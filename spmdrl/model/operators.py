"""Which operators a model computes with: the fast ones, or those of true_on_policy. The kernel's name decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from spmdrl.config import Config
from spmdrl.model import invariant
from spmdrl.model.attention import choose_kernel
from spmdrl.model.kernels import Kernel
from spmdrl.model.linear import use_fast_linears
from spmdrl.model.logprobs import FAST_HEAD, Head


@dataclass(frozen=True, slots=True)
class Operators:
    """What belongs to an attention kernel."""

    install: Callable[[nn.Module], None]  # into a model that is not sharded yet
    head: Head


_FAST = Operators(use_fast_linears, FAST_HEAD)
_INVARIANT = Operators(invariant.use_invariant_operators, Head(invariant.linear, columns=invariant.COLUMNS))


def operators_of(kernel: Kernel) -> Operators:
    """The operators that go with the kernel."""
    return _INVARIANT if kernel == "invariant" else _FAST


def kernel_of_run(cfg: Config, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel of trainer and embedded engine that the settings mean. Raises UserError when it cannot be had."""
    return "invariant" if cfg.true_on_policy else choose_kernel(cfg.model.attention, device_type, dtype)
