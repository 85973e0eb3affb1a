"""log_softmax at each next token and its entropy, by an online softmax over tiles of logits, never [T, V].

Both sides of the shift by one between hidden states and the tokens that they predict are here: `predicting_tokens` and
`predicted_by`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import gather_flat, sum_over
from spmdrl.model import logits_tile
from spmdrl.model.linear import add_product, adds_products, linear, outer
from spmdrl.model.logits_tile import GradientTerms, Scale, Tile

# Logits in a tile. On a CPU a tile this small stays in the cache, and the allocator reuses its memory. Larger ones are
# returned to the operating system: with tiles twice as large, page faults took up to half of the time. On CUDA a
# bfloat16 tile has 34 MB, and stays in the 50 MB of an H100's or H200's L2 cache between the product that writes it and
# the kernel that reads it. A smaller one might leave the device waiting for launches: with hidden states of 1,024, the
# product takes 35 microseconds at the peak of 989 TFLOP/s. The sizes on CUDA are this arithmetic; no others were tried.
# With these an H100 spends 6 ms of a step of 264 in the kernels that reduce tiles (docs/gpu.md).
TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
# A tile of few tokens is not wider than this: backward holds float32 gradients of its columns' weights.
TILE_COLUMNS = {"cpu": 4096, "cuda": 8192}
# Columns of a tile come in multiples of this: on CUDA every row begins a cache line of 128 bytes, as the fastest
# products and loads require.
COLUMNS_MULTIPLE = {"cpu": 1, "cuda": 64}

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [..., D], weight [V, D], bias [V] give [..., V]


@dataclass(frozen=True, slots=True)
class Head:
    """The linear layer that turns hidden states into logits, and how it is tiled."""

    linear: Linear
    columns: int | None = None  # vocabulary entries in a tile of logits; None: as many as a tile has room for
    tile: Tile | None = None  # None: the implementation for the device of the logits

    def slabs(self, vocabulary: int, chunk: int, device_type: str) -> list[slice]:
        """Split the vocabulary into the parts that are computed one after the other, for tiles of `chunk` tokens."""
        multiple = COLUMNS_MULTIPLE[device_type]
        fitting = max(1, TILE_ELEMENTS[device_type] // chunk // multiple) * multiple
        return slices_of(vocabulary, self.columns or min(fitting, TILE_COLUMNS[device_type]))

    def tile_on(self, device_type: str) -> Tile:
        """Return what reduces tiles and computes their gradients on this kind of device."""
        return self.tile or _tile_of(device_type)


def _tile_of(device_type: str) -> Tile:
    if device_type != "cuda":
        return logits_tile
    from spmdrl.model import logits_tile_triton  # torch brings Triton along only where it is built for CUDA

    return logits_tile_triton


FAST_HEAD = Head(linear)


def predicting_tokens(wanted: Tensor, positions: Tensor) -> Tensor:
    """Find the tokens of a micro-batch that predict a wanted one, which is the next: [N] int64, their places.

    wanted (bool) and positions are [T]; positions restart at 0 in every sequence, whose first token none predicts.
    """
    return torch.nonzero(wanted[1:] & (positions[1:] != 0)).flatten()


def predicted_by(tokens: Tensor) -> Tensor:
    """Return the places of the tokens that these predict, both [N] int64: of each the next one."""
    return tokens + 1


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, head: Head, others: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return logprobs [N] of targets [N] under softmax of logits [N, V], and those of others [N, K].

    They have the bits of `next_token_logprobs`, and of `next_token_logprobs_of`, with the same head, when its tiles
    have a fixed number of columns.
    """
    tile, slabs = head.tile_on(logits.device.type), head.slabs(logits.shape[1], 1, logits.device.type)

    def extended(before: Tensor | None, slab: slice) -> Tensor:
        part = logits[:, slab].clone(memory_format=torch.contiguous_format)
        return tile.summary(part, targets, slab.start, Scale(), before)

    summary = over_slabs(slabs, extended)
    if others is None:
        return scores_of(summary)[0], None
    z = logits_tile.z_at(logits, others, Scale())
    return scores_of(summary)[0], ((z - summary[0]) - summary[1].log()).T


