"""States of recurrent layers between calls: an engine's, or those of the nodes of a prefix tree.

Nodes of one depth are packed sequences, each of which continues from the state of its parent. So a layer is called once
for each depth, and hands its states from call to call. Gradients of the children's states add up in their parent's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from spmdrl.types import PrefixTree


class LayerStates(Protocol):
    """Memory of recurrent layers between calls: of each of S sequences, by layer."""

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return conv inputs [S, C, kernel - 1] in the layer's dtype and state [S, H, Dk, Dv] float32 to go on from.

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


Weights = TypeVar("Weights")
# Of a layer, what mixes tokens: their values, each [T, ...], the layer's weights, the lengths of sequences, and states.
Mix = Callable[[Sequence[Tensor], Weights, list[int], LayerStates | None], Tensor]


def mix_sequences(
    mix: Mix[Weights],
    per_token: Sequence[Tensor],
    weights: Weights,
    seqlens: list[int] | NodeLevels,
    states: LayerStates | None = None,
) -> Tensor:
    """Mix the tokens of packed sequences, or those of a tree's nodes with the states of their parents: [T, ...]."""
    if not isinstance(seqlens, NodeLevels):
        return mix(per_token, weights, seqlens, states)
    assert states is None, "engines have no trees"
    of_level, found = _OfParents(), []
    for level in seqlens.levels:
        of_level.parents = level.parents
        found.append(mix([x[level.rows] for x in per_token], weights, level.lengths, of_level))
    return torch.cat(found)[seqlens.places]
