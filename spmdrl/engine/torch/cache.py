"""The torch engine's cache: a row for each running request, whatever kinds of layers its model has, and features of
images.

    RowCache      a row: what its layers need of the tokens so far, and their number
      KVCache     keys and values, of layers that attend
      StateCache  states, of recurrent layers
    ImageFeatures what the model's tower makes of images

Before a forward pass the engine calls `begin_prefill`, `begin_extend` or `begin_decode`, which return what the layers
take: how to attend (and store new keys and values), and their states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.algo.packing import neighbours_within
from spmdrl.data.image_store import ImageStore, pixels_of
from spmdrl.memory.images import CACHED_TOKENS
from spmdrl.model.attention_layer import Attend, AttentionLayer, CausalAttention, SeenKeys
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention, cumulative
from spmdrl.model.layer_kinds import cached_heads
from spmdrl.model.mixer import LayerStates
from spmdrl.model.plain_attention import cap_scores
from spmdrl.model.policy import placeholder_rows
from spmdrl.model.rotary import lengths_of_tokens
from spmdrl.model.trunk import PlacedFeatures, Trunk
from spmdrl.types import ImageSpan, UserError


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
        of_layers = (*self.keys_values.values(), *self.states.values())
        return sum(tensor.nbytes for of_layer in of_layers for tensor in of_layer)


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
KeysValues = dict[int, tuple[Tensor, Tensor]]  # of one row, by layer: [K, T, D] each for its T tokens


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """The memory of a token's keys and values, in all layers."""
    return 2 * sum(heads * size for heads, size in cached_heads(config).values()) * dtype.itemsize