def over_candidates(
    logprobs: Tensor, entropy: Tensor, candidates: Tensor, of_candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """Change logprobs [N] and entropy [N], of tokens in the whole vocabulary, to those among their candidates [N, K]
    alone, which are -1 where there are fewer; a row without any stays.

    `of_candidates` [N, K] are the logprobs of these in the whole vocabulary.
    """
    exists = candidates >= 0
    has_any = exists.any(-1)
    shares = torch.where(exists, of_candidates, torch.where(has_any, -torch.inf, 0.0)[:, None])
    total = shares.logsumexp(-1)
    log_p = torch.where(exists, of_candidates - total[:, None], 0.0)
    of_set = -(torch.where(exists, log_p.exp(), 0.0) * log_p).sum(-1)
    return torch.where(has_any, logprobs - total, logprobs), torch.where(has_any, of_set, entropy)


def place_at(places: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size] with values [N] at places [N] and 0 elsewhere."""
    return values.new_zeros(size).index_copy(0, places, values)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How log-probabilities follow from hidden states [N, D] and a head, weight [V, D] and bias [V].

    Only one tile of logits exists at a time: at most `chunk` tokens by as much of the vocabulary as fits.

    With a `vocabulary` mesh of R ranks, each rank passes its own rows of the head in mesh order, weight [V/R, D] and
    bias [V/R], and the same hidden states and targets. All of its ranks must call what takes these options, and its
    backward pass, together. The results and the gradient of hidden are then complete on every rank; the gradients of
    weight and bias are those of the rank's own rows.
    """

    scale: Scale
    chunk: int
    vocabulary: DeviceMesh | None = None

    def start(self, weight: Tensor) -> int:
        """Return the entry of the vocabulary of this rank's first row."""
        return 0 if self.vocabulary is None else self.vocabulary.get_local_rank() * len(weight)

    def rows_of(self, targets: Tensor, weight: Tensor) -> Tensor:
        """Return which of this rank's rows of the head are targets [N]; those of other ranks are before or after."""
        return targets if self.vocabulary is None else targets - self.start(weight)


def next_token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions, head: Head = FAST_HEAD
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [N], entropy [N]), float32 nats: of token targets[i], and of the distribution it came from.

    Backward computes the tiles of logits again.
    """
    rows = options.rows_of(targets, weight)
    logprobs, entropy, _ = _TiledHead.apply(hidden, weight, bias, rows, None, options, head)
    return logprobs, entropy


def next_token_logprobs_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    others: Tensor,
    options: HeadOptions,
    head: Head = FAST_HEAD,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `next_token_logprobs`, and the logprobs [N, K] of other tokens `others` [N, K].

    Gradients come from all three.
    """
    start = options.start(weight)
    scores: tuple[Tensor, Tensor, Tensor] = _TiledHead.apply(
        hidden, weight, bias, targets - start, others - start, options, head
    )
    return scores


