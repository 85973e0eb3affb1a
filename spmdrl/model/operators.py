"""The operators that a model computes with: the fast ones, or exact ones. The attention kernel's name decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from spmdrl.config import Config, SftConfig
from spmdrl.config.engines import ENGINES, engine_facts
from spmdrl.model import logprobs
from spmdrl.model.attention import choose_kernel
from spmdrl.model.compiled import compiled_in_use
from spmdrl.model.exact import invariant, sglang_operators
from spmdrl.model.fused import use_fused_layers
from spmdrl.model.kernels import Kernel
from spmdrl.model.linear import linear, use_fast_linears
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that go with an attention kernel."""

    install: Callable[[nn.Module], None]  # into a model that is not sharded yet
    token_logprobs: Callable[..., tuple[Tensor, Tensor]]  # as `logprobs.next_token_logprobs`, without its `head`
    linear: Callable[..., Tensor] = linear  # x [..., D], a weight [V, D], maybe a bias [V] give [..., V]
    casts_inputs: bool = True  # whether FSDP casts a decoder layer's inputs to the dtype of its weights
    switches: tuple[str, ...] = ()  # lines for the user: how they differ from the fast operators


def _use_fast_layers(model: nn.Module) -> None:
    """Replace linear layers, and the others where functions in C compute them: fused in torch they are no faster."""
    if compiled_in_use() and all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        use_fused_layers(model)
    else:
        use_fast_linears(model)


_FAST = Operators(_use_fast_layers, logprobs.next_token_logprobs)
_FUSED = Operators(use_fused_layers, logprobs.next_token_logprobs)
_INVARIANT = Operators(
    invariant.use_invariant_operators,
    functools.partial(logprobs.next_token_logprobs, head=invariant.HEAD),
    linear=invariant.linear,
    switches=invariant.SWITCHES,
)


def operators_of(kernel: Kernel) -> Operators:
    """Return the operators that go with the kernel."""
    if kernel == "invariant":
        return _INVARIANT
    if kernel == "sglang_fa3" or kernel == "sglang_triton":
        return Operators(
            sglang_operators.use_engine_operators,
            sglang_operators.next_token_logprobs,
            casts_inputs=False,
            switches=sglang_operators.switches("fa3" if kernel == "sglang_fa3" else "triton"),
        )
    return _FAST if kernel == "sdpa" else _FUSED  # all others run on CUDA, in half precision


def kernel_of_run(cfg: Config | SftConfig, device_type: str, dtype: torch.dtype) -> Kernel:
    """Choose the attention kernel of the trainer and of the torch engine. Raises UserError when it cannot run here."""
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
