"""Attention over sequences that are cut across the ranks of a context-parallel mesh.

The T tokens of a micro-batch lie end to end on R ranks, n = T/R neighbouring tokens on each. Two ways of letting a
query see the keys on other ranks, equal in result:

- "all_gather": queries stay; keys and values that a rank's queries can see come to it, some heads at a time.
- "ulysses": tokens are exchanged for heads, so that each rank has all tokens of some heads.

Each function here that takes a mesh is a collective: every rank of the mesh calls it, in the same order, and data
decides only how many rows move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spmdrl.dist.collectives import gather_flat
from spmdrl.model.attention import Attend
from spmdrl.model.kernels import CausalAttention, Kernel, SequenceLayout, causal_attention
from spmdrl.model.ring import has_ring_attention, ring_attention
from spmdrl.types import UserError

Style = Literal["all_gather", "ulysses"]

# At most so many bytes of gathered keys and values at a time, unless one head alone is more.
HEAD_GROUP_BYTES = 256 * 2**20


def context_problems(num_heads: int, num_kv_heads: int, cp: int, style: Style) -> Iterator[str]:
    """Sentences about a model whose heads cannot be split over `cp` ranks."""
    if style == "all_gather":
        return
    setting = f'parallel.cp = {cp} with parallel.cp_style = "ulysses"'
    instead = 'set parallel.cp_style to "all_gather" or change parallel.cp'
    if num_heads % cp:
        yield f"{setting} gives every rank as many attention heads, but the model has {num_heads}; {instead}"
    if num_kv_heads % cp and cp % num_kv_heads:
        yield (
            f"{setting} needs key-value heads whose number divides it or is divided by it, "
            f"but the model has {num_kv_heads}; {instead}"
        )


def context_attention(
    cu_seqlens: Tensor, seqlens: list[int], kernel: Kernel, mesh: DeviceMesh, *, style: Style
) -> Attend:
    """Causal attention within each whole sequence, for this rank's n tokens of a micro-batch.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host; both are about all T
    tokens, and R divides T. What is returned takes query [1, H, n, D], key and value [1, K, n, D], gives [1, n, H, D],
    and may be given `sinks` [H], a logit of each head that takes part in the softmax and brings no value. Gradients
    are with respect to the rank's own tokens; those of the sinks are a part, whose sum over the ranks is the whole.
    """
    assert sum(seqlens) % mesh.size() == 0, f"{sum(seqlens)} tokens cannot be cut into {mesh.size()} equal chunks"
    if style == "ulysses":
        return _HeadsForTokens(causal_attention(SequenceLayout(seqlens, cu_seqlens), kernel), mesh)
    heads_per_group = functools.partial(_heads_per_group, sum(seqlens))
    if kernel == "flash_attn_2" and has_ring_attention():
        return ring_attention(cu_seqlens, seqlens, mesh, heads_per_group=heads_per_group)
    num_tokens = sum(seqlens) // mesh.size()

    @functools.cache
    def view(window: int | None) -> _View:
        chunks = [_cut(seqlens, rank * num_tokens, num_tokens, window) for rank in range(mesh.size())]
        rank = mesh.get_local_rank()
        lent = _lent_tokens([earlier for _, earlier in chunks], num_tokens)
        mine, earlier = chunks[rank]
        offsets = torch.tensor([*accumulate(mine, initial=0)], dtype=torch.int32, device=cu_seqlens.device)
        attend = causal_attention(SequenceLayout(mine, offsets, earlier), kernel)
        return _View(attend, send=lent[rank], receive=[by_lender[rank] for by_lender in lent])

    return _KeysComeToQueries(view, heads_per_group, mesh)


def gather_tokens(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's [n, ...] values of each token -> [T, ...] of all tokens, on every rank.

    The backward takes the rank's own part of the gradient, without a sum: every rank computes the same loss from the
    whole.
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


class _Exchange(torch.autograd.Function):
    """Blocks of rows to the ranks of the mesh, `send` rows for each in turn; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], mesh: DeviceMesh) -> Tensor:
        ctx.send, ctx.receive, ctx.mesh = send, receive, mesh
        return _exchange(rows, send, receive, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.mesh), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], mesh: DeviceMesh) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=mesh.get_group())
    return received


# --- which keys a chunk sees -----------------------------------------------------------------------------------------


def _cut(seqlens: list[int], start: int, num_tokens: int, window: int | None) -> tuple[list[int], int]:
    """(tokens of each sequence within the chunk of `num_tokens` at `start`, earlier tokens that its queries see).

    The earlier ones are of the first of these sequences, and seen by the chunk's first query.
    """
    inside, earlier = [], 0
    for first, end in pairwise(accumulate(seqlens, initial=0)):
        tokens = min(end, start + num_tokens) - max(first, start)
        if tokens > 0:
            inside.append(tokens)
            earlier += max(0, start - first)
    return inside, earlier if window is None else min(earlier, window - 1)


