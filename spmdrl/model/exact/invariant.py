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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from spmdrl.families import FAMILIES
from spmdrl.model.attention_layer import AttentionLayer, CausalAttention, SeenKeys
from spmdrl.model.linear import linear_by, with_backward_of
from spmdrl.model.logprobs import Head

# Attention in which a query's result depends only on itself and on the keys it sees, to the bit; see invariant.py.
#
# Only sums over keys depend on an order: a query's scores do not, nor does the largest of them. So keys are summed in
# tiles of a fixed size, counted from the start of the sequence, one tile after the other. A tile in which a query
# sees nothing adds exactly 0, so the number of such tiles does not matter.


KEYS = 32  # keys in a tile
_ROWS = 8  # products have a multiple of this many rows: kernels for small matrices sum in another order
_QUERIES = 4 * KEYS  # queries of a sequence computed together; later ones see more keys
_SCORES = 2**22  # limit on the scores in memory at a time, which also keeps them in the processor's cache


def attend_in_tiles(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor) -> Tensor:
    """Attend with q [B, M, D], already scaled, under the mask visible [B or 1, M or 1, L]: [B, M, D].

    Keys and values are given in parts of [B, part of L, D]. All but `visible` are float32; M must be a multiple of 8
    and every part of L a multiple of KEYS. Every row must see some key.
    """
    sizes = [q.shape[1] % _ROWS, *(part.shape[1] % KEYS for part in keys)]
    assert not any(sizes), f"{q.shape[1]} rows and {[part.shape[1] for part in keys]} keys are not whole tiles"
    scores = torch.cat([torch.bmm(q, part.transpose(1, 2)) for part in keys], dim=-1).masked_fill(~visible, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    value_tiles = [tile for part in values for tile in part.split(KEYS, dim=1)]
    tiles = list(zip(weights.split(KEYS, dim=-1), value_tiles, strict=True))
    weighted, total = _tile_sums(*tiles[0])
    for tile in tiles[1:]:
        more_weighted, more = _tile_sums(*tile)
        weighted, total = weighted + more_weighted, total + more
    return weighted / total


def _tile_sums(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(weights, v), weights.sum(-1, keepdim=True)


def attend_to_cache_in_tiles(
    query: Tensor, keys: Tensor, values: Tensor, *, seen: SeenKeys, layer: AttentionLayer
) -> Tensor:
    """Attend with one new token per cache row: query [1, H, n, D] over keys and values [n, K, L, D]; [1, n, H, D]."""
    assert layer.is_plain, "no model that true_on_policy = true accepts has attention sinks or caps scores"
    num_rows, num_kv_heads, num_keys, _ = keys.shape
    num_groups = query.shape[1] // num_kv_heads
    q = _pad_to_multiple(
        (query[0].transpose(0, 1).float() * layer.scale).unflatten(1, (num_kv_heads, num_groups)), _ROWS
    )
    k, v = (_whole_tiles(x.flatten(0, 1)) for x in (keys, values))
    hidden = seen.hidden
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=keys.device) if hidden is None else ~hidden
    visible = F.pad(visible, (0, -num_keys % KEYS)).repeat_interleave(num_kv_heads, dim=0)
    out = attend_in_tiles(q.flatten(0, 1), k, v, visible[:, None])
    out = out[:, :num_groups].reshape(1, num_rows, num_kv_heads * num_groups, -1)
    return out.to(query.dtype)


def _whole_tiles(x: Tensor) -> list[Tensor]:
    """Split x [B, L, D] of a cache into its whole tiles, without a copy, and a padded copy of the rest."""
    whole = x.shape[1] - x.shape[1] % KEYS
    parts = [x[:, :whole], _pad_to_multiple(x[:, whole:], KEYS)]
    return [part.float() for part in parts if part.shape[1]]


def _pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Append zeros to x [..., N, D] until N is a multiple."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % multiple))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring sequences whose lengths need the same number of tiles."""

    tokens: Tensor  # [n, L] int64, places in the micro-batch; padding repeats a sequence's last token
    is_real: Tensor  # [n, L] bool, False for padding


def causal_in_tiles(
    seqlens: list[int], earlier: int, plain: CausalAttention, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer
) -> Tensor:
    """`CausalAttention` within sequences of these lengths, exact to the bit; gradients are those of `plain`.

    The first sequence has `earlier` more keys than queries. Its tiles are those of the whole sequence, so it is
    computed as if it had their queries too.
    """
    assert layer.sinks is None, "no model that true_on_policy = true accepts has attention sinks"

    def differentiable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, layer)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = [earlier + seqlens[0], *seqlens[1:]]
        queries = F.pad(q, (0, 0, 0, 0, earlier, 0)) if earlier else q
        batches = _batches(whole, num_heads=q.shape[1], device=q.device)
        return torch.cat([_attend_in_batch(batch, queries, k, v, layer) for batch in batches])[earlier:]

    out: Tensor = with_backward_of(differentiable, exact, q, k, v)
    return out


