"""Saving: copy the state to host memory, and write the copy in a thread while training continues.

A checkpoint is written under a temporary name: its files first, then a manifest with the hash of each. Once everything
is on disk it is renamed. The thread's collectives have a process group of their own, because the step's run at the same
time.
"""

from __future__ import annotations

import dataclasses
import errno
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Max, Metrics, Total
from spmdrl.checkpoint.manifest import (
    COLLECTOR,
    COLUMNS,
    STATE,
    UNFINISHED,
    BrokenManifest,
    Manifest,
    delete,
    finite,
    folder_of,
    leftovers,
    remove,
    resolved,
    saved_steps,
    superseded,
    sync_directory,
    without_columns,
    write_bytes,
    write_json,
)
from spmdrl.checkpoint.storage import CheckpointWriter, LearnerState, Tree, copy_to_host, in_chunks, num_bytes, tree_of
from spmdrl.config import CheckpointConfig, Config, OptimConfig, TuningConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learner import Learner
from spmdrl.model.offload import HostBuffers
from spmdrl.report.run_folder import describe_machine
from spmdrl.types import UserError

ABANDON_S = 30.0  # how long a failing run waits for a save in progress
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Saver:
    """Saves the learners of a run, one checkpoint at a time; every rank of the mesh calls its methods together.

    An error in the background is raised on every rank by the next call of `save`, `check` or `wait`.
    """

    def __init__(
        self,
        folder: Path,
        learners: Mapping[str, Learner],
        meshes: Meshes,
        cfg: CheckpointConfig,
        *,
        configuration: Mapping[str, Any],
        versions: Mapping[str, Any],
    ) -> None:
        """`configuration` and `versions` go into every manifest."""
        self._folder, self._learners, self._cfg = folder, learners, cfg
        self._mesh, self._side = meshes.training, meshes.background
        self._configuration, self._versions = dict(configuration), dict(versions)
        self._buffers = HostBuffers(pinned=meshes.training.device_type == "cuda")
        self._writing: _Writing | None = None
        self._late: Mapping[str, float] | None = None  # metrics of the checkpoint that is being written
        self._finished: Metrics = {}
        # Step of the last checkpoint, saved or being written. One rank decides for all: shared storage may show
        # different lists to different ranks.
        self.newest = gather_objects(self._mesh, max(saved_steps(folder), default=None))[0]

    def save(self, step: int, *, metrics: Mapping[str, float], collector: Mapping[str, Any] | None = None) -> None:
        """Copy the state after `step` and start to write it; waits for the previous save.

        `metrics` belong to the step; `collector` is the state of a `Collector`, the same on every rank.
        """
        self.wait()
        _refuse_unmeasured(self._cfg.keep_best, metrics)
        states = {name: LearnerState.of(learner) for name, learner in self._learners.items()}
        tree = in_chunks(copy_to_host(tree_of(states), self._buffers))
        manifest = Manifest(
            step=step,
            num_ranks=self._mesh.size(),
            configuration=self._configuration,
            versions=self._versions,
            metrics=finite(metrics),
            files={},
        )
        state = _non_tensor_state(self._learners)
        self._writing = _Writing(
            step, lambda: self._write(tree, manifest, state, collector), num_bytes(tree_of(states))
        )
        self.newest = step

    def amend(self, *, metrics: Mapping[str, float]) -> None:
        """Replace the metrics in the newest checkpoint, whose step was evaluated after it was saved, as soon as it is
        written."""
        _refuse_unmeasured(self._cfg.keep_best, metrics)
        if self._writing is not None:
            self._late = metrics
            return
        assert self.newest is not None
        checkpoint = folder_of(self._folder, self.newest)
        try:
            _together(self._mesh, lambda: _amend(checkpoint, metrics) if self._mesh.get_local_rank() == 0 else None)
        except OSError as error:
            raise self._explained(error, self.newest) from error

    def check(self) -> Metrics:
        """Return the time and size of a save that has finished since the last call; no metrics if there is none."""
        if self._writing is not None:
            self._settle(self._writing)
        finished, self._finished = self._finished, {}
        return finished

    def wait(self) -> None:
        """Wait until the last save is written."""
        if self._writing is not None:
            self._writing.join()
            self._settle(self._writing)

    def close(self) -> None:
        """Wait a limited time for a save in progress, at the end of a run that may have failed."""
        if self._writing is not None:
            self._writing.join(ABANDON_S)
            self._writing = None

    def _settle(self, writing: _Writing) -> None:
        """Finish a save if all ranks have written their part. Raises an error of any rank on every rank."""
        found = gather_objects(self._mesh, (writing.is_done, writing.problem))
        for _, problem in found:
            if problem is not None:
                self._writing = None
                raise self._explained(problem, writing.step)
        if all(is_done for is_done, _ in found):
            self._writing = None
            if self._late is not None:
                self.amend(metrics=self._late)
                self._late = None
            self._finished = {
                "checkpoint/write_s": Max(writing.seconds),
                "checkpoint/bytes": Total(float(writing.num_bytes)),
            }

    def _write(
        self, tree: Tree, manifest: Manifest, state: Mapping[str, Any], collector: Mapping[str, Any] | None
    ) -> None:
        """Write this rank's part, in the thread; the first rank also writes the other files and renames."""
        final = folder_of(self._folder, manifest.step)
        unfinished = final.with_suffix(UNFINISHED)
        is_first = self._side.get_local_rank() == 0
        _together(self._side, lambda: _make_room(self._folder, unfinished) if is_first else None)
        writer = CheckpointWriter(unfinished)
        dcp.save(tree, storage_writer=writer, process_group=self._side.get_group())
        parts = gather_objects(self._side, writer.digests)
        if is_first:
            files = {name: digest for part in parts for name, digest in part.items()}
            files[STATE] = write_json(unfinished / STATE, state)
            if collector is not None:
                columns = bytearray()
                files[COLLECTOR] = write_json(unfinished / COLLECTOR, without_columns(collector, columns))
                files[COLUMNS] = write_bytes(unfinished / COLUMNS, bytes(columns))
            manifest.model_copy(update={"files": files}).write(unfinished)
            _publish(unfinished, final)
            self._prune()

    def _prune(self) -> None:
        metric = {step: self._metric(step) for step in saved_steps(self._folder)}
        for step in superseded(metric, keep_last=self._cfg.keep_last, keep_every=self._cfg.keep_every):
            remove(folder_of(self._folder, step))

    def _metric(self, step: int) -> float | None:
        """Read a checkpoint's value of the metric `checkpoint.keep_best`; None if it is unknown."""
        if self._cfg.keep_best is None:
            return None
        try:
            return Manifest.read(folder_of(self._folder, step)).metrics.get(self._cfg.keep_best)
        except BrokenManifest:
            return None

    def _explained(self, problem: Exception, step: int) -> Exception:
        """Turn an error of the disk into a UserError that says what to do; returns other errors unchanged."""
        if not isinstance(problem, OSError):
            return problem
        complete = [saved for saved in saved_steps(self._folder) if saved != step]
        before = f"the checkpoint of step {complete[-1]} is complete" if complete else "no checkpoint was saved before"
        room, remedy = "", "fix this"
        if problem.errno in _NO_ROOM:
            usage = shutil.disk_usage(self._folder)
            room = f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB are free there)"
            remedy = "make room, raise the limit on the size of files if there is one, or lower checkpoint.keep_last"
        return UserError(
            f"the checkpoint of step {step} could not be written: {problem.strerror} while writing "
            f"{problem.filename or self._folder}{room}; {before}; {remedy}, and start the run again"
        )


