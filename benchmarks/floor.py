"""Time the matrix products of one training step of workload W alone: the floor of the time of a step.

    python benchmarks/floor.py --size 1 --repeats 20

The linear layers of 128 rollouts of 32 tokens: the decode steps of the engine, then forward and backward of the update,
with the kernels that a run chooses. Attention, norms, sampling, the optimizer and everything else are left out. Prints
one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import workload
from engine import use_fastest_kernels
from generate_peer import load_model
from torch import Tensor, nn

from spmdrl.model.linear import linear, outer


def main() -> None:
    """Time the products of sampling and of training in turns, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workload.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    assert args.workload == "fixed", "only the lengths of --workload fixed are known beforehand"
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    model = load_model(args.size)
    use_fastest_kernels(model)
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]
    rollouts = workload.prompts_per_step(args) * workload.GROUP_SIZE
    steps = workload.MAX_RESPONSE_TOKENS["fixed"]
    tokens = workload.PROMPT_TOKENS + steps
    sampling, training = list[float](), list[float]()
    with torch.no_grad():
        for _ in range(args.repeats + 1):
            sampling.append(steps * forward_s(weights, rollouts))
            training.append(update_s(weights, rollouts * tokens))
    flop = 2 * sum(weight.numel() for weight in weights) * rollouts
    result = {
        "parameters": workload.SIZES[args.size][-1],
        "threads": args.threads,
        "sampling_s": sampling[1:],  # the first compiles
        "training_s": training[1:],
        "floor_s": [sum(pair) for pair in zip(sampling[1:], training[1:], strict=True)],
        "sampling_gflop": flop * steps / 1e9,
        "training_gflop": 3 * flop * tokens / 1e9,
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch"]),
    }
    print(json.dumps(result))


def forward_s(weights: list[Tensor], rows: int) -> float:
    """Seconds of x W^T for every weight, with so many rows."""
    inputs = [torch.ones(rows, weight.shape[1]) for weight in weights]
    start = time.perf_counter()
    for x, weight in zip(inputs, weights, strict=True):
        linear(x, weight)
    return time.perf_counter() - start


def update_s(weights: list[Tensor], rows: int) -> float:
    """Seconds of x W^T, of dy W and of dy^T x for every weight, with so many rows."""
    total = 0.0
    for weight in weights:
        x, grad = torch.ones(rows, weight.shape[1]), torch.ones(rows, weight.shape[0])
        start = time.perf_counter()
        linear(x, weight)
        linear(grad, weight.t())
        outer(grad, x)
        total += time.perf_counter() - start
    return total


if __name__ == "__main__":
    main()
