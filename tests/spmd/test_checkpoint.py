"""Checkpoints on ranks: the background writes what was there, any ranks can load it, and damage is named."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl import checkpoint
from spmdrl.checkpoint.manifest import MANIFEST, Manifest, compare, folder_of, problems_of, saved_steps
from spmdrl.config import CheckpointConfig, Config
from spmdrl.dist.collectives import barrier
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import LossScale
from spmdrl.types import UserError
from tests.helpers.configs import minimal_config
from tests.helpers.files import flip_bit
from tests.helpers.learners import full_state, start_learner, update_once
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks

Damage = Callable[[Path], object]
Shortage = Callable[[Path, int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


def _saver(folder: Path, learner: Any, meshes: Meshes, **settings: Any) -> checkpoint.Saver:
    return checkpoint.Saver(
        folder,
        {"policy": learner},
        meshes,
        CheckpointConfig(**({"keep_last": 3} | settings)),
        configuration=checkpoint.resolved(minimal_config()),
        versions={},
    )


def _saved_while_training(path: str, folder: str) -> list[dict[str, Tensor]]:
    """The states after each of five updates, saved without waiting, but for the waits of the saver itself."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        learner = start_learner(path, meshes)
        saver = _saver(Path(folder), learner, meshes, keep_last=3, keep_best="eval/reward")
        states, written = [], []
        for step, reward in ((1, 0.1), (2, 0.5), (3, 0.2), (4, 0.3), (5, 0.35)):
            update_once(learner, meshes, step=step)
            states.append(full_state(learner))
            measured = {"eval/reward": reward, "update/lr": float("nan")}
            learner.loss_scale.scale = 2.0**step  # exact in the gradients
            saver.save(
                step,
                metrics=measured if step % 2 else {},
                collector={"cursor": step, "sampling": {}, "carried": []},
            )
            if step % 2 == 0 or step == 3:  # evaluated later, perhaps while it is written
                saver.amend(metrics=measured if step != 3 else {"eval/reward": 0.25})
            written += [metrics["checkpoint/write_s"].value() for metrics in [saver.check()] if metrics]
        saver.wait()
        written.append(saver.check()["checkpoint/write_s"].value())
        assert min(written) > 0
        assert saver.check() == {}
        if world.is_main:
            # 2 was the best, 3, 4 and 5 the last.
            assert saved_steps(Path(folder)) == [2, 3, 4, 5]
            metrics_of = {step: Manifest.read(folder_of(Path(folder), step)).metrics for step in (3, 4, 5)}
            # That of 4 came late, and is not that of 5.
            assert metrics_of == {3: {"eval/reward": 0.25}, 4: {"eval/reward": 0.3}, 5: {"eval/reward": 0.35}}
        with pytest.raises(UserError, match="eval/accuracy"):
            saver.save(6, metrics={"eval/accuracy": 0.5})
        assert saver.newest == _saver(Path(folder), learner, meshes).newest == 5
        saver.amend(metrics={"eval/reward": 0.4, "update/lr": float("inf")})
        if world.is_main:
            amended = folder_of(Path(folder), 5)
            manifest = Manifest.read(amended)
            assert manifest.metrics == {"eval/reward": 0.4} and not problems_of(amended, compare)
        saver.close()
        del learner, saver
        return states


def _restored(path: str, folder: str, steps: list[int]) -> list[dict[str, Tensor]]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        states = []
        for step in steps:
            learner = start_learner(path, meshes)
            checkpoint.restore(Path(folder), {"policy": learner}, meshes.training, step=step)
            states.append(full_state(learner))
            assert learner.loss_scale == LossScale(scale=2.0**step, good_updates=step)
            assert checkpoint.collector_state(Path(folder), step=step) == {
                "cursor": step,
                "sampling": {},
                "carried": [],
                "curriculum": {},
                "ahead": None,
            }
            with pytest.raises(UserError, match="holds policy, but this run trains policy and critic"):
                checkpoint.restore(Path(folder), {"policy": learner, "critic": learner}, meshes.training, step=step)
            del learner
        return states


def test_any_number_of_ranks_loads_what_was_there(qwen3: str, tmp_path: Path) -> None:
    saved = run_ranks(2, _saved_while_training, qwen3, str(tmp_path))[0]
    assert not list(tmp_path.glob("*.*")), "something is unfinished"
    for num_ranks in (1, 4):
        restored = run_ranks(num_ranks, _restored, qwen3, str(tmp_path), [2, 3])[0]
        for state, step in zip(restored, (2, 3), strict=True):
            expected = saved[step - 1]
            assert state.keys() == expected.keys()
            for name in state:
                assert torch.equal(state[name], expected[name]), (num_ranks, step, name)


def _cut(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:100])


def _flip(checkpoint: Path) -> None:
    flip_bit(checkpoint / "__0_0.distcp", 5000)


