"""Measure a recurrent layer on packed sequences, beside one call of transformers' layer for each length, and beside
padding.

    python benchmarks/gated_delta.py
    python benchmarks/gated_delta.py --cases short --head-dim 128
    python benchmarks/gated_delta.py --layer mamba2

A pass is forward and backward of one layer in float32, with gradients of its input and its parameters; its projections
are a part of it. The layer is a gated delta net of Qwen3-Next, of the sizes that are given, or Mamba 2 with a quarter
of Nemotron 3 Nano's width and heads. The lengths of sequences follow a lognormal and are sorted, as packing does:
`short` are those of `workload.py`'s tail, with its prompts, `long` has a median of 256 tokens. "per_length" calls
transformers' layer once for each run of sequences of equal length, "padded" once for all. Passes of the three alternate
in one process. Peak memory is what a pass adds at its worst, in a process of its own. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import workload
from logprob_memory import MIB, peak_bytes, start_peak
from program import run_again
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from spmdrl.model.layers import set_classes
from spmdrl.model.recurrent import packed_layers

FEW_LENGTHS = [40, 3]  # of the pass before, in which the libraries take what they need for themselves
VALUE_HEADS_OF_A_KEY_HEAD = 2
MAMBA2: Mapping[str, Any] = {
    "hidden_size": 672,
    "layers_block_type": ["mamba"],
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 128,
    "chunk_size": 128,
}


@dataclass(frozen=True)
class Case:
    """How long sequences are, and how many tokens there are of them."""

    median_tokens: int
    sigma: float
    max_tokens: int
    more_tokens: int  # of every sequence
    total_tokens: int

    def lengths(self) -> list[int]:
        """Draw the lengths: the same ones in every run, shortest first."""
        draw, drawn = random.Random(0), [0]
        while sum(drawn) < self.total_tokens:
            response = round(draw.lognormvariate(math.log(self.median_tokens), self.sigma))
            drawn.append(self.more_tokens + min(self.max_tokens, max(1, response)))
        return sorted(drawn[1:])


CASES: Mapping[str, Case] = {
    "short": Case(
        median_tokens=workload.TAIL_MEDIAN_TOKENS,
        sigma=workload.TAIL_SIGMA,
        max_tokens=workload.MAX_RESPONSE_TOKENS["tail"],
        more_tokens=workload.PROMPT_TOKENS,
        total_tokens=4096,
    ),
    "long": Case(median_tokens=256, sigma=1.0, max_tokens=4096, more_tokens=0, total_tokens=8192),
}
HEADLINE = "short"
Layer = Callable[[Tensor, list[int]], Tensor]  # tokens [1, T, D] of sequences of these lengths give the same


def ways(args: argparse.Namespace) -> dict[str, Layer]:
    """Make one layer, with the same weights, to be called in every way."""
    torch.manual_seed(0)
    plain = NemotronHMamba2Mixer(NemotronHConfig(**MAMBA2), 0) if args.layer == "mamba2" else delta_net(args)
    ours: nn.Module = copy.deepcopy(plain)
    set_classes(packed_layers(ours))

    def per_length(hidden: Tensor, lengths: list[int]) -> Tensor:
        outputs, start = [], 0
        for length, run in groupby(lengths):
            tokens = slice(start, start + length * len([*run]))
            outputs.append(plain(hidden[0, tokens].unflatten(0, (-1, length))).flatten(0, 1))
            start = tokens.stop
        return torch.cat(outputs).unsqueeze(0)

    def padded(hidden: Tensor, lengths: list[int]) -> Tensor:
        out = plain(pad_sequence(hidden[0].split(lengths), batch_first=True))
        return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)]).unsqueeze(0)

    return {"packed": lambda hidden, lengths: ours(hidden, seqlens=lengths), "per_length": per_length, "padded": padded}


def delta_net(args: argparse.Namespace) -> nn.Module:
    """Make transformers' gated delta net of the sizes that are given."""
    config = Qwen3NextConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=args.key_heads,
        linear_num_value_heads=VALUE_HEADS_OF_A_KEY_HEAD * args.key_heads,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
    )
    return Qwen3NextGatedDeltaNet(config, 0)


def one_pass(layer: Layer, hidden: Tensor, lengths: list[int]) -> float:
    """Forward and backward; the loss's value."""
    loss = layer(hidden.detach().requires_grad_(), lengths).square().mean()
    loss.backward()
    return loss.item()


def main() -> None:
    """Measure every case, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--layer", choices=("gated-delta", "mamba2"), default="gated-delta")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--hidden-size", type=int, default=workload.SIZES[1][0])
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=workload.HEAD_DIM)
    parser.add_argument("--tokens", type=int, help="of a pass; default: by case")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of timed passes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "CASE"), help=argparse.SUPPRESS)  # set by this program
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.layer == "mamba2":
        args.hidden_size = MAMBA2["hidden_size"]
    if args.peak:
        way, case = args.peak
        print(json.dumps(memory_of_pass(ways(args)[way], args.hidden_size, lengths_of(case, args.tokens))))
        return
    load_average = os.getloadavg()[0]
    result = {
        "layer": args.layer,
        "sizes": MAMBA2 if args.layer == "mamba2" else sizes_of_delta_net(args),
        "threads": args.threads,
        "headline": args.cases[0],
        "cases": {case: measure(args, case) for case in args.cases},
        "load_average": load_average,
        "load_average_after": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def sizes_of_delta_net(args: argparse.Namespace) -> Mapping[str, int]:
    return {"hidden_size": args.hidden_size, "key_heads": args.key_heads, "head_dim": args.head_dim}


def lengths_of(case: str, total_tokens: int | None) -> list[int]:
    """The lengths of a case, of other numbers of tokens if they are given."""
    chosen = CASES[case]
    return Case(**{**vars(chosen), "total_tokens": total_tokens or chosen.total_tokens}).lengths()


def measure(args: argparse.Namespace, case: str) -> dict[str, Any]:
    """Times of all ways in turns, and the memory of each."""
    lengths = lengths_of(case, args.tokens)
    layers, hidden = ways(args), torch.randn(1, sum(lengths), args.hidden_size)
    losses = {way: one_pass(layer, hidden, lengths) for way, layer in layers.items()}  # not counted
    durations: dict[str, list[float]] = {way: [] for way in layers}
    for _ in range(args.repeats):
        for way, layer in layers.items():
            start = time.perf_counter()
            one_pass(layer, hidden, lengths)
            durations[way].append(time.perf_counter() - start)
    peaks = {way: run_again("--peak", way, case) for way in layers}
    medians = {way: statistics.median(values) for way, values in durations.items()}
    print(f"{case}: {medians} s, {peaks} MiB", file=sys.stderr, flush=True)
    return {
        "sequences": len(lengths),
        "different_lengths": len(set(lengths)),
        "longest": lengths[-1],
        "tokens": sum(lengths),
        "largest_difference_of_loss": max(abs(loss / losses["packed"] - 1) for loss in losses.values()),
        "pass_s": durations,
        "median_s": medians,
        "peak_mib": peaks,
    }


def memory_of_pass(layer: Layer, hidden_size: int, lengths: list[int]) -> float:
    """Runs in a process of its own: MiB that a pass adds at its worst."""
    one_pass(layer, torch.randn(1, sum(FEW_LENGTHS), hidden_size), FEW_LENGTHS)
    hidden, device = torch.randn(1, sum(lengths), hidden_size), torch.device("cpu")
    before = start_peak(device)
    one_pass(layer, hidden, lengths)
    return (peak_bytes(device) - before) / MIB


if __name__ == "__main__":
    main()
