"""Keeps each step's rollouts and findings, where `debug.save_rollouts` asks for it, to be computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Metrics
from spmdrl.checkpoint import resolved
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import failing_together
from spmdrl.learn.update import Learner
from spmdrl.replay.fingerprints import GradientHooks, StepFingerprint
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, folder_of, write
from spmdrl.types import MiniBatch


class Recorder:
    """Writes what a step had when its rollouts were scored, and beside it what was computed from that.

    In two parts, so that a step in which training diverges is there to be looked at.
    """

    def __init__(
        self, cfg: Config, plan: Plan, learners: Mapping[str, Learner], mesh: DeviceMesh, folder: Path
    ) -> None:
        """`mesh` is of the ranks that train; all of them call the methods together."""
        self._config, self._plan = resolved(cfg), plan.as_dict()
        self._keep_last = None if cfg.debug.save_rollouts == "all" else cfg.debug.save_rollouts
        self._witness = GradientHooks(learners)
        self._mesh, self._folder = mesh, folder

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
        found = self._witness.take(mini_batches, updated)
        with failing_together(self._mesh):
            found.write(_path(self._folder, step, self._mesh.get_local_rank()))


class NoRecorder:
    """Keeps nothing."""

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """See `Recorder.save_rollouts`."""

    def save_findings(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """See `Recorder.save_findings`."""


def start_recorder(
    cfg: Config, plan: Plan, learners: Mapping[str, Learner], mesh: DeviceMesh, folder: Path
) -> Recorder | NoRecorder:
    """What `debug.save_rollouts` asks for; recordings go into `folder`."""
    if cfg.debug.save_rollouts is None:
        return NoRecorder()
    return Recorder(cfg, plan, learners, mesh, folder)


def read_findings(folder: Path, step: int, *, num_ranks: int) -> list[StepFingerprint] | None:
    """What each rank found in a step; None when the step did not end on every one. Raises UserError when a file is
    damaged."""
    paths = [_path(folder, step, rank) for rank in range(num_ranks)]
    return [StepFingerprint.read(path) for path in paths] if all(path.exists() for path in paths) else None


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"found-{rank}.safetensors"
