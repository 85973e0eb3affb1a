"""Gated delta nets (Qwen3-Next, Qwen3.5) in SGLang on a CPU, where it has no kernels for them: the same in torch.

A request keeps two states in each such layer, in pools with a slot for each request: the last inputs of the convolution
[slots, C, W - 1], for kernels W wide, and the memory of the delta rule [slots, H, V, K], for H value heads of size V
and key heads of size K. Prompts come as the T tokens of several requests end to end, then one token of each of B
requests at a time. A prompt may begin where the state of a cached prefix ends.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

# Settings of `rollout.sglang` for this backend, which lacks the default schedule and cache strategy.
ARGUMENTS = {
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    "max_mamba_cache_size": 64,  # four states for each of 16 requests; otherwise a part of the machine's memory
}


def install() -> None:
    """Let SGLang compute with these in this process. Call it before SGLang's models are imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for owner, functions in (
        (importlib.import_module("sgl_kernel.mamba"), kernels()),
        (torch.ops.sgl_kernel, operators()),
    ):
        for name, function in functions.items():
            setattr(owner, name, function)
    for path, replacement in replacements().items():
        HookRegistry.register(path, replacement, HookType.REPLACE)


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels that SGLang imports from `sgl_kernel.mamba`, by name."""
    return {
        "causal_conv1d_fn_cpu": convolve_prompts,
        "causal_conv1d_update_cpu": convolve_tokens,
        "chunk_gated_delta_rule_cpu": read_prompts,
    }


def operators() -> dict[str, Callable[..., Any]]:
    """Return the operators that SGLang takes from `torch.ops.sgl_kernel`, by name."""
    return {
        "fused_gdn_gating_cpu": gates,
        "fused_sigmoid_gating_delta_rule_update_cpu": read_tokens,
        "fused_sigmoid_mul_cpu": multiply_by_sigmoid,
        "fused_qk_gemma_rmsnorm_cpu": normed_heads,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": normed_heads_and_gate,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
    }


def replacements() -> dict[str, Callable[..., Any]]:
    """Return what stands in for functions of SGLang that are Triton's, by their paths."""
    fla = "sglang.kernels.ops.attention.fla"
    return {
        f"{fla}.fused_norm_gate.FusedRMSNormGated.forward": gated_norm,
        f"{fla}.layernorm_gated.RMSNorm.forward": gated_norm,
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": add_gated,
    }


def convolve_prompts(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    has_initial_state: Tensor,
    activation: str | None,
    **_: Any,
) -> Tensor:
    """Convolve `inputs` [C, T] with `weight` [C, W], each request from its own state, and keep the states."""
    outputs = torch.empty_like(inputs)
    continues = has_initial_state.tolist()
    for number, (slot, tokens) in enumerate(_requests(cache_indices, query_start_loc)):
        before = conv_states[slot] if continues[number] else torch.zeros_like(conv_states[slot])
        padded = torch.cat([before.to(inputs.dtype), inputs[:, tokens]], dim=1)
        conv_states[slot] = padded[:, -conv_states.shape[-1] :].to(conv_states.dtype)
        outputs[:, tokens] = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(inputs))
    return F.silu(outputs) if activation else outputs


def convolve_tokens(
    inputs: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Do what `convolve_prompts` does for one token of each request: `inputs` is [B, C]."""
    slots = conv_state_indices.long()
    padded = torch.cat([conv_states[slots].to(inputs.dtype), inputs.unsqueeze(2)], dim=2)
    conv_states[slots] = padded[:, :, 1:].to(conv_states.dtype)
    outputs = (padded * weight).sum(-1)
    if bias is not None:
        outputs += bias
    return F.silu(outputs) if activation else outputs


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return decay, in nats, and strength [1, T, H] of the delta rule, from the projections `a` and `b` [T, H]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.sigmoid().unsqueeze(0)


def read_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Apply the delta rule to prompts, q, k [1, T, key heads, K] and v [1, T, H, V], and keep the states.

    SGLang clears the state of a request that starts anew.
    """
    outputs = torch.empty_like(v)
    q, k = _for_value_heads(q, v), _for_value_heads(k, v)
    for slot, tokens in _requests(initial_state_indices, cu_seqlens):
        outputs[:, tokens], state = torch_chunk_gated_delta_rule(
            *(x[:, tokens] for x in (q, k, v, g, beta)),
            initial_state=initial_state[slot].mT.unsqueeze(0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        initial_state[slot] = state[0].mT.to(initial_state.dtype)
    return outputs, None, None


def read_tokens(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Do what `gates` and `read_prompts` do for one token of each request: v is [1, B, H, V]."""
    slots = initial_state_indices.long()
    decay, strength = gates(A_log, a, b, dt_bias)
    by_request = (x.transpose(0, 1) for x in (_for_value_heads(q, v), _for_value_heads(k, v), v, decay, strength))
    outputs, states = torch_recurrent_gated_delta_rule(
        *by_request,
        initial_state=initial_state_source[slots].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    initial_state_source[slots] = states.mT.to(initial_state_source.dtype)
    return outputs.transpose(0, 1)


def multiply_by_sigmoid(inputs: Tensor, gate: Tensor) -> None:
    """Multiply `inputs` in place by the sigmoid of a gate with as many elements."""
    inputs.mul_(gate.reshape(inputs.shape).sigmoid())


def normed_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm each head of q and k [T, heads * head_dim]; both come back as [T * heads, head_dim]."""
    return (
        _gemma_norm(q.reshape(-1, head_dim), q_weight, eps),
        _gemma_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


def normed_heads_and_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `normed_heads` does where each head of q is followed by its gate: [T, heads * 2 * head_dim].

    The gates come back as [T, heads, head_dim].
    """
    q, gate = q_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(2)
    return *normed_heads(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def split_projections(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3.5's fused projections [T, columns] into q, k and v together, z [T, H, V], b and a [T, H]."""
    values = num_value_heads * value_dim
    qkv, z = qkvz.split([2 * num_key_heads * key_dim + values, values], dim=-1)
    b, a = (half.contiguous() for half in ba.chunk(2, dim=-1))
    return qkv.contiguous(), z.unflatten(-1, (num_value_heads, value_dim)), b, a


def gated_norm(norm: Any, inputs: Tensor, gate: Tensor) -> Tensor:
    """Norm the rows of `inputs` [N, V] by a module's weight, and multiply them by the SiLU of `gate` [N, V]."""
    normed = _normed(inputs, norm.eps).to(inputs.dtype) * norm.weight
    return (normed * F.silu(gate.float())).to(inputs.dtype)


def add_gated(inputs: Tensor, gate_weight: Tensor, expert: Tensor, outputs: Tensor) -> None:
    """Add the shared expert's output to `outputs` [T, D], times the sigmoid of its gate on `inputs`."""
    outputs += (inputs @ gate_weight).sigmoid().unsqueeze(-1) * expert


def _requests(slots: Tensor, starts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each request's slot and tokens; `starts` has the end of the last request too."""
    for slot, (start, end) in zip(slots.tolist(), itertools.pairwise(starts.tolist()), strict=False):
        yield slot, slice(start, end)


def _for_value_heads(heads: Tensor, values: Tensor) -> Tensor:
    """Repeat key heads [1, T, key heads, K] for the value heads that share them."""
    return heads.repeat_interleave(values.shape[2] // heads.shape[2], dim=2)


def _gemma_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (_normed(inputs, eps) * (1 + weight.float())).to(inputs.dtype)


def _normed(inputs: Tensor, eps: float) -> Tensor:
    wide = inputs.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
