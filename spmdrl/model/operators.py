"""Which operators a model computes with: the fast ones, or those of true_on_policy. The kernel's name decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from spmdrl.config import Config, SftConfig
from spmdrl.config.engines import ENGINES, engine_facts
from spmdrl.model import invariant, logprobs, sglang_operators
from spmdrl.model.attention import choose_kernel
from spmdrl.model.kernels import Kernel
from spmdrl.model.linear import use_fast_linears
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class Operators:
    """What belongs to an attention kernel."""

    install: Callable[[nn.Module], None]  # into a model that is not sharded yet
    score: Callable[..., tuple[Tensor, Tensor]]  # as `logprobs.next_token_scores`, without its `head`
    casts_inputs: bool = True  # whether what enters a decoder layer gets the dtype of its weights
    switches: tuple[str, ...] = ()  # what they do otherwise than the fast ones, to be shown


_FAST = Operators(use_fast_linears, logprobs.next_token_scores)
_INVARIANT = Operators(
    invariant.use_invariant_operators,
    functools.partial(logprobs.next_token_scores, head=invariant.HEAD),
    switches=invariant.SWITCHES,
)


def operators_of(kernel: Kernel) -> Operators:
    """The operators that go with the kernel."""
    if kernel == "invariant":
        return _INVARIANT
    if kernel == "sglang_fa3" or kernel == "sglang_triton":
        return Operators(
            sglang_operators.use_engine_operators,
            sglang_operators.next_token_scores,
            casts_inputs=False,
            switches=sglang_operators.switches("fa3" if kernel == "sglang_fa3" else "triton"),
        )
    return _FAST


def kernel_of_run(cfg: Config | SftConfig, device_type: str, dtype: torch.dtype) -> Kernel:
    """Choose the kernel of the trainer, and of an embedded engine. Raises UserError when it is not available."""
    if isinstance(cfg, SftConfig) or not cfg.true_on_policy:
        return choose_kernel(cfg.model.attention, device_type, dtype)
    kernels = engine_facts(cfg.rollout.engine).exact_kernels.get(device_type, {})
    if cfg.rollout.attention_backend not in kernels:
        here = "a CUDA device" if device_type == "cuda" else "a CPU"
        exact = next(name for name, (_, facts) in ENGINES.items() if device_type in facts.exact_kernels)
        raise UserError(
            f'true_on_policy = true has no exact kernels for rollout.engine = "{cfg.rollout.engine}" on {here}; set '
            f'rollout.engine = "{exact}", or true_on_policy = false'
        )
    return cast(Kernel, kernels[cfg.rollout.attention_backend])
