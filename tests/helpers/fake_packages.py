"""Stand-ins for packages that SGLang needs on CUDA: torch_memory_saver and the CUDA runtime, as libraries without code
that need each other as theirs do, and any package that has a version."""

from __future__ import annotations

import _ctypes
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RUNTIME = "libcudart.so.99"  # a version that no machine has
_PACKAGE = """
import os
from contextlib import contextmanager

@contextmanager
def configure_subprocess():
    os.environ["LD_PRELOAD"] = {library!r}
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]
"""


def make_runtime(folder: Path) -> Path:
    """A CUDA runtime in a folder of its own, where no loader looks."""
    folder.mkdir(parents=True, exist_ok=True)
    return _compiled(folder / RUNTIME, "int cudaGetDevice(void) { return 0; }", f"-Wl,-soname,{RUNTIME}")


def make_saver(folder: Path, runtime: Path) -> Path:
    """A library that needs the runtime by its name alone, in a package `torch_memory_saver` in `folder`."""
    code = "int cudaGetDevice(void); int saver(void) { return cudaGetDevice(); }"
    library = _compiled(folder / "saver.so", code, f"{runtime}")
    (folder / "torch_memory_saver.py").write_text(_PACKAGE.format(library=str(library)))
    return library


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `import torch_memory_saver` find the package in `folder` until the test ends."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)


def make_package(folder: Path, distribution: str, *, version: str, module: str | None = None, code: str = "") -> None:
    """An installed distribution in `folder`, with a package of this code if `module` names one."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if module is not None:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(code)


@contextmanager
def loaded(library: Path) -> Iterator[None]:
    """Load a library into this process, as torch loads its runtime."""
    handle = ctypes.CDLL(str(library))._handle
    try:
        yield
    finally:
        _ctypes.dlclose(handle)


def _compiled(library: Path, code: str, *options: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *options, "-o", str(library)]
    subprocess.run(command, input=code, text=True, check=True)
    return library
