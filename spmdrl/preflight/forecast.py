"""Predicts the memory of each phase from the settings and the model's config; needs no GPU, no ranks, no weights."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from spmdrl.algo.packing import flop_coefficients
from spmdrl.config import Config, LoraConfig, ModelConfig, PackConfig, ParallelConfig, SftConfig, TuningConfig
from spmdrl.config.distill import REFERENCE
from spmdrl.config.plan import Plan, layouts, plan_run
from spmdrl.dist.session import rank_device
from spmdrl.families import family_of, vision_family
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
from spmdrl.memory.images import Tower
from spmdrl.memory.overhead import Overhead, device_overheads
from spmdrl.memory.phase import FrozenModelSize, PhaseMemory, Rank, StoredModel
from spmdrl.memory.phases import copy_ranks, phases_with_engine, training_phases, turn_problems
from spmdrl.model.fp8 import is_quantized
from spmdrl.model.fused import has_fused_layers
from spmdrl.model.kernels import varlen_takes_groups
from spmdrl.model.layer_kinds import (
    attending_layers,
    cached_heads,
    layers_with_mlps,
    recurrent_layers,
    recurrent_widths,
    remembered_elements,
)
from spmdrl.model.load import compute_dtype, critic_shapes, frozen_names, parameter_shapes
from spmdrl.model.logprobs import TILE_COLUMNS, TILE_ELEMENTS
from spmdrl.model.lora.policy import adapter_sizes, quantized_bytes
from spmdrl.model.split import decoder_plan
from spmdrl.model.weight_files import stored_sizes


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
    frozen_models: Mapping[str, Model] = field(default_factory=dict)  # besides it, of other directories, by name
    stored: StoredModel | None = None  # where its files are there

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
        stored = StoredModel(*sizes) if (sizes := stored_sizes(cfg.path)) else None
        return cls(config, *shapes, critic, targets, frozen, keeps_start, quantized, frozen_models, stored)

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
        problems = [
            *training_problems(rank.memory, rank.overhead, device_bytes=device_bytes),
            *turn_problems(cfg, rank, None),
        ]
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
        *turn_problems(cfg, rank, plan),
        *engine_problems(
            cfg,
            rank.size,
            rank.engine_overhead,
            compute_bytes=rank.compute_bytes,
            device_bytes=device_bytes,
            bucket_bytes=bucket,
        ),
    ]
    return Prediction(rank=rank, plan=plan, phases=[*phases_with_engine(cfg, rank, plan)], problems=problems)


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
    per_weight = getattr(model.config.dtype, "itemsize", 4)
    return Rank(
        run=run,
        memory=training_memory(cfg.model, cfg.optim, trained, compute_bytes=compute_bytes, resident=resident),
        size=size,
        decoder=decoder,
        critic=critic,
        repeats_keys=attention == "varlen" and not varlen_takes_groups(),
        fuses_layers=attention != "sdpa" and not is_exact,
        compute_bytes=compute_bytes,
        tile_elements=TILE_ELEMENTS["cuda" if on_gpu else "cpu"],
        tile_columns=TILE_COLUMNS["cuda" if on_gpu else "cpu"],
        stored=model.stored or StoredModel(size.whole * per_weight, size.whole, per_weight),
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
    has_images = tower_of(policy.config, policy.shapes) is not None
    for table, settings in cfg.beside.items():
        name = table.removeprefix("models.")
        frozen = cfg.frozen_models.get(name)
        if frozen is not None and not frozen.is_loaded:
            continue
        model = policy.frozen_models.get(name, policy)
        yield FrozenModelSize(
            table=table,
            size=model.size(layouts(cfg).get(table, cfg.parallel), num_training=num_training),
            decoder=decoder_of(model.config, model.shapes),
            on_device=settings.rests_on == "device",
            gathers_once=not settings.reshard_after_forward,
            teaches_vocabulary=frozen is not None and name != REFERENCE and distill is not None and distill.needs_heads,
            tower=tower_of(model.config, model.shapes) if frozen and has_images and model is not policy else None,
        )


def _critic(model: Model | None, parallel: ParallelConfig, *, num_training: int) -> tuple[ModelSize, Decoder] | None:
    if model is None:
        return None
    return model.size(parallel, num_training=num_training), decoder_of(model.config, model.shapes)


def _attention(setting: str, *, on_gpu: bool, compute_bytes: int) -> str:
    """Choose as `attention.choose_kernel` would on a GPU of today, without looking at a device."""
    return ("varlen" if on_gpu and compute_bytes == 2 else "sdpa") if setting == "auto" else setting


# The inputs of the memory arithmetic: a model's widths, and the weights that parallelism splits.


# The FLOPs of training on a sequence, from the shapes of a model.


def with_costs(plan: Plan, pack: PackConfig, cfg: ModelConfig, model_config: Any) -> Plan:
    """Add the cost of sequences to the plan, unless work is balanced by tokens."""
    if pack.balance == "tokens":
        return plan
    shapes, _ = parameter_shapes(model_config, cfg)
    linear, quadratic = forward_flops(model_config, shapes)
    unit = math.gcd(linear, quadratic)
    return dataclasses.replace(plan, cost_per_token=linear // unit, cost_per_squared_token=quadratic // unit)


def forward_flops(model_config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return (linear, quadratic): a forward pass over T tokens takes linear T + quadratic T^2 FLOPs.

    `shapes` are those of the model's parameters, of which those of a tower for images do nothing for tokens: a frozen
    one encodes an image once, whatever the sequences. Attention is counted as if every layer that has it saw the whole
    sequence; `flop_coefficients` has the formula.
    """
    text, in_tower = model_config.get_text_config(), tower_names(model_config, shapes)
    chosen, experts, parameters = experts_per_token(text) or 1, expert_names(shapes), 0
    for name, shape in shapes.items():
        is_product = ".embed" not in name or model_config.tie_word_embeddings  # a tied one is also the head
        if len(shape) > 1 and is_product and name not in in_tower:
            parameters += math.prod(shape) * chosen // shape[0] if name in experts else math.prod(shape)
    return flop_coefficients(
        matmul_parameters=parameters,
        num_layers=len(attending_layers(text)),
        num_heads=text.num_attention_heads,
        head_dim=max(size for _, size in cached_heads(text).values()),
    )


