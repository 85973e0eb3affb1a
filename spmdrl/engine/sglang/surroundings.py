"""The environment of SGLang's processes, those whose rank is gone, and the door to `spmdrl_sglang_cpu`: what SGLang
needs without a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType

from spmdrl.types import UserError

STARTUP = Path(__file__).resolve().parent / "startup"


def stand_ins() -> ModuleType:
    """Import what SGLang needs on a CPU; a run on a GPU never does."""
    import spmdrl_sglang_cpu

    return spmdrl_sglang_cpu


def startup_path() -> str:
    """Return a PYTHONPATH with our `sitecustomize.py` before any other; it ties SGLang's processes to their rank."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(STARTUP)]
    return os.pathsep.join([str(STARTUP), *rest])


def cpu_environment() -> dict[str, str]:
    """Return the variables that SGLang's processes need on a CPU."""
    return {"PYTHONPATH": startup_path(), **stand_ins().child_environment()}


OWNER_VARIABLE = "SPMDRL_ENGINE_OF"  # set in an engine's processes: the id of the rank that started them
_GRACE_S = 3.0


def orphans() -> dict[int, str]:
    """Find processes of engines whose rank is gone, by id with their names; they may hold the memory of a device."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or belongs to someone else
        mark = OWNER_VARIABLE.encode() + b"="
        if not _shares_our_processes(folder):
            continue
        owner = next((value.removeprefix(mark).decode() for value in variables if value.startswith(mark)), None)
        if owner is not None and not Path("/proc", owner).exists():
            found[int(folder.name)] = name
    return found


def _shares_our_processes(folder: Path) -> bool:
    """Return True when a process has the same id namespace as this one; processes in a container have another."""
    try:
        return os.readlink(folder / "ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def check_orphans() -> None:
    """Raise UserError when engines of an earlier run are still there after a short wait."""
    if orphans():
        time.sleep(_GRACE_S)
    if found := orphans():
        named = ", ".join(f"{number} ({name})" for number, name in sorted(found.items()))
        numbers = " ".join(map(str, sorted(found)))
        raise UserError(
            f"SGLang processes of a run that has ended are still there: {named}; end them: kill -9 {numbers}"
        )
