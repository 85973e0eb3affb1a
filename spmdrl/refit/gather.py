"""Gathering whole weights from their shards: one all-gather per bucket, into flat memory that the caller owns.

Weights in e4m3, with scales for blocks, are made of the shards that ranks hold and gathered in half the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.core_model_loading import revert_weight_conversion

from spmdrl.dist.collectives import gather_flat, largest_over
from spmdrl.families import family_of
from spmdrl.model.fp8 import BLOCK, DTYPE, SCALES, block_maxima, is_quantized, quantized, scales_of, scales_shape
from spmdrl.model.load import weights_of
from spmdrl.model.lora.quantized import QuantizedLinear
from spmdrl.model.policy import PackedModel
from spmdrl.model.sharding import reshard
from spmdrl.model.tensor_parallel import local_part
from spmdrl.refit.bucket import Bucket, Naming, Weight, divide_frozen, plan_buckets, splits_of
from spmdrl.types import UserError

DtypeOf = Callable[[Iterable[str], torch.dtype], torch.dtype]  # of tensors by name, given that of most


class Gatherer:
    """Fills flat buckets with a sharded policy's weights, as full tensors of `dtype`.

    With `naming` "model" tensors have the names of the model's parameters and buffers. With "checkpoint" they have the
    names of its files: transformers' own conversion unfuses the experts that transformers fused.
    """

    def __init__(
        self,
        policy: PackedModel,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        naming: Naming,
        merge: bool = False,
        quantize: bool = False,
        dtype_of: DtypeOf = lambda _, dtype: dtype,
    ) -> None:
        """`merge` adds what adapters change, in float32, to each weight once it is whole. `quantize` gathers
        projections in e4m3, each followed by the scales of its blocks. `dtype_of` gives parameters another dtype, by
        the names of the parts that they are sent as."""
        self._policy, self._model = policy, policy.model
        self._mesh = mesh
        self._change_of = policy.change_of if merge else lambda _: None
        reshard(policy)
        tensors = weights_of(self._model)
        # Parameters are found by (module, attribute): listing all of them takes longer than copying a small bucket.
        self._owners = {name: _owner(self._model, name) for name in tensors}
        layers = {name: module for name, (module, _) in self._owners.items() if isinstance(module, QuantizedLinear)}
        self._quantized = {name: layer for name, layer in layers.items() if tensors[name] is layer.weight}
        to_send = partial(_weight, policy, dtype=dtype, dtype_of=dtype_of, naming=naming, num_ranks=mesh.size())
        plain = [to_send(name, tensor) for name, tensor in tensors.items()]
        weights = [part for weight in plain for part in self._as_sent(weight, naming, quantize=quantize)]
        self._quantizer = Quantizer(mesh, dtype=dtype)
        frozen = _staying(policy, tensors, merge=merge)
        changing, staying = divide_frozen(weights, frozen | {name + SCALES for name in frozen})
        self.changing: tuple[Bucket, ...] = plan_buckets(changing, bucket_bytes=bucket_bytes)  # without what is frozen
        staying_buckets = plan_buckets(staying, bucket_bytes=bucket_bytes)
        self.buckets = self.changing + staying_buckets if staying else self.changing
        self.largest_bytes = max(bucket.num_bytes for bucket in self.buckets)
        self._send: Tensor | None = None
        self._receive: Tensor | None = None

    @torch.no_grad()
    def fill(self, bucket: Bucket, flat: Tensor) -> None:
        """Write the bucket's tensors into `flat` [bucket.num_bytes] uint8; every rank of the mesh must call this.

        Host memory is complete when this returns; device memory is complete in the order of the current stream.
        """
        reshard(self._policy)
        tensors = {weight.name: self._local(weight.name) for weight in bucket.weights if weight.name in self._owners}
        tensors |= self._quantizer(bucket, tensors)
        shards = self._gather(bucket, tensors)
        wholes = [
            entries[0].view(flat) if weight.is_in_place else self._new(weight)
            for weight, entries in zip(bucket.weights, bucket.entries, strict=True)
        ]
        alone = {
            weight.name: whole for whole, weight in zip(wholes, bucket.weights, strict=True) if weight not in shards
        }
        for name in alone.keys() & self._quantized.keys():
            alone.pop(name).copy_(self._quantized[name].whole())  # one after the other: they take memory
        copy_all(list(alone.values()), [tensors[name] for name in alone])
        for whole, weight, entries in zip(wholes, bucket.weights, bucket.entries, strict=True):
            if weight in shards:
                weight.layout.join(whole, shards[weight])
            if (change := self._change_of(weight.name)) is not None:
                whole.copy_(change.add_(whole.to(change.device)))  # where an engine opens host memory, it is there
            if not weight.is_in_place:
                parts = self._parts(weight.name, whole)
                copy_all([entry.view(flat) for entry in entries], [parts[x.name].view(x.shape) for x in entries])
        if self._mesh.device_type == "cuda" and not flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # readers of host memory do not wait for the device

    def _as_sent(self, weight: Weight, naming: Naming, *, quantize: bool) -> Iterator[Weight]:
        """Yield the weight, in e4m3 with its scales where it is quantized."""
        takes_blocks = weight.dtype.is_floating_point and is_quantized(weight.name, len(weight.shape))
        if not (quantize and takes_blocks):
            yield weight
            return
        scales = {weight.name: torch.empty(scales_shape(weight.shape), device="meta")}
        if naming == "checkpoint":
            scales = _as_in_files(self._model, weight.name, scales[weight.name])
        yield from with_scales(weight, {name: part.shape for name, part in scales.items()})

    def _parts(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the model's files that a weight, or the scales of one, were made of."""
        if name in self._owners:
            return _as_in_files(self._model, name, whole)
        parts = _as_in_files(self._model, name.removesuffix(SCALES), whole)
        return {part + SCALES: value for part, value in parts.items()}

    def whole_tensors(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield each bucket's (name, full tensor) pairs, on the mesh's device; valid until the next bucket."""
        memory = torch.empty(self.largest_bytes, dtype=torch.uint8, device=self._mesh.device_type)
        for bucket in self.buckets:
            flat = memory[: bucket.num_bytes]
            self.fill(bucket, flat)
            yield [(entry.name, entry.view(flat)) for entry in bucket.flat_entries]

    def _new(self, weight: Weight) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device=self._mesh.device_type)

    def _local(self, name: str) -> Tensor:
        """Return this rank's part of a weight."""
        module, attribute = self._owners[name]
        return local_part(getattr(module, attribute))

    def _gather(self, bucket: Bucket, tensors: dict[str, Tensor]) -> dict[Weight, Tensor]:
        """Gather all ranks' parts of each sharded weight: [R, n] in the dtype to send, padded where ranks have less."""
        num_ranks = self._mesh.size()
        if num_ranks == 1:
            return {}
        slots, num_bytes = _slots(bucket)
        send, receive = self._staging(num_bytes)
        # Cast before the gather: the engine's dtype is often half as wide.
        local = {weight: tensors[weight.name].flatten() for weight in slots}
        copy_all(
            [send[start:end].view(weight.dtype)[: len(local[weight])] for weight, (start, end) in slots.items()],
            list(local.values()),
        )
        gather_flat(self._mesh, receive, send)
        by_rank = receive.view(num_ranks, num_bytes)
        return {weight: by_rank[:, start:end].view(weight.dtype) for weight, (start, end) in slots.items()}

    def _staging(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return memory to send and to receive; the same memory serves all buckets and all refits."""
        num_ranks = self._mesh.size()
        if self._send is None or self._receive is None:
            largest = max(_slots(bucket)[1] for bucket in self.buckets)
            self._send = torch.zeros(largest, dtype=torch.uint8, device=self._mesh.device_type)
            self._receive = torch.empty(num_ranks * largest, dtype=torch.uint8, device=self._mesh.device_type)
        return self._send[:num_bytes], self._receive[: num_ranks * num_bytes]


def _as_in_files(model: Any, name: str, whole: Tensor) -> dict[str, Tensor]:
    """Return the tensors of the model's files that a parameter was made of."""
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: whole})
    if family_of(model.config).has_transposed_experts and ".experts." in name and whole.ndim == 3:
        return {part: value.transpose(1, 2) for part, value in parts.items()}
    return parts