def experts_per_token(text: Any) -> int:
    """Count the experts of a token in a layer, by the config of a language model; 0 without experts."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")
    return _first_width(text, *names) or 0


def _first_width(config: Any, *names: str) -> int | None:
    """Return the first of these settings that a config has; where it lists one for each layer, the largest."""
    for value in filter(None, (getattr(config, name, None) for name in names)):
        return max(value) if isinstance(value, list | tuple) else int(value)
    return None


_LAYER = re.compile(r"\.layers\.\d+\.")
_LAST_OF_MLP = ("down_proj.weight", "output_linear.weight")
_FIRST_BLOCK = re.compile(r"\.(blocks|layers)\.0\.")  # of a tower
# Styles of a tensor-parallel plan whose weights are whole on every rank.
_WHOLE = ("replicated", "sequence_parallel", "moe_", "ep_", "gather", "mla_")


def decoder_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Decoder:
    """Read a model's widths from transformers' `config` and the shapes of its parameters."""
    in_tower = tower_names(config, shapes)
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    cached = cached_heads(config)
    sizes = [size for _, size in cached.values()]
    head_width = max(sizes)
    mlp_width = _first_width(config, "shared_intermediate_size", "intermediate_size", "ffn_hidden_size") or 4 * hidden
    mlp_width *= 2 if getattr(config, "use_double_wide_mlp", False) else 1
    num_chosen = experts_per_token(config) if expert_names(shapes) else 0
    expert_widths = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    expert_width = _first_width(config, *expert_widths) or mlp_width
    passes_keys = family_of(config).passes_keys_on
    conv_elements, state_elements = remembered_elements(config)
    in_text = shapes.keys() - in_tower
    first_layer = [name for name in in_text if ".layers.0." in name]
    return Decoder(
        num_layers=config.num_hidden_layers,
        hidden=hidden,
        query_width=heads * head_width,
        heads_share=sum(sizes) / len(sizes) / head_width,
        rotary_width=sum(set(sizes)) if len(set(sizes)) > 1 else head_width * _num_rotary(config),
        key_width=max(number * size for number, size in cached.values()),
        query_heads=heads,
        head_width=head_width,
        mlp_width=expert_width * num_chosen or mlp_width,
        experts_per_token=num_chosen,
        shared_width=_width_beside_experts(shapes) if num_chosen else 0,
        router_width=sum({name.rpartition(".")[0]: shapes[name][0] for name in expert_names(in_text)}.values()),
        latent_width=sum(_first_width(config, name) or 0 for name in ("q_lora_rank", "kv_lora_rank")),
        own_inputs=getattr(config, "hidden_size_per_layer_input", None) or 0,
        passed_keys=sum(number * size for number, size in set(cached.values())) if passes_keys else None,
        norms=sum("norm" in name and shapes[name] == (hidden,) for name in first_layer),
        has_wide_norms=family_of(config).has_wide_norms,
        has_head_norms=any(name.endswith("q_norm.weight") for name in first_layer),
        vocabulary=config.vocab_size,
        can_be_fused=has_fused_layers(config),
        cached_width=sum(number * size for number, size in cached.values()),
        num_attending=len(cached),
        num_mlps=layers_with_mlps(config),
        num_recurrent=len(recurrent_layers(config)),
        recurrent_widths=recurrent_widths(config),
        has_gate=any("gate_" in name for name in in_text) or not any(".up_proj" in name for name in in_text),
        conv_elements=conv_elements,
        state_elements=state_elements,
    )


def _num_rotary(text: Any) -> int:
    """Count the rotary embeddings of a model: one for each kind of layer where these have settings of their own."""
    kinds = getattr(text, "layer_types", None) or []
    return sum(kind in (getattr(text, "rope_parameters", None) or {}) for kind in set(kinds)) or 1


def _width_beside_experts(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the width of the MLP besides the experts of a layer, which every token has; 0 without one."""
    layers = [match.group() for name in expert_names(shapes) if (match := _LAYER.search(name))]
    beside = [n for n in shapes.keys() - expert_names(shapes) if layers and layers[0] in n and n.endswith(_LAST_OF_MLP)]
    return sum(shapes[name][-1] for name in beside)


