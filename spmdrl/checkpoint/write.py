"""Saving: the state is copied to host memory, the step goes on, and a thread writes what was copied.

A checkpoint is written under another name, its files first, then a manifest with the hash of each; once all of that is
on disk it is renamed. The thread's collectives have a process group of their own: those of the step go on at the same
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
from spmdrl.checkpoint.manifest import BrokenManifest, Manifest, finite, write_json
from spmdrl.checkpoint.places import UNFINISHED, delete, folder_of, leftovers, remove, saved_steps, sync_directory
from spmdrl.checkpoint.retention import superseded
from spmdrl.checkpoint.storage import Writer
from spmdrl.checkpoint.tensors import LearnerState, Tree, copy_to_host, in_chunks, num_bytes, tree_of
from spmdrl.config import CheckpointConfig, OptimConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.update import Learner
from spmdrl.model.host_memory import HostBuffers
from spmdrl.types import UserError

STATE, COLLECTOR = "state.json", "collector.json"
ABANDON_S = 30.0  # how long a run that fails waits for the save that is under way
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Saver:
    """Saves the learners of a run, one checkpoint at a time; every rank of the mesh calls its methods together.

    What fails while a checkpoint is written is raised, on every rank, by the next call of `save`, `check` or `wait`.
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
        self._taken: Metrics = {}
        # Step of the last checkpoint, saved or being written. As one rank sees it: shared storage may show another list
        # to another rank, and what is saved next depends on it.
        self.newest = gather_objects(self._mesh, max(saved_steps(folder), default=None))[0]

    def save(self, step: int, *, metrics: Mapping[str, float], collector: Mapping[str, Any] | None = None) -> None:
        """Copy the state after `step`, and begin to write it; waits for the save before.

        `metrics` are those of the step; `collector` is the state of a `Collector`, the same on every rank.
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
        beside: dict[str, Any] = {STATE: _described(self._learners)}
        if collector is not None:
            beside[COLLECTOR] = collector
        self._writing = _Writing(step, lambda: self._write(tree, manifest, beside), num_bytes(tree_of(states)))
        self.newest = step

    def amend(self, *, metrics: Mapping[str, float]) -> None:
        """Put metrics in the place of those that the newest checkpoint was saved with: its evaluation came later."""
        self.wait()
        _refuse_unmeasured(self._cfg.keep_best, metrics)
        assert self.newest is not None
        checkpoint = folder_of(self._folder, self.newest)
        try:
            _together(self._mesh, lambda: _amend(checkpoint, metrics) if self._mesh.get_local_rank() == 0 else None)
        except OSError as error:
            raise self._explained(error, self.newest) from error

    def check(self) -> Metrics:
        """What the last save that is written has taken; nothing when that was told before."""
        if self._writing is not None:
            self._settle(self._writing)
        taken, self._taken = self._taken, {}
        return taken

    def wait(self) -> None:
        """Wait until the last save is written."""
        if self._writing is not None:
            self._writing.join()
            self._settle(self._writing)

    def close(self) -> None:
        """For a run that ends, perhaps because it fails: give the save that is under way a little time."""
        if self._writing is not None:
            self._writing.join(ABANDON_S)
            self._writing = None

    def _settle(self, writing: _Writing) -> None:
        """If it is written everywhere, that is that. Raises, on every rank, what stopped any of them."""
        found = gather_objects(self._mesh, (writing.is_done, writing.problem))
        for _, problem in found:
            if problem is not None:
                self._writing = None
                raise self._explained(problem, writing.step)
        if all(is_done for is_done, _ in found):
            self._writing = None
            self._taken = {
                "checkpoint/write_s": Max(writing.seconds),
                "checkpoint/bytes": Total(float(writing.num_bytes)),
            }

    def _write(self, tree: Tree, manifest: Manifest, beside: Mapping[str, Any]) -> None:
        """In the thread of every rank: write this rank's part; the first rank does what there is to do once."""
        final = folder_of(self._folder, manifest.step)
        unfinished = final.with_suffix(UNFINISHED)
        is_first = self._side.get_local_rank() == 0
        _together(self._side, lambda: _make_room(self._folder, unfinished) if is_first else None)
        writer = Writer(unfinished)
        dcp.save(tree, storage_writer=writer, process_group=self._side.get_group())
        parts = gather_objects(self._side, writer.digests)
        if is_first:
            files = {name: digest for part in parts for name, digest in part.items()}
            files |= {name: write_json(unfinished / name, value) for name, value in beside.items()}
            dataclasses.replace(manifest, files=files).write(unfinished)
            _publish(unfinished, final)
            self._prune()

    def _prune(self) -> None:
        scores = {step: self._score(step) for step in saved_steps(self._folder)}
        for step in superseded(scores, keep_last=self._cfg.keep_last, keep_every=self._cfg.keep_every):
            remove(folder_of(self._folder, step))

    def _score(self, step: int) -> float | None:
        """What the checkpoint is worth by `checkpoint.keep_best`; nothing when that cannot be known."""
        if self._cfg.keep_best is None:
            return None
        try:
            return Manifest.read(folder_of(self._folder, step)).metrics.get(self._cfg.keep_best)
        except BrokenManifest:
            return None

    def _explained(self, problem: Exception, step: int) -> Exception:
        """A sentence for the user, where the disk is to blame."""
        if not isinstance(problem, OSError):
            return problem
        whole = [saved for saved in saved_steps(self._folder) if saved != step]
        before = f"the checkpoint of step {whole[-1]} is whole" if whole else "no checkpoint was saved before"
        room, remedy = "", "see to that"
        if problem.errno in _NO_ROOM:
            usage = shutil.disk_usage(self._folder)
            room = f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB are free there)"
            remedy = "make room, raise the limit on the size of files if there is one, or lower checkpoint.keep_last"
        return UserError(
            f"the checkpoint of step {step} could not be written: {problem.strerror} while writing "
            f"{problem.filename or self._folder}{room}; {before}; {remedy}, and start the run again"
        )


