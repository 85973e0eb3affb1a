"""The layout of a checkpoint's weights in SGLang: some are fused, some are split over the devices of an engine.

It gives the weights that an engine must hold after a refit, independently of SGLang's own loaders. Weights of a kind
that is not listed here stay whole, under their own name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmdrl.engine.sglang.models import has_delta_nets
from spmdrl.families import family_of
from spmdrl.model.fp8 import BLOCK, SCALES

# SGLang pads with zeros: embeddings and heads to a multiple of rows, and on a CPU also the MLP's inner size, to a
# multiple for each device.
_VOCABULARY_MULTIPLE = 64
_CPU_INNER_MULTIPLE = 32

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
# Latent attention of DeepSeek: its queries stay alone, but for the first of their two projections.
_LATENT = {"q_a_proj": "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa"}
# What Phi-3's and GLM-4's checkpoints have fused already, and the parts that are cut one by one.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.(weight(_scale_inv)?)$")
_EXPERT_MODULES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of Mixtral and others
_NO_EXPERT = -1  # the number of what is not an expert's
_CUT_BY_ROWS = {"q_proj", "gate_proj", "up_proj", "linear_fc1", "to merge"} | {
    "in_proj_qkvz",
    "in_proj_z",
    "in_proj_ba",
    "in_proj_b",
    "in_proj_a",
}
_CUT_BY_COLUMNS = {"o_proj", "down_proj", "out_proj", "linear_fc2", "merged", "attended"}  # their biases are whole
_INNER = {"gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2"}
_CUT_BY_KEY_HEADS = {"k_proj", "v_proj"}
_VOCABULARY = {"embed_tokens", "lm_head", "pos_embed"}  # the last is the table of places in a tower
# Rows of queries, keys and values, each cut by itself; and parameters of gated delta nets.
_CUT_BY_PARTS = {"in_proj_qkv", "conv1d", "qkv"}
_OF_HEADS = {"A_log", "dt_bias"}
_SCALES = f"weight{SCALES}"
_MATRICES = {"weight", _SCALES}
_ALWAYS_WIDE = "A_log"  # float32 in SGLang
# Of towers: modules whose own names do not say how they are cut.
_TOWER = {
    re.compile(r"visual\..*merger.*\.(linear_fc1|mlp\.0)\."): "to merge",
    re.compile(r"visual\..*merger.*\.(linear_fc2|mlp\.2)\."): "merged",
    re.compile(r"visual\..*\.attn\.proj\."): "attended",
    re.compile(r"visual\..*\.attn\.qkv\."): "qkv",
}
# Prefixes and modules in checkpoints that have other names in SGLang.
_RENAMED = {"model.language_model.": "model.", "model.visual.": "visual.", ".attn.qkv.": ".attn.qkv_proj."} | {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.": "model.",
    ".moe_statics.": ".gate.",
    ".conv.conv.": ".conv.conv_",
    ".block_sparse_moe.input_linear.": ".block_sparse_moe.experts.w13_",
    ".block_sparse_moe.output_linear.": ".block_sparse_moe.experts.w2_",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.gate.",
}

DIGEST = "digest"  # in the config of adapters: that of their memory
MISMATCH = "the digest differs: "  # followed by those of the tensors that arrived, as JSON


@dataclass(frozen=True, slots=True)
class TpShard:
    """One device's part of an engine."""

    rank: int  # 0 to size - 1
    size: int  # devices that share the engine (tensor parallelism)
    num_key_value_heads: int
    inner_multiple: int  # that the inner size of MLPs is padded to
    widens: bool = False  # embedding and norms are float32, as under `rl_on_policy_target`
    delta_net_rows: tuple[int, ...] = ()  # of queries, keys and values, in models with gated delta nets
    delta_net_norm: torch.dtype | None = None  # of their norms, where that is another one than that of all weights
    cuts_embedding: bool = True  # False: every device has it whole
    attention_rows: tuple[int, ...] = ()  # of queries, keys and values
    has_bare_attention: bool = False  # layers have the weights of their attention directly
    has_mamba: bool = False  # the decay is stored as -exp of what checkpoints have
    copies_embedding: bool = False  # its head is a copy of the embedding
    fused: Mapping[str, str] = field(default_factory=lambda: _FUSED)  # modules that become one, by its name

    @classmethod
    def of(cls, model_config: Any, *, rank: int, size: int, device_type: str, on_policy: bool = False) -> TpShard:
        """Read the sizes from a transformers config; `on_policy` means with `rl_on_policy_target`."""
        model_config = model_config.get_text_config()
        heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
        multiple = _CPU_INNER_MULTIPLE * size if device_type == "cpu" else size
        in_sglang = family_of(model_config).sglang
        norm = model_config.dtype if in_sglang.has_norms_of_config else None
        rows = tuple(_delta_net_rows(model_config))
        return cls(
            *(rank, size, heads, multiple, on_policy, rows, norm),
            cuts_embedding=in_sglang.splits_embedding,
            attention_rows=_attention_rows(model_config, heads),
            has_bare_attention=bool(rows) or in_sglang.has_bare_attention,
            has_mamba=family_of(model_config).mamba2 is not None,
            fused=_fused_modules(model_config),
            copies_embedding=in_sglang.copies_embedding and model_config.tie_word_embeddings,
        )


