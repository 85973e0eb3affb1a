"""What one rank holds in each phase of a step, on its device and on the host: plain arithmetic, in bytes.

`memory.py` counts what is certain before a run starts, and decides whether it may. Here activations, logits and the
host are added, which depend on how long sequences turn out: these numbers are those of full micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from spmdrl.config import Config, SftConfig
from spmdrl.config.engines import engine_facts
from spmdrl.config.plan import Plan, needs_old_logprobs
from spmdrl.memory.activations import Decoder, Kept, forward_bytes, kept_bytes, layer_workspace_bytes, logits_bytes
from spmdrl.memory.device import (
    CONTEXT_BYTES,
    EXPORT_BUCKET_BYTES,
    EXPORT_FILE_BYTES,
    GIB,
    STATE_BLOCK_BYTES,
    MemoryPlan,
    ModelSize,
    TrainingMemory,
    full_bucket,
    gathered_weights,
    staging_bytes,
    states_per_weight,
)

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

    @classmethod
    def of(cls, name: str, device: Parts, host: Parts, elsewhere: Parts = MappingProxyType({})) -> PhaseMemory:
        """Without the parts that are empty."""
        return cls(name, *({part: size for part, size in parts.items() if size} for parts in (device, host, elsewhere)))

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
    memory: TrainingMemory
    size: ModelSize
    decoder: Decoder  # of the whole model
    critic: tuple[ModelSize, Decoder] | None  # the same of a critic, if one is trained
    repeats_keys: bool  # whether the attention kernel is given keys and values once for each query head
    compute_bytes: int  # an element of the compute dtype
    tile_elements: int  # logits that the head computes together
    file_bytes: int  # an element of the model's files
    device_bytes: int
    on_gpu: bool  # else the device is the host

    def for_critic(self) -> Rank | None:
        """The same with the critic in the place of the policy: a model with one logit."""
        if self.critic is None:
            return None
        size, decoder = self.critic
        return dataclasses.replace(self, size=size, decoder=dataclasses.replace(decoder, vocabulary=1))

    @property
    def trained_shards(self) -> list[int]:
        """Bytes of float32 weights on this rank, of each model that is trained."""
        sizes = [self.size, *([self.critic[0]] if self.critic else [])]
        return [size.shard * _FLOAT32 for size in sizes]


def training_phases(cfg: Config | SftConfig, rank: Rank) -> list[PhaseMemory]:
    """The phases of a rank that trains and has no engine beside it, in the order of a run."""
    memory, host, trainer = rank.memory, _host(cfg, rank), _trainer(rank)
    shards, critic = rank.trained_shards, rank.for_critic()
    largest = max(shards)  # one model is read after the other
    loading = {
        "process": host["process"],
        "files": largest // _FLOAT32 * rank.file_bytes,
        "weights on their way": largest if rank.on_gpu and not cfg.model.cpu_offload else 0,
        "offloaded policy": sum(shards) if cfg.model.cpu_offload else 0,
    }
    phases = [
        PhaseMemory.of("load", {"weights": memory.weights}, loading),
        PhaseMemory.of("forward-backward", trainer | _update(cfg, rank), host),
        *([PhaseMemory.of("critic", trainer | _update(cfg, critic), host)] if critic else []),
        PhaseMemory.of("optimizer", trainer | {"gradients": memory.gradients} | _visiting_state(cfg, rank), host),
        PhaseMemory.of("save", trainer, host),
    ]
    if cfg.export.at_end or cfg.export.every:
        whole = rank.size.whole * rank.compute_bytes
        bucket = full_bucket(EXPORT_BUCKET_BYTES, rank.size, compute_bytes=rank.compute_bytes)
        ranks = copy_ranks(cfg, rank.run)
        gathered = bucket + staging_bytes(bucket, num_ranks=ranks)
        files = math.ceil(whole / EXPORT_FILE_BYTES / ranks)  # of a rank
        held = min(whole, min(files, 2) * EXPORT_FILE_BYTES)
        phases.append(PhaseMemory.of("export", trainer | {"gathered": gathered}, host | {"exported files": held}))
    return phases


def phase_memory(cfg: Config, rank: Rank, plan: MemoryPlan) -> list[PhaseMemory]:
    """The phases of a rank that trains and of its engine, or of a rank of each kind, in the order of a step."""
    return [*_phases(cfg, rank, plan)]


def copy_ranks(cfg: Config | SftConfig, run: Plan) -> int:
    """Ranks that hold one copy of the policy between them."""
    return run.training_ranks // cfg.parallel.dp_replicate


def micro_batch_tokens(cfg: Config | SftConfig, run: Plan) -> int:
    """Tokens that one rank computes together, at most: its chunk of a full micro-batch."""
    budget = run.max_tokens_per_micro_batch or (run.sequences_per_micro_batch or 0) * run.max_sequence_tokens
    all_there_are = math.ceil(run.rollouts_per_mini_batch / run.num_shares) * run.max_sequence_tokens
    return math.ceil(min(budget, all_there_are) / cfg.parallel.cp)


def _phases(cfg: Config, rank: Rank, plan: MemoryPlan) -> Iterator[PhaseMemory]:
    load, *training = training_phases(cfg, rank)
    apart = cfg.rollout.placement == "disaggregated"
    alone, more_host = _host(cfg, rank), _host_of_rollouts(cfg, rank)
    asleep = {"trainer": plan.asleep, "refit buckets": plan.buckets}
    awake = {"refit buckets": plan.buckets}

    def beside(phase: PhaseMemory, device: Parts, *, engine_bytes: int) -> PhaseMemory:
        """The phase with the rest of what is there, of which the torch engine is in this process."""
        engine, in_process = {"engine": engine_bytes}, engine_facts(cfg.rollout.engine).in_process
        return PhaseMemory.of(
            phase.name,
            {**phase.device, **device, **(engine if in_process else {})},
            {**phase.host, **more_host},
            {} if in_process else engine,
        )

    yield PhaseMemory.of(load.name, load.device, {**load.host, "reference": more_host["reference"]})
    refit, rollout = PhaseMemory("refit", {}, alone), PhaseMemory("rollout", {}, alone)
    yield beside(refit, asleep, engine_bytes=max(plan.engine_weights, _engine_while_refitted(cfg, plan)))
    sampling = _engine_while_it_samples(cfg, rank, plan)
    yield beside(rollout, {"refit bucket": plan.buckets // 2} if apart else asleep, engine_bytes=sampling)
    needs_old = needs_old_logprobs(
        cfg.loss, cfg.correction, num_updates=rank.run.updates_per_step, kl_in_reward=cfg.reward.kl_coef > 0
    )
    if needs_old or cfg.has_reference or rank.critic:
        logprobs = PhaseMemory("logprobs", _trainer(rank) | _scoring(cfg, rank), alone)
        yield beside(logprobs, awake, engine_bytes=plan.engine_keeps)
    for phase in training:
        yield beside(phase, awake, engine_bytes=plan.engine_keeps)


def _trainer(rank: Rank) -> dict[str, int]:
    """What a trainer that is awake has on its device between forward passes."""
    return {"weights": rank.memory.weights, "optimizer": rank.memory.optimizer}


def _host(cfg: Config | SftConfig, rank: Rank) -> dict[str, int]:
    """What a process that trains keeps on the host from its first step on."""
    shards = rank.trained_shards
    weights = sum(shards)
    state = weights * states_per_weight(cfg.optim)
    return {
        "process": CUDA_PROCESS_BYTES if rank.on_gpu else PROCESS_BYTES,
        "optimizer": state if cfg.optim.state_on_host else 0,
        "offloaded policy": weights + max(shards) + state if cfg.model.cpu_offload else 0,
        "checkpoint copy": weights + state if cfg.checkpoint.every else 0,
    }


def _host_of_rollouts(cfg: Config, rank: Rank) -> dict[str, int]:
    """What it keeps there besides, because an engine takes turns with it and rewards need a reference."""
    shards = rank.trained_shards
    weights = sum(shards)
    state = weights * states_per_weight(cfg.optim)
    moved = {
        "none": 0,
        "optimizer": state,
        "all": weights + (0 if cfg.optim.state_on_host else state),
    }[cfg.offload.trainer]
    return {
        "sleeping trainer": moved,
        "reference": shards[0] if cfg.has_reference else 0,
        "refit buckets": 2 * cfg.refit.bucket_bytes if cfg.refit.transport == "shared_memory" else 0,
    }


def _scoring(cfg: Config, rank: Rank) -> dict[str, int]:
    """A pass without gradients; the policy's root stays gathered after its own, while the reference is scored, and the
    critic is asked after it."""
    critic = rank.for_critic()
    reference = gathered_weights(cfg.model, rank.size, trainable=False) if cfg.has_reference else 0
    critics = gathered_weights(cfg.model, critic.size) if critic else 0
    return {
        "gathered": (gathered_weights(cfg.model, rank.size) + max(reference, critics)) * rank.compute_bytes,
        "activations and logits": max(_forward(cfg, one) for one in (rank, critic) if one),
    }


def _update(cfg: Config | SftConfig, rank: Rank) -> dict[str, int]:
    """What comes into being in forward and backward of one model."""
    return {
        "gradients": 0 if cfg.model.cpu_offload else rank.size.shard * _FLOAT32,
        "gathered": gathered_weights(cfg.model, rank.size) * rank.compute_bytes,
    } | _backward(cfg, rank)


def _forward(cfg: Config, rank: Rank) -> int:
    """Without gradients: a layer at its fullest, or the head."""
    tokens = micro_batch_tokens(cfg, rank.run)
    layer = forward_bytes(rank.decoder.cut(cfg.parallel.tp), compute_bytes=rank.compute_bytes, num_tokens=tokens)
    return max(layer, tokens * rank.decoder.hidden * rank.compute_bytes + _logits(cfg, rank))


def _backward(cfg: Config | SftConfig, rank: Rank) -> dict[str, int]:
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
        wide_stream=isinstance(cfg, Config)
        and cfg.true_on_policy
        and engine_facts(cfg.rollout.engine).exact_in_float32,
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


def _logits(cfg: Config | SftConfig, rank: Rank) -> int:
    return logits_bytes(
        rank.decoder,
        num_tokens=micro_batch_tokens(cfg, rank.run),
        chunk_tokens=cfg.model.logits_chunk_tokens,
        tile_elements=rank.tile_elements,
    )


def _visiting_state(cfg: Config | SftConfig, rank: Rank) -> dict[str, int]:
    """What of an optimizer's state on the host is on the device together: that of a block of weights."""
    if not cfg.optim.state_on_host:
        return {}
    block = min(STATE_BLOCK_BYTES, max(rank.trained_shards))
    return {"visiting state": block * states_per_weight(cfg.optim)}


