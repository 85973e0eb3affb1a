"""Print what a proof depends on, and try what can be tried in seconds: `python -m tests.gpu.proof.facts`.

A table of what was seen and what is expected, then one JSON object with `machine`, `versions` and `facts`. Whatever
fails is a row of the table, never an exception.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from spmdrl.faults.text import say
from spmdrl.model.machine import processor_name

_GIB = 2**30
_PACKAGES = (
    *("torch", "triton", "transformers", "sglang", "sglang-kernel", "torch_memory_saver", "flash-attn", "flash-attn-3"),
    *("accelerate", "safetensors", "pydantic", "pytest", "pytest-timeout"),
)
_SETTINGS = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


class Fact(NamedTuple):
    """One row: a property of the machine, its value here, and the value with which everything works."""

    name: str
    seen: str
    expected: str = ""


def main() -> None:
    """Print the table and the object; the exit code is 1 where there is no device."""
    torch = _torch()
    machine, versions = _machine(torch), _versions(torch)
    facts = [*_about_devices(torch, machine), *_about_system(), *_about_versions(versions)]
    width = max(len(fact.name) for fact in facts)
    for name, seen, expected in facts:
        say(f"{name:<{width}}  {seen}{f'   (expected: {expected})' if expected else ''}")
    say(json.dumps({"machine": machine, "versions": versions, "facts": [fact._asdict() for fact in facts]}))
    if not machine["devices"]:
        sys.exit("there is no CUDA device here: tests will be skipped, and nothing can be proved")


def _torch() -> ModuleType | Exception:
    try:
        import torch
    except Exception as problem:  # a library that cannot be loaded is an OSError
        return problem
    return torch


def _machine(torch: Any) -> dict[str, Any]:
    return {
        "devices": [*_devices(torch)],
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda": str(getattr(getattr(torch, "version", None), "cuda", None)),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "system": platform.platform(),
    }


def _devices(torch: Any) -> Iterator[str]:
    """Describe each device that torch can use."""
    if isinstance(torch, Exception) or not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        total = torch.cuda.get_device_properties(index).total_memory / _GIB
        yield f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}, {total:.0f} GiB)"


def _about_devices(torch: Any, machine: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("devices", ", ".join(machine["devices"]) or "none", "at least one")
    yield Fact("driver", machine["driver"] or "nvidia-smi finds none", "as new as torch's CUDA needs")
    if isinstance(torch, Exception):
        yield Fact("torch", f"cannot be imported: {_first_line(torch)}", "can be imported")
        return
    yield Fact("torch's CUDA", machine["cuda"])
    if machine["devices"]:
        yield Fact("memory of device 0", _tried(lambda: _free_memory(torch)), "nearly all free")
        yield Fact("NCCL", _tried(lambda: ".".join(map(str, torch.cuda.nccl.version()))))
        yield Fact("CUDA IPC", _tried(_cuda_ipc), "works")
    yield Fact("libcudart in use", ", ".join(_mapped("libcudart")) or "none", "a file, where there is a device")
    ldconfig = [line.strip() for line in _printed("ldconfig", "-p").splitlines() if "libcudart" in line]
    yield Fact("libcudart of ldconfig", "; ".join(ldconfig) or "none", "any: engines get the folder of the one in use")


def _free_memory(torch: Any) -> str:
    free, total = (size / _GIB for size in torch.cuda.mem_get_info(0))
    return f"{free:.1f} of {total:.1f} GiB free"


def _cuda_ipc() -> str:
    """Open this process's device memory in another one, as a refit does."""
    import torch

    from spmdrl.engine.sglang.transport import cuda_ipc_problem

    return cuda_ipc_problem(torch.device("cuda", 0), limit_s=40.0) or "works"


def _about_system() -> Iterator[Fact]:
    shm = _tried(lambda: "{1:.1f} of {0:.1f} GiB free".format(*_sizes("/dev/shm")))
    yield Fact("/dev/shm", shm, "two buckets for each rank")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    yield Fact("ptrace scope", scope.read_text().strip() if scope.exists() else "no Yama", "0, 1 or no Yama")
    yield Fact("own host name", _tried(lambda: socket.gethostbyname(socket.gethostname())), "resolves, for torchrun")
    for compiler, use in (("nvcc", "SGLang's kernels"), ("ninja", "SGLang's kernels"), ("gcc", "triton")):
        found = shutil.which(compiler)
        version = re.search(r"\d+\.\d[\d.]*", _printed(compiler, "--version"))
        yield Fact(compiler, f"{found}: {version[0] if version else '?'}" if found else "none", f"there, for {use}")
    for name in _SETTINGS:
        if name in os.environ:
            yield Fact(name, os.environ[name])


def _sizes(folder: str) -> tuple[float, float]:
    usage = shutil.disk_usage(folder)
    return usage.total / _GIB, usage.free / _GIB


def _versions(torch: ModuleType | Exception) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if isinstance(torch, ModuleType):
        found["torch"] = torch.__version__  # with the CUDA that it is built for, which its metadata may leave out
    return found


def _about_versions(versions: dict[str, str]) -> Iterator[Fact]:
    for name in ("python", *_PACKAGES):
        yield Fact(name, versions.get(name, "-"))


def _mapped(library: str) -> list[str]:
    """The files with this in their name that are loaded here."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({line.split()[-1] for line in lines if library in line})


def _printed(*command: str) -> str:
    """Return what a program prints; "" where it fails or is not installed."""
    path = shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _tried(find: Callable[[], str]) -> str:
    """Return what the function finds, or the first line of what it raises."""
    try:
        return find()
    except Exception as problem:
        return f"{type(problem).__name__}: {_first_line(problem)}"


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
