"""Predicted bytes of one rank in each phase of a step, on its device and on the host.

`memory/device.py` counts what is certain before a run starts, and refuses runs that cannot fit. Activations, logits and
host memory are added here. They depend on the lengths of sequences; these numbers are for full micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from spmdrl.config import Config, DistillConfig, ModelConfig, SftConfig, TuningConfig
from spmdrl.config.engines import engine_facts
from spmdrl.config.plan import Plan, takes_old_pass
from spmdrl.memory.activations import (
    ActivationSettings,
    activation_bytes,
    forward_bytes,
    layer_workspace_bytes,
    logits_bytes,
)
from spmdrl.memory.blocks import Activations, persistent_tensors, reserved
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.memory.device import (
    EXPORT_BUCKET_BYTES,
    EXPORT_FILE_BYTES,
    EXPORT_SLAB_BYTES,
    GIB,
    STATE_BLOCK_BYTES,
    MemoryPlan,
    full_bucket,
    gathered_weights,
    gib,
    staging_bytes,
    states_per_weight,
)
from spmdrl.memory.images import (
    Tower,
    block_workspace_bytes,
    engine_bytes,
    features_bytes,
    pass_bytes,
    pixels_bytes,
    saved_bytes,
    shown_tokens,
)
from spmdrl.memory.overhead import Parts
from spmdrl.memory.phase import FrozenModelSize, PhaseMemory, Rank

PROCESS_BYTES = GIB // 2  # on the host: Python, torch and transformers
CUDA_PROCESS_BYTES = 2 * GIB  # with CUDA's libraries
_FLOAT32 = 4
_CANDIDATE = 8 + 6 * _FLOAT32  # its number, z, log-probability, share, probability and two gradients
_SCORE = 4 * _FLOAT32  # of an expert: what its router says, its sigmoid, its share and its load
_TOP_TOKEN = 8 + _FLOAT32  # its number and its log-probability


def training_phases(cfg: Config | TuningConfig, rank: Rank) -> list[PhaseMemory]:
    """List the phases of a rank that trains and holds no engine, in the order of a run."""
    memory, host, trainer = rank.memory, _host(cfg, rank), _trainer(rank)
    bases, critic = [size.base_bytes(rank.compute_bytes) for size in rank.trained], rank.for_critic()
    loading = {  # one model after the other
        "process": host["process"],
        "files": rank.stored.share(max(size.shard + size.quantized for size in rank.trained)),
        "weights on their way": max(bases) if rank.on_gpu and not cfg.model.cpu_offload else 0,
        "offloaded policy": sum(bases) if cfg.model.cpu_offload else 0,
        "frozen models": host["frozen models"],
    }
    beside, tower = rank.overhead.while_training, rank.frozen_tower
    optimizer = trainer | {"gradients": memory.gradients} | _visiting_state(cfg, rank)
    phases = [
        PhaseMemory.of("load", {"weights": memory.weights}, loading, rank.overhead.rank),
        *([PhaseMemory.of("images", trainer | _looking(cfg, rank, tower), host, beside)] if tower else []),
        *([_logprobs_phase(cfg, rank, host)] if isinstance(cfg, TuningConfig) and cfg.frozen_models else []),
        _update_phase("forward-backward", cfg, rank, host),
        *([_update_phase("critic", cfg, critic, host)] if critic else []),
        PhaseMemory.of("optimizer", optimizer, host, beside),
        PhaseMemory.of("save", trainer, host, beside),
    ]
    if cfg.export.merged and (cfg.export.at_end or cfg.export.every):
        as_source = cfg.export.dtype == "source"
        per_weight = {"auto": rank.compute_bytes, "source": rank.stored.largest_bytes, "float32": _FLOAT32}
        exported_bytes = per_weight.get(cfg.export.dtype, 2)
        whole = rank.stored.num_bytes if as_source else rank.size.whole * exported_bytes
        bucket = full_bucket(EXPORT_BUCKET_BYTES, rank.size, compute_bytes=exported_bytes)
        ranks = copy_ranks(cfg, rank.run)
        merging = rank.size.largest_weight * _FLOAT32 if cfg.lora else 0
        encoding = EXPORT_SLAB_BYTES + rank.size.largest_weight if as_source else 0
        gathered = bucket + staging_bytes(bucket, num_ranks=ranks) + merging + encoding
        num_files = math.ceil(whole / EXPORT_FILE_BYTES / ranks)  # written by one rank
        buffered = min(whole, min(num_files, 2) * EXPORT_FILE_BYTES)
        files = {"exported files": buffered}
        phases.append(PhaseMemory.of("export", trainer | {"gathered": gathered}, host | files, beside))
    return phases


def _update_phase(name: str, cfg: Config | TuningConfig, rank: Rank, host: Parts) -> PhaseMemory:
    """Return the phase of forward and backward of one model, in which the allocator has most blocks it cannot use."""
    device = _trainer(rank) | _update(cfg, rank)
    unused = {"unused blocks": _unused_blocks(cfg, rank, device)} if rank.on_gpu else {}
    return PhaseMemory.of(name, device, host, {**rank.overhead.while_training, **unused})


def _unused_blocks(cfg: Config | TuningConfig, rank: Rank, device: Parts) -> int:
    """Bytes that torch's allocator reserves besides these tensors of forward and backward."""
    size, model, decoder = rank.size, cfg.model, rank.decoder.split(cfg.parallel.tp)
    element = micro_batch_tokens(cfg, rank.run) * rank.compute_bytes  # of every token
    stays = rank.memory.weights + rank.memory.optimizer
    states = 0 if cfg.optim.state_on_host else states_per_weight(cfg.optim)
    weight_bytes = rank.compute_bytes if size.adapters else _FLOAT32
    persistent = [] if model.cpu_offload else persistent_tensors(size.units, weight_bytes=weight_bytes, states=states)
    # FSDP reduces gradients, and gathers layers ahead, on streams of their own.
    elsewhere = (0 if size.adapters else device["gradients"]) + device["sums over copies"]
    if model.reshard_after_forward:
        elsewhere += (gathered_weights(model, size) - size.root - size.largest_layer) * rank.compute_bytes
    total = reserved(
        units=size.units,
        persistent=[*persistent, stays - sum(persistent)],
        moving=sum(device.values()) - stays - elsewhere,
        activations=Activations(
            hidden=element * decoder.hidden,
            queries=element * decoder.query_width,
            mlp=element * decoder.mlp_width,
            saved=device.get("activations", 0),
            has_experts=decoder.experts_per_token > 0,
        ),
        level=model.gradient_checkpointing,
        weight_bytes=weight_bytes,
        compute_bytes=rank.compute_bytes,
        ahead=model.prefetch_layers,
        copies=cfg.parallel.dp_replicate,
        on_host=model.cpu_offload,
    )
    return max(0, total - sum(device.values()))


