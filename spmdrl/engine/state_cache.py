"""The torch engine's cache of what recurrent layers remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.model.recurrent import LayerStates

# By layer: conv inputs [n, C, kernel - 1] in the layer's dtype and states [n, H, Dk, Dv] float32, of rows 0 to n - 1.
StatesOfLayers = dict[int, tuple[Tensor, Tensor]]


class StateCache:
    """The states of the rows in use, and of no others: a decode step makes new ones, which take their place."""

    def __init__(self) -> None:
        self._of_layers: StatesOfLayers = {}

    def begin_prefill(self, sequences: Tensor, *, first_row: int, begun: Sequence[StatesOfLayers] = ()) -> LayerStates:
        """Return the states for packed sequences: from their beginnings, or from what was left of each of them.

        Row first_row + i keeps what is left of sequence sequences[i] int64; the rows from first_row on are forgotten.
        """
        before = {
            layer: (torch.cat([of[layer][0] for of in begun]), torch.cat([of[layer][1] for of in begun]))
            for layer in (begun[0] if begun else ())
        }
        return _Prefill(self._of_layers, sequences, first_row, before)

    @property
    def row_bytes(self) -> int:
        """The memory of the states of a row."""
        return sum(cells[:1].nbytes for of_layer in self._of_layers.values() for cells in of_layer)

    def contents(self, row: int) -> StatesOfLayers:
        """Copy the states of a row, as those of one row."""
        return {
            layer: (conv[row : row + 1].clone(), state[row : row + 1].clone())
            for layer, (conv, state) in self._of_layers.items()
        }

    def begin_decode(self) -> LayerStates:
        """Return the states for one new token per row."""
        return _Decode(self._of_layers)

    @torch.inference_mode()
    def compact(self, num_kept: int, holes: Tensor, movers: Tensor) -> None:
        """Move rows `movers` to `holes`, both [h] int64, and forget every row from `num_kept` on."""
        for layer, (conv, state) in self._of_layers.items():
            for cells in (conv, state):
                cells[holes] = cells[movers]
            self._of_layers[layer] = conv[:num_kept], state[:num_kept]


@dataclass(frozen=True, slots=True)
class _Prefill:
    of_layers: StatesOfLayers
    sequences: Tensor  # [rows] int64
    first_row: int
    before: StatesOfLayers  # of sequences that go on

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self.before.get(layer)

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        new = conv[self.sequences], state[self.sequences]
        if self.first_row:
            conv_before, state_before = (cells[: self.first_row] for cells in self.of_layers[layer])
            new = torch.cat([conv_before, new[0]]), torch.cat([state_before, new[1]])
        self.of_layers[layer] = new


@dataclass(frozen=True, slots=True)
class _Decode:
    of_layers: StatesOfLayers

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.of_layers[layer]

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        self.of_layers[layer] = conv, state
