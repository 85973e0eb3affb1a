"""Run calls of compiled functions again on an emulated ARM processor: a C program of its own, made by a cross compiler.

What is recorded is memory: every call's tensors before it, and after it as this processor left them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spmdrl.cpu import kernels_c

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
_FLAGS = [flag for flag in kernels_c._FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the file of its function, its text in C, and the memory that its tensors are in, before and after."""

    source: str
    text: str
    before: list[Tensor]
    after: list[Tensor]


class Recorder:
    """Calls of functions in C, in their order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._ends: dict[str, int] = defaultdict(int)  # of the memory of all calls of a file

    def record(self, function: kernels_c.CFunction, call: Any, arguments: Sequence[Any]) -> None:
        """Make the call, and write down what it was."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        memory = {x.untyped_storage().data_ptr(): _whole(x) for x in tensors}
        places = {}
        for start, whole in memory.items():
            places[start] = self._ends[function._source]
            self._ends[function._source] += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT
        before = [whole.clone() for whole in memory.values()]
        call(function, *arguments)
        written = [
            f"(void *)(m + {places[x.untyped_storage().data_ptr()] + x.storage_offset() * x.itemsize})"
            if isinstance(x, Tensor)
            else _literal(x)
            for x in arguments
        ]
        text = f"failed |= {function._name}({', '.join(written)});"
        self.calls.append(Call(function._source, text, before, [whole.clone() for whole in memory.values()]))


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record the calls of compiled functions while it is open."""
    recorder, call = Recorder(), kernels_c.CFunction.__call__
    with mock.patch.object(kernels_c.CFunction, "__call__", lambda self, *x: recorder.record(self, call, x)):
        yield recorder


def run_on_arm(calls: Sequence[Call], processor: str, folder: Path) -> list[list[Tensor]]:
    """Return the memory of each call as ARM leaves it; `processor` is what the compiler calls it (-march).

    All are functions of one file.
    """
    program, memory, source = folder / "program", folder / "memory", folder / "main.c"
    (library,) = {call.source for call in calls}
    lines = "\n        ".join(call.text for call in calls)
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        + f'#include "{kernels_c._SOURCES / library}.c"\n'
        + f"""
int main(int count, char **names) {{
    FILE *file = fopen(names[count - 1], "rb+");
    char *m = aligned_alloc({_ALIGNMENT}, {_size(calls)});
    int failed = fread(m, 1, {_size(calls)}, file) != {_size(calls)};
    if (!failed) {{
        {lines}
    }}
    rewind(file);
    failed |= fwrite(m, 1, {_size(calls)}, file) != {_size(calls)};
    return failed | fclose(file);
}}
""",
        encoding="utf-8",
    )
    memory.write_bytes(b"".join(_padded(x) for call in calls for x in call.before))
    for command in (
        [COMPILER, *_FLAGS, f"-march={processor}", "-static", "-o", program, source, "-lm"],
        [EMULATOR, "-cpu", "max", program, memory],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert not done.returncode, done.stderr[-3000:]
    left, place, found = memory.read_bytes(), 0, []
    for call in calls:
        found.append([])
        for x in call.after:
            found[-1].append(torch.frombuffer(bytearray(left[place : place + x.nbytes]), dtype=x.dtype))
            place += len(_padded(x))
    return found


def _whole(x: Tensor) -> Tensor:
    """The whole memory of a tensor."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


def _padded(x: Tensor) -> bytes:
    content = x.numpy().tobytes()
    return content + bytes(-len(content) % _ALIGNMENT)


def _size(calls: Sequence[Call]) -> int:
    return sum(len(_padded(x)) for call in calls for x in call.before)


def _literal(argument: float | int | None) -> str:
    return "NULL" if argument is None else repr(argument)
