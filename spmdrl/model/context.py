"""Context parallelism: attention over sequences that are split across the ranks of a mesh.

The T tokens of a micro-batch are split into chunks of n = T/R neighbouring tokens, one on each of the R ranks. A query
can see keys of other ranks in two ways, equal in result:

- "all_gather": queries stay. The keys and values that a rank's queries see are sent to it, a few heads at a time.
- "ulysses": ranks exchange tokens for heads, so that each rank attends over all tokens with some of the heads.

Each function here that takes a mesh is a collective: every rank of the mesh calls it, in the same order, and data
decides only how many rows move.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spmdrl.dist.collectives import gather_flat
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.attention import Block, score_cap, seeing_blocks
from spmdrl.model.attention_layer import Attend, AttentionLayer, CausalAttention
from spmdrl.model.kernels import (
    Kernel,
    SequenceLayout,
    causal_attention,
    cumulative,
    has_flash,
    refuse_sinks,
    window_size,
)
from spmdrl.model.tensor_parallel import exchange
from spmdrl.model.tree_attention import chunk_of_tree, tree_attention
from spmdrl.types import PrefixTree, UserError

# Attention under context parallelism by the ring_flash_attn package, where it is installed.


def has_ring_attention() -> bool:
    """Return True when ring_flash_attn is installed."""
    return importlib.util.find_spec("ring_flash_attn") is not None


def is_for_ring_attention(model: nn.Module, meshes: ModelMeshes) -> bool:
    """Return True when ring_flash_attn can be used: cp_style = "all_gather", both packages, no sinks, no soft cap."""
    has_kernels = has_ring_attention() and importlib.util.find_spec("flash_attn") is not None
    has_sinks = any(hasattr(module, "sinks") for module in model.modules()) or score_cap(model) is not None
    return meshes.cp.size() > 1 and meshes.cp_style == "all_gather" and has_kernels and not has_sinks


def ring_attention(
    cu_seqlens: Tensor, seqlens: list[int], mesh: DeviceMesh, *, heads_per_group: Callable[[Tensor], int]
) -> Attend:
    """All-gather attention by ring_flash_attn, whose backward pass does not attend again.

    `heads_per_group` returns how many heads of a key [1, K, n, D] are gathered at a time.
    """
    ring = _load_ring()
    # On the host, so that reading its lengths does not wait for the device.
    on_host = torch.tensor([*accumulate(seqlens, initial=0)], dtype=torch.int32)
    cu_queries, cu_keys, max_queries, max_keys, key_slice = ring.llama3_flash_attn_prepare_cu_seqlens(
        on_host, causal=True, rank=mesh.get_local_rank(), world_size=mesh.size()
    )
    cu_queries, cu_keys = cu_queries.to(cu_seqlens.device), cu_keys.to(cu_seqlens.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        refuse_sinks("flash_attn_2", layer)
        out: Tensor = ring.llama3_flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            cu_queries,
            cu_keys,
            max_queries,
            max_keys,
            heads_k_stride=heads_per_group(key),
            local_k_slice=key_slice,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_size(layer),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            group=mesh.get_group(),
        )
        return out.unsqueeze(0)

    return attend


@functools.cache
def _load_ring() -> ModuleType:
    """Import the one module of ring_flash_attn that is used, without running the package's `__init__`.

    The `__init__` of ring_flash_attn 0.1.8 imports a name that transformers 5 has moved, for an adapter not used here.
    """
    found = importlib.util.find_spec("ring_flash_attn")
    assert found is not None and found.submodule_search_locations is not None
    package = ModuleType("spmdrl_ring_flash_attn")
    package.__path__ = found.submodule_search_locations
    sys.modules[package.__name__] = package
    try:
        return importlib.import_module(f"{package.__name__}.llama3_flash_attn_varlen")
    except ImportError as error:
        raise UserError(f'model.attention = "flash_attn_2" cannot use ring_flash_attn ({error})') from error


Style = Literal["all_gather", "ulysses"]


class ContextRanks(NamedTuple):
    """The ranks that share the tokens of a micro-batch, and how they attend to each other's."""

    mesh: DeviceMesh
    style: Style

    @classmethod
    def of(cls, meshes: ModelMeshes) -> ContextRanks | None:
        """Take them from a model's meshes; None is this rank alone."""
        return cls(meshes.cp, meshes.cp_style) if meshes.cp.size() > 1 else None


