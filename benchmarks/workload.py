"""Workload W: one small GRPO step, the same for spmdrl and for the trainers it is timed against.

A tiny random Qwen3 with a character tokenizer answers sums such as `07+35=`: 16 prompts x 8 rollouts a step.

- `fixed`: every response has 32 tokens; `<eos>` and `<pad>` are impossible.
- `tail`: the response lengths follow a lognormal (median 16, sigma 1.0, cut at 256), the same for every trainer.
  A length counts the `<eos>` that ends the response: impossible before, certain there.
- `natural`: nothing is forced. A response ends by itself at `<eos>`, or after 64 tokens; `<pad>` is a token like any
  other. Lengths are random with the same distribution for every trainer, so seconds per response token are compared.

Options make the model 4 or 16 times as large, and a step 4 times. torch and transformers are imported where they are
used, so that a reward process that loads this file stays small.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import random
import resource
import statistics
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Workload = Literal["fixed", "tail", "natural"]
WORKLOADS: tuple[Workload, ...] = ("fixed", "tail", "natural")
FORCED: tuple[Workload, ...] = ("fixed", "tail")  # those whose lengths are given

PROMPTS_PER_STEP = 16
GROUP_SIZE = 8
ROLLOUTS_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS: Mapping[Workload, int] = {"fixed": 32, "tail": 256, "natural": 64}
TAIL_MEDIAN_TOKENS = 16
TAIL_SIGMA = 1.0

LEARNING_RATE = 1e-3
CLIP = 0.2
MAX_GRAD_NORM = 1.0

PAD, EOS = 0, 1
VOCABULARY = ("<pad>", "<eos>", *string.digits, *string.ascii_lowercase, *"+-*/=()[]{}<>.,:;!?'\"_#%& ")
HEAD_DIM, NUM_LAYERS = 32, 4
# By about how many times as many parameters: hidden size, intermediate size, parameters.
SIZES = {1: (128, 384, 796_032), 4: (256, 768, 3_164_672), 16: (512, 1536, 12_620_544)}


def add_arguments(parser: argparse.ArgumentParser, *, workloads: Sequence[Workload] = WORKLOADS) -> None:
    """Add the options that say what is sampled, and on how many threads."""
    parser.add_argument("--workload", choices=workloads, default="fixed")
    parser.add_argument("--size", type=int, choices=SIZES, default=1, help="times as many parameters")
    parser.add_argument("--rollouts-factor", type=int, choices=(1, 4), default=1, help="times as many prompts a step")
    parser.add_argument("--threads", type=int, default=2, help="of each process")


def parse_step_arguments(about: str) -> argparse.Namespace:
    """Parse the options of a program that times training steps."""
    parser = argparse.ArgumentParser(description=about)
    add_arguments(parser)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the k3 divergence to the reference model")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps that are not counted, at least 1")
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="processes, which share the rollouts")
    parser.add_argument("--teacher-layers", type=int, default=0, help="of a teacher, in place of rewards; 0: none")
    args = parser.parse_args()
    if args.warmup_steps < 1 or args.steps < 1:
        parser.error("--warmup-steps and --steps are at least 1")
    return args


def prompts_per_step(args: argparse.Namespace) -> int:
    """The prompts of a step under these options."""
    return PROMPTS_PER_STEP * int(args.rollouts_factor)


def prompts(step: int, *, count: int = PROMPTS_PER_STEP, seed: int = 0) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of a step."""
    draw = random.Random(f"prompts {seed} {step}")
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [(f"{a:02d}+{b:02d}=", str(a + b)) for a, b in pairs]


def write_prompts(path: Path, *, num_steps: int, count: int = PROMPTS_PER_STEP, seed: int = 0) -> None:
    """Write the prompts of steps 1 to `num_steps`, `count` each, as jsonl rows `{"prompt": ..., "answer": ...}`."""
    rows = [pair for step in range(1, num_steps + 1) for pair in prompts(step, count=count, seed=seed)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows), encoding="utf-8")


def response_lengths(workload: Workload, step: int, *, num_prompts: int = PROMPTS_PER_STEP, seed: int = 0) -> list[int]:
    """The response length of each of a step's rollouts, in tokens; entry `prompt * GROUP_SIZE + sample`."""
    return [response_length(workload, step, rollout, seed=seed) for rollout in range(num_prompts * GROUP_SIZE)]


def response_length(workload: Workload, step: int, rollout: int, *, seed: int = 0) -> int:
    """The response length of one rollout; depends on nothing but the arguments."""
    assert workload in FORCED, f"nobody knows the lengths of {workload} responses before they are sampled"
    longest = MAX_RESPONSE_TOKENS[workload]
    if workload == "fixed":
        return longest
    draw = random.Random(f"length {seed} {step} {rollout}")
    return min(max(round(draw.lognormvariate(math.log(TAIL_MEDIAN_TOKENS), TAIL_SIGMA)), 1), longest)


