"""One thread a process: on a busy machine, threads that wait for each other are many times slower than one."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # until all tests are collected: what they and libraries make when they are imported is no garbage
if not torch.cuda.is_available():
    # Triton asks when it is imported, which torch does where it is installed. Its interpreter stands in for a device.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_our_own() -> Iterator[None]:
    """Let the runs of one session agree on kernels, whatever other runs of this user have found out."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield


# Files of few and long tests. They come first, or one of them would run alone at the end.
_LONG = {
    *(
        f"unit/test_{name}.py"
        for name in ("init", "emulated_cuda", "malformed", "supervise", "rewards", "sinks", "torch_engine")
    ),
    *(f"e2e/test_{name}.py" for name in ("cut_runs", "preemption", "train", "two_launches")),
    *(f"spmd/test_{name}.py" for name in ("matrix", "true_on_policy")),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run SGLang's tests first, then the long files, then the rest in its order."""
    items.sort(key=lambda item: (item.path.parent.name != "engine", "/".join(item.path.parts[-2:]) not in _LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all of SGLang's tests to one process: each would import SGLang for its engines."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/engine" if file.startswith("tests/engine/") else file

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let the process that deals out tests collect garbage again: it never comes to `pytest_collection_finish`."""
    gc.enable()


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later garbage collection, which full ones spend most of their time on."""
    gc.collect()
    gc.freeze()
    gc.enable()
