"""The layers and the head's functions (`next_token_logprobs` and the like) that go with an attention kernel: fast,
fused or exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from spmdrl.model import divergence, logprobs
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.exact import invariant, sglang_operators
from spmdrl.model.fused import fused_layers
from spmdrl.model.kernels import Kernel
from spmdrl.model.linear import linear

# The layers of a model that are replaced, each with its new class. The model is not sharded yet, and may be on the meta
# device; it will be on this kind of device.
Layers = Callable[[nn.Module, str], Iterator[tuple[nn.Module, type[nn.Module]]]]


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that go with an attention kernel."""

    layers: Layers
    next_token_logprobs: Callable[..., tuple[Tensor, Tensor]]  # as `logprobs.next_token_logprobs`, without its `head`
    next_token_logprobs_of: Callable[..., tuple[Tensor, Tensor, Tensor]] = logprobs.next_token_logprobs_of  # likewise
    # As `divergence.next_token_divergence`, without its `head`.
    next_token_divergence: Callable[..., tuple[Tensor, Tensor, Tensor]] = divergence.next_token_divergence
    linear: Callable[..., Tensor] = linear  # x [..., D], a weight [V, D], maybe a bias [V] give [..., V]
    casts_inputs: bool = True  # whether FSDP casts a decoder layer's inputs to the dtype of its weights
    switches: tuple[str, ...] = ()  # lines for the user: how they differ from the fast operators


def _plain(model: nn.Module, device_type: str) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield what the room for a CPU replaces, and nothing elsewhere."""
    room = cpu_room() if device_type == "cpu" else None
    return iter(()) if room is None else room.layers(model)


_FAST = Operators(_plain, logprobs.next_token_logprobs)
_FUSED = Operators(lambda model, _: fused_layers(model), logprobs.next_token_logprobs)
_INVARIANT = Operators(
    lambda model, _: invariant.invariant_layers(model),
    functools.partial(logprobs.next_token_logprobs, head=invariant.HEAD),
    functools.partial(logprobs.next_token_logprobs_of, head=invariant.HEAD),
    functools.partial(divergence.next_token_divergence, head=invariant.HEAD),
    linear=invariant.linear,
    switches=invariant.SWITCHES,
)


def operators_of(kernel: Kernel) -> Operators:
    """Return the operators that go with the kernel."""
    if kernel == "invariant":
        return _INVARIANT
    if kernel == "sglang_fa3" or kernel == "sglang_triton":
        return Operators(
            lambda model, _: sglang_operators.engine_layers(model),
            sglang_operators.next_token_logprobs,
            next_token_divergence=sglang_operators.next_token_divergence,
            casts_inputs=False,
            switches=sglang_operators.switches("fa3" if kernel == "sglang_fa3" else "triton"),
        )
    return _FAST if kernel == "sdpa" else _FUSED  # all others run on CUDA, in half precision
