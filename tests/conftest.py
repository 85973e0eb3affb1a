"""One thread a process: on a busy machine, threads that wait for each other are many times slower than one."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let the process that deals out tests collect garbage again: it never comes to `pytest_collection_finish`."""
    gc.enable()


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later garbage collection, which full ones spend most of their time on."""
    gc.collect()
    gc.freeze()
    gc.enable()
