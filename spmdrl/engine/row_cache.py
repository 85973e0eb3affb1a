"""The memory of the running rows of the torch engine, whatever kinds of layers its model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypedDict

import torch
from torch import Tensor

from spmdrl.engine.kv_cache import AttendToCache, KeysValues, KVCache, NewestTokens, RestOfRows
from spmdrl.engine.state_cache import StateCache, StatesOfLayers
from spmdrl.model.attention_layer import Attend
from spmdrl.model.kernels import Kernel
from spmdrl.model.recurrent import LayerStates
from spmdrl.model.rotary import lengths_of_tokens


class LayerInputs(TypedDict):
    """Arguments of a model's forward pass that are for its layers: each kind of layer takes its own."""

    lengths: Tensor
    attend: Attend
    seqlens: list[int]
    states: LayerStates


@dataclass(frozen=True, slots=True, eq=False)
class RowContents:
    """A copy of what a row remembers."""

    keys_values: KeysValues
    states: StatesOfLayers

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        tensors = [*self.keys_values, *(tensor for of_layer in self.states.values() for tensor in of_layer)]
        return sum(tensor.nbytes for tensor in tensors)


class RowCache:
    """The keys and values, the states, and the positions of the running rows. Rows 0 to n - 1 are in use."""

    def __init__(self, config: Any, num_rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._keys_values = KVCache(config, num_rows, capacity, device=device, dtype=dtype)
        self._states = StateCache()
        self._shifts: list[int] = []  # of rows: what positions have more than places, after images

    @property
    def longest(self) -> int:
        """Tokens of the longest row in use."""
        return self._keys_values.longest

    def holds(self, num_rows: int, capacity: int) -> bool:
        """Return True when `num_rows` rows of `capacity` tokens fit."""
        return self._keys_values.holds(num_rows, capacity)

    def grow(self, num_rows: int, capacity: int) -> None:
        """Make room for `num_rows` rows of `capacity` tokens, and keep the contents of the rows in use."""
        self._keys_values.grow(num_rows, capacity)  # states take room when there are rows

    def begin_prefill(
        self, packed: Attend, *, seqlens: list[int], shifts: list[int], sequences: list[int], first_row: int
    ) -> LayerInputs:
        """Prepare a forward pass over sequences of these lengths, with attention by `packed`.

        Row first_row + i remembers sequence sequences[i]; the position of each token that it decodes is the token's
        place and the sequence's shift.
        """
        del self._shifts[first_row:]
        self._shifts += [shifts[sequence] for sequence in sequences]
        starts = [0, *accumulate(seqlens)]
        attend = self._keys_values.begin_prefill(packed, starts=starts, sequences=sequences, first_row=first_row)
        states = self._states.begin_prefill(torch.tensor(sequences, device=self._device), first_row=first_row)
        return LayerInputs(lengths=lengths_of_tokens(seqlens), attend=attend, seqlens=seqlens, states=states)

    def begin_rest(
        self, begun: Sequence[RowContents], *, seqlens: list[int], shifts: list[int], kernel: Kernel, first_row: int
    ) -> tuple[LayerInputs, RestOfRows, Tensor]:
        """Prepare a forward pass over the rest of sequences, seqlens[i] more tokens after what begun[i] remembers;
        return its `attend` and the tokens' positions [T] int64 too.

        Row first_row + i takes begun[i] and the rest; `shifts` as in `begin_prefill`.
        """
        del self._shifts[first_row:]
        self._shifts += shifts
        keys_values, states = [one.keys_values for one in begun], [one.states for one in begun]
        rest, positions = self._keys_values.begin_rest(keys_values, seqlens, kernel, first_row=first_row)
        if any(shifts):
            of_tokens = [shift for shift, n in zip(shifts, seqlens, strict=True) for _ in range(n)]
            positions = positions + torch.tensor(of_tokens, device=self._device)
        rows = torch.arange(len(begun), device=self._device)
        of_layers = self._states.begin_prefill(rows, first_row=first_row, begun=states)
        lengths = self._keys_values.lengths[first_row:].repeat_interleave(torch.tensor(seqlens))
        return LayerInputs(lengths=lengths, attend=rest, seqlens=seqlens, states=of_layers), rest, positions

    def row_bytes(self, row: int) -> int:
        """The memory that `contents` of a row takes."""
        return self._keys_values.row_bytes(row) + self._states.row_bytes

    @torch.inference_mode()
    def contents(self, row: int) -> RowContents:
        """Copy what a row remembers."""
        return RowContents(self._keys_values.contents(row), self._states.contents(row))

    def begin_decode(self, attend_to_cache: AttendToCache) -> tuple[LayerInputs, NewestTokens, Tensor]:
        """Prepare a forward pass over one new token per row; return its `attend` and the tokens' positions [n] int64
        too."""
        newest, positions = self._keys_values.begin_decode(attend_to_cache)
        states = self._states.begin_decode()
        if any(self._shifts):
            positions = positions + torch.tensor(self._shifts, device=self._device)
        seqlens, lengths = [1] * len(positions), self._keys_values.lengths
        return LayerInputs(lengths=lengths, attend=newest, seqlens=seqlens, states=states), newest, positions

    def compact(self, kept: list[int], holes: list[int], movers: list[int]) -> None:
        """Move rows `movers` to `holes` and forget every row that is not in `kept`."""
        into, out_of = (torch.tensor(rows, dtype=torch.int64, device=self._device) for rows in (holes, movers))
        self._keys_values.compact(kept, into, out_of)
        self._states.compact(len(kept), into, out_of)
        self._shifts = [self._shifts[row] for row in kept]
