"""Our hooks in SGLang's scheduler, in the engine's processes; nothing is scheduled here."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from spmdrl.engine.sglang import loader
from spmdrl.engine.sglang.layout import DIGEST, MISMATCH
from spmdrl.engine.sglang.surroundings import stand_ins
from spmdrl.refit.digest import digest, digests

_ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHECK = "sglang.srt.model_executor.model_runner_components.weight_updater._unsupported_derived_weight_cache_error"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler until it has to end; the engine starts its processes with this."""
    add_hooks()
    if not torch.cuda.is_available():
        compute_without_pinning()
    run_scheduler_process(*arguments, **options)  # it applies the hooks


def compute_without_pinning() -> None:
    """Let SGLang compute with adapters and report routes on a CPU, where no memory can be pinned."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.mem_cache.pool_host import common

    stand_ins().pin_nothing(layers, torch_backend)  # which compute with adapters
    # Which holds routes on the host.
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)


def add_hooks() -> None:
    """Register what SGLang shall call besides its own functions in this process."""
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", note_scales, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", forget_what_is_loaded, HookType.BEFORE)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", clear_padding_row, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", forget_image_features, HookType.AFTER)
    HookRegistry.register(_CHECK, answer_once, HookType.AROUND)
    HookRegistry.register(f"{_ADAPTERS}.load_lora_adapter_from_tensors", refuse_what_differs, HookType.AROUND)


def forget_what_is_loaded(_scheduler: Any) -> None:
    """Leave all that is there once the engine is ready out of later collections of garbage: it stays.

    On a CPU SGLang collects whenever it flushes its cache, several times a step, and each time it would look at all
    that torch and transformers have made. Elsewhere Python does so now and then, while requests wait.
    """
    gc.collect()
    gc.freeze()


def note_scales(scheduler: Any) -> None:
    """Write the engine's list of weights in e4m3 where the trainer compares it with its own."""
    if file := os.environ.get(loader.LIST_VARIABLE):
        loader.note_scales(scheduler.tp_worker.model_runner.model, Path(file))


_answers: dict[int, Any] = {}  # by model


def answer_once(check: Callable[[Any], Any], model: Any) -> Any:
    """Check once whether SGLang made numbers of a model's weights that a refit would leave stale: it decides that as it
    starts, and searches all modules at every bucket (2 ms of 0.6B, compared with 1 ms for the copies of a bucket)."""
    if id(model) not in _answers:
        _answers[id(model)] = check(model)
    return _answers[id(model)]


def refuse_what_differs(
    load: Callable[..., Any], manager: Any, name: Any, tensors: Any, config: Any, *rest: Any
) -> Any:
    """Load adapters, but answer with their tensors' digests when that of their memory is not the one in `config`."""
    if digest(_memory_of(tensors)) == config[DIGEST]:
        return load(manager, name, tensors, config, *rest)
    arrived = digests({name: [tensor] for name, tensor in tensors.items()})
    return manager.create_lora_update_result(success=False, error_message=MISMATCH + json.dumps(arrived))


def _memory_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the memory [number of bytes] uint8 of which these tensors are views, end to end."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    (storage,) = storages.values()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def clear_padding_row(reply: Any, updater: Any, request: Any) -> None:
    """Let requests that only pad a batch read the cache's spare slot again; called after memory came back.

    A batch is padded to the size of a CUDA graph with requests of one token, whose place in the cache is the first
    entry of row 0 of `req_to_token`. SGLang sets it to the spare slot 0 when it starts. The table is part of the memory
    that a sleeping engine gives back, and what comes back is undefined: any number there would be read from as a place.
    """
    if GPU_MEMORY_TYPE_KV_CACHE in request.tags:
        updater.scheduler.req_to_token_pool.req_to_token[0].zero_()
        torch.get_device_module().synchronize()  # forward passes run on another stream


def forget_image_features(_reply: Any, _updater: Any, _request: Any) -> None:
    """Drop what the tower has made of images; called when a refit has ended.

    SGLang caches it by image, and drops it neither with its prefix cache nor when weights change (0.5.23): an image
    that is shown again would be seen as the tower of an earlier version saw it.
    """
    mm_schedule.embedding_cache.clear()