def _staying(policy: PackedModel, tensors: Mapping[str, Tensor], *, merge: bool) -> set[str]:
    """Name the weights that need not be sent again. A base with adapters is sent, as a whole, only to an engine that
    has nothing, so none of it is named unless its adapters are merged."""
    adapters = policy.adapters
    if adapters is not None and not merge:
        return set()
    frozen = {name for name, x in tensors.items() if isinstance(x, nn.Parameter) and not x.requires_grad}
    return frozen if adapters is None else frozen - adapters.weights


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, casting it. On a device, tensors of one kind go together in few launches.

    Sources may be in pinned host memory: a non-blocking copy casts them on the device, which is much faster than there.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        is_dense = target.is_contiguous() and source.is_contiguous()
        kind = kinds.setdefault((target.dtype, source.dtype, source.device, is_dense), ([], []))
        kind[0].append(target)
        kind[1].append(source)
    for alike in kinds.values():
        torch._foreach_copy_(*alike, non_blocking=True)


def _slots(bucket: Bucket) -> tuple[dict[Weight, tuple[int, int]], int]:
    """Return (first byte and end of each weight's shard in the memory that a rank sends, bytes of that memory).

    FSDP gives the last ranks smaller shards, or empty ones; every slot has room for the first rank's.
    """
    slots, start = {}, 0
    for weight in bucket.weights:
        if weight.splits:
            size = weight.layout.max_numel * weight.dtype.itemsize
            slots[weight] = (start, start + size)
            start += size
    return slots, math.ceil(start / 16) * 16  # aligns the next rank's part for every dtype


def _weight(
    policy: PackedModel,
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype,
    dtype_of: DtypeOf,
    naming: Naming,
    num_ranks: int,
) -> Weight:
    sent_as: tuple[tuple[str, torch.Size], ...] = ((name, tensor.shape),)
    if naming == "checkpoint":
        on_meta = torch.empty(tensor.shape, device="meta")
        parts = _as_in_files(policy.model, name, on_meta)
        sent_as = tuple((part, value.shape) for part, value in parts.items())
    is_buffer = not isinstance(tensor, nn.Parameter)  # these keep their dtype
    sent_dtype = tensor.dtype if is_buffer else dtype_of([part for part, _ in sent_as], dtype)
    return Weight(name, tensor.shape, sent_dtype, splits_of(tensor, num_ranks=num_ranks), sent_as)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module), attribute


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
