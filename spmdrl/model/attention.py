"""Packed attention behind one name in transformers' attention interface.

A model built with `attn_implementation="spmdrl"` hands every attention layer to the `attend` function its caller
passed to `model(..., attend=...)`. Who calls the model knows how its tokens are laid out (packed sequences in
training, a KV cache in the embedded engine), so no layer has to guess it from masks or position ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from spmdrl.types import UserError

IMPLEMENTATION = "spmdrl"

Kernel = Literal["sdpa", "varlen", "flash_attn_2", "flash_attn_3"]


class Attend(Protocol):
    """Attention over the caller's token layout.

    query is [1, H, T, D], key and value [1, K, T, D] with K dividing H; the result is [1, T, H, D]. A head's sink, of
    sinks [H], is one more score in each of its softmaxes, and has no value.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


# Arguments of transformers' attention functions that change the result in ways no kernel here implements.
_UNSUPPORTED = ("softcap", "head_mask", "position_bias")


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0.0, "policies are trained without dropout"
    if attend is None or attention_mask is not None:
        does = "does not pass its caller's arguments on" if attend is None else "makes a mask of its own"
        raise UserError(f"model.path: {type(module).__name__} {does}, so sequences cannot be packed")
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise UserError(f"model.path: {type(module).__name__} uses attention with {name}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx  # every attention module of transformers has one
    return attend(query, key, value, layer=layer, scale=scale, window=sliding_window, sinks=s_aux), None


AttentionInterface.register(IMPLEMENTATION, _attention_function)


def packed_attention(cu_seqlens: Tensor, seqlens: list[int], kernel: Kernel) -> Attend:
    """Causal attention within each of the sequences that lie end to end in a micro-batch.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host.
    """
    if kernel == "sdpa":
        return _RunsOfEqualLength(seqlens)
    return _VarlenKernel(cu_seqlens, max(seqlens), _load_varlen(kernel))


def runs_of_equal_length(seqlens: list[int]) -> Iterator[tuple[slice, int, int]]:
    """(tokens, sequences, tokens of each) of every run of neighbours of equal length among sequences end to end.

    Packing sorts by length, so runs are long.
    """
    start = 0
    for length, run in groupby(seqlens):
        count = sum(1 for _ in run)
        yield slice(start, start + count * length), count, length
        start += count * length


@dataclass(frozen=True, slots=True)
class _RunsOfEqualLength:
    """One batched SDPA call for each run of neighbours of equal length."""

    seqlens: list[int]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # Heads last in memory, so that a run of sequences is a view: [T, heads, D].
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        outputs = []
        for tokens, count, length in runs_of_equal_length(self.seqlens):
            rows = [x[tokens].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            outputs.append(_causal_sdpa(*rows, scale=scale, window=window, sinks=sinks).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).unsqueeze(0) if len(outputs) > 1 else outputs[0].unsqueeze(0)


def _causal_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """q [n, H, L, D], k and v [n, K, L, D]; a window of w lets a token see itself and w - 1 before it."""
    grouped = q.shape[1] != k.shape[1]
    visible = None if window is None or window >= q.shape[2] else _band(q.shape[2], window, q.device)
    if sinks is None:
        return _sdpa(q, k, v, visible, scale, grouped)
    if visible is not None:
        visible = F.pad(visible, (1, 0, 1, 0), value=True)
    return _sdpa(*_behind_a_sink(q, k, v, sinks / scale), visible, scale, grouped)[:, :, 1:, :-1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, grouped: bool) -> Tensor:
    """Causal where `visible` [L, L] does not say more."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
    )


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Which tokens see which, [length, length] bool, in a causal window."""
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance[None, :]
    return (distance >= 0) & (distance < window)


def _behind_a_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one more token in front and one more component: q [n, H, 1 + L, D + 1], k and v likewise.

    Of the component, q holds its head's entry of scores [H] and k holds 0, but 1 in the new token: each q's product
    with that token is the score. Its value is 0. So any kernel and its backward do sinks without knowing them.
    """
    column = scores.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, column], dim=-1), (0, 0, 1, 0))
    sink = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.shape[-1], 0))
    return q, torch.cat([sink, F.pad(k, (0, 1))], dim=2), F.pad(v, (0, 1, 1, 0))


@dataclass(frozen=True, slots=True)
class _VarlenKernel:
    """A CUDA kernel that takes cu_seqlens."""

    cu_seqlens: Tensor
    max_seqlen: int
    kernel: Callable[..., Tensor]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        # Kernels count how far back a token sees beyond itself.
        sees = (-1, 0) if window is None else (window - 1, 0)
        if sinks is None:
            return self.kernel(q, k, v, self.cu_seqlens, self.max_seqlen, scale, sees).unsqueeze(0)
        assert self.kernel is _torch_varlen, "a model with sinks was not refused with this kernel"
        kernel = _FlashWithNormalizer(self.cu_seqlens, self.max_seqlen, scale, sees)
        return attention_with_sinks(q, *_repeated(q, k, v), sinks, kernel).unsqueeze(0)


class NormalizerKernel(Protocol):
    """Attention that also returns the logarithm of each softmax's denominator, and its backward pass.

    All of q, k, v, out and grad are [T, H, D]; lse is [H, T] float32.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        ...


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: NormalizerKernel) -> Tensor:
    """What `kernel` computes, [T, H, D], with the sinks [H] in its softmaxes; differentiable in all four tensors."""
    out: Tensor = _AttentionWithSinks.apply(q, k, v, sinks, kernel)
    return out


class _AttentionWithSinks(torch.autograd.Function):
    """A sink enlarges a softmax's denominator and nothing else, so the output only shrinks.

    Backward needs no other kernel either: it takes its probabilities from lse, p = exp(score - lse), and then
    d score = p * (grad . v - grad . out), which hold with the enlarged lse and the shrunk out. A sink's own value is 0:
    d sink = -p_sink * (grad . out).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: NormalizerKernel) -> Tensor:
        without, lse_without = kernel.forward(q, k, v)
        lse = torch.logaddexp(lse_without, sinks.float()[:, None])
        out = (without * (lse_without - lse).exp().t()[..., None]).to(without.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse)
        p_sink = (sinks.float()[:, None] - lse).exp()  # [H, T]
        grad_sinks = -(p_sink * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return grad_q, grad_k, grad_v, grad_sinks.to(sinks.dtype), None


@dataclass(frozen=True, slots=True)
class _FlashWithNormalizer:
    """torch's flash kernel, of which `varlen_attn` differentiates only the output."""

    cu_seqlens: Tensor
    max_seqlen: int
    scale: float
    sees: tuple[int, int]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._layout(), 0.0, self.sees == (-1, 0), False, **self._shape()
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The random state of a dropout that there is not.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self._layout(), 0.0, self.sees == (-1, 0), *random, **self._shape()
        )

    def _layout(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen

    def _shape(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.sees[0], "window_size_right": self.sees[1]}


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [T, K, D] with as many heads as q [T, H, D]."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, sees: tuple[int, int]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Repeated, not enable_gqa: torch 2.11 has no such argument.
    k, v = _repeated(q, k, v)
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=sees)
    assert isinstance(out, Tensor)  # it was not asked for anything besides
    return out


def _load_varlen(kernel: Kernel) -> Callable[..., Tensor]:
    """The kernel under one signature: (q, k, v, cu_seqlens, max_seqlen, scale, window) -> [T, H, D]."""
    try:
        if kernel == "varlen":
            import torch.nn.attention.varlen  # noqa: F401

            return _torch_varlen
        if kernel == "flash_attn_2":
            from flash_attn import flash_attn_varlen_func
        else:
            from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise UserError(f'model.attention = "{kernel}" needs a package that is not installed ({error})') from error
    return lambda q, k, v, cu, longest, scale, window: flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=window
    )


def choose_kernel(setting: Literal["auto"] | Kernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel that `model.attention` means there. Raises UserError when it cannot be had."""
    has_kernels = device_type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0)
    if setting == "auto":
        return "varlen" if has_kernels else "sdpa"
    if setting != "sdpa":
        if not has_kernels:
            raise UserError(
                f'model.attention = "{setting}" needs a CUDA device of compute capability 8.0 and model.compute_dtype '
                f'"bfloat16" or "float16" (here: {device_type}, {dtype}); set it to "auto" or "sdpa"'
            )
        _load_varlen(setting)
    return setting
