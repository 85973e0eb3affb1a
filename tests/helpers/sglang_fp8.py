"""SGLang's layers with weights in e4m3 on a CPU, where it has no kernels for them without AMX: the same in torch.

Names, shapes, loaders and refits are SGLang's own. Products have dequantized weights; its kernels round activations
too, with a scale for each token and 128 of its numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spmdrl.model.fp8 import dequantized

_MODULE = "sglang.srt.layers.quantization.fp8"


def install() -> None:
    """Let SGLang compute with these in this process. Call it before SGLang's models are imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, replacement in {
        "Fp8LinearMethod.process_weights_after_loading": stay_as_loaded,
        "Fp8LinearMethod.apply": multiply,
        "Fp8Config.get_supported_act_dtypes": any_dtype,
    }.items():
        HookRegistry.register(f"{_MODULE}.{name}", replacement, HookType.REPLACE)


def stay_as_loaded(_method: Any, _layer: Any) -> None:
    """Leave weights as they are."""


def any_dtype(*_: Any) -> list[torch.dtype]:
    """Return the dtypes that these products have."""
    return [torch.bfloat16, torch.float16, torch.float32]


def multiply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply activations with a layer's weight."""
    return F.linear(x, dequantized(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)
