"""Run a few whole steps of a model with Qwen3's shape on a CUDA device: seconds and memory of each phase.

    python benchmarks/gpu_run.py --size 0.6b --steps 3

Weights are random and prompts are made up, so that nothing has to be downloaded; hardly a response ends by itself, so
every step has about as many tokens as its settings allow. The run is `spmdrl.train` itself in one process, sampled by
SGLang on the device that trains. Predicted and measured memory are what the run itself prints and logs. Prints one JSON
object; `--device cpu --size tiny` tries the program with the embedded engine where there is no device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).resolve().parent
CONFIG = """\
[run]
name = "run"
dir = "{folder}/runs"
num_steps = {num_steps}
[model]
path = "{folder}/model"
gradient_checkpointing = "none"
[data]
max_prompt_tokens = {prompt_tokens}
[[data.sources]]
kind = "jsonl"
path = "{folder}/prompts.jsonl"
[rollout]
prompts_per_step = {prompts}
group_size = 8
max_response_tokens = {response_tokens}
max_running = {rollouts}
[reward]
terms = [{{ kind = "function", function = "{here}/gpu_run.py:reward" }}]
[optim]
lr = 1e-6
[pack]
max_tokens_per_micro_batch = {budget}
[export]
at_end = false
[report]
memory = true
console = "plain"
"""
# Triton's attention and torch's sampling need no kernels beyond those that come with torch and SGLang.
SGLANG = (
    "rollout.engine=sglang",
    "rollout.attention_backend=triton",
    "rollout.sglang.sampling_backend=pytorch",
    "rollout.sglang.grammar_backend=none",
    'offload.engine=["kv_cache", "weights"]',
    "offload.trainer=all",
)
# By size of the model: prompts of a step, tokens of a prompt, which are characters, of a response and of a micro-batch.
LOADS = {"tiny": (2, 16, 4, 512), "0.6b": (16, 160, 512, 16384)}
PEAKS = re.compile(r"^peak memory of .*\n((?:  .*\n)+)", re.MULTILINE)  # the run prints them, predicted and measured
PEAK = re.compile(r"^  (\w+) +([\d.]+) +([\d.]+)", re.MULTILINE)

Row = Mapping[str, Any]


def reward(prompt: str, response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """Any number that differs between responses, so that there is something to learn."""
    return float(zlib.crc32(response.encode()) % 2)


def main() -> None:
    """Train, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=LOADS, default="0.6b")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted in medians")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps is at least 2: the first is not counted")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args)
        printed = train(folder, args)
        rows = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    print(json.dumps(result(args, rows, printed)))


def write_inputs(folder: Path, args: argparse.Namespace) -> None:
    """Write the model, the prompts and the configuration of the run."""
    import torch
    from gpu_refit import model_config
    from transformers import Qwen3ForCausalLM

    from spmdrl.tools.tiny_model import character_tokenizer

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --size tiny only tries the program")
    prompts, prompt_tokens, response_tokens, budget = LOADS[args.size]
    tokenizer, config = character_tokenizer(), model_config(args.size)
    config.max_position_embeddings = 4096
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    asked = [{"prompt": f"{i} + {i} = ".ljust(prompt_tokens), "answer": ""} for i in range(prompts * args.steps)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    text = CONFIG.format(
        folder=folder,
        here=HERE,
        num_steps=args.steps,
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        rollouts=8 * prompts,
        response_tokens=response_tokens,
        budget=budget,
    )
    (folder / "config.toml").write_text(text, encoding="utf-8")


def train(folder: Path, args: argparse.Namespace) -> str:
    """Run to the end; return what the run printed. It goes to this program's standard error as well, with the seconds
    since the start before each line: a run that is killed shows where its time went."""
    began, on_cpu = time.monotonic(), args.device == "cpu"
    run = subprocess.Popen(
        [sys.executable, "-m", "spmdrl.train", str(folder / "config.toml"), *(() if on_cpu else SGLANG)],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {line}")
        sys.stderr.flush()
        lines.append(line)
    if code := run.wait():
        sys.exit(f"the run ended with exit code {code}")
    return "".join(lines)


def result(args: argparse.Namespace, rows: Sequence[Row], printed: str) -> Mapping[str, Any]:
    """Make the object that is printed."""
    steps = [row for row in rows if row["step"]][1:]
    peaks = [peak for table in PEAKS.findall(printed) for peak in PEAK.findall(table)]
    memory = {phase: (float(predicted), float(measured)) for phase, predicted, measured in peaks}
    return {
        "benchmark": "gpu-run",
        "about": f"{args.steps} steps of a model of {args.size}, random weights",
        "device": args.device,
        "versions": workload.versions(["torch", "transformers"]),
        "load_average": os.getloadavg()[0],
        "steps_s": [row["time/step_s"] for row in steps],
        "loss_tokens": [row["batch/loss_tokens"] for row in steps],
        "loss_tokens_per_s": statistics.median(row["speed/loss_tokens_per_s"] for row in steps),
        "mismatch_max_abs_nats": max(row["mismatch/max_abs_nats"] for row in steps),
        "rows": [phase_row(phase, steps, memory) for phase in phases(steps)],
    }


def phases(steps: Sequence[Row]) -> list[str]:
    """The phases of a step that take time, in their order, and the step itself."""
    names = [key.removeprefix("time/").removesuffix("_s") for key in steps[-1] if key.startswith("time/")]
    return [name for name in names if any(row.get(f"time/{name}_s", 0.0) > 1e-3 for row in steps)]


def phase_row(phase: str, steps: Sequence[Row], memory: Mapping[str, tuple[float, float]]) -> Mapping[str, Any]:
    """Seconds of a phase, its share of the step, and its peak memory: of the device, on a CPU of the host."""
    spent = [row.get(f"time/{phase}_s", 0.0) for row in steps]
    predicted, measured = memory.get(phase, (None, None))
    return {
        "phase": phase,
        "median_s": statistics.median(spent),
        "step_fraction": sum(spent) / sum(row["time/step_s"] for row in steps),
        "predicted_gib": predicted,
        "measured_gib": measured,
    }


if __name__ == "__main__":
    main()
