"""Runs when Python starts with this folder on PYTHONPATH: in the processes that SGLang starts.

There is one sitecustomize to a process, so this one then runs the one that it hides, if any.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run(spec):
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# By path: `import spmdrl...` would load torch into helper processes that need neither.
_run(importlib.util.spec_from_file_location("spmdrl_sglang_on_import", _HERE.parent / "on_import.py")).install()

_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _HERE])
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = _run(_hidden)
