"""The trainer's memory leaves the device while the engine samples, and comes back bit for bit.

What moves is the memory behind tensors, never the tensors: parameters, FSDP's own views of them, and the optimizer's
state keep their identity, so nothing that holds one has to be told. The storage of a sleeping tensor is empty; its
bytes are in a host buffer that is kept from one sleep to the next. `to_local()` of a sleeping parameter, without
gradients, gives the host's copy, which is how a refit reads it. Nothing else can be done with it: a DTensor that says
it is on the device, with its shard on the host, fails in operations as small as `detach`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from spmdrl.model.host_memory import HostBuffers
from spmdrl.model.host_state import StateOnHost
from spmdrl.model.load import reshard
from spmdrl.model.policy import PackedModel

Moves = Literal["none", "optimizer", "all"]


@dataclass(frozen=True, slots=True)
class _Asleep:
    """One storage whose bytes are on the host."""

    storage: torch.UntypedStorage
    host: Tensor  # [number of bytes] uint8

    def bytes_on_device(self) -> Tensor:
        """The storage itself as [number of bytes] uint8; it must not be empty."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class Trained(Protocol):
    """A sharded model and what trains it."""

    @property
    def model(self) -> PackedModel: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class TrainerMemory:
    """Weights, gradients and optimizer state of all that is trained, on the device or asleep on the host.

    `moves` says what leaves: nothing, the optimizer's state, or all three. On a CPU everything is in host memory
    already, and moves there all the same.
    """

    def __init__(self, trained: Sequence[Trained], device: torch.device, *, moves: Moves) -> None:
        self._trained = trained
        self._device = device
        self._moves = moves
        self._host = HostBuffers(pinned=device.type == "cuda")
        self._asleep: list[_Asleep] = []
        self._awake_locals: list[tuple[DTensor, Tensor]] = []
        self._guards: list[RemovableHandle] = []

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept for sleeping, whether the trainer sleeps or not."""
        return self._host.num_bytes

    @property
    def asleep_bytes(self) -> int:
        """Device memory that waking will take; 0 while the trainer is awake."""
        return sum(asleep.host.numel() for asleep in self._asleep)

    @property
    def has_optimizer_state(self) -> bool:
        """Whether each optimizer has taken its first step, or a checkpoint's state was loaded."""
        return all(one.optimizer.state for one in self._trained)

    @torch.no_grad()
    def sleep(self) -> None:
        """Leave the device, and let go of what torch's allocator holds without need. Does nothing when asleep."""
        if self._asleep:
            return
        # First: while a module is gathered its parameters are the gathered ones, which FSDP frees here.
        for one in self._trained:
            reshard(one.model)
        if self._moves != "none":
            self._move_to_host()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Take the device memory back, with what it held. Does nothing when awake."""
        for asleep in self._asleep:
            asleep.storage.resize_(asleep.host.numel())
            asleep.bytes_on_device().copy_(asleep.host, non_blocking=True)
        self._synchronize()
        for holder, local in self._awake_locals:
            holder._local_tensor = local
        for guard in self._guards:
            guard.remove()
        self._asleep, self._awake_locals, self._guards = [], [], []

    def _move_to_host(self) -> None:
        holders: dict[int, list[DTensor]] = {}
        storages: dict[str, torch.UntypedStorage] = {}
        for name, tensor in self._tensors():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if local.device.type != self._device.type or storage.nbytes() == 0:
                continue  # such as the step counts of some optimizers, and ranks that own no rows
            if storage._cdata not in holders:
                holders[storage._cdata] = []
                storages[name] = storage
            if isinstance(tensor, DTensor):
                holders[storage._cdata].append(tensor)
        places = self._host.take({name: storage.nbytes() for name, storage in storages.items()})
        self._asleep = [_Asleep(storage, places[name]) for name, storage in storages.items()]
        for asleep in self._asleep:
            asleep.host.copy_(asleep.bytes_on_device(), non_blocking=True)
        self._synchronize()
        for asleep in self._asleep:
            for holder in holders[asleep.storage._cdata]:
                local = holder._local_tensor
                self._awake_locals.append((holder, local))
                holder._local_tensor = _same_view(local, asleep.host)
            asleep.storage.resize_(0)
        for one in self._trained:
            self._guards += [
                one.model.register_forward_pre_hook(_refuse, prepend=True),  # before FSDP's own, which gathers
                one.optimizer.register_step_pre_hook(_refuse),
            ]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What moves, under names that are the same at every sleep; tied weights once."""
        for place, one in enumerate(self._trained):
            parameters = {f"{place}.{name}": parameter for name, parameter in one.model.named_parameters()}
            if self._moves == "all":
                yield from parameters.items()
                yield from ((f"{name}.grad", p.grad) for name, p in parameters.items() if p.grad is not None)
            if isinstance(one.optimizer, StateOnHost):
                continue
            for name, parameter in parameters.items():
                for key, value in one.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{name}.{key}", value

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _same_view(local: Tensor, host: Tensor) -> Tensor:
    """The tensor that `local` is of its storage, of the storage's copy `host` [number of bytes] uint8."""
    copy = host.view(local.dtype)
    return copy.as_strided(local.size(), local.stride(), copy.storage_offset() + local.storage_offset())


def _refuse(*_: Any) -> NoReturn:
    raise AssertionError("the trainer sleeps: its weights or its optimizer's state are on the host; wake it first")