# Limit on the gathered keys and values of a group of heads; a single head may exceed it.
HEAD_GROUP_BYTES = 256 * 2**20


def context_problems(num_heads: int, num_kv_heads: int, cp: int, style: Style) -> Iterator[str]:
    """Yield a sentence for each number of heads that cannot be split over `cp` ranks."""
    if style == "all_gather":
        return
    setting = f'parallel.cp = {cp} with parallel.cp_style = "ulysses"'
    instead = 'set parallel.cp_style to "all_gather" or change parallel.cp'
    if num_heads % cp:
        yield f"{setting} needs a multiple of {cp} attention heads, but the model has {num_heads}; {instead}"
    if num_kv_heads % cp and cp % num_kv_heads:
        yield (
            f"{setting} needs a number of key-value heads that is a multiple or a divisor of {cp}, but the model has "
            f"{num_kv_heads}; {instead}"
        )


def context_attention(
    cu_seqlens: Tensor,
    seqlens: list[int],
    kernel: Kernel,
    mesh: DeviceMesh,
    *,
    style: Style,
    blocks: Sequence[Block] = (),
) -> Attend:
    """Causal attention within whole sequences, for this rank's chunk of n tokens.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host; both describe all T
    tokens, and R divides T. The function returned takes query [1, H, n, D], key and value [1, K, n, D] of this rank and
    gives [1, n, H, D]. Gradients of queries, keys and values are complete; the gradient of the layer's sinks is this
    rank's part, to be summed over the ranks. The tokens of each of the `blocks` among the T, which are in order, see
    each other as well, for which the style must be "ulysses".
    """
    assert sum(seqlens) % mesh.size() == 0, f"{sum(seqlens)} tokens cannot be split into {mesh.size()} equal chunks"
    if style == "ulysses":
        causal = causal_attention(SequenceLayout(seqlens, cu_seqlens), kernel)
        return UlyssesAttention(seeing_blocks(causal, seqlens, blocks, kernel) if blocks else causal, mesh)
    assert not blocks, "a chunk could divide a block: preflight refuses it"
    heads_per_group = functools.partial(_heads_per_group, sum(seqlens))
    num_tokens = sum(seqlens) // mesh.size()

    @functools.cache
    def chunk_view(window: int | None) -> _ChunkView:
        chunks = [_sequences_in_chunk(seqlens, rank * num_tokens, num_tokens, window) for rank in range(mesh.size())]
        rank = mesh.get_local_rank()
        sent = _tokens_to_send([earlier for _, earlier in chunks], num_tokens)
        mine, earlier = chunks[rank]
        offsets = cumulative(mine, cu_seqlens.device)
        assert kernel != "invariant", "true_on_policy = true was not refused with parallel.cp"
        attend = causal_attention(SequenceLayout(mine, offsets, (earlier,)), kernel)
        send = [slice(num_tokens - count, num_tokens) for count in sent[rank]]
        return _ChunkView(attend, send, receive=[by_sender[rank] for by_sender in sent])

    gathered = _AllGatherAttention(chunk_view, heads_per_group, mesh)
    if not (kernel == "flash_attn_2" and has_ring_attention()):
        return gathered
    ring = ring_attention(cu_seqlens, seqlens, mesh, heads_per_group=heads_per_group)  # which cannot cap scores

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        has_ring = layer.softcap is None and has_flash(kernel, q.shape[-1], layer)
        return (ring if has_ring else gathered)(q, k, v, layer)

    return attend


