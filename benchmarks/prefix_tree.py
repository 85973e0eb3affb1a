"""Forward and backward of sequences that begin alike, as a prefix tree and one by one in a row, in one process.

    group   16 responses of 64 tokens to a prompt of 512
    turns   8 turns of an episode, each rendered again with all before it: 64 tokens are read and 64 sampled in each
    alone   16 sequences that have nothing in common, for which a tree is looked for

Times are of a tiny random Qwen3 on a CPU, and include laying sequences out; both ways take turns. The peak of memory is
what a pass adds at its worst, in a process of its own. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import workload
from logprob_memory import MIB, peak_bytes, start_peak
from program import run_again
from transformers import AutoModelForCausalLM, Qwen3Config

from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import Sequence

WAYS = {"tree": True, "row": False}


def sequence(index: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> Sequence:
    """A prompt, and a response that is trained."""
    return Sequence(
        index=index,
        token_ids=prompt + response,
        loss_mask=(False,) * len(prompt) + (True,) * len(response),
        rollout_logprobs=(0.0,) * (len(prompt) + len(response)),
        reward=0.0,
    )


def cases(scale: int) -> dict[str, list[Sequence]]:
    """The sequences of each case, with lengths divided by `scale`."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, len(workload.VOCABULARY)) for _ in range(count // scale))

    prompt, turns, history = tokens(512), [], ()
    for number in range(8):
        history += tokens(64)
        turns.append(sequence(number, history, tokens(64)))
        history = turns[-1].token_ids
    return {
        "group": [sequence(number, prompt, tokens(64)) for number in range(16)],
        "turns": turns,
        "alone": [sequence(number, tokens(64), tokens(128)) for number in range(16)],
    }


def policy_of(args: argparse.Namespace) -> Policy:
    """A random model."""
    torch.manual_seed(0)
    hidden, width, _ = workload.SIZES[args.size]
    config = Qwen3Config(
        vocab_size=len(workload.VOCABULARY),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=4,
        num_attention_heads=hidden // workload.HEAD_DIM,
        num_key_value_heads=hidden // workload.HEAD_DIM // 2,
        head_dim=workload.HEAD_DIM,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="spmdrl").eval()
    replace_layers(model, operators_of("sdpa"))
    return Policy(model, kernel="sdpa", temperature=1.0, logits_chunk_tokens=2048)


def one_pass(policy: Policy, sequences: list[Sequence], way: str) -> float:
    """Forward and backward; the loss's value."""
    loss = -policy(lay_end_to_end(sequences, {}, shares_prefixes=WAYS[way])).logprobs.sum()
    loss.backward()
    policy.zero_grad(set_to_none=True)
    return loss.item()


def main() -> None:
    """Measure every case, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--size", type=int, choices=workload.SIZES, default=16, help="times as many parameters")
    parser.add_argument("--scale", type=int, default=1, help="divides all lengths")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of timed passes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "CASE"), help=argparse.SUPPRESS)  # set by this program
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy, sequences = policy_of(args), cases(args.scale)
    if args.peak:
        way, case = args.peak
        print(
            json.dumps(
                memory_of(lambda: one_pass(policy, sequences[case], way), warm=sequences["alone"], policy=policy)
            )
        )
        return
    load_average = os.getloadavg()[0]
    result = {
        "size": args.size,
        "threads": args.threads,
        "cases": {case: measure(args, policy, case, of_case) for case, of_case in sequences.items()},
        "load_average": load_average,
        "load_average_after": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def measure(args: argparse.Namespace, policy: Policy, case: str, sequences: list[Sequence]) -> dict[str, Any]:
    """Times of both ways in turns, and the memory of each."""
    losses = {way: one_pass(policy, sequences, way) for way in WAYS}  # not counted
    durations: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            start = time.perf_counter()
            one_pass(policy, sequences, way)
            durations[way].append(time.perf_counter() - start)
    peaks = {way: run_again("--peak", way, case) for way in WAYS}
    tree = lay_end_to_end(sequences, {}, shares_prefixes=True)
    medians = {way: statistics.median(values) for way, values in durations.items()}
    print(f"{case}: {medians} s, {peaks} MiB", file=sys.stderr, flush=True)
    return {
        "tokens": len(tree.token_ids),
        "computed_tokens": tree.num_computed,
        "difference_of_loss": abs(losses["tree"] / losses["row"] - 1),
        "tree_s": durations["tree"],
        "row_s": durations["row"],
        "ratio": statistics.median(a / b for a, b in zip(durations["tree"], durations["row"], strict=True)),
        "peak_mib": peaks,
    }


def memory_of(one: Callable[[], float], *, warm: list[Sequence], policy: Policy) -> float:
    """Runs in a process of its own: MiB that a pass adds at its worst."""
    one_pass(policy, warm[:1], "row")
    device = torch.device("cpu")
    before = start_peak(device)
    one()
    return (peak_bytes(device) - before) / MIB


if __name__ == "__main__":
    main()
