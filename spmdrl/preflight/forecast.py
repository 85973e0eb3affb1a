"""Predicts the memory of each phase from the settings and the model's config; needs no GPU, no ranks, no weights."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from spmdrl.config import Config, LoraConfig, ModelConfig, ParallelConfig, SftConfig, TuningConfig
from spmdrl.config.distill import REFERENCE
from spmdrl.config.plan import plan_run
from spmdrl.dist.session import rank_device
from spmdrl.memory.activations import Decoder
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.memory.device import (
    MemoryPlan,
    ModelSize,
    ShardLayout,
    engine_problems,
    memory_problems,
    model_size,
    plan_memory,
    training_memory,
    training_problems,
)
from spmdrl.memory.overhead import Overhead, device_overheads
from spmdrl.memory.phase import FrozenModelSize, PhaseMemory, Rank
from spmdrl.memory.phases import copy_ranks, phase_memory, training_phases
from spmdrl.model.fp8 import is_quantized
from spmdrl.model.load import compute_dtype, critic_shapes, frozen_names, parameter_shapes
from spmdrl.model.logprobs import TILE_COLUMNS, TILE_ELEMENTS
from spmdrl.model.lora.policy import adapter_sizes, quantized_bytes
from spmdrl.preflight.shapes import decoder_of, expert_names, split_by_tp, tower_names, tower_of


@dataclass(frozen=True, slots=True)
class Model:
    """A model before its weights are loaded: its config and the shapes of its parameters."""

    config: Any  # transformers'
    shapes: dict[str, tuple[int, ...]]  # of each parameter, tied ones once
    layers: list[set[str]]  # the parameters of each decoder layer
    critic: Model | None = None  # trained together with it
    targets: Mapping[str, int] = field(default_factory=dict)  # weights with adapters, and the elements of these
    frozen: frozenset[str] = frozenset()  # parameters that are not trained
    keeps_start: bool = False  # of adapters that begin at a part of the weights
    quantized: Mapping[str, int] = field(default_factory=dict)  # bytes of weights in few bits, by name
    frozen_models: Mapping[str, Model] = field(default_factory=dict)  # beside it, of other directories, by name

    @classmethod
    def read(
        cls,
        config: Any,
        cfg: ModelConfig,
        *,
        critic: Model | None = None,
        lora: LoraConfig | None = None,
        frozen_models: Mapping[str, Model] = MappingProxyType({}),
    ) -> Model:
        """Derive a policy's shapes from transformers' `config`. Raises UserError for adapters that it cannot have."""
        targets = {} if lora is None else adapter_sizes(config, cfg, lora)
        keeps_start = lora is not None and lora.init != "default"
        quantized = {} if lora is None or lora.base is None else quantized_bytes(config, cfg, lora.base)
        shapes, frozen = parameter_shapes(config, cfg), frozen_names(config, cfg)
        return cls(config, *shapes, critic, targets, frozen, keeps_start, quantized, frozen_models)

    @property
    def has_frozen_tower(self) -> bool:
        """True for a model whose tower encodes each image once a step, because it is frozen."""
        tower = tower_names(self.config, self.shapes)
        return bool(tower) and (tower <= self.frozen or bool(self.targets))

    @classmethod
    def read_critic(cls, config: Any, cfg: ModelConfig) -> Model:
        """Derive a critic's shapes from transformers' `config`."""
        shapes, layers = critic_shapes(config, cfg)
        return cls(config, shapes, layers, frozen=frozen_names(config, cfg) & shapes.keys())

    def size(self, parallel: ParallelConfig, *, num_training: int) -> ModelSize:
        """Count the parameters on one of `num_training` ranks."""
        in_layers = set().union(*self.layers)
        adapters, adapted = sum(self.targets.values()), self.targets.keys()
        frozen = self.shapes.keys() if adapters else self.frozen
        tower = tower_names(self.config, self.shapes)
        vocabulary = {name for name in self.shapes.keys() - in_layers - tower if len(self.shapes[name]) == 2}
        layout = ShardLayout(
            copy_ranks=num_training // parallel.dp_replicate,
            tp=parallel.tp,
            ep=parallel.ep,
            split_by_tp=split_by_tp(self.config, in_layers) | vocabulary,
            experts=expert_names(self.shapes),
        )
        experts = [
            [math.prod(self.shapes[name]) // layout.num_parts(name) for name in layer & layout.experts & adapted]
            for layer in self.layers
        ]
        return dataclasses.replace(
            model_size(self.shapes, self.layers, layout=layout, frozen=frozen, apart=tower, quantized=self.quantized),
            adapters=adapters,
            adapter_shard=math.ceil(adapters / num_training),
            adapter_start=adapters if self.keeps_start else 0,
            adapted_experts=max(map(sum, experts)),
            largest_adapted=max(chain.from_iterable(experts), default=0),
            in_blocks=sum(math.prod(shape) for name, shape in self.shapes.items() if is_quantized(name, len(shape))),
            all_adapted_experts=sum(math.prod(self.shapes[name]) for name in layout.experts & adapted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted memory of a run on each rank."""

    rank: Rank
    plan: MemoryPlan | None  # None for a run without an engine
    phases: list[PhaseMemory]
    problems: list[str]  # sentences about what cannot fit even without activations