def _lose(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


def _begins(cfg: Config, place: Path, meshes: Meshes) -> str:
    """Where a run with these checkpoints begins, or why it does not."""
    try:
        origin = checkpoint.find_resume_point(cfg, place, meshes.world)
    except UserError as error:
        return str(error).replace(f"{place}/", "")
    return "\n".join([f"{origin.folder.name} {origin.step}", *origin.notes])


def _damaged(path: str, folder: str, cases: dict[str, tuple[Config, str, str]]) -> dict[str, str]:
    """For each case: a configuration, and how the checkpoints of steps 1 and 2 are damaged."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        learner = start_learner(path, meshes)
        update_once(learner, meshes, step=1)
        place = Path(folder, "whole")
        saver = _saver(place, learner, meshes)
        for step in (1, 2):
            saver.save(step, metrics={})
            saver.wait()
        found: dict[str, str] = {}
        for name, (cfg, *damages) in cases.items():
            here = Path(folder, name)
            if world.is_main and here != place:
                shutil.copytree(place, here)
            for step, damage in enumerate(damages, start=1):
                if world.is_main and damage:
                    DAMAGES[damage](folder_of(here, step))
            barrier(meshes.world)
            found[name] = _begins(cfg, here, meshes)
        elsewhere = minimal_config(resume={"checkpoint": str(folder_of(place, 1))})
        found["elsewhere"] = _begins(elsewhere, Path(folder, "new"), meshes)
        del learner, saver
        return found


DAMAGES: dict[str, Damage] = {
    "cut": _cut,
    "flip": _flip,
    "no table": _lose(".metadata"),
    "no manifest": _lose(MANIFEST),
}
OLDER = {"resume": {"allow_older": True}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "whole": ({}, "", ""),
    "cut": ({}, "", "cut"),
    "both": ({}, "flip", "no table"),
    "both-older": (OLDER, "no manifest", "cut"),
    "older": (OLDER, "", "flip"),
    "changed": ({"optim": {"lr": 1.0}, "run": {"num_steps": 8}}, "", ""),
    "named": ({"optim": {"lr": 1.0}, "resume": {"changed": ["optim"]}}, "", ""),
}


def test_damage_is_named_and_never_passed_over_in_silence(qwen3: str, tmp_path: Path) -> None:
    cases = {name: (minimal_config(**tables), *damages) for name, (tables, *damages) in CASES.items()}
    found, others = run_ranks(2, _damaged, qwen3, str(tmp_path), cases)
    assert found == others
    assert found["whole"].splitlines()[0] == "whole 2"
    first, last = found["cut"].splitlines()
    assert first.startswith("step-00000002: __1_0.distcp is truncated: it has 100 of ")
    assert last.endswith("set resume.allow_older = true to resume from step 1, which is complete")
    newest, oldest, last = found["both"].splitlines()
    assert newest == "step-00000002: .metadata is missing"
    assert oldest == "step-00000001: __0_0.distcp was changed after it was written"
    assert last.startswith("no checkpoint can be loaded")
    assert "step-00000001: manifest.json is missing" in found["both-older"]
    assert found["older"].startswith("older 1\n") and "step-00000002: __0_0.distcp was changed" in found["older"]
    assert folder_of(tmp_path / "older", 2).with_suffix(".broken").is_dir()
    assert found["changed"] == (
        "since the checkpoint of step 2, optim.lr was 0.001 and is 1.0; set this back, or set "
        'resume.changed = ["optim.lr"] to resume with the change'
    )
    assert found["named"].startswith("named 2\nchanged since step 2: optim.lr was 0.001 and is 1.0")
    assert found["elsewhere"].splitlines()[0] == "whole 1"


@contextmanager
def _limited_files(folder: Path, rank: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # the other rank has room
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def _filled_disk(folder: Path, rank: int) -> Iterator[None]:
    filler = folder / "filler"
    if rank == 0:
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - 50_000))
    yield
    filler.unlink(missing_ok=True)


def _without_room(path: str, folder: str, shortage: Shortage) -> tuple[str, list[int], list[int]]:
    """What is said when there is no room for a second checkpoint, and which ones there are then and later."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        learner = start_learner(path, meshes)
        saver = _saver(Path(folder), learner, meshes)
        saver.save(1, metrics={})
        saver.wait()
        with shortage(Path(folder), world.rank):
            barrier(meshes.world)
            saver.save(2, metrics={})
            with pytest.raises(UserError) as caught:
                saver.wait()
        assert checkpoint.find_resume_point(minimal_config(), Path(folder), meshes.world).step == 1
        before = saved_steps(Path(folder))
        saver.save(2, metrics={})
        saver.wait()
        after = saved_steps(Path(folder))
        saver.close()
        del learner, saver
        return str(caught.value), before, after


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def _assert_a_sentence(results: list[tuple[str, list[int], list[int]]], reason: str, file: str) -> None:
    (said, before, after), (others, _, _) = results
    assert (before, after) == ([1], [1, 2])
    assert said.startswith(f"the checkpoint of step 2 could not be written: {reason} while writing ")
    assert f"step-00000002.unfinished/{file}" in said and "MiB are free there" in said
    assert "the checkpoint of step 1 is complete" in said
    assert said.partition(" (")[0] == others.partition(" (")[0]


def test_a_limit_on_files_is_a_sentence_and_costs_no_checkpoint(qwen3: str, tmp_path: Path) -> None:
    results = run_ranks(2, _without_room, qwen3, str(tmp_path), _limited_files)
    _assert_a_sentence(results, "File too large", "__1_0.distcp")


def test_a_full_disk_is_a_sentence_and_costs_no_checkpoint(qwen3: str, small_disk: Path) -> None:
    results = run_ranks(2, _without_room, qwen3, str(small_disk), _filled_disk)
    _assert_a_sentence(results, "No space left on device", "__")
