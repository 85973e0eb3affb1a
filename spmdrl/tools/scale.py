"""`python -m spmdrl.tools.scale`: whole steps on paper, from 8 to 1,024 GPUs: seconds of each phase, and what limits.

For each model and number of GPUs it tries layouts, keeps those that fit by the memory planner with a tenth to spare,
and shows the fastest. All follows from bytes, FLOPs and the rates of `preflight/step_time.py`; nothing was measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from spmdrl.config import Config, ModelConfig
from spmdrl.faults.text import Parser, say
from spmdrl.memory.device import GIB
from spmdrl.preflight.flops import forward_flops
from spmdrl.preflight.forecast import Model, Prediction, predict
from spmdrl.preflight.published import PUBLISHED, published_config
from spmdrl.preflight.shapes import decoder_of, expert_names
from spmdrl.preflight.step_time import H200, Layout, Machine, ModelCost, StepTime, Work, step_time
from spmdrl.tools.program import program

DEVICE_GIB = 139  # of an H200 of 141 GB
SPARE_FRACTION = 0.1  # of a device, for what the planner does not know
MODELS = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
GPUS = (8, 64, 256, 1024)
MAX_RUNNING = 512  # of an engine
WORK = Work(rollouts=8192, group_size=8, prompt_tokens=512, mean_tokens=4096, longest_tokens=16384, updates=4)
_ENGINE_TP = {"Qwen3-32B": 2, "Qwen3-30B-A3B": 2, "Qwen3-235B-A22B": 8}  # the fewest GPUs that leave room for a cache

# What is tried, for every number of GPUs to a copy of the policy.
_LEVELS = ("none", "selective", "full")
_TRAINERS = ("none", "all")
_FRACTIONS = (0.8, 0.65, 0.5)

_COLUMNS = (
    *("model", "GPUs", "GPUs to a copy", "computed twice", "fullest, GiB"),
    *("rollout, s", "logprobs, s", "update, s", "refit, s", "handover, s", "step, s"),
    *("tokens/s a GPU", "limit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The fastest layout found for a model on so many GPUs."""

    model: str
    gpus: int
    work: Work
    layout: Layout
    level: str  # of gradient checkpointing
    fullest_bytes: int  # of the device, in its fullest phase
    time: StepTime

    @property
    def tokens_per_gpu_s(self) -> float:
        """Response tokens for each GPU and second of the whole step."""
        return self.work.rollouts * self.work.mean_tokens / self.gpus / self.time.step


def fastest(name: str, *, gpus: int, work: Work) -> Row | None:
    """Find the layout with the shortest step among those that fit; None when none does."""
    model, cost = _model(name), _cost(name)
    found: list[Row] = []
    for copy in _copies(gpus):
        for level, trainer, fraction in product(_LEVELS, _TRAINERS, _FRACTIONS):
            cfg = _config(name, gpus=gpus, copy=copy, level=level, trainer=trainer, fraction=fraction, work=work)
            plan = predict(cfg, model, num_ranks=gpus, device_bytes=DEVICE_GIB * GIB, on_gpu=True)
            fullest = max(phase.device_bytes for phase in plan.phases)
            if plan.problems or fullest > (1 - SPARE_FRACTION) * DEVICE_GIB * GIB:
                continue
            layout = _layout(cfg, plan, copy=copy)
            time = step_time(cost, work, layout, H200)
            found.append(
                Row(model=name, gpus=gpus, work=work, layout=layout, level=level, fullest_bytes=fullest, time=time)
            )
    return min(found, key=lambda row: row.time.step, default=None)


def steps_table(models: Sequence[str], gpus: Sequence[int], work: Work) -> str:
    """Format a row of Markdown for each model and number of GPUs."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for name, count in product(models, gpus):
        row = fastest(name, gpus=count, work=work)
        lines.append(f"| {name} | {count:,} | {_cells(row)} |" if row else f"| {name} | {count:,} | does not fit |")
    return "\n".join(lines)


def rates_table(machine: Machine) -> str:
    """Format a row of Markdown for each rate of a machine."""
    rates = {
        "bfloat16 products, of training and of prompts": (machine.flops, "TFLOP/s", 1e12),
        "device memory": (machine.memory, "TB/s", 1e12),
        "NVLink, in each direction": (machine.nvlink, "GB/s", 1e9),
        "network, for each GPU": (machine.network, "GB/s", 1e9),
        "PCIe to the host": (machine.bus, "GB/s", 1e9),
    }
    lines = ["| | peak | fraction |", "|---|---|---|"]
    for name, (rate, unit, scale) in rates.items():
        lines.append(f"| {name} | {rate.peak / scale:g} {unit} | {rate.fraction:g} |")
    delays = {
        "a hop of a ring": machine.hop_s,
        "a decode step, beside its kernels": machine.decode_step_s,
        "a bucket of a refit, in the engine": machine.bucket_s,
    }
    lines += [f"| {name} | {1e6 * seconds:g} us | |" for name, seconds in delays.items()]
    return "\n".join(lines)


@program("cannot predict")
def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, or JSON; return the exit code."""
    parser = Parser(description="Predict the phases of a step on 8 to 1,024 H200.")
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, help="multiples of 8")
    parser.add_argument("--rollouts", type=int, default=WORK.rollouts, help="of a step, over all GPUs")
    parser.add_argument("--mean-tokens", type=int, default=WORK.mean_tokens, help="of a response")
    parser.add_argument("--longest-tokens", type=int, default=WORK.longest_tokens, help="of a response")
    parser.add_argument("--json", action="store_true", help="print all numbers, in seconds and bytes")
    arguments = parser.parse_args(argv)
    if any(not 8 <= count <= 2**20 or count % 8 for count in arguments.gpus):
        parser.error("--gpus are multiples of 8: a node has 8; at most 1048576")
    each = WORK.group_size * math.lcm(*arguments.gpus)
    if arguments.rollouts < each or arguments.rollouts % each:
        parser.error(f"--rollouts is a multiple of {each}: every GPU begins groups of {WORK.group_size}")
    if not 0 < arguments.mean_tokens < arguments.longest_tokens <= 2**31:
        parser.error("--mean-tokens lies between 0 and --longest-tokens")
    work = dataclasses.replace(
        WORK,
        rollouts=arguments.rollouts,
        mean_tokens=arguments.mean_tokens,
        longest_tokens=arguments.longest_tokens,
    )
    if arguments.json:
        rows = (fastest(name, gpus=count, work=work) for name, count in product(arguments.models, arguments.gpus))
        say(json.dumps([_as_json(row) for row in rows if row], indent=1))
    else:
        say(steps_table(arguments.models, arguments.gpus, work))
    return 0


