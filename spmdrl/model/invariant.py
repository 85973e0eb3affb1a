"""Operators whose result for a token depends only on that token's own inputs, to the bit.

In ordinary kernels, a row of a matrix product, of an activation function or of attention also depends on how many rows
are computed with it and on its place among them: kernels treat the edges of a matrix differently, and sum in another
order. So an engine that decodes and a trainer that packs disagree in the last bits. Here every product runs on tiles of
a few shapes, and every sum has a fixed length and a fixed order. It makes no difference which tokens share a tile;
`machine_problems` checks that on the processor at hand.

Norms, rotary embeddings, softmax over a row and all elementwise operations are exact already. Only the forward pass is
invariant; gradients use ordinary kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from spmdrl.model.invariant_attention import KEYS, attend_in_tiles
from spmdrl.model.logprobs import Head
from spmdrl.model.two_passes import linear_by

MODEL_TYPES = ("llama", "qwen2", "qwen3")  # models whose engine and trainer have been compared
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 8192  # limit on the outputs of a weight in one product

# Rows. Few shapes, because oneDNN caches a kernel for each; the last tiles are for the remaining rows, padded.
_TILES = (512, 128, 64)
_LAST_TILES = (16, 32, 64)

# All that `true_on_policy = true` changes, as lines for the user.
SWITCHES = (
    f"linear layers and head: oneDNN on tiles of {min(_LAST_TILES)} to {max(_TILES)} tokens by at most {COLUMNS} "
    "columns, the last tile padded",
    f"attention, packed and cached: float32 products on tiles of {KEYS} keys, summed one after the other",
    "SiLU: from exp alone, in float32",
    f"log-probabilities, of engine and trainer: summed over {COLUMNS} tokens of the vocabulary at a time, whatever "
    "model.logits_chunk_tokens is",
    "backward passes: unchanged",
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` on a CPU, each row as if it were alone: x [..., D], weight [V, D] give [..., V]."""
    return linear_by(_tiled, x, weight, bias)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in float32. torch's own silu uses another exp for the last elements of a tensor."""
    y: Tensor = _Silu.apply(x)
    return y


HEAD = Head(linear, columns=COLUMNS)


def use_invariant_operators(model: nn.Module) -> None:
    """Replace the model's linear layers and activation functions by those of this file, before it is sharded."""
    for module in model.modules():
        if type(module) in _REPLACED:
            module.__class__ = _REPLACED[type(module)]


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, D], weight [V, D] give [N, V]."""
    num_rows, sizes = x.shape[0], _tile_sizes(x.shape[0])
    padding = sum(sizes) - num_rows
    tiles = (F.pad(x, (0, 0, 0, padding)) if padding else x).split(sizes)
    slabs = weight.split(COLUMNS)
    biases = [None] * len(slabs) if bias is None else bias.split(COLUMNS)
    rows = []
    for tile in tiles:
        columns = [_product(tile, *slab) for slab in zip(slabs, biases, strict=True)]
        rows.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
    return (rows[0] if len(rows) == 1 else torch.cat(rows))[:num_rows]


def _tile_sizes(num_rows: int) -> list[int]:
    """Split rows into as many large tiles as fit, then smaller ones, then the smallest that holds the rest."""
    sizes = []
    for tile in _TILES:
        count, num_rows = divmod(num_rows, tile)
        sizes += [tile] * count
    return sizes + [next(tile for tile in _LAST_TILES if tile >= num_rows)] * (num_rows > 0)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide / (1 + (-wide).exp())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


class _LinearLayer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _SiluLayer(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return silu(input)


_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _LinearLayer,
    SiLUActivation: _SiluLayer,
    nn.SiLU: _SiluLayer,
}


def model_problems(model_config: Any) -> Iterator[str]:
    """Yield a sentence when the model needs an operator that is not in this file, or has not been compared."""
    if model_config.model_type not in MODEL_TYPES:
        yield (
            f"true_on_policy = true is proven for {', '.join(MODEL_TYPES)}, not for {model_config.model_type}; "
            "set it to false, or train one of those"
        )
    elif model_config.hidden_act not in ("silu", "swish"):
        yield (
            f"true_on_policy = true supports SiLU as the only activation function, and this model uses "
            f"{model_config.hidden_act}; set it to false"
        )


def machine_problems(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    """Yield a sentence for each operator of the model that is not exact on this processor, in `dtype`.

    Every shape is tried once, because kernels are chosen by processor. The model may be on the meta device.
    """
    refusal = "true_on_policy = true cannot be kept on this processor: {}; set it to false"
    if not torch.backends.mkldnn.is_available():
        yield refusal.format("torch has no oneDNN here")
        return
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield (
            "true_on_policy = true needs products in bfloat16, which oneDNN does not have on this processor; set "
            'model.compute_dtype = "float32", or true_on_policy = false'
        )
        return
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)}
    for columns, depth in sorted(shapes):
        weight = _noise(min(columns, COLUMNS), depth).to(dtype)
        if not _is_exact(lambda x, weight=weight: linear(x, weight), _noise(sum(_TILES) + 3, depth).to(dtype)):
            yield refusal.format(f"a product with a {columns} x {depth} weight depends on how many tokens there are")
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not _attention_is_exact(head_dim):
        yield refusal.format(f"attention with heads of {head_dim} depends on how many keys there are")
    for name, function in (("exp", torch.exp), ("log", lambda x: x.abs().log()), ("SiLU", silu)):
        if not _is_exact(function, _noise(1031)):
            yield refusal.format(f"{name} depends on how many numbers there are")


def _is_exact(function: Any, x: Tensor) -> bool:
    """Return True when the first, the last and some middle rows are the same alone as together with all others."""
    together = function(x)
    middle = len(x) // 2
    parts = [slice(0, 1), slice(middle, middle + 1), slice(middle, middle + 19), slice(len(x) - 1, len(x))]
    return all(torch.equal(function(x[part]), together[part]) for part in parts)


def _attention_is_exact(head_dim: int) -> bool:
    """Return True when attention does not change as rows, heads and masked keys are added."""
    q, k, v = _noise(3, 64, head_dim), _noise(3, 4 * KEYS, head_dim), _noise(3, 4 * KEYS, head_dim)
    visible = torch.arange(4 * KEYS) < torch.randint(1, KEYS, (3, 64, 1), generator=torch.Generator().manual_seed(0))
    together = attend_in_tiles(q, [k], [v], visible)
    rows, keys = slice(8, 16), slice(0, KEYS)
    alone = [
        attend_in_tiles(q[i, rows][None], [k[i, keys][None]], [v[i, keys][None]], visible[i, rows, keys][None])
        for i in range(3)
    ]
    return torch.equal(torch.cat(alone), together[:, rows])


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
