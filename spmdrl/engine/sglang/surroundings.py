"""The environment of SGLang's processes, and the door to `spmdrl_sglang_cpu`: what SGLang needs without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

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
