"""Tensors of the trainer in host memory: all while the engine samples, or an optimizer's state always.

Of a sleeping trainer only the memory behind the tensors moves, bit for bit. The tensors themselves (parameters, FSDP's
views of them, optimizer state) stay the same objects, so references to them remain valid. The storage of a sleeping
tensor is empty; its bytes are in a host buffer that is reused at every sleep. `to_local()` of a sleeping parameter,
without gradients, returns the host's copy; a refit reads it so. No other operation works: a DTensor that claims to be
on the device but has its shard on the host fails even in `detach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from spmdrl.algo.packing import neighbours_within
from spmdrl.memory.device import STATE_BLOCK_BYTES
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
                adapters = trained.model.adapters  # whose memory stays: it is small, and a refit reads it meanwhile
                stays = None if adapters is None else adapters.flat
                yield from ((name, p) for name, p in parameters.items() if p is not stays)
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


def _same_view(local: Tensor, host: Tensor) -> Tensor:
    """View `host` [number of bytes] uint8, the copy of a storage, as `local` views the storage."""
    copy = host.view(local.dtype)
    return copy.as_strided(local.size(), local.stride(), copy.storage_offset() + local.storage_offset())


def _refuse(*_: Any) -> NoReturn:
    raise AssertionError("the trainer sleeps: its weights or its optimizer state are on the host; wake it first")


# Optimizers whose state lives in host memory, and that memory, which is used again at every step.
#
# A step copies the state to the device for one block of parameters at a time, updates the block, and copies it back.
# The memory is pinned when the device is a GPU.

BLOCK_BYTES = 2**28
_ALIGNMENT = 512  # bytes; enough for every dtype, and the alignment of CUDA's own allocator


class HostBuffers:
    """Host memory by name. It is never freed: asking again for the same name and size returns the same memory."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._places: dict[str, Tensor] = {}
        self.num_bytes = 0

    def take(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return memory [size] uint8 for each name."""
        known = {name: place.numel() for name, place in self._places.items()}
        new = {name: size for name, size in sizes.items() if known.get(name) != size}
        block_sizes, places = plan_blocks(new)
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in block_sizes]
        for name, (block, start) in places.items():
            self._places[name] = blocks[block][start : start + new[name]]
        self.num_bytes += sum(block_sizes)
        return {name: self._places[name] for name in sizes}


def plan_blocks(sizes: Mapping[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Place tensors of these sizes in blocks: returns (bytes of each block, name -> (block, first byte)).

    Blocks are powers of two, because torch's pinned allocator rounds every allocation up to one: a buffer of 9 GiB
    would take 16. Tensors are placed from the largest to the smallest, each in the first block with room for it.
    """
    blocks: list[int] = []
    used: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    padded = {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sizes.items()}
    left = sum(padded.values())
    for name in sorted(padded, key=lambda name: -padded[name]):
        size = padded[name]
        block = next((i for i, room in enumerate(blocks) if used[i] + size <= room), len(blocks))
        if block == len(blocks):
            blocks.append(1 << (max(size, min(left, BLOCK_BYTES)) - 1).bit_length())
            used.append(0)
        places[name] = (block, used[block])
        used[block] += size
        left -= size
    return blocks, places


class StateOnHost(torch.optim.Optimizer):
    """Mixin that keeps an optimizer's state on the host; see `with_state_on_host`."""

    block_bytes = STATE_BLOCK_BYTES  # parameters whose state is on the device together; a larger one is its own block

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parameters = self._parameters()
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._host = HostBuffers(pinned=any(parameter.is_cuda for parameter in parameters))
        for group in self.param_groups:  # some optimizers create their state here
            self._move_to_host(group, group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step of the optimizer on each block of parameters in turn."""
        assert closure is None, "gradients must be computed before the step"
        groups = self.param_groups
        try:
            for group in groups:
                settings = _settings(group)
                for block in _blocks(group["params"], self.block_bytes):
                    # Each block starts from a copy of the settings: a counter in them advances once a step, not once
                    # a block.
                    alone = settings | {"params": block}
                    self.param_groups = [alone]
                    self._copy_to_device(alone, block)
                    super().step()
                    self._move_to_host(alone, block)
                    group.update(_settings(alone))
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load settings and state from `state_dict`, the state into host memory; torch would load it to the device."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])
        for group in self.param_groups:
            self._move_to_host(group, group["params"])

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _moving_state(
        self, group: dict[str, Any], block: Sequence[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """Yield (parameter, key, value) for all state that must be on the device for a step on `block`.

        Step counts stay on the host unless the kernel reads them on the device, as in torch's own optimizers.
        """
        moves_counts = group.get("fused") or group.get("capturable")
        for parameter in block:
            for key, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (key != "step" or moves_counts):
                    yield parameter, key, value

    def _copy_to_device(self, group: dict[str, Any], block: Sequence[nn.Parameter]) -> None:
        """Copy the state of `block` to the device of its parameters."""
        for parameter, key, value in self._moving_state(group, block):
            local = _local(value)
            there = torch.empty_like(local, device=_local(parameter).device, pin_memory=False)
            self.state[parameter][key] = _with_local(value, there.copy_(local, non_blocking=True))

    @torch.no_grad()
    def _move_to_host(self, group: dict[str, Any], block: Sequence[nn.Parameter]) -> None:
        """Move the state of `block` to its place on the host, and wait until it is there."""
        values = {(p, key): value for p, key, value in self._moving_state(group, block)}
        names = {(p, key): f"{self._numbers[p]}.{key}" for p, key in values}
        places = self._host.take({names[place]: _local(value).nbytes for place, value in values.items()})
        for (parameter, key), value in values.items():
            local = _local(value)
            home = places[names[parameter, key]].view(local.dtype).view(local.shape)
            self.state[parameter][key] = _with_local(value, home.copy_(local, non_blocking=True))
        if any(_local(value).is_cuda for value in values.values()):
            torch.cuda.synchronize()


def with_state_on_host(kind: Callable[..., torch.optim.Optimizer]) -> type[StateOnHost]:
    """Derive a class from an optimizer class that keeps its state on the host."""
    assert isinstance(kind, type)
    return type(f"{kind.__name__}WithStateOnHost", (StateOnHost, kind), {})


def _blocks(parameters: Sequence[nn.Parameter], max_bytes: int) -> Iterator[Sequence[nn.Parameter]]:
    """Split the parameters, in order, into blocks of at most `max_bytes`; a larger parameter is its own block."""
    sizes = [_local(parameter).nbytes for parameter in parameters]
    return (parameters[run] for run in neighbours_within(sizes, max_bytes))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; unlike `to_local()` this is not recorded by autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor like `tensor` that is `local` on this rank; `from_local` would move it to the mesh's device."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
