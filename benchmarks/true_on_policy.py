"""Time what `true_on_policy = true` costs: sampling, and forward with backward, beside the plain mode.

    python benchmarks/true_on_policy.py --workload tail --repeats 15

One process, the same weights, alternating calls: in repeat i both modes sample the responses of workload W's step i and
go forward and backward over their own, packed into one micro-batch. Prints one JSON object; a ratio above 1 is what the
mode costs, and `mismatch` the largest difference between engine and trainer over all tokens, in nats.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import workload
from engine import requests, time_engine, use_fastest_kernels
from generate_peer import request_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.model.kernels import Kernel
from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.refit.refit import load_whole
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import MicroBatch, Request, Sequence


@dataclass
class Mode:
    """An engine and a policy with the same weights, and what they took, in seconds."""

    engine: TorchEngine
    policy: Policy
    sampling_s: list[float] = field(default_factory=list)
    training_s: list[float] = field(default_factory=list)
    mismatch: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel, kernel: Kernel) -> Mode:
        """With the operators of the kernel."""
        own = copy.deepcopy(model)
        replace_layers(own, operators_of(kernel))
        engine = TorchEngine(
            model.config,
            device=model.device,
            dtype=model.dtype,
            kernel=kernel,
            max_running=workload.ROLLOUTS_PER_STEP,
        )
        load_whole(engine, dict(model.named_parameters()), version=0)
        return cls(engine, Policy(own, kernel=kernel, temperature=1.0, logits_chunk_tokens=2048))

    def step(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Sample, score, go backward."""
        asked = requests(prompts, lengths)
        self.sampling_s.append(time_engine(self.engine, asked)[0])
        micro_batch = self._sampled(asked)
        self.policy.zero_grad()
        start = time.perf_counter()
        scores = self.policy(micro_batch)
        scores.logprobs.sum().backward()
        self.training_s.append(time.perf_counter() - start)
        distance = (scores.logprobs.detach() - micro_batch.rollout_logprobs)[micro_batch.loss_mask]
        self.mismatch = max(self.mismatch, float(distance.abs().max()))

    @property
    def durations_s(self) -> list[float]:
        """Seconds of each step, sampling and training together."""
        return [sum(pair) for pair in zip(self.sampling_s, self.training_s, strict=True)]

    def _sampled(self, requests: list[Request]) -> MicroBatch:
        """The responses that were timed: the same seeds give the same ones."""
        responses = dict(self.engine.generate(requests))
        sequences = [
            Sequence(
                index=i,
                token_ids=request.prompt_ids + responses[i].token_ids,
                loss_mask=(False,) * len(request.prompt_ids) + (True,) * len(responses[i].token_ids),
                rollout_logprobs=(0.0,) * len(request.prompt_ids) + responses[i].logprobs,
                reward=1.0,
            )
            for i, request in enumerate(requests)
        ]
        return lay_end_to_end(sorted(sequences, key=lambda one: len(one.token_ids), reverse=True), {})


def main() -> None:
    """Build the model, time both modes, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workload.FORCED, default="fixed")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of calls")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory() as folder:
        directory = workload.build_model_directory(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        ).eval()
    use_fastest_kernels(model)
    plain, exact = Mode.of(model, "sdpa"), Mode.of(model, "invariant")
    prompts = request_prompts()
    for step in range(args.repeats + 1):
        lengths = workload.response_lengths(args.workload, step)
        for mode in (plain, exact) if step % 2 else (exact, plain):
            mode.step(prompts, lengths)
    sampling = [b / a for a, b in zip(plain.sampling_s[1:], exact.sampling_s[1:], strict=True)]
    training = [b / a for a, b in zip(plain.training_s[1:], exact.training_s[1:], strict=True)]
    result = {
        "workload": args.workload,
        "threads": torch.get_num_threads(),
        "sampling_ratio": statistics.median(sampling),
        "training_ratio": statistics.median(training),
        "sampling_ratios": sampling,
        "training_ratios": training,
        "plain_sampling_s": statistics.median(plain.sampling_s[1:]),
        "plain_training_s": statistics.median(plain.training_s[1:]),
        "mismatch": {"plain": plain.mismatch, "true_on_policy": exact.mismatch},
        "load_average": os.getloadavg()[0],
        "exact_s": exact.durations_s[1:],
        "plain_s": plain.durations_s[1:],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
