"""What a rank's device must hold in each phase: plain arithmetic, in bytes.

It counts what is known before a run starts. Activations, logits and the workspaces of kernels come on top, so memory
that is too small by this count is too small in any case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdrl.config import Config, ModelConfig, OptimConfig
from spmdrl.config.engines import engine_facts

GIB = 2**30
CONTEXT_BYTES = GIB  # CUDA's own memory and NCCL's buffers, of the trainer's and the engine's process
STATE_BLOCK_BYTES = 2**28  # of weights whose optimizer state visits the device together, when it is on the host
EXPORT_BUCKET_BYTES = 2**28  # of weights that are gathered together to be exported
EXPORT_FILE_BYTES = 2**30  # of one exported file, about; a rank holds one that fills and one that is written
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Over how many ranks each parameter of one copy of the policy is laid."""

    copy_ranks: int  # that hold one copy between them
    tp: int = 1
    ep: int = 1
    cut_by_tp: frozenset[str] = frozenset()  # parameters that tensor parallelism divides
    experts: frozenset[str] = frozenset()  # parameters that hold one slice for each expert

    def cuts(self, name: str) -> int:
        """Parts that a layer is computed in: a rank that gathers the parameter gets one of them."""
        if self.ep > 1 and name in self.experts:
            return self.ep
        return self.tp if name in self.cut_by_tp else 1

    def shards(self, name: str) -> int:
        """Ranks that each part is sharded over by rows."""
        return self.copy_ranks // (self.ep if self.ep > 1 and name in self.experts else self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of parameters, tied ones counted once; one rank's part where a layer is computed in parts."""

    whole: int  # of the model, undivided
    shard: int  # on the rank with the most; FSDP splits by rows and pads
    root: int  # outside the decoder layers: gathered from forward to backward
    largest_layer: int  # gathered while it is computed
    num_layers: int = 1
    largest_weight: int = 0  # undivided


