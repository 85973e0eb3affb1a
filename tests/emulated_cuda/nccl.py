"""`torch.distributed` finds NCCL: the extension's process group, made over gloo."""

from __future__ import annotations

import datetime
from types import ModuleType
from typing import Any

import torch

from .bindings import core


class Options:
    """What torch and its callers set on NCCL's options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout: Any = None
        self.config: Any = None


def install(c10d: ModuleType) -> None:
    """Replace what the CPU build lacks, right after the module is imported."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    core().define_nccl()

    class ProcessGroupNCCL(core().Nccl):  # type: ignore[name-defined]
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(ProcessGroupGloo(store, rank, size, timeout=options._timeout), rank, size)

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]

    def split_group(parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, **options: Any) -> Any:
        parent = c10d.get_process_group_ranks(parent_pg if parent_pg is not None else c10d.group.WORLD)
        mine = None
        for ranks in split_ranks:
            members = [parent[rank] for rank in ranks]
            group = c10d.new_group(members, timeout=timeout, group_desc=options.get("group_desc"))
            mine = group if torch.distributed.get_rank() in members else mine
        return mine

    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.split_group = split_group
