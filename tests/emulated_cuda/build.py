"""The extension's file, compiled when there is none for these sources and this torch."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
NAME = "emulated_cuda_core"
_LINKED = ("c10", "torch_cpu", "torch", "torch_python")  # torch's libraries, each after those it needs
CACHE = "EMULATED_CUDA_CACHE"


def choose_cache() -> None:
    """Name the folder for the processes that this one starts, too: tests give them another home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spmdrl-emulated-cuda"
    os.environ.setdefault(CACHE, str(folder))


def _torch() -> Path:
    # torch itself must not be imported yet.
    for folder in sys.path:
        if (Path(folder) / "torch/version.py").is_file():
            return Path(folder).resolve() / "torch"
    raise SystemExit("the emulated CUDA device needs torch, which is not installed")


def load_library() -> str:
    """Load the extension and return its path.

    The file names no folder of torch's, since it serves every environment with this torch and may outlive the one it
    was compiled in: which libraries it means is settled by loading them first.
    """
    for name in _LINKED:
        ctypes.CDLL(str(_torch() / f"lib/lib{name}.so"))
    path = library()
    ctypes.CDLL(path)
    return path


def library() -> str:
    """Return the extension's path; compile it first if need be."""
    torch = _torch()
    digest = hashlib.sha256((torch / "version.py").read_bytes() + sys.version.encode())
    for source in [Path(__file__), *sorted(_SOURCES.iterdir())]:
        digest.update(source.read_bytes())
    cache = Path(os.environ[CACHE])
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / digest.hexdigest()[:24] / f"{NAME}.so"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(torch, path)
    return str(path)


def _compile(torch: Path, path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("the emulated CUDA device needs a C++ compiler: install g++, or name one in CXX")
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
    command += ["-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-I{sysconfig.get_path('include')}", str(_SOURCES / "module.cpp"), "-o", str(part)]
    command += [f"-L{torch}/lib", *(f"-l{name}" for name in _LINKED)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{compiler} cannot compile the emulated CUDA device:\n{done.stderr[-4000:]}")
    part.rename(path)
