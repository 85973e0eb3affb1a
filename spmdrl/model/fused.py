"""transformers' norms, rotary embeddings and gated activations, each in one pass over its tensors.

transformers computes them operation by operation, and each operation reads and writes whole tensors, some in float32.
Here each is one operation with a backward pass of its own: `fused_triton.py` on CUDA, functions in C for float32 on a
CPU that has a compiler and the optional room for it, and `fused_plain.py` elsewhere. Sums and products are float32 and
rounded once, at the end, where transformers rounds after every operation. What autograd keeps is in
`memory/activations.py`, and the bytes that are read and written are in docs/gpu.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from spmdrl.families import family_of, layer_class
from spmdrl.model import fused_plain
from spmdrl.model.attention_layer import Attend, AttentionLayer
from spmdrl.model.cpu_room import cpu_room
from spmdrl.types import UserError

_HEAD_NORMS = ("q_norm", "k_norm")


def has_fused_layers(model_config: Any) -> bool:
    """Return True for a model whose layers are replaced here; others keep their own."""
    activation = getattr(model_config, "hidden_act", None)
    return family_of(model_config).has_fused_layers and activation in ("silu", "swish")


def fused_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the layers of a supported model that are replaced, each with its new class; none of other models."""
    config: Any = model.config
    if not has_fused_layers(config):
        return
    prefix = layer_class(config.model_type, "")
    for name, module in model.named_modules():
        match f"{type(module).__module__}.{type(module).__qualname__}".removeprefix(prefix):
            case "RMSNorm":
                yield module, _HeadNorm if name.endswith(_HEAD_NORMS) else _Norm
            case "Attention":
                yield module, _Attention
            case "MLP":
                yield module, _Mlp
            case "Experts" if not isinstance(module, _GatedExperts):
                kind = type(module)
                yield module, type(kind.__name__, (_GatedExperts, kind), {"__module__": kind.__module__})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dim: x [..., D] and weight [D] give [..., D]."""
    # torch has one kernel for each pass, but only for CUDA.
    return F.rms_norm(x, weight.shape, weight, eps) if x.is_cuda else _RmsNorm.apply(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotate the two halves of each head by its token's angles: x [T, H, D], cos and sin [T, D] give [T, H, D].

    With `weight` [D] the heads are normalized before, as by `rms_norm`. The tables hold each angle twice, once for each
    half; the first half is read.
    """
    rotated: Tensor = _Rotation.apply(x, weight, cos, sin, eps)
    return rotated


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)) * up, all [..., I]."""
    gated: Tensor = _SwiGlu.apply(gate, up)
    return gated


@functools.cache
def check_compiler(device: torch.device) -> None:
    """Run the smallest kernel if this is a CUDA device, because Triton compiles each at its first use.

    Raises UserError where it cannot.
    """
    if device.type != "cuda":
        return
    try:
        swiglu(torch.ones(1, device=device), torch.ones(1, device=device))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"Triton cannot compile for this device ({type(error).__name__}: {reason}); training on a GPU needs it, "
            "and it needs a C compiler and Python's headers: install gcc and python3-dev"
        ) from error


def kernels_for(*tensors: Tensor | None) -> ModuleType:
    """Return the functions for tensors of one device and dtype; the first is not None."""
    if tensors[0] is not None and tensors[0].is_cuda:
        from spmdrl.model import fused_triton  # Triton is there where CUDA is

        return fused_triton
    room = cpu_room()
    return room.fused if room is not None and room.serves(*tensors) else fused_plain


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = kernels_for(x, weight).rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        return *kernels_for(grad, *saved).rms_norm_backward(grad, *saved), None


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        ctx.eps = eps
        return kernels_for(x, weight, cos, sin).rotate(x, weight, cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *kernels_for(grad, *saved).rotate_backward(grad, *saved, ctx.eps), None, None, None


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels_for(gate, up).swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        saved = ctx.saved_tensors
        return kernels_for(grad, *saved).swiglu_backward(grad, *saved)


class _Norm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _HeadNorm(nn.Module):
    """The norm of each head [T, H, D] and its rotation; a module, so that a wrapper of its forward sees the weight."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin, self.weight, self.variance_epsilon)


class _Attention(nn.Module):
    """Attention over the packed tokens [1, T, D] of a micro-batch, with or without norms of heads."""

    head_dim: int
    layer_idx: int
    scaling: float
    sliding_window: int | None = None  # Llama's have no such attribute
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Module

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, attend: Attend, **_: Any
    ) -> tuple[Tensor, None]:
        cos, sin = (table[0] for table in position_embeddings)
        q, k, v = (
            project(hidden_states).squeeze(0).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = getattr(self, "q_norm", rotate)(q, cos, sin), getattr(self, "k_norm", rotate)(k, cos, sin)
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        layer = AttentionLayer(index=self.layer_idx, scale=self.scaling, window=self.sliding_window)
        return self.o_proj(attend(query, key, value, layer).flatten(2)), None


class _GatedExperts(nn.Module):
    """Experts of transformers, whose gates are `swiglu`."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Gate the two halves of experts' outputs: [N, 2 I] gives [N, I]."""
        return swiglu(*gate_up.chunk(2, dim=-1))


class _Mlp(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out
