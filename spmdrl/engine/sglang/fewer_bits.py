"""SGLang with weights in fp8 (`rollout.quantization`) and with keys and values in fp8 (`rollout.kv_cache_dtype`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.engine.sglang.layout import TpShard, sharded_parts
from spmdrl.engine.sglang.models import is_hybrid
from spmdrl.families import vision_family
from spmdrl.model.fp8 import BLOCK, SCALES
from spmdrl.refit.bucket import Bucket
from spmdrl.types import UserError

_OLDEST_CAPABILITY = (8, 9)  # of devices with products in e4m3; on older ones SGLang lays weights out in another way
_REPACKS_FROM = (10, 0)  # here SGLang's own choice of kernels does


def fewer_bits_arguments(cfg: Config, *, device_type: str) -> dict[str, Any]:
    """Return SGLang's arguments; with the chosen kernels weights stay as they are loaded, so that a refit reaches
    them."""
    arguments: dict[str, Any] = {}
    if cfg.rollout.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = cfg.rollout.kv_cache_dtype
    if cfg.rollout.quantization is not None:
        arguments["quantization"] = cfg.rollout.quantization
        if device_type == "cuda" and torch.cuda.get_device_capability() >= _REPACKS_FROM:
            arguments |= {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
    return arguments


def fewer_bits_problems(cfg: Config, model_config: Any, *, device_type: str) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang could not compute with the fewer bits that are asked for."""
    if cfg.rollout.kv_cache_dtype != "auto" and device_type != "cuda":
        yield (
            f'rollout.kv_cache_dtype = "{cfg.rollout.kv_cache_dtype}" needs a CUDA device, and there is none; remove it'
        )
    if cfg.rollout.quantization is None:
        return
    asked = f'rollout.quantization = "{cfg.rollout.quantization}"'
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else None
    if capability is None or capability < _OLDEST_CAPABILITY:
        has = "there is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        yield (
            f"{asked} needs a CUDA device of compute capability 8.9 or more, for SGLang's products in e4m3, and {has}; "
            'remove it, or set rollout.engine = "torch", which samples with the numbers that e4m3 stands for'
        )
    if cfg.rollout.placement == "disaggregated":
        yield (
            f'{asked} with rollout.placement = "disaggregated": the checksums by which a refit of such an SGLang is '
            'compared are not of the integers in its memory; set placement = "colocated", or remove it'
        )
    if cfg.model.compute_dtype == "float32":
        yield f'{asked} with model.compute_dtype = "float32", which SGLang does not mix; set that to "bfloat16"'
    if is_hybrid(model_config) or vision_family(model_config) is not None:
        yield (
            f'{asked} was not tried with SGLang for model.path = "{cfg.model.path}", a {model_config.model_type} with '
            "recurrent layers or a tower; remove it"
        )
        return
    for name, size in _divided_sizes(model_config, cfg.rollout.tp_size):
        if size % BLOCK:
            yield (
                f"{asked} scales blocks of {BLOCK} x {BLOCK}, which do not divide {name} = {size}, and SGLang pads "
                "nothing; lower rollout.tp_size, or remove rollout.quantization"
            )


def _divided_sizes(model_config: Any, tp_size: int) -> Iterator[tuple[str, int]]:
    """Yield the sizes of a device's part of each projection that blocks must divide, each with its name."""
    config = model_config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    over = f" / {tp_size} ranks" if tp_size > 1 else ""
    yield "hidden_size", config.hidden_size
    yield f"num_attention_heads x head_dim{over}", heads * head_dim // tp_size
    yield f"num_key_value_heads x head_dim{over}", max(1, key_heads // tp_size) * head_dim
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if size := getattr(config, name, None):
            yield f"{name}{over}", size // tp_size


def require_same_list(file: Path, buckets: Iterable[Bucket], shard: TpShard) -> None:
    """Raise UserError where the engine has another list of weights in e4m3 than these buckets, by its own names."""
    sent: set[str] = set()
    for bucket in buckets:
        on_meta = {x.name: torch.empty(x.shape, dtype=x.dtype, device="meta") for x in bucket.flat_entries}
        sent |= {name for name in sharded_parts(on_meta, shard) if name.endswith(SCALES)}
    engines = set(json.loads(file.read_text()))
    for names, mine, theirs in ((engines - sent, "as they are", "in e4m3"), (sent - engines, "in e4m3", "as they are")):
        if names:
            raise UserError(
                f'rollout.quantization = "fp8": SGLang has {len(names)} weights {theirs} that would be sent {mine}, '
                f"{min(names).removesuffix(SCALES)} among them; remove rollout.quantization"
            )