def context_tree_attention(
    tree: PrefixTree, kernel: Kernel, mesh: DeviceMesh, *, style: Style, device: torch.device
) -> Attend:
    """`context_attention` over a prefix tree, for this rank's chunk of its rows; R divides their number."""
    if style == "ulysses":
        return UlyssesAttention(tree_attention(tree, kernel, device), mesh)
    ranks, rank, num_tokens = mesh.size(), mesh.get_local_rank(), len(tree.tokens) // mesh.size()

    @functools.cache
    def chunk_view(window: int | None) -> _ChunkView:
        edges = pairwise(range(0, len(tree.tokens) + 1, num_tokens))
        chunks = [chunk_of_tree(tree, chunk, window, device) for chunk in edges]
        seen = torch.zeros(ranks, ranks, num_tokens, dtype=torch.bool)  # [who sees, whose, token of the chunk]
        for by_receiver, (_, keys) in zip(seen, chunks, strict=True):
            by_receiver.view(-1)[keys] = True
        layout, keys = chunks[rank]
        places = (seen[rank].flatten().cumsum(0) - 1)[keys].to(device)  # of the keys, among those received and own
        seen.diagonal().fill_(False)
        causal = causal_attention(layout, kernel)
        return _ChunkView(
            lambda q, k, v, layer: causal(q, k[places], v[places], layer),
            send=[tokens.nonzero().flatten().to(device) for tokens in seen[:, rank]],
            receive=seen[rank].sum(1).tolist(),
        )

    return _AllGatherAttention(chunk_view, functools.partial(_heads_per_group, len(tree.rows)), mesh)


