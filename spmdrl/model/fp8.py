"""Weights in e4m3 with a float32 scale for each block of 128 x 128, as DeepSeek's checkpoints and SGLang have them.

    scale = max(1e-4, largest magnitude in the block) / 448        number = e4m3(weight * (448 / that maximum))

in float32, which is DeepGEMM's `per_block_cast_to_fp8`. Blocks begin at a matrix's first row and column, and the last
ones may be smaller. A maximum does not depend on the order in which it is taken, so ranks that hold parts of a block
find its scale together, and each the same e4m3 numbers as one rank that holds all of it.

A part of a matrix is given with `first`, the row and column of the matrix where it begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
DTYPE = torch.float8_e4m3fn
SCALES = "_scale_inv"  # after a weight's name: what its blocks are multiplied with
_LARGEST = 448.0  # of e4m3
_SMALLEST_MAXIMUM = 1e-4

# Projections of attention and MLPs, experts' too. Embeddings, heads, norms, routers, biases, the projections of
# recurrent layers and all of a tower stay as they are.
_PROJECTION = re.compile(
    r"\.((q|k|v|o|qkv|gate|up|gate_up|down)_proj\.weight|experts\.(gate_up|up|gate|down)_proj)$",
)
_TOWER = re.compile(r"(^|\.)(visual|vision\w*)\.")


def is_quantized(name: str, num_dims: int) -> bool:
    """Return True for a weight that an engine in fp8 has in e4m3, given its name and its number of dimensions."""
    return num_dims in (2, 3) and _PROJECTION.search(name) is not None and _TOWER.search(name) is None


def scales_shape(shape: Sequence[int]) -> torch.Size:
    """Return the shape of the scales [..., blocks of rows, blocks of columns] of a weight [..., rows, columns]."""
    *others, rows, columns = shape
    return torch.Size([*others, -(-rows // BLOCK), -(-columns // BLOCK)])


def block_maxima(part: Tensor, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the largest magnitude of each block, [..., blocks, blocks] float32, as far as it is in this part."""
    return _in_blocks(part, first, (BLOCK, BLOCK)).abs().amax((-3, -1)).float()


def scales_of(maxima: Tensor) -> Tensor:
    """Return the scales of blocks, given the `block_maxima` of their whole matrix."""
    # By a tensor: on CUDA, torch divides by a number by multiplying with its inverse, which rounds twice.
    return maxima.clamp(min=_SMALLEST_MAXIMUM) / torch.full_like(maxima, _LARGEST)


def quantized(part: Tensor, maxima: Tensor, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return a part [..., rows, columns] in e4m3, given the `block_maxima` of the blocks that it touches, of their
    whole matrix."""
    factors = _LARGEST / maxima.clamp(min=_SMALLEST_MAXIMUM)
    return _times(part, factors, first, (BLOCK, BLOCK)).to(DTYPE)


def dequantized(
    part: Tensor, scales: Tensor, first: tuple[int, int] = (0, 0), block: tuple[int, int] = (BLOCK, BLOCK)
) -> Tensor:
    """Return the float32 numbers that a part of a weight in float8 encodes, given the scales of the blocks that it
    touches."""
    return _times(part.float(), scales.float(), first, block)


# Writing again what came with scales. Parts begin where blocks do.


def compared(part: Tensor, given: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return, for each block of bfloat16 numbers, True when its given scale does not express them exactly in float8 of
    `dtype`; and the largest magnitudes."""
    differs = dequantized(cast(part, given, block, dtype), given, (0, 0), block).bfloat16() != part
    maxima = _in_blocks(part, (0, 0), block).abs().amax((-3, -1)).float()
    return _in_blocks(differs, (0, 0), block).any(-1).any(-2), maxima


def scales_again(
    is_changed: Tensor, maxima: Tensor, given: Tensor, dtype: torch.dtype, *, powers_of_two: bool
) -> Tensor:
    """Return the given scales, in their dtype, with those of changed blocks made of the blocks' largest magnitudes."""
    made = maxima.clamp(min=_SMALLEST_MAXIMUM) / torch.finfo(dtype).max
    if powers_of_two:
        made = made.log2().ceil().exp2()
    return torch.where(is_changed, made.to(given.dtype).float(), given.float()).to(given.dtype)


def cast(part: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the numbers of float8 nearest to a part, each divided by the scale of its block."""
    return _times(part.float(), 1 / scales.float(), (0, 0), block).to(dtype)


def as_numbers(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace e4m3 tensors and their scales by the weights of `dtype` that they encode; others stay."""
    return {
        name: dequantized(tensor, tensors[name + SCALES]).to(dtype) if name + SCALES in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALES)
    }


def _times(part: Tensor, factors: Tensor, first: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Multiply each block of a part [..., rows, columns] by its factor [..., blocks, blocks] float32."""
    rows, columns = part.shape[-2:]
    product = (_in_blocks(part, first, block) * factors[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    top, left = (start % size for start, size in zip(first, block, strict=True))
    return product[..., top : top + rows, left : left + columns]


def _in_blocks(part: Tensor, first: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """View a part [..., rows, columns] as [..., blocks, rows of each, blocks, columns of each], padded with zeros where
    it has only a part of a block."""
    before = [start % size for start, size in zip(first, block, strict=True)]
    after = [-(start + size) % unit for start, size, unit in zip(before, part.shape[-2:], block, strict=True)]
    if any(before) or any(after):
        part = pad(part, [before[1], after[1], before[0], after[0]])
    return part.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
