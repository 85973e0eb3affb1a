"""Rules of `true_on_policy`: settings with which engine and trainer cannot compute the same bits."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule, run_rules
from spmdrl.config.whole import Config

EXACT_BACKENDS = ("fa3", "triton")  # attention of SGLang whose kernels the trainer can use; the first is the default
# Arguments of SGLang that have nothing to do with numbers.
_SGLANG_KEEPS_EXACT = {
    "disable_radix_cache",
    "grammar_backend",
    "log_level",
    "schedule_conservativeness",
    "schedule_policy",
}


@rule(Config)
def true_on_policy_needs_equal_bits(cfg: Config) -> Iterator[str]:
    if not cfg.true_on_policy:
        return
    clauses = (
        _sglang_attention,
        _sglang_sums,
        _sglang_operators,
        _parallel_sums,
        _trainer_kernels,
        _stale_weights,
        _merged_adapters,
        _fewer_bits,
    )
    if broken := list(run_rules(clauses, cfg)):
        yield f"true_on_policy = true, but {'; '.join(broken)}; change that, or remove true_on_policy"


def _sglang_attention(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.engine != "sglang":
        return
    if rollout.attention_backend not in (None, *EXACT_BACKENDS):
        yield (
            f'rollout.attention_backend = "{rollout.attention_backend}" is none that the trainer can use too, and '
            f"{' and '.join(map(repr, EXACT_BACKENDS))} are"
        )
    if rollout.attention_backend == "triton" and rollout.partial:
        yield (
            "rollout.partial = true gives sampled tokens to the kernel for prompts when a response goes on, which with "
            'rollout.attention_backend = "triton" is another than the one they were sampled by, and with "fa3" is not'
        )


def _sglang_sums(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.engine == "sglang" and rollout.tp_size > 1:
        yield f"rollout.tp_size = {rollout.tp_size} sums in another order than a trainer, and 1 does not"
    if rollout.engine == "sglang" and (risky := sorted(rollout.sglang.keys() - _SGLANG_KEEPS_EXACT)):
        yield f"rollout.sglang sets {', '.join(risky)}, which may change what the engine computes"


def _sglang_operators(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engine != "sglang":
        return
    if cfg.model.compute_dtype == "float32":
        yield 'model.compute_dtype = "float32" is not what SGLang computes with then, and "bfloat16" is'
    if cfg.model.gradient_checkpointing == "selective":
        yield (
            'model.gradient_checkpointing = "selective" keeps rotary embeddings from being compiled as the engine\'s '
            'are, and "full" does not'
        )


def _parallel_sums(cfg: Config) -> Iterator[str]:
    for setting in ("tp", "cp", "ep"):
        if (size := getattr(cfg.parallel, setting)) > 1:
            yield f"parallel.{setting} = {size} sums in another order than an engine on one rank"


def _trainer_kernels(cfg: Config) -> Iterator[str]:
    if cfg.model.attention != "auto":
        yield f'model.attention = "{cfg.model.attention}" is not exact, and "auto" is'
    if cfg.model.compute_dtype == "float16":
        yield 'model.compute_dtype = "float16" has no exact kernels, and "float32" and "bfloat16" have'
    if cfg.pack.prefix_tree != "off":
        yield f'pack.prefix_tree = "{cfg.pack.prefix_tree}" sums attention in parts, and no engine does'


def _merged_adapters(cfg: Config) -> Iterator[str]:
    if cfg.merges_adapters:
        yield (
            "lora.merge = true gives the engine W + B A, whose products are rounded otherwise than the trainer's, and "
            "false gives it adapters"
        )


def _stale_weights(cfg: Config) -> Iterator[str]:
    if cfg.staleness > 0:
        yield f"rollout.max_staleness = {cfg.staleness} trains on tokens that other weights sampled, which 0 does not"


def _fewer_bits(cfg: Config) -> Iterator[str]:
    if fewer := cfg.rollout.fewer_bits:
        yield f"{fewer} computes with other numbers than the trainer's"
