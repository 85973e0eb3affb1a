"""One thread a process: on a busy machine, threads that wait for each other are many times slower than one."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later garbage collection, which full ones spend most of their time on."""
    gc.collect()
    gc.freeze()
