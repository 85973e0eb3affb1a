"""Low-rank adapters (LoRA): a frozen base, and for some of its weights two small matrices that are trained.

An adapter adds `scale * B (A x)` to what a weight makes of x. All matrices of a model are float32 views of one memory,
which every rank holds whole, outside FSDP. What the optimizer sees is one parameter: the same memory as a table whose
rows are dealt out to the ranks that train. Gradients are summed over them once an update, each rank steps its own rows,
and the rows are gathered again. The base keeps its own names; switched off, adapters do nothing at all.

Adapters may begin at a start that is not 0 (`policy.py`), which is then subtracted from what they add. It lies in a
memory of its own, whole on every rank, and what is trained are differences from it. Everyone else (files, engines,
merged weights) sees plain adapters of twice the rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spmdrl.dist.collectives import gather_flat, scatter_sums
from spmdrl.model.lora.layers import Pair

ROW = 64  # elements in a row of the table; every matrix begins a row, so that it is aligned for every device
PREFIX = "base_model.model."  # PEFT's, before the names of the model's own modules


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraScaling:
    """How much the product of an adapter's matrices counts."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def doubled(self) -> LoraScaling:
        """The strength of twice the rank with the same factor."""
        times = math.sqrt(2.0) if self.rslora else 2.0
        return dataclasses.replace(self, rank=2 * self.rank, alpha=times * self.alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The description of adapters in a checkpoint, which can be loaded only into adapters with the same."""

    base: str  # the digest of the files that their base was read from
    matrices: str  # the digest of their names and shapes, in order
    rank: int
    alpha: float
    rslora: bool
    init: str = "default"

    def __str__(self) -> str:
        began = "" if self.init == "default" else f", init {self.init}"
        return f"rank {self.rank}, alpha {self.alpha:g}, rslora {str(self.rslora).lower()}{began}"


class Target(Protocol):
    """A weight that gets an adapter."""

    @property
    def module(self) -> str:
        """The module's name in PEFT's files, after `PREFIX`."""

    @property
    def weight(self) -> str:
        """The name of the parameter in the model."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The parameter's shape, whole."""

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Give the shapes of A and of B."""

    def install(self, pair: Pair, *, scale: float, is_on: Callable[[], bool]) -> None:
        """Make the model add the adapter's part in every forward pass in which `is_on()`."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply B with A: what they change, in the shape of the weight and without its scale."""


class Adapters(nn.Module):
    """The adapters of one model. What is trained begins as zeros: `load` gives it values."""

    flat: nn.Parameter  # [rows, ROW] float32, a DTensor whose rows are dealt out: what the optimizer steps
    start: Tensor | None  # [rows, ROW] float32, the same places of what is trained as differences; a checkpoint has it

    def __init__(
        self,
        targets: Sequence[Target],
        strength: LoraScaling,
        mesh: DeviceMesh,
        *,
        config: Mapping[str, Any],
        base: str,
        init: str = "default",
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`mesh` are all ranks that train; `config` is what PEFT's adapter_config.json says of `tensors`, and `base`
        the digest of the files that their base was read from. `init` names the `start`, which has the names and shapes
        of what is trained."""
        super().__init__()
        self.strength, self.config = strength, dict(config)
        self._mesh = mesh
        self._targets = {target.weight: target for target in targets}
        self._places: dict[str, tuple[int, tuple[int, int]]] = {}  # first element and shape, by PEFT's name
        num_rows = 0
        for target in targets:
            for name, shape in zip(matrix_names(target), target.shapes(strength.rank), strict=True):
                self._places[name] = num_rows * ROW, shape
                num_rows += math.ceil(math.prod(shape) / ROW)
        matrices = json.dumps([(name, shape) for name, (_, shape) in self._places.items()])
        digest = hashlib.sha256(matrices.encode()).hexdigest()
        self.identity = Identity(base=base, matrices=digest, init=init, **dataclasses.asdict(strength))
        self._rows_each = math.ceil(num_rows / mesh.size())
        self._whole = torch.zeros(self._rows_each * mesh.size(), ROW, device=mesh.device_type)
        self._leaves = {name: self._view(self._whole, name).requires_grad_() for name in self._places}
        self._is_on = True
        mine = self._whole[self._own()]
        self.flat = nn.Parameter(_as_table(mine, num_rows, mesh))
        self.register_buffer("start", None if start is None else self._laid_out(start, num_rows))
        self._pairs = {target.weight: self._pair(target) for target in targets}
        for target in targets:
            target.install(self._pairs[target.weight], scale=strength.scale, is_on=lambda: self._is_on)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Every matrix that is trained, by its name in PEFT's files: float32, whole, the same on every rank, views of
        one memory. With a start they are differences from it."""
        return {name: leaf.detach() for name, leaf in self._leaves.items()}

    @property
    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Every matrix of the plain adapters that do the same, by its name in PEFT's files: float32, whole, the same on
        every rank. Without a start they are what is trained, and otherwise new memory."""
        if self.start is None:
            return self.trained
        plain = {target: self._pairs[target.weight].plain() for target in self._targets.values()}
        return {name: x for target, pair in plain.items() for name, x in zip(matrix_names(target), pair, strict=True)}

    @property
    def weights(self) -> Set[str]:
        """The names of the parameters of the model that they change."""
        return self._targets.keys()

    @property
    def is_on(self) -> bool:
        """False inside `off()`."""
        return self._is_on

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make the model compute as if it had no adapters, bit for bit."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    @contextmanager
    def summing_gradients(self) -> Iterator[None]:
        """Sum the gradients of the backward passes in this block over all ranks that train, once, at its end.

        Every one of them must enter it.
        """
        gradients = torch.zeros_like(self._whole)
        for name, leaf in self._leaves.items():
            leaf.grad = self._view(gradients, name)  # backward passes add to it in place
        try:
            yield
            own = gradients.new_empty(self._rows_each, ROW)
            scatter_sums(self._mesh, own.view(-1), gradients.view(-1))
            self.flat.grad = _as_table(own, len(self.flat), self._mesh)
        finally:
            for leaf in self._leaves.values():
                leaf.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the rows that other ranks have changed; every rank that trains must call this."""
        gather_flat(self._mesh, self._whole.view(-1), self._whole[self._own()].flatten().clone())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole matrices into the places of those that are trained, by PEFT's names; every rank must give the
        same."""
        for name, tensor in tensors.items():
            self._view(self._whole, name).copy_(tensor)

    @torch.no_grad()
    def change_of(self, weight: str) -> Tensor | None:
        """Return what is added to a parameter of the model, float32 in its shape; None where nothing is."""
        if (target := self._targets.get(weight)) is None:
            return None
        return target.product(*self._pairs[weight].plain()).mul_(self.strength.scale)

    def _pair(self, target: Target) -> Pair:
        names = matrix_names(target)
        a, b = (self._leaves[name] for name in names)
        if self.start is None:
            return Pair(a, b)
        a0, b0 = (self._view(self.start, name) for name in names)
        return Pair(a, b, (a0, b0))

    def _laid_out(self, tensors: Mapping[str, Tensor], num_rows: int) -> Tensor:
        """Copy matrices, by PEFT's names, into new memory [num_rows, ROW], each to its place."""
        memory = self._whole.new_zeros(num_rows, ROW)
        for name, tensor in tensors.items():
            self._view(memory, name).copy_(tensor)
        return memory

    def _own(self) -> slice:
        """Return this rank's rows of the memory."""
        first = self._mesh.get_local_rank() * self._rows_each
        return slice(first, first + self._rows_each)

    def _view(self, memory: Tensor, name: str) -> Tensor:
        start, shape = self._places[name]
        return memory.view(-1)[start : start + math.prod(shape)].view(shape)


def matrix_names(target: Target) -> tuple[str, str]:
    """Name the matrices A and B of a target as PEFT's files do."""
    stem = f"{PREFIX}{target.module}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _as_table(own: Tensor, num_rows: int, mesh: DeviceMesh) -> DTensor:
    """View this rank's rows as its part of a table of `num_rows`; what lies beyond is filling."""
    left = max(0, num_rows - mesh.get_local_rank() * len(own))
    shape = torch.Size((num_rows, ROW))
    return DTensor.from_local(own[:left], mesh, [Shard(0)], shape=shape, stride=(ROW, 1))
