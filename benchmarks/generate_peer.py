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
def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int] | None) -> Tensor:
    """Token ids [rows, longest response]: row i continues prompts[i] with lengths[i] tokens, then padding.

    Without lengths a row ends at `<eos>`, as in workload `natural`. `model` is a transformers causal LM with workload
    W's vocabulary, best loaded with `attn_implementation="sdpa"`.
    """
    longest_prompt = max(map(len, prompts))
    token_ids = torch.full((len(prompts), longest_prompt), workload.PAD)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest_prompt - len(prompt) :] = torch.tensor(prompt)
    processors = LogitsProcessorList()
    all_equal = lengths is not None and len(set(lengths)) == 1
    if lengths is not None and not all_equal:
        processors.append(ForcedLengths(lengths, prompt_tokens=longest_prompt))
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=workload.MAX_RESPONSE_TOKENS["natural"] if lengths is None else max(lengths),
        pad_token_id=workload.PAD,
        eos_token_id=workload.EOS,
        suppress_tokens=[workload.PAD, workload.EOS] if all_equal else None,
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
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int] | None
) -> tuple[float, int]:
    """Seconds of a call of `generate`, and the response tokens that it sampled. Call it once before, to warm up."""
    start = time.perf_counter()
    sampled = generate(model, prompts, lengths)
    return time.perf_counter() - start, sum(map(response_tokens, sampled.tolist()))


def response_tokens(row: list[int]) -> int:
    """The tokens of a response up to its `<eos>`, with it; what follows is padding."""
    return row.index(workload.EOS) + 1 if workload.EOS in row else len(row)


def warm_up(model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int] | None) -> None:
    """Call `generate` once. Raises unless every row has the length that it was given."""
    responses = generate(model, prompts, lengths).tolist()
    ends_with_eos = len(set(lengths or ())) > 1
    for row, length in zip(responses, lengths or [], strict=lengths is not None):
        stop = length - 1 if ends_with_eos else length
        ordinary = all(token not in (workload.PAD, workload.EOS) for token in row[:stop])
        rest = [workload.EOS] + [workload.PAD] * (len(row) - length) if ends_with_eos else []
        assert ordinary and row[stop:] == rest, f"a response of {length} tokens came out as {row}"


def main() -> None:
    """Build the model, time it, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workload.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    model = load_model(args.size)
    num_prompts = workload.prompts_per_step(args)
    prompts, lengths = request_prompts(num_prompts), lengths_of(args.workload, 1, num_prompts)
    warm_up(model, prompts, lengths)
    calls = [time_generate(model, prompts, lengths) for _ in range(args.repeats)]
    result = {
        "engine": "transformers.generate",
        "workload": args.workload,
        "parameters": workload.SIZES[args.size][-1],
        "requests": len(prompts),
        "threads": torch.get_num_threads(),
        "response_tokens": [tokens for _, tokens in calls],
        "durations_s": [seconds for seconds, _ in calls],
        "median_s": statistics.median(seconds for seconds, _ in calls),
        "median_us_per_token": statistics.median(1e6 * seconds / tokens for seconds, tokens in calls),
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def load_model(size: int) -> PreTrainedModel:
    """The model of this size, as `generate` is fastest."""
    with tempfile.TemporaryDirectory() as folder:
        directory = workload.build_model_directory(Path(folder), size=size)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


def request_prompts(count: int = workload.PROMPTS_PER_STEP) -> list[list[int]]:
    """The token ids of the first step's prompts, each once for every rollout of its group."""
    tokenizer = workload.build_tokenizer()
    return [tokenizer.encode(p) for p, _ in workload.prompts(1, count=count) for _ in range(workload.GROUP_SIZE)]


def lengths_of(which: workload.Workload, step: int, num_prompts: int) -> list[int] | None:
    """The response lengths of a step; None where they are not given."""
    return workload.response_lengths(which, step, num_prompts=num_prompts) if which in workload.FORCED else None


if __name__ == "__main__":
    main()
