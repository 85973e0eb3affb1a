"""How buckets reach the engine: what is chosen, what is told, and what is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.engine.sglang import transport
from spmdrl.engine.sglang.transport import choose_transport, shared_memory_problem, shortage, wanted_transport
from spmdrl.model.load import load_model_config
from spmdrl.types import UserError
from tests.helpers.models import VOCABULARY, save_qwen3
from tests.helpers.sglang_engine import settings

MIB = 2**20
CUDA = torch.device("cuda")
BROKEN = "one process cannot open another's device memory (CUDA error: invalid argument)"


@pytest.mark.parametrize(
    ("setting", "device_type", "wanted"),
    [
        ("auto", "cpu", "shared_memory"),
        ("auto", "cuda", "cuda_ipc"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
        ("shared_memory", "cuda", "shared_memory"),
    ],
)
def test_what_a_setting_means(setting: str, device_type: str, wanted: str) -> None:
    assert wanted_transport(setting, device_type) == wanted


def test_two_buckets_for_each_rank_must_fit() -> None:
    assert shortage(largest_bytes=8 * MIB, smallest_bytes=MIB, num_ranks=4, free_bytes=64 * MIB) is None
    sentence = shortage(largest_bytes=8 * MIB, smallest_bytes=MIB, num_ranks=4, free_bytes=64 * MIB - 1)
    assert sentence is not None
    assert "the 4 ranks of this machine would need 64 MiB, two buckets of 8 MiB each, but 64 MiB are free" in sentence
    # What it recommends is enough.
    assert f"refit.bucket_bytes to {8 * MIB - 1} or less" in sentence and "--shm-size=1g" in sentence


def test_smaller_buckets_are_recommended_only_where_they_help() -> None:
    sentence = shortage(largest_bytes=900 * MIB, smallest_bytes=900 * MIB, num_ranks=8, free_bytes=64 * MIB)
    assert sentence is not None and "refit.bucket_bytes" not in sentence
    assert "--shm-size=15g" in sentence and 2 * 8 * 900 * MIB < 15 * 2**30


def free_bytes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=number))


def test_the_largest_weight_counts_even_when_buckets_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cfg = settings(save_qwen3(tmp_path), 1, refit={"bucket_bytes": 1024})
    largest = max(VOCABULARY * 48, 2 * 80 * 48) * torch.float32.itemsize  # embedding; gate and up stay together
    config = load_model_config(cfg.model)
    free_bytes(monkeypatch, 2 * largest)
    assert shared_memory_problem(cfg, config, num_ranks=1) is None
    free_bytes(monkeypatch, 2 * largest - 1)
    assert "the rank of this machine" in str(shared_memory_problem(cfg, config, num_ranks=1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    free_bytes(monkeypatch, 2 * largest)
    assert "the 2 ranks of this machine" in str(shared_memory_problem(cfg, config, num_ranks=1))


ADVICE = "Search for `cudaErrorInvalidValue' in https://docs.nvidia.com for more information.\nCompile with ..."


@pytest.mark.parametrize(
    "reason",
    [
        f"CUDA error: invalid argument\n{ADVICE}",  # what this process raises
        'Traceback (most recent call last):\n  File "<string>", line 4, in <module>\n    storage = torch.Untyped\n'
        f"torch.AcceleratorError: CUDA error: invalid argument\n{ADVICE}\n",  # what the other process prints
    ],
)
def test_the_error_is_named_and_not_the_advice_that_follows(reason: str) -> None:
    told = transport._because(reason).removeprefix("one process cannot open another's device memory ")
    assert told in ("(CUDA error: invalid argument)", "(torch.AcceleratorError: CUDA error: invalid argument)")


def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, *, others: str | None) -> tuple[Any, list]:
    """What two ranks of which this one's device works choose, and what is told."""
    monkeypatch.setattr(transport, "cuda_ipc_problem", lambda device: None)
    monkeypatch.setattr(transport, "gather_objects", lambda mesh, value: [value, others if value is None else value])
    cfg = settings(save_qwen3(tmp_path), 1, refit={"transport": setting})
    told: list[str] = []
    config = load_model_config(cfg.model)
    return choose_transport(cfg, config, CUDA, None, message=told.append), told  # type: ignore[arg-type]


def test_device_memory_is_used_where_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(tmp_path, monkeypatch, "auto", others=None) == ("cuda_ipc", [])
    assert chosen(tmp_path, monkeypatch, "shared_memory", others=None) == ("shared_memory", [])


def test_one_rank_where_it_does_not_work_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[None, BROKEN], [None, None]])
    monkeypatch.setattr(transport, "cuda_ipc_problem", lambda device: None)
    monkeypatch.setattr(transport, "gather_objects", lambda mesh, value: next(answers))
    cfg = settings(save_qwen3(tmp_path), 1)
    told: list[str] = []
    config = load_model_config(cfg.model)
    assert choose_transport(cfg, config, CUDA, None, message=told.append) == "shared_memory"  # type: ignore[arg-type]
    assert len(told) == 1 and "through host memory" in told[0] and BROKEN in told[0]


def test_it_is_refused_when_it_was_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'refit.transport = "cuda_ipc" does not work here.*SYS_PTRACE'):
        chosen(tmp_path, monkeypatch, "cuda_ipc", others=BROKEN)
