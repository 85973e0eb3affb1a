"""`python -m spmdrl.tools.fit CONFIG.toml --ranks 8 --gpu-gib 80 [section.key=value ...]`: will it fit?

It predicts the memory of each phase of a run, on each rank's GPU and on the host, from the settings and the model's
config.json alone: no GPU, no weights. With `--shape Qwen3-4B` not even the config.json is needed. If a phase does not
fit, it suggests settings that make it fit, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmdrl.config import Config, PreferencesConfig, TuningConfig, read_run_config
from spmdrl.faults.text import Parser, say
from spmdrl.memory.device import GIB, gib
from spmdrl.memory.overhead import Parts
from spmdrl.memory.phase import PhaseMemory
from spmdrl.memory.phases import micro_batch_tokens
from spmdrl.model.load import errors_about, parallel_model_problems, read_model_config
from spmdrl.preflight.checks import OpenedModel, frozen_layout_problems, read_beside
from spmdrl.preflight.forecast import Model, Prediction, predict
from spmdrl.preflight.hub import with_models_here
from spmdrl.preflight.launch import EXIT_USER_ERROR
from spmdrl.tools.model_source import published_config, shapes
from spmdrl.tools.program import ToolConsole, inline, program
from spmdrl.types import UserError

PARTS_SHOWN = 4
MAX_REMEDIES = 3
WIDTH_OF_FILES = 140
_MIB = 2**20

Shortage = tuple[int, int]  # number of problems, bytes that all phases together exceed their device by
_FITS: Shortage = (0, 0)

# Settings that save device memory, cheapest first: (setting, values from mild to strong).
_LEVERS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("offload.engine", (("kv_cache", "weights"),)),
    ("model.gradient_checkpointing", ("selective", "full")),
    ("model.checkpoint_every_layers", (1,)),
    ("model.reshard_after_forward", (True,)),
    ("model.prefetch_layers", (1,)),
    ("offload.trainer", ("all",)),
    ("rollout.max_running", (64, 32, 16, 8, 4)),
    ("rollout.tp_size", (2, 4, 8)),
    ("rollout.memory_fraction", (0.8, 0.7, 0.6, 0.5, 0.4)),
    ("optim.state_on_host", (True,)),
    ("model.cpu_offload", (True,)),
)


@program("cannot plan")
def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and return the exit code, 0 when everything fits."""
    arguments = _parse(argv)
    cfg = read_run_config(arguments.config, arguments.override)
    cfg = cfg if arguments.shape else with_models_here(cfg)
    model = _read_model(cfg, published_config(arguments.shape) if arguments.shape else read_model_config(cfg.model))
    device_bytes = int(arguments.gpu_gib * GIB)
    prediction = predict(cfg, model, num_ranks=arguments.ranks, device_bytes=device_bytes, on_gpu=True)
    problems = [*shortages(prediction)]
    if problems:
        problems += _remedies(cfg, model, num_ranks=arguments.ranks, device_bytes=device_bytes)
    if arguments.json:
        say(json.dumps(_as_json(prediction, problems), indent=1))
    else:
        _show(ToolConsole.of_width(WIDTH_OF_FILES), cfg, prediction, problems)
    return EXIT_USER_ERROR if problems else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Predict the memory of each phase of a run of spmdrl.train, spmdrl.sft or spmdrl.pairs.",
        epilog="docs/memory.md says how to read it.",
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that torchrun will start, one for each GPU")
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of one GPU in GiB")
    parser.add_argument(
        "--shape", choices=shapes(), metavar="SHAPE", help="of a model that is not downloaded, instead of model.path's"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes")
    arguments = parser.parse_intermixed_args(argv)
    if not 1 <= arguments.ranks <= 10**6 or not 0.1 <= arguments.gpu_gib <= 1e5:
        parser.error("--ranks is between 1 and 1000000, and --gpu-gib between 0.1 and 100000")
    return arguments


def _read_model(cfg: Config | TuningConfig, model_config: Any) -> Model:
    """Read the shapes of the run's policy, from transformers' config of it, and of the models besides it.

    Raises UserError for settings that they do not support.
    """
    critic, beside = None, read_beside(cfg)
    refusals = [*parallel_model_problems(model_config, cfg.model, cfg.parallel)]
    if isinstance(cfg, Config) and cfg.has_critic:
        with errors_about("critic"):
            critic_config = read_model_config(cfg.critic_model) if cfg.critic.path else model_config
        refusals += parallel_model_problems(critic_config, cfg.critic_model, cfg.parallel)
        critic = Model.read_critic(critic_config, cfg.critic_model)
    policy = OpenedModel(f'model.path = "{cfg.model.path}"', cfg.model, model_config)
    refusals += frozen_layout_problems(cfg, policy, beside)
    if refusals:
        raise UserError("\n".join(dict.fromkeys(refusals)))
    if isinstance(cfg, PreferencesConfig) and cfg.pairs.trains_reward_model:
        return Model.read_critic(model_config, cfg.model)
    frozen = {one.name: one.read() for one in beside}
    return Model.read(model_config, cfg.model, critic=critic, lora=cfg.lora, frozen_models=frozen)


def shortages(prediction: Prediction) -> Iterator[str]:
    """Yield the problems that a launch would refuse, and the phases that are too large with activations and logits."""
    device_bytes = prediction.rank.device_bytes
    yield from prediction.problems
    for phase in _too_large(prediction.phases, device_bytes):
        takes = gib(phase.device_bytes)
        yield f"{phase.name} takes {takes} of {gib(device_bytes)}: {largest_parts(phase.on_device)}"


def _too_large(phases: Sequence[PhaseMemory], device_bytes: int) -> list[PhaseMemory]:
    return [phase for phase in phases if phase.device_bytes > device_bytes]


def fitting_settings(cfg: Config | TuningConfig, *, num_ranks: int, device_bytes: int) -> dict[str, Any]:
    """Return the settings that make a run fit its GPUs, none where it fits. Raises UserError where none do."""
    model = _read_model(cfg, read_model_config(cfg.model))
    shortage = partial(_shortage, model=model, num_ranks=num_ranks, device_bytes=device_bytes)
    if shortage(cfg) == _FITS:
        return {}
    alone, together, remaining = _tried(cfg, shortage, num_ranks=num_ranks)
    if not alone and remaining != _FITS:
        raise UserError("\n".join(_remedies(cfg, model, num_ranks=num_ranks, device_bytes=device_bytes)))
    return dict(alone[:1]) or together


def _shortage(cfg: Config | TuningConfig, *, model: Model, num_ranks: int, device_bytes: int) -> Shortage:
    prediction = predict(cfg, model, num_ranks=num_ranks, device_bytes=device_bytes, on_gpu=True)
    too_large = _too_large(prediction.phases, device_bytes)
    too_much = sum(phase.device_bytes - device_bytes for phase in too_large)
    return len([*shortages(prediction)]), too_much


def _tried(
    cfg: Config | TuningConfig, shortage: Callable[[Config | TuningConfig], Shortage], *, num_ranks: int
) -> tuple[list[tuple[str, Any]], dict[str, Any], Shortage]:
    """Return the levers that suffice alone; where none does, those that help together, and the shortage left."""
    levers = [*_levers(cfg, num_ranks=num_ranks)]
    alone = [lever for lever in levers if (changed := _with(cfg, dict([lever]))) and shortage(changed) == _FITS]
    return (alone, {}, _FITS) if alone else ([], *_combined(cfg, levers, shortage))


def _remedies(cfg: Config | TuningConfig, model: Model, *, num_ranks: int, device_bytes: int) -> Iterator[str]:
    """Yield sentences about settings that make everything fit: single levers, or several together."""
    shortage = partial(_shortage, model=model, num_ranks=num_ranks, device_bytes=device_bytes)
    alone, together, remaining = _tried(cfg, shortage, num_ranks=num_ranks)
    for setting, value in alone[:MAX_REMEDIES]:
        yield f"it fits with {setting} = {inline(value)}"
    if alone:
        return
    settings = " and ".join(f"{setting} = {inline(value)}" for setting, value in together.items())
    if remaining == _FITS:
        yield f"it fits with {settings}"
    else:
        yield (
            f"the levers of docs/memory.md are not enough{f' ({settings} come nearest)' if settings else ''}; lower "
            "pack.max_tokens_per_micro_batch, raise parallel.cp or parallel.tp, or use more ranks"
        )


def _levers(cfg: Config | TuningConfig, *, num_ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield (setting, value) for every lever that this kind of run has."""
    engine_ranks = cfg.rollout.num_ranks or num_ranks if isinstance(cfg, Config) else 0
    for setting, values in _LEVERS:
        if setting.partition(".")[0] not in type(cfg).model_fields:
            continue
        for value in values:
            if setting != "rollout.tp_size" or engine_ranks % value == 0:
                yield setting, value


def _combined(
    cfg: Config | TuningConfig, levers: Sequence[tuple[str, Any]], shortage: Callable[[Config | TuningConfig], Shortage]
) -> tuple[dict[str, Any], Shortage]:
    """Combine the levers that reduce the shortage, drop those not needed, and return them with the shortage left."""
    taken: dict[str, Any] = {}
    least = shortage(cfg)
    for setting, value in levers:
        changed = _with(cfg, taken | {setting: value})
        if changed and least > _FITS and (remaining := shortage(changed)) < least:
            taken, least = taken | {setting: value}, remaining
    for setting in tuple(taken):
        others = {name: value for name, value in taken.items() if name != setting}
        changed = _with(cfg, others)
        if changed and shortage(changed) <= least:
            taken = others
    return taken, least


def _with(cfg: Config | TuningConfig, changes: Mapping[str, Any]) -> Config | TuningConfig | None:
    """Apply these changes to the settings; None when one changes nothing or the result is not valid."""
    values = cfg.model_dump()
    for setting, value in changes.items():
        table, _, key = setting.partition(".")
        if values[table][key] == value:
            return None
        values[table][key] = value
    try:
        return type(cfg).model_validate(values)
    except ValueError:
        return None


def _amount(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"


def _show(console: Console, cfg: Config | TuningConfig, prediction: Prediction, problems: Sequence[str]) -> None:
    rank, phases = prediction.rank, prediction.phases
    run, parallel, size = rank.run, cfg.parallel, rank.size
    console.print(
        f"{_amount(size.whole)} parameters, {_amount(size.shard)} on each of {run.training_ranks} training ranks "
        f"(dp_replicate {parallel.dp_replicate}, cp {parallel.cp}, tp {parallel.tp}, ep {parallel.ep}); "
        f"{micro_batch_tokens(cfg, run)} tokens of a micro-batch on a rank"
    )
    too_large = _too_large(phases, rank.device_bytes)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, is_number in (
        ("phase", False),
        ("GPU, GiB", True),
        ("of it", False),
        ("host, GiB", True),
        ("of it", False),
    ):
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for phase in phases:
        style = "bold red" if phase in too_large else ""
        table.add_row(
            Text(phase.name, style=style),
            Text(f"{phase.device_bytes / GIB:.1f}", style=style),
            largest_parts(phase.on_device),
            f"{phase.host_bytes / GIB:.1f}",
            largest_parts(phase.host),
        )
    console.print(table)
    beside = rank.engine_overhead.while_sampling
    console.print(
        f"of {gib(rank.device_bytes)}; while the engine samples, about {gib(sum(beside.values()))} are not its share: "
        f"{largest_parts(beside, most=len(beside))}",
        style="dim",
    )
    console.print(summary(prediction))
    for problem in problems:
        console.print(f"- {problem}", soft_wrap=True, markup=False)


def summary(prediction: Prediction) -> str:
    """Say in a line what a run needs; `docs/gen/predictions.py` writes it at the top of the shipped configurations."""
    rank, gpu = prediction.rank, {phase.name: phase.device_bytes for phase in prediction.phases}
    host_bytes = max(phase.host_bytes for phase in prediction.phases)
    phases = ", ".join(
        f"{name} {gpu[name] / GIB:.1f}" for name in ("rollout", "logprobs", "forward-backward") if name in gpu
    )
    machine = f"{rank.run.num_ranks} x {rank.device_bytes / GIB:g} GiB"
    return f"predicted for {machine}: {phases}; host {host_bytes / GIB:.1f} a rank"


def largest_parts(parts: Parts, *, most: int = PARTS_SHOWN) -> str:
    """Format the largest parts, without those too small to show in GiB."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in ordered[:most] if size >= 50 * _MIB)


def _as_json(prediction: Prediction, problems: Sequence[str]) -> dict[str, Any]:
    rank = prediction.rank
    rows = [
        {
            "phase": phase.name,
            "gpu_bytes": phase.device_bytes,
            "host_bytes": phase.host_bytes,
            "gpu": dict(phase.on_device),
            "host": dict(phase.host),
        }
        for phase in prediction.phases
    ]
    return {
        "gpu_total_bytes": rank.device_bytes,
        "fits": not problems,
        "phases": rows,
        "beside_tensors": {
            "while_training": dict(rank.overhead.while_training),
            "while_sampling": dict(rank.engine_overhead.while_sampling),
        },
        "problems": list(problems),
    }


if __name__ == "__main__":
    sys.exit(main())
