"""The engines that `rollout.engine` can name, with the facts about each that other parts of a run depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spmdrl.config.base import is_set
from spmdrl.types import UserError
from spmdrl.user_code import load

if TYPE_CHECKING:
    from spmdrl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that are needed before it starts.

    The defaults describe an engine that lives in the rank's process and takes memory as its requests need it.
    """

    in_process: bool = True  # its memory is counted as this process's
    takes_fixed_share: bool = False  # takes `rollout.memory_fraction` of the free device memory when it starts
    has_graphs: bool = False  # captures CUDA graphs, which `offload.engine` may name
    runs_disaggregated: bool = False  # ranks that do not train can hold it
    takes_adapters: bool = False  # samples with adapters of several versions
    settings: tuple[str, ...] = ()  # of `ENGINE_SETTINGS`, those that it reads
    # By device type, then by rollout.attention_backend: the trainer's kernel that computes the same bits.
    exact_kernels: Mapping[str, Mapping[str | None, str]] = field(default_factory=dict)
    exact_in_float32: bool = False  # with these kernels the residual stream is float32


# Each name stands for a class, by its full name. Whatever a user's engine is not told here it says as its `facts`.
ENGINES: Mapping[str, tuple[str, EngineFacts]] = {
    "torch": (
        "spmdrl.engine.torch_engine:TorchEngine",
        EngineFacts(runs_disaggregated=True, takes_adapters=True, exact_kernels={"cpu": {None: "invariant"}}),
    ),
    "sglang": (
        "spmdrl.engine.sglang.engine:SGLangEngine",
        EngineFacts(
            in_process=False,
            takes_fixed_share=True,
            has_graphs=True,
            runs_disaggregated=True,
            takes_adapters=True,
            settings=(
                "rollout.tp_size",
                "rollout.memory_fraction",
                "rollout.max_kv_tokens",
                "rollout.chunked_prefill_tokens",
                "rollout.attention_backend",
                "rollout.cuda_graphs",
                "rollout.restart_engine",
                "rollout.sglang",
                "refit.transport",
            ),
            exact_kernels={"cuda": {None: "sglang_fa3", "fa3": "sglang_fa3", "triton": "sglang_triton"}},
            exact_in_float32=True,
        ),
    ),
}
ENGINE_SETTINGS = tuple(dict.fromkeys(setting for _, facts in ENGINES.values() for setting in facts.settings))


def engine_facts(name: str) -> EngineFacts:
    """Look up the facts about the engine that `rollout.engine` names. Raises UserError when there is none."""
    return ENGINES[name][1] if name in ENGINES else getattr(load_engine(name), "facts", EngineFacts())


def load_engine(name: str) -> object:
    """Load the class that `rollout.engine` names. Raises UserError when there is none."""
    try:
        return load(ENGINES[name][0] if name in ENGINES else name)
    except ValueError as error:
        raise UserError(f'rollout.engine = "{name}": {error}') from error


def engine_name_problems(name: str) -> Iterator[str]:
    """Yield a sentence when `rollout.engine` can name no engine; the code of a user's engine is not loaded."""
    module, _, attribute = name.rpartition(":")
    if name not in ENGINES and not (module and attribute.isidentifier()):
        known = ", ".join(f'"{engine}"' for engine in ENGINES)
        yield (
            f'rollout.engine = "{name}" is not known; set it to {known}, or to a class of yours: "file.py:Class" or '
            '"package.module:Class"'
        )


def engine_setting_problems(cfg: Config, facts: EngineFacts) -> Iterator[str]:
    """Yield a sentence for each setting that means nothing to the engine with these facts."""
    engine = f'rollout.engine = "{cfg.rollout.engine}"'
    for setting in ENGINE_SETTINGS:
        section, _, name = setting.partition(".")
        if setting not in facts.settings and is_set(getattr(cfg, section), name):
            yield f"{setting} has no meaning for {engine}; remove it"
    if "cuda_graph" in cfg.offload.engine and not facts.has_graphs:
        yield f'offload.engine names "cuda_graph", but {engine} has no CUDA graphs; leave it out'
    if cfg.sends_adapters and not facts.takes_adapters:
        yield f"[lora]: {engine} takes no adapters; set lora.merge = true, and it gets merged weights"
    if cfg.rollout.placement == "disaggregated" and not facts.runs_disaggregated:
        yield f'rollout.placement = "disaggregated" does not work with {engine}; set it to "colocated"'
