"""Gated delta rule and causal convolution of packed sequences, each of which starts from its own state.

The rule keeps a matrix S for each head and sequence. With each token S decays, the value that the key k finds in it is
corrected towards v, and the query reads it:

    S <- exp(decay) S;    S <- S + beta k (v - k S)^T;    out = q S

Sequences are cut into chunks. Everything inside a chunk is a few batched products over all chunks of all sequences at
once; only the states go from chunk to chunk. The r-th chunks of all sequences that have so many are one batch, so the
steps are as many as the longest sequence has chunks, however many sequences there are and whatever their lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHUNK_TOKENS = 32
_CHUNK_STEP = 8  # chunks of a micro-batch of short sequences are shorter, in multiples of this
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of S packed sequences, N in all, ordered by their place in their sequence, longest sequence first."""

    size: int  # C, tokens
    batches: list[int]  # how many sequences have a first chunk, a second one, and so on
    places: Tensor  # [T] int64, of each token among the N * C places
    order: Tensor  # [S] int64, the sequences from the longest to the shortest
    ranks: Tensor  # [S] int64, of each sequence in `order`

    @property
    def total(self) -> int:
        """N."""
        return sum(self.batches)


@functools.lru_cache(maxsize=8)  # all layers of a pass ask for the same
@torch.inference_mode(False)  # an engine may ask first, and autograd later
def cut_into_chunks(seqlens: tuple[int, ...], device: torch.device, max_size: int = MAX_CHUNK_TOKENS) -> Chunks:
    """Cut sequences of these lengths; the result's tensors are on `device`."""
    lengths = torch.tensor(seqlens)
    size = min(max_size, -(-max(seqlens) // _CHUNK_STEP) * _CHUNK_STEP)
    order = lengths.argsort(descending=True, stable=True)
    ranks = order.argsort()
    chunks = -(-lengths // size)
    batches = [int((chunks > place).sum()) for place in range(int(chunks.max()))]
    firsts = torch.tensor([*accumulate(batches, initial=0)])
    positions = torch.arange(len(lengths)).repeat_interleave(lengths)
    rank_of_token = ranks[positions]
    within = torch.arange(sum(seqlens)) - (lengths.cumsum(0) - lengths)[positions]
    places = (firsts[within // size] + rank_of_token) * size + within % size
    return Chunks(size, batches, places.to(device), order.to(device), ranks.to(device))


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    seqlens: list[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv] in value's dtype, the states [S, H, Dk, Dv] float32 after each sequence's last token).

    query and key are [T, K, Dk], for heads in groups of H / K; they are normalized here. value is [T, H, Dv], decay
    (a logarithm, at most 0) and beta (0 to 1) are [T, H]. state [S, H, Dk, Dv] is where sequences start; None is 0.
    """
    groups = value.shape[1] // key.shape[1]
    query, key = _unit(query.float()) * query.shape[-1] ** -0.5, _unit(key.float())
    if groups > 1:
        query, key = (x.repeat_interleave(groups, dim=1) for x in (query, key))
    inputs = (query, key, value.float(), decay.float(), beta.float())
    if max(seqlens) == 1:
        out, state = _one_token(*inputs, state)
    else:
        out, state = _by_chunks(*inputs, cut_into_chunks(tuple(seqlens), value.device), state)
    return out.to(value.dtype), state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rule itself, for sequences of one token each."""
    correction = value * beta.unsqueeze(-1)
    if state is None:
        state = key.unsqueeze(-1) * correction.unsqueeze(-2)
    else:
        state = state * decay.exp()[..., None, None]
        correction = correction - (key.unsqueeze(-2) @ state).squeeze(-2) * beta.unsqueeze(-1)
        state = state + key.unsqueeze(-1) * correction.unsqueeze(-2)
    return (query.unsqueeze(-2) @ state).squeeze(-2), state


def _by_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: Chunks,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (_laid_out(x, chunks) for x in (query, key, value, decay.unsqueeze(-1), beta.unsqueeze(-1)))
    total = decay.cumsum(-2)  # [N, H, C, 1], logarithm of the decay since before the chunk's first token
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    # Masked before exp, not after: those of later tokens may overflow, and inf * 0 is nan in the backward pass.
    between = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()  # [N, H, C, C], token from token
    attention = (q @ k.transpose(-1, -2)) * between
    # What each token's correction takes from those before it in the chunk; the diagonal is 1 and is not read.
    system = (k @ k.transpose(-1, -2)) * between * beta
    wanted = torch.cat((v * beta, k * (beta * total.exp())), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    corrections, readings = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    last = total[:, :, -1:]
    parts = (
        corrections,  # to the state as it would be if it were 0 before the chunk
        readings,  # keys with which the corrections read the state before the chunk
        q * total.exp(),
        attention,
        (k * (last - total).exp()).transpose(-1, -2),
        last.exp(),
    )
    if state is None:
        state = v.new_zeros(chunks.batches[0], v.shape[1], k.shape[-1], v.shape[-1])
    else:
        state = state.float()[chunks.order]
    outputs, finished = [], []
    for corrections, readings, q, attention, k, kept in zip(*(x.split(chunks.batches) for x in parts), strict=True):
        state, ended = state.split((len(q), len(state) - len(q)))
        finished.append(ended)
        corrected = corrections - readings @ state
        outputs.append(q @ state + attention @ corrected)
        state = state * kept + k @ corrected
    finished.append(state)
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.places]
    return out, torch.cat(finished[::-1])[chunks.ranks]


def _laid_out(x: Tensor, chunks: Chunks) -> Tensor:
    """Lay tokens [T, H, D] out in their chunks: [N, H, C, D], 0 where a chunk has no token."""
    rows = x.new_zeros(chunks.total * chunks.size, *x.shape[1:]).index_copy(0, chunks.places, x)
    return rows.unflatten(0, (-1, chunks.size)).transpose(1, 2).contiguous()


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seqlens: list[int], before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence with the tokens before: return (out [T, C], [S, C, W - 1] inputs for what comes next).

    x is [T, C], weight [C, W]. before [S, C, W - 1] are the inputs before each sequence; None is 0.
    """
    num_before = weight.shape[1] - 1
    places = _places_after_gaps(tuple(seqlens), num_before, x.device)
    padded = x.new_zeros(len(x) + len(seqlens) * num_before, x.shape[1])
    if before is not None:
        padded = padded.index_copy(0, places.gaps, before.to(x.dtype).transpose(1, 2).flatten(0, 1))
    padded = padded.index_copy(0, places.tokens, x)
    out = F.conv1d(padded.t().unsqueeze(0).to(weight.dtype), weight.unsqueeze(1), bias, groups=len(weight))[0].t()
    left = padded[places.last].unflatten(0, (-1, num_before)).transpose(1, 2)
    return out[places.tokens - num_before].to(x.dtype), left


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Places of rows when there is a gap before every sequence."""

    tokens: Tensor  # [T] int64
    gaps: Tensor  # [S * gap] int64
    last: Tensor  # [S * gap] int64, the last rows of each sequence with its gap


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _places_after_gaps(seqlens: tuple[int, ...], gap: int, device: torch.device) -> _Gaps:
    lengths = torch.tensor(seqlens)
    index = torch.arange(len(lengths))
    ends = (lengths + gap).cumsum(0)
    tokens = torch.arange(sum(seqlens)) + (index.repeat_interleave(lengths) + 1) * gap
    window = torch.arange(gap)
    gaps = ((ends - lengths - gap).unsqueeze(1) + window).flatten()
    last = ((ends - gap).unsqueeze(1) + window).flatten()
    return _Gaps(tokens.to(device), gaps.to(device), last.to(device))