def start_saver(cfg: Config | TuningConfig, folder: Path, learners: Mapping[str, Learner], meshes: Meshes) -> Saver:
    """A saver whose manifests hold this configuration and the versions of this machine's software."""
    return Saver(folder, learners, meshes, cfg.checkpoint, configuration=resolved(cfg), versions=describe_machine())


def kind_of_optimizer(optim: OptimConfig) -> str:
    """Return the settings that decide which state the optimizer has, as text."""
    return f'"{optim.name}"' + (" with momentum" if optim.momentum else "")


class _Writing:
    """A save in progress on this rank."""

    def __init__(self, step: int, write: Callable[[], None], num_bytes: int) -> None:
        self.step, self.num_bytes = step, num_bytes
        self.problem: Exception | None = None
        self.seconds = 0.0
        # A daemon thread: a failing process must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save-{step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True when the thread has ended, with or without an error."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self, write: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            write()
        except CheckpointException as error:  # a BaseException: torch raises it on all ranks with the errors of some
            causes = [cause for cause, _ in error.failures.values()]
            disk = [cause for cause in causes if isinstance(cause, OSError)]
            disk.sort(key=lambda cause: cause.filename is None)  # errors that name a file come first
            self.problem = disk[0] if disk else RuntimeError(f"the checkpoint of step {self.step}: {error}")
        except OSError as error:
            self.problem = _portable(error)
        except Exception:
            self.problem = RuntimeError(f"the checkpoint of step {self.step}: {traceback.format_exc()}")
        self.seconds = time.perf_counter() - began


def _portable(error: OSError) -> OSError:
    """Copy an error in a form that can be sent to other ranks."""
    return OSError(error.errno, error.strerror, error.filename)


def _together(mesh: DeviceMesh, work: Callable[[], None]) -> None:
    """Do some work with files; if it fails on one rank, every rank raises its error."""
    problem: OSError | None = None
    try:
        work()
    except OSError as error:
        problem = _portable(error)
    for theirs in gather_objects(mesh, problem):
        if theirs is not None:
            raise theirs


def _make_room(folder: Path, unfinished: Path) -> None:
    for leftover in leftovers(folder):
        delete(leftover)
    unfinished.mkdir(parents=True)


def _amend(checkpoint: Path, metrics: Mapping[str, float]) -> None:
    try:
        manifest = Manifest.read(checkpoint)
    except BrokenManifest as error:
        raise OSError(errno.EIO, str(error), str(checkpoint)) from error
    manifest.model_copy(update={"metrics": finite(metrics)}).write(checkpoint)
    sync_directory(checkpoint)


def _publish(unfinished: Path, final: Path) -> None:
    """Give a checkpoint its final name, once all of it is on disk."""
    sync_directory(unfinished)
    if final.exists():
        remove(final)
    unfinished.rename(final)
    sync_directory(final.parent)


def _non_tensor_state(learners: Mapping[str, Learner]) -> dict[str, Any]:
    """Return the state of the learners other than tensors."""
    return {
        "learners": {
            name: {
                "optimizer": kind_of_optimizer(learner.optim),
                "has_state": bool(learner.optimizer.state),
                "loss_scale": dataclasses.asdict(learner.loss_scale),
                "coefficients": dict(learner.coefficients),
                "adapters": None if (lora := learner.model.adapters) is None else dataclasses.asdict(lora.identity),
            }
            for name, learner in learners.items()
        }
    }


def _refuse_unmeasured(best: str | None, metrics: Mapping[str, float]) -> None:
    measured = [name for name in metrics if name.startswith("eval/")]
    if best is not None and measured and best not in measured:
        raise UserError(f'checkpoint.keep_best = "{best}" is not a metric; set it to one of {", ".join(measured)}')