def tower_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Tower | None:
    """Read the widths of a model's tower for images; None for a model of text."""
    family = vision_family(config)
    if family is None:
        return None
    vision, names = config.vision_config, tower_names(config, shapes)
    first_block = {name for name in names if _FIRST_BLOCK.search(name)}
    return Tower(
        num_blocks=getattr(vision, "depth", None) or vision.num_hidden_layers,
        hidden=vision.hidden_size,
        heads=getattr(vision, "num_heads", None) or vision.num_attention_heads,
        mlp_width=vision.intermediate_size,
        is_gated=any(".gate_proj." in name for name in first_block),
        has_rms_norms=not any("norm" in name and name.endswith(".bias") for name in first_block),
        wide_norms=7 if family.has_padded_tower else 0,  # of which those of values have no weights
        clips=getattr(vision, "use_clipped_linears", False),
        rotates=family.has_grid_positions,
        pools=family.tokens_per_image is not None or family.has_padded_tower,
        patch_values=family.patch_values,
        patches_per_token=family.merge**2,
        num_levels=family.num_levels,
        features_width=config.get_text_config().hidden_size,
        parameters=sum(math.prod(shapes[name]) for name in names),
        block_parameters=sum(math.prod(shapes[name]) for name in first_block),
    )


def tower_names(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Select the parameters of a model's tower for images."""
    family = vision_family(config)
    parts = [] if family is None else [f".{module}." for module in family.tower]
    return frozenset(name for name in names if any(part in name for part in parts))


def split_by_tp(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Select the parameters that the model's tensor-parallel plan divides."""
    plan = decoder_plan(config.get_text_config())
    patterns = [
        re.compile(re.escape(module).replace(r"\*", r"\d+") + r"(\.(weight|bias))?$")
        for module, style in plan.items()
        if not style.startswith(_WHOLE)
    ]
    return frozenset(name for name in names if any(pattern.search(name) for pattern in patterns))


def expert_names(names: Iterable[str]) -> frozenset[str]:
    """Select the parameters that hold one slice for each expert."""
    return frozenset(name for name in names if ".experts." in name)
