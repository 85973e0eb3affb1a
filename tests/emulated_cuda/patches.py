"""Parts of torch that the CPU build cannot do, and that cannot be given to it by `torch._C`."""

from __future__ import annotations

from typing import Any

import torch

from . import device_bytes, devices
from .bindings import _properties, core


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return _bytes(storage).to(device).untyped_storage()


def _share(self: torch.UntypedStorage) -> tuple[Any, ...]:
    handle = core().share(_bytes(self))
    return self.device.index, handle, self.nbytes(), 0, handle, 0, b"", True


def _open(cls: type, device: int, handle: bytes, *_: Any) -> torch.UntypedStorage:
    return core().open_handle(handle).untyped_storage()


def install() -> None:
    """Start the devices, and replace what needs it."""
    core().start(devices(), device_bytes())
    torch.cuda._get_device_properties = _properties
    torch.cuda.mem_get_info = lambda device=None: core().mem_get_info(torch.cuda._utils._get_device_index(device, True))
    torch.cuda.memory.mem_get_info = torch.cuda.mem_get_info
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    to = torch.storage._to
    torch.storage._to = lambda self, device, non_blocking=False: (
        _moved(self, device) if {self.device.type, device.type} == {"cpu", "cuda"} else to(self, device, non_blocking)
    )
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        core().resize_storage(_bytes(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage._share_cuda_ = _share  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = classmethod(_open)  # type: ignore[assignment]
    torch.UntypedStorage._release_ipc_counter_cuda = classmethod(  # type: ignore[assignment]
        lambda cls, handle, offset, **_: core().release_handle(handle)
    )
