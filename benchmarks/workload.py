"""Workload W: one small GRPO step, the same for spmdrl and for the trainers it is timed against.

A tiny random Qwen3 with a character tokenizer answers sums such as `07+35=`: 16 prompts x 8 rollouts a step.

- `fixed`: every response has 32 tokens; `<eos>` and `<pad>` are impossible.
- `tail`: the response lengths follow a lognormal (median 16, sigma 1.0, cut at 256), the same for every trainer.
  A length counts the `<eos>` that ends the response: impossible before, certain there.

torch and transformers are imported where they are used, so that a reward process that loads this file stays small.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import random
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Workload = Literal["fixed", "tail"]
WORKLOADS: tuple[Workload, ...] = ("fixed", "tail")

PROMPTS_PER_STEP = 16
GROUP_SIZE = 8
ROLLOUTS_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS: Mapping[Workload, int] = {"fixed": 32, "tail": 256}
TAIL_MEDIAN_TOKENS = 16
TAIL_SIGMA = 1.0

LEARNING_RATE = 1e-3
CLIP = 0.2
MAX_GRAD_NORM = 1.0

PAD, EOS = 0, 1
VOCABULARY = ("<pad>", "<eos>", *string.digits, *string.ascii_lowercase, *"+-*/=()[]{}<>.,:;!?'\"_#%& ")
NUM_PARAMETERS = 796_032


def prompts(step: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of a step."""
    draw = random.Random(f"prompts {seed} {step}")
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(PROMPTS_PER_STEP)]
    return [(f"{a:02d}+{b:02d}=", str(a + b)) for a, b in pairs]


def write_prompts(path: Path, *, num_steps: int, seed: int = 0) -> None:
    """Write the prompts of steps 1 to `num_steps`, in order, as jsonl rows `{"prompt": ..., "answer": ...}`."""
    rows = [pair for step in range(1, num_steps + 1) for pair in prompts(step, seed=seed)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows), encoding="utf-8")


def response_lengths(workload: Workload, step: int, *, seed: int = 0) -> list[int]:
    """The response length of each of a step's rollouts, in tokens; entry `prompt * GROUP_SIZE + sample`."""
    return [response_length(workload, step, rollout, seed=seed) for rollout in range(ROLLOUTS_PER_STEP)]


def response_length(workload: Workload, step: int, rollout: int, *, seed: int = 0) -> int:
    """The response length of one rollout; depends on nothing but the arguments."""
    longest = MAX_RESPONSE_TOKENS[workload]
    if workload == "fixed":
        return longest
    draw = random.Random(f"length {seed} {step} {rollout}")
    return min(max(round(draw.lognormvariate(math.log(TAIL_MEDIAN_TOKENS), TAIL_SIGMA)), 1), longest)


def reward(prompt: str, response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the sum occurs in the response. Cheap on purpose: the trainers are timed, not the verifier."""
    return float(answer is not None and answer in response)


def build_model_directory(directory: Path) -> Path:
    """Write the model (seed 0) and its tokenizer as a Hugging Face directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64, "the vocabulary of workload W has 64 entries"
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == NUM_PARAMETERS, f"the model has {num_parameters} parameters, not {NUM_PARAMETERS}"
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


def use_best_environment(*, threads: int) -> None:
    """Restart this program with the environment in which workload W runs fastest on a CPU, unless it has it already.

    Call it first thing: glibc and OpenMP read their settings once, when the process starts.
    """
    wanted = best_environment(threads=threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


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