def _batches(seqlens: list[int], *, num_heads: int, device: torch.device) -> Iterator[_Batch]:
    """Split the sequences, in their order, into batches whose scores stay within _SCORES."""
    start = 0
    for length, run in groupby(seqlens, key=lambda seqlen: -(-seqlen // KEYS) * KEYS):
        lengths = list(run)
        most = max(1, _SCORES // (num_heads * min(length, _QUERIES) * length))
        for first in range(0, len(lengths), most):
            ends = torch.tensor(lengths[first : first + most], device=device)
            starts = start + ends.cumsum(0) - ends
            place = torch.arange(length, device=device)
            is_real = place < ends[:, None]
            yield _Batch(starts[:, None] + torch.minimum(place, ends[:, None] - 1), is_real)
            start += sum(lengths[first : first + most])


def _attend_in_batch(batch: _Batch, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Compute the rows of attention's result [T, H, D] that belong to the batch's tokens."""
    num_sequences, length = batch.tokens.shape
    num_kv_heads, num_groups = k.shape[1], q.shape[1] // k.shape[1]
    q_heads = (q[batch.tokens].float() * layer.scale).unflatten(2, (num_kv_heads, num_groups)).permute(0, 2, 1, 3, 4)
    q_heads = q_heads.flatten(0, 1)  # [n K, L, H / K, D]
    k_heads, v_heads = (x[batch.tokens].float().transpose(1, 2).flatten(0, 1) for x in (k, v))  # [n K, L, D]
    token = torch.arange(length, device=q.device)
    distance = token[:, None] - token
    visible = (distance >= 0) & (distance < (length if layer.window is None else layer.window))
    parts = []
    for first in range(0, length, _QUERIES):
        block = slice(first, min(first + _QUERIES, length))
        seen = slice(0, block.stop)
        out = attend_in_tiles(
            q_heads[:, block].flatten(1, 2),
            [k_heads[:, seen]],
            [v_heads[:, seen]],
            visible[block, seen].repeat_interleave(num_groups, dim=0)[None],
        )
        parts.append(out.unflatten(1, (-1, num_groups)))
    out = torch.cat(parts, dim=1).unflatten(0, (num_sequences, num_kv_heads))  # [n, K, L, H / K, D]
    return out.permute(0, 2, 1, 3, 4).flatten(2, 3)[batch.is_real].to(q.dtype)


MODEL_TYPES = [name for name, family in FAMILIES.items() if "torch" in family.exact_engines]
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


def invariant_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's linear layers and activation functions, each with its class of this file."""
    return ((module, _REPLACED[type(module)]) for module in model.modules() if type(module) in _REPLACED)


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, D], weight [V, D] give [N, V]."""
    num_rows, sizes = x.shape[0], _tile_sizes(x.shape[0])
    padding = sum(sizes) - num_rows
    tiles = (F.pad(x, (0, 0, 0, padding)) if padding else x).split(sizes)
    slabs = weight.split(COLUMNS)
    biases = [None] * len(slabs) if bias is None else bias.split(COLUMNS)
    rows = []
    for tile in tiles:
        pairs = zip(slabs, biases, strict=True)
        columns = [torch.ops.mkldnn._linear_pointwise(tile, *pair, "none", [], "") for pair in pairs]
        rows.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
    return (rows[0] if len(rows) == 1 else torch.cat(rows))[:num_rows]


def _tile_sizes(num_rows: int) -> list[int]:
    """Split rows into as many large tiles as fit, then smaller ones, then the smallest that holds the rest."""
    sizes = []
    for tile in _TILES:
        count, num_rows = divmod(num_rows, tile)
        sizes += [tile] * count
    return sizes + [next(tile for tile in _LAST_TILES if tile >= num_rows)] * (num_rows > 0)


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