def predict(cfg: Config | TuningConfig, model: Model, *, num_ranks: int, device_bytes: int, on_gpu: bool) -> Prediction:
    """Predict the memory of a run on `num_ranks` ranks. Raises UserError when the settings do not form a valid run."""
    rank = describe_rank(cfg, model, num_ranks=num_ranks, device_bytes=device_bytes, on_gpu=on_gpu)
    if isinstance(cfg, TuningConfig):
        problems = [*training_problems(rank.memory, rank.overhead, device_bytes=device_bytes)]
        return Prediction(rank=rank, plan=None, phases=training_phases(cfg, rank), problems=problems)
    bucket = bucket_bytes(cfg.refit, device_bytes=device_bytes if on_gpu else None)
    plan = plan_memory(
        cfg,
        rank.size,
        num_ranks=copy_ranks(cfg, rank.run),
        compute_bytes=rank.compute_bytes,
        device_bytes=device_bytes,
        bucket_bytes=bucket,
        overhead=rank.overhead,
        critic=rank.critic[0] if rank.critic else None,
        resident=rank.resident,
    )
    problems = [
        *memory_problems(plan, cfg, device_bytes=device_bytes),
        *engine_problems(
            cfg,
            rank.size,
            rank.engine_overhead,
            compute_bytes=rank.compute_bytes,
            device_bytes=device_bytes,
            bucket_bytes=bucket,
        ),
    ]
    return Prediction(rank=rank, plan=plan, phases=phase_memory(cfg, rank, plan), problems=problems)


def predict_here(cfg: Config | TuningConfig, model: Model, *, num_ranks: int) -> Prediction:
    """Predict the memory of a run on this rank's device. Raises UserError where it has none, like `rank_device`."""
    device = rank_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        # First the rank's own device: reading another one's properties may open a context there, which takes memory.
        torch.cuda.set_device(device)
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        device_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return predict(cfg, model, num_ranks=num_ranks, device_bytes=device_bytes, on_gpu=on_gpu)


def describe_rank(cfg: Config | TuningConfig, model: Model, *, num_ranks: int, device_bytes: int, on_gpu: bool) -> Rank:
    """Describe one of `num_ranks` ranks of a run. Raises UserError when the settings do not form a valid run."""
    run = plan_run(cfg, num_ranks=num_ranks)
    size = model.size(cfg.parallel, num_training=run.training_ranks)
    compute_bytes = compute_dtype(cfg.model.compute_dtype, "cuda" if on_gpu else "cpu").itemsize
    critic = _critic(model.critic, cfg.parallel, num_training=run.training_ranks)
    attention = _attention(cfg.model.attention, on_gpu=on_gpu, compute_bytes=compute_bytes)
    is_exact = isinstance(cfg, Config) and cfg.true_on_policy
    trained = [size, critic[0]] if critic else [size]
    frozen = tuple(_frozen(cfg, model, num_training=run.training_ranks))
    decoder = decoder_of(model.config, model.shapes)
    overhead, engine_overhead = (
        device_overheads(cfg, run, decoder, compute_bytes=compute_bytes) if on_gpu else (Overhead(), Overhead())
    )
    resident = [one.size for one in frozen if one.on_device]
    return Rank(
        run=run,
        memory=training_memory(cfg.model, cfg.optim, trained, compute_bytes=compute_bytes, resident=resident),
        size=size,
        decoder=decoder,
        critic=critic,
        repeats_keys=attention == "varlen",
        fuses_layers=attention != "sdpa" and not is_exact,
        compute_bytes=compute_bytes,
        tile_elements=TILE_ELEMENTS["cuda" if on_gpu else "cpu"],
        tile_columns=TILE_COLUMNS["cuda" if on_gpu else "cpu"],
        file_bytes=getattr(model.config.dtype, "itemsize", 4),
        device_bytes=device_bytes,
        overhead=overhead,
        engine_overhead=engine_overhead,
        on_gpu=on_gpu,
        tower=tower_of(model.config, model.shapes),
        has_frozen_tower=model.has_frozen_tower,
        frozen=frozen,
    )


def _frozen(cfg: Config | TuningConfig, policy: Model, *, num_training: int) -> Iterator[FrozenModelSize]:
    """Yield the frozen models that are loaded, reward models last; one from the policy's own directory has its shapes.

    Reward models compute while nothing else does, and need no more than in the phase in which the others do.
    """
    distill = cfg.distill if isinstance(cfg, Config | SftConfig) else None
    for name, settings in cfg.frozen_models.items():
        if settings.is_loaded:
            model = policy.frozen_models.get(name, policy)
            yield FrozenModelSize(
                size=model.size(cfg.parallel, num_training=num_training),
                decoder=decoder_of(model.config, model.shapes),
                on_device=settings.rests_on == "device",
                teaches_vocabulary=name != REFERENCE and distill is not None and distill.needs_heads,
            )
    for name in policy.frozen_models.keys() - cfg.frozen_models.keys():
        model = policy.frozen_models[name]
        size = model.size(cfg.parallel, num_training=num_training)
        yield FrozenModelSize(
            size=size, decoder=decoder_of(model.config, model.shapes), on_device=False, teaches_vocabulary=False
        )


def _critic(model: Model | None, parallel: ParallelConfig, *, num_training: int) -> tuple[ModelSize, Decoder] | None:
    if model is None:
        return None
    return model.size(parallel, num_training=num_training), decoder_of(model.config, model.shapes)


def _attention(setting: str, *, on_gpu: bool, compute_bytes: int) -> str:
    """Choose as `attention.choose_kernel` would on a GPU of today, without looking at a device."""
    return ("varlen" if on_gpu and compute_bytes == 2 else "sdpa") if setting == "auto" else setting
