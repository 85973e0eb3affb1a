"""`python -m spmdrl.tools.doctor`: reports what is installed here, and what is missing to train or sample.
`python -m spmdrl.tools.doctor RUN`: reports what is likely wrong in a run, why it matters and what to set.

The first must run on machines where nothing works yet, so it imports no part of spmdrl that needs another package.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.engine.sglang import libraries
from spmdrl.faults.text import Parser, say, tolerates_lost_output

_GIB = 2**30
_MIN_SHM_GIB = 1.0
_KERNELS = libraries.DISTRIBUTION

# (distribution, what it is for)
_PACKAGES = (
    ("spmdrl", ""),
    ("torch", ""),
    ("transformers", ""),
    ("accelerate", "loading by shard"),
    ("safetensors", "weights on disk"),
    ("pydantic", "configuration"),
    ("numpy", ""),
    ("pyarrow", "parquet data"),
    ("reasoning-gym", "generated tasks"),
    ("math-verify", "math rewards"),
    ("tensorboard", "metrics"),
    ("matplotlib", "curves"),
    ("rich", "console"),
    ("sglang", "SGLang rollouts"),
    (_KERNELS, "SGLang on CUDA"),
    ("torch-memory-saver", "SGLang on CUDA"),
    ("flash-attn", "flash_attn_2 kernels"),
    ("flash-attn-3", "flash_attn_3 kernels"),
    ("ring-flash-attn", "ring attention"),
    ("bitsandbytes", "lora.base"),
)


@tolerates_lost_output
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 when a run has a finding, 2 when there is no such run."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", nargs="?", type=Path, help="a run's folder, such as runs/demo")
    run = parser.parse_args(argv).run
    if run is not None:
        return examine_run(run)
    examine_machine()
    return 0


def examine_run(path: Path) -> int:
    """Print the findings of a run; returns the exit code."""
    # Imported here because the machine is examined where the packages that these need may be missing.
    from spmdrl.report.findings import checkup, damages, findings
    from spmdrl.report.run_folder import read_run
    from spmdrl.report.series import History
    from spmdrl.tools.program import program

    @program("cannot examine the run")
    def examine(_: Sequence[str] | None) -> int:
        run = read_run(path)
        found, damage = findings(History(run.rows)), [*damages(path)]
        say("\n".join(checkup(run, found, damage)))
        return int(bool(found or damage))

    return examine()


def examine_machine() -> None:
    """Print the report on this machine. Problems are printed, never raised."""
    torch, torch_problem = _import("torch")
    for title, lines in (
        ("Software", _software()),
        ("Machine", _machine(torch)),
        ("Communication", _communication(torch)),
        ("Attention kernels", _kernels(torch)),
        ("What works here", _verdicts(torch, torch_problem)),
    ):
        say(title)
        for line in lines:
            say(f"  {line}")
        say()


def _import(name: str) -> tuple[Any, str]:
    """Return (module, ""), or (None, reason)."""
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        # A broken installation is not the same as a missing one.
        installed = _version(name) is not None
        return None, f"{name} is installed but cannot be imported: {error}" if installed else f"{name} is not installed"
    except Exception as error:
        return None, f"{name} cannot be imported: {type(error).__name__}: {error}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _row(name: str, value: object, remark: str = "") -> str:
    return f"{name:<20}{value!s:<22}{remark}".rstrip()


def _software() -> Iterator[str]:
    yield _row("python", platform.python_version())
    for distribution, purpose in _PACKAGES:
        yield _row(distribution, _version(distribution) or "-", purpose)


def _machine(torch: ModuleType | None) -> Iterator[str]:
    yield _row("system", platform.platform())
    yield _row("CPU cores", len(os.sched_getaffinity(0)))
    memory = _meminfo()
    if memory:
        available, total = (memory[key] / _GIB for key in ("MemAvailable", "MemTotal"))
        yield _row("host memory", f"{available:.1f} of {total:.1f} GiB available")
    shm = _shm()
    if shm:
        yield _row("/dev/shm", f"{shm[0]:.1f} of {shm[1]:.1f} GiB free")
    yield _row("driver sees", _driver_devices() or "no NVIDIA GPU")
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        yield _row("visible devices", repr(os.environ["CUDA_VISIBLE_DEVICES"]), "CUDA_VISIBLE_DEVICES")
    for index in range(_num_gpus(torch)):
        assert torch is not None
        yield _row(f"GPU {index}", _gpu(torch, index))


def _gpu(torch: ModuleType, index: int) -> str:
    try:
        free, total = (size / _GIB for size in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
    except Exception as error:
        return f"cannot be used: {error}".splitlines()[0]
    return f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}), {free:.1f} of {total:.1f} GiB free"


def _meminfo() -> dict[str, int]:
    """Read /proc/meminfo as bytes by name; empty on systems without it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _shm() -> tuple[float, float] | None:
    """Return (free, total) GiB of the shared-memory file system."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free / _GIB, usage.total / _GIB


def _driver_devices() -> str | None:
    """Describe the GPUs that nvidia-smi finds, which may be more than torch can use."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.splitlines() if done.returncode == 0 else []
    if not found:
        return None
    name, _, driver = found[0].partition(", ")
    return f"{len(found)} x {name}, driver {driver}"


