"""Weights of few bits in a model's files, read as the bfloat16 numbers that they encode, and written from them.

Each lies next to its scales, and any part of it is made of the parts of both: a rank that reads its shard never holds a
whole weight. Nothing of the model is needed but the names in its files.

Written again, a block of numbers that the scale it came with expresses exactly keeps that scale, so that what nobody
changed has the bits that it was read from. Other blocks get a scale of their largest magnitude, by which no number is
cut off: every number is the nearest that the format has.

  MXFP4 (gpt-oss)   NAME_blocks [E, outputs, G, 16] uint8, two numbers a byte, and NAME_scales [E, outputs, G] uint8,
                    exponents of 2 plus 127, by the OCP's microscaling formats 1.0. NAME is [E, 32 G inputs, outputs].
  FP8 (DeepSeek)    NAME, a float8 matrix, and NAME_scale_inv, what each of its blocks is multiplied with, of the size
                    that `weight_block_size` of config.json says; or one number for all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.config.strict import read_json
from spmdrl.model.fp8 import cast, compared, dequantized, scales_again
from spmdrl.types import UserError

READABLE = ("mxfp4", "fp8")
_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_OF_ACTIVATIONS = "activation_scale"  # for products in few bits, which nothing here computes
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The largest number to round to each of these but the last; one in the middle of two has an even code.
_ROUNDED = (0.25, 0.75 - 2**-10, 1.25, 1.75 - 2**-10, 2.5, 3.5 - 2**-10, 5.0)  # bfloat16 has none between
_GROUP = 32  # numbers of MXFP4 that have an exponent in common
_SLAB = 2**22  # numbers that are written together

Index = EllipsisType | Sequence[slice]


class StoredWeight(Protocol):
    """A weight in a file, of which parts are read; safetensors' slices are such weights."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def get_dtype(self) -> str:
        """Return the dtype of what is read, by safetensors' name."""

    def __getitem__(self, index: Index) -> Tensor:
        """Read a part of it, one range for each dimension; or all of it."""


def quantization_of(path: str | Path) -> Mapping[str, Any] | None:
    """Return what a model directory's config.json says about weights of few bits; None for others."""
    file = Path(path) / "config.json"
    config = read_json(file, dict[str, Any]) if file.is_file() else {}
    places = (config, config.get("text_config"))
    return next((part["quantization_config"] for part in places if part and part.get("quantization_config")), None)


def method_of(quantization: Mapping[str, Any]) -> str:
    """Return the name of a way to store weights in few bits."""
    return str(quantization.get("quant_method", "an unknown way"))


def quantization_refusal(quantization: Mapping[str, Any] | None) -> str | None:
    """Give the reason why weights that are stored so cannot be read; None when they can."""
    if quantization is None or method_of(quantization) in READABLE:
        return None
    return (
        f"its weights are quantized ({method_of(quantization)}), which is not read here, and packed integers have no "
        f"gradients; take the model in bfloat16, or in {' or '.join(READABLE)}"
    )


def as_numbers(
    stored: Mapping[str, StoredWeight], quantization: Mapping[str, Any] | None
) -> Mapping[str, StoredWeight]:
    """Replace weights of few bits and their scales by the weights that they encode; others stay as they are.

    Raises UserError for a weight without its scales, and for scales of blocks whose size is not given.
    """
    if quantization is None or method_of(quantization) not in READABLE:
        return stored
    scales = {name for name in stored if name.endswith((_SCALES, _INVERSE, _OF_ACTIVATIONS))}
    found: dict[str, StoredWeight] = {}
    for name, weight in stored.items():
        if name in scales:
            continue
        if name.endswith(_BLOCKS) and len(weight.get_shape()) == 4:
            stem = name.removesuffix(_BLOCKS)
            found[stem] = _Mxfp4(weight, _of(stored, stem + _SCALES))
        elif weight.get_dtype().startswith("F8_"):
            found[name] = _fp8(weight, _of(stored, name + _INVERSE), quantization.get("weight_block_size"))
        else:
            found[name] = weight
    return found


def file_name(name: str, stored: Mapping[str, StoredWeight]) -> str:
    """Return the name under which the numbers of a weight of `as_numbers` are stored."""
    return name if name in stored else name + _BLOCKS


def _of(stored: Mapping[str, StoredWeight], name: str) -> StoredWeight:
    if name not in stored:
        raise UserError(f"there are no scales {name} for a weight of few bits")
    return stored[name]


def _ranges(index: Index, shape: Sequence[int]) -> list[range]:
    parts = [slice(None)] * len(shape) if isinstance(index, EllipsisType) else index
    return [range(*part.indices(size)) for part, size in zip(parts, shape, strict=True)]


def _slices(ranges: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(one.start, one.stop) for one in ranges)


