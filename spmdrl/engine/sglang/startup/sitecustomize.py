"""Runs when Python starts with this folder on PYTHONPATH: in the processes that SGLang starts.

They end with the rank that started the engine, from their first moment on: SGLang's own tie to its parent comes after
its imports, which take long enough for a rank to die meanwhile. On a CPU they see the stubs. There is one sitecustomize
to a process, so this one then runs the one that it hides, if any. On SIGUSR2 they write their stacks to the log of
their rank. SIGTERM and SIGUSR1 to a rank are not for them: torchrun signals whole process groups, and a rank
that shall stop still needs its engine to the end of the step.
"""

import ctypes
import faulthandler
import importlib.util
import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run(spec):
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _end_with(owner):
    """End this process when its owner ends, if that is its parent; otherwise only check that the owner still runs."""
    if os.getppid() == owner:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux's prctl
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if not Path("/proc", str(owner)).exists():
        os._exit(1)


if "SPMDRL_ENGINE_OF" in os.environ:
    _end_with(int(os.environ["SPMDRL_ENGINE_OF"]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

if "SPMDRL_STACKS_TO" in os.environ:
    _log = os.open(os.environ["SPMDRL_STACKS_TO"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    faulthandler.register(signal.SIGUSR2, _log, chain=False)

if "SPMDRL_SGLANG_CPU" in os.environ:
    # By path: importing its package would load torch into helper processes that do not need it.
    _run(importlib.util.spec_from_file_location("sglang_on_import", os.environ["SPMDRL_SGLANG_CPU"])).install()

_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _HERE])
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = _run(_hidden)
