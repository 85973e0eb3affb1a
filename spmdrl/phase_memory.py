"""What one rank holds in each phase of a step, on its device and on the host: plain arithmetic, in bytes.

`memory.py` counts what is certain before a run starts, and decides whether it may. Here activations, logits and the
host are added, which depend on how long sequences turn out: these numbers are those of full micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from spmdrl.activations import Decoder, Kept, forward_bytes, kept_bytes, layer_workspace_bytes, logits_bytes
from spmdrl.config import Config
from spmdrl.memory import (
    CONTEXT_BYTES,
    GIB,
    STATE_BLOCK_BYTES,
    MemoryPlan,
    ModelSize,
    gathered_weights,
    states_per_weight,
)
from spmdrl.plan import Plan, needs_old_logprobs

PROCESS_BYTES = GIB // 2  # of the host: Python, torch and transformers
CUDA_PROCESS_BYTES = 2 * GIB  # the same with CUDA's libraries
_FLOAT32 = 4

Parts = Mapping[str, int]  # bytes by what they are for


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """One phase at its peak."""

    name: str
    device: Parts
    host: Parts
    elsewhere: Parts = field(default_factory=dict)  # on the same device, of other processes

    @property
    def on_device(self) -> Parts:
        """On the device, of all processes."""
        return dict(self.device) | dict(self.elsewhere)

    @property
    def process_bytes(self) -> int:
        """On the device, in this process."""
        return sum(self.device.values())

    @property
    def device_bytes(self) -> int:
        """On the device, of all processes."""
        return sum(self.on_device.values())

    @property
    def host_bytes(self) -> int:
        """On the host, in this process."""
        return sum(self.host.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the phases are computed from, besides the settings."""

    run: Plan
    memory: MemoryPlan
    size: ModelSize
    decoder: Decoder  # of the whole model
    repeats_keys: bool  # whether the attention kernel is given keys and values once for each query head
    compute_bytes: int  # an element of the compute dtype
    tile_elements: int  # logits that the head computes together
    file_bytes: int  # an element of the model's files
    device_bytes: int
    on_gpu: bool  # else the device is the host


def phase_memory(cfg: Config, rank: Rank) -> list[PhaseMemory]:
    """The phases of a rank that trains and of its engine, or of a rank of each kind, in the order of a step."""
    return [*_phases(cfg, rank)]


def micro_batch_tokens(cfg: Config, run: Plan) -> int:
    """Tokens that one rank computes together, at most: its chunk of a full micro-batch."""
    budget = run.max_tokens_per_micro_batch or (run.sequences_per_micro_batch or 0) * run.max_sequence_tokens
    all_there_are = math.ceil(run.rollouts_per_mini_batch / run.num_shares) * run.max_sequence_tokens
    return math.ceil(min(budget, all_there_are) / cfg.parallel.cp)