def _blocks_of(numbers: range, size: int) -> range:
    """Return the blocks, each of `size` numbers, that have some of these."""
    return range(numbers.start // size, -(-numbers.stop // size))


class _Bfloat16:
    def get_dtype(self) -> str:
        return "BF16"


@dataclass(frozen=True, slots=True)
class _Mxfp4(_Bfloat16):
    blocks: StoredWeight  # [E, outputs, G, 16]
    exponents: StoredWeight  # [E, outputs, G]

    def get_shape(self) -> list[int]:
        experts, outputs, groups, half = self.blocks.get_shape()
        return [experts, 2 * half * groups, outputs]

    def __getitem__(self, index: Index) -> Tensor:
        """Return [E, inputs, outputs], made of an expert after the other."""
        experts, inputs, outputs = _ranges(index, self.get_shape())
        half = self.blocks.get_shape()[-1]
        groups = _blocks_of(inputs, 2 * half)
        first = inputs.start - 2 * half * groups.start
        whole = torch.empty(len(experts), len(inputs), len(outputs), dtype=torch.bfloat16)
        for place, expert in enumerate(experts):
            where = _slices([range(expert, expert + 1), outputs, groups])
            codes = self.blocks[*where, slice(0, half)][0]
            pairs = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)  # a byte's lower half is the first
            numbers = _fp4_numbers(pairs, self.exponents[where][0]).flatten(-2)
            whole[place] = numbers[:, first : first + len(inputs)].T
        return whole


@dataclass(frozen=True, slots=True)
class _Fp8(_Bfloat16):
    weight: StoredWeight  # [..., outputs, inputs]
    scale: StoredWeight  # [..., a number for each block]
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index: Index) -> Tensor:
        """Return [..., outputs, inputs]."""
        *others, outputs, inputs = _ranges(index, self.get_shape())
        rows, columns = (_blocks_of(one, size) for one, size in zip((outputs, inputs), self.block, strict=True))
        weight, scale = self.weight[_slices([*others, outputs, inputs])], self.scale[_slices([*others, rows, columns])]
        return dequantized(weight, scale, (outputs.start, inputs.start), self.block).bfloat16()


@dataclass(frozen=True, slots=True)
class _Fp8ByOneNumber(_Bfloat16):
    weight: StoredWeight
    scale: StoredWeight  # one number

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index: Index) -> Tensor:
        return (self.weight[index].float() * self.scale[...].float().reshape(())).bfloat16()


def _fp8(weight: StoredWeight, scale: StoredWeight, block: Sequence[int] | None) -> StoredWeight:
    if math.prod(scale.get_shape()) == 1:
        return _Fp8ByOneNumber(weight, scale)
    if block is None:
        raise UserError("config.json has no weight_block_size for the scales of its weights")
    height, width = block
    return _Fp8(weight, scale, (height, width))


# Writing.


