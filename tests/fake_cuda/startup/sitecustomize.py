"""Runs when Python starts with this folder on PYTHONPATH: what a refit computes on a device is really computed.

Kernels do nothing on the stand-ins, but the memory of their devices is the host's. So lists of copies, and digests, are
done by the CPU on that memory, in every process that imports digests. On SIGRTMIN it writes its counters: one that is
killed writes none at its end.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import warnings

_MODULE = "spmdrl.refit.digest"


class _Twins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module once, and changes it when it has been executed."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        import torch

        self._loader.exec_module(module)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it replaces another kernel
            library.impl("_foreach_copy_", _copy, "CUDA")
        module._library_of_twins = library  # it is undone when that is gone
        signal.signal(signal.SIGRTMIN, _write_counters)
        digests = module.digests
        module.digests = lambda weights: digests({name: [*map(_on_host, parts)] for name, parts in weights.items()})


def _write_counters(*_):
    path = f"{os.environ['FAKE_CUDA_LOG']}/{os.getpid()}"
    ctypes.CDLL(None).fake_cuda_write(f"{path}.part".encode())
    os.rename(f"{path}.part", path)


def _copy(targets, sources, non_blocking=False):
    for target, source in zip(targets, sources, strict=True):
        _on_host(target).copy_(_on_host(source))


def _on_host(tensor):
    """Return a tensor of the CPU in the same memory."""
    import torch

    storage = tensor.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else bytearray(1)
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


sys.meta_path.insert(0, _Twins())
