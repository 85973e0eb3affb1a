"""Time spmdrl's torch engine beside `transformers.generate`: one process, the same weights, alternating calls.

    python benchmarks/engine.py --workload tail --repeats 15

Call i of both engines samples the responses of workload W's step i. spmdrl's engine also returns log-probabilities,
which `generate` is not asked for. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import workload
from generate_peer import check_lengths, generate, request_prompts, time_generate
from transformers import AutoModelForCausalLM, PreTrainedModel

from spmdrl.engine.torch_engine import TorchEngine
from spmdrl.model.attention import choose_kernel
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request


def main() -> None:
    """Build the model, time both engines, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workload.WORKLOADS, default="fixed")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of calls")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        directory = workload.build_model_directory(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    engine = start_engine(model)
    prompts = request_prompts()
    lengths = workload.response_lengths(args.workload, step=args.repeats + 1)
    check_lengths(generate(model, prompts, lengths), lengths, ends_with_eos=args.workload == "tail")
    time_engine(engine, prompts, lengths)
    spmdrl_s, peer_s, tokens = [], [], 0
    for step in range(1, args.repeats + 1):
        lengths = workload.response_lengths(args.workload, step)
        tokens += sum(lengths)
        spmdrl_s.append(time_engine(engine, prompts, lengths))
        peer_s += time_generate(model, prompts, lengths, repeats=1)
    result = {
        "workload": args.workload,
        "requests": len(prompts),
        "response_tokens": tokens / args.repeats,
        "threads": torch.get_num_threads(),
        "spmdrl_s": spmdrl_s,
        "peer_s": peer_s,
        "spmdrl_median_s": statistics.median(spmdrl_s),
        "peer_median_s": statistics.median(peer_s),
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def start_engine(model: PreTrainedModel) -> TorchEngine:
    """spmdrl's engine with the weights of `model`."""
    engine = TorchEngine(
        model.config,
        device=model.device,
        dtype=model.dtype,
        kernel=choose_kernel("auto", model.device.type, model.dtype),
        max_running=workload.ROLLOUTS_PER_STEP,
    )
    load_whole(engine, dict(model.named_parameters()), version=0)
    return engine


def time_engine(engine: TorchEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Seconds until every response has its length."""
    requests = [
        Request(prompt_ids=tuple(prompt), seed=seed, max_response_tokens=length)
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    start = time.perf_counter()
    responses = dict(engine.generate(requests))
    duration_s = time.perf_counter() - start
    assert [len(responses[index].token_ids) for index in range(len(requests))] == list(lengths), "a length is wrong"
    return duration_s


if __name__ == "__main__":
    main()
