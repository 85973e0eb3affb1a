"""Operators whose result for a token depends on that token's own inputs alone, to the bit.

A row of a plain matrix product, of an activation function, of attention depends on how many rows are computed with it
and on its place among them: kernels differ for the edges of a matrix, and sums are taken in another order. So an engine
that decodes and a trainer that packs disagree in the last bits. Here every product runs on tiles of a few shapes, and
every sum of a fixed length in a fixed order. What tokens share a tile with changes nothing; `machine_problems` tries
that out on the processor at hand.

Norms, rotary embeddings, softmax over a row and everything else that is computed element by element need nothing: they
were exact as they are. Only the forward pass is invariant; gradients use ordinary kernels.
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

MODEL_TYPES = ("llama", "qwen2", "qwen3")  # those that have been compared, engine with trainer
_ROPES_THAT_LOOK_AROUND = ("dynamic", "longrope")
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 8192  # of a weight, at most, in one product

# Rows. Few shapes, because oneDNN keeps what it compiles for each; the last ones are for what is left over.
_TILES = (512, 128, 64)
_LAST_TILES = (16, 32, 64)

# What `true_on_policy = true` changes, for those who want to see all of it.
SWITCHES = (
    f"linear layers and head: oneDNN on tiles of {min(_LAST_TILES)} to {max(_TILES)} tokens by at most {COLUMNS} "
    "columns, the last tile filled up",
    f"attention, packed and cached: float32 products on tiles of {KEYS} keys, summed one after the other",
    "SiLU: from exp alone, in float32",
    f"log-probabilities, of engine and trainer: summed over {COLUMNS} tokens of the vocabulary at a time, whatever "
    "model.logits_chunk_tokens is",
    "backward passes: as without it",
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` on a CPU: x [..., D], weight [V, D] give [..., V], each row as if it were alone."""
    return linear_by(_tiled, x, weight, bias)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in float32. torch's own ends a tensor with another exp than it begins with."""
    y: Tensor = _Silu.apply(x)
    return y


HEAD = Head(linear, columns=COLUMNS)


def use_invariant_operators(model: nn.Module) -> None:
    """Let the model's linear layers and activation functions be those of this file. Call it before it is sharded."""
    for module in model.modules():
        if type(module) in _REPLACED:
            module.__class__ = _REPLACED[type(module)]


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, D], weight [V, D] give [N, V]."""
    num_rows, sizes = x.shape[0], _tile_sizes(x.shape[0])
    filling = sum(sizes) - num_rows
    tiles = (F.pad(x, (0, 0, 0, filling)) if filling else x).split(sizes)
    slabs = weight.split(COLUMNS)
    biases = [None] * len(slabs) if bias is None else bias.split(COLUMNS)
    rows = []
    for tile in tiles:
        columns = [_product(tile, *slab) for slab in zip(slabs, biases, strict=True)]
        rows.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
    return (rows[0] if len(rows) == 1 else torch.cat(rows))[:num_rows]


def _tile_sizes(num_rows: int) -> list[int]:
    """As many large tiles as fit, then smaller ones, then the smallest that holds what is left."""
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
    """Sentences about a model that has operators which are not in this file, or that nobody has compared."""
    if model_config.model_type not in MODEL_TYPES:
        yield (
            f"true_on_policy = true is proven for {', '.join(MODEL_TYPES)}, not for {model_config.model_type}; "
            "set it to false, or train one of those"
        )
    elif model_config.hidden_act not in ("silu", "swish"):
        yield (
            f"true_on_policy = true has SiLU as its only activation function, and this model uses "
            f"{model_config.hidden_act}; set it to false"
        )
    elif (rope := (model_config.rope_parameters or {}).get("rope_type")) in _ROPES_THAT_LOOK_AROUND:
        yield (
            f'true_on_policy = true needs rotary embeddings of a token\'s own position, and rope_type = "{rope}" also '
            "depends on the longest sequence of a batch; set it to false"
        )


def machine_problems(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    """Sentences about operators that are not exact here, for a model (that may be without memory) in `dtype`.

    Tries each shape once: kernels are chosen by processor, and nobody has tried all of them.
    """
    refusal = "true_on_policy = true cannot be kept on this processor: {}; set it to false"
    is_there = torch.backends.mkldnn.is_available()
    if not is_there or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        yield refusal.format(f"torch has no oneDNN for {str(dtype).removeprefix('torch.')} here")
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
    """Whether the first, the last and some rows between are the same alone, and in company of others."""
    together = function(x)
    middle = len(x) // 2
    parts = [slice(0, 1), slice(middle, middle + 1), slice(middle, middle + 19), slice(len(x) - 1, len(x))]
    return all(torch.equal(function(x[part]), together[part]) for part in parts)


def _attention_is_exact(head_dim: int) -> bool:
    """Whether rows, heads and keys that nobody sees may be added to attention."""
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
