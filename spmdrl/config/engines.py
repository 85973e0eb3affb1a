"""The engines that `rollout.engine` can name, with the facts about each that other parts of a run depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from spmdrl.conversation import UserError
from spmdrl.user_code import load


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
    reports_candidates: bool = False  # the tokens that top-k and top-p left, where a request has a top_k
    reports_routes: bool = False  # the experts that tokens went to, where a request asks for them
    continues_after_refit: bool = False  # continues what `abort` has ended with weights that were loaded since
    advances_clock: bool = False  # `generate` can pause after a certain token: see `RolloutEngine.clock`
    exact_in_float32: bool = False  # with these kernels the residual stream is float32


# Each name is that of a class, by its full name. What is not here of a user's engine is in its `facts`.
ENGINES: Mapping[str, tuple[str, EngineFacts]] = {
    "torch": (
        "spmdrl.engine.torch.engine:TorchEngine",
        EngineFacts(
            runs_disaggregated=True,
            takes_adapters=True,
            reports_candidates=True,
            reports_routes=True,
            continues_after_refit=True,
            advances_clock=True,
            settings=("rollout.cache_after_refit", "rollout.quantization"),
            exact_kernels={"cpu": {None: "invariant"}},
        ),
    ),
    "sglang": (
        "spmdrl.engine.sglang.engine:SGLangEngine",
        EngineFacts(
            in_process=False,
            takes_fixed_share=True,
            has_graphs=True,
            runs_disaggregated=True,
            takes_adapters=True,
            reports_routes=True,
            continues_after_refit=True,
            settings=(
                "rollout.tp_size",
                "rollout.memory_fraction",
                "rollout.max_kv_tokens",
                "rollout.chunked_prefill_tokens",
                "rollout.allow_untested",
                "rollout.attention_backend",
                "rollout.cuda_graphs",
                "rollout.quantization",
                "rollout.kv_cache_dtype",
                "rollout.restart_engine",
                "rollout.sglang",
                "rollout.cache_after_refit",
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
    for sentence in engine_name_problems(name):
        raise UserError(sentence)
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
