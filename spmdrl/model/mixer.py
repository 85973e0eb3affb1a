"""The forward pass of all recurrent layers over packed sequences: a causal convolution, then a rule of the layer's own.

A sequence starts without a state, or continues that of an earlier call.

`recurrent.py` has the layers.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.activations import ACT2FN

from spmdrl.model import gated_delta_cuda
from spmdrl.model.context import heads_for_tokens, tokens_for_heads
from spmdrl.types import PrefixTree

# States of recurrent layers between calls: an engine's, or those of the nodes of a prefix tree.
#
# Nodes of one depth are packed sequences, each of which continues from the state of its parent. So a layer is called
# once for each depth, and hands its states from call to call. Gradients of the children's states add up in their
# parent's.


class LayerStates(Protocol):
    """Memory of recurrent layers between calls: of each of S sequences, by layer."""

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return conv inputs [S, C, kernel - 1] in the layer's dtype and state [S, H, Dk, Dv] float32 to continue from.

        None is to start from nothing.
        """

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        """Take what is left after the last token of each sequence, in the same shapes."""


class _Level(NamedTuple):
    """The S nodes of one depth."""

    rows: Tensor  # [T of the level] int64
    lengths: list[int]  # [S]
    parents: Tensor  # [S] int64, places among the nodes of the level above


class NodeLevels:
    """The nodes of a tree by depth: what a recurrent layer is given in place of the lengths of sequences."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self._tree, self._device = tree, device

    @functools.cached_property
    def levels(self) -> list[_Level]:
        """The levels, roots first."""
        starts = [*accumulate(self._tree.lengths, initial=0)]
        levels: list[list[int]] = []
        found: list[tuple[int, int]] = []  # of each node, its depth and its place among those of this depth
        for node, parent in enumerate(self._tree.parents):
            depth = 0 if parent < 0 else found[parent][0] + 1
            if depth == len(levels):
                levels.append([])
            found.append((depth, len(levels[depth])))
            levels[depth].append(node)
        return [
            _Level(
                torch.cat([torch.arange(starts[node], starts[node + 1]) for node in nodes]).to(self._device),
                [self._tree.lengths[node] for node in nodes],
                torch.tensor([found[self._tree.parents[node]][1] for node in nodes]).to(self._device),
            )
            for nodes in levels
        ]

    @functools.cached_property
    def places(self) -> Tensor:
        """[U] int64, the place of each row where levels lie end to end."""
        return torch.cat([level.rows for level in self.levels]).argsort()


class _OfParents:
    """The states of one layer: a level starts with those that the level above has left."""

    def __init__(self) -> None:
        self.left: tuple[Tensor, Tensor] | None = None
        self.parents: Tensor | None = None

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.left is None:
            return None
        conv, state = self.left
        return conv[self.parents], state[self.parents]

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        self.left = conv, state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seqlens: list[int], before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence with the tokens before: return (out [T, C], [S, C, W - 1] inputs for what comes next).

    x is [T, C], weight [C, W]. before [S, C, W - 1] are the inputs before each sequence; None is 0.
    """
    if before is not None and max(seqlens) == 1:
        return _one_token_each(x, weight, bias, before)
    width = weight.shape[1]
    places = _places(tuple(seqlens), width - 1, x.device)
    rows = x.new_zeros(len(x) + len(seqlens) * (width - 1), x.shape[1])
    if before is not None:
        rows = rows.index_copy(0, places.gaps, before.to(x.dtype).transpose(1, 2).flatten(0, 1))
    rows = rows.index_copy(0, places.tokens, x)
    # Some results are of windows that reach over a boundary; they are not read.
    out = F.conv1d(rows.t().unsqueeze(0).to(weight.dtype), weight.unsqueeze(1), bias, groups=len(weight))[0].t()
    left = rows.index_select(0, places.ends).unflatten(0, (-1, width - 1)).transpose(1, 2)
    return out.index_select(0, places.windows).to(x.dtype), left