class StoredFormat:
    """The format that each weight of a model directory has in its files, to write other numbers of it in the same."""

    def __init__(self, stored: Mapping[str, StoredWeight], quantization: Mapping[str, Any] | None) -> None:
        """`stored` is what the files hold; only heads and scales of it are read, and what `of_activations` and
        `parts_of` return."""
        self._stored, self._numbers = stored, as_numbers(stored, quantization)
        height, width = (quantization or {}).get("weight_block_size") or (1, 1)
        self._block: tuple[int, int] = (height, width)
        self._has_powers_of_two = (quantization or {}).get("scale_fmt") == "ue8m0"

    def widest(self, names: Iterable[str], dtype: torch.dtype) -> torch.dtype:
        """Return the narrowest dtype that has the numbers of all these weights, `dtype` for names that are not in the
        files."""
        return functools.reduce(torch.promote_types, {self._dtype_of(name, dtype) for name in names})

    def parts_of(self, name: str) -> dict[str, StoredWeight]:
        """Return the tensors of a weight in the files: itself, or numbers and scales."""
        own = file_name(name, self._stored)
        if own == name and not self._stored[own].get_dtype().startswith("F8_"):
            return {own: self._stored[own]}
        scales = name + (_INVERSE if own == name else _SCALES)
        return {own: self._stored[own], scales: self._stored[scales]}

    def of_activations(self) -> dict[str, StoredWeight]:
        """Return the scales of activations, which belong to no weight."""
        return {name: stored for name, stored in self._stored.items() if name.endswith(_OF_ACTIVATIONS)}

    def num_bytes(self, name: str, shape: torch.Size, dtype: torch.dtype) -> dict[str, int]:
        """Return the size of each tensor that `encoded` makes of such a weight."""
        if name not in self._numbers:
            return {name: shape.numel() * dtype.itemsize}
        parts = self.parts_of(name).items()
        return {part: math.prod(stored.get_shape()) * dtype_of(stored).itemsize for part, stored in parts}

    def encoded(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a whole weight, by their names in files, on the device where it is.

        A weight that is not in the model's files stays as it is.
        """
        if name not in self._numbers:
            return {name: whole}
        parts = self.parts_of(name)
        own, *scales = parts
        if not scales:
            return {own: whole.to(dtype_of(parts[own]))}
        given = parts[scales[0]][...].to(whole.device)
        made = _in_mxfp4(whole, given) if own != name else self._in_fp8(whole, given, dtype_of(parts[own]))
        return dict(zip(parts, made, strict=True))

    def _dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if name not in self._numbers:
            return dtype
        own, *scales = self.parts_of(name).values()
        return torch.bfloat16 if scales else dtype_of(own)

    def _in_fp8(self, whole: Tensor, given: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        by_one, width = given.numel() == 1, whole.shape[-1]
        matrices = whole.reshape(1, -1, width) if by_one else whole.reshape(-1, *whole.shape[-2:])
        grid = given.reshape(1, 1, 1) if by_one else given.reshape(-1, *given.shape[-2:])
        unit = 1 if by_one else self._block[0]
        rows = max(1, _SLAB // (width * unit)) * unit
        block = (rows, width) if by_one else self._block
        slabs = [
            (
                (number, slice(row, row + rows)),
                (number, slice(0, 1) if by_one else slice(row // unit, (row + rows) // unit)),
            )
            for number in range(len(matrices))
            for row in range(0, matrices.shape[1], rows)
        ]
        found = [compared(matrices[numbers].bfloat16(), grid[blocks], block, dtype) for numbers, blocks in slabs]
        changed, maxima = (torch.cat(of_all) for of_all in zip(*found, strict=True))
        if by_one:
            changed, maxima = changed.any(), maxima.amax()
        else:
            changed, maxima = changed.view(grid.shape), maxima.view(grid.shape)
        scales = scales_again(changed, maxima, grid, dtype, powers_of_two=self._has_powers_of_two)
        made = torch.empty(matrices.shape, dtype=dtype, device=whole.device)
        for numbers, blocks in slabs:
            made[numbers] = cast(matrices[numbers].bfloat16(), scales[blocks], block, dtype)
        return made.view(whole.shape), scales.view(given.shape)


def dtype_of(stored: StoredWeight) -> torch.dtype:
    """Return the dtype of a tensor in a file, of which nothing is read."""
    return stored[tuple(slice(0, 0) for _ in stored.get_shape()) or ...].dtype


def _in_mxfp4(whole: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [E, outputs, G, 16] and exponents [E, outputs, G] of a weight [E, inputs, outputs], given the
    exponents that it came with."""
    experts, inputs, outputs = whole.shape
    made = torch.empty(*given.shape, _GROUP // 2, dtype=torch.uint8, device=whole.device)
    exponents = torch.empty_like(given)
    rows = max(1, _SLAB // inputs)
    for expert in range(experts):
        for row in range(0, outputs, rows):
            place = (expert, slice(row, row + rows))
            numbers = whole[expert, :, place[1]].T.bfloat16().unflatten(1, (-1, _GROUP))
            differs = _fp4_numbers(_fp4_codes(numbers, given[place]), given[place]) != numbers
            exponents[place] = torch.where(differs.any(-1), _exponents(numbers), given[place])
            codes = _fp4_codes(numbers, exponents[place])
            made[place] = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return made, exponents


def _exponents(numbers: Tensor) -> Tensor:
    """Return the smallest exponent, plus 127, for each group of numbers [..., 32] by which none is above 6."""
    mantissa, exponent = numbers.abs().amax(-1).float().frexp()  # 6 = 0.75 * 2 ** 3
    return (exponent - 3 + (mantissa > 0.75) + 127).clamp(0, 254).to(torch.uint8)


def _fp4_codes(numbers: Tensor, exponents: Tensor) -> Tensor:
    """Return the codes uint8 of the numbers of 4 bits nearest to [..., 32], given [...] exponents plus 127."""
    scaled = numbers.float() * torch.exp2(127 - exponents.float()).unsqueeze(-1)
    bounds = torch.tensor(_ROUNDED, dtype=torch.float32, device=numbers.device)
    magnitudes = torch.bucketize(scaled.abs().contiguous(), bounds, out_int32=True).to(torch.uint8)
    return magnitudes | (scaled.signbit().to(torch.uint8) << 3)


def _fp4_numbers(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the bfloat16 numbers [..., 32] that codes of 4 bits encode, given [...] exponents plus 127."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16, device=codes.device)
    return values[codes.int()] * torch.exp2(exponents.float() - 127).bfloat16().unsqueeze(-1)