class _TiledHead(torch.autograd.Function):
    """Both functions above, with targets and others counted from the first row of `weight`; they may lie outside of it.

    Without others their logprobs are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        others: Tensor | None,
        options: HeadOptions,
        head: Head,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        chunk = max(1, min(options.chunk, len(hidden)))
        slabs, tile = head.slabs(len(weight), chunk, hidden.device.type), head.tile_on(hidden.device.type)
        chunks = slices_of(len(hidden), chunk)

        def extended(rows: slice, before: Tensor | None, slab: slice) -> Tensor:
            logits = head.linear(hidden[rows], weight[slab], part_of(bias, slab))
            z = None if others is None else logits_tile.z_at(logits, others[rows] - slab.start, options.scale)
            after = tile.summary(logits, targets[rows], slab.start, options.scale, part_of(before, slice(4)))
            if z is None:
                return after
            return torch.cat([after, z if before is None else z + before[4:]])

        num_others = 0 if others is None else others.shape[1]
        summary = torch.empty(4 + num_others, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in chunks:
            summary[:, rows] = over_slabs(slabs, functools.partial(extended, rows))
        if options.vocabulary is not None:
            summary = merged_over(options.vocabulary, logits_tile.merged, summary)
        logprobs, entropy, log_normalizer = scores_of(summary[:4])
        ctx.save_for_backward(hidden, weight, bias, targets, others, log_normalizer, entropy)
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in backward
        ctx.options, ctx.chunks, ctx.slabs, ctx.head, ctx.tile = options, chunks, slabs, head, tile
        return logprobs, entropy, None if others is None else ((summary[4:] - summary[0]) - summary[1].log()).T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, others, log_normalizer, entropy = ctx.saved_tensors
        scale: Scale = ctx.options.scale
        by_logprob = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / scale.temperature
        by_entropy = None if grad_entropy is None else grad_entropy / scale.temperature

        of_tokens = tokens = None
        if grad_others is not None:
            # All tokens share one softmax; each one's own logit is added at its place, and none is a tile's target.
            of_tokens = torch.cat([by_logprob[:, None], grad_others / scale.temperature], 1)
            tokens, by_logprob = torch.cat([targets[:, None], others], 1), of_tokens.sum(1)
            targets = torch.full_like(targets, -1)
        terms = GradientTerms(log_normalizer, entropy, by_logprob, by_entropy)

        def of_tile(rows: slice, slab: slice) -> Tensor:
            logits = ctx.head.linear(hidden[rows], weight[slab], part_of(bias, slab))
            if tokens is None or of_tokens is None:
                gradient: Tensor = ctx.tile.gradient(logits, targets[rows], slab.start, scale, terms.of(rows))
                return gradient
            places = tokens[rows] - slab.start
            slope = None if scale.softcap is None else scale.slope(logits_tile.z_at(logits, places, scale).T)
            gradient = ctx.tile.gradient(logits, targets[rows], slab.start, scale, terms.of(rows))
            logits_tile.add_at(gradient, places, of_tokens[rows] if slope is None else of_tokens[rows] * slope)
            return gradient

        tiles = (ctx.needs_input_grad[:3], ctx.chunks, ctx.slabs, ctx.options.vocabulary)
        return *summed_gradients(hidden, weight, bias, of_tile, *tiles), *(None,) * 4


def summed_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of_tile: Callable[[slice, slice], Tensor],
    needed: Sequence[bool],
    chunks: list[slice],
    slabs: list[slice],
    vocabulary: DeviceMesh | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden [N, D], weight [V, D] and bias [V], None where they are not needed.

    of_tile(rows, slab) is the gradient by a tile of logits, in the dtype of hidden. Tiles are summed in float32; for
    the head, only the gradients of one slab exist at a time.
    """
    needs_hidden, needs_weight, needs_bias = needed
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_hidden else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
    in_products = adds_products(hidden.device.type, hidden.dtype)

    # A function, so that what one slab needs is free before the next begins.
    def add_slab(slab: slice) -> None:
        slab_weight = weight[slab]
        transposed = None if in_products else slab_weight.T.contiguous()
        new = torch.empty if chunks else torch.zeros  # the first chunk overwrites what is there
        slab_grad_weight = new(slab_weight.shape if needs_weight else 0, dtype=torch.float32, device=weight.device)
        slab_grad_bias = slab_grad_weight.new_zeros(len(slab_weight) if needs_bias else 0)
        for rows in chunks:
            grad = of_tile(rows, slab)
            if grad_hidden is not None:
                if transposed is None:
                    add_product(grad_hidden[rows], grad, slab_weight)
                else:
                    grad_hidden[rows].add_(linear(grad, transposed))
            if grad_weight is not None:
                is_first = rows.start == 0
                if in_products:
                    add_product(slab_grad_weight, grad.t(), hidden[rows], is_first=is_first)
                else:
                    put = slab_grad_weight.copy_ if is_first else slab_grad_weight.add_
                    put(outer(grad, hidden[rows]))
            if grad_bias is not None:
                slab_grad_bias += grad.sum(0, dtype=torch.float32)
        if grad_weight is not None:
            grad_weight[slab] = slab_grad_weight
        if grad_bias is not None:
            grad_bias[slab] = slab_grad_bias

    for slab in slabs:
        add_slab(slab)
    if grad_hidden is not None:
        whole = grad_hidden if vocabulary is None else sum_over(vocabulary, grad_hidden)
        grad_hidden = whole.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def slices_of(length: int, size: int) -> list[slice]:
    """Split a length into slices of a size; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def over_slabs(slabs: list[slice], extended: Callable[[Tensor | None, slice], Tensor]) -> Tensor:
    """Summarise the whole vocabulary: `extended` adds a slab to the summary of those before it."""
    first, *others = slabs
    return functools.reduce(extended, others, extended(None, first))


def part_of(values: Tensor | None, part: slice) -> Tensor | None:
    """Return a part of what may be absent."""
    return None if values is None else values[part]


def scores_of(summary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn a summary [4, N] into (logprobs of the targets, entropy, log of the normalizer), each [N]."""
    largest, total, weighted, target = summary
    log_total = total.log()
    return (target - largest) - log_total, log_total - weighted / total, largest + log_total


def merged_over(mesh: DeviceMesh, merge: Callable[[Tensor, Tensor], Tensor], mine: Tensor) -> Tensor:
    """Merge what the ranks have of their parts of the vocabulary; every rank does so in the same order.

    Merges pairs from left to right: torch's sum over many parts adds them in an order that depends on N.
    """
    by_rank = mine.new_empty(mesh.size(), *mine.shape)
    gather_flat(mesh, by_rank.view(-1), mine.view(-1))
    return functools.reduce(merge, by_rank.unbind())