def reward(prompt: str, response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the sum occurs in the response. Cheap on purpose: the trainers are timed, not the verifier."""
    return float(answer is not None and answer in response)


def begins_right(prompt: str, response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """The share of the answer that the response begins with."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(response, answer or "", strict=False))
    return sum(1 for _ in alike) / len(answer) if answer else 0.0


def step_result(
    args: argparse.Namespace,
    *,
    trainer: str,
    steps_s: Sequence[float],
    response_tokens: Sequence[int],
    rewards: Sequence[float],
    phase_fractions: Mapping[str, float],
    packages: Sequence[str],
) -> Mapping[str, Any]:
    """The object that a program prints which has timed training steps; `benchmarks/bench.py` describes it.

    `steps_s` are of the counted steps; `response_tokens` and `rewards` of all, the mean reward of each.
    """
    first = args.warmup_steps
    assert len(steps_s) == args.steps, f"{len(steps_s)} steps were timed, not {args.steps}"
    counted = response_tokens[first:]
    if args.workload in FORCED:
        steps = range(first + 1, first + args.steps + 1)
        wanted = [sum(response_lengths(args.workload, step, num_prompts=prompts_per_step(args))) for step in steps]
        assert list(counted) == wanted, "responses did not follow the workload's lengths"
    us_per_token = [1e6 * seconds / tokens for seconds, tokens in zip(steps_s, counted, strict=True)]
    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "trainer": trainer,
        "workload": args.workload,
        "beta": args.beta,
        "teacher_layers": args.teacher_layers,
        "parameters": SIZES[args.size][-1],
        "rollouts": prompts_per_step(args) * GROUP_SIZE,
        "num_ranks": args.ranks,
        "threads_per_rank": args.threads,
        "warmup_steps": first,
        "steps_s": list(steps_s),
        "response_tokens": list(counted),
        "us_per_token": us_per_token,
        "median_s": statistics.median(steps_s),
        "median_us_per_token": statistics.median(us_per_token),
        "phase_fractions": dict(phase_fractions),
        "reward_mean": statistics.fmean(rewards[first:]),
        "reward_first": statistics.fmean(rewards[:10]),
        "reward_last": statistics.fmean(rewards[-10:]),
        "peak_rss_mib": max(used) / 1024,
        "load_average": os.getloadavg()[0],
        "versions": versions(packages),
    }


def build_model_directory(directory: Path, *, size: int = 1, teacher_layers: int = 0) -> Path:
    """Write the model (seed 0), or its teacher of so many layers, and its tokenizer as a Hugging Face directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64, "the vocabulary of workload W has 64 entries"
    hidden_size, intermediate_size, expected = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=teacher_layers or NUM_LAYERS,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(teacher_layers)
        model = Qwen3ForCausalLM(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == expected or teacher_layers, f"the model has {num_parameters} parameters, not {expected}"
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def build_tokenizer() -> Any:
    """One token per character; characters outside the vocabulary are an error."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=VOCABULARY[PAD],
        eos_token=VOCABULARY[EOS],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def use_best_environment(*, threads: int, ranks: int = 1) -> None:
    """Restart this program with the environment in which workload W runs fastest on a CPU, unless it has it already;
    on several ranks by torchrun.

    Call it first thing: glibc and OpenMP read their settings once, when the process starts.
    """
    wanted = best_environment(threads=threads)
    is_rank = ranks == 1 or "LOCAL_RANK" in os.environ
    if not is_rank or any(os.environ.get(name) != value for name, value in wanted.items()):
        launcher = [] if is_rank else torchrun(ranks)
        os.execve(sys.executable, [sys.executable, *launcher, *sys.orig_argv[1:]], {**os.environ, **wanted})


def torchrun(ranks: int) -> list[str]:
    """The arguments of Python that start a program on so many processes of this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]


def best_environment(*, threads: int) -> dict[str, str]:
    """Variables for the fastest run of workload W on a CPU.

    Freed memory stays with the process: otherwise every step maps, and the kernel zeroes, the same activations again.
    """
    keep_bytes = str(4 * 2**30)
    return {
        "MALLOC_MMAP_THRESHOLD_": keep_bytes,
        "MALLOC_TRIM_THRESHOLD_": keep_bytes,
        "MALLOC_TOP_PAD_": str(64 * 2**20),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of Python and of installed packages, for a benchmark's result."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
