"""Keeps each step's rollouts and findings, where `debug.save_rollouts` asks for it, to be computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.algo.metrics import Metrics
from spmdrl.checkpoint import resolved
from spmdrl.config import Config
from spmdrl.dist.collectives import failing_together
from spmdrl.learn.update import Learner
from spmdrl.replay.fingerprints import GradientHooks, StepFingerprint
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, folder_of, write
from spmdrl.run import Launch
from spmdrl.types import MiniBatch


class Recorder:
    """Writes what a step had when its rollouts were scored, and beside it what was computed from that.

    In two parts, so that a step in which training diverges is there to be looked at.
    """

    def __init__(self, run: Launch[Config], learners: Mapping[str, Learner]) -> None:
        """All ranks that train call the methods together."""
        self._config, self._plan = resolved(run.cfg), run.plan.as_dict()
        save_rollouts = run.cfg.debug.save_rollouts
        self._keep_last = None if save_rollouts == "all" else save_rollouts
        self._hooks = GradientHooks(learners)
        self._mesh, self._folder = run.meshes.training, run.folder.rollouts

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """Call this when the rewards are there."""
        recording = Recording(
            step=step,
            num_ranks=self._mesh.size(),
            config=self._config,
            plan=self._plan,
            places=collected.places,
            outcomes=tuple((rollout, future.result()) for rollout, future in collected.pending),
        )
        write(self._folder, recording, self._mesh, keep_last=self._keep_last)

    def save_findings(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """Call this after the step's updates; `mini_batches` are those that they were made of."""
        found = self._hooks.take(mini_batches, updated)
        with failing_together(self._mesh):
            found.write(_path(self._folder, step, self._mesh.get_local_rank()))


class NoRecorder:
    """Keeps nothing."""

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """See `Recorder.save_rollouts`."""

    def save_findings(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """See `Recorder.save_findings`."""


def start_recorder(run: Launch[Config], learners: Mapping[str, Learner]) -> Recorder | NoRecorder:
    """The recorder that `debug.save_rollouts` asks for; recordings go into the run's folder."""
    return NoRecorder() if run.cfg.debug.save_rollouts is None else Recorder(run, learners)


def read_findings(folder: Path, step: int, *, num_ranks: int) -> list[StepFingerprint] | None:
    """What each rank found in a step; None when the step did not end on every one. Raises UserError when a file is
    damaged."""
    paths = [_path(folder, step, rank) for rank in range(num_ranks)]
    return [StepFingerprint.read(path) for path in paths] if all(path.exists() for path in paths) else None


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"found-{rank}.safetensors"
