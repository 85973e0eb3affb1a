"""Count the bytes and FLOPs of each part of a decoder layer, forward and backward, before and after fusing; no timing.

    python benchmarks/layer_bytes.py

Qwen3's shapes in bfloat16, for each token and layer. An operation counts the sizes of what it reads and writes, views
aside, as if nothing stayed in a cache: transformers' parts by running them under a dispatch mode, fused ones by the
inputs and results of their kernels. Products count FLOPs, attention as if every sequence had `--sequence-tokens`.
Milliseconds are bytes over 4.8 TB/s and FLOPs over 989 TFLOP/s, an H200's data sheet, and so the least that a layer
can take for 16,384 tokens. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import SIZES, model_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

BANDWIDTH, PEAK = 4.8e12, 989e12
TOKENS = 16_384
SAMPLE_TOKENS = 512


def main() -> None:
    """Count every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--sequence-tokens", type=int, default=4096)
    args = parser.parse_args()
    if args.sequence_tokens < 1:
        parser.error("--sequence-tokens is at least 1")
    rows = {size: layer(model_config(size), args.sequence_tokens) for size in args.sizes}
    for size, row in rows.items():
        for part, (before, after) in row["bytes"].items():
            print(f"{size:<4} {part:<22} {before:>9,.0f} bytes, fused {after:>8,.0f}", file=sys.stderr)
        times = ", ".join(f"{name} {value:.2f}" for name, value in row["ms"].items())
        print(f"{size:<4} FLOPs {row['flops']:,}; ms: {times}", file=sys.stderr)
    print(json.dumps({"tokens": TOKENS, "sequence_tokens": args.sequence_tokens, "sizes": rows}))


def layer(config: Qwen3Config, sequence_tokens: int) -> dict[str, Any]:
    """The parts of one layer."""
    d, i, b = config.hidden_size, config.intermediate_size, 2
    a, k = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    parts = {
        # A norm reads its input and writes its result; backward reads gradient and input, twice for both gradients.
        "two norms": (2 * counted(norm, noise(d), noise(d)), 2 * (2 + 5) * b * d),
        # Backward reads gradient and input and writes a gradient. Each of the four kernels reads half of two tables.
        "head norms and rotary": (
            counted(rotated, noise(a // config.head_dim, config.head_dim), *angles(config))
            + counted(rotated, noise(k // config.head_dim, config.head_dim), *angles(config)),
            (2 + 3) * b * (a + k) + 4 * b * config.head_dim,
        ),
        # Backward reads three and writes two.
        "SwiGLU": (counted(gated, noise(i), noise(i)), (3 + 5) * b * i),
    }
    flops = 3 * (2 * (d * (a + 2 * k) + a * d + 3 * d * i) + 2 * a * (sequence_tokens + 1))
    before, after = (sum(part[place] for part in parts.values()) for place in (0, 1))
    return {
        "bytes": parts,
        "flops": flops,
        "ms": {
            "products and attention": TOKENS * flops / PEAK * 1e3,
            "the rest before": TOKENS * before / BANDWIDTH * 1e3,
            "the rest fused": TOKENS * after / BANDWIDTH * 1e3,
        },
    }


def noise(*shape: int) -> Tensor:
    """A leaf for each of the sample's tokens."""
    return torch.randn(SAMPLE_TOKENS, *shape, dtype=torch.bfloat16, requires_grad=True)


def angles(config: Qwen3Config) -> tuple[Tensor, Tensor]:
    """Tables of cosines and sines, which all heads share."""
    tables = torch.zeros(2, 1, SAMPLE_TOKENS, config.head_dim, dtype=torch.bfloat16)
    return tables[0], tables[1]


def norm(x: Tensor, _: Tensor) -> Tensor:
    """transformers' norm, of the last dim."""
    module = qwen3.Qwen3RMSNorm(x.shape[-1]).bfloat16()
    result: Tensor = module(x)
    return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, H, D] normalized and rotated as transformers does."""
    heads = norm(x, x)[None].transpose(1, 2)
    return qwen3.apply_rotary_pos_emb(heads, heads[:, :0], cos, sin)[0]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The middle of transformers' MLP."""
    return torch.nn.functional.silu(gate) * up


def counted(part: Callable[..., Tensor], *inputs: Tensor) -> float:
    """Bytes per token that forward and backward read and write."""
    with Count() as count:
        result = part(*inputs)
        result.backward(torch.ones_like(result))
    return count.num_bytes / SAMPLE_TOKENS


class Count(TorchDispatchMode):
    """Adds up the sizes of what operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        storages = {x.untyped_storage()._cdata for x in given}
        is_view = all(x.untyped_storage()._cdata in storages for x in made) and not func._schema.is_mutable
        if not is_view and func.overloadpacket not in (torch.ops.aten.ones_like, torch.ops.aten.empty_like):
            self.num_bytes += sum(distinct_bytes(x) for x in (*given, *made))
        return results


def distinct_bytes(x: Tensor) -> int:
    """Bytes of a tensor's own elements; those that a dim of stride 0 repeats count once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else 1
    return elements * x.element_size()


if __name__ == "__main__":
    main()
