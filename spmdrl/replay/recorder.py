"""The recorder: writes each step's rollouts, what the trainer says about their tokens, and a fingerprint of the step if
`debug.save_rollouts` is set; for a replay, and for the page of its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.algo.metrics import Metrics
from spmdrl.checkpoint import resolved
from spmdrl.config import Config
from spmdrl.dist.collectives import failing_together
from spmdrl.learn.learner import Learner
from spmdrl.learn.learners import POLICY
from spmdrl.replay.fingerprints import GradientHooks, StepFingerprint
from spmdrl.replay.trainer_logprobs import LogprobHook, write_trainer_logprobs
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, folder_of, write
from spmdrl.run import Launch
from spmdrl.types import MiniBatch


class Recorder:
    """Writes a step's rollouts with their rewards, and later a fingerprint of what was computed from them.

    The rollouts are written first, so that they are there even if the step diverges.
    """

    def __init__(self, run: Launch[Config], learners: Mapping[str, Learner]) -> None:
        """All ranks that train call the methods together."""
        self._config, self._plan = resolved(run.cfg), run.plan.as_dict()
        save_rollouts = run.cfg.debug.save_rollouts
        self._keep_last = None if save_rollouts == "all" else save_rollouts
        self._hooks = GradientHooks(learners)
        self._logprobs = LogprobHook(learners[POLICY].model)
        self._mesh, self._folder = run.meshes.training, run.folder.rollouts

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """Write the step's rollouts, once their rewards are known."""
        recording = Recording(
            step=step,
            num_ranks=self._mesh.size(),
            config=self._config,
            plan=self._plan,
            places=collected.places,
            outcomes=tuple((rollout, future.result()) for rollout, future in collected.pending),
        )
        write(self._folder, recording, self._mesh, keep_last=self._keep_last)

    def save_fingerprints(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """Write the step's fingerprint and the trainer's log-probabilities, after its updates from these mini-batches;
        `updated` are their metrics."""
        fingerprint, logprobs = self._hooks.take(mini_batches, updated), self._logprobs.take(mini_batches)
        rank = self._mesh.get_local_rank()
        with failing_together(self._mesh):
            fingerprint.write(_path(self._folder, step, rank))
            write_trainer_logprobs(self._folder, step, rank, logprobs)


class NoRecorder:
    """Writes nothing."""

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """Do nothing."""

    def save_fingerprints(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """Do nothing."""


def start_recorder(run: Launch[Config], learners: Mapping[str, Learner]) -> Recorder | NoRecorder:
    """The recorder that `debug.save_rollouts` asks for; recordings go into the run's folder."""
    return NoRecorder() if run.cfg.debug.save_rollouts is None else Recorder(run, learners)


def read_fingerprints(folder: Path, step: int, *, num_ranks: int) -> list[StepFingerprint] | None:
    """Read a step's fingerprint of every rank; None if the step did not end on all of them. Raises UserError if a file
    is damaged."""
    paths = [_path(folder, step, rank) for rank in range(num_ranks)]
    return [StepFingerprint.read(path) for path in paths] if all(path.exists() for path in paths) else None


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"found-{rank}.safetensors"
