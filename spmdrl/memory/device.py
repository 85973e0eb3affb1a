"""Bytes that a rank's device needs for certain: weights, gradients, optimizer state, the engine and refits.

All of it is known before a run starts. Activations and logits come in addition, and so does what `memory/overhead.py`
estimates, so a device that is too small by this count is too small in any case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spmdrl.config import Config, ModelConfig, OptimConfig
from spmdrl.config.engines import engine_facts
from spmdrl.memory.blocks import ShardedWeight, Unit
from spmdrl.memory.overhead import Overhead

GIB = 2**30
STATE_BLOCK_BYTES = 2**28  # weights whose optimizer state is on the device together, when it lives on the host
EXPORT_BUCKET_BYTES = 2**28  # weights that an export gathers together
EXPORT_FILE_BYTES = 2**30  # about one exported file; a rank holds one that it fills and one that it writes
EXPORT_SLAB_BYTES = 2**27  # of the numbers that an export writes in few bits together
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The division of one copy of the policy's parameters over its ranks."""

    copy_ranks: int  # ranks that hold one copy together
    tp: int = 1
    ep: int = 1
    split_by_tp: frozenset[str] = frozenset()  # parameters that tensor parallelism divides
    experts: frozenset[str] = frozenset()  # parameters that hold one slice for each expert

    def num_parts(self, name: str) -> int:
        """Count the parts that tp or ep divide a parameter into; a rank gathers and computes with one of them."""
        if self.ep > 1 and name in self.experts:
            return self.ep
        return self.tp if name in self.split_by_tp else 1

    def num_shards(self, name: str) -> int:
        """Count the ranks over which FSDP shards each part of a parameter by rows."""
        return self.copy_ranks // (self.ep if self.ep > 1 and name in self.experts else self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of parameters, tied ones counted once. `root` and `largest_layer` are one rank's part under tp and ep."""

    whole: int  # of the model, undivided
    shard: int  # on the rank with the most; FSDP splits by rows and pads
    root: int  # outside the decoder layers; gathered from forward to backward
    largest_layer: int  # gathered while it is computed
    num_layers: int = 1
    largest_weight: int = 0  # undivided
    frozen_shard: int = 0  # of the shard, what is not trained
    adapters: int = 0  # elements of adapters, whole on every rank; 0 where the model itself is trained
    adapter_shard: int = 0  # of these, those that this rank's optimizer steps
    adapter_start: int = 0  # elements of the start that adapters subtract, whole on every rank
    quantized: int = 0  # elements of weights in few bits, whole on every rank; they are no part of `shard`
    quantized_bytes: int = 0  # of them
    largest_quantized: int = 0  # elements of the largest, which exists in the compute dtype as long as its product
    adapted_experts: int = 0  # in the layer with the most: experts whose adapters are merged while it computes
    largest_adapted: int = 0  # the largest parameter of these experts
    all_adapted_experts: int = 0  # undivided, of all layers
    in_blocks: int = 0  # elements of weights that an engine in fp8 has in a byte each, undivided
    units: tuple[Unit, ...] = ()  # what is outside of all layers, and each layer; not what is in few bits

    @property
    def stepped(self) -> int:
        """Elements that this rank's optimizer steps."""
        return self.adapter_shard if self.adapters else self.shard - self.frozen_shard

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that wait for the optimizer: shards, of adapters the whole ones too."""
        return (self.stepped + self.adapters) * _FLOAT32

    def base_bytes(self, compute_bytes: int) -> int:
        """Bytes of the model's weights: of shards float32 where they are trained, else as they compute."""
        return self.shard * (compute_bytes if self.adapters else _FLOAT32) + self.quantized_bytes


