"""Moving the trainer's tensors to the host while the engine samples, and back, bit for bit.

Only the memory behind the tensors moves. The tensors themselves (parameters, FSDP's views of them, optimizer state)
stay the same objects, so references to them remain valid. The storage of a sleeping tensor is empty; its bytes are in a
host buffer that is reused at every sleep. `to_local()` of a sleeping parameter, without gradients, returns the host's
copy; a refit reads it so. No other operation works: a DTensor that claims to be on the device but has its shard on the
host fails even in `detach`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from spmdrl.model.host_state import HostBuffers, StateOnHost
from spmdrl.model.policy import PackedModel
from spmdrl.model.sharding import reshard

Moves = Literal["none", "optimizer", "all"]


@dataclass(frozen=True, slots=True)
class _SleepingStorage:
    """A storage of the device whose bytes are on the host."""

    storage: torch.UntypedStorage
    host: Tensor  # [number of bytes] uint8

    def bytes_on_device(self) -> Tensor:
        """View the storage itself as [number of bytes] uint8; it must not be empty."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class Trained(Protocol):
    """A sharded model and its optimizer."""

    @property
    def model(self) -> PackedModel: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class TrainerMemory:
    """Weights, gradients and optimizer state of all trained models, on the device or asleep on the host.

    `moves` is what leaves the device: "none", the "optimizer" state, or "all" three. When the device is a CPU the same
    moves take place within host memory.
    """

    def __init__(self, trained: Sequence[Trained], device: torch.device, *, moves: Moves) -> None:
        self._trained = trained
        self._device = device
        self._moves = moves
        self._host = HostBuffers(pinned=device.type == "cuda")
        self._asleep: list[_SleepingStorage] = []
        self._awake_locals: list[tuple[DTensor, Tensor]] = []
        self._guards: list[RemovableHandle] = []

    @property
    def asleep_bytes(self) -> int:
        """Bytes of device memory that waking will take; 0 while the trainer is awake."""
        return sum(asleep.host.numel() for asleep in self._asleep)

    @property
    def has_optimizer_state(self) -> bool:
        """True once every optimizer has taken its first step, or a checkpoint's state was loaded."""
        return all(trained.optimizer.state for trained in self._trained)

    @torch.no_grad()
    def sleep(self) -> None:
        """Move to the host and free the memory that torch's allocator caches. Does nothing when asleep."""
        if self._asleep:
            return
        # First: the parameters of a gathered module are the whole ones, which FSDP frees here.
        for trained in self._trained:
            reshard(trained.model)
        if self._moves != "none":
            self._move_to_host()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Move everything back to the device. Does nothing when awake."""
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
        self._asleep = [_SleepingStorage(storage, places[name]) for name, storage in storages.items()]
        for asleep in self._asleep:
            asleep.host.copy_(asleep.bytes_on_device(), non_blocking=True)
        self._synchronize()
        for asleep in self._asleep:
            for holder in holders[asleep.storage._cdata]:
                local = holder._local_tensor
                self._awake_locals.append((holder, local))
                holder._local_tensor = _same_view(local, asleep.host)
            asleep.storage.resize_(0)
        for trained in self._trained:
            self._guards += [
                trained.model.register_forward_pre_hook(_refuse, prepend=True),  # before FSDP's own, which gathers
                trained.optimizer.register_step_pre_hook(_refuse),
            ]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that move, under names that are the same at every sleep; tied weights once."""
        for place, trained in enumerate(self._trained):
            parameters = {f"{place}.{name}": parameter for name, parameter in trained.model.named_parameters()}
            if self._moves == "all":
                yield from ((name, p) for name, p in parameters.items() if not _is_of_adapters(trained.model, p))
                yield from ((f"{name}.grad", p.grad) for name, p in parameters.items() if p.grad is not None)
            if isinstance(trained.optimizer, StateOnHost):
                continue
            for name, parameter in parameters.items():
                for key, value in trained.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{name}.{key}", value

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_of_adapters(model: PackedModel, parameter: Tensor) -> bool:
    """True for the memory of adapters, which stays: it is small, and a refit reads it while the trainer sleeps."""
    return model.adapters is not None and parameter is model.adapters.flat


def _same_view(local: Tensor, host: Tensor) -> Tensor:
    """View `host` [number of bytes] uint8, the copy of a storage, as `local` views the storage."""
    copy = host.view(local.dtype)
    return copy.as_strided(local.size(), local.stride(), copy.storage_offset() + local.storage_offset())


def _refuse(*_: Any) -> NoReturn:
    raise AssertionError("the trainer sleeps: its weights or its optimizer state are on the host; wake it first")
