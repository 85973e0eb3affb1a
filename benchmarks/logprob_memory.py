"""Measure memory and time of the log-probability head, beside the plain one that holds all of [T, V].

    python benchmarks/logprob_memory.py
    python benchmarks/logprob_memory.py --device cuda --dtype bfloat16 --hidden-size 1024 --plain-gib 60

One pass is forward and backward of log-probabilities and entropy, both with gradients: hidden [T, D] and weight [V, D]
are leaves. It scores all tokens, as the plain head does, or the second half of them, as a policy does when the first is
prompts. On CUDA there is one more, whose tiles are torch's and not Triton's. Of the Jensen-Shannon divergence from a
teacher of twice the width, the memory at one size is measured. Peak memory is measured in a process of its own for
every case: what the pass adds to the inputs and the weight at its worst, less the gradient of the weight, which every
way of doing it must return. On a CPU that is the growth of the resident set, as the kernel keeps its peak;
on CUDA what torch has allocated. The gradient of hidden is included. Plain cases that would need more than
`--plain-gib` are left out; as every tensor of theirs that counts has T x V elements, the line through the two largest
that were measured says what they would need. Times are of passes that alternate in one process. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import workload
from program import run_again
from torch import Tensor

from spmdrl.config import ModelConfig
from spmdrl.model import logits_tile
from spmdrl.model.divergence import TeacherHead, next_token_divergence
from spmdrl.model.linear import linear
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import FAST_HEAD, HeadOptions, next_token_logprobs
from spmdrl.model.logprobs import Head as TiledHead

MIB = 2**20
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
PLAIN_TENSORS = 6  # of T x V elements that exist at a time in a plain pass, at most: to choose what to leave out
COMPARED_TOKENS = 4096
FEW_TOKENS = 64  # of the pass before, in which the libraries take what they need for themselves

Scores = tuple[Tensor, Tensor]
Leaves = tuple[Tensor, ...]  # hidden, weight, targets; for a divergence the teacher's hidden and weight
Head = Callable[..., Scores]


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor, head: TiledHead = FAST_HEAD) -> Scores:
    """spmdrl's."""
    chunk = ModelConfig(path=".").logits_chunk_tokens
    return next_token_logprobs(hidden, weight, None, targets, HeadOptions(Scale(), chunk), head=head)


