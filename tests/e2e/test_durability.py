"""Runs that are killed, resumed, moved to other ranks, or find their checkpoints damaged."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spmdrl import train
from spmdrl.checkpoint import storage, write
from spmdrl.checkpoint.manifest import Digest, Manifest, folder_of, newest_step, saved_steps
from spmdrl.faults import failure
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.verdict import read_error
from spmdrl.report.files import read_rows
from spmdrl.rollout.files import read_parts
from spmdrl.step import steps
from spmdrl.train import main
from tests.helpers import small_run
from tests.helpers.files import flip_bit
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    rows,
    sample_rows,
    start_torchrun,
    steady_rows,
    weights,
    without_curves,
)

COMMON = (
    "run.num_steps=6",
    "eval.every=3",
    "checkpoint.every=1",
    "checkpoint.keep_last=20",
    "report.samples_per_step=100",
    "report.tensorboard=false",
    "debug.save_rollouts=all",
)


def argv(folder: Path, name: str, *overrides: str) -> list[str]:
    return [str(folder / "c.toml"), *COMMON, f"run.name={name}", *overrides]


def launch(folder: Path, name: str, num_ranks: int, *overrides: str) -> Path:
    small_run.launch(folder, num_ranks, *COMMON, f"run.name={name}", *overrides)
    return folder / "runs" / name


def tensor_files(run: Path, step: int) -> dict[str, Digest]:
    """Hash of each file with weights and optimizer state, by name."""
    files = Manifest.read(folder_of(run / "checkpoints", step)).files
    return {name: digest for name, digest in files.items() if name.endswith(".distcp")}


def assert_same_run(one: Path, other: Path) -> None:
    """Weights and optimizer state after the last step bit for bit, and every sample and metric on the way."""
    last = newest_step(one / "checkpoints")
    assert last == newest_step(other / "checkpoints") == rows(one)[-1]["step"]
    assert tensor_files(one, last) == tensor_files(other, last)
    assert_same_weights(one, other)
    assert sample_rows(one) == sample_rows(other)
    assert steady_rows(one) == steady_rows(other)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """Six steps on two ranks that nothing stopped."""
    return launch(folder, "straight", 2)


@pytest.mark.slow
def test_six_steps_are_three_and_a_new_process_and_three(folder: Path, straight: Path) -> None:
    assert len(tensor_files(straight, 6)) == 2 and len(sample_rows(straight)) > 6 and len(rows(straight)) == 7
    launch(folder, "halves", 2, "run.num_steps=3")
    assert_same_run(launch(folder, "halves", 2), straight)
    # And a second time from the same checkpoint, by its path: what it begins with is all that matters.
    path = folder_of(straight / "checkpoints", 3)
    branch = launch(folder, "branch", 2, f"resume.checkpoint={path}")
    assert tensor_files(branch, 6) == tensor_files(straight, 6)
    assert [row["step"] for row in rows(branch)] == [4, 5, 6]


LONGER = "run.num_steps=20"  # so long that it is not over when it has been killed three times


@pytest.fixture(scope="module")
def longer(folder: Path) -> Path:
    """The same, for runs that are killed."""
    return launch(folder, "longer", 2, LONGER)


def kill_at_random(run: Path, chance: random.Random, is_over: Callable[[], bool]) -> None:
    """Kill -9 one of two ranks somewhere in a step, a few steps after the last that has ended.

    In steps and not in seconds, so that the run is not over before it has been killed, however fast the machine is.
    """
    wanted, began = _last_step(run).get("step", 0) + chance.randint(1, 4), time.monotonic()
    while (last := _last_step(run)).get("step", 0) < wanted:
        assert not is_over() and time.monotonic() - began < 200
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, last["time/step_s"]))
    status = read_json(FaultFiles(run).status_of(chance.randrange(2)))
    assert status is not None
    os.kill(status["pid"], signal.SIGKILL)


def _last_step(run: Path) -> dict[str, float]:
    """The metrics of the last step that has ended; empty before there is one."""
    return [{}, *(row for row in read_rows(run / "metrics.jsonl") if "time/step_s" in row)][-1]


def survives(folder: Path, longer: Path, name: str, seeds: Sequence[int]) -> None:
    """Killed once for each seed, and then left alone, a run ends as if nothing had been."""
    for seed in seeds:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(run_ranks, 2, without_curves, main, argv(folder, name, LONGER), timeout_s=200.0)
            kill_at_random(folder / "runs" / name, random.Random(seed), job.done)
            with pytest.raises(AssertionError, match="died without a word"):
                job.result()
    assert_same_run(launch(folder, name, 2, LONGER), longer)


@pytest.mark.slow
def test_a_rank_that_is_killed_at_any_moment_changes_nothing(folder: Path, longer: Path) -> None:
    survives(folder, longer, "killed", range(3))


@pytest.mark.slow
def test_torchrun_may_start_the_ranks_again(folder: Path, straight: Path) -> None:
    """Also when there must be no run yet where they are started first."""
    settings = argv(folder, "restarted", "resume.checkpoint=never")
    launched = start_torchrun(2, *settings, max_restarts=1, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        kill_at_random(folder / "runs/restarted", random.Random(3), lambda: launched.poll() is not None)
        launched.communicate(timeout=200)
    finally:
        launched.terminate()  # torchrun then ends its ranks; after a kill they would stay
        launched.wait()
    assert_same_run(folder / "runs/restarted", straight)
    assert (folder / "runs/restarted/logs/rank-0.log").read_text().count("rank 0 of 2 on") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_twenty_one_kills(folder: Path, longer: Path, number: int) -> None:
    survives(folder, longer, f"killed-{number}", range(10 * number, 10 * number + 3))


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_file(step: int) -> None:
    """Kill this process when half of its file of `step` has been written."""
    plain = storage._HashingStream.write

    def write(self: storage._HashingStream, data: bytes) -> int:
        if f"{step:08d}" in self._file.name and self.num_bytes > 20_000:
            _die()
        return plain(self, data)

    storage._HashingStream.write = write


def _before_the_manifest(step: int) -> None:
    plain = Manifest.write
    Manifest.write = lambda self, place: _die() if self.step == step else plain(self, place)


def _before_the_name(step: int) -> None:
    plain = write._publish
    write._publish = lambda unfinished, final: _die() if f"{step:08d}" in final.name else plain(unfinished, final)


MOMENTS = {0: _before_the_name, 1: _in_a_file, 2: _before_the_manifest}


def _dies(arguments: list[str], moment: Callable[[int], None], step: int) -> int:
    moment(step)
    return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_in_the_middle_of_a_write(folder: Path, straight: Path, moment: int) -> None:
    """In the first checkpoint, or in a later one: none that is not whole has the name of one."""
    name, step = f"torn-{moment}", 1 + moment
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(2, _dies, argv(folder, name), MOMENTS[moment], step, timeout_s=200.0)
    checkpoints = folder / "runs" / name / "checkpoints"
    assert saved_steps(checkpoints) == list(range(1, step))
    assert [path.name for path in checkpoints.glob("*.*")] == [f"step-{step:08d}.unfinished"]
    assert_same_run(launch(folder, name, 2), straight)
    assert not list(checkpoints.glob("*.*"))


@pytest.mark.slow
def test_damaged_checkpoints_are_named_by_the_run(
    folder: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs/damaged"
    shutil.copytree(straight, run)
    places = [folder_of(run / "checkpoints", step) for step in range(1, 7)]
    for place in places[:3]:
        shutil.rmtree(place)
    (places[5] / "__1_0.distcp").write_bytes((places[5] / "__1_0.distcp").read_bytes()[:-1])
    changed = places[4] / "__0_0.distcp"
    flip_bit(changed, changed.stat().st_size // 2)
    assert main(argv(folder, "damaged")) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "step-00000006: __1_0.distcp is truncated" in said
    assert "step-00000005: __0_0.distcp was changed" in said
    assert "resume.allow_older = true to resume from step 4" in said
    assert_same_run(launch(folder, "damaged", 2, "resume.allow_older=true"), straight)
    assert {path.name for path in (run / "checkpoints").glob("*.*")} == {
        "step-00000005.broken",
        "step-00000006.broken",
    }


@pytest.mark.slow
def test_two_ranks_then_one_then_four(folder: Path) -> None:
    """On other ranks the first step after the checkpoint has the same samples, and nearly the same weights."""
    exact = ("true_on_policy=true", "model.attention=auto", "debug.assert_on_policy=false")
    launch(folder, "moved", 2, *exact, "run.num_steps=2")
    for step, num_ranks, others in ((3, 1, 2), (4, 4, 1)):
        runs = folder / "runs"
        shutil.copytree(runs / "moved", runs / f"stays-{step}")
        stays = launch(folder, f"stays-{step}", others, *exact, f"run.num_steps={step}")
        moved = launch(folder, "moved", num_ranks, *exact, f"run.num_steps={step}")
        one, other = rows(stays)[-1], rows(moved)[-1]
        assert one["step"] == other["step"] == step
        for metric in ("reward/mean", "rollout/response_tokens", "batch/loss_tokens"):
            assert one[metric] == pytest.approx(other[metric], rel=1e-12), metric
        assert one["mismatch/max_abs_nats"] == other["mismatch/max_abs_nats"] == 0.0
        assert _sampled(stays, step) and set(_sampled(stays, step)) == set(_sampled(moved, step))
        for name, tensor in weights(stays).items():
            torch.testing.assert_close(tensor, weights(moved)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_on_other_ranks_a_run_goes_on_with_the_same_prompts_and_seeds(
    folder: Path, straight: Path, num_ranks: int
) -> None:
    """Also where engine and trainer do not compute the same bits, and what is sampled may differ."""
    path = folder_of(straight / "checkpoints", 3)
    settings = ("run.num_steps=4", f"resume.checkpoint={path}", "export.at_end=false")
    moved = launch(folder, f"on-{num_ranks}", num_ranks, *settings)
    assert len(_drawn(moved, 4)) == 32 and _drawn(moved, 4) == _drawn(straight, 4)


def _drawn(run: Path, step: int) -> set[tuple[int, int, int]]:
    """Prompt, sample and seed of each rollout of a step."""
    rollouts = [rollout for part in read_parts(run / "rollouts", step) for rollout, _ in part.outcomes]
    return {(rollout.prompt.prompt_id, rollout.sample_index, rollout.seed) for rollout in rollouts}


def _sampled(run: Path, step: int) -> list[tuple]:
    names = ("prompt_id", "sample_index", "response", "reward", "version")
    return [tuple(row[name] for name in names) for row in sample_rows(run) if row["step"] == step and "response" in row]


def _limit(number: int, limit: int) -> None:
    resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))


def _use_up_memory(take: Callable[[], object]) -> None:
    """Take memory until there is no more of it for this process."""
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + 2**28)
    held = []
    while True:
        held.append(take())


# By name: the function that runs out, what uses it up, and what is said.
SHORTAGES: dict[str, tuple[tuple[Any, str], Callable[[], None], str, str]] = {
    "memory-of-torch": (
        (train, "update"),
        lambda: _use_up_memory(lambda: torch.ones(2**24)),
        "DefaultCPUAllocator: can't allocate memory",
        "host memory is used up: this process could not allocate any more",
    ),
    "memory-of-python": (
        (train, "update"),
        lambda: _use_up_memory(lambda: bytearray(2**26)),
        "MemoryError",
        "host memory is used up: this process could not allocate any more",
    ),
    "disk": (
        (steps, "export_hf"),
        lambda: _limit(resource.RLIMIT_FSIZE, 100_000),
        "File too large",
        "a file is too large: make room and start again",
    ),
}


def _runs_short(arguments: list[str], shortage: str) -> tuple[int, str]:
    """The exit code of a run that something runs out for in one of its phases, and what it says."""
    (module, verb), use_up, _, _ = SHORTAGES[shortage]
    plain = getattr(module, verb)

    def short(*given: Any, **settings: Any) -> Any:
        use_up()
        return plain(*given, **settings)

    setattr(module, verb, short)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(arguments), said.getvalue()


@pytest.mark.parametrize("name", SHORTAGES)
def test_what_has_run_out_is_named(folder: Path, name: str) -> None:
    _, _, message, hint = SHORTAGES[name]
    arguments = argv(folder, name, "run.num_steps=1", "checkpoint.every=0")
    ((code, said),) = run_ranks(1, _runs_short, arguments, name, timeout_s=200.0)
    report = read_error(FaultFiles(folder / "runs" / name))
    assert report is not None and (code, report.kind, report.step) == (1, "error", 1)
    assert message in report.message and hint in report.hints
    assert said.count("Traceback") == 1 and hint in said.splitlines()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of a few hundred MiB."""
    group = failure._group_file().parent / f"spmdrl-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(path for path in (group / "memory.max", group / "memory.limit_in_bytes") if path.exists())
        limit.write_text(str(600 * 2**20))
    except (OSError, StopIteration) as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error!r}")
    yield group
    group.rmdir()