def _copies(gpus: int) -> Iterator[int]:
    """Yield the numbers of GPUs that a copy of the policy may have: whole nodes, each twice the one before."""
    copy = 8
    while copy <= gpus:
        if gpus % copy == 0:
            yield copy
        copy *= 2


@cache
def _model(name: str) -> Model:
    return Model.read(published_config(name), ModelConfig(path=name))


@cache
def _cost(name: str) -> ModelCost:
    model = _model(name)
    experts = expert_names(model.shapes)
    linear, quadratic = forward_flops(model.config, model.shapes)
    return ModelCost(
        decoder=decoder_of(model.config, model.shapes),
        parameters=sum(map(math.prod, model.shapes.values())),
        in_experts=sum(math.prod(model.shapes[part]) for part in experts),
        num_experts=model.config.num_experts if experts else 0,
        linear_flops=linear,
        quadratic_flops=quadratic,
    )


def _config(name: str, *, gpus: int, copy: int, level: str, trainer: str, fraction: float, work: Work) -> Config:
    tp = _ENGINE_TP.get(name, 1)
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "paper", "num_steps": 1},
        "model": {"path": name, "gradient_checkpointing": level},
        "parallel": {"dp_replicate": gpus // copy, "ep": 8 if _cost(name).num_experts else 1},
        "data": {"max_prompt_tokens": work.prompt_tokens, "sources": [{"kind": "jsonl", "path": "prompts.jsonl"}]},
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": work.rollouts // work.group_size,
            "group_size": work.group_size,
            "max_response_tokens": work.longest_tokens,
            "max_running": min(MAX_RUNNING, work.rollouts * tp // gpus),
            "tp_size": tp,
            "memory_fraction": fraction,
        },
        "reward": {"terms": [{"kind": "math"}]},
        "loss": {"updates_per_step": work.updates},
        "optim": {"lr": 1e-6},
        "pack": {"max_tokens_per_micro_batch": work.prompt_tokens + work.longest_tokens},
        "refit": {"bucket_bytes": H200.bucket_bytes},
        "offload": {"trainer": trainer, "engine": ["kv_cache", "weights"]},
    }
    return Config.model_validate(tables)


def _layout(cfg: Config, plan: Prediction, *, copy: int) -> Layout:
    memory = plan.plan
    assert memory is not None and memory.engine_share is not None, "a colocated SGLang engine takes a share"
    return Layout(
        ranks=plan.rank.run.num_ranks,
        copy_ranks=copy,
        engine_tp=cfg.rollout.tp_size,
        ep=cfg.parallel.ep,
        recomputes=cfg.model.gradient_checkpointing == "full",
        micro_batch_tokens=cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens,
        moved_bytes=memory.moved,
        max_running=cfg.rollout.max_running,
        cache_bytes=memory.engine_share - memory.engine_weights,
    )


def _cells(row: Row) -> str:
    time, recomputed = row.time, {"none": "nothing", "selective": "norms", "full": "layers"}[row.level]
    seconds = (time.rollout, time.logprobs, time.update, time.refit, time.handover, time.step)
    return " | ".join(
        [
            f"{row.layout.copy_ranks:,}",
            recomputed,
            f"{row.fullest_bytes / GIB:.0f}",
            *(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in seconds),
            f"{row.tokens_per_gpu_s:,.0f}",
            time.limit,
        ]
    )


def _as_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "step_s": row.time.step,
        "tokens_per_gpu_s": row.tokens_per_gpu_s,
        "limit": row.time.limit,
    }


if __name__ == "__main__":
    sys.exit(main())
