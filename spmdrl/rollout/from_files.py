"""Training from rollouts that were recorded, `debug.load_rollouts`: a sampler that reads, and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import failing_together
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.sink import Naming
from spmdrl.rewards.client import known_reward
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, read_parts, recorded_steps
from spmdrl.rollout.sampler import Sampler
from spmdrl.types import UserError


class NoEngine:
    """Stands where an engine would: every refit succeeds and leaves nothing behind, and nothing can be sampled."""

    leads = False
    naming: Naming = "model"

    def __init__(self, device: torch.device) -> None:
        self.version = -1
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        """See `WeightSink.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """See `WeightSink.begin_update`."""
        self.version = version

    def load(self, number: int) -> None:
        """There is nowhere to copy to."""

    def wait(self) -> None:
        """Nothing is copied."""

    def end_update(self) -> None:
        """There are no weights to be complete."""

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """Nothing is held."""
        return {}

    def differing(self, expected: dict[str, str]) -> list[str]:
        """What is not held does not differ."""
        return []

    def generate(self, requests: Any) -> Any:
        """It does not."""
        raise AssertionError("rollouts are read from files, and there is no engine")

    def abort(self) -> None:
        """Nothing runs."""

    def sleep(self) -> None:
        """There is nothing to give back."""

    def wake(self) -> None:
        """There is nothing to take."""

    def require_alive(self) -> None:
        """There is nothing to die."""

    def revive(self) -> None:
        """There is nothing to die."""

    def close(self) -> None:
        """There is nothing to end."""


class RecordedSampler(Sampler):
    """A sampler that reads each step from files.

    Every rank takes the parts of ranks that are its own place plus multiples of their number, so that on as many ranks
    as there were each has what it had.
    """

    def __init__(self, cfg: Config, plan: Plan, mesh: DeviceMesh) -> None:
        """`mesh` is of the ranks that train."""
        assert cfg.debug.load_rollouts is not None
        self._cfg, self._plan, self._mesh = cfg, plan, mesh
        self._folder = Path(cfg.debug.load_rollouts)

    def collect(self, step: int) -> Collected:
        """See `Sampler.collect`; the rewards are those that were recorded. There is nobody to answer the probe."""
        with failing_together(self._mesh):
            parts = read_parts(self._folder, step, index=self._mesh.get_local_rank(), count=self._mesh.size())
            for part in parts:
                _refuse_other_rollouts(part, self._cfg, self._plan)
        return as_collected(parts, group_size=self._cfg.rollout.group_size)

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """See `Sampler.restore`. Raises UserError when a step that is still to come was not recorded."""
        with failing_together(self._mesh):
            missing = set(range(step + 1, self._plan.num_steps + 1)) - set(recorded_steps(self._folder))
            if missing:
                shorter = f"set num_steps to {min(missing) - 1}, or " if min(missing) > step + 1 else ""
                raise UserError(
                    f"debug.load_rollouts = {self._folder} has no rollouts of step {min(missing)}, but run.num_steps = "
                    f'{self._plan.num_steps}; {shorter}record every step: debug.save_rollouts = "all"'
                )


def as_collected(parts: Sequence[Recording], *, group_size: int) -> Collected:
    """Some ranks' parts of a step as one rank's, with the rewards that were recorded."""
    return Collected(
        pending=[known_reward(*outcome) for part in parts for outcome in part.outcomes],
        metrics={},
        places=parts[0].places if parts else {},
        group_size=group_size,
    )


def check_recorded(cfg: Config) -> None:
    """Raise UserError when there is nothing to train from, or what there is was recorded with other settings."""
    folder = Path(cfg.debug.load_rollouts or "")
    if not (steps := recorded_steps(folder)):
        raise UserError(
            f"debug.load_rollouts = {folder} holds no rollouts; set it to the folder `rollouts` of a run with "
            "debug.save_rollouts"
        )
    before, now = read_parts(folder, steps[0])[0].config["rollout"], cfg.rollout
    for setting in ("group_size", "temperature"):
        if before[setting] != getattr(now, setting):
            raise UserError(
                f"debug.load_rollouts = {folder} was recorded with rollout.{setting} = {before[setting]}, but now it "
                f"is {getattr(now, setting)}; set it to {before[setting]}"
            )


def _refuse_other_rollouts(part: Recording, cfg: Config, plan: Plan) -> None:
    """Raise UserError when the rollouts are not such as the settings ask for."""
    longest = max((len(r.prompt.token_ids) + len(r.response.token_ids) for r, _ in part.outcomes), default=0)
    if longest > plan.max_sequence_tokens:
        raise UserError(
            f"debug.load_rollouts: step {part.step} has a prompt and response of {longest} tokens, but "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {plan.max_sequence_tokens}; raise one of them"
        )
    if cfg.advantage.compares_with_greedy and not all(_groups_with_baseline(part)):
        raise UserError(
            f'advantage.estimator = "{cfg.advantage.estimator}" compares with greedy responses, which step {part.step} '
            "of debug.load_rollouts does not have; set another estimator, or record with this one"
        )


def _groups_with_baseline(part: Recording) -> list[bool]:
    """Of each prompt group, whether it has a greedy response."""
    has_one: dict[int, bool] = {}
    for rollout, _ in part.outcomes:
        prompt_id = rollout.prompt.prompt_id
        has_one[prompt_id] = has_one.get(prompt_id, False) or rollout.is_baseline
    return list(has_one.values())