def _phases(cfg: Config, rank: Rank) -> Iterator[PhaseMemory]:
    memory, host = rank.memory, _host(cfg, rank)
    apart = cfg.rollout.placement == "disaggregated"
    trainer = {"weights": memory.weights, "optimizer": memory.optimizer}
    asleep = {"trainer": memory.asleep, "refit buckets": memory.buckets}
    awake = trainer | {"refit buckets": memory.buckets}
    weights = rank.size.shard * _FLOAT32

    def phase(
        name: str, device: dict[str, int], engine_bytes: int = 0, more_host: dict[str, int] | None = None
    ) -> PhaseMemory:
        engine, in_process = {"engine": engine_bytes}, cfg.rollout.engine == "torch"
        return PhaseMemory(
            name,
            device=_some(device | engine if in_process else device),
            host=_some(host | (more_host or {})),
            elsewhere={} if in_process else _some(engine),
        )

    on_its_way = weights if rank.on_gpu and not cfg.model.cpu_offload else 0
    files = {"files": rank.size.shard * rank.file_bytes, "weights on their way": on_its_way}
    yield phase("load", {"weights": memory.weights}, more_host=files)
    yield phase("refit", asleep, max(memory.engine_weights, _engine_while_refitted(cfg, rank)))
    sampling = _engine_while_it_samples(cfg, rank)
    yield phase("rollout", {"refit bucket": memory.buckets // 2} if apart else asleep, sampling)
    needs_old = needs_old_logprobs(
        cfg.loss, cfg.correction, num_updates=rank.run.updates_per_step, kl_in_reward=cfg.reward.kl_coef > 0
    )
    if needs_old or cfg.has_reference:
        yield phase("logprobs", awake | _scoring(cfg, rank), memory.engine_keeps)
    yield phase(
        "forward-backward",
        awake | {"gradients": memory.gradients, "gathered": memory.gathered} | _backward(cfg, rank),
        memory.engine_keeps,
    )
    block = _visiting_state(cfg, rank)
    yield phase("optimizer", awake | {"gradients": memory.gradients} | block, memory.engine_keeps)
    export = {"exported model": rank.size.whole * rank.compute_bytes if cfg.checkpoint.export else 0}
    gathered = {"gathered": memory.buckets - memory.buckets // 3 if cfg.checkpoint.export else 0}
    yield phase("save", awake | gathered, memory.engine_keeps, more_host=export)


def _some(parts: Parts) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _host(cfg: Config, rank: Rank) -> dict[str, int]:
    """What a process keeps on the host from its first step on."""
    weights = rank.size.shard * _FLOAT32
    state = weights * states_per_weight(cfg.optim)
    moved = {
        "none": 0,
        "optimizer": state,
        "all": weights + (0 if cfg.optim.state_on_host else state),
    }[cfg.offload.trainer]
    return {
        "process": CUDA_PROCESS_BYTES if rank.on_gpu else PROCESS_BYTES,
        "sleeping trainer": moved,
        "optimizer": state if cfg.optim.state_on_host else 0,
        "offloaded policy": 2 * weights + state if cfg.model.cpu_offload else 0,
        "reference": weights if cfg.has_reference else 0,
        "checkpoint copy": weights + state if cfg.checkpoint.every else 0,
        "refit buckets": 2 * cfg.refit.bucket_bytes if cfg.refit.transport == "shared_memory" else 0,
    }


def _scoring(cfg: Config, rank: Rank) -> dict[str, int]:
    """A pass without gradients; the policy's root stays gathered after its own, while the reference is scored."""
    tokens = micro_batch_tokens(cfg, rank.run)
    part = rank.decoder.cut(cfg.parallel.tp)
    reference = gathered_weights(cfg.model, rank.size, trainable=False) if cfg.has_reference else 0
    logits = _logits(cfg, rank)
    layer = forward_bytes(part, compute_bytes=rank.compute_bytes, num_tokens=tokens)
    return {
        "gathered": rank.memory.gathered + reference * rank.compute_bytes,
        "activations and logits": max(layer, tokens * rank.decoder.hidden * rank.compute_bytes + logits),
    }


def _backward(cfg: Config, rank: Rank) -> dict[str, int]:
    """The fullest of three moments of forward and backward, beside weights, shards of gradients and what is gathered.

    At the head: the logits of a tile, and the gradient of the head's [V, D] weight. In the last layer, when all others'
    activations are still there: what is computed again, the head's gradient, and two layers' gradients on their way to
    their shards. At the end: the gradients of what is outside the layers.
    """
    tokens, b = micro_batch_tokens(cfg, rank.run), rank.compute_bytes
    decoder, part = rank.decoder, rank.decoder.cut(cfg.parallel.tp)
    kept = Kept(
        level=cfg.model.gradient_checkpointing,
        every_layers=cfg.model.checkpoint_every_layers,
        compute_bytes=b,
        repeats_keys=rank.repeats_keys,
    )
    activations = kept_bytes(part, kept, num_tokens=tokens)
    head = decoder.vocabulary * decoder.hidden // cfg.parallel.tp
    moments = (
        {
            "activations": activations,
            "logits": _logits(cfg, rank),
            "whole gradients": b * head,
        },
        {
            "activations": activations,
            "one layer": layer_workspace_bytes(part, kept, num_tokens=tokens),
            "whole gradients": b * head + 2 * (_FLOAT32 + b) * rank.size.largest_layer,
        },
        {"whole gradients": (_FLOAT32 + b) * rank.size.root},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def _logits(cfg: Config, rank: Rank) -> int:
    return logits_bytes(
        rank.decoder,
        num_tokens=micro_batch_tokens(cfg, rank.run),
        chunk_tokens=cfg.model.logits_chunk_tokens,
        tile_elements=rank.tile_elements,
    )


def _visiting_state(cfg: Config, rank: Rank) -> dict[str, int]:
    """What of an optimizer's state on the host is on the device together: that of a block of weights."""
    if not cfg.optim.state_on_host:
        return {}
    block = min(STATE_BLOCK_BYTES, rank.size.shard * _FLOAT32)
    return {"visiting state": block * states_per_weight(cfg.optim)}


def _engine_while_refitted(cfg: Config, rank: Rank) -> int:
    """Its weights are back; its cache is, only where it never left."""
    cached = rank.memory.engine_share or 0
    return cached if "kv_cache" not in cfg.offload.engine else rank.memory.engine_weights


def _engine_while_it_samples(cfg: Config, rank: Rank) -> int:
    """An engine with a fixed share fills it; the torch engine's cache has a row for each rollout that runs, as long
    as the longest, beside the logits of one token each."""
    if rank.memory.engine_share is not None:
        return rank.memory.engine_share
    if cfg.rollout.engine == "sglang":  # on a device of its own
        return int(cfg.rollout.memory_fraction * (rank.device_bytes - CONTEXT_BYTES))
    run, decoder = rank.run, rank.decoder
    weights = rank.size.whole * rank.compute_bytes // cfg.rollout.tp_size
    num_engines = (run.engine_ranks or run.num_ranks) // cfg.rollout.tp_size
    rows = min(cfg.rollout.max_running, math.ceil(run.rollouts_per_step / num_engines))
    cache = 2 * decoder.num_layers * decoder.key_width * run.max_sequence_tokens * rows * rank.compute_bytes
    logits = rows * decoder.vocabulary * (2 * _FLOAT32 + rank.compute_bytes)
    return weights + cache + logits
