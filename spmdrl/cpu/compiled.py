"""Functions in C for float32 on a CPU, made on the machine that runs them.

torch has no kernels that norm, rotate or gate in one pass over a tensor on a CPU, and its own compiler takes tens of
seconds at each start. The C compiler that a machine has takes half a second once: what it makes is in the user's cache,
by source, compiler and processor, with its digest at its end. What is damaged there is made again, and a line says so.
Where there is no compiler, layers stay transformers', and the decoder has the same functions in torch
(`model/fused_plain.py`).

Their last bits differ from torch's. So ranks agree on whether to use them, and a run keeps to it when it resumes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.machine import instructions, processor_name, users_cache

_SOURCES = Path(__file__).parent / "c"
# Sums may be reassociated, so that they fit vector registers; infinities and nan keep their meaning.
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_C_TYPES: Mapping[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_LIMIT_S = 60.0
_DIGEST = hashlib.sha256  # of a library, behind its last byte, where no loader looks
_DIGEST_BYTES = 32
# Numbers that a thread reads or multiplies while it would wake another: fewer are not worth it, and on a busy machine
# the other one may come late.
_SERIAL = 2**17


class CannotCompile(Exception):
    """This machine cannot make the functions, or cannot load what it made. The message says why."""


class _InUse:
    is_on = False


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library, and a sentence about what had to be compiled again; empty where nothing had to."""

    functions: ctypes.CDLL
    note: str = ""


def compile_all() -> list[str]:
    """Compile and load every function, unless this machine has done so before. Raises CannotCompile.

    Returns sentences about what the cache had and could not be used.
    """
    return [note for source in sorted(_SOURCES.glob("*.c")) if (note := library(source.stem).note)]


def use_compiled(on: bool) -> bool:
    """Use compiled functions from now on, or torch's, in the whole process; returns what was used before."""
    before, _InUse.is_on = _InUse.is_on, on
    return before


def compiled_in_use() -> bool:
    """Return True when this process uses compiled functions."""
    return _InUse.is_on


def serves(*tensors: Tensor | None) -> bool:
    """Return True when compiled functions are in use, and take these tensors."""
    return _InUse.is_on and all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter))
        for x in tensors
    )


def threads_for(amount: int) -> int:
    """Return how many threads are worth their start to read `amount` numbers, or for four times as many products."""
    return 1 if amount < _SERIAL else torch.get_num_threads()


@functools.cache
def library(name: str) -> Library:
    """Load `c/name.c`, and compile it first unless this machine has done so before. Raises CannotCompile."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise CannotCompile("there is no C compiler: install gcc")
    source = _SOURCES / f"{name}.c"
    try:
        sources = [file.read_text(encoding="utf-8") for file in (source, *sorted(_SOURCES.glob("*.h")))]
        # The path too: CC may be a script that adds flags of its own.
        made_by = (*_FLAGS, compiler, _run([compiler, "--version"]), processor_name(), instructions(), _DIGEST.__name__)
        described = "\n".join([*sources, *made_by])
        file_name = f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.so"
        note = ""
        try:
            known = _private_folder() / file_name
            if os.path.lexists(known):
                try:
                    return Library(_load_checked(known))
                except OSError as error:
                    note = f"{known} cannot be used: {error}; it was compiled again"
            return Library(_load(_compile(compiler, source, known)), note)
        except OSError as error:
            note = f"{users_cache()} cannot hold functions in C: {error}; they are compiled at each start"
            with tempfile.TemporaryDirectory() as temporary:  # what is loaded stays, the file need not
                return Library(_load(_compile(compiler, source, Path(temporary) / file_name)), note)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"{compiler} failed: {' '.join(str(error).split())}") from error


class Function:
    """A function of `c/SOURCE.c`, which returns 0, or something else when there is no memory for it."""

    def __init__(self, source: str, name: str, arguments: str) -> None:
        """`arguments` has a letter for each: p for the data of a tensor or None, and after those i for an integer and f
        for a float."""
        self._source, self._name, self._arguments = source, name, arguments
        self._num_tensors = arguments.count("p")

    def __call__(self, *arguments: Any) -> None:
        """Call it. Raises MemoryError."""
        tensors = arguments[: self._num_tensors]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._loaded(*pointers, *arguments[self._num_tensors :]):
            raise MemoryError(f"there is no memory for {self._name} of {self._source}.c")

    @functools.cached_property
    def _loaded(self) -> Callable[..., int]:
        found = library(self._source).functions[self._name]
        found.argtypes, found.restype = [_C_TYPES[letter] for letter in self._arguments], ctypes.c_int
        return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all, whatever ends the process or the machine. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _compile(compiler: str, source: Path, target: Path) -> Path:
    """Write the library with its digest, complete or not at all."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        _run([compiler, *_FLAGS, "-o", str(unfinished), str(source), "-lm"])
        content = unfinished.read_bytes()
    finally:
        unfinished.unlink(missing_ok=True)
    write_whole(target, content + _DIGEST(content).digest())
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(done.stderr[-500:] or f"exit code {done.returncode}")
    return done.stdout


def _load_checked(path: Path) -> ctypes.CDLL:
    """Load a library of the cache. Raises OSError unless it is what this user has written there."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError("it is not an ordinary file of this user")
    content = path.read_bytes()
    if _DIGEST(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise OSError("its content is not what was written")
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    """Load a library; its threads are torch's, because the loader finds torch's OpenMP, which has the same name.

    Where a build of torch brings OpenMP under another name, there are two pools of threads: slower, and not wrong.
    """
    return ctypes.CDLL(str(path))


def _private_folder() -> Path:
    """Return a folder that only this user can write, because what lies in it is run. Raises OSError without one."""
    folder = users_cache() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} belongs to another user, or others can write there")
    return folder
