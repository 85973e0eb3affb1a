"""Log-probability and entropy of each next token, without ever holding logits [T, V].

The shift by one between hidden states and the tokens they predict happens here and nowhere else.
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
from spmdrl.model.linear import linear, outer

# Logits in a tile. On a CPU a tile this small stays in the cache, and the allocator reuses its memory. Larger ones are
# returned to the operating system: with tiles twice as large, page faults took up to half of the time.
TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [..., D], weight [V, D], bias [V] give [..., V]

# Replaces -inf, the logit of a forbidden token. Its exp is 0 as well, but 0 times it is 0 instead of nan.
_FORBIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class Head:
    """The linear layer that turns hidden states into logits, and how it is tiled."""

    linear: Linear
    columns: int | None = None  # vocabulary entries in a tile of logits; None: as many as a tile has room for

    def slabs(self, vocabulary: int, chunk: int, device_type: str) -> list[slice]:
        """Split the vocabulary into the parts that are computed one after the other, for tiles of `chunk` tokens."""
        return _slices(vocabulary, self.columns or max(1, TILE_ELEMENTS[device_type] // chunk))


FAST_HEAD = Head(linear)


def predicting_rows(loss_mask: Tensor, positions: Tensor, chunk: slice) -> Tensor:
    """Find the rows of a chunk's hidden states that predict a loss token; none predicts the first of a sequence.

    loss_mask and positions are [T], of all tokens; positions restart at 0 in every sequence. The result is [N] int64,
    counted from the chunk's start. Row i predicts token chunk.start + i + 1, which may be the first one after the
    chunk.
    """
    predicted = slice(chunk.start + 1, chunk.stop + 1)
    return torch.nonzero(loss_mask[predicted] & (positions[predicted] != 0)).flatten()


def logprobs_of_logits(logits: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return logprobs [N] of targets [N] under softmax of logits [N, V].

    They have the bits of `next_token_logprobs` with the same head, when its tiles have a fixed number of columns.
    """
    slabs = head.slabs(logits.shape[1], 1, logits.device.type)

    def summary(slab: slice) -> Tensor:
        return _summary(logits[:, slab].clone(memory_format=torch.contiguous_format), targets - slab.start)

    return _from_summary(_merged([summary(slab) for slab in slabs]))[0]


