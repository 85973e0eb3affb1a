"""Changes of the configuration since a checkpoint was saved, and which of them are harmless."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

# Settings and whole tables that may change when a run resumes: they decide where, for how long, on which devices and
# how fast it runs, but not what it computes, up to the order of floating-point sums.
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
    "eval.success_at",
    "checkpoint",
    "export",
    "resume",
    "report",
    "watchdog",
    "debug",
)

# Settings that say which weights a checkpoint holds. With others its numbers would belong to other weights.
FIXED = ("model.freeze", "lora.rank", "lora.alpha", "lora.rslora", "lora.targets", "lora.init", "lora.base")

# Shown with changes that have no effect, which may surprise the user.
_FROM_CHECKPOINT = " (the weights still come from the checkpoint; set a new run.name to start from other weights)"
_OF_ADAPTERS = " (the adapters still come from the checkpoint, and the base must be the one that they were trained on)"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting whose value has changed."""

    name: str  # dotted
    sentence: str  # the old and the new value

    def is_in(self, names: Sequence[str]) -> bool:
        """True when the setting, or a table that contains it, is among `names`."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def resolved(cfg: BaseModel) -> dict[str, Any]:
    """Convert a configuration to the form in manifests: JSON types, without unset values."""
    return cfg.model_dump(mode="json", exclude_none=True)


def changes(before: Mapping[str, Any], cfg: BaseModel) -> list[Change]:
    """List the settings that differ from those a checkpoint was saved with, sorted by name.

    A setting that an older spmdrl did not know, so that the checkpoint lacks it, is compared with its default.
    """
    old, now = dict(_flat(before)), dict(_flat(resolved(cfg)))
    chosen = dict(_flat(cfg.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    from_model = _FROM_CHECKPOINT if getattr(cfg, "lora", None) is None else _OF_ADAPTERS
    meaning = {"model.path": from_model, "lora.path": _OF_ADAPTERS, "critic.path": _FROM_CHECKPOINT}
    names = [name for name in sorted(old.keys() | now.keys()) if name in old or name in chosen]
    return [
        Change(name, f"{name} was {_shown(old, name)} and is {_shown(now, name)}{meaning.get(name, '')}")
        for name in names
        if old.get(name) != now.get(name)
    ]


def harmless(cfg: Any) -> tuple[str, ...]:
    """Return the settings of `HARMLESS` that are harmless under this configuration."""
    # Every schedule but a constant one depends on the number of steps.
    return HARMLESS if cfg.optim.schedule == "constant" else tuple(name for name in HARMLESS if name != "run.num_steps")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not set"
