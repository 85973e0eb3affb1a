"""Time spmdrl's torch engine beside `transformers.generate`: one process, the same weights, alternating calls.

    python benchmarks/engine.py --workload tail --repeats 15

Call i of both engines samples the responses of workload W's step i. spmdrl's engine also returns log-probabilities,
which `generate` is not asked for. Where responses end by themselves, seconds per response token are to be compared.
Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import workload
from generate_peer import lengths_of, load_model, request_prompts, time_generate, warm_up
from transformers import PreTrainedModel

from spmdrl.algo.seeds import mix
from spmdrl.cpu.kernels_c import CannotCompile, compile_all, use_compiled
from spmdrl.cpu.linear_layers import choose_kernels, shapes_of, use_kernels
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.attention import choose_kernel
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request

Call = tuple[float, int]  # seconds, response tokens


def main() -> None:
    """Build the model, time both engines, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workload.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of calls")
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    model, num_prompts = load_model(args.size), workload.prompts_per_step(args)
    prompts = request_prompts(num_prompts)
    engine = start_engine(model, max_running=len(prompts))
    lengths = lengths_of(args.workload, args.repeats + 1, num_prompts)
    warm_up(model, prompts, lengths)
    time_engine(engine, requests(prompts, lengths))
    spmdrl, peer = list[Call](), list[Call]()
    for step in range(1, args.repeats + 1):
        lengths = lengths_of(args.workload, step, num_prompts)
        spmdrl.append(time_engine(engine, requests(prompts, lengths, seed=step)))
        peer.append(time_generate(model, prompts, lengths))
    result = {
        "workload": args.workload,
        "parameters": workload.SIZES[args.size][-1],
        "requests": len(prompts),
        "threads": torch.get_num_threads(),
        **side("spmdrl", spmdrl),
        **side("peer", peer),
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def side(name: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Make the part of the printed object that is about one engine."""
    return {
        f"{name}_s": [seconds for seconds, _ in calls],
        f"{name}_response_tokens": [tokens for _, tokens in calls],
        f"{name}_us_per_token": [1e6 * seconds / tokens for seconds, tokens in calls],
        f"{name}_median_s": statistics.median(seconds for seconds, _ in calls),
    }


def start_engine(model: PreTrainedModel, *, max_running: int) -> TorchEngine:
    """spmdrl's engine with the weights of `model`."""
    use_fastest_kernels(model)
    engine = TorchEngine(
        model.config,
        device=model.device,
        dtype=model.dtype,
        kernel=choose_kernel("auto", model.device.type, model.dtype),
        max_running=max_running,
    )
    load_whole(engine, dict(model.named_parameters()), version=0)
    return engine


def use_fastest_kernels(model: PreTrainedModel) -> None:
    """Compute as a run on this machine would choose to."""
    if model.device.type == "cpu":
        use_kernels(choose_kernels(shapes_of(model.config)))
        try:
            compile_all()
        except CannotCompile as error:
            print(f"layers by torch: {error}", file=sys.stderr)
        else:
            use_compiled(True)


def requests(prompts: Sequence[Sequence[int]], lengths: Sequence[int] | None, *, seed: int = 0) -> list[Request]:
    """Requests for responses of these lengths; without lengths, for responses that end at `<eos>`."""
    longest = workload.MAX_RESPONSE_TOKENS["natural"]
    stops = frozenset({workload.EOS}) if lengths is None else frozenset[int]()
    return [
        Request(prompt_ids=tuple(prompt), seed=mix(seed, row), max_response_tokens=length, stop_token_ids=stops)
        for row, (prompt, length) in enumerate(zip(prompts, lengths or [longest] * len(prompts), strict=True))
    ]


def time_engine(engine: TorchEngine, requests: Sequence[Request]) -> Call:
    """Seconds until every response is there, and their tokens. Raises when one has not the length that it was given."""
    start = time.perf_counter()
    responses = dict(engine.generate(requests))
    duration_s = time.perf_counter() - start
    lengths = [len(responses[row].token_ids) for row in range(len(requests))]
    for request, length in zip(requests, lengths, strict=True):
        assert request.stop_token_ids or length == request.max_response_tokens, "a length is wrong"
    return duration_s, sum(lengths)


if __name__ == "__main__":
    main()
