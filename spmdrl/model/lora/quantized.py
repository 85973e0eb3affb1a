"""Linear layers whose frozen weights are stored in 4 or 8 bits: QLoRA's base.

bitsandbytes quantizes the weights once, as they are loaded, in blocks of 64 numbers with a float32 scale each, and
gives them back in the dtype that the model computes in. A layer multiplies by the whole weight, which exists only as
long as its product takes, in forward and in backward. So it computes what a model with those weights computes, engines
and merged exports get those weights, and nothing else needs to know. The quantized bytes are whole on every rank,
outside FSDP; the layer's parameter says what shape and dtype the weight has, and has no memory.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from spmdrl.config.model import QuantizedBase
from spmdrl.model.linear import Product, linear
from spmdrl.model.trunk import Trunk
from spmdrl.types import UserError

BLOCK = 64  # numbers that share a scale
BITS: dict[QuantizedBase, int] = {"nf4": 4, "8bit": 8}
_SCALE_BITS = 32
_LIBRARY = "bitsandbytes"


def bytes_of(num_elements: int, base: QuantizedBase) -> int:
    """Count the bytes of a weight with `num_elements`."""
    return num_elements * BITS[base] // 8 + -(-num_elements // BLOCK) * _SCALE_BITS // 8


def quantized_names(model: PreTrainedModel) -> list[str]:
    """Name the weights that are stored in few bits: those of the language half's linear layers, but not of the head."""
    decoder = set(Trunk(model).decoder.modules())
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in decoder
    ]


def quantization_problems(model: PreTrainedModel, base: QuantizedBase) -> Iterator[str]:
    """Yield a sentence for each reason why this model's weights cannot be stored in few bits."""
    if importlib.util.find_spec(_LIBRARY) is None:
        yield (
            f'lora.base = "{base}" needs {_LIBRARY}, which is not installed; install it with pip install '
            '"spmdrl[quantized]", or remove lora.base'
        )
    if any(weight.ndim == 3 for weight in Trunk(model).decoder.parameters()):
        yield (
            f'lora.base = "{base}" keeps linear layers in few bits, and most of this model are experts, which it would '
            "not; remove lora.base"
        )


def quantized_layers(
    model: PreTrainedModel, base: QuantizedBase, multiply: Product
) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the layers that keep the weights of `quantized_names` in few bits when they get them.

    `multiply` is the product that the layers compute.
    """
    for name in quantized_names(model):
        layer = model.get_submodule(name.rpartition(".")[0])
        vars(layer).update(base=base, multiply=multiply)
        yield layer, QuantizedLinear


def quantized_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that are stored in few bits, which are not to be sharded."""
    return {cast(nn.Parameter, module.weight) for module in model.modules() if isinstance(module, QuantizedLinear)}


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in few bits. Its `weight` is on the meta device."""

    base: QuantizedBase
    multiply: Product
    stored: tuple[Tensor, Any]  # numbers, and the library's state with their scales

    @torch.no_grad()
    def keep(self, weight: Tensor) -> None:
        """Quantize a whole weight, on its device, and keep it in place of the one before."""
        library, flat = _library(), weight.flatten()  # blocks may cross rows, which its kernels do not all expect
        if self.base == "nf4":
            self.stored = library.quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")
        else:
            self.stored = library.quantize_blockwise(flat, blocksize=BLOCK)
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)

    def whole(self) -> Tensor:
        """Return the weight [V, D] that the stored bits encode, in the dtype of the one that was given."""
        library = _library()
        dequantize = library.dequantize_4bit if self.base == "nf4" else library.dequantize_blockwise
        weight: Tensor = dequantize(*self.stored)
        return weight.view(self.weight.shape)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply as a layer with the whole weight would."""
        product: Tensor = _Product.apply(input, self, self.bias)
        return product


class _Product(torch.autograd.Function):
    """y = x W^T + b with dx = dy W. Backward dequantizes W again, which is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return layer.multiply(x, layer.whole(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return (linear(grad, ctx.layer.whole().t()) if ctx.needs_input_grad[0] else None), None, None


@functools.cache
def _library() -> Any:
    """Import bitsandbytes. Raises UserError when it is not there.

    On processors with bfloat16 it would fetch code from a hub as it is imported, by a package `kernels` if there is
    one, and print a page about it if there is none. We use nothing of that.
    """
    log, others = logging.getLogger(_LIBRARY), sys.modules.get("kernels")
    level = log.level
    log.setLevel(logging.CRITICAL)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        from bitsandbytes import functional

        return functional
    except ImportError as error:
        raise UserError(f"lora.base needs {_LIBRARY}, which cannot be imported here: {error}") from error
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        if others is not None:
            sys.modules["kernels"] = others