def _fused_modules(model_config: Any) -> Mapping[str, str]:
    alone = set() if family_of(model_config).sglang.has_gates else {"up_proj"}
    is_latent = getattr(model_config, "kv_lora_rank", None)
    alone |= {"q_proj"} if is_latent else set()
    latent = _LATENT if is_latent and model_config.q_lora_rank else {}
    return {module: fused for module, fused in (_FUSED | latent).items() if module not in alone}


def _attention_rows(model_config: Any, num_key_value_heads: int) -> tuple[int, ...]:
    num_heads = model_config.num_attention_heads
    head_dim = model_config.to_dict().get("head_dim") or model_config.hidden_size // num_heads
    return (num_heads * head_dim, num_key_value_heads * head_dim, num_key_value_heads * head_dim)


def _delta_net_rows(model_config: Any) -> Iterator[int]:
    if has_delta_nets(model_config):
        keys = model_config.linear_num_key_heads * model_config.linear_key_head_dim
        yield from (keys, keys, model_config.linear_num_value_heads * model_config.linear_value_head_dim)


def sharded_weights(tensors: Mapping[str, Tensor], shard: TpShard) -> dict[str, Tensor]:
    """Compute the weights that this device holds after loading these whole tensors of a checkpoint, by SGLang's names.

    Tensors that are fused with each other must come together, in the order in which they are fused. Experts [rows,
    columns] become one weight [experts, rows, columns].
    """
    sharded = {}
    for name, by_expert in _fused(tensors, shard).items():
        wholes = [pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)) for _, pieces in sorted(by_expert.items())]
        sharded[name] = wholes[0] if _NO_EXPERT in by_expert else torch.stack(wholes)
    return sharded


def sharded_parts(tensors: Mapping[str, Tensor], shard: TpShard) -> dict[str, list[Tensor]]:
    """Return each of the `sharded_weights` as the parts whose elements lie end to end in it; most are not copied."""
    return {
        name: [part for expert in sorted(by_expert) for part in by_expert[expert]]
        for name, by_expert in _fused(tensors, shard).items()
    }


def padded_adapters(tensors: Mapping[str, Tensor], shard: TpShard) -> dict[str, Tensor]:
    """Pad adapters, by PEFT's names, where the weights that they change are padded. Every device gets all of them."""
    return {name: _padded_adapter(name, tensor, shard.inner_multiple) for name, tensor in tensors.items()}


def _padded_adapter(name: str, tensor: Tensor, multiple: int) -> Tensor:
    *_, module, side, _ = name.split(".")
    if module not in _INNER or (module in _CUT_BY_ROWS) == (side == "lora_A"):
        return tensor
    return _padded(tensor, 0 if side == "lora_B" else 1, multiple)


