"""The families of models that some part of the package treats in a way of its own, by transformers' `model_type`.

No other file names a model type, but for `engine/sglang/tool_calls.py`, where a parser of SGLang's has the name of one.
Comments name the files that read a field. A type without a row is a model of text that transformers and the torch
engine compute alike, that was not tried with SGLang, and that has nothing replaced by layers of ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangFamily:
    """The ways in which SGLang's class of a family differs from its others."""

    # engine/sglang/options.py
    is_tried: bool = True  # False: refused
    not_on_cpu: str = ""  # computed there; refused on a CPU
    differs: str = ""  # in what it computes, and by how much; refused
    is_cut: bool = True  # False: its layout over several devices is not known here
    # engine/sglang/requests.py
    images_compared: bool = False  # with the trainer, for requests with images
    patch_values: int | None = None  # the only size of patches that it reads; None: any
    # engine/sglang/layout.py
    splits_embedding: bool = True  # False: every device of an engine has it whole
    has_norms_of_config: bool = False  # those of delta nets have the dtype in config.json, whatever the engine has
    has_bare_attention: bool = False  # layers have the weights of their attention directly
    copies_embedding: bool = False  # its head is a copy of the embedding, where the two are tied
    has_gates: bool = True  # in its MLPs and experts
    # engine/sglang/engine.py
    has_unused: tuple[str, ...] = ()  # ends of the names of parameters that nothing is computed with
    # engine/sglang/models.py
    checks_rotary_early: bool = False  # settings are checked before it has the sizes to compare them with
    # families.py: sglang_window
    reads_windows: bool = False  # False: it has none at all, or one token more than the model


