"""Tables about the model, how ranks share it, its adapters, and the optimizers of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from spmdrl.config.base import (
    BelowOne,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    Section,
    rule,
    unused_settings,
)


class ModelConfig(Section):
    path: PathText
    """A Hugging Face causal language model directory: config, safetensors weights, tokenizer; or the name of a model on
    a hub, `hf:ORGANISATION/NAME@REVISION`, in huggingface_hub's cache."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of forward and backward; master weights stay float32. `auto` is float32 on a CPU, bfloat16 on CUDA.
    float16 scales the loss dynamically."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn_2", "flash_attn_3"] = "auto"
    """Packed attention: `sdpa` runs one call per run of equal lengths and works everywhere; `varlen` is torch's own
    CUDA kernel; `flash_attn_*` need that package. `auto` is `sdpa` on a CPU and `varlen` on CUDA, except where a faster
    package is installed: FlashAttention 3 on Hopper, ring_flash_attn under context parallelism."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Parameters that are not trained, by patterns of their names in the base model, such as `["layers.0.*"]`. Unset:
    the tower of a model with images, which then encodes each image once a step. `[]` trains all."""
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations that the backward pass computes again instead of keeping: none; those of whole decoder layers; or
    `selective`, only norms, rotary embeddings and activation functions, so that no matrix product runs twice."""
    checkpoint_every_layers: Count = 1
    """Apply `gradient_checkpointing` to the first of every N layers; the others keep their activations."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again in backward; `false` keeps all layers in
    between."""
    prefetch_layers: Count = 1
    """Layers that are gathered ahead of the one that computes. More hides slower links and holds more weights."""
    logits_chunk_tokens: Count = 2048
    """Most tokens whose logits exist at the same time. They are computed in tiles of bounded memory: the more tokens,
    the smaller the part of the vocabulary."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state of the policy in host memory between uses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""


@rule(ModelConfig)
def checkpoint_every_layers_needs_checkpointing(model: ModelConfig) -> Iterator[str]:
    if model.gradient_checkpointing == "none" and model.checkpoint_every_layers > 1:
        yield (
            f"checkpoint_every_layers = {model.checkpoint_every_layers} has no meaning with "
            'gradient_checkpointing = "none", where no layer is recomputed; set that to "full" or "selective", or '
            "remove checkpoint_every_layers"
        )


class ParallelConfig(Section):
    dp_replicate: Count = 1
    """Copies of the policy, each sharded over the other ranks that train; gradients are summed over them (HSDP)."""
    dp_shard: Count | None = None
    """Ranks that share a copy and work on different sequences (FSDP). Unset: as many as the other settings leave."""
    cp: Count = 1
    """Context parallelism: neighbours that each compute a chunk of the same packed tokens. A copy is sharded over them
    too."""
    cp_style: Literal["all_gather", "ulysses"] = "all_gather"
    """`all_gather` gathers keys and values, a few heads at a time; `ulysses` exchanges tokens for heads, which cp must
    divide. See `docs/context.md`."""
    tp: Count = 1
    """Tensor parallelism: neighbours that each hold a part of every layer and compute the same tokens."""
    ep: Count = 1
    """Expert parallelism: neighbours that share the experts of a layer, to which tokens travel. It regroups the
    ranks of a copy and needs no others."""