def _one_token_each(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat((before.to(x.dtype), x.unsqueeze(-1)), dim=-1)  # [S, C, W]
    out = (window.float() * weight.float()).sum(-1)  # torch's convolution sums in float32 too
    return (out if bias is None else out + bias).to(x.dtype), window[..., 1:]


@dataclass(frozen=True, slots=True)
class _GappedRows:
    """The places of rows where every sequence has a gap before it."""

    tokens: Tensor  # [T] int64
    windows: Tensor  # [T] int64, the first row of each token's window
    gaps: Tensor  # [S * gap] int64
    ends: Tensor  # [S * gap] int64, as many rows at the end of each sequence


@functools.lru_cache(maxsize=8)  # all layers ask for the same
@torch.inference_mode(mode=False)  # an engine may be the first to ask, and a trainer the second
def _places(seqlens: tuple[int, ...], gap: int, device: torch.device) -> _GappedRows:
    lengths = torch.tensor(seqlens)
    windows = torch.arange(sum(seqlens)) + torch.arange(len(lengths)).repeat_interleave(lengths) * gap
    ends = (lengths + gap).cumsum(0)
    gaps, last = ((starts.unsqueeze(1) + torch.arange(gap)).flatten() for starts in (ends - lengths - gap, ends - gap))
    return _GappedRows(*(places.to(device) for places in (windows + gap, windows, gaps, last)))


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seqlens: list[int],
    states: LayerStates | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return `causal_conv` with an activation function, by a kernel of CUDA's where no states are wanted."""
    if states is None and gated_delta_cuda.has_conv(x.device.type, weight, activation):
        return gated_delta_cuda.causal_conv(x, weight, bias, activation, seqlens), None
    out, left = causal_conv(x, weight, bias, seqlens, before)
    return out if activation is None else ACT2FN[activation](out), left


class Weights(NamedTuple):
    """The parameters of C channels and H heads between a layer's projections."""

    conv: Tensor  # [C, W]
    bias: Tensor | None  # [C]
    of_heads: Sequence[Tensor] = ()  # [H] each


class Projected(NamedTuple):
    """A layer's projections of T tokens, from which it mixes."""

    channels: Tensor  # [T, C], to be convolved
    gate: Tensor  # [T, ...], for what comes out
    of_heads: Sequence[Tensor] = ()  # [T, H] each


class Mixer(nn.Module, abc.ABC):
    """The forward pass of all recurrent layers: a convolution of channels, then a rule with a state for each head.

    Heads have nothing to do with each other. Ranks that share the tokens of sequences therefore exchange them for
    heads, so that no state is passed from rank to rank.
    """

    layer_idx: int
    activation: str | None
    out_proj: nn.Module
    context: DeviceMesh | None  # ranks that share the tokens; None is this rank alone

    def forward(
        self,
        hidden_states: Tensor,
        *,
        seqlens: list[int] | NodeLevels | None = None,
        states: LayerStates | None = None,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result. Sequences continue from `states`, which keep what is left.

        Under context parallelism hidden_states is this rank's chunk of the tokens that `seqlens` describes.
        """
        assert seqlens is not None, "a recurrent layer needs `seqlens` to know where sequences begin"
        assert cache_params is None and attention_mask is None, "packed sequences have no cache and no padding"
        projected, weights = self._project(hidden_states[0]), self._weights()
        if self.context is None:
            out = self._mix_sequences((projected.channels, *projected.of_heads), weights, seqlens, states)
        else:
            assert states is None, "engines sample whole sequences"
            out = self._mix_own_heads(projected, weights, seqlens, self.context)
        result: Tensor = self.out_proj(self._gated(out, projected.gate).to(hidden_states.dtype)[None])
        return result

    def _mix_own_heads(
        self, projected: Projected, weights: Weights, seqlens: list[int] | NodeLevels, mesh: DeviceMesh
    ) -> Tensor:
        """Exchange tokens for heads, mix all tokens in this rank's heads, and exchange back."""
        rank, num_ranks = mesh.get_local_rank(), mesh.size()

        def own(x: Tensor) -> Tensor:
            return torch.cat([part.chunk(num_ranks)[rank] for part in self._parts(x, 0, num_ranks)])

        own_weights = Weights(
            own(weights.conv),
            None if weights.bias is None else own(weights.bias),
            [x.chunk(num_ranks)[rank] for x in weights.of_heads],
        )
        parts = self._parts(projected.channels, 1, num_ranks)
        received = tokens_for_heads([*parts, *projected.of_heads], mesh)
        per_token = [torch.cat(received[: len(parts)], dim=-1), *received[len(parts) :]]
        return heads_for_tokens(self._mix_sequences(per_token, own_weights, seqlens), mesh)

    def _mix_sequences(
        self,
        per_token: Sequence[Tensor],
        weights: Weights,
        seqlens: list[int] | NodeLevels,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Mix the tokens of packed sequences, or those of a tree's nodes with the states of their parents: [T, ...]."""
        if not isinstance(seqlens, NodeLevels):
            return self._mix(per_token, weights, seqlens, states)
        assert states is None, "engines have no trees"
        of_level, found = _OfParents(), []
        for level in seqlens.levels:
            of_level.parents = level.parents
            found.append(self._mix([x[level.rows] for x in per_token], weights, level.lengths, of_level))
        return torch.cat(found)[seqlens.places]

    def _mix(
        self, per_token: Sequence[Tensor], weights: Weights, seqlens: list[int], states: LayerStates | None
    ) -> Tensor:
        """Convolve channels [T, C] and apply the rule, with values of heads [T, H] behind them."""
        channels, *of_heads = per_token
        before, state = (None, None) if states is None else states.take(self.layer_idx) or (None, None)
        mixed, left = convolve(channels, weights.conv, weights.bias, self.activation, seqlens, states, before)
        out, state = self._rule(mixed, of_heads, weights, seqlens, state, states is not None)
        if states is not None:
            assert left is not None
            states.keep(self.layer_idx, left, state)
        return out

    @abc.abstractmethod
    def _project(self, hidden: Tensor) -> Projected:
        """Map hidden [T, D]."""

    @abc.abstractmethod
    def _weights(self) -> Weights: ...

    @abc.abstractmethod
    def _parts(self, x: Tensor, dim: int, num_ranks: int) -> Sequence[Tensor]:
        """Split channels into parts, in each of which the channels of heads follow each other."""

    @abc.abstractmethod
    def _rule(
        self,
        mixed: Tensor,
        of_heads: Sequence[Tensor],
        weights: Weights,
        seqlens: list[int],
        state: Tensor | None,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return what heads make of their channels [T, H P], and the states [S, H, ...] float32 after each sequence.

        The latter are read where `keeps_state`.
        """

    @abc.abstractmethod
    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate, and a norm where there is one, to what heads give: [T, H P]."""
