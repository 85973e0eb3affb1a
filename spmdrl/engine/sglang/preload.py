"""The library that is loaded before all others in SGLang's schedulers, so that they can give device memory back.

It is torch_memory_saver's, and names the CUDA runtime that it needs without a folder. The loader of a process that
starts searches LD_LIBRARY_PATH and in the system's folders, but CUDA wheels put the runtime where only torch searches.
Standard library only, but for the saver itself: the doctor calls this where torch may be broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    # Without the library itself, and not one that it needs, the loader goes on after a line.
    return said if "cannot be preloaded" in said else None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