class KVCache:
    """Keys and values of the running rows, by layer: [rows, K, capacity, D] each, of the size that the layer has.

    Rows 0 to n - 1 are in use. A layer's memory is there once it has stored something.
    """

    def __init__(self, config: Any, num_rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model_type, self._device, self._dtype = config.model_type, device, dtype
        self._num_rows, self._capacity = num_rows, capacity
        self._of_layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: list[int] = []
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
        self._num_rows, self._capacity = max(num_rows, self._num_rows), max(capacity, self._capacity)
        used, longest = len(self._lengths), self.longest
        for layer, of_layer in self._of_layers.items():
            keys, values = (self._empty(cells.shape[1], cells.shape[3]) for cells in of_layer)
            for larger, cells in zip((keys, values), of_layer, strict=True):
                larger[:used, :, :longest] = cells[:used, :, :longest]
            self._of_layers[layer] = keys, values

    def _empty(self, num_heads: int, head_dim: int) -> Tensor:
        shape = (self._num_rows, num_heads, self._capacity, head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def fits(self, num_rows: int, capacity: int) -> bool:
        """Return True when `num_rows` rows of `capacity` tokens fit."""
        return self._num_rows >= num_rows and self._capacity >= capacity

    def begin_prefill(self, packed: Attend, *, starts: list[int], sequences: list[int], first_row: int) -> Attend:
        """Return an `attend` that runs `packed` and stores its keys and values.

        Row first_row + i takes those of packed sequence sequences[i], the tokens from starts[s] to starts[s + 1].
        """
        device = self._device
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
            keys, values = self.cells(layer.index, _size(key))
            keys[row_index, :, place_index] = key[0].transpose(0, 1)[token_index]
            values[row_index, :, place_index] = value[0].transpose(0, 1)[token_index]
            return packed(query, key, value, layer)

        return attend

    def begin_extend(
        self, cached: Sequence[KeysValues], seqlens: list[int], kernel: Kernel, *, first_row: int
    ) -> tuple[PrefillExtend, Tensor]:
        """Copy cached[i] into row first_row + i; return an `attend` for seqlens[i] tokens that follow, and the places
        [T] int64 of those tokens in their sequences."""
        device = self._device
        prefix_lens = [next(iter(contents.values()))[0].shape[1] for contents in cached]
        del self._lengths[first_row:]
        self._lengths += [before + length for before, length in zip(prefix_lens, seqlens, strict=True)]
        for row, (contents, before) in enumerate(zip(cached, prefix_lens, strict=True), start=first_row):
            for layer, of_prefix in contents.items():
                for cells, copied in zip(self._of_layers[layer], of_prefix, strict=True):
                    cells[row, :, :before] = copied
        self._stored.clear()
        ends = zip(prefix_lens, self._lengths[first_row:], strict=True)
        places = torch.cat([torch.arange(before, end, device=device) for before, end in ends])
        rows = torch.arange(first_row, len(self._lengths), device=device)
        rows = rows.repeat_interleave(torch.tensor(seqlens, device=device))
        attends = [
            causal_attention(SequenceLayout([n], cumulative([n], device), (before,)), kernel)
            for before, n in zip(prefix_lens, seqlens, strict=True)
        ]
        cells_of_tokens = (rows, slice(None), places)
        extend = PrefillExtend(
            cells_of_tokens, self.cells, first_row, seqlens, prefix_lens, attends, in_c=kernel == "sdpa"
        )
        return extend, places

    def row_bytes(self, row: int) -> int:
        """The memory of a row's keys and values."""
        return self._lengths[row] * sum(
            cells.shape[1] * cells.shape[3] * cells.itemsize for of in self._of_layers.values() for cells in of
        )

    def contents(self, row: int) -> KeysValues:
        """Copy the keys and values of a row."""
        end = self._lengths[row]
        return {
            layer: (keys[row, :, :end].clone(), values[row, :, :end].clone())
            for layer, (keys, values) in self._of_layers.items()
        }

    def begin_decode(self, attend_to_cache: AttendToCache) -> tuple[DecodeTokens, Tensor]:
        """Return an `attend` for one new token per row, and the positions [n] int64 of those tokens."""
        device, num_rows = self._device, len(self._lengths)
        positions = torch.tensor(self._lengths, dtype=torch.int64, device=device)
        shortest, longest = min(self._lengths) + 1, max(self._lengths) + 1
        # Where the new tokens go: a plain slice when all rows have the same length, which is much cheaper.
        plain = (slice(num_rows), slice(None), longest - 1) if shortest == longest else None
        places = plain or (torch.arange(num_rows, device=device), slice(None), positions)
        self._lengths = [length + 1 for length in self._lengths]
        self._stored.clear()
        seen = SeenKeys(lengths=positions + 1, shortest=shortest, longest=longest)
        return DecodeTokens(seen, places, self.cells, attend_to_cache), positions

    def cells(self, layer: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return where a layer stores keys and values of `size` (K, D): two tensors [rows, K, capacity, D].

        Raises UserError when it stores them more than once in a forward pass.
        """
        if layer in self._stored:
            raise UserError(
                f'rollout.engine = "torch" cannot sample from {self._model_type}: its cache holds keys and values once '
                'for each layer, and this model\'s layers attend more than once; set it to "sglang", or train with '
                "spmdrl.sft, which needs no engine"
            )
        self._stored.add(layer)
        if layer not in self._of_layers:
            self._of_layers[layer] = self._empty(*size), self._empty(*size)
        return self._of_layers[layer]

    @torch.inference_mode()
    def compact(self, rows: list[int], holes: Tensor, movers: Tensor) -> None:
        """Make row i what row rows[i] was; rows `movers` move to `holes`, both [h] int64."""
        if len(holes):
            longest = max(self._lengths)
            for cells in (cells for of_layer in self._of_layers.values() for cells in of_layer):
                cells[holes, :, :longest] = cells[movers, :, :longest]
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
        keys, values = self.cells(layer.index, _size(key))
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
        whole = self.cells(layer.index, _size(key))
        for of_layer, new in zip(whole, (key, value), strict=True):
            of_layer[self.places] = new[0].transpose(0, 1)
        keys, values = (of_layer[: query.shape[2], :, : self.seen.longest] for of_layer in whole)  # [n, K, L, D]
        return self.attend_to_cache(query, keys, values, seen=self.seen.through(layer.window), layer=layer)


def _size(heads: Tensor) -> tuple[int, int]:
    """(K, D) of keys [1, K, T, D], and of values: narrower ones have been padded."""
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


class ImageFeatures:
    """A cache of features by digest: an image is encoded when a prefill first needs it, and again only where there was
    no room for its features."""

    def __init__(self, trunk: Trunk, store: ImageStore | None, *, max_patches: int) -> None:
        """`max_patches` is the most in one pass of the tower, unless one image has more."""
        self._trunk, self._store, self._max_patches = trunk, store, max_patches
        self._pixels: dict[str, Tensor] = {}  # of images that wait for a prefill
        self._cached: dict[str, Tensor] = {}  # [num_tokens, L, D] each; the last that were needed are the last

    def take(self, images: Sequence[ImageSpan]) -> None:
        """Get the pixels of images that a prefill will need: the store may remove them before it comes."""
        for image in images:
            if image.digest not in self._cached and image.digest not in self._pixels:
                self._pixels[image.digest] = pixels_of(image, self._store)

    def placed(self, images: Sequence[ImageSpan]) -> PlacedFeatures | None:
        """Return the features of images among packed tokens, in order; None when there are none."""
        if not images:
            return None
        needed = {image.digest: image for image in images}
        new = [image for digest, image in needed.items() if digest not in self._cached]
        for part in _passes(new, max_patches=self._max_patches):
            self.take(part)
            pixels = [self._pixels.pop(image.digest) for image in part]
            features = self._trunk.encode(pixels, [image.grid for image in part])
            self._cached |= zip((image.digest for image in part), features, strict=True)
        values = torch.cat([self._cached[image.digest] for image in images])
        self._evict_others(needed)
        return PlacedFeatures(rows=placeholder_rows(images).to(values.device), values=values)

    def clear(self) -> None:
        """Forget all features and pixels."""
        self._cached.clear()
        self._pixels.clear()

    def _evict_others(self, needed: Collection[str]) -> None:
        """Evict the features that were needed longest ago until the others fit; never those of these images."""
        for digest in needed:
            self._cached[digest] = self._cached.pop(digest)
        num_tokens = sum(map(len, self._cached.values()))
        for digest in list(self._cached)[: -len(needed)]:
            if num_tokens <= CACHED_TOKENS:
                return
            num_tokens -= len(self._cached.pop(digest))


def _passes(images: Sequence[ImageSpan], *, max_patches: int) -> Iterator[Sequence[ImageSpan]]:
    """Split images, in order, into passes of at most `max_patches` patches; one that has more is alone."""
    patches = [math.prod(image.grid) for image in images]
    return (images[run] for run in neighbours_within(patches, max_patches))
