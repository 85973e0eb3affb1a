"""Time packed attention of one layer on a CUDA device, forward and backward, with each kernel that can be imported.

    python benchmarks/gpu_attention.py

Kernels alternate on the same tensors, after two turns that are not counted; a row has medians. FLOP/s count the half of
the scores below the diagonal, and a backward pass as two and a half forward passes. Prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
from importlib.util import find_spec

import torch
from results import provenance

from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention

MODULES: dict[Kernel, str] = {"varlen": "torch", "flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}
CASES = ((16, 8, [4096] * 4), (32, 8, [4096] * 4), (16, 8, [1024] * 16))  # heads, those of keys, sequences
HEAD_DIM, TURNS, UNCOUNTED = 128, 12, 2


def main() -> None:
    """Measure every case."""
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    kernels = [kernel for kernel, module in MODULES.items() if find_spec(module)]
    rows = [row for case in CASES for row in measure(*case, kernels)]
    print(json.dumps({"benchmark": "gpu-attention", **provenance(), "rows": rows}))


def measure(heads: int, kv_heads: int, seqlens: list[int], kernels: list[Kernel]) -> list[dict[str, object]]:
    """Rows of one case, one for each kernel."""
    cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int().cuda()
    layer = AttentionLayer(index=0, scale=HEAD_DIM**-0.5)
    q, k, v, slope = (
        torch.randn(sum(seqlens), count, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def once(kernel: Kernel) -> tuple[float, float]:
        attention = causal_attention(SequenceLayout(seqlens, cu_seqlens), kernel)
        begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        out = attention(*inputs, layer)
        between.record()
        torch.autograd.grad(out, inputs, slope)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(between), between.elapsed_time(end)

    seen = [[once(kernel) for kernel in kernels] for _ in range(TURNS)][UNCOUNTED:]
    flops = sum(2 * heads * HEAD_DIM * length**2 for length in seqlens)
    rows: list[dict[str, object]] = []
    for kernel, times in zip(kernels, zip(*seen, strict=True), strict=True):
        forward_ms, backward_ms = (statistics.median(one) for one in zip(*times, strict=True))
        rows.append(
            {"kernel": kernel, "heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "sequence": seqlens[0]}
            | {"forward_ms": forward_ms, "backward_ms": backward_ms}
            | {"forward_tflops": flops / forward_ms / 1e9, "backward_tflops": 2.5 * flops / backward_ms / 1e9}
        )
    return rows


if __name__ == "__main__":
    main()
