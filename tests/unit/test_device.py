"""A rank computes on its own device, and never on the CPU because its device cannot be used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmdrl.dist import session
from spmdrl.dist.session import rank_device, spmd_session
from spmdrl.train import main
from spmdrl.types import UserError
from tests.helpers.small_run import write_small_run

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this process see a machine: so many devices that CUDA can use, and so many that have a file."""

    def make(*, usable: int, files: int, cuda: str | None = "13.0", says: str = "", **environment: str) -> None:
        def init() -> None:
            if says:
                raise RuntimeError(says)

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(session, "_device_files", lambda: [Path(f"/dev/nvidia{i}") for i in range(files)])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize("place", [0, 3])
def test_a_rank_has_the_device_of_its_index(machine: Machine, place: int) -> None:
    machine(usable=4, files=4, LOCAL_RANK=str(place), LOCAL_WORLD_SIZE="4")
    assert rank_device() == torch.device("cuda", place)


@pytest.mark.parametrize(("files", "cuda"), [(0, "13.0"), (2, None)])
def test_without_devices_or_without_cuda_it_is_the_cpu(machine: Machine, files: int, cuda: str | None) -> None:
    machine(usable=0, files=files, cuda=cuda)
    assert rank_device() == torch.device("cpu")


@pytest.mark.parametrize("mask", ["", "-1"])
def test_devices_may_be_hidden_on_purpose(machine: Machine, mask: str) -> None:
    machine(usable=0, files=2, CUDA_VISIBLE_DEVICES=mask)
    assert rank_device() == torch.device("cpu")


@pytest.mark.parametrize("place", [0, 1])
def test_every_rank_refuses_a_device_masked_for_each_rank(machine: Machine, place: int) -> None:
    machine(usable=1, files=2, LOCAL_RANK=str(place), LOCAL_WORLD_SIZE="2", CUDA_VISIBLE_DEVICES=str(place))
    with pytest.raises(UserError, match=rf"^2 ranks were .* sees only 1 \(CUDA_VISIBLE_DEVICES={place}\): start"):
        rank_device()


@pytest.mark.parametrize("environment", [{"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, {"LOCAL_RANK": "2"}])
def test_a_device_index_that_is_not_there(machine: Machine, environment: dict[str, str]) -> None:
    machine(usable=2, files=2, **environment)
    with pytest.raises(UserError, match=r"^3 ranks were started .* sees only 2: start as many ranks as"):
        rank_device()


def test_no_session_begins_on_a_device_that_is_not_there(machine: Machine) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    machine(usable=1, files=2, **place, MASTER_ADDR="localhost", MASTER_PORT="1")
    with (
        pytest.raises(UserError, match="sees only 1"),
        spmd_session(threads_per_rank=1, deterministic=False),
    ):
        pytest.fail("it began")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_driver_that_is_too_old_ends_the_run_with_a_sentence(
    machine: Machine, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small_run(tmp_path, model={"hidden_size": 32, "num_layers": 1})
    machine(usable=0, files=2, says=TOO_OLD)
    assert main([str(path), *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("cannot start:") == 1 and "Traceback" not in said
    assert f"built for CUDA 13.0, can use none of them: {TOO_OLD.partition('. ')[0]}; install a driver" in said
    assert not (tmp_path / "runs").exists()


def _mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("before", [(False, False), (True, True)])
@pytest.mark.parametrize("ending", [None, ZeroDivisionError])
def test_determinism_ends_with_the_session(before: tuple[bool, bool], ending: type[Exception] | None) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with contextlib.suppress(ZeroDivisionError), spmd_session(threads_per_rank=1, deterministic=True):
            assert _mode() == (True, False)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # those that cuBLAS accepts
            if ending is not None:
                raise ending
        assert _mode() == before
    finally:
        torch.use_deterministic_algorithms(False)
