"""SGLang's scheduler with one addition of ours; it runs in the engine's processes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler until it is told to end; the engine starts its processes with this."""
    add_hooks()
    run_scheduler_process(*arguments, **options)  # it applies the hooks


def add_hooks() -> None:
    """Register what SGLang shall call beside its own functions in this process."""
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", clear_padding_row, HookType.AFTER)


def clear_padding_row(reply: Any, updater: Any, request: Any) -> None:
    """Let requests that only pad a batch read the cache's spare slot again; called after memory came back.

    A batch is padded to the size of a CUDA graph with requests of one token, whose place in the cache is the first
    entry of row 0 of `req_to_token`. SGLang sets it to the spare slot 0 when it starts. The table is part of the memory
    that a sleeping engine gives back, and what comes back is undefined: any number there would be read from as a place.
    """
    if GPU_MEMORY_TYPE_KV_CACHE in request.tags:
        updater.scheduler.req_to_token_pool.req_to_token[0].zero_()
        torch.get_device_module().synchronize()  # forward passes run on another stream
