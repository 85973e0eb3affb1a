"""Weights of few bits in a model's files, read as the bfloat16 numbers that they stand for.

Each lies beside its scales, and any part of it is made of the parts of both: a rank that reads its shard never holds a
whole weight. Nothing of the model is needed but the names in its files.

  MXFP4 (gpt-oss)   NAME_blocks [E, outputs, G, 16] uint8, two numbers a byte, and NAME_scales [E, outputs, G] uint8,
                    exponents of 2 plus 127, by the OCP's microscaling formats 1.0. NAME is [E, 32 G inputs, outputs].
  FP8 (DeepSeek)    NAME, a float8 matrix, and NAME_scale_inv, what each of its blocks is multiplied with, of the size
                    that `weight_block_size` of config.json says; or one number for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.config.strict import read_json
from spmdrl.model.fp8 import dequantized
from spmdrl.types import UserError

READABLE = ("mxfp4", "fp8")
_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_OF_ACTIVATIONS = "activation_scale"  # for products in few bits, which nothing here computes
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

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
    """Replace weights of few bits and their scales by the weights that they stand for; others stay as they are.

    Raises UserError for a weight without its scales, and for scales of blocks whose size is not said.
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
        values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
        whole = torch.empty(len(experts), len(inputs), len(outputs), dtype=torch.bfloat16)
        for place, expert in enumerate(experts):
            where = _slices([range(expert, expert + 1), outputs, groups])
            codes = self.blocks[*where, slice(0, half)][0]
            pairs = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)  # a byte's lower half is the first
            scale = torch.exp2(self.exponents[where][0].float() - 127).bfloat16()
            numbers = (values[pairs.int()] * scale.unsqueeze(-1)).flatten(-2)
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
