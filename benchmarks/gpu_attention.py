"""Time packed attention and a gated delta net on a CUDA device, forward and backward, with all kernels it can import.

    python benchmarks/gpu_attention.py

Attention has each kernel; a gated delta net, of Qwen3-Next 80B's sizes, has plain products, and the kernels of
flash-linear-attention, without and with causal-conv1d. They alternate on the same tensors, after turns that are not
counted; a row has medians. FLOP/s count the half of attention's scores below the diagonal, and a backward pass as two
and a half forward passes. Prints one JSON object; `--device cpu --tokens 64` tries the program without a device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import workload
from results import print_result, provenance
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from spmdrl.model import gated_delta_cuda
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.model.layers import set_classes
from spmdrl.model.recurrent import packed_layers

MODULES: dict[Kernel, str] = {"varlen": "torch", "flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}
CASES = ((16, 8, 4), (32, 8, 4), (16, 8, 16))  # heads, those of keys, sequences
HEAD_DIM, UNCOUNTED = 128, 2
PACKAGES = ("fla", "causal_conv1d")  # of a gated delta net


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
    rows = [row for case in CASES for row in attention_rows(*case, kernels, args)]
    print_result(
        {
            "benchmark": "gpu-attention",
            "about": "packed attention of one layer, and a gated delta net, on a device, kernel by kernel",
            **provenance(),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "versions": workload.versions(["torch"]),
            "rows": rows + [row for count in (4, 16) for row in delta_net_rows(count, args)],
        },
        None,
    )


def attention_rows(
    heads: int, kv_heads: int, count: int, kernels: list[Kernel], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of one case, one for each kernel."""
    seqlens = [args.tokens // count] * count
    cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int().to(args.device)
    layer = AttentionLayer(index=0, scale=HEAD_DIM**-0.5)
    q, k, v = (
        torch.randn(sum(seqlens), number, HEAD_DIM, device=args.device, dtype=torch.bfloat16, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    )
    flops = sum(2 * heads * HEAD_DIM * length**2 for length in seqlens)
    layout = SequenceLayout(seqlens, cu_seqlens)

    def forward(kernel: Kernel) -> Tensor:
        return causal_attention(layout, kernel)(q, k, v, layer)

    ways = {f"{kernel}": partial(forward, kernel) for kernel in kernels}
    for kernel, (forward_s, backward_s) in medians(ways, [q, k, v], args).items():
        yield (
            {"kernel": kernel, "heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "sequence": seqlens[0]}
            | {"forward_ms": 1e3 * forward_s, "backward_ms": 1e3 * backward_s}
            | {"forward_tflops": flops / forward_s / 1e12, "backward_tflops": 2.5 * flops / backward_s / 1e12}
        )


def delta_net_rows(count: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of a gated delta net: for plain products, and for each package that is there, with those before it."""
    seqlens = [args.tokens // count] * count
    config = Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    layer = Qwen3NextGatedDeltaNet(config, 0).to(args.device, torch.bfloat16)
    set_classes(packed_layers(layer))
    hidden = torch.randn(
        1, sum(seqlens), config.hidden_size, device=args.device, dtype=torch.bfloat16, requires_grad=True
    )
    there = [package for package in PACKAGES if args.device == "cuda" and find_spec(package)]

    def forward(used: Sequence[str]) -> Tensor:
        with ExitStack() as stack:
            for name, package in zip(("has_rule", "has_conv"), PACKAGES, strict=True):
                if package not in used:
                    stack.enter_context(patch.object(gated_delta_cuda, name, lambda *_: False))
            out: Tensor = layer(hidden, seqlens=seqlens)
            return out

    used = [there[:number] for number in range(len(there) + 1)]
    ways = {" + ".join(packages) or "products": partial(forward, packages) for packages in used}
    for kernel, (forward_s, backward_s) in medians(ways, [hidden, *layer.parameters()], args).items():
        sizes = {"layer": "gated_delta_net", "hidden_size": config.hidden_size, "sequence": seqlens[0]}
        yield {"kernel": kernel} | sizes | {"forward_ms": 1e3 * forward_s, "backward_ms": 1e3 * backward_s}


def medians(
    ways: Mapping[str, Callable[[], Tensor]], leaves: Sequence[Tensor], args: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Median seconds of each way's forward and backward pass; the ways take turns."""

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def once(forward: Callable[[], Tensor]) -> tuple[float, float]:
        begin = now()
        out = forward()
        forward_s, slope, begin = now() - begin, torch.ones_like(out), now()
        torch.autograd.grad(out, leaves, slope)
        return forward_s, now() - begin

    seen = [[once(forward) for forward in ways.values()] for _ in range(UNCOUNTED + args.turns)][UNCOUNTED:]
    return {
        way: (statistics.median(one[0] for one in times), statistics.median(one[1] for one in times))
        for way, times in zip(ways, zip(*seen, strict=True), strict=True)
    }


if __name__ == "__main__":
    main()
