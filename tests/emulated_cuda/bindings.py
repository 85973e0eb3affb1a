"""What the CUDA build of torch has in `torch._C`, so that `torch.cuda` runs as it is."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import device_bytes, devices, load_core


@dataclass
class DeviceProperties:
    """What kernels and programs ask about a device: an H100 with less memory."""

    name: str
    total_memory: int
    uuid: str
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""


class Graph:
    """A graph cannot be captured: kernels run as they are launched."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the emulated CUDA device has no graphs")


def _number(device: Any) -> int:
    return core().get_device() if device is None or int(device) < 0 else int(device)


def core() -> ModuleType:
    """The extension."""
    return load_core()


def _init() -> None:
    cuda = sys.modules["torch.cuda"]
    cuda.default_generators = tuple(core().default_generator(i) for i in range(len(devices())))


def _properties(device: int) -> DeviceProperties:
    return DeviceProperties("NVIDIA H100 (emulated)", device_bytes(), f"emulated-{device}")


def _host_stats() -> dict[str, Any]:
    current, peak = core().pinned_bytes()
    return {"allocated_bytes": {"current": current, "peak": peak, "allocated": peak, "freed": 0}}


def _set_device(device: int) -> None:
    core().exchange_device(device)


def _stream_classes(torch_c: ModuleType) -> dict[str, type]:
    class StreamBase(torch_c.Stream):  # type: ignore[name-defined]
        def __new__(cls, priority: int = 0, **options: Any) -> Any:
            if "stream_id" in options:
                return super().__new__(cls, **options)
            device = core().get_device()
            return super().__new__(cls, device=torch_device(device), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

        priority = 0

    class EventBase(torch_c.Event):  # type: ignore[name-defined]
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **options: Any) -> Any:
            device = torch_device(core().get_device())
            return super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

    def torch_device(index: int) -> Any:
        return torch_c.device("cuda", index)

    return {"_CudaStreamBase": StreamBase, "_CudaEventBase": EventBase}


def _cudart() -> Any:
    def register(address: int, size: int, flags: int) -> int:
        core().pin(address, size)
        return 0

    class Error(int):
        success = 0

    return types.SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: 0 if core().unpin(address) else 1,
        cudaMemGetInfo=lambda device: core().mem_get_info(device),
        cudaDeviceSynchronize=lambda: core().synchronize(),
        cudaGetErrorString=lambda error: "no error" if error == 0 else "invalid argument",
        cudaError=Error,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def install(torch_c: ModuleType) -> None:
    """Put the functions into `torch._C`, before `torch.cuda` looks for them."""
    functions = {
        "init": _init,
        "isInBadFork": lambda: False,
        "getDeviceCount": lambda: core().device_count(),
        "getDevice": lambda: core().get_device(),
        "setDevice": _set_device,
        "exchangeDevice": lambda device: core().exchange_device(device),
        "maybeExchangeDevice": lambda device: core().exchange_device(device),
        "synchronize": lambda: core().synchronize(),
        "getCurrentStream": lambda device: core().current_stream(_number(device)),
        "getDefaultStream": lambda device: (0, _number(device), 1),
        "setStream": lambda stream_id, device_index, device_type: core().set_stream(stream_id, device_index),
        "getCurrentRawStream": lambda device: core().current_stream(device)[0],
        "getCurrentBlasHandle": lambda: 0,
        "clearCublasWorkspaces": lambda: None,
        "getArchFlags": lambda: "sm_90",
        "getCompiledVersion": lambda: 13000,
        "canDeviceAccessPeer": lambda one, other: True,
        "hasPrimaryContext": lambda device: True,
        "memoryStats": lambda device: core().memory_stats(_number(device)),
        "memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "emptyCache": lambda *_: core().empty_cache(),
        "resetPeakMemoryStats": lambda device: core().reset_peaks(_number(device)),
        "resetAccumulatedMemoryStats": lambda device: None,
        "hostMemoryStats": _host_stats,
        "resetPeakHostMemoryStats": lambda: None,
        "hostEmptyCache": lambda: None,
        "getAllocatorBackend": lambda: "native",
        "getMemoryFraction": lambda device: 1.0,
        "setMemoryFraction": lambda fraction, device: None,
        "memoryFraction": lambda *_: None,
        "ipc_collect": lambda: core().empty_cache(),
        "sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: core().set_sync_debug(mode),
        "get_sync_debug_mode": lambda: core().get_sync_debug(),
        "isCurrentStreamCapturing": lambda: False,
        "lock_mutex": lambda: None,
        "unlock_mutex": lambda: None,
    }
    for name, function in functions.items():
        setattr(torch_c, f"_cuda_{name}", function)
    for name, kind in _stream_classes(torch_c).items():
        setattr(torch_c, name, kind)
    torch_c._has_cuda = True  # type: ignore[attr-defined]
    torch_c._CUDAGraph = Graph  # type: ignore[attr-defined]
    torch_c._graph_pool_handle = lambda: (0, 0)  # type: ignore[attr-defined]
    torch_c._CudaDeviceProperties = DeviceProperties  # type: ignore[attr-defined]
    torch_c._cudart = _cudart()  # type: ignore[attr-defined]
    torch_c._cuda_getDeviceProperties = _properties  # type: ignore[attr-defined]