def model_size(
    shapes: dict[str, tuple[int, ...]],
    layers: list[set[str]],
    *,
    layout: ShardLayout,
    frozen: Collection[str] = (),
    apart: Collection[str] = (),
    quantized: Mapping[str, int] | None = None,
) -> ModelSize:
    """Count parameters, given the shape of each and the names of those in each decoder layer.

    `frozen` are the names of those that are not trained, `apart` of those that are gathered by themselves: a tower's.
    `quantized` are the bytes of those in few bits, by name.
    """
    quantized = quantized or {}
    gathered = {
        name: 0 if name in quantized else math.prod(shape) // layout.num_parts(name) for name, shape in shapes.items()
    }
    in_layers = [sum(gathered[name] for name in layer) for layer in layers]

    def shard(name: str) -> int:
        if name in quantized:
            return 0
        num_rows, *others = shapes[name]
        return math.ceil(num_rows / layout.num_shards(name)) * math.prod(others) // layout.num_parts(name)

    def unit(names: Iterable[str]) -> Unit:
        sharded = (name for name in names if name not in quantized)
        return Unit(tuple(ShardedWeight(shard(name), layout.num_shards(name), name not in frozen) for name in sharded))

    outside = [name for name in shapes if not any(name in layer for layer in layers)]
    return ModelSize(
        whole=sum(map(math.prod, shapes.values())),
        shard=sum(map(shard, shapes)),
        root=sum(gathered.values()) - sum(in_layers) - sum(gathered[name] for name in apart),
        largest_layer=max(in_layers, default=0),
        num_layers=len(layers),
        largest_weight=max(map(math.prod, shapes.values())),
        frozen_shard=sum(map(shard, frozen)),
        quantized=sum(math.prod(shapes[name]) for name in quantized),
        quantized_bytes=sum(quantized.values()),
        largest_quantized=max((math.prod(shapes[name]) for name in quantized), default=0),
        units=(unit(outside), *(unit(name for name in shapes if name in layer) for layer in layers)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes that training takes on one rank's device, without activations."""

    weights: int  # shards of the policy and of the critic if there is one, adapters, and frozen models that rest there
    stays: int = 0  # of these, adapters and frozen models, which never leave the device
    gradients: int  # float32 shards, of the larger of the two: they are updated one after the other
    optimizer: int  # state of both between steps; 0 for an optimizer that is not built in
    gathered: int  # full weights in the compute dtype, when most of them are gathered

    @property
    def training(self) -> int:
        """Bytes that forward and backward add, without activations."""
        return self.gradients + self.gathered

    @property
    def awake(self) -> int:
        """Bytes that the trainer holds while it works, without activations."""
        return self.weights + self.optimizer + self.training


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(TrainingMemory):
    """Bytes on one rank's device in a run with an engine: training, refits and the engine."""

    buckets: int  # the two of a refit, and the memory to gather one
    cast: int  # a weight that a refit brings from the host, before it has the engine's dtype
    moved: int  # weights and optimizer state that go to the host while the engine samples
    engine_weights: int  # this rank's part
    free_at_launch: int  # when the engine starts
    engine_share: int | None  # of that, for an engine that takes a fixed share; None: it takes what it needs
    engine_keeps: int  # allocated by the sleeping engine while the trainer works
    overhead: Overhead = field(default_factory=Overhead)  # besides all of this

    @property
    def asleep(self) -> int:
        """Bytes that the trainer still holds while the engine samples."""
        return self.weights + self.optimizer - self.moved

    def to_train(self, *, brought_back: int, has_optimizer_state: bool) -> int:
        """Bytes that must be free before the trainer wakes and moves `brought_back` bytes to the device."""
        return brought_back + self.training + (0 if has_optimizer_state else self.optimizer)


def training_memory(
    model: ModelConfig,
    optim: OptimConfig,
    trained: Sequence[ModelSize],
    *,
    compute_bytes: int,
    resident: Sequence[ModelSize] = (),
) -> TrainingMemory:
    """Count the bytes of training these models in turn on one rank.

    `compute_bytes` is the size of an element of the compute dtype; `resident` are frozen models that rest on the
    device.
    """
    on_device = [size for size in trained if size.adapters or not model.cpu_offload]
    adapters = sum(size.adapters + size.adapter_start for size in trained) * _FLOAT32
    stays = adapters + sum(size.shard for size in resident) * _FLOAT32
    bases = 0 if model.cpu_offload else sum(size.base_bytes(compute_bytes) for size in trained)
    stepped = sum(size.stepped for size in on_device) * _FLOAT32
    return TrainingMemory(
        weights=bases + stays,
        stays=stays,
        gradients=max((size.gradient_bytes for size in on_device), default=0),
        optimizer=0 if optim.state_on_host else stepped * states_per_weight(optim),
        gathered=max(gathered_weights(model, size) for size in trained) * compute_bytes,
    )


def plan_memory(
    cfg: Config,
    size: ModelSize,
    *,
    num_ranks: int,
    compute_bytes: int,
    device_bytes: int,
    bucket_bytes: int,
    overhead: Overhead,
    critic: ModelSize | None = None,
    resident: Sequence[ModelSize] = (),
) -> MemoryPlan:
    """Plan the memory of one of the `num_ranks` ranks that hold a copy of the policy, and of its colocated engine.

    `compute_bytes` is the size of an element of the compute dtype, `bucket_bytes` that of a refit's buckets, `overhead`
    that of the rank's device. `resident` are frozen models that rest there.
    """
    disaggregated = cfg.rollout.placement == "disaggregated"
    trained = [size, critic] if critic else [size]
    training = training_memory(cfg.model, cfg.optim, trained, compute_bytes=compute_bytes, resident=resident)
    in_process = engine_facts(cfg.rollout.engine).in_process
    # The torch engine merges the adapters of a version's experts: of the one before too while it takes the next one.
    merged = 2 * size.all_adapted_experts if in_process and cfg.sends_adapters else 0
    whole = engine_bytes(cfg, size, compute_bytes=compute_bytes)
    engine_weights = 0 if disaggregated else (whole + merged * compute_bytes) // cfg.rollout.tp_size
    # SGLang takes its fraction of what is free when it starts; the optimizer has no state then. The torch engine has no
    # fixed share: its cache grows with the requests that run.
    free = device_bytes - overhead.at_launch - (training.stays if cfg.offload.trainer == "all" else training.weights)
    has_share = not disaggregated and engine_facts(cfg.rollout.engine).takes_fixed_share
    share = int(cfg.rollout.memory_fraction * free) if has_share else None
    cache = max(0, (share or 0) - engine_weights)
    bucket = full_bucket(bucket_bytes, size, compute_bytes=compute_bytes)
    merging = size.largest_weight * _FLOAT32 if cfg.merges_adapters else 0
    # A rank's part of a bucket in e4m3, and the part of a weight in float32 of which it is made, before and after.
    quantizing = (bucket + 2 * _FLOAT32 * size.largest_weight) // num_ranks if cfg.rollout.quantization else 0
    from_host = cfg.offload.trainer == "all" or cfg.model.cpu_offload
    changes_dtype = compute_bytes != _FLOAT32 and not size.adapters  # a base with adapters rests in the compute dtype
    movable = training.weights - training.stays + training.optimizer
    moved = {"none": 0, "optimizer": training.optimizer, "all": movable}
    return MemoryPlan(
        **dataclasses.asdict(training),
        buckets=2 * bucket + staging_bytes(bucket, num_ranks=num_ranks) + merging + quantizing,
        cast=size.largest_weight * _FLOAT32 // num_ranks if from_host and changes_dtype else 0,
        moved=moved[cfg.offload.trainer],
        engine_weights=engine_weights,
        free_at_launch=free,
        engine_share=share,
        engine_keeps=(0 if "weights" in cfg.offload.engine else engine_weights)
        + (0 if "kv_cache" in cfg.offload.engine else cache),
        overhead=overhead,
    )


def engine_bytes(cfg: Config, size: ModelSize, *, compute_bytes: int) -> int:
    """Bytes of an engine's weights, undivided: in fp8 a byte for each number in blocks of 128 x 128, and 4 for each
    block. An engine in the rank's process computes with the numbers that these encode, in the compute dtype."""
    is_smaller = cfg.rollout.quantization is not None and not engine_facts(cfg.rollout.engine).in_process
    in_blocks = size.in_blocks if is_smaller else 0
    return (size.whole - in_blocks) * compute_bytes + in_blocks + 4 * (in_blocks // 128**2)


def memory_problems(plan: MemoryPlan, cfg: Config, *, device_bytes: int) -> Iterator[str]:
    """Yield a sentence for each phase that cannot fit into a device of `device_bytes`."""
    sampling, training = (sum(x.values()) for x in (plan.overhead.while_sampling, plan.overhead.while_training))
    device = f"the device's {gib(device_bytes)}"
    if plan.free_at_launch <= 0:
        yield f"the trainer's weights alone ({gib(plan.weights)}) are more than is usable of {device}; use more ranks"
        return
    if plan.engine_share is not None:
        share = f"rollout.memory_fraction = {cfg.rollout.memory_fraction:g} gives the engine {gib(plan.engine_share)}"
        if plan.engine_share <= plan.engine_weights:
            yield (
                f"{share} of {device}, but its weights alone take {gib(plan.engine_weights)}; "
                "raise it, or raise rollout.tp_size"
            )
        refits = plan.buckets + (0 if "kv_cache" in cfg.offload.engine else plan.cast)
        others = plan.asleep + refits
        if plan.engine_share + others + sampling > device_bytes:
            most = math.floor(100 * (device_bytes - sampling - others) / plan.free_at_launch) / 100
            more = {"none": '"optimizer" or "all"', "optimizer": '"all"', "all": None}[cfg.offload.trainer]
            remedies = [f"set it to {most:g} or less"] if most * plan.free_at_launch > plan.engine_weights else []
            remedies += [f"set offload.trainer = {more}"] if more and plan.asleep else []
            yield (
                f"{share} of {device}, but while the engine samples the trainer keeps {gib(plan.asleep)}, refits need "
                f"{gib(refits)}, and CUDA, NCCL and the engine's graphs and workspace about {gib(sampling)}; "
                f"{' or '.join(remedies) or 'use more ranks'}"
            )
    elif plan.engine_weights and plan.asleep + plan.buckets + plan.engine_weights + sampling > device_bytes:
        yield (
            f"while the engine samples, its weights ({gib(plan.engine_weights)}), the trainer ({gib(plan.asleep)}) and "
            f"refits ({gib(plan.buckets)}) take more than is usable of {device}, of which CUDA and NCCL take about "
            f'{gib(sampling)}; use more ranks, or offload.trainer = "all"'
        )
    if plan.awake + plan.buckets + plan.engine_keeps + training > device_bytes:
        loaded = [f'"{part}"' for part in ("kv_cache", "weights") if part not in cfg.offload.engine]
        remedy = f"add {' and '.join(loaded)} to offload.engine, " if loaded and plan.engine_weights else ""
        engine = f"a sleeping engine {gib(plan.engine_keeps)} and " if plan.engine_weights else ""
        yield (
            f"{_training_takes(plan)}, {engine}refits {gib(plan.buckets)}, and CUDA and NCCL about {gib(training)}, "
            f"together more than {device}; {remedy}use more ranks, or model.cpu_offload = true"
        )


def training_problems(memory: TrainingMemory, overhead: Overhead, *, device_bytes: int) -> Iterator[str]:
    """Yield a sentence when training alone cannot fit into a device of `device_bytes`."""
    beside = sum(overhead.while_training.values())
    if memory.awake + beside > device_bytes:
        yield (
            f"{_training_takes(memory)}, and CUDA and NCCL about {gib(beside)}, together more than the device's "
            f"{gib(device_bytes)}; use more ranks, or model.cpu_offload = true"
        )


def _training_takes(memory: TrainingMemory) -> str:
    return (
        f"training takes {gib(memory.awake)} before any activation (weights {gib(memory.weights)}, gradients "
        f"{gib(memory.gradients)}, optimizer {gib(memory.optimizer)}, gathered {gib(memory.gathered)})"
    )


def engine_problems(
    cfg: Config,
    size: ModelSize,
    overhead: Overhead,
    *,
    compute_bytes: int,
    device_bytes: int,
    bucket_bytes: int,
) -> Iterator[str]:
    """Yield a sentence when an engine cannot fit into a device of `device_bytes` that it has for itself.

    `overhead` is that of its device, `bucket_bytes` the size of a refit's buckets.
    """
    if cfg.rollout.placement == "colocated":
        return
    usable = device_bytes - sum(overhead.while_sampling.values())
    weights = engine_bytes(cfg, size, compute_bytes=compute_bytes) // cfg.rollout.tp_size
    # Every rank of an engine receives whole tensors.
    bucket = full_bucket(bucket_bytes, size, compute_bytes=compute_bytes)
    has_share = engine_facts(cfg.rollout.engine).takes_fixed_share
    share = int(cfg.rollout.memory_fraction * (device_bytes - overhead.at_launch)) if has_share else weights
    if max(share, weights) + bucket > usable or share < weights:
        takes = f"rollout.memory_fraction = {cfg.rollout.memory_fraction:g} gives an engine {gib(share)}, and "
        yield (
            f"{takes if has_share else ''}an engine's weights take {gib(weights)} and a bucket of "
            f"a refit {gib(bucket)}, of the {gib(usable)} that are usable on an engine's device; change "
            "rollout.memory_fraction, lower refit.bucket_bytes, or raise rollout.tp_size"
        )


def gib(num_bytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{num_bytes / GIB:.1f} GiB"


def gathered_weights(model: ModelConfig, size: ModelSize) -> int:
    """Count the parameters that are gathered on a rank at the same time.

    These are the ones outside the layers, the layer that computes and those prefetched; all layers when they stay
    gathered.
    """
    layers = 1 + model.prefetch_layers if model.reshard_after_forward else size.num_layers
    return size.root + min(layers, size.num_layers) * size.largest_layer + size.largest_quantized


def full_bucket(bucket_bytes: int, size: ModelSize, *, compute_bytes: int) -> int:
    """Bytes of the largest bucket of gathered weights; a weight above `bucket_bytes` has a bucket of its own."""
    return min(max(bucket_bytes, size.largest_weight * compute_bytes), size.whole * compute_bytes)


def staging_bytes(bucket: int, *, num_ranks: int) -> int:
    """Bytes that each of `num_ranks` ranks sends and receives to gather a bucket, in addition to the bucket itself."""
    return bucket // num_ranks + bucket if num_ranks > 1 else 0


def states_per_weight(optim: OptimConfig) -> int:
    """Count the float32 numbers that a built-in optimizer keeps for each weight; 0 for others."""
    return {"adamw": 2, "sgd": int(optim.momentum > 0)}.get(optim.name, 0)
