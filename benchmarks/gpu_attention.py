"""Time packed attention of one layer, forward and backward, with each kernel that a CUDA device can use and import.

    python benchmarks/gpu_attention.py

Kernels alternate on the same tensors, after turns that are not counted; a row has medians. FLOP/s count the half of the
scores below the diagonal, and a backward pass as two and a half forward passes. Prints one JSON object;
`--device cpu --tokens 64` tries the program where there is no device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
import workload
from results import print_result, provenance

from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention

MODULES: dict[Kernel, str] = {"varlen": "torch", "flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}
CASES = ((16, 8, 4), (32, 8, 4), (16, 8, 16))  # heads, those of keys, sequences
HEAD_DIM, UNCOUNTED = 128, 2


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384, help="of all sequences together")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --tokens 64 only tries the program")
    found: list[Kernel] = [kernel for kernel, module in MODULES.items() if find_spec(module)]
    kernels: list[Kernel] = found if args.device == "cuda" else ["sdpa"]
    rows = [row for case in CASES for row in measure(*case, kernels, args)]
    print_result(
        {
            "benchmark": "gpu-attention",
            "about": "packed attention of one layer on a device, kernel by kernel",
            **provenance(),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "versions": workload.versions(["torch"]),
            "rows": rows,
        },
        None,
    )


def measure(
    heads: int, kv_heads: int, count: int, kernels: list[Kernel], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one case, one for each kernel."""
    seqlens = [args.tokens // count] * count
    cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int().to(args.device)
    layer = AttentionLayer(index=0, scale=HEAD_DIM**-0.5)
    q, k, v, slope = (
        torch.randn(sum(seqlens), number, HEAD_DIM, device=args.device, dtype=torch.bfloat16)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def once(kernel: Kernel) -> tuple[float, float]:
        attention = causal_attention(SequenceLayout(seqlens, cu_seqlens), kernel)
        begin = now()
        out = attention(*inputs, layer)
        between = now()
        torch.autograd.grad(out, inputs, slope)
        return between - begin, now() - between

    seen = [[once(kernel) for kernel in kernels] for _ in range(UNCOUNTED + args.turns)][UNCOUNTED:]
    flops = sum(2 * heads * HEAD_DIM * length**2 for length in seqlens)
    rows: list[dict[str, Any]] = []
    for kernel, times in zip(kernels, zip(*seen, strict=True), strict=True):
        forward_s, backward_s = (statistics.median(one) for one in zip(*times, strict=True))
        rows.append(
            {"kernel": kernel, "heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "sequence": seqlens[0]}
            | {"forward_ms": 1e3 * forward_s, "backward_ms": 1e3 * backward_s}
            | {"forward_tflops": flops / forward_s / 1e12, "backward_tflops": 2.5 * flops / backward_s / 1e12}
        )
    return rows


if __name__ == "__main__":
    main()