def _lent_tokens(borrowed: list[int], num_tokens: int) -> list[list[int]]:
    """[lender][borrower] tokens that go from one rank to another; `borrowed` [R] are those before each rank's chunk.

    A rank lends the end of its chunk: what lies before a later chunk begins somewhere and goes on to it.
    """
    ranks = range(len(borrowed))

    def tokens(lender: int, borrower: int) -> int:
        between = (borrower - lender - 1) * num_tokens
        return min(num_tokens, max(0, borrowed[borrower] - between)) if lender < borrower else 0

    return [[tokens(lender, borrower) for borrower in ranks] for lender in ranks]


# --- the two styles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """What this rank's queries see through a window, and what the other ranks' queries see of its keys."""

    attend: CausalAttention
    send: list[int]  # [R] tokens at the end of this chunk that go to each rank
    receive: list[int]  # [R] tokens that come from each, in the order of the tokens


@dataclass(frozen=True, slots=True)
class _KeysComeToQueries:
    """Each group of heads borrows its keys and values, attends, and forgets them; the backward borrows them again.

    What is kept for the backward is what is local, so the attention of a group is computed once more there.
    """

    view: Callable[[int | None], _View]  # of a window
    heads_per_group: Callable[[Tensor], int]  # of a key
    mesh: DeviceMesh

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        view = self.view(window)
        kv_heads = self.heads_per_group(key)
        heads = kv_heads * query.shape[1] // key.shape[1]

        def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            keys_values = _with_borrowed(torch.stack((key, value)).permute(2, 0, 1, 3), view, self.mesh)
            k, v = keys_values.unbind(1)
            return view.attend(query.transpose(0, 1), k, v, scale=scale, window=window, sinks=sinks)

        outputs = [
            checkpoint(attend, q, k, v, s, use_reentrant=False, preserve_rng_state=False)
            for q, k, v, s in zip(
                query[0].split(heads),
                key[0].split(kv_heads),
                value[0].split(kv_heads),
                [None] * (len(key[0]) // kv_heads) if sinks is None else sinks.split(heads),
                strict=True,
            )
        ]
        return torch.cat(outputs, dim=1).unsqueeze(0)


def _heads_per_group(total_tokens: int, key: Tensor) -> int:
    """The most heads of key [1, K, n, D] that divide K and whose keys and values of all tokens are within the bound.

    By the tokens of all ranks, not by those that this one borrows: every rank must have as many groups.
    """
    num_heads, head_dim = key.shape[1], key.shape[3]
    head_bytes = 2 * total_tokens * head_dim * key.itemsize
    allowed = max(1, HEAD_GROUP_BYTES // head_bytes)
    return max(heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads <= allowed)


def _with_borrowed(local: Tensor, view: _View, mesh: DeviceMesh) -> Tensor:
    """Values [n, ...] of this rank's tokens, preceded by those of the earlier tokens that its queries see."""
    lent = torch.cat([local[len(local) - count :] for count in view.send])
    return torch.cat([_Exchange.apply(lent, view.send, view.receive, mesh), local])


@dataclass(frozen=True, slots=True)
class _HeadsForTokens:
    """Every rank gives away its tokens of the other ranks' heads, and attends over all tokens of its own."""

    attend: CausalAttention
    mesh: DeviceMesh

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        ranks, num_heads, num_tokens = self.mesh.size(), query.shape[1], query.shape[2]
        for problem in context_problems(num_heads, key.shape[1], ranks, "ulysses"):
            raise UserError(problem)
        # Ranks that share a key-value head each get a copy of it.
        copies = max(1, ranks // key.shape[1])
        key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
        # [R, n, heads of one rank, D]: one exchange carries all three.
        by_rank = [x[0].unflatten(0, (ranks, -1)).transpose(1, 2) for x in (query, key, value)]
        everything = self._swap(torch.cat(by_rank, dim=2)).flatten(0, 1)
        q, k, v = everything.split([x.shape[2] for x in by_rank], dim=1)
        mine = None if sinks is None else sinks.chunk(ranks)[self.mesh.get_local_rank()]
        out = self.attend(q, k, v, scale=scale, window=window, sinks=mine)
        return self._swap(out.unflatten(0, (ranks, num_tokens))).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _swap(self, blocks: Tensor) -> Tensor:
        """Block r of [R, ...] goes to rank r; what comes is in the order of the ranks."""
        one_each = [1] * self.mesh.size()
        return _Exchange.apply(blocks, one_each, one_each, self.mesh)
