"""What has changed in the configuration since a checkpoint was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

# Settings, and whole tables, that say where, for how long, on what and how fast a run computes, but not what. The
# order of floating-point sums is no part of what.
HARMLESS = (
    "run.name",
    "run.dir",
    "run.num_steps",
    "run.patience_minutes",
    "run.stop_before",
    "run.threads_per_rank",
    "model.gradient_checkpointing",
    "model.checkpoint_every_layers",
    "model.reshard_after_forward",
    "model.prefetch_layers",
    "model.logits_chunk_tokens",
    "model.cpu_offload",
    "parallel",
    "rollout.num_ranks",
    "rollout.max_running",
    "rollout.tp_size",
    "rollout.memory_fraction",
    "rollout.max_kv_tokens",
    "rollout.chunked_prefill_tokens",
    "rollout.cuda_graphs",
    "rollout.restart_engine",
    "refit",
    "offload",
    "reward.num_workers",
    "mismatch",
    "optim.state_on_host",
    "pack",
    "eval.every",
    "eval.samples_per_prompt",
    "eval.temperature",
    "eval.top_p",
    "eval.max_response_tokens",
    "checkpoint",
    "export",
    "resume",
    "report",
    "watchdog",
    "debug",
)


# What a change does not do, where that may be a surprise.
_FROM_CHECKPOINT = " (weights are the checkpoint's, whatever that is; a new run.name starts from others)"
_MEANING = {"model.path": _FROM_CHECKPOINT, "critic.path": _FROM_CHECKPOINT}


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not what it was."""

    name: str  # dotted
    sentence: str  # what it was and is

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether it, or a table it is in, is among these."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def resolved(cfg: BaseModel) -> dict[str, Any]:
    """A configuration as a manifest holds it: in JSON's types, what is unset left out."""
    return cfg.model_dump(mode="json", exclude_none=True)


def changes(before: Mapping[str, Any], cfg: BaseModel) -> list[Change]:
    """The settings that differ from those a checkpoint was saved with, in the order of their names.

    A setting that the checkpoint does not know, because spmdrl was older, is compared with its default.
    """
    old, now = dict(_flat(before)), dict(_flat(resolved(cfg)))
    chosen = dict(_flat(cfg.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    names = [name for name in sorted(old.keys() | now.keys()) if name in old or name in chosen]
    return [
        Change(name, f"{name} was {_shown(old, name)} and is {_shown(now, name)}{_MEANING.get(name, '')}")
        for name in names
        if old.get(name) != now.get(name)
    ]


def harmless(cfg: Any) -> tuple[str, ...]:
    """`HARMLESS`, without those that are not under this configuration."""
    # How far the learning rate has come depends on where it ends.
    return HARMLESS if cfg.optim.schedule == "constant" else tuple(name for name in HARMLESS if name != "run.num_steps")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not set"
