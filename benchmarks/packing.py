"""Time the balance of sequences over ranks beside verl's, and compare how even both are.

    python benchmarks/packing.py [--repeats 3] [--limit-s 60] [--largest 1000000]

benchmarks/run.sh makes .venv-verl, with verl alone: its requirements are not needed for this (packing_peer.py). The two
sides run alternately on the same lengths, each call of verl in a process of its own, and only the split is timed. A
call of verl that takes longer than the limit is ended and not repeated; the largest size is not asked of it. Balance
is the excess of the costliest rank: its tokens over the mean of all ranks, minus 1.

Prints a table to stderr and one JSON object: `cases`, each with `spmdrl_s` and `peer_s` (a call each, that alternated),
`ratios`, `spmdrl_excess` and `peer_excess`, `peer_limit_s` where verl did not end within it, and `pack_s`, what `pack`
takes to cut all of the sequences, as those of one rank, into micro-batches of 16,384 tokens; `spmdrl_s` and `peer_s` of
the case that counts; `summaries`, the table; `never_slower_nor_less_even`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import workload

from spmdrl.algo.packing import balance, imbalance, pack

HERE = Path(__file__).resolve().parent
PEER_PYTHON = HERE.parent / ".venv-verl" / "bin" / "python"
PEER = (HERE / "requirements-verl.txt").read_text(encoding="utf-8").splitlines()[-1]
PEER_LARGEST = 100_000  # sequences; more are only given to spmdrl
MICRO_BATCH_TOKENS = 16_384
# (sequences, ranks)
SIZES = [(1_000, 8), (1_000, 64), (10_000, 8), (10_000, 64), (65_536, 1_024), (100_000, 8), (100_000, 64)]
SIZES += [(1_000_000, 64), (1_000_000, 1_024)]
HEADLINE = {"kind": "lognormal", "num_sequences": 10_000, "num_ranks": 64}

Split = list[list[int]]
Json = dict[str, Any]


def uniform(draw: random.Random) -> int:
    """Any length up to 4,096."""
    return draw.randint(1, 4096)


def lognormal(draw: random.Random) -> int:
    """A response's length: a median of 1,000 tokens, a long tail, cut at 16,384."""
    return min(max(round(draw.lognormvariate(math.log(1000), 1.0)), 1), MICRO_BATCH_TOKENS)


KINDS: dict[str, Callable[[random.Random], int]] = {"uniform": uniform, "lognormal": lognormal}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="pairs of each case")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one call of verl")
    parser.add_argument("--largest", type=int, default=1_000_000, help="sequences; larger cases are left out")
    parser.add_argument("--without-peer", action="store_true", help="spmdrl alone")
    args = parser.parse_args()
    if not args.without_peer and not PEER_PYTHON.exists():
        sys.exit(f"there is no {PEER_PYTHON}; bash benchmarks/run.sh makes it, --without-peer does without")
    load_average, cases = os.getloadavg()[0], []
    for num_sequences, num_ranks in (size for size in SIZES if size[0] <= args.largest):
        for kind in KINDS:
            case: Json = {"kind": kind, "num_sequences": num_sequences, "num_ranks": num_ranks}
            largest_of_peer = 0 if args.without_peer else PEER_LARGEST
            measure(case, repeats=args.repeats, limit_s=args.limit_s, asks_peer=num_sequences <= largest_of_peer)
            cases.append(case)
            print(summary(case), file=sys.stderr, flush=True)
    headline = next((case for case in cases if HEADLINE.items() <= case.items()), cases[-1])
    good = all(case["ratio"] <= 1 and case["spmdrl_excess"] <= case["peer_excess"] for case in cases if case["peer_s"])
    result = {
        "peer": PEER,
        "spmdrl_s": headline["spmdrl_s"],
        "peer_s": headline["peer_s"],
        "summaries": [summary(case) for case in cases],
        "cases": cases,
        "never_slower_nor_less_even": good,
        "load_average": load_average,
        "versions": workload.versions([]),
    }
    print(json.dumps(result))


def measure(case: Json, *, repeats: int, limit_s: float, asks_peer: bool) -> None:
    """Both sides, alternating, on the same lengths; what is found is added to the case."""
    kind, num_sequences, num_ranks = case["kind"], case["num_sequences"], case["num_ranks"]
    draw = random.Random(f"{kind} {num_sequences}")
    lengths = [KINDS[kind](draw) for _ in range(num_sequences)]
    case |= {"spmdrl_s": [], "peer_s": []}
    for _ in range(repeats):
        duration_s, shares = timed(lambda: balance(lengths, num_ranks))
        case["spmdrl_s"].append(duration_s)
        case["spmdrl_excess"] = excess(shares, lengths)
        if asks_peer:
            try:
                duration_s, shares = ask_peer(lengths, num_ranks, limit_s=limit_s)
            except subprocess.TimeoutExpired:
                case["peer_limit_s"], asks_peer = limit_s, False
                continue
            case["peer_s"].append(duration_s)
            case["peer_excess"] = excess(shares, lengths)
    if case["peer_s"]:
        case["ratios"] = [ours / theirs for ours, theirs in zip(case["spmdrl_s"], case["peer_s"], strict=True)]
        case["ratio"] = statistics.median(case["ratios"])
    if num_ranks == min(ranks for sequences, ranks in SIZES if sequences == num_sequences):
        case["pack_s"], micro_batches = timed(
            lambda: pack(lengths, max_tokens=MICRO_BATCH_TOKENS, sequences_per_micro_batch=None)
        )
        case["num_micro_batches"] = len(micro_batches)


def timed(call: Callable[[], Split]) -> tuple[float, Split]:
    """(seconds, result)."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def ask_peer(lengths: Sequence[int], num_ranks: int, *, limit_s: float) -> tuple[float, Split]:
    """(seconds, shares) of one call of verl."""
    done = subprocess.run(
        [str(PEER_PYTHON), str(HERE / "packing_peer.py")],
        input=json.dumps({"lengths": lengths, "num_ranks": num_ranks}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=limit_s,
    )
    answer = json.loads(done.stdout)
    return answer["duration_s"], answer["shares"]


def excess(shares: Split, lengths: Sequence[int]) -> float:
    """Tokens of the costliest rank over the mean, minus 1; every sequence is in one share."""
    assert sorted(index for share in shares for index in share) == list(range(len(lengths))), "not a split"
    return imbalance([sum(lengths[i] for i in share) for share in shares]) - 1


def summary(case: dict[str, Any]) -> str:
    """One line."""
    ours = f"{statistics.median(case['spmdrl_s']) * 1e3:.1f} ms, excess {case['spmdrl_excess']:.1e}"
    theirs = "verl not asked"
    if "peer_limit_s" in case:
        theirs = f"verl not done in {case['peer_limit_s']:g} s"
    elif case["peer_s"]:
        peer_ms = statistics.median(case["peer_s"]) * 1e3
        theirs = f"verl {peer_ms:.1f} ms, excess {case['peer_excess']:.1e}; ratio {case['ratio']:.3f}"
    packed = f"; pack {case['pack_s']:.2f} s" if "pack_s" in case else ""
    return f"{case['num_sequences']} {case['kind']} over {case['num_ranks']}: {ours}; {theirs}{packed}"


if __name__ == "__main__":
    main()