def copy_ranks(cfg: Config | TuningConfig, run: Plan) -> int:
    """Count the ranks that hold one copy of the policy together."""
    return run.training_ranks // cfg.parallel.dp_replicate


def micro_batch_tokens(cfg: Config | TuningConfig, run: Plan) -> int:
    """Count the tokens of one rank's chunk of a full micro-batch."""
    budget = run.max_tokens_per_micro_batch or (run.sequences_per_micro_batch or 0) * run.max_sequence_tokens
    sequences = math.ceil(run.rollouts_per_mini_batch / run.num_shares) * run.sequences_together
    whole_mini_batch = sequences * run.max_sequence_tokens
    return math.ceil(min(budget, whole_mini_batch) / cfg.parallel.cp)


def phases_with_engine(cfg: Config, rank: Rank, plan: MemoryPlan) -> Iterator[PhaseMemory]:
    """Yield the phases of a rank in the order of a step, with its engine, or with that of a disaggregated rank."""
    load, *training = training_phases(cfg, rank)
    disaggregated = cfg.rollout.placement == "disaggregated"
    shares_memory = cfg.refit.transport == "shared_memory"
    alone = _host(cfg, rank)
    more_host = {
        "sleeping trainer": plan.moved,
        "refit buckets": 2 * bucket_bytes(cfg.refit, device_bytes=None) if shares_memory else 0,
    }
    asleep = {"trainer": plan.asleep, "refit buckets": plan.buckets}
    awake = {"refit buckets": plan.buckets}

    def with_engine(phase: PhaseMemory, device: Parts, *, engine_bytes: int) -> PhaseMemory:
        """Add the engine and more parts of the device to a phase; an engine may be in this process."""
        engine, in_process = {"engine": engine_bytes}, engine_facts(cfg.rollout.engine).in_process
        return PhaseMemory.of(
            phase.name,
            {**phase.device, **device, **(engine if in_process else {})},
            {**phase.host, **more_host},
            {**phase.elsewhere, **({} if in_process else engine)},
        )

    beside = rank.overhead.while_training
    yield load
    refit = PhaseMemory("refit", {}, alone, beside)
    rollout = PhaseMemory("rollout", {}, alone, rank.engine_overhead.while_sampling)
    share = 0 if "kv_cache" in cfg.offload.engine else plan.engine_share or 0  # of an engine that has its cache still
    during_refit = {**asleep, "weight before its cast": plan.cast}
    yield with_engine(refit, during_refit, engine_bytes=max(plan.engine_weights, share))
    during_rollout = {"refit bucket": plan.buckets // 2} if disaggregated else asleep
    yield with_engine(rollout, during_rollout, engine_bytes=_engine_in_rollout(cfg, rank, plan))
    needs_old = takes_old_pass(cfg, num_updates=rank.run.updates_per_step)
    if needs_old or cfg.frozen_models or rank.frozen or rank.critic:
        yield with_engine(_logprobs_phase(cfg, rank, alone), awake, engine_bytes=plan.engine_keeps)
    for phase in training:
        yield with_engine(phase, awake, engine_bytes=plan.engine_keeps)


def _logprobs_phase(cfg: Config | TuningConfig, rank: Rank, host: Parts) -> PhaseMemory:
    """Return the phase of forward passes without gradients."""
    return PhaseMemory.of("logprobs", _trainer(rank) | _logprobs(cfg, rank), host, rank.overhead.while_training)


def _looking(cfg: Config | TuningConfig, rank: Rank, tower: Tower) -> dict[str, int]:
    """Parts of the device for a pass of the tower; the root is gathered with it."""
    patches = cfg.pack.max_patches_per_pass
    return {
        "gathered": (rank.size.root + tower.parameters) * rank.compute_bytes,
        "activations": pass_bytes(tower, num_patches=patches, compute_bytes=rank.compute_bytes),
    }


def _trainer(rank: Rank) -> dict[str, int]:
    """Parts of the device that an awake trainer holds between forward passes."""
    return {"weights": rank.memory.weights, "optimizer": rank.memory.optimizer}


def _host(cfg: Config | TuningConfig, rank: Rank) -> dict[str, int]:
    """Parts of the host that a training process holds from its first step on."""
    weights = sum(size.stepped for size in rank.trained) * _FLOAT32
    state = weights * states_per_weight(cfg.optim)
    # Adapters, their gradients and their state stay on the device.
    whole = [size.stepped * _FLOAT32 for size in rank.trained if not size.adapters]
    offloaded = sum(size.base_bytes(rank.compute_bytes) for size in rank.trained)
    followers = sum(one.follows for one in cfg.frozen_models.values()) * rank.size.shard * _FLOAT32
    offloaded += max(whole, default=0) + sum(whole) * states_per_weight(cfg.optim)

    def features(tower: Tower | None) -> int:
        return features_bytes(tower, cfg, rank.run, compute_bytes=rank.compute_bytes) if tower else 0

    return {
        "process": CUDA_PROCESS_BYTES if rank.on_gpu else PROCESS_BYTES,
        "optimizer": state if cfg.optim.state_on_host else 0,
        "offloaded policy": offloaded if cfg.model.cpu_offload else 0,
        "frozen models": sum(one.size.shard for one in rank.frozen if not one.on_device) * _FLOAT32,
        "hidden states of teachers": _hidden_bytes(cfg, rank),
        "checkpoint copy": weights + state + followers if cfg.checkpoint.every else 0,
        "features of images": features(rank.frozen_tower)
        + max((features(one.tower) for one in rank.frozen), default=0),
        "pixels of images": pixels_bytes(rank.trained_tower, cfg, rank.run) if rank.trained_tower else 0,
    }


def _logprobs(cfg: Config | TuningConfig, rank: Rank) -> dict[str, int]:
    """Parts of the device for forward passes without gradients.

    The policy's root stays gathered while the frozen models compute one after the other, and the critic after them.
    """
    critic, frozen = rank.for_critic(), rank.for_frozen()
    others = [_in_turn(cfg.model, one, at) for one, at in zip(rank.frozen, frozen, strict=True)]
    others += [_gathered(cfg.model, critic)] if critic else []
    return {
        "heads of teachers": _head_bytes(cfg, rank),
        "gathered": (_gathered(cfg.model, rank) + max(others, default=0)) * rank.compute_bytes,
        "activations and logits": max(
            [_forward(cfg, one) for one in (rank, critic, *frozen) if one]
            + [_looking(cfg, rank, one.tower)["activations"] for one in rank.frozen if one.tower]
        ),
    }


def _in_turn(model: ModelConfig, frozen: FrozenModelSize, rank: Rank) -> int:
    """Count the weights of a frozen model that are gathered at the same time, on a rank with it for its policy."""
    layers = _gathered(model.model_copy(update={"reshard_after_forward": not frozen.gathers_once}), rank)
    tower = frozen.tower.parameters if frozen.tower else 0
    return layers + tower if frozen.gathers_once else max(layers, frozen.size.root + tower)


def turn_problems(cfg: Config | TuningConfig, rank: Rank, plan: MemoryPlan | None) -> Iterator[str]:
    """Yield a sentence for each frozen model that cannot be on the device as a whole next to what is there for certain:
    the trainer, gathered in part, and where there is one, the sleeping engine with a refit's buckets. While a reward
    model computes, the trainer sleeps."""
    others = (plan.buckets + plan.engine_keeps if plan else 0) + sum(rank.overhead.while_training.values())
    awake = rank.memory.weights + rank.memory.optimizer + rank.size.root * rank.compute_bytes
    for frozen, at in zip(rank.frozen, rank.for_frozen(), strict=True):
        beside = others + (plan.asleep if plan and frozen.table.startswith("reward.") else awake)
        whole = _in_turn(cfg.model, frozen, at) * rank.compute_bytes
        if frozen.gathers_once and whole + beside > rank.device_bytes:
            yield (
                f"{frozen.table}.reshard_after_forward = false has the whole model on the device while it computes "
                f"({gib(whole)}), beside {gib(beside)} of the run, together more than the device's "
                f"{gib(rank.device_bytes)}; set it to true"
            )


def _head_bytes(cfg: Config | TuningConfig, rank: Rank) -> int:
    """Bytes of the heads of teachers over the whole vocabulary, which are on the device until the updates end."""
    teachers = [one.decoder for one in rank.frozen if one.teaches_vocabulary]
    return sum(rank.decoder.vocabulary * one.hidden for one in teachers) // cfg.parallel.tp * rank.compute_bytes


def _distill(cfg: Config | TuningConfig) -> DistillConfig | None:
    return cfg.distill if isinstance(cfg, Config | SftConfig) else None


def _hidden_bytes(cfg: Config | TuningConfig, rank: Rank) -> int:
    """Bytes of what teachers leave of responses for the updates of a step, of full length: hidden states, or their most
    probable tokens.

    Each token has one teacher: those of the widest are counted.
    """
    distill = _distill(cfg)
    widest = max((one.decoder.hidden for one in rank.frozen if one.teaches_vocabulary), default=0)
    each = widest * rank.compute_bytes + ((distill and distill.top_k) or 0) * _TOP_TOKEN
    tokens = math.ceil(rank.run.rollouts_per_step / rank.run.num_shares) * rank.run.max_response_tokens
    return math.ceil(tokens / cfg.parallel.cp) * each


def _update(cfg: Config | TuningConfig, rank: Rank) -> dict[str, int]:
    """Parts of the device that forward and backward of one model add.

    Copies of a model sum gradients that FSDP frees only after the last; those of the micro-batch before wait meanwhile.
    """
    size = rank.size
    return {
        "gradients": 0 if cfg.model.cpu_offload and not size.adapters else size.gradient_bytes,
        "sums over copies": size.gradient_bytes if cfg.parallel.dp_replicate > 1 and not size.adapters else 0,
        "gathered": _gathered(cfg.model, rank) * rank.compute_bytes,
        "heads of teachers": _head_bytes(cfg, rank),
    } | _backward(cfg, rank)


def _gathered(model: ModelConfig, rank: Rank) -> int:
    """Count the weights of a model that are gathered at the same time; a tower computes before and after the layers."""
    in_layers, tower = gathered_weights(model, rank.size), rank.trained_tower
    if tower is None:
        return in_layers
    if not model.reshard_after_forward:
        return in_layers + tower.parameters
    return max(in_layers, rank.size.root + _gathered_in_tower(tower))


def _gathered_in_tower(tower: Tower) -> int:
    """Count the weights of a tower outside its blocks, of the block that computes, and of its neighbour."""
    return tower.parameters - max(0, tower.num_blocks - 2) * tower.block_parameters


def _forward(cfg: Config | TuningConfig, rank: Rank) -> int:
    """Bytes at the peak of a forward pass without gradients: in a layer, or at the head."""
    tokens = micro_batch_tokens(cfg, rank.run)
    layer = forward_bytes(rank.decoder.split(cfg.parallel.tp), compute_bytes=rank.compute_bytes, num_tokens=tokens)
    tower = rank.trained_tower
    looking = (
        pass_bytes(tower, num_patches=_micro_batch_patches(cfg, rank, tower), compute_bytes=rank.compute_bytes)
        if tower
        else 0
    )
    return max(layer, looking, tokens * rank.decoder.hidden * rank.compute_bytes + _logits(cfg, rank))


def _micro_batch_patches(cfg: Config | TuningConfig, rank: Rank, tower: Tower) -> int:
    """Count the patches of the images of a full micro-batch, all of which every rank of cp and tp encodes."""
    tokens = micro_batch_tokens(cfg, rank.run) * cfg.parallel.cp
    sequences = math.ceil(tokens / rank.run.max_sequence_tokens)
    return shown_tokens(cfg, rank.run, num_sequences=sequences) * tower.patches_per_token


def _backward(cfg: Config | TuningConfig, rank: Rank) -> dict[str, int]:
    """Parts of the device at the largest of four moments, without weights, gradient shards and gathered weights.

    At the head: a tile of logits, and the gradient of the head's [V, D] weight. In the last layer, with the activations
    of all layers: recomputed activations, the head's gradient, and the whole gradients of a layer, with the float32
    copy that is reduced to shards. At the end: the whole gradients of the weights outside the layers, and what a
    trained tower needs for its last block. Until then its activations wait. A frozen base has no gradients; of experts
    with adapters there are merged weights, with the layers' activations. Of experts, the widest gradients of
    activations come before those of weights, and adapters are merged before the experts compute: a fourth moment.
    """
    tokens, b = micro_batch_tokens(cfg, rank.run), rank.compute_bytes
    decoder, part = rank.decoder, rank.decoder.split(cfg.parallel.tp)
    settings = ActivationSettings(
        level=cfg.model.gradient_checkpointing,
        every_layers=cfg.model.checkpoint_every_layers,
        compute_bytes=b,
        repeats_keys=rank.repeats_keys,
        fused=rank.fuses_layers and rank.decoder.can_be_fused,
        wide_stream=isinstance(cfg, Config)
        and cfg.true_on_policy
        and engine_facts(cfg.rollout.engine).exact_in_float32,
    )
    activations = activation_bytes(part, settings, num_tokens=tokens)
    is_trained = not rank.size.adapters
    head = is_trained * b * decoder.vocabulary * decoder.hidden // cfg.parallel.tp
    experts = rank.size.adapted_experts
    num_merged = rank.size.num_layers if settings.level == "none" else 1
    layer = rank.size.largest_layer
    before_experts = dataclasses.replace(part, mlp_width=0, experts_per_token=0)
    waiting, last_block, block_gradients = _tower_in_backward(cfg, rank, settings)
    moments = (
        {
            "activations": activations,
            "activations of images": waiting,
            "logits": _logits(cfg, rank),
            "whole gradients": head,
            "merged experts": num_merged * b * experts,
        },
        {
            "activations": activations,
            "activations of images": waiting,
            "one layer": layer_workspace_bytes(part, settings, num_tokens=tokens),
            "whole gradients": head + is_trained * (_FLOAT32 + (0 if part.experts_per_token else b)) * layer,
            "merged experts": num_merged * b * experts,
        },
        {
            "activations": activations,
            "activations of images": waiting,
            "one layer": layer_workspace_bytes(before_experts, settings, num_tokens=tokens),
            "whole gradients": head + is_trained * (_FLOAT32 + b) * layer,
            "merged experts": num_merged * b * experts + (2 * _FLOAT32 - b) * rank.size.largest_adapted,
        },
        {
            "activations of images": waiting,
            "one block": last_block,
            "whole gradients": is_trained * (_FLOAT32 + b) * rank.size.root + block_gradients,
        },
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def _tower_in_backward(cfg: Config | TuningConfig, rank: Rank, settings: ActivationSettings) -> tuple[int, int, int]:
    """Return bytes of a trained tower's activations, of the backward pass of one block, and of the whole gradients of
    what is outside its blocks and of two that are being reduced to shards; 0 where no tower is trained."""
    tower, b = rank.trained_tower, rank.compute_bytes
    if tower is None:
        return 0, 0, 0
    patches = _micro_batch_patches(cfg, rank, tower)
    saved = saved_bytes(
        tower, level=settings.level, every_layers=settings.every_layers, num_patches=patches, compute_bytes=b
    )
    block = block_workspace_bytes(tower, level=settings.level, num_patches=patches, compute_bytes=b)
    return saved, block, (_FLOAT32 + b) * _gathered_in_tower(tower)


def _logits(cfg: Config | TuningConfig, rank: Rank) -> int:
    distill, num_tokens = _distill(cfg), micro_batch_tokens(cfg, rank.run)
    others = 0
    if isinstance(cfg, Config):
        others += (cfg.rollout.top_k or 0) * _CANDIDATE
        others += rank.decoder.router_width * _SCORE * any(one.loss.expert_balance_coef for one in cfg.algorithms)
    return num_tokens * others + logits_bytes(
        rank.decoder,
        num_tokens=num_tokens,
        chunk_tokens=cfg.model.logits_chunk_tokens,
        tile_elements=rank.tile_elements,
        tile_columns=rank.tile_columns,
        compute_bytes=rank.compute_bytes,
        on_gpu=rank.on_gpu,
        has_teacher=distill is not None and distill.needs_heads,
    )


def _visiting_state(cfg: Config | TuningConfig, rank: Rank) -> dict[str, int]:
    """Part of the device for optimizer state that lives on the host: the state of one block of weights."""
    if not cfg.optim.state_on_host:
        return {}
    block = min(STATE_BLOCK_BYTES, max(size.stepped for size in rank.trained) * _FLOAT32)
    return {"visiting state": block * states_per_weight(cfg.optim)}


def _engine_in_rollout(cfg: Config, rank: Rank, plan: MemoryPlan) -> int:
    """Bytes of the engine while it samples.

    An engine with a fixed share fills it. The torch engine's cache has a row for each running rollout: keys and values,
    all as long as the longest, and states; and as much again for episodes that wait for their environment. It holds the
    logits of one token each, and encodes images.
    """
    if plan.engine_share is not None:
        return plan.engine_share
    if engine_facts(cfg.rollout.engine).takes_fixed_share:  # on a device of its own
        return int(cfg.rollout.memory_fraction * (rank.device_bytes - rank.engine_overhead.at_launch))
    run, decoder = rank.run, rank.decoder
    weights = rank.size.whole * rank.compute_bytes // cfg.rollout.tp_size
    num_engines = (run.engine_ranks or run.num_ranks) // cfg.rollout.tp_size
    rows = min(cfg.rollout.max_running, math.ceil(run.rollouts_per_step / num_engines))
    cached = max(run.max_sequence_tokens, run.max_judged_tokens) * decoder.key_value_width + decoder.conv_elements
    cache = rows * (cached * rank.compute_bytes + decoder.state_elements * _FLOAT32)
    waiting = cache if cfg.environment is not None else 0
    logits = rows * decoder.vocabulary * (2 * _FLOAT32 + rank.compute_bytes)
    images = engine_bytes(rank.tower, cfg, num_rows=rows, compute_bytes=rank.compute_bytes) if rank.tower else 0
    return weights + cache + waiting + logits + images
