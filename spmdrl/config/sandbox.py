"""The table of a sandbox, which rewards and environments have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, Gib, Section, is_set, rule


class SandboxConfig(Section):
    mode: Literal["auto", "strict", "off"] = "auto"
    """`auto`: no network, no environment variables, no files to write but in a directory of their own, no other
    processes in reach, nothing printed; a line names what the machine cannot prevent. `strict` refuses to start there.
    `off`: no restrictions, for functions of yours that need none. See `docs/security.md`."""
    max_memory_gib: Gib = 8.0
    """Address space of each process."""
    max_processes: Count = 64
    """Processes and threads of one reward process, itself included. Linux does not hold root to it."""
    max_file_gib: Gib = 0.125
    """Size of each file, and of the directory of a reward process."""
    max_open_files: Annotated[int, Field(ge=16, le=2**20)] = 256
    """Open files of each process."""


@rule(SandboxConfig)
def limits_need_a_sandbox(sandbox: SandboxConfig) -> Iterator[str]:
    if sandbox.mode == "off":
        for name in ("max_memory_gib", "max_processes", "max_file_gib", "max_open_files"):
            if is_set(sandbox, name):
                yield f'{name} has no meaning with mode = "off"; remove one of them'
