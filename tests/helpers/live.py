"""A watch on the operations of a computation and on the memory that it leaves behind."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Counts operations, and keeps an eye on every piece of memory that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func.name().partition(".")[0]] += 1
        results = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in given:  # else it is a view, or was written in place
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    @property
    def live_bytes(self) -> int:
        """Bytes made under this watch that something still holds."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


class PeakWatch(Watch):
    """A watch that also looks at memory after every operation; slow where there are many.

    `interpreted`: Triton's interpreter computes, whose objects hold on to each other and to tensors until they are
    collected, which no device's kernels do.
    """

    peak_bytes = 0

    def __init__(self, *, interpreted: bool = False) -> None:
        super().__init__()
        self._interpreted = interpreted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if self._interpreted and self.live_bytes > self.peak_bytes:
            gc.collect()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return results
