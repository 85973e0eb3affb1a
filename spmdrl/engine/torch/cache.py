"""The torch engine's cache: a row for each running request, whatever kinds of layers its model has.

    RowCache     a row: what its layers need of the tokens so far, and their number
      KVCache    keys and values, of layers that attend
      StateCache states, of recurrent layers

Before a forward pass the engine calls `begin_prefill`, `begin_extend` or `begin_decode`, which return what the layers
take: how to attend (and store new keys and values), and their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.attention_layer import Attend, AttentionLayer, CausalAttention, SeenKeys
from spmdrl.model.capped import cap_scores
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.model.layer_kinds import attending_layers
from spmdrl.model.recurrent import LayerStates
from spmdrl.model.rotary import lengths_of_tokens
from spmdrl.types import UserError


class LayerInputs(TypedDict):
    """Arguments of a model's forward pass that are for its layers: each kind of layer takes its own."""

    lengths: Tensor
    attend: Attend
    seqlens: list[int]
    states: LayerStates


@dataclass(frozen=True, slots=True, eq=False)
class RowContents:
    """A copy of a row."""

    keys_values: KeysValues
    states: StatesOfLayers

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        tensors = [*self.keys_values, *(tensor for of_layer in self.states.values() for tensor in of_layer)]
        return sum(tensor.nbytes for tensor in tensors)


