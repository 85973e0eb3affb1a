"""Choose how a refit's buckets reach the engine's processes: opened in device memory, or through host memory."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.session import default_device_type
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.model.load import compute_dtype, parameter_shapes
from spmdrl.refit.bucket import Weight, plan_buckets
from spmdrl.types import UserError

Transport = Literal["cuda_ipc", "shared_memory"]

SHARED_MEMORY = "/dev/shm"
_MIB = 2**20
_ERROR = re.compile(r"[\w.]*Error: ")
_PATTERN = bytes(range(256))
_READER = """
import pickle, sys, torch
torch.cuda.init()
storage = torch.UntypedStorage._new_shared_cuda(*pickle.load(sys.stdin.buffer))
tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
sys.stdout.buffer.write(bytes(tensor.tolist()))
"""


def wanted_transport(setting: str, device_type: str) -> Transport:
    """Translate `refit.transport` for this kind of device, assuming that everything works."""
    return "cuda_ipc" if device_type == "cuda" and setting != "shared_memory" else "shared_memory"


def choose_transport(
    cfg: Config, model_config: Any, device: torch.device, mesh: DeviceMesh, *, message: Callable[[str], None]
) -> Transport:
    """Choose the transport for all ranks of the mesh; every one of them must call this.

    It tests whether one process can open another's device memory. Where that fails, `auto` becomes host memory and the
    user gets a line. Raises UserError when `cuda_ipc` was set, or when there is too little host memory.
    """
    wanted = wanted_transport(cfg.refit.transport, device.type)
    found = gather_objects(mesh, cuda_ipc_problem(device) if wanted == "cuda_ipc" else None)
    problem = next((problem for problem in found if problem is not None), None)
    if problem is None:
        return wanted
    if cfg.refit.transport == "cuda_ipc":
        raise UserError(
            f'refit.transport = "cuda_ipc" does not work here: {problem}; start the container with --cap-add '
            'SYS_PTRACE and --ipc host, or set refit.transport to "auto" or "shared_memory"'
        )
    shortages = gather_objects(mesh, shared_memory_problem(cfg, model_config, num_ranks=1))
    for shortage in shortages:
        if shortage is not None:
            raise UserError(f"{problem}, so weights have to go through host memory. {shortage}")
    message(f'refit.transport = "auto": weights go to the engine through host memory, which is slower, for {problem}')
    return "shared_memory"


def cuda_ipc_problem(device: torch.device, *, limit_s: float = 120.0) -> str | None:
    """Explain why a process started by this one cannot open its memory on the device; None when it can."""
    memory = torch.tensor(list(_PATTERN), dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    try:
        # What torch does for a tensor that is sent to another process, without the rest of it.
        handle = pickle.dumps(memory.untyped_storage()._share_cuda_())
        done = subprocess.run([sys.executable, "-c", _READER], input=handle, capture_output=True, timeout=limit_s)
    except RuntimeError as error:
        return _because(str(error))
    except subprocess.TimeoutExpired:
        return _because(f"no answer within {limit_s:g} s")
    if done.returncode:
        return _because(done.stderr.decode(errors="replace"))
    return None if done.stdout == _PATTERN else _because("another process read something else")


def _because(reason: str) -> str:
    """Put the line of a message or traceback that names the error into a sentence; CUDA adds lines of advice."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is given"]
    error = next((line for line in lines if _ERROR.match(line)), lines[0])
    return f"one process cannot open another's device memory ({error})"


def shared_memory_problem(cfg: Config, model_config: Any, *, num_ranks: int) -> str | None:
    """Explain why shared memory cannot hold two buckets for each rank of this machine; None when it can.

    Under torchrun it says how many those are; before, the run's `num_ranks` are taken to be on machines of 8 at most.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return f"{SHARED_MEMORY} is not there, and refits hand weights over in it; mount a tmpfs there"
    dtype = compute_dtype(cfg.model.compute_dtype, default_device_type())
    shapes, _ = parameter_shapes(model_config, cfg.model)
    weights = [
        Weight(name, torch.Size(shape), dtype, (), ((name, torch.Size(shape)),)) for name, shape in shapes.items()
    ]
    return shortage(
        largest_bytes=_largest_bytes(weights, bucket_bytes(cfg.refit, device_bytes=None)),
        smallest_bytes=_largest_bytes(weights, 1),
        num_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", min(num_ranks, 8))),
        free_bytes=free,
    )


def _largest_bytes(weights: list[Weight], limit: int) -> int:
    return max(bucket.num_bytes for bucket in plan_buckets(weights, bucket_bytes=limit))


def shortage(*, largest_bytes: int, smallest_bytes: int, num_ranks: int, free_bytes: int) -> str | None:
    """Return a sentence when two buckets of `largest_bytes` for each rank need more than is free, else None.

    `smallest_bytes` is what the largest bucket would have under the smallest `refit.bucket_bytes`.
    """
    needed = 2 * num_ranks * largest_bytes
    if needed <= free_bytes:
        return None
    remedies = []
    if 2 * num_ranks * smallest_bytes <= free_bytes:
        remedies.append(f"set refit.bucket_bytes to {free_bytes // (2 * num_ranks)} or less")
    remedies.append(f"give it more (docker run --shm-size={needed / 2**30 + 1:.0f}g)")
    ranks = "the rank" if num_ranks == 1 else f"the {num_ranks} ranks"
    return (
        f"Refits hand weights over in {SHARED_MEMORY}, where {ranks} of this machine would need "
        f"{needed / _MIB:.0f} MiB, two buckets of {largest_bytes / _MIB:.0f} MiB each, but {free_bytes / _MIB:.0f} MiB "
        f"are free; {' or '.join(remedies)}"
    )
