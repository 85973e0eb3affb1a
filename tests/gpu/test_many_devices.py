"""NCCL paths; they need two CUDA devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.spmd.ranks import run_ranks
from tests.spmd.test_parity import _trained, assert_same_change, initial
from tests.spmd.test_refit import _refitted
from tests.tiny import save_qwen3

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_two_devices_give_the_gradients_of_one(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path)
    options = {"model": {"compute_dtype": "float32"}}
    ((one, _),) = run_ranks(1, _trained, path, options)
    (two, _), _ = run_ranks(2, _trained, path, options)
    assert_same_change({k: v.cpu() for k, v in one.items()}, {k: v.cpu() for k, v in two.items()}, initial(path), 1e-4)


def test_engine_weights_equal_trainer_weights(tmp_path: Path) -> None:
    for differences in run_ranks(2, _refitted, save_qwen3(tmp_path), torch.bfloat16, 1024):
        assert differences == [0.0, 0.0]