class RowCache:
    """The keys and values, the states, and the positions of the running rows. Rows 0 to n - 1 are in use."""

    def __init__(self, config: Any, num_rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._keys_values = KVCache(config, num_rows, capacity, device=device, dtype=dtype)
        self._states = StateCache()
        self._shifts: list[int] = []  # of rows: position minus place of tokens to come, which images change

    @property
    def longest(self) -> int:
        """Tokens of the longest row in use."""
        return self._keys_values.longest

    def fits(self, num_rows: int, capacity: int) -> bool:
        """Return True when `num_rows` rows of `capacity` tokens fit."""
        return self._keys_values.fits(num_rows, capacity)

    def grow(self, num_rows: int, capacity: int) -> None:
        """Make room for `num_rows` rows of `capacity` tokens, and keep the contents of the rows in use."""
        self._keys_values.grow(num_rows, capacity)  # states take room when there are rows

    def begin_prefill(
        self, packed: Attend, *, seqlens: list[int], shifts: list[int], sequences: list[int], first_row: int
    ) -> LayerInputs:
        """Prepare a forward pass over sequences of these lengths, with attention by `packed`.

        Row first_row + i takes sequence sequences[i]; the position of each token that it decodes is the token's place
        plus the sequence's shift.
        """
        del self._shifts[first_row:]
        self._shifts += [shifts[sequence] for sequence in sequences]
        starts = [0, *accumulate(seqlens)]
        attend = self._keys_values.begin_prefill(packed, starts=starts, sequences=sequences, first_row=first_row)
        states = self._states.begin_prefill(torch.tensor(sequences, device=self._device), first_row=first_row)
        return LayerInputs(lengths=lengths_of_tokens(seqlens), attend=attend, seqlens=seqlens, states=states)

    def begin_extend(
        self, cached: Sequence[RowContents], *, seqlens: list[int], shifts: list[int], kernel: Kernel, first_row: int
    ) -> tuple[LayerInputs, PrefillExtend, Tensor]:
        """Prepare a forward pass over seqlens[i] tokens that follow those of cached[i]; return its `attend` and the
        tokens' positions [T] int64 too.

        Row first_row + i takes cached[i] and the new tokens; `shifts` as in `begin_prefill`.
        """
        del self._shifts[first_row:]
        self._shifts += shifts
        keys_values, states = [one.keys_values for one in cached], [one.states for one in cached]
        extend, positions = self._keys_values.begin_extend(keys_values, seqlens, kernel, first_row=first_row)
        if any(shifts):
            of_tokens = [shift for shift, n in zip(shifts, seqlens, strict=True) for _ in range(n)]
            positions = positions + torch.tensor(of_tokens, device=self._device)
        rows = torch.arange(len(cached), device=self._device)
        of_layers = self._states.begin_prefill(rows, first_row=first_row, cached=states)
        lengths = self._keys_values.lengths[first_row:].repeat_interleave(torch.tensor(seqlens))
        return LayerInputs(lengths=lengths, attend=extend, seqlens=seqlens, states=of_layers), extend, positions

    def row_bytes(self, row: int) -> int:
        """The memory that `contents` of a row takes."""
        return self._keys_values.row_bytes(row) + self._states.row_bytes

    @torch.inference_mode()
    def contents(self, row: int) -> RowContents:
        """Copy a row."""
        return RowContents(self._keys_values.contents(row), self._states.contents(row))

    def begin_decode(self, attend_to_cache: AttendToCache) -> tuple[LayerInputs, DecodeTokens, Tensor]:
        """Prepare a forward pass over one new token per row; return its `attend` and the tokens' positions [n] int64
        too."""
        decode, positions = self._keys_values.begin_decode(attend_to_cache)
        states = self._states.begin_decode()
        if any(self._shifts):
            positions = positions + torch.tensor(self._shifts, device=self._device)
        seqlens, lengths = [1] * len(positions), self._keys_values.lengths
        return LayerInputs(lengths=lengths, attend=decode, seqlens=seqlens, states=states), decode, positions

    def compact(self, rows: list[int]) -> None:
        """Make row i what row rows[i] was; forget the others."""
        moves = [(hole, row) for hole, row in enumerate(rows) if hole != row]
        holes, movers = torch.tensor(moves, dtype=torch.int64, device=self._device).view(-1, 2).unbind(1)
        self._keys_values.compact(rows, holes, movers)
        self._states.compact(len(rows), holes, movers)
        self._shifts = [self._shifts[row] for row in rows]


AttendToCache = Callable[..., Tensor]  # as `attend_to_cache`
KeysValues = tuple[Tensor, Tensor]  # of one row, as `KVCache.contents`


def cannot_sample(model_config: Any, but: str) -> str:
    return (
        f'rollout.engine = "torch" cannot sample from {model_config.model_type}: its cache holds keys and values, {but}'
        '; set it to "sglang", or train with spmdrl.sft, which needs no engine'
    )


def _cell_sizes(config: Any) -> tuple[list[int], int, int]:
    """The layers that attend, and their key heads and the width of these."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return attending_layers(config), num_heads, head_dim


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """The memory of a token's keys and values, in all layers."""
    layers, num_heads, head_dim = _cell_sizes(config)
    return 2 * len(layers) * num_heads * head_dim * dtype.itemsize


class KVCache:
    """Keys and values of the running rows, for each layer that attends [rows, K, capacity, D].

    Rows 0 to n - 1 are in use.
    """

    def __init__(self, config: Any, num_rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        layers, num_heads, head_dim = _cell_sizes(config)
        shape = (len(layers), num_rows, num_heads, capacity, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._places = {layer: place for place, layer in enumerate(layers)}  # of layers, in keys and values
        self._lengths: list[int] = []
        self._config = config
        self._stored: set[int] = set()  # layers that have stored the keys and values of the current forward pass

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row in use, [n] int64, on the host."""
        return torch.tensor(self._lengths, dtype=torch.int64)

    @property
    def longest(self) -> int:
        """Tokens of the longest row in use."""
        return max(self._lengths, default=0)

    def grow(self, num_rows: int, capacity: int) -> None:
        """Make room for `num_rows` rows of `capacity` tokens, and keep the contents of the rows in use."""
        layers, old_rows, num_heads, old_capacity, head_dim = self._keys.shape
        shape = (layers, max(num_rows, old_rows), num_heads, max(capacity, old_capacity), head_dim)
        used, longest = len(self._lengths), self.longest
        self._keys = self._moved(self._keys, shape, used, longest)
        self._values = self._moved(self._values, shape, used, longest)

    @staticmethod
    def _moved(cells: Tensor, shape: tuple[int, ...], used: int, longest: int) -> Tensor:
        larger = cells.new_zeros(shape)
        larger[:, :used, :, :longest] = cells[:, :used, :, :longest]
        return larger

    def fits(self, num_rows: int, capacity: int) -> bool:
        """Return True when `num_rows` rows of `capacity` tokens fit."""
        return self._keys.shape[1] >= num_rows and self._keys.shape[3] >= capacity

    def begin_prefill(self, packed: Attend, *, starts: list[int], sequences: list[int], first_row: int) -> Attend:
        """Return an `attend` that runs `packed` and stores its keys and values.

        Row first_row + i takes those of packed sequence sequences[i], the tokens from starts[s] to starts[s + 1].
        """
        device = self._keys.device
        tokens, rows, places = [], [], []
        for row, sequence in enumerate(sequences, start=first_row):
            tokens.append(torch.arange(starts[sequence], starts[sequence + 1], device=device))
            rows.append(torch.full_like(tokens[-1], row))
            places.append(tokens[-1] - starts[sequence])
        token_index, row_index, place_index = torch.cat(tokens), torch.cat(rows), torch.cat(places)
        self._stored.clear()
        del self._lengths[first_row:]
        self._lengths += [starts[sequence + 1] - starts[sequence] for sequence in sequences]

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
            keys, values = self.cells(layer.index, _size(key), _size(value))
            keys[row_index, :, place_index] = key[0].transpose(0, 1)[token_index]
            values[row_index, :, place_index] = value[0].transpose(0, 1)[token_index]
            return packed(query, key, value, layer)

        return attend

    def begin_extend(
        self, cached: Sequence[KeysValues], seqlens: list[int], kernel: Kernel, *, first_row: int
    ) -> tuple[PrefillExtend, Tensor]:
        """Copy cached[i] into row first_row + i; return an `attend` for seqlens[i] tokens that follow, and the places
        [T] int64 of those tokens in their sequences."""
        device = self._keys.device
        prefix_lens = [keys.shape[2] for keys, _ in cached]
        del self._lengths[first_row:]
        self._lengths += [before + length for before, length in zip(prefix_lens, seqlens, strict=True)]
        for row, (contents, before) in enumerate(zip(cached, prefix_lens, strict=True), start=first_row):
            for cells, of_prefix in zip((self._keys, self._values), contents, strict=True):
                cells[:, row, :, :before] = of_prefix
        self._stored.clear()
        ends = zip(prefix_lens, self._lengths[first_row:], strict=True)
        places = torch.cat([torch.arange(before, end, device=device) for before, end in ends])
        rows = torch.arange(first_row, len(self._lengths), device=device)
        rows = rows.repeat_interleave(torch.tensor(seqlens, device=device))
        attends = [
            causal_attention(
                SequenceLayout([n], torch.tensor([0, n], dtype=torch.int32, device=device), before), kernel
            )
            for before, n in zip(prefix_lens, seqlens, strict=True)
        ]
        cells_of_tokens = (rows, slice(None), places)
        extend = PrefillExtend(
            cells_of_tokens, self.cells, first_row, seqlens, prefix_lens, attends, in_c=kernel == "sdpa"
        )
        return extend, places

    def row_bytes(self, row: int) -> int:
        """The memory of a row's keys and values."""
        return self._lengths[row] * bytes_per_token(self._config, self._keys.dtype)

    def contents(self, row: int) -> KeysValues:
        """Copy the keys and values of a row, of all layers: [layers, K, T, D] each for its T tokens."""
        keys, values = (cells[:, row, :, : self._lengths[row]].clone() for cells in (self._keys, self._values))
        return keys, values

    def begin_decode(self, attend_to_cache: AttendToCache) -> tuple[DecodeTokens, Tensor]:
        """Return an `attend` for one new token per row, and the positions [n] int64 of those tokens."""
        device, num_rows = self._keys.device, len(self._lengths)
        positions = torch.tensor(self._lengths, dtype=torch.int64, device=device)
        shortest, longest = min(self._lengths) + 1, max(self._lengths) + 1
        # Where the new tokens go: a plain slice when all rows have the same length, which is much cheaper.
        plain = (slice(num_rows), slice(None), longest - 1) if shortest == longest else None
        places = plain or (torch.arange(num_rows, device=device), slice(None), positions)
        self._lengths = [length + 1 for length in self._lengths]
        self._stored.clear()
        seen = SeenKeys(lengths=positions + 1, shortest=shortest, longest=longest)
        return DecodeTokens(seen, places, self.cells, attend_to_cache), positions

    def cells(self, layer: int, *sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return where a layer stores keys and values of `sizes` (K, D): two views [rows, K, capacity, D].

        Raises UserError when it stores them more than once, or those of another size.
        """
        if layer in self._stored:
            raise UserError(
                cannot_sample(self._config, "once for each layer, and this model's layers attend more than once")
            )
        if any(size != (self._keys.shape[2], self._keys.shape[4]) for size in sizes):
            raise UserError(cannot_sample(self._config, "all of one size, and this model has several sizes"))
        self._stored.add(layer)
        place = self._places[layer]
        return self._keys[place], self._values[place]

    def compact(self, rows: list[int], holes: Tensor, movers: Tensor) -> None:
        """Make row i what row rows[i] was; rows `movers` move to `holes`, both [h] int64."""
        if len(holes):
            longest = max(self._lengths)
            for cells in (self._keys, self._values):
                cells[:, holes, :, :longest] = cells[:, movers, :, :longest]
        self._lengths = [self._lengths[row] for row in rows]


@dataclass(frozen=True, slots=True)
class PrefillExtend:
    """A forward pass over tokens that follow cached prefixes: stores their keys and values, and attends."""

    places: tuple[Any, ...]  # of these tokens, in the cells of a layer
    cells: Callable[..., tuple[Tensor, Tensor]]  # as `KVCache.cells`
    first_row: int
    seqlens: list[int]  # tokens of each row in this pass
    prefix_lens: list[int]  # tokens before them
    attends: list[CausalAttention]  # of each row
    in_c: bool  # where tensors and layer allow

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        """Serve as an `Attend`: query [1, H, T, D], key and value [1, K, T, D] give [1, T, H, D]."""
        keys, values = self.cells(layer.index, _size(key), _size(value))
        for of_layer, new in ((keys, key), (values, value)):
            of_layer[self.places] = new[0].transpose(0, 1)
        q = query[0].transpose(0, 1)
        room = cpu_room() if self.in_c and q.device.type == "cpu" else None
        if room is not None and layer.window is None and layer.is_plain and room.serves(q, keys, values):
            out = room.attend_to_rows(q, keys, values, self.first_row, self.seqlens, self.prefix_lens, layer.scale)
        else:
            out = torch.cat(list(self._by_row(q, keys, values, layer)))
        return out[None]

    def _by_row(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Iterator[Tensor]:
        """Attend row by row: q [T, H, D] gives [t, H, D] for the t tokens of each row."""
        parts = zip(q.split(self.seqlens), self.prefix_lens, self.attends, strict=True)
        for row, (part, before, attend) in enumerate(parts, start=self.first_row):
            k, v = (cells[row, :, : before + len(part)].transpose(0, 1) for cells in (keys, values))
            yield attend(part, k, v, layer)


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """A forward pass over one new token for each row of a cache: stores its key and value, and attends."""

    seen: SeenKeys
    places: tuple[Any, ...]  # of the new tokens, in the cells of a layer
    cells: Callable[..., tuple[Tensor, Tensor]]  # as `KVCache.cells`
    attend_to_cache: AttendToCache

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        """Serve as an `Attend`: query [1, H, n, D], key and value [1, K, n, D] give [1, n, H, D]."""
        whole = self.cells(layer.index, _size(key), _size(value))
        for of_layer, new in zip(whole, (key, value), strict=True):
            of_layer[self.places] = new[0].transpose(0, 1)
        keys, values = (of_layer[: query.shape[2], :, : self.seen.longest] for of_layer in whole)  # [n, K, L, D]
        return self.attend_to_cache(query, keys, values, seen=self.seen.through(layer.window), layer=layer)


def _size(heads: Tensor) -> tuple[int, int]:
    """(K, D) of keys or values [1, K, T, D]."""
    return heads.shape[1], heads.shape[3]


def attend_to_cache(query: Tensor, keys: Tensor, values: Tensor, *, seen: SeenKeys, layer: AttentionLayer) -> Tensor:
    """query [1, H, n, D], one token for each row of keys and values [n, K, L, D], give [1, n, H, D].

    In float32 on a CPU by a function in C, or else as two plain products: for one query a row they were 1.4 to 2 times
    as fast as the fused kernel. Narrower types go to the fused kernel, which keeps scores in float32 without a copy of
    the cache; but not with sinks or a soft cap, of which it knows nothing.
    """
    num_rows, num_heads, num_groups = keys.shape[0], query.shape[1], query.shape[1] // keys.shape[1]
    q = query[0].transpose(0, 1)  # [n, H, D]
    room = cpu_room() if q.device.type == "cpu" else None
    if room is not None and layer.is_plain and room.serves(q, keys, values):
        return room.attend_to_cache(q, keys, values, seen, layer.scale)[None]
    hidden = seen.hidden
    if q.dtype != torch.float32 and layer.is_plain:
        visible = None if hidden is None else ~hidden[:, None, None]
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), keys, values, attn_mask=visible, scale=layer.scale, enable_gqa=num_groups > 1
        )
        return out.squeeze(2).unsqueeze(0)
    grouped = (q * layer.scale).unflatten(1, (keys.shape[1], num_groups))  # [n, K, H / K, D]
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float()
    if layer.softcap is not None:
        scores = cap_scores(scores, layer.softcap)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if layer.sinks is not None:
        sink = layer.sinks.float().view(1, *grouped.shape[1:3], 1).expand(num_rows, -1, -1, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return torch.matmul(weights, values).reshape(1, num_rows, num_heads, -1)


# By layer: conv inputs [n, C, kernel - 1] in the layer's dtype and states [n, H, Dk, Dv] float32, of rows 0 to n - 1.
StatesOfLayers = dict[int, tuple[Tensor, Tensor]]


class StateCache:
    """The states of the rows in use, and of no others: a decode step makes new ones, which take their place."""

    def __init__(self) -> None:
        self._of_layers: StatesOfLayers = {}

    def begin_prefill(self, sequences: Tensor, *, first_row: int, cached: Sequence[StatesOfLayers] = ()) -> LayerStates:
        """Return the states for packed sequences: from their beginnings, or after the cached prefix of each.

        Row first_row + i takes the last states of sequence sequences[i] int64; the rows from first_row on are
        forgotten.
        """
        before = {
            layer: (torch.cat([of[layer][0] for of in cached]), torch.cat([of[layer][1] for of in cached]))
            for layer in (cached[0] if cached else ())
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
    def compact(self, num_rows: int, holes: Tensor, movers: Tensor) -> None:
        """Move rows `movers` to `holes`, both [h] int64, and forget every row from `num_rows` on."""
        for layer, (conv, state) in self._of_layers.items():
            for cells in (conv, state):
                cells[holes] = cells[movers]
            self._of_layers[layer] = conv[:num_rows], state[:num_rows]


@dataclass(frozen=True, slots=True)
class _Prefill:
    of_layers: StatesOfLayers
    sequences: Tensor  # [rows] int64
    first_row: int
    before: StatesOfLayers  # after cached prefixes

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
