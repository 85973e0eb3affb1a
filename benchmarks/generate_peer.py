"""Time `transformers.generate` on workload W's requests: what spmdrl's engine is compared with.

    python benchmarks/generate_peer.py --workload tail --repeats 5

All requests are one batch that runs to its longest response; sampling is plain (temperature 1, no top-p, no top-k).
The options are the fastest found on a CPU: float32, SDPA, the dynamic cache, no compilation.
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
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel


class ForcedLengths(LogitsProcessor):
    """Row i draws `<eos>` as its token number lengths[i], and never before; `<pad>` is never drawn."""

    def __init__(self, lengths: Sequence[int], *, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._ending: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            self._ending.setdefault(length, []).append(row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Change the next token's scores [rows, vocabulary] in place."""
        scores[:, [workload.PAD, workload.EOS]] = -torch.inf
        if rows := self._ending.get(input_ids.shape[1] - self._prompt_tokens + 1):
            scores[rows] = -torch.inf
            scores[rows, workload.EOS] = 0.0
        return scores


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """Token ids [rows, longest response]: row i continues prompts[i] with lengths[i] tokens, then padding.

    `model` is a transformers causal LM with workload W's vocabulary, best loaded with `attn_implementation="sdpa"`.
    """
    longest_prompt = max(map(len, prompts))
    token_ids = torch.full((len(prompts), longest_prompt), workload.PAD)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest_prompt - len(prompt) :] = torch.tensor(prompt)
    processors = LogitsProcessorList()
    if len(set(lengths)) > 1:
        processors.append(ForcedLengths(lengths, prompt_tokens=longest_prompt))
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=max(lengths),
        pad_token_id=workload.PAD,
        eos_token_id=workload.EOS,
        suppress_tokens=None if processors else [workload.PAD, workload.EOS],
        disable_compile=True,
    )
    sampled = model.generate(
        token_ids,
        attention_mask=(token_ids != workload.PAD).long(),
        generation_config=config,
        logits_processor=processors,
    )
    return sampled[:, longest_prompt:]


def time_generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int], repeats: int
) -> list[float]:
    """Seconds of each of `repeats` calls of `generate`. Call `generate` once before, to warm up."""
    durations_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        generate(model, prompts, lengths)
        durations_s.append(time.perf_counter() - start)
    return durations_s


def check_lengths(responses: Tensor, lengths: Sequence[int], *, ends_with_eos: bool) -> None:
    """Raise unless every row has the length that it was given."""
    for row, length in zip(responses.tolist(), lengths, strict=True):
        stop = length - 1 if ends_with_eos else length
        ordinary = all(token not in (workload.PAD, workload.EOS) for token in row[:stop])
        rest = [workload.EOS] + [workload.PAD] * (len(row) - length) if ends_with_eos else []
        assert ordinary and row[stop:] == rest, f"a response of {length} tokens came out as {row}"


def main() -> None:
    """Build the model, time it, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workload.WORKLOADS, default="fixed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        directory = workload.build_model_directory(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
        prompts = request_prompts()
        lengths = workload.response_lengths(args.workload, step=1)
        check_lengths(generate(model, prompts, lengths), lengths, ends_with_eos=args.workload == "tail")
        durations_s = time_generate(model, prompts, lengths, args.repeats)
    median_s = statistics.median(durations_s)
    result = {
        "engine": "transformers.generate",
        "workload": args.workload,
        "requests": len(prompts),
        "response_tokens": sum(lengths),
        "longest_response_tokens": max(lengths),
        "threads": torch.get_num_threads(),
        "durations_s": durations_s,
        "median_s": median_s,
        "response_tokens_per_s": sum(lengths) / median_s,
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def request_prompts(step: int = 1) -> list[list[int]]:
    """The token ids of a step's prompts, each once for every rollout of its group."""
    tokenizer = workload.build_tokenizer()
    return [tokenizer.encode(p) for p, _ in workload.prompts(step) for _ in range(workload.GROUP_SIZE)]


if __name__ == "__main__":
    main()
