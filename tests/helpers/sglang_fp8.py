"""SGLang's layers with weights in e4m3 on a CPU, where it has no kernels for them without AMX: the same in torch.

Names, shapes, loaders and refits are SGLang's own. Products have dequantized weights; its kernels round activations
too, with a scale for each token and 128 of its numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
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
        "Fp8MoEMethod.process_weights_after_loading": stay_as_loaded,
        "Fp8MoEMethod.apply": multiply_by_experts,
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


def multiply_by_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Send tokens through their experts, by SGLang's own code for weights that are not in fp8."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights = {
        name: dequantized(getattr(layer, name), getattr(layer, f"{name}_scale_inv")).to(x.dtype)
        for name in ("w13_weight", "w2_weight")
    }
    experts = SimpleNamespace(num_experts=layer.num_experts, **weights)
    found = moe_forward_native(experts, x, dispatch_output.topk_output, method.moe_runner_config)  # type: ignore[arg-type]
    return StandardCombineInput(hidden_states=found)