def place_at(places: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [size] with values [N] at places [N] and 0 elsewhere."""
    return values.new_zeros(size).index_copy(0, places, values)


def next_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    vocabulary: DeviceMesh | None = None,
    head: Head = FAST_HEAD,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [N], entropy [N]), float32 nats: of token targets[i], and of the distribution it came from.

    hidden is [N, D], weight [V, D], bias [V]. Logits are divided by `temperature` in float32. Only one tile of them
    exists at a time: at most `chunk` tokens by as much of the vocabulary as fits. Backward computes them again.

    With a `vocabulary` mesh of R ranks, each rank passes its own rows of the head in mesh order, weight [V/R, D] and
    bias [V/R], and the same hidden states and targets. All of its ranks must call this, and its backward pass,
    together. The results and the gradient of hidden are then complete on every rank; the gradients of weight and bias
    are those of the rank's own rows.
    """
    first_row = 0 if vocabulary is None else vocabulary.get_local_rank() * len(weight)
    return _TiledHead.apply(hidden, weight, bias, targets - first_row, temperature, chunk, vocabulary, head)


class _TiledHead(torch.autograd.Function):
    """`next_token_logprobs`, with targets counted from the first row of `weight`; they may lie outside of it.

    With z the logits and p = softmax(z): d logp_target / dz = onehot - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        vocabulary: DeviceMesh | None,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, min(chunk, len(hidden)))
        chunks = _slices(len(hidden), chunk)
        slabs = head.slabs(len(weight), chunk, hidden.device.type)

        def tile_summary(rows: slice, slab: slice) -> Tensor:
            logits = _logits(hidden[rows], weight[slab], _part(bias, slab), temperature, head)
            return _summary(logits, targets[rows] - slab.start)

        summary = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in chunks:
            summary[:, rows] = _merged([tile_summary(rows, slab) for slab in slabs])
        if vocabulary is not None:
            summary = _merged(_gathered(vocabulary, summary).unbind())
        logprobs, entropy, log_normalizer = _from_summary(summary)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in backward
        ctx.temperature, ctx.chunks, ctx.slabs, ctx.vocabulary = temperature, chunks, slabs, vocabulary
        ctx.head = head
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_logprob = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / ctx.temperature
        by_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        # Gradients are summed over tiles in float32; for the head, only those of one slab exist at a time.
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for slab in ctx.slabs:
            slab_weight, slab_bias = weight[slab], _part(bias, slab)
            transposed = slab_weight.T.contiguous()
            slab_grad_weight = torch.zeros(slab_weight.shape, dtype=torch.float32, device=weight.device)
            slab_grad_bias = slab_grad_weight.new_zeros(len(slab_weight))
            for rows in ctx.chunks:
                logits = _logits(hidden[rows], slab_weight, slab_bias, ctx.temperature, ctx.head)
                log_p = logits.sub_(log_normalizer[rows, None])
                places, slope = targets[rows] - slab.start, _part(by_entropy, rows)
                grad = _grad_logits(log_p, places, entropy[rows], by_logprob[rows], slope).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += linear(grad, transposed)
                if grad_weight is not None:
                    slab_grad_weight += outer(grad, hidden[rows])
                if grad_bias is not None:
                    slab_grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_weight is not None:
                grad_weight[slab] = slab_grad_weight
            if grad_bias is not None:
                grad_bias[slab] = slab_grad_bias
        if grad_hidden is not None:
            whole = grad_hidden if ctx.vocabulary is None else sum_over(ctx.vocabulary, grad_hidden)
            grad_hidden = whole.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, head: Head) -> Tensor:
    return head.linear(hidden, weight, bias).float().div_(temperature)


def _inside(places: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (which of places [N] are columns of a tile [N, width], places clamped to valid columns [N, 1])."""
    return (places >= 0) & (places < width), places.clamp(0, width - 1)[:, None]


def _summary(logits: Tensor, places: Tensor) -> Tensor:
    """Reduce a tile [N, W] of logits z to four numbers per token, [4, N]. Overwrites the logits.

    The rows are: the largest z; the sums of exp(z - largest) and of exp(z - largest) (z - largest); the target's z, or
    0 where places [N] point outside the tile.
    """
    is_inside, columns = _inside(places, logits.shape[1])
    target = logits.gather(-1, columns)[:, 0].where(is_inside, 0.0)
    largest = logits.clamp_min_(_FORBIDDEN).amax(-1)
    exp = logits.sub_(largest[:, None]).exp()
    total = exp.sum(-1)
    return torch.stack([largest, total, exp.mul_(logits).sum(-1), target])


def _merged(parts: Sequence[Tensor]) -> Tensor:
    """Merge the summaries [4, N] of parts of the vocabulary into one.

    In pairs, from left to right: torch's sum over many parts adds them in an order that depends on N.
    """
    return functools.reduce(_merged_pair, parts)


def _merged_pair(one: Tensor, other: Tensor) -> Tensor:
    top = torch.maximum(one[0], other[0])
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    for largest, part_total, part_weighted, _ in (one, other):
        below = largest - top
        scale = below.exp()
        total = total + scale * part_total
        weighted = weighted + scale * (part_weighted + below * part_total)
    return torch.stack([top, total, weighted, one[3] + other[3]])


def _from_summary(summary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn a summary [4, N] into (logprobs of the targets, entropy, log of the normalizer), each [N]."""
    largest, total, weighted, target = summary
    log_total = total.log()
    return (target - largest) - log_total, log_total - weighted / total, largest + log_total


def _gathered(mesh: DeviceMesh, summary: Tensor) -> Tensor:
    """Gather the summaries [4, N] of all R ranks into [R, 4, N]; every rank then merges them in the same order."""
    by_rank = summary.new_empty(mesh.size(), *summary.shape)
    gather_flat(mesh, by_rank.view(-1), summary.view(-1))
    return by_rank


def _grad_logits(
    log_p: Tensor, places: Tensor, entropy: Tensor, by_logprob: Tensor, by_entropy: Tensor | None
) -> Tensor:
    """Gradient of a tile of logits [N, W], from those of logprobs and entropy. Overwrites log_p [N, W]."""
    if by_entropy is None:
        grad = log_p.exp_().mul_(-by_logprob[:, None])
    else:
        p = log_p.clamp_min_(_FORBIDDEN).exp()
        constant = -(by_logprob + by_entropy * entropy)
        grad = log_p.mul_(-by_entropy[:, None]).add_(constant[:, None]).mul_(p)
    is_inside, columns = _inside(places, grad.shape[1])
    return grad.scatter_add_(-1, columns, by_logprob.where(is_inside, 0.0)[:, None])