def _engine_while_refitted(cfg: Config, plan: MemoryPlan) -> int:
    """Its weights are back; its cache is, only where it never left."""
    cached = plan.engine_share or 0
    return cached if "kv_cache" not in cfg.offload.engine else plan.engine_weights


def _engine_while_it_samples(cfg: Config, rank: Rank, plan: MemoryPlan) -> int:
    """An engine with a fixed share fills it; the torch engine's cache has a row for each rollout that runs, as long
    as the longest, beside the logits of one token each."""
    if plan.engine_share is not None:
        return plan.engine_share
    if engine_facts(cfg.rollout.engine).takes_fixed_share:  # on a device of its own
        return int(cfg.rollout.memory_fraction * (rank.device_bytes - CONTEXT_BYTES))
    run, decoder = rank.run, rank.decoder
    weights = rank.size.whole * rank.compute_bytes // cfg.rollout.tp_size
    num_engines = (run.engine_ranks or run.num_ranks) // cfg.rollout.tp_size
    rows = min(cfg.rollout.max_running, math.ceil(run.rollouts_per_step / num_engines))
    cache = 2 * decoder.num_layers * decoder.key_width * run.max_sequence_tokens * rows * rank.compute_bytes
    logits = rows * decoder.vocabulary * (2 * _FLOAT32 + rank.compute_bytes)
    return weights + cache + logits
