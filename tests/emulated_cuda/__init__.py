"""CUDA devices without a GPU, for tests: memory of the host, kernels of the CPU, the rules of a device.

`startup/sitecustomize.py` imports this package as `emulated_cuda` in every process; README.md has the rest.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from . import plain_kernels
from .build import choose_cache, load_library

NUM_DEVICES, DEVICE_GIB = "EMULATED_CUDA_DEVICES", "EMULATED_CUDA_GIB"
LEDGER = "EMULATED_CUDA_LEDGER"


class _Finder(MetaPathFinder):
    """Calls functions before and after a module is imported for the first time."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[ModuleType], None]]) -> None:
        self._before, self._after = before, after

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if before := self._before.pop(fullname, None):
            before()
        after = self._after.get(fullname)  # asked for is not imported: `importlib.util.find_spec` looks only
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self._after.pop(fullname, None):
                after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wait_for_torch() -> None:
    """Install the devices when torch is imported. A process that does not import it pays nothing."""
    choose_cache()
    os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")  # torch's own Triton kernels would be interpreted
    plain_kernels.install()

    def with_core(core_module: ModuleType) -> None:
        from . import bindings

        bindings.install(core_module)

    def with_nccl(module: ModuleType) -> None:
        from . import nccl

        nccl.install(module)

    def with_torch(_: ModuleType) -> None:
        from . import patches

        patches.install()

    def with_triton(module: ModuleType) -> None:
        from . import triton_launches

        triton_launches.install(module)

    after = {
        "torch._C": with_core,
        "torch": with_torch,
        "torch.distributed.distributed_c10d": with_nccl,
        "triton.runtime.interpreter": with_triton,
    }
    sys.meta_path.insert(0, _Finder({"torch": _load}, after))


def _load() -> None:
    """Load the extension before torch: its hooks must be there when torch first asks whether there is CUDA."""
    if LEDGER not in os.environ:
        file, os.environ[LEDGER] = tempfile.mkstemp(prefix="emulated-cuda-")
        os.close(file)
        owner, path = os.getpid(), os.environ[LEDGER]
        atexit.register(lambda: os.getpid() == owner and os.path.exists(path) and os.unlink(path))
    global _path
    _path = load_library()


_path = ""


def load_core() -> ModuleType:
    """Import the extension's Python functions, which needs torch's own extension."""
    name = "emulated_cuda_core"
    if name not in sys.modules:
        loader = importlib.machinery.ExtensionFileLoader(name, _path)
        spec = importlib.util.spec_from_file_location(name, _path, loader=loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def devices() -> list[int]:
    """The devices that this process sees, by the machine's numbers."""
    every = range(int(os.environ.get(NUM_DEVICES, "2")))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        list(every) if mask is None else [int(name) for name in mask.split(",") if name.strip() and int(name) in every]
    )


def device_bytes() -> int:
    """The memory of a device."""
    return int(float(os.environ.get(DEVICE_GIB, "8")) * 2**30)
