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
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spmdrl.dist.collectives import gather_flat
from spmdrl.model.attention import Attend, Kernel
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
        attend = _varying_attention([(length, length) for length in seqlens], kernel, cu_seqlens.device)
        return _HeadsForTokens(attend, mesh)
    if kernel == "flash_attn_2" and importlib.util.find_spec("ring_flash_attn"):
        return _ring_attention(cu_seqlens, seqlens, mesh)
    num_tokens = sum(seqlens) // mesh.size()

    @functools.cache
    def view(window: int | None) -> _View:
        chunks = [_visible(seqlens, rank * num_tokens, num_tokens, window) for rank in range(mesh.size())]
        rank = mesh.get_local_rank()
        lent = _lent_tokens([keys - queries for ((queries, keys), *_) in chunks], num_tokens)
        attend = _varying_attention(chunks[rank], kernel, cu_seqlens.device)
        return _View(attend, send=lent[rank], receive=[by_lender[rank] for by_lender in lent])

    return _KeysComeToQueries(view, sum(seqlens), mesh)


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


def _visible(seqlens: list[int], start: int, num_tokens: int, window: int | None) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence that touches the chunk of `num_tokens` at `start`, in tokens.

    The keys end where the queries do, and are more only in the first sequence: by its tokens before the chunk that
    the chunk's first query sees.
    """
    seen = []
    for first, end in pairwise(accumulate(seqlens, initial=0)):
        queries = min(end, start + num_tokens) - max(first, start)
        if queries > 0:
            before = max(0, start - first)
            seen.append((queries, queries + (before if window is None else min(before, window - 1))))
    return seen


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

    attend: _AttendVarying
    send: list[int]  # [R] tokens at the end of this chunk that go to each rank
    receive: list[int]  # [R] tokens that come from each, in the order of the tokens


@dataclass(frozen=True, slots=True)
class _KeysComeToQueries:
    """Each group of heads borrows its keys and values, attends, and forgets them; the backward borrows them again.

    What is kept for the backward is what is local, so the attention of a group is computed once more there.
    """

    view: Callable[[int | None], _View]  # of a window
    total_tokens: int
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
        kv_heads = _heads_per_group(key, self.total_tokens)
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


def _heads_per_group(key: Tensor, total_tokens: int) -> int:
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

    attend: _AttendVarying
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


# --- attention of one rank, where sequences may have more keys than queries ------------------------------------------

# (q [tokens, heads, D], k, v [key tokens, kv heads, D], scale=, window=, sinks= [heads] or None) -> as q.
_AttendVarying = Callable[..., Tensor]


def _varying_attention(lengths: list[tuple[int, int]], kernel: Kernel, device: torch.device) -> _AttendVarying:
    """Attention of sequences end to end with these (queries, keys) tokens; the last of both are the same token."""
    if kernel == "sdpa":
        return functools.partial(_sdpa_in_runs, lengths)
    run, layout = _load_varlen(kernel), _layout(lengths, device)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
        _refuse_sinks(kernel, sinks)
        return run(q, k, v, layout, scale, _sees(window))

    return attend


class _Layout(NamedTuple):
    """Where sequences lie among queries and keys, in the order in which kernels take it."""

    cu_queries: Tensor  # [sequences + 1] int32, as cu_seqlens
    cu_keys: Tensor
    max_queries: int
    max_keys: int


def _layout(lengths: list[tuple[int, int]], device: torch.device) -> _Layout:
    queries, keys = zip(*lengths, strict=True)
    cu_queries, cu_keys = (
        torch.tensor([*accumulate(x, initial=0)], dtype=torch.int32, device=device) for x in (queries, keys)
    )
    return _Layout(cu_queries, cu_keys, max(queries), max(keys))


def _sees(window: int | None) -> tuple[int, int]:
    """How far back and ahead of itself a token sees, as kernels count it."""
    return (-1, 0) if window is None else (window - 1, 0)


def _refuse_sinks(kernel: Kernel, sinks: Tensor | None) -> None:
    if sinks is not None:
        raise UserError(
            f'model.attention = "{kernel}" under context parallelism has no attention sinks, '
            'and this model uses them; set it to "sdpa"'
        )


def _sdpa_in_runs(
    lengths: list[tuple[int, int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """One batched call for each run of neighbours of equal lengths."""
    runs = [(queries, keys, sum(1 for _ in run)) for (queries, keys), run in groupby(lengths)]
    q_rows = q.split([queries * count for queries, _, count in runs])
    k_rows, v_rows = (x.split([keys * count for _, keys, count in runs]) for x in (k, v))
    outputs = []
    for rows, (_, _, count) in zip(zip(q_rows, k_rows, v_rows, strict=True), runs, strict=True):
        batch = [x.unflatten(0, (count, -1)).transpose(1, 2) for x in rows]
        outputs.append(_causal_sdpa(*batch, scale=scale, window=window, sinks=sinks).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [B, H, queries, D], k and v [B, K, keys, D]; the last query and the last key are the same token."""
    queries, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    if sinks is None and queries == keys and (window is None or window >= keys):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    token = torch.arange(keys, device=q.device)
    distance = token[keys - queries :, None] - token
    mask = (distance >= 0) & (distance < (keys if window is None else window))
    if sinks is not None:
        # A sink is one more key of zeros, whose logit is given and whose value is zero.
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf).expand(len(sinks), -1, -1)
        mask = torch.cat([bias, sinks.to(q.dtype)[:, None, None].expand(-1, queries, 1)], dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _load_varlen(kernel: Kernel) -> Callable[[Tensor, Tensor, Tensor, _Layout, float, tuple[int, int]], Tensor]:
    """A CUDA kernel as (q, k, v, layout, scale, sees) -> [tokens, heads, D].

    All of them let the last query of a sequence see up to its last key, which is what a chunk's own queries need.
    """
    try:
        if kernel == "varlen":
            from torch.nn.attention.varlen import varlen_attn

            def run(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, scale: float, sees: tuple[int, int]) -> Tensor:
                groups = q.shape[1] // k.shape[1]
                # Repeated, not enable_gqa: torch 2.11 has no such argument.
                k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
                out = varlen_attn(q, k, v, *layout, scale=scale, window_size=sees)
                assert isinstance(out, Tensor)  # it was not asked for anything besides
                return out

            return run
        if kernel == "flash_attn_2":
            from flash_attn import flash_attn_varlen_func
        else:
            from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise UserError(f'model.attention = "{kernel}" needs a package that is not installed ({error})') from error
    deterministic = torch.are_deterministic_algorithms_enabled()
    return lambda q, k, v, layout, scale, sees: flash_attn_varlen_func(
        q, k, v, *layout, softmax_scale=scale, causal=True, window_size=sees, deterministic=deterministic
    )


# --- ring_flash_attn -------------------------------------------------------------------------------------------------


def _ring_attention(cu_seqlens: Tensor, seqlens: list[int], mesh: DeviceMesh) -> Attend:
    """The same exchange of keys by the package ring_flash_attn, whose backward need not attend again."""
    ring = _load_ring()
    # On the host, where its lengths are read without waiting for the device.
    on_host = torch.tensor([*accumulate(seqlens, initial=0)], dtype=torch.int32)
    cu_queries, cu_keys, max_queries, max_keys, key_slice = ring.llama3_flash_attn_prepare_cu_seqlens(
        on_host, causal=True, rank=mesh.get_local_rank(), world_size=mesh.size()
    )
    cu_queries, cu_keys = cu_queries.to(cu_seqlens.device), cu_keys.to(cu_seqlens.device)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _refuse_sinks("flash_attn_2", sinks)
        out = ring.llama3_flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            cu_queries,
            cu_keys,
            max_queries,
            max_keys,
            heads_k_stride=_heads_per_group(key, sum(seqlens)),
            local_k_slice=key_slice,
            softmax_scale=scale,
            causal=True,
            window_size=_sees(window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            group=mesh.get_group(),
        )
        return out.unsqueeze(0)

    return attend


@functools.cache
def _load_ring() -> ModuleType:
    """The one module of ring_flash_attn that is used, without the package's `__init__`.

    ring_flash_attn 0.1.8 imports, for an adapter that is not used here, a name that transformers 5 has moved.
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