def tiled_after_prompts(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
    """spmdrl's, of the second half of the tokens."""
    responses = torch.arange(len(hidden) // 2, len(hidden), device=hidden.device)
    return tiled(hidden[responses], weight, targets[responses])


def tiled_by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
    """spmdrl's, with a CPU's tiles."""
    return tiled(hidden, weight, targets, TiledHead(linear, tile=logits_tile))


def divergence(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
) -> Scores:
    """spmdrl's Jensen-Shannon divergence, whose second pass needs the most; in the place of log-probabilities."""
    _, entropy, distance = next_token_divergence(
        *(hidden, weight, None, targets, HeadOptions(Scale(), ModelConfig(path=".").logits_chunk_tokens)),
        teacher_hidden=teacher_hidden,
        teacher=TeacherHead(weight=teacher_weight, bias=None, scale=Scale()),
        kind="jsd",
    )
    return distance, entropy


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
    """The definition, and autograd."""
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


HEADS: Mapping[str, Head] = {
    "tiled": tiled,
    "plain": plain,
    "after_prompts": tiled_after_prompts,
    "by_torch": tiled_by_torch,
    "divergence": divergence,
}
# A head, and the head that its time is divided by.
RATIOS = {"ratio": ("tiled", "plain"), "after_prompts_ratio": ("after_prompts", "tiled")}
RATIOS_ON_CUDA = {**RATIOS, "over_torch_ratio": ("tiled", "by_torch")}


def main() -> None:
    """Measure every case, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens in a pass")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of timed passes of each size")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--plain-gib", type=float, help="the most a plain pass may take; else 0.7 of what is free")
    parser.add_argument("--case", nargs=2, metavar=("HEAD", "TOKENS"), help=argparse.SUPPRESS)  # set by this program
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if args.case:
        name, num_tokens = args.case[0], int(args.case[1])
        teacher = teacher_leaves(args, num_tokens, device) if name == "divergence" else ()
        print(json.dumps(memory_of_pass(name, (*leaves(args, num_tokens, device), *teacher))))
        return
    load_average = os.getloadavg()
    plain_bytes = args.plain_gib * 2**30 if args.plain_gib else 0.7 * free_bytes(device)
    affordable = [n for n in args.tokens if PLAIN_TENSORS * 4 * n * args.vocabulary <= plain_bytes]
    compared_tokens = COMPARED_TOKENS if COMPARED_TOKENS in args.tokens else max(args.tokens)
    memory = {
        head: {str(n): in_own_process(head, n) for n in sizes}
        for head, sizes in {
            "tiled": args.tokens,
            "after_prompts": args.tokens,
            "divergence": [compared_tokens],
            "plain": affordable,
        }.items()
    }
    at_4k, is_measured = plain_peak_mib(memory["plain"], compared_tokens)
    result = {
        "device": args.device,
        "dtype": args.dtype,
        "vocabulary": args.vocabulary,
        "hidden_size": args.hidden_size,
        "threads": args.threads,
        "memory": memory,
        "compared_tokens": compared_tokens,
        "tiled_peak_mib": memory["tiled"][str(compared_tokens)]["peak_mib"],
        "divergence_peak_mib": memory["divergence"][str(compared_tokens)]["peak_mib"],
        "plain_peak_mib": at_4k,
        "plain_peak_is_measured": is_measured,
        "memory_ratio": memory["tiled"][str(compared_tokens)]["peak_mib"] / at_4k,
        "after_prompts_memory_ratio": memory["after_prompts"][str(compared_tokens)]["peak_mib"]
        / memory["tiled"][str(compared_tokens)]["peak_mib"],
        "times": {str(n): times(leaves(args, n, device), repeats=args.repeats) for n in affordable},
        "load_average": load_average[0],
        "load_average_after": os.getloadavg()[0],
        "versions": workload.versions(["torch"]),
    }
    print(json.dumps(result))


def free_bytes(device: torch.device) -> int:
    """Count the bytes that can be had of the device's memory now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def leaves(args: argparse.Namespace, num_tokens: int, device: torch.device) -> Leaves:
    """Hidden states and weight whose logits have a deviation of about 1, and targets."""
    draw = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(num_tokens, args.hidden_size, generator=draw, device=device)
    weight = torch.randn(args.vocabulary, args.hidden_size, generator=draw, device=device).mul_(args.hidden_size**-0.5)
    targets = torch.randint(args.vocabulary, (num_tokens,), generator=draw, device=device)
    dtype = getattr(torch, args.dtype)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def teacher_leaves(args: argparse.Namespace, num_tokens: int, device: torch.device) -> Leaves:
    """Hidden states and weight of a teacher that is twice as wide."""
    draw, width, dtype = torch.Generator(device).manual_seed(1), 2 * args.hidden_size, getattr(torch, args.dtype)
    hidden = torch.randn(num_tokens, width, generator=draw, device=device)
    weight = torch.randn(args.vocabulary, width, generator=draw, device=device).mul_(width**-0.5)
    return hidden.to(dtype), weight.to(dtype)


def one_pass(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, *teacher: Tensor) -> float:
    """Forward and backward; the loss's value. The gradients are those of this pass alone."""
    hidden.grad = weight.grad = None
    logprobs, entropy = head(hidden, weight, targets, *teacher)
    loss = logprobs.mean() + 0.01 * entropy.mean()
    loss.backward()
    return loss.item()


def memory_of_pass(name: str, inputs: Leaves) -> dict[str, float]:
    """Runs in a process of its own: the peak of one pass."""
    hidden, weight, targets, *teacher = inputs
    device, few = hidden.device, FEW_TOKENS
    small = hidden[:few].detach().requires_grad_(), weight[:few].detach().requires_grad_(), targets[:few] % few
    one_pass(HEADS[name], *small, *(x[:few] for x in teacher))
    before = start_peak(device)
    start = time.perf_counter()
    loss = one_pass(HEADS[name], *inputs)
    duration_s = time.perf_counter() - start
    peak = peak_bytes(device) - before - weight.nbytes
    return {"peak_mib": peak / MIB, "hidden_gradient_mib": hidden.nbytes / MIB, "pass_s": duration_s, "loss": loss}


def start_peak(device: torch.device) -> int:
    """Forget the peak so far; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use since `start_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def in_own_process(head: str, num_tokens: int) -> dict[str, float]:
    """`memory_of_pass`, with this program's own arguments."""
    found: dict[str, float] = run_again("--case", head, str(num_tokens))
    print(f"{head} {num_tokens}: {found['peak_mib']:.0f} MiB, {found['pass_s']:.2f} s", file=sys.stderr, flush=True)
    return found


def plain_peak_mib(found: Mapping[str, Mapping[str, float]], num_tokens: int) -> tuple[float, bool]:
    """The plain peak at `num_tokens`, and whether it was measured; else it is on the line through the largest two."""
    if str(num_tokens) in found:
        return found[str(num_tokens)]["peak_mib"], True
    (x0, y0), (x1, y1) = [(int(n), case["peak_mib"]) for n, case in found.items()][-2:]
    return y1 + (y1 - y0) / (x1 - x0) * (num_tokens - x1), False


def times(inputs: Leaves, *, repeats: int) -> dict[str, Any]:
    """Passes of every head, alternating; the first of each is not counted. Ratios are medians over the rounds."""
    device, num_tokens = inputs[0].device, len(inputs[0])
    compared = RATIOS_ON_CUDA if device.type == "cuda" else RATIOS
    durations: dict[str, list[float]] = {name: [] for pair in compared.values() for name in pair}
    for _ in range(1 + repeats):
        for name, seconds in durations.items():
            start = time.perf_counter()
            one_pass(HEADS[name], *inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    counted = {name: seconds[1:] for name, seconds in durations.items()}
    ratios = {
        name: [one / other for one, other in zip(counted[ours], counted[theirs], strict=True)]
        for name, (ours, theirs) in compared.items()
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    print(f"{num_tokens} tokens: {medians}", file=sys.stderr, flush=True)
    return {"spmdrl_s": counted["tiled"], "peer_s": counted["plain"], "ratios": ratios["ratio"], **medians} | {
        f"{name}_s": seconds for name, seconds in counted.items() if name not in ("tiled", "plain")
    }


if __name__ == "__main__":
    main()