@rule(ParallelConfig)
def cp_style_needs_cp(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.cp == 1 and parallel.cp_style != "all_gather":
        yield f'cp_style = "{parallel.cp_style}" has no meaning with cp = 1; set cp above 1, or remove it'


# What is common to the tables of models besides the policy that are never trained.


class FrozenParallelConfig(Section):
    dp_replicate: Count | None = None
    """Copies of the model, each sharded over the other ranks that train. Unset: those of `[parallel]`."""
    ep: Count | None = None
    """Ranks that share the experts of a layer, in place of `parallel.ep`. Unset: that, for a model with experts."""


class FrozenModelConfig(Section):
    rests_on: Literal["host", "device"] = "host"
    """Memory that holds the model's shards between its passes."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after each micro-batch; with `false` each layer is gathered once in a step, and
    the model is on the device as a whole while it computes."""
    parallel: FrozenParallelConfig = FrozenParallelConfig()

    def layout(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the settings of `[parallel]` for this model."""
        own = {name: value for name, value in self.parallel if value not in (None, getattr(parallel, name))}
        return parallel.model_copy(update={**own, "dp_shard": None}) if own else parallel


# The table about adapters.


QuantizedBase = Literal["nf4", "8bit"]  # bits in which the base's weights are stored
Alpha = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]  # float32 must represent what it multiplies
_FROM_DIRECTORY = ("rank", "alpha", "rslora", "targets", "init")


class LoraConfig(Section):
    rank: Count = 16
    """Rows of each adapter's A, and columns of its B: the rank of the change of a weight. See `docs/lora.md`."""
    alpha: Alpha = 32.0
    """The change of a weight is B A times `alpha / rank`."""
    rslora: bool = False
    """Divide `alpha` by the root of `rank` in place of `rank`, so that a higher rank does not learn more slowly."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all-linear"
    """The linear layers that get adapters, by the ends of their names, such as `["q_proj", "v_proj"]`; `"all-linear"`
    are all but the head."""
    init: Literal["default", "pissa", "olora"] = "default"
    """Where training begins: `default` at a random A and B = 0; `pissa` at the largest singular values of each weight,
    `olora` at its first columns made orthogonal, both minus themselves, so that the policy begins as its base."""
    path: PathText | None = None
    """Start from the adapters in this directory, which are in PEFT's format, of this or any other program's. It says
    what rank, alpha and targets are."""
    base: QuantizedBase | None = None
    """Keep the weights of the base's linear layers, but not of the head, in few bits: `nf4` in 4, `8bit` in 8, whole on
    every rank (QLoRA). Unset: as they compute. Needs the extra `quantized`."""
    merge: bool = False
    """Give the engine merged weights, W + B A, at every refit, for what it cannot adapt itself."""
    dropout: float = 0.0
    """Only 0: with dropout the ratio would not be 1 before the first update."""
    use_dora: bool = False
    """Only false: magnitudes of weights (DoRA) are not trained."""


@rule(LoraConfig)
def adapters_have_no_dropout(lora: LoraConfig) -> Iterator[str]:
    if lora.dropout != 0:
        yield (
            f"dropout = {lora.dropout:g} would make the trainer's log-probabilities differ from the engine's before "
            "the first update; set it to 0, or remove it"
        )


@rule(LoraConfig)
def adapters_have_no_magnitudes(lora: LoraConfig) -> Iterator[str]:
    if lora.use_dora:
        yield "use_dora = true trains magnitudes of weights, which is not supported; remove it, or raise rank"


@rule(LoraConfig)
def a_directory_says_what_adapters_are(lora: LoraConfig) -> Iterator[str]:
    if lora.path is not None:
        yield from unused_settings(lora, _FROM_DIRECTORY, f'path = "{lora.path}", whose adapter_config.json says it')


# Tables about the optimizer, and about the critic that has one of its own.


NormLimit = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]  # nothing is multiplied by it; 1e30 clips nothing


class OptimConfig(Section):
    name: str = "adamw"
    """`adamw` (fused where it works), `sgd`, or a class of yours, `package.module:Class` or `path/file.py:Class`."""
    lr: Positive
    """Peak learning rate."""
    rates: dict[str, NonNegative] = Field(default_factory=dict)
    """Peak learning rates of parameters that do not learn at `lr`, by patterns of their names in the base model, as in
    `model.freeze`, such as `{ "visual.*" = 1e-7 }`; no parameter may match two. The schedule scales them too, and 0
    leaves weights as they are. A critic has them as well, where it has such parameters."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """`adamw` only."""
    eps: Positive = 1e-8
    """`adamw` only."""
    momentum: BelowOne = 0.0
    """`sgd` only."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a class of yours."""
    max_grad_norm: NormLimit = 1.0
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up; `wsd` stays at the peak, then falls linearly over the last `decay_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the peak."""
    decay_steps: NonNegativeInt = 0
    """`wsd` only: length of the fall."""
    min_lr_fraction: Fraction = 0.0
    """The schedule never falls below this times `lr` after warm-up."""
    expert_bias_rate: Positive | None = None
    """Mixtures that choose experts by scores with a bias, such as DeepSeek-V3: after each update, the bias of an
    expert that had fewer of its loss tokens than the mean of its layer is raised by this, and that of one with more is
    lowered (arXiv:2408.15664). 0.001 is usual. Unset: biases stay as they are."""
    state_on_host: bool = False
    """Keep the optimizer's state in pinned host memory and bring it to the device for a block of parameters at a time.
    The optimizer must treat each parameter by itself, as all of torch's but LBFGS do."""


@rule(OptimConfig)
def settings_belong_to_the_optimizer(optim: OptimConfig) -> Iterator[str]:
    used = {"adamw": ["betas", "eps"], "sgd": ["momentum"]}.get(optim.name, ["params"])
    others = [name for name in ("betas", "eps", "momentum", "params") if name not in used]
    yield from unused_settings(optim, others, f'name = "{optim.name}"')


@rule(OptimConfig)
def state_on_host_needs_state(optim: OptimConfig) -> Iterator[str]:
    if optim.state_on_host and optim.name == "sgd" and optim.momentum == 0:
        yield (
            'state_on_host = true has nothing to keep on the host: name = "sgd" with momentum = 0 has no state; '
            "remove it"
        )


@rule(OptimConfig)
def decay_steps_belong_to_wsd(optim: OptimConfig) -> Iterator[str]:
    if (optim.schedule == "wsd") != (optim.decay_steps > 0):
        yield (
            f'schedule = "{optim.schedule}" with decay_steps = {optim.decay_steps}: decay_steps is the length of the '
            'fall of schedule = "wsd"; set both or neither'
        )


class CriticConfig(Section):
    path: PathText | None = None
    """A model directory, as for `model.path`, with the same tokens. Its language head is replaced by a value head that
    starts at 0. Unset: `model.path`. The other settings of `[model]` hold for both."""
    lr: Positive | None = None
    """Peak learning rate of the critic. Unset: `optim.lr`. Settings of `[optim]` that are not here hold for both."""
    weight_decay: NonNegative | None = None
    """Weight decay of the critic. Unset: `optim.weight_decay`."""
    max_grad_norm: NormLimit | None = None
    """Largest gradient norm of the critic. Unset: `optim.max_grad_norm`."""
    clip_value: Annotated[float, Field(gt=0.0)] = 0.2
    """Clip range of a value around its value before the step's updates, in units of the reward; `inf` clips nothing."""
    gae_lambda: Fraction | None = None
    """`gae_lambda` of the returns that the critic learns; 1 makes them the rewards. Unset: `advantage.gae_lambda`."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which the critic learns and the policy does not change."""