def _fused(tensors: Mapping[str, Tensor], shard: TpShard) -> dict[str, dict[int, list[Tensor]]]:
    """Return this device's parts of what is fused into each weight, by expert."""
    fused: dict[str, dict[int, list[Tensor]]] = {}
    for name, tensor in itertools.chain.from_iterable(_unfused(*item, shard) for item in tensors.items()):
        if shard.has_mamba and name.endswith(f".{_ALWAYS_WIDE}"):
            name, tensor = f"{name.removesuffix(_ALWAYS_WIDE)}A", -tensor.float().exp()
        if expert := _EXPERT.match(name):
            number, module, kind = int(expert[2]), _EXPERT_MODULES.get(expert[3], expert[3]), expert[4]
            engine_name = f"{expert[1]}.{'w2' if module == 'down_proj' else 'w13'}_{kind}"
        else:
            *prefix, module, kind = name.split(".") if "." in name else ("", name)
            number, engine_name = _NO_EXPERT, ".".join([*prefix, shard.fused.get(module, module), kind])
        if shard.delta_net_norm is not None and ".linear_attn.norm." in name:
            tensor = tensor.to(shard.delta_net_norm)
        for before, after in _RENAMED.items():
            engine_name = engine_name.replace(before, after)
        if shard.has_bare_attention:
            engine_name = engine_name.replace(".self_attn.", ".")
        module = next((named for pattern, named in _TOWER.items() if pattern.search(name)), module)
        cut = [_cut(module, kind, part, shard) for part in _parts(module, tensor, shard)]
        fused.setdefault(engine_name, {}).setdefault(number, []).extend(cut)
    return fused


def _unfused(name: str, tensor: Tensor, shard: TpShard) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of what a checkpoint has fused, by the names that they have in others."""
    *prefix, module, kind = name.split(".") if "." in name else ("", name)
    if module not in _PARTS:
        yield name, tensor
        if module == "embed_tokens" and shard.copies_embedding:
            yield "lm_head.weight", tensor
        return
    rows = [size // BLOCK if kind == _SCALES else size for size in shard.attention_rows]
    parts = tensor.split(rows) if module == "qkv_proj" else tensor.chunk(2)
    for part_name, part in zip(_PARTS[module], parts, strict=True):
        yield ".".join([*prefix, part_name, kind]), part


def _parts(module: str, tensor: Tensor, shard: TpShard) -> Sequence[Tensor]:
    """Return the parts of a weight that are cut one by one."""
    if module not in _CUT_BY_PARTS or (module != "qkv" and not shard.delta_net_rows):
        return (tensor,)
    return tensor.chunk(3) if module == "qkv" else tensor.split(shard.delta_net_rows)


def _cut(module: str, kind: str, tensor: Tensor, shard: TpShard) -> Tensor:
    if (shard.widens and (module == "embed_tokens" or module.endswith("norm"))) or kind == _ALWAYS_WIDE:
        tensor = tensor.float()
    if module == "embed_tokens" and not shard.cuts_embedding:
        return tensor
    if module in _VOCABULARY:
        return _padded(tensor, 0, _VOCABULARY_MULTIPLE).chunk(shard.size)[shard.rank]
    if module in _CUT_BY_KEY_HEADS:
        pieces = min(shard.size, shard.num_key_value_heads)  # with more devices than heads, several have the same head
        return tensor.chunk(pieces)[shard.rank * pieces // shard.size]
    by_rows = module in _CUT_BY_ROWS or module in _CUT_BY_PARTS or kind in _OF_HEADS
    dim = 0 if by_rows else 1 if module in _CUT_BY_COLUMNS and kind in _MATRICES else None
    if dim is None:
        return tensor
    # Nothing is padded in few bits: blocks divide what a device has.
    multiple = shard.inner_multiple if module in _INNER and kind != _SCALES else shard.size
    return _padded(tensor, dim, multiple).chunk(shard.size, dim)[shard.rank]


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """Pad `dim` with zeros at its end, up to a multiple of `multiple`."""
    missing = -tensor.shape[dim] % multiple
    return pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing]) if missing else tensor
