"""Libraries that SGLang loads: its kernels for CUDA, and the one by which its schedulers give device memory back.

Standard library only, but for these libraries themselves: the doctor calls this where torch may be broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

DISTRIBUTION = "sglang-kernel"
_MODULE = "sgl_kernel"
# The release of the kernels that says in its metadata or description that it is built for this torch.
_BUILT_FOR = {"2.11": "0.4.5", "2.13": "0.4.7", "2.14": "0.4.10"}
_OLDEST = "0.4.9"  # that SGLang 0.5.23 starts with, unless a setting forbids the search
_SKIP_VARIABLE = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
# For those who have a checkout, and those who have the package alone.
SETUP = "run: make setup-sglang, or pip install 'spmdrl[sglang]'"


def kernel_problem(torch_version: str) -> str | None:
    """Explain why SGLang could not use its kernels in this process, with this version of torch; None when it could."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"{DISTRIBUTION}, its kernels for CUDA, is not installed; {SETUP}"
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # the package tries several files and raises what it likes
        torch_release = ".".join(torch_version.split(".")[:2])
        fitting = _BUILT_FOR.get(torch_release)
        remedy = (
            SETUP
            if fitting in (None, installed)
            else f"install {DISTRIBUTION}=={fitting}, which is built for torch {torch_release}, or {SETUP}"
        )
        return f"{DISTRIBUTION} {installed} cannot be loaded with torch {torch_version} ({_cause(error)}); {remedy}"
    if _numbers(installed) < _numbers(_OLDEST) and os.environ.get(_SKIP_VARIABLE, "").lower() not in ("1", "true"):
        return (
            f"{DISTRIBUTION} {installed} is installed, and SGLang starts with {_OLDEST} or newer unless "
            f"{_SKIP_VARIABLE}=1 is in the environment; set that, or {SETUP}"
        )
    return None


def attention_problem(
    backend: str | None,
    capability: tuple[int, int],
    *,
    setting: str = "rollout.attention_backend",
    instead: str = "triton",
) -> str | None:
    """Explain why the attention kernels that SGLang would use on a device of this compute capability are not there.

    None when they are. `backend` is the setting's value; unset, SGLang chooses FlashAttention 3 on Hopper.
    """
    by_default = backend is None and capability[0] == 9
    if not (backend == "fa3" or by_default) or importlib.util.find_spec(f"{_MODULE}.flash_ops") is not None:
        return None
    set_to = 'is not set, and SGLang\'s own choice for this device is "fa3"' if by_default else '= "fa3"'
    return f'{setting} {set_to}, but {DISTRIBUTION} is here without those kernels; set it to "{instead}"'


def _cause(error: Exception) -> str:
    """Find the loader's line in the page that the package makes of it."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "undefined symbol" in line or "cannot open shared object" in line)
    return next(telling, lines[0] if lines else type(error).__name__)


def _numbers(version: str) -> tuple[int, ...]:
    """0.4.6.post1 as (0, 4, 6)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


# torch_memory_saver's library is loaded before all others in SGLang's schedulers, and names the CUDA runtime that it
# needs without a folder. The loader of a process that starts searches LD_LIBRARY_PATH and in the system's folders, but
# CUDA wheels put the runtime where only torch searches.
PATH_VARIABLE = "LD_LIBRARY_PATH"
_RUNTIME = "libcudart.so."  # and the major version of CUDA
_MAPS = Path("/proc/self/maps")
_START_LIMIT_S = 60.0


def library_path() -> dict[str, str]:
    """Return the variable by which the loader of a new process finds the CUDA runtime of this process.

    Its folder comes before what was set, so that the saver gets the copy that torch gets. Empty where no runtime is
    found: then the loader's own folders have to do.
    """
    folders = list(dict.fromkeys([*_mapped_folders()] or [*_wheel_folders()]))
    if not folders:
        return {}
    given = os.environ.get(PATH_VARIABLE)
    return {PATH_VARIABLE: os.pathsep.join([*folders, *([given] if given else [])])}


def _mapped_folders() -> Iterator[str]:
    """Yield the folder of each CUDA runtime that this process has loaded, as torch does when it is imported."""
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, _, path = line.partition("/")
        library = Path(f"/{path}")
        if path and library.name.startswith(_RUNTIME) and _has_short_name(library):
            yield str(library.parent)


def _has_short_name(library: Path) -> bool:
    """Return True when the file can be found by its major version, with which it is asked for."""
    return (library.parent / f"{_RUNTIME}{library.name.removeprefix(_RUNTIME).partition('.')[0]}").exists()


def _wheel_folders() -> Iterator[str]:
    """Yield where NVIDIA's wheels put the runtime: a torch that has it built in loads none of them."""
    for folder in sys.path:
        yield from (str(library.parent) for library in sorted(Path(folder).glob(f"nvidia/*/lib/{_RUNTIME}*")))


def start_problem(environment: Mapping[str, str]) -> str | None:
    """Start a process as SGLang starts its schedulers, with these variables on top, and explain why it does not start.

    None when it does. It takes some milliseconds, and no device.
    """
    from torch_memory_saver import configure_subprocess

    try:
        with configure_subprocess():
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", ""],
                env={**os.environ, **environment, "LC_ALL": "C"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_START_LIMIT_S,
            )
    except RuntimeError as error:  # the saver has no library for this CUDA
        return _last_line(f"{error}")
    except subprocess.TimeoutExpired:
        return f"it does not end within {_START_LIMIT_S:g} s"
    said = _last_line(done.stderr)
    if done.returncode:
        return said or f"exit code {done.returncode}"
    # Without the library itself, and not one that it needs, the loader continues after a line.
    return said if "cannot be preloaded" in said else None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