def model_size(shapes: dict[str, tuple[int, ...]], layers: list[set[str]], *, layout: ShardLayout) -> ModelSize:
    """Sizes from the shape of each parameter, and which parameters form each decoder layer."""
    gathered = {name: math.prod(shape) // layout.cuts(name) for name, shape in shapes.items()}
    in_layers = [sum(gathered[name] for name in layer) for layer in layers]
    return ModelSize(
        whole=sum(map(math.prod, shapes.values())),
        shard=sum(
            math.ceil(shape[0] / layout.shards(name)) * math.prod(shape[1:]) // layout.cuts(name)
            for name, shape in shapes.items()
        ),
        root=sum(gathered.values()) - sum(in_layers),
        largest_layer=max(in_layers, default=0),
        num_layers=len(layers),
        largest_weight=max(map(math.prod, shapes.values())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What training takes of one rank's device, by what it is for, in bytes."""

    weights: int  # float32 master shards, of the policy and of the critic if there is one
    gradients: int  # float32 shards, of the larger of the two: each is updated for itself
    optimizer: int  # state of a known optimizer between steps, of both; 0 when only the user knows it
    gathered: int  # full weights in the compute dtype, at the time most of them are

    @property
    def training(self) -> int:
        """What comes into being in forward and backward, without activations."""
        return self.gradients + self.gathered

    @property
    def awake(self) -> int:
        """What the trainer holds while it works, without activations."""
        return self.weights + self.optimizer + self.training


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(TrainingMemory):
    """The same of a run with an engine, and what the engine and its refits take."""

    buckets: int  # the two of a refit, and what is gathered for one
    asleep: int  # what of the above the trainer still holds while the engine samples
    engine_weights: int  # this rank's part
    free_at_launch: int  # when the engine starts
    engine_share: (
        int | None
    )  # of that: weights and KV cache of an engine that takes a fixed part; None: as much as it needs
    engine_keeps: int  # what the engine still holds while the trainer works

    def to_train(self, *, brought_back: int, has_optimizer_state: bool) -> int:
        """What must be free before the trainer wakes and takes `brought_back` for what it had moved."""
        return brought_back + self.training + (0 if has_optimizer_state else self.optimizer)


def training_memory(
    model: ModelConfig, optim: OptimConfig, trained: Sequence[ModelSize], *, compute_bytes: int
) -> TrainingMemory:
    """What training one model after another takes on one rank when the compute dtype has elements of
    `compute_bytes`."""
    shards = [0 if model.cpu_offload else size.shard * _FLOAT32 for size in trained]
    return TrainingMemory(
        weights=sum(shards),
        gradients=max(shards),
        optimizer=0 if optim.state_on_host else sum(shards) * states_per_weight(optim),
        gathered=max(gathered_weights(model, size) for size in trained) * compute_bytes,
    )


def plan_memory(
    cfg: Config,
    size: ModelSize,
    *,
    num_ranks: int,
    compute_bytes: int,
    device_bytes: int,
    critic: ModelSize | None = None,
) -> MemoryPlan:
    """The plan of a reinforcement-learning run whose compute dtype has elements of `compute_bytes`.

    It is that of one of the `num_ranks` ranks that hold a copy of the policy, with the engine beside it unless that is
    on other ranks.
    """
    apart = cfg.rollout.placement == "disaggregated"
    trained = [size, critic] if critic else [size]
    training = training_memory(cfg.model, cfg.optim, trained, compute_bytes=compute_bytes)
    engine_weights = 0 if apart else size.whole * compute_bytes // cfg.rollout.tp_size
    # SGLang takes its fraction of what is free when it starts, and then the optimizer has no state yet. The torch
    # engine has no fixed share: its cache is as large as the requests that run.
    free = device_bytes - CONTEXT_BYTES - (0 if cfg.offload.trainer == "all" else training.weights)
    has_share = not apart and engine_facts(cfg.rollout.engine).takes_fixed_share
    share = int(cfg.rollout.memory_fraction * free) if has_share else None
    cache = max(0, (share or 0) - engine_weights)
    bucket = full_bucket(cfg.refit.bucket_bytes, size, compute_bytes=compute_bytes)
    moved = {"none": 0, "optimizer": training.optimizer, "all": training.weights + training.optimizer}
    return MemoryPlan(
        **dataclasses.asdict(training),
        buckets=2 * bucket + staging_bytes(bucket, num_ranks=num_ranks),
        asleep=training.weights + training.optimizer - moved[cfg.offload.trainer],
        engine_weights=engine_weights,
        free_at_launch=free,
        engine_share=share,
        engine_keeps=(0 if "weights" in cfg.offload.engine else engine_weights)
        + (0 if "kv_cache" in cfg.offload.engine else cache),
    )


def memory_problems(plan: MemoryPlan, cfg: Config, *, device_bytes: int) -> Iterator[str]:
    """Sentences about phases that cannot fit into a device of `device_bytes`."""
    usable = device_bytes - CONTEXT_BYTES
    of_device = f"of the device's {gib(device_bytes)}"
    if plan.free_at_launch <= 0:
        yield f"the trainer's weights alone ({gib(plan.weights)}) are more than is usable {of_device}; use more ranks"
        return
    if plan.engine_share is not None:
        share = f"rollout.memory_fraction = {cfg.rollout.memory_fraction:g} gives the engine {gib(plan.engine_share)}"
        if plan.engine_share <= plan.engine_weights:
            yield (
                f"{share} {of_device}, but its weights alone take {gib(plan.engine_weights)}; "
                "raise it, or raise rollout.tp_size"
            )
        beside = plan.asleep + plan.buckets
        if plan.engine_share + beside > usable:
            most = math.floor(100 * (usable - beside) / plan.free_at_launch) / 100
            more = {"none": '"optimizer" or "all"', "optimizer": '"all"', "all": None}[cfg.offload.trainer]
            remedies = [f"set it to {most:g} or less"] if most * plan.free_at_launch > plan.engine_weights else []
            remedies += [f"set offload.trainer = {more}"] if more and plan.asleep else []
            yield (
                f"{share} {of_device}, but beside it the trainer keeps {gib(plan.asleep)} while the engine samples, "
                f"refits need {gib(plan.buckets)} and CUDA itself about {gib(CONTEXT_BYTES)}; "
                f"{' or '.join(remedies) or 'use more ranks'}"
            )
    elif plan.engine_weights and plan.asleep + plan.buckets + plan.engine_weights > usable:
        yield (
            f"while the engine samples, its weights ({gib(plan.engine_weights)}), the trainer ({gib(plan.asleep)}) and "
            f"refits ({gib(plan.buckets)}) take more than is usable {of_device}; "
            'use more ranks, or offload.trainer = "all"'
        )
    if plan.awake + plan.buckets + plan.engine_keeps > usable:
        kept = [f'"{part}"' for part in ("kv_cache", "weights") if part not in cfg.offload.engine]
        remedy = f"add {' and '.join(kept)} to offload.engine, " if kept and plan.engine_weights else ""
        engine = f"{gib(plan.engine_keeps)} of a sleeping engine and " if plan.engine_weights else ""
        yield (
            f"{_training_takes(plan)} beside {engine}{gib(plan.buckets)} for refits, more than is usable "
            f"{of_device}; {remedy}use more ranks, or model.cpu_offload = true"
        )


def training_problems(memory: TrainingMemory, *, device_bytes: int) -> Iterator[str]:
    """Sentences about training that cannot fit into a device of `device_bytes` with nothing beside it."""
    if memory.awake > device_bytes - CONTEXT_BYTES:
        yield (
            f"{_training_takes(memory)}, more than is usable of the device's {gib(device_bytes)}; use more ranks, or "
            "model.cpu_offload = true"
        )


def _training_takes(memory: TrainingMemory) -> str:
    return (
        f"training takes {gib(memory.awake)} before any activation (weights {gib(memory.weights)}, gradients "
        f"{gib(memory.gradients)}, optimizer {gib(memory.optimizer)}, gathered {gib(memory.gathered)})"
    )


def engine_problems(cfg: Config, size: ModelSize, *, compute_bytes: int, device_bytes: int) -> Iterator[str]:
    """Sentences about a device of `device_bytes` that holds an engine and nothing else."""
    if cfg.rollout.placement == "colocated":
        return
    usable = device_bytes - CONTEXT_BYTES
    weights = size.whole * compute_bytes // cfg.rollout.tp_size
    # Whole tensors come to every rank of an engine.
    bucket = full_bucket(cfg.refit.bucket_bytes, size, compute_bytes=compute_bytes)
    has_share = engine_facts(cfg.rollout.engine).takes_fixed_share
    share = int(cfg.rollout.memory_fraction * usable) if has_share else weights
    if max(share, weights) + bucket > usable or share < weights:
        takes = f"rollout.memory_fraction = {cfg.rollout.memory_fraction:g} gives an engine {gib(share)}, and "
        yield (
            f"{takes if has_share else ''}an engine's weights take {gib(weights)} and a bucket of "
            f"a refit {gib(bucket)}, of the {gib(usable)} that are usable of a device that holds an engine; change "
            "rollout.memory_fraction, lower refit.bucket_bytes, or raise rollout.tp_size"
        )


def gib(num_bytes: int) -> str:
    """A size for a sentence."""
    return f"{num_bytes / GIB:.1f} GiB"


def gathered_weights(model: ModelConfig, size: ModelSize, *, trainable: bool = True) -> int:
    """Parameters that are whole on a rank at the same time: what is outside the layers, the layer that computes and
    those gathered ahead of it; of a policy whose layers stay gathered, all of them."""
    ahead = 1 + model.prefetch_layers if model.reshard_after_forward or not trainable else size.num_layers
    return size.root + min(ahead, size.num_layers) * size.largest_layer


def full_bucket(bucket_bytes: int, size: ModelSize, *, compute_bytes: int) -> int:
    """Bytes of the fullest of buckets that weights are gathered in: a larger weight has one of its own."""
    return min(max(bucket_bytes, size.largest_weight * compute_bytes), size.whole * compute_bytes)


def staging_bytes(bucket: int, *, num_ranks: int) -> int:
    """What so many ranks that gather a bucket of weights each hold of it beside the bucket: sent, and received."""
    return bucket // num_ranks + bucket if num_ranks > 1 else 0


def states_per_weight(optim: OptimConfig) -> int:
    """float32 numbers that the optimizer keeps for each weight, as far as its name tells."""
    return {"adamw": 2, "sgd": int(optim.momentum > 0)}.get(optim.name, 0)