def _num_gpus(torch: ModuleType | None) -> int:
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


def _communication(torch: ModuleType | None) -> Iterator[str]:
    yield _host_name()
    if torch is None or not torch.distributed.is_available():
        yield "torch.distributed is not available"
        return
    yield _row("gloo", "yes" if torch.distributed.is_gloo_available() else "no")
    if torch.distributed.is_nccl_available():
        yield _row("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield _row("NCCL", "no", "this torch is built without it")


def _host_name() -> str:
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        remedy = "torchrun --standalone needs that: add it to /etc/hosts, or use torchrun --local-addr 127.0.0.1"
        return _row("host name", name, f"does not resolve; {remedy}")
    return _row("host name", name, "resolves")


def _kernels(torch: ModuleType | None) -> Iterator[str]:
    if torch is None:
        yield "torch cannot be imported"
        return
    yield _row("sdpa", "yes", "CPU and CUDA")
    for name, module in (
        ("varlen", "torch.nn.attention.varlen"),
        ("flash_attn_2", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface"),
    ):
        found, problem = _import(module)
        yield _row(name, "yes", "CUDA only") if found else _row(name, "no", problem)


def _verdicts(torch: ModuleType | None, torch_problem: str) -> Iterator[str]:
    on_cpu = ", on a CPU: spmdrl_sglang_cpu takes the place of its kernels" if _version(_KERNELS) is None else ""
    for what, missing in (
        ("training on a CPU", [*_missing_for_training(torch, torch_problem)]),
        ("training on GPUs", [*_missing_for_gpus(torch, torch_problem)]),
        ("SGLang rollouts", [*_missing_for_sglang(torch)]),
        ("ring attention", [*_missing_for_ring_attention()]),
    ):
        remark = on_cpu if what == "SGLang rollouts" else ""
        yield f"{what}: {'; '.join(missing) if missing else 'yes' + remark}"


def _missing_for_training(torch: ModuleType | None, torch_problem: str) -> Iterator[str]:
    if torch is None:
        yield f"{torch_problem}: make setup"
    elif not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        yield "this torch has no gloo, which host tensors need: install another build"
    if _version("spmdrl") is None:
        yield "spmdrl is not installed: make setup"
        return
    yield from _unmet_requirements()


def _unmet_requirements() -> Iterator[str]:
    """Yield a sentence for each requirement of the installed spmdrl that is not met."""
    if _import("packaging")[0] is None:
        return
    from packaging.requirements import Requirement

    for written in importlib.metadata.requires("spmdrl") or ():
        requirement = Requirement(written)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is not installed: pip install '{requirement.name}{requirement.specifier}'"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is installed, but spmdrl needs {requirement.specifier}"


def _missing_for_gpus(torch: ModuleType | None, torch_problem: str) -> Iterator[str]:
    if torch is None:
        yield torch_problem
    elif torch.version.cuda is None:
        # The driver shows whether this machine has no GPU or the wrong torch.
        seen = _driver_devices()
        remedy = f"but there is {seen}: make setup TORCH=cuda" if seen else "and there is no NVIDIA GPU"
        yield f"torch {torch.__version__} is built without CUDA, {remedy}"
    elif not _num_gpus(torch):
        yield "torch finds no CUDA device: see CUDA_VISIBLE_DEVICES and the driver above"
    elif not torch.distributed.is_nccl_available():
        yield "this torch has no NCCL: install another build"


def _missing_for_sglang(torch: ModuleType | None) -> Iterator[str]:
    if _version("sglang") is None:
        yield f"sglang is not installed; {libraries.SETUP}"
        return
    if torch is not None and _num_gpus(torch):
        yield from _missing_for_sglang_on_gpus(torch)
    shm = _shm()
    if shm and shm[1] < _MIN_SHM_GIB:
        yield (
            f"/dev/shm has {shm[1]:.2f} GiB, and SGLang's processes share memory there: give the container at least "
            f"{_MIN_SHM_GIB:g} GiB (docker run --shm-size=16g)"
        )


def _missing_for_sglang_on_gpus(torch: ModuleType) -> Iterator[str]:
    if problem := libraries.kernel_problem(torch.__version__):
        yield problem
    saver, problem = _import("torch_memory_saver")
    if saver is None:
        yield f"{problem}: SGLang needs it to give memory back to the trainer; {libraries.SETUP}"
    elif problem := libraries.start_problem(libraries.library_path()):
        yield f"no process starts with torch_memory_saver: {problem}: see LD_LIBRARY_PATH"


def _missing_for_ring_attention() -> Iterator[str]:
    missing = [name for name in ("flash-attn", "ring-flash-attn") if _version(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        yield f"{' and '.join(missing)} {verb} not installed: pip install --no-build-isolation 'spmdrl[flash]'"


if __name__ == "__main__":
    sys.exit(main())