@dataclass(frozen=True, slots=True)
class LogitSetting:
    """A setting of config.json by which a family's model changes what its head computes."""

    name: str
    use: Literal["factor", "divisor", "softcap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """The names of a family's layers of Mamba 2, and of their sizes in its config."""

    mixer: str  # the class, without the family's name
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    has_multipliers: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        """Name heads, their size, groups, rows of a state, and the width of the convolution."""
        return self.heads, self.head_dim, self.groups, self.state, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A row of the table below: the parts of the package that know this family, and the code that they have for it."""

    # families.py, model/recurrent.py: how transformers names the classes of its layers: Qwen3 begins Qwen3RMSNorm.
    classes: str = ""
    # model/fused.py: its norms, rotations and gates are computed in one pass each.
    has_fused_layers: bool = False
    # cpu/dense_decoder.py: the decoder of the torch engine for a CPU computes its layers.
    has_dense_decoder: bool = False
    # model/recurrent.py: it has gated delta nets, with projections in one weight or in several.
    delta_net: Literal["fused", "separate"] | None = None
    # model/recurrent.py, model/layer_kinds.py, engine/sglang/layout.py, engine/sglang/models.py: it has Mamba 2.
    mamba2: Mamba2 | None = None
    # model/recurrent.py, model/layer_kinds.py: it has convolutions in the place of attention.
    has_short_convs: bool = False
    # model/exact/invariant.py, model/exact/sglang_operators.py: the engines that compute the trainer's bits with
    # `true_on_policy = true`.
    exact_engines: tuple[Literal["torch", "sglang"], ...] = ()
    # model/split.py: the family with the same layers whose tensor-parallel plan it takes; transformers has none for it.
    plan_of: str | None = None
    # families.py, vision_family: its towers and placeholders, with a grid for each image, with as many tokens for every
    # image, or with a grid whose patches are averaged.
    vision: Literal["grid", "fixed", "pooled"] | None = None
    # families.py, model/weight_files.py, step/export.py: modules of its base that only sounds go through. They are
    # not built: exports have their weights as they came.
    of_sounds: tuple[str, ...] = ()
    # refit/gather.py, tools/model_shrink.py: in files, experts are [experts, inputs, outputs]: transformers transposes
    # them as it reads, but not back (5.19).
    has_transposed_experts: bool = False
    # tools/model_shrink.py: kinds of layers that checkpoints are published with, by the names that transformers
    # writes (5.19).
    published_layers: Mapping[str, str] = field(default_factory=dict)
    # model/rotary.py, engine/sglang/models.py: transformers leaves out the long factors of its `longrope`, and scales
    # by `short_mscale`.
    reads_short_factors_only: bool = False
    # model/supported.py, engine/sglang/models.py: its attention caps scores softly by `attn_logit_softcapping`, which
    # other families have and ignore.
    caps_scores: bool = False
    # preflight/forecast.py: its norms apply their weights in float32, so that autograd saves both factors.
    has_wide_norms: bool = False
    # model/lora/targets.py: ends of the names of linear layers whose weights another module reads: an adapter would
    # change nothing there.
    bare_linears: tuple[str, ...] = ()
    # preflight/forecast.py: its layers hand keys and values to others, whatever is recomputed, and values have norms.
    passes_keys_on: bool = False
    # families.py, LogitScale: the setting that changes what its head computes. In other families a setting of
    # `LOGIT_SETTINGS` is refused.
    logits: LogitSetting | None = None
    # engine/sglang/options.py, engine/sglang/layout.py: how SGLang's class differs, by the fields above.
    sglang: SGLangFamily = SGLangFamily()


_CAPPED = LogitSetting("final_logit_softcapping", "softcap")
_COMMAND_R = LogitSetting("logit_scale", "factor")
_GRANITE = LogitSetting("logits_scaling", "divisor")
_UNCUT, _UNTRIED = SGLangFamily(is_cut=False), SGLangFamily(is_tried=False, is_cut=False)
_UNTRIED_WITH_WINDOWS = replace(_UNTRIED, reads_windows=True)
_MAMBA2 = replace(_UNTRIED, not_on_cpu="layers of Mamba 2")
_MAMBA2_ON_GPU = replace(_MAMBA2, is_tried=True)  # docs/gen/models-sglang-cuda.json
_SHORT_CONVS = replace(_UNTRIED, not_on_cpu="short convolutions")
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(classes="Llama", has_fused_layers=True, has_dense_decoder=True, exact_engines=("torch",)),
    "qwen2": ModelFamily(classes="Qwen2", has_fused_layers=True, has_dense_decoder=True, exact_engines=("torch",)),
    "qwen3": ModelFamily(
        classes="Qwen3", has_fused_layers=True, has_dense_decoder=True, exact_engines=("torch", "sglang")
    ),
    "qwen3_moe": ModelFamily(classes="Qwen3Moe", has_fused_layers=True),
    "qwen3_next": ModelFamily(
        classes="Qwen3Next",
        delta_net="fused",
        has_wide_norms=True,
        sglang=SGLangFamily(has_norms_of_config=True, checks_rotary_early=True),
    ),
    "qwen3_5": ModelFamily(
        classes="Qwen3_5", delta_net="separate", vision="grid", sglang=SGLangFamily(images_compared=True)
    ),
    "qwen3_5_moe": ModelFamily(classes="Qwen3_5Moe", delta_net="separate", vision="grid"),
    # Compared with SGLang (docs/gen/models-sglang.json, tests/engine), and otherwise as types without a row.
    **dict.fromkeys(
        (
            *("mistral", "mixtral", "ministral3", "qwen2_moe", "qwen2_5_vl_text", "phi3", "olmo", "olmoe"),
            *("glm4", "glm4_moe", "ernie4_5_moe", "starcoder2"),
        ),
        ModelFamily(),
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "olmo2"), ModelFamily(has_wide_norms=True)),
    "olmo3": ModelFamily(has_wide_norms=True, sglang=_UNTRIED),
    "gemma": ModelFamily(
        has_wide_norms=True,
        sglang=SGLangFamily(differs="changes log-probabilities by 6e-04 nats, and holds other norms"),
    ),
    "qwen2_5_vl": ModelFamily(
        classes="Qwen2_5_VL",
        has_dense_decoder=True,
        vision="grid",
        sglang=SGLangFamily(images_compared=True, patch_values=1176),
    ),
    "qwen3_vl": ModelFamily(
        classes="Qwen3VLText", has_dense_decoder=True, vision="grid", sglang=SGLangFamily(images_compared=True)
    ),
    "qwen3_vl_text": ModelFamily(plan_of="qwen3"),
    "qwen3_vl_moe": ModelFamily(vision="grid", has_transposed_experts=True),
    "gemma3": ModelFamily(vision="fixed"),
    "gemma4": ModelFamily(vision="pooled", of_sounds=("audio_tower", "embed_audio"), logits=_CAPPED),
    "gemma2": ModelFamily(
        caps_scores=True,
        logits=_CAPPED,
        has_wide_norms=True,
        sglang=replace(_UNTRIED_WITH_WINDOWS, not_on_cpu="soft caps of attention"),
    ),
    "gemma3_text": ModelFamily(
        logits=_CAPPED, has_wide_norms=True, sglang=SGLangFamily(splits_embedding=False, reads_windows=True)
    ),
    "vaultgemma": ModelFamily(caps_scores=True, logits=_CAPPED, has_wide_norms=True, sglang=_UNTRIED),
    "nanochat": ModelFamily(logits=_CAPPED, sglang=_UNTRIED),
    "cohere": ModelFamily(logits=_COMMAND_R, has_wide_norms=True),
    "cohere2": ModelFamily(logits=_COMMAND_R, has_wide_norms=True),
    "cohere2_moe": ModelFamily(logits=_COMMAND_R, has_wide_norms=True),
    "granite": ModelFamily(logits=_GRANITE),
    "granitemoe": ModelFamily(logits=_GRANITE, sglang=_UNCUT),
    **dict.fromkeys(
        ("granitemoeshared", "granite_swa", "granitemoe_swa"), ModelFamily(logits=_GRANITE, sglang=_UNTRIED)
    ),
    "minicpm3": ModelFamily(
        logits=_GRANITE,  # hidden states are divided, which is the same
        sglang=SGLangFamily(differs="changes log-probabilities by 2e-01 nats"),
    ),
    "granitemoehybrid": ModelFamily(
        classes="GraniteMoeHybrid", mamba2=Mamba2(mixer="MambaLayer"), logits=_GRANITE, sglang=_MAMBA2_ON_GPU
    ),
    "bamba": ModelFamily(classes="Bamba", mamba2=Mamba2(mixer="Mixer"), sglang=_MAMBA2),
    "falcon_h1": ModelFamily(
        classes="FalconH1",
        mamba2=Mamba2(mixer="Mixer", has_multipliers=True),
        logits=LogitSetting("lm_head_multiplier", "factor"),
        sglang=replace(_MAMBA2_ON_GPU, has_bare_attention=True, has_unused=(".q_norm.weight", ".k_norm.weight")),
    ),
    "nemotron_h": ModelFamily(
        classes="NemotronH",
        mamba2=Mamba2(
            mixer="Mamba2Mixer",
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            width="conv_kernel",
        ),
        published_layers={"linear_attention": "mamba", "full_attention": "attention"},
        sglang=replace(_MAMBA2, has_gates=False),
    ),
    "lfm2": ModelFamily(
        classes="Lfm2", has_short_convs=True, sglang=replace(_SHORT_CONVS, is_tried=True, copies_embedding=True)
    ),
    "lfm2_moe": ModelFamily(classes="Lfm2Moe", has_short_convs=True, sglang=_SHORT_CONVS),
    "gemma4_text": ModelFamily(
        logits=_CAPPED,
        has_wide_norms=True,
        passes_keys_on=True,
        sglang=replace(_UNTRIED_WITH_WINDOWS, not_on_cpu="attention"),
    ),
    "arcee": ModelFamily(sglang=SGLangFamily(has_gates=False)),
    **dict.fromkeys(("afmoe", "exaone_moe", "hy_v3", "laguna"), ModelFamily(sglang=_UNTRIED)),
    "apertus": ModelFamily(
        sglang=SGLangFamily(
            has_gates=False,
            differs="keeps the parameters of activations in bfloat16, which changes log-probabilities by 3e-03 nats",
        )
    ),
    "phi": ModelFamily(
        sglang=SGLangFamily(differs="leaves out the bias of the head, which changes log-probabilities by 3e-01 nats")
    ),
    "longcat_flash": ModelFamily(
        bare_linears=("router.classifier",),
        sglang=SGLangFamily(differs="does not start, because it finds no rotary settings"),
    ),
    "gpt_oss": ModelFamily(sglang=replace(_UNTRIED_WITH_WINDOWS, not_on_cpu="attention")),
    "exaone4": ModelFamily(
        sglang=SGLangFamily(reads_windows=True, differs="changes log-probabilities by 5e-03 nats on a GPU")
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        ModelFamily(sglang=replace(_UNTRIED, not_on_cpu="attention")),
    ),
    "minimax_m2": ModelFamily(sglang=replace(_UNTRIED, not_on_cpu="norms of queries and keys")),
    "mimo_v2_flash": ModelFamily(
        sglang=SGLangFamily(differs="does not start with rotary settings for each kind of layers")
    ),
    "phimoe": ModelFamily(reads_short_factors_only=True, sglang=_UNTRIED),
}
_OTHER = ModelFamily(sglang=_UNTRIED)


def family_of(config: Any) -> ModelFamily:
    """Return the row of a model by transformers' config: its own, not that of its text model."""
    return FAMILIES.get(getattr(config, "model_type", ""), _OTHER)


def sglang_window(config: Any) -> int | None:
    """Return the tokens of a sequence up to which SGLang sees what the model's windows show; None: in any sequence."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None) or ("sliding_attention",)
    return None if family_of(text).sglang.reads_windows or "sliding_attention" not in layers else window


def without_sounds(config: Any) -> Any:
    """Return transformers' config of the same model without its tower for sounds, where it can be trained so."""
    if not family_of(config).of_sounds or config.audio_config is None:
        return config
    silent = copy.deepcopy(config)
    silent.audio_config = None
    return silent


def layer_class(model_type: str, name: str) -> str:
    """Return the full name of transformers' class for a kind of layer, such as "RMSNorm", in a family's files."""
    return f"transformers.models.{model_type}.modeling_{model_type}.{FAMILIES[model_type].classes}{name}"


@dataclass(frozen=True, slots=True)
class LogitScale:
    """A model's logits by the output x of its head: c tanh(x / c) with a soft cap c, else factor x."""

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitScale:
        """Read it from transformers' config. Raises ValueError for a setting that is not known to be used so."""
        text, setting = config.get_text_config(), family_of(config).logits
        values = {name: getattr(text, name, None) for name in LOGIT_SETTINGS}
        for name, value in values.items():
            is_cap = name == "final_logit_softcapping"
            if value not in ((None, 0) if is_cap else (None, 1)) and (setting is None or setting.name != name):
                raise ValueError(f"{config.model_type} with {name} = {value} is not supported")
        value = None if setting is None else values[setting.name]
        if setting is None or not value:
            return cls()
        if setting.use == "softcap":
            return cls(softcap=value)
        return cls(factor=value if setting.use == "factor" else 1 / value)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits of the model for those of its head, which are the same where it does nothing to them."""
        if self.softcap is not None:
            return (logits / self.softcap).tanh() * self.softcap
        return logits if self.factor == 1.0 else logits * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """A family of models with a tower for images in front of a language model, with the sizes of one of its models."""

    model_type: str
    tower: tuple[str, ...]  # the modules of `model.base_model` that only images go through
    image_token_id: int  # the placeholder, one for each token that the tower makes of an image
    merge: int  # patches along a side that become one token
    pixels: tuple[int, ...]  # sizes of what the tower takes: of a patch, laid out flat, or of a whole image
    patch_values: int  # numbers in a patch, over its frames and channels
    tokens_per_image: int | None = None  # where all images have the same; None: by the grid
    num_levels: int = 1  # tensors that the tower makes for each token: its embedding, and what later layers add
    has_grid_positions: bool = False  # mRoPE: positions of frame, row and column
    frame: tuple[int, int] | None = None  # tokens around an image, which chat templates leave out
    writes_frame: bool = False  # but the first of them, in the place of an image
    sees_whole_images: bool = False  # an image's tokens attend to those that come after them in the same image
    sees_them_in_windows: bool = False  # only in layers with a window
    has_padded_tower: bool = False  # which takes all images with as many patches, and the place of each patch

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Count the placeholders of an image with this grid of patches."""
        if self.tokens_per_image is not None:
            return self.tokens_per_image
        return math.prod(grid) // self.merge**2


def vision_family(config: Any) -> VisionFamily | None:
    """Return the family of a model with images by transformers' config; None for one of text, or without a row."""
    kind = family_of(config).vision
    if kind == "grid":
        deepstack = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
        return VisionFamily(
            model_type=config.model_type,
            tower=("visual",),
            image_token_id=config.image_token_id,
            merge=config.vision_config.spatial_merge_size,
            pixels=(_patch_values(config.vision_config),),
            patch_values=_patch_values(config.vision_config),
            num_levels=1 + len(deepstack),
            has_grid_positions=True,
        )
    if kind == "fixed":
        vision = config.vision_config
        side = math.isqrt(config.mm_tokens_per_image)
        return VisionFamily(
            model_type=config.model_type,
            tower=("vision_tower", "multi_modal_projector"),
            image_token_id=config.image_token_id,
            merge=vision.image_size // vision.patch_size // side,
            pixels=(vision.num_channels, vision.image_size, vision.image_size),
            patch_values=vision.num_channels * vision.patch_size**2,
            tokens_per_image=config.mm_tokens_per_image,
            frame=(config.boi_token_index, config.eoi_token_index),
            writes_frame=True,
            sees_whole_images=True,
        )
    if kind == "pooled" and config.vision_config is not None:
        return VisionFamily(
            model_type=config.model_type,
            tower=("vision_tower", "embed_vision"),
            image_token_id=config.image_token_id,
            merge=config.vision_config.pooling_kernel_size,
            pixels=(3 * config.vision_config.patch_size**2,),
            patch_values=3 * config.vision_config.patch_size**2,
            frame=(config.boi_token_id, config.eoi_token_id),
            sees_whole_images=config.text_config.use_bidirectional_attention == "vision",
            sees_them_in_windows=True,
            has_padded_tower=True,
        )
    return None


def _patch_values(vision: Any) -> int:
    """Count the numbers in a patch, over its frames and channels."""
    channels = getattr(vision, "in_channels", 3)
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)
