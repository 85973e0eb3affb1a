"""Weights in e4m3 with scales for blocks, made of the shards that ranks hold: they are gathered in half the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import largest_over
from spmdrl.model.fp8 import BLOCK, DTYPE, SCALES, block_maxima, is_quantized, quantized, scales_of, scales_shape
from spmdrl.refit.bucket import Bucket, Weight
from spmdrl.types import UserError


def with_scales(weight: Weight, scales_sent_as: Mapping[str, torch.Size]) -> Iterator[Weight]:
    """Yield a weight as it is sent in e4m3, and its scales, given the shapes of the scales' parts by the weight's own
    names. Raises UserError where a block would belong to two of the tensors that it is sent as."""
    for name, shape in weight.sent_as:
        if _longer_than_one(scales_sent_as[name]) != _longer_than_one(scales_shape(shape)):
            raise UserError(
                f'rollout.quantization = "fp8": {name} {list(shape)} is a part of {weight.name} {list(weight.shape)} '
                "whose blocks of 128 x 128 are not blocks of the part; remove rollout.quantization"
            )
    yield replace(weight, dtype=DTYPE)
    sent_as = tuple((name + SCALES, scales_shape(shape)) for name, shape in weight.sent_as)
    yield Weight(weight.name + SCALES, scales_shape(weight.shape), torch.float32, (), sent_as)


def _longer_than_one(shape: torch.Size) -> list[int]:
    """transformers leaves out dimensions of one index when it takes experts apart."""
    return [size for size in shape if size > 1]


def takes_blocks(weight: Weight) -> bool:
    """Return True for a weight that an engine in fp8 gets in e4m3."""
    return weight.dtype.is_floating_point and is_quantized(weight.name, len(weight.shape))


class Quantizer:
    """Makes each rank's part of a bucket's e4m3 numbers, and the scales, which every rank has."""

    def __init__(self, mesh: DeviceMesh, *, dtype: torch.dtype) -> None:
        """`mesh` holds the ranks of one copy of the weights; they are rounded to `dtype`, in which the trainer
        computes, before they are quantized."""
        self._mesh, self._dtype = mesh, dtype

    def __call__(self, bucket: Bucket, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of each tensor in the bucket that is in e4m3, and all of its scales, by name; one
        collective for all of them."""
        weights = [weight for weight in bucket.weights if weight.dtype == DTYPE]
        if not weights:
            return {}
        shapes = [scales_shape(weight.shape) for weight in weights]
        flat = torch.zeros(sum(shape.numel() for shape in shapes), device=self._mesh.device_type)
        maxima = [part.view(shape) for part, shape in zip(flat.split([x.numel() for x in shapes]), shapes, strict=True)]
        parts = [shards[weight.name].detach().to(self._mesh.device_type) for weight in weights]
        for weight, part, largest in zip(weights, parts, maxima, strict=True):
            for box, first, blocks in self._boxes(weight):
                largest[blocks].copy_(largest[blocks].maximum(block_maxima(part[box].to(self._dtype), first)))
        largest_over(self._mesh, flat)
        found: dict[str, Tensor] = {}
        for weight, part, largest in zip(weights, parts, maxima, strict=True):
            found[weight.name] = numbers = torch.empty(part.shape, dtype=DTYPE, device=part.device)
            for box, first, blocks in self._boxes(weight):
                numbers[box].copy_(quantized(part[box].to(self._dtype), largest[blocks], first))
            found[weight.name + SCALES] = scales_of(largest)
        return found

    def _boxes(self, weight: Weight) -> Iterator[tuple[tuple[slice, ...], tuple[int, int], tuple[slice, ...]]]:
        """Yield each box of the weight that this rank holds: its place in the rank's part, the row and column where it
        begins, and the blocks that it touches."""
        for whole, own in weight.layout.boxes(self._mesh.get_local_rank()):
            *others, rows, columns = whole
            blocks = (slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in (rows, columns))
            yield own, (rows.start, columns.start), (*others, *blocks)