def save(
    folder: Path,
    learners: Mapping[str, Learner],
    meshes: Meshes,
    *,
    step: int,
    keep_last: int,
    collector: Mapping[str, Any] | None = None,
) -> None:
    """Write the state after `step`, and wait until it is written; every rank of the mesh must call this."""
    saver = Saver(folder, learners, meshes, CheckpointConfig(keep_last=keep_last), configuration={}, versions={})
    saver.save(step, metrics={}, collector=collector)
    saver.wait()


def kind_of_optimizer(optim: OptimConfig) -> str:
    """What decides which state the optimizer has."""
    return f'"{optim.name}"' + (" with momentum" if optim.momentum else "")


class _Writing:
    """A checkpoint that is being written, on this rank."""

    def __init__(self, step: int, write: Callable[[], None], num_bytes: int) -> None:
        self.step, self.num_bytes = step, num_bytes
        self.problem: Exception | None = None
        self.seconds = 0.0
        # A daemon: a process that fails must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save-{step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, one way or the other."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread."""
        self._thread.join(timeout_s)

    def _run(self, write: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            write()
        except CheckpointException as error:  # torch's, and no Exception: what failed on some ranks, told on all
            causes = [cause for cause, _ in error.failures.values()]
            disk = [cause for cause in causes if isinstance(cause, OSError)]
            disk.sort(key=lambda cause: cause.filename is None)  # one that says which file comes first
            self.problem = disk[0] if disk else RuntimeError(f"the checkpoint of step {self.step}: {error}")
        except OSError as error:
            self.problem = _portable(error)
        except Exception:
            self.problem = RuntimeError(f"the checkpoint of step {self.step}: {traceback.format_exc()}")
        self.seconds = time.perf_counter() - began


def _portable(error: OSError) -> OSError:
    """The error as other ranks can be told it."""
    return OSError(error.errno, error.strerror, error.filename)


def _together(mesh: DeviceMesh, work: Callable[[], None]) -> None:
    """Do some work with files; where it fails on one rank, every rank raises that."""
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
    dataclasses.replace(manifest, metrics=finite(metrics)).write(checkpoint)
    sync_directory(checkpoint)


def _publish(unfinished: Path, final: Path) -> None:
    """Give a checkpoint its name, once all of it is on disk."""
    sync_directory(unfinished)
    if final.exists():
        remove(final)
    unfinished.rename(final)
    sync_directory(final.parent)


def _described(learners: Mapping[str, Learner]) -> dict[str, Any]:
    """What learners have beside tensors."""
    return {
        "learners": {
            name: {
                "optimizer": kind_of_optimizer(learner.optim),
                "has_state": bool(learner.optimizer.state),
                "loss_scale": dataclasses.asdict(learner.loss_scale),
                "coefficients": dict(learner.coefficients),
            }
            for name, learner in learners.items()
        }
    }


def _refuse_unmeasured(best: str | None, metrics: Mapping[str, float]) -> None:
    measured = [name for name in metrics if name.startswith("eval/")]
    if best is not None and measured and best not in measured:
        raise UserError(f'checkpoint.keep_best = "{best}" is not measured; set it to one of {", ".join(measured)}')