def _killed_in(group: Path) -> tuple[int, list[str]]:
    """How a process of the group ends that takes more than there is, and what is said about that."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    before = failure.OomKills.now()
    done = subprocess.run([sys.executable, "-c", "held = b'x' * 2**30"])
    return done.returncode, failure.OomKills.now().since(before)


def test_a_process_that_the_kernel_kills_for_want_of_memory_is_named(small_group: Path) -> None:
    said = "host memory is used up: the kernel has killed a process of this job's memory cgroup"
    assert run_ranks(1, _killed_in, small_group) == [(-signal.SIGKILL, [said])]


def _full(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a run whose files may not become large, and what it says."""
    _limit(resource.RLIMIT_FSIZE, 100_000)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(arguments), said.getvalue()


@pytest.mark.slow
def test_a_limit_on_files_ends_the_run_with_a_sentence(folder: Path, straight: Path) -> None:
    run = folder / "runs/full"
    shutil.copytree(straight, run)
    for step in (4, 5, 6):
        shutil.rmtree(folder_of(run / "checkpoints", step))
    before = tensor_files(run, 3)
    codes, words = zip(*run_ranks(2, _full, argv(folder, "full"), timeout_s=200.0), strict=True)
    silence, said = sorted(words)  # all ranks are told, and whichever is first speaks
    assert codes == (2, 2) and silence == ""
    assert "cannot go on: the checkpoint of step 4 could not be written: File too large" in said
    assert "the checkpoint of step 3 is complete" in said
    assert saved_steps(run / "checkpoints") == [1, 2, 3] and tensor_files(run, 3) == before
    assert_same_run(launch(folder, "full", 2), straight)