def gather_tokens(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the [n, ...] values of each rank's tokens into [T, ...] for all tokens, on every rank.

    The backward pass takes this rank's part of the gradient without summing over ranks, because every rank computes
    the same loss from the whole.
    """
    return _GatherTokens.apply(local, mesh)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.num_tokens, ctx.rank = len(local), mesh.get_local_rank()
        whole = local.new_empty(mesh.size() * len(local), *local.shape[1:])
        gather_flat(mesh, whole, local.contiguous())
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(0, ctx.rank * ctx.num_tokens, ctx.num_tokens), None


def _swap(blocks: Tensor, mesh: DeviceMesh) -> Tensor:
    """Send block r of [R, ...] to rank r; the result is in the order of the ranks."""
    one_each = [1] * mesh.size()
    return exchange(blocks, one_each, one_each, mesh)


def tokens_for_heads(features: Sequence[Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """Exchange this rank's tokens for its share of the heads: each [n, W], ordered by head, gives [T, W / R]."""
    by_rank = [x.unflatten(-1, (mesh.size(), -1)).transpose(0, 1) for x in features]
    everything = _swap(torch.cat(by_rank, dim=-1), mesh).flatten(0, 1)
    return everything.split([x.shape[-1] for x in by_rank], dim=-1)


def heads_for_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchange back what is the same for each head: [T, W / R] gives [n, W]."""
    return _swap(x.unflatten(0, (mesh.size(), -1)), mesh).transpose(0, 1).flatten(1)


# --- which keys a chunk sees -----------------------------------------------------------------------------------------


def _sequences_in_chunk(seqlens: list[int], start: int, num_tokens: int, window: int | None) -> tuple[list[int], int]:
    """Return (tokens of each sequence inside the chunk, tokens before the chunk that its queries see).

    The chunk is `num_tokens` tokens from `start`. Tokens before it belong to the first sequence inside it.
    """
    inside, earlier = [], 0
    for first, end in pairwise(accumulate(seqlens, initial=0)):
        tokens = min(end, start + num_tokens) - max(first, start)
        if tokens > 0:
            inside.append(tokens)
            earlier += max(0, start - first)
    return inside, earlier if window is None else min(earlier, window - 1)


def _tokens_to_send(earlier: list[int], num_tokens: int) -> list[list[int]]:
    """Return [sender][receiver] numbers of tokens; `earlier` [R] counts those each rank sees before its chunk.

    The earlier tokens reach up to the receiver's chunk without a gap, so every sender sends the end of its own chunk.
    """
    ranks = range(len(earlier))

    def tokens(sender: int, receiver: int) -> int:
        between = (receiver - sender - 1) * num_tokens
        return min(num_tokens, max(0, earlier[receiver] - between)) if sender < receiver else 0

    return [[tokens(sender, receiver) for receiver in ranks] for sender in ranks]


# --- the two styles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ChunkView:
    """The attention of this rank's queries under one window, and the tokens that ranks exchange for it."""

    attend: CausalAttention
    send: Sequence[slice | Tensor]  # [R] tokens of this chunk for each rank
    receive: list[int]  # [R] tokens that each rank sends, in the order of the tokens


@dataclass(frozen=True, slots=True)
class _AllGatherAttention:
    """Attend one group of heads after the other: receive its keys and values, attend, and free them.

    The backward pass receives them and attends again, so only local tensors are saved for it.
    """

    chunk_view: Callable[[int | None], _ChunkView]  # for a window
    heads_per_group: Callable[[Tensor], int]  # for a key
    mesh: DeviceMesh

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        view = self.chunk_view(layer.window)
        kv_heads = self.heads_per_group(key)
        heads = kv_heads * query.shape[1] // key.shape[1]

        def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            keys_values = _with_earlier_tokens(torch.stack((key, value)).permute(2, 0, 1, 3), view, self.mesh)
            k, v = keys_values.unbind(1)
            return view.attend(query.transpose(0, 1), k, v, replace(layer, sinks=sinks))

        groups = zip(
            query.squeeze(0).split(heads),
            key.squeeze(0).split(kv_heads),
            value.squeeze(0).split(kv_heads),
            [None] * (len(key[0]) // kv_heads) if layer.sinks is None else layer.sinks.split(heads),
            strict=True,
        )
        outputs = [checkpoint(attend, *group, use_reentrant=False, preserve_rng_state=False) for group in groups]
        return torch.cat(outputs, dim=1).unsqueeze(0)


def _heads_per_group(total_tokens: int, key: Tensor) -> int:
    """Return the most heads of key [1, K, n, D] that divide K and keep within HEAD_GROUP_BYTES.

    Bytes are counted for the tokens of all ranks, not for those this rank receives: all ranks need as many groups. Of
    a tree they are those of whole sequences, because each node gets a copy of the keys above it.
    """
    num_heads, head_dim = key.shape[1], key.shape[3]
    head_bytes = 2 * total_tokens * head_dim * key.itemsize
    allowed = max(1, HEAD_GROUP_BYTES // head_bytes)
    return max(heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads <= allowed)


def _with_earlier_tokens(local: Tensor, view: _ChunkView, mesh: DeviceMesh) -> Tensor:
    """Put the values of the earlier tokens that this rank's queries see before its own values [n, ...]."""
    sent = [local[tokens] for tokens in view.send]
    return torch.cat([exchange(torch.cat(sent), [*map(len, sent)], view.receive, mesh), local])


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """Exchange tokens for heads, attend over all tokens of this rank's heads, and exchange back."""

    attend: CausalAttention
    mesh: DeviceMesh

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        ranks, num_heads, num_tokens = self.mesh.size(), query.shape[1], query.shape[2]
        for problem in context_problems(num_heads, key.shape[1], ranks, "ulysses"):
            raise UserError(problem)
        # Ranks that share a key-value head each get a copy of it.
        copies = max(1, ranks // key.shape[1])
        key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
        # [R, n, heads of one rank, D]: one exchange carries all three.
        by_rank = [x.squeeze(0).unflatten(0, (ranks, -1)).transpose(1, 2) for x in (query, key, value)]
        everything = _swap(torch.cat(by_rank, dim=2), self.mesh).flatten(0, 1)
        q, k, v = everything.split([x.shape[2] for x in by_rank], dim=1)
        sinks = None if layer.sinks is None else layer.sinks.chunk(ranks)[self.mesh.get_local_rank()]
        out = self.attend(q, k, v, replace(layer, sinks=sinks))
        return _swap(out.unflatten(0, (ranks, num_tokens)), self.mesh).transpose(0, 1).flatten(1, 2).unsqueeze(0)
