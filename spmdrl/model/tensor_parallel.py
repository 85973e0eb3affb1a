"""Layers split over a tp mesh, whose ranks compute the same tokens with a part of each weight.

A split weight is a DTensor on that mesh: FSDP shards it further, and transformers loads into each rank only its part.
Layers compute with the plain local parts. Communication is explicit: `copy_to` begins and `reduce_from` ends the
stretch of a layer in which activations differ between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from spmdrl.dist.collectives import exchange_rows, gather_flat, sum_over
from spmdrl.model.linear import linear


def copy_to(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, which is equal on all ranks of the mesh; in backward, sum the ranks' gradients of it."""
    return _Copy.apply(x, mesh)


def reduce_from(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum x over the ranks of the mesh; in backward, pass on the gradient, which is equal on all ranks."""
    return _Reduce.apply(x, mesh)


def own_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's slice along `dim` of x, which is equal on all ranks; the last slices may be shorter."""
    return _Own.apply(x, mesh, dim) if mesh.size() > 1 else x


def gather_parts(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Join the parts that `own_part` made, of `size` along `dim` in all, on every rank."""
    return _Gather.apply(x, mesh, dim, size) if mesh.size() > 1 else x


def exchange(rows: Tensor, send: list[int], receive: list[int], mesh: DeviceMesh) -> Tensor:
    """Send `send[r]` rows to each rank r, in order, and receive `receive[r]` from it; gradients return the same way."""
    return _Exchange.apply(rows, send, receive, mesh)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(ctx.mesh, grad.contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return sum_over(mesh, x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, x.shape[dim]
        return _slice(x, mesh, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _joined(grad, ctx.mesh, ctx.dim, ctx.size), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _joined(x, mesh, dim, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _slice(grad, ctx.mesh, ctx.dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], mesh: DeviceMesh) -> Tensor:
        ctx.send, ctx.receive, ctx.mesh = send, receive, mesh
        return exchange_rows(mesh, rows, send, receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(ctx.mesh, grad, ctx.receive, ctx.send), None, None, None


def _slice(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    size = x.shape[dim]
    each = math.ceil(size / mesh.size())
    start = min(size, mesh.get_local_rank() * each)
    return x.narrow(dim, start, min(each, size - start)).contiguous()


def _joined(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    rows = x.movedim(dim, 0)
    each = math.ceil(size / mesh.size())
    padded = rows.new_zeros(each, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = padded.new_empty(each * mesh.size(), *rows.shape[1:])
    gather_flat(mesh, gathered, padded)
    # Not a view: FSDP registers hooks on the outputs of its modules, and models may add to them in place.
    return gathered[:size].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Turn a parameter of the module into a DTensor on the mesh, without communication."""
    whole = module.get_parameter(name)
    part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; of a parameter in a layer, gradients flow to that part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def parameters_as(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace each of the module's own parameters by `transform(parameter)` inside this block."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    module._parameters.update({name: transform(parameter) for name, parameter in parameters.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(parameters)


class SharedCopy:
    """`copy_to` for layers of one parent module that read the same tensor, such as q, k and v projections.

    The layers share one copy, so that backward sums its gradient over the ranks once instead of once for each layer.
    """

    def __init__(self, parent: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._source: Tensor | None = None
        self._copy: Tensor | None = None
        # Also when the parent raises: recomputation of a checkpointed layer stops with an exception once it has the
        # tensors it needs.
        parent.register_forward_hook(self._forget, always_call=True)

    def __call__(self, x: Tensor) -> Tensor:
        if self._copy is None or self._source is not x:
            self._source, self._copy = x, copy_to(x, self._mesh)
        return self._copy

    def _forget(self, *_: Any) -> None:
        self._source = self._copy = None


class _SplitLinear(nn.Linear):
    tp: DeviceMesh
    bias: nn.Parameter | None  # type: ignore[assignment]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, local_part(self.weight), bias)


class ColwiseLinear(_SplitLinear):
    """A linear layer of which each rank computes its part of the output features, from all input features."""

    shared_copy: SharedCopy

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local_part(self.bias)
        return self.product(self.shared_copy(input), bias)


class ColwiseGatheringLinear(ColwiseLinear):
    """A `ColwiseLinear` that gathers all output features on every rank."""

    def forward(self, input: Tensor) -> Tensor:
        return gather_parts(super().forward(input), self.tp, -1, self.out_features)


class RowwiseLinear(_SplitLinear):
    """A linear layer of which each rank has its part of the input features; the outputs are summed over the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        y = reduce_from(self.product(input, None), self.tp)
        return y if self.bias is None else y + self.bias  # after the sum, so that it is added once


class RowwiseSplittingLinear(RowwiseLinear):
    """A `RowwiseLinear` that takes all input features and uses this rank's part of them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(own_part(input, self.tp, -1))


class LatentLinear(_SplitLinear):
    """The layer of latent attention that each rank computes whole: what keys and values are made of, then the rotated
    part of the key, which all heads share. Each rank has some of these heads, so gradients of that part are summed."""

    rotated: int  # outputs of that part

    def forward(self, input: Tensor) -> Tensor:
        return self.for_heads(self.product(input, self.bias))

    def for_heads(self, output: Tensor) -> Tensor:
        """Return the output, for use by this rank's heads."""
        latent, key = output.split([output.shape[-1] - self.rotated, self.rotated], dim=-1)
        return torch.cat((latent, copy_to(key, self.tp)), dim=-1)


def split_linear(module: nn.Linear, kind: type[_SplitLinear], mesh: DeviceMesh, shared_copy: SharedCopy) -> None:
    """Split the weights of a linear layer, which is to become one of the kinds above."""
    by_outputs = issubclass(kind, ColwiseLinear)
    if not issubclass(kind, LatentLinear):
        split_parameter(module, "weight", mesh, Shard(0 if by_outputs else 1))
    if by_outputs and module.bias is not None:
        split_parameter(module, "bias", mesh, Shard(0))
    vars(module).update(tp=mesh, shared_copy=shared_copy)


def sum_weight_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the weights' gradients over the ranks, for a layer with whole weights that sees a part of the features.

    Norms of each head are such layers.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        with parameters_as(module, lambda weight: copy_to(weight, mesh)):
            return type(module).forward(module, *args, **kwargs)  # of the class that it has by then, see fused.py

    module.forward = forward


def split_embedding(module: nn.Embedding, mesh: DeviceMesh) -> None:
    """Split the vocabulary: each rank has the rows of its own tokens, and the results are summed over the ranks."""
    split_parameter(module, "weight", mesh, Shard(0))
    num_rows = module.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * num_rows
    if module.padding_idx is not None:  # the row without gradient; renumbered, or None on ranks without it
        here = first <= module.padding_idx < first + num_rows
        module.padding_idx = module.padding_idx - first if here else None
    look_up = module.forward  # a subclass may scale the rows that it returns

    def forward(input: Tensor) -> Tensor:
        rows = input - first
        elsewhere = (rows < 0) | (rows >= num_rows)
        with parameters_as(module, local_part):
            found = look_up(rows.masked_fill(elsewhere, 0))
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0), mesh)

    module.forward = forward  # type: ignore[method-assign]
