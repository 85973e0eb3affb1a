"""Train on recorded rollouts, `debug.load_rollouts`: a sampler that reads files instead of asking an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, EvalConfig
from spmdrl.config.plan import Plan
from spmdrl.config.strict import as_written
from spmdrl.dist.collectives import failing_together
from spmdrl.rewards.client import known_reward
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, read_parts, recorded_steps
from spmdrl.rollout.sampler import Sampler
from spmdrl.types import UserError


class RecordedSampler(Sampler):
    """Reads each step from files.

    Rank i of R reads what ranks i, i + R, i + 2R, ... recorded: with as many ranks as before, each has what it had.
    """

    def __init__(self, cfg: Config, plan: Plan, mesh: DeviceMesh) -> None:
        """`mesh` holds the ranks that train."""
        assert cfg.debug.load_rollouts is not None
        self._cfg, self._plan, self._mesh = cfg, plan, mesh
        self._folder = Path(cfg.debug.load_rollouts)

    def collect(self, step: int) -> Collected:
        """Read the step, with the rewards that were recorded. There are no answers to the probe."""
        with failing_together(self._mesh):
            parts = read_parts(self._folder, step, index=self._mesh.get_local_rank(), count=self._mesh.size())
            for part in parts:
                _refuse_other_rollouts(part, self._cfg, self._plan)
        return as_collected(parts, group_size=self._cfg.rollout.group_size)

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Raises UserError when a later step was not recorded."""
        with failing_together(self._mesh):
            missing = set(range(step + 1, self._plan.num_steps + 1)) - set(recorded_steps(self._folder))
            if missing:
                shorter = f"set num_steps to {min(missing) - 1}, or " if min(missing) > step + 1 else ""
                raise UserError(
                    f"debug.load_rollouts = {self._folder} has no rollouts of step {min(missing)}, but run.num_steps = "
                    f'{self._plan.num_steps}; {shorter}record every step: debug.save_rollouts = "all"'
                )


def as_collected(parts: Sequence[Recording], *, group_size: int) -> Collected:
    """Join some ranks' parts of a step, with the rewards that were recorded."""
    return Collected(
        pending=[known_reward(*outcome) for part in parts for outcome in part.outcomes],
        metrics={},
        places=parts[0].places if parts else {},
        group_size=group_size,
    )


def held_out_before(cfg: Config) -> EvalConfig | None:
    """Return the table of the held-out prompts of the run that recorded, whose stream of prompts did without them.

    A run that reads recordings holds none out. None where that run did not either, or recorded nothing.
    """
    folder = Path(cfg.debug.load_rollouts or "")
    if not (steps := recorded_steps(folder)):
        return None
    written = read_parts(folder, steps[0])[0].config.get("eval")
    with as_written(folder, "debug.save_rollouts"):
        return None if written is None else EvalConfig.model_validate_json(json.dumps(written))


def recording_problems(cfg: Config) -> Iterator[str]:
    """Yield a sentence when there is nothing to train on, or when it was recorded with other settings."""
    folder = Path(cfg.debug.load_rollouts or "")
    if not (steps := recorded_steps(folder)):
        yield (
            f"debug.load_rollouts = {folder} holds no rollouts; set it to the folder `rollouts` of a run with "
            "debug.save_rollouts"
        )
        return
    try:
        before, now = read_parts(folder, steps[0])[0].config["rollout"], cfg.rollout
    except UserError as error:
        yield str(error)
        return
    for setting in ("group_size", "temperature"):
        if before[setting] != getattr(now, setting):
            yield (
                f"debug.load_rollouts = {folder} was recorded with rollout.{setting} = {before[setting]}, but now it "
                f"is {getattr(now, setting)}; set it to {before[setting]}"
            )


def _refuse_other_rollouts(part: Recording, cfg: Config, plan: Plan) -> None:
    """Raise UserError when the rollouts do not fit the settings."""
    longest = max((len(t.token_ids) for rollout, _ in part.outcomes for t in rollout.trajectories), default=0)
    if longest > plan.max_sequence_tokens:
        raise UserError(
            f"debug.load_rollouts: step {part.step} has a sequence of {longest} tokens, but "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {plan.max_sequence_tokens}; raise one of them"
        )
    if cfg.advantage.compares_with_greedy and not all(_groups_with_baseline(part)):
        raise UserError(
            f'advantage.estimator = "{cfg.advantage.estimator}" compares with greedy responses, which step {part.step} '
            "of debug.load_rollouts does not have; set another estimator, or record with this one"
        )


def _groups_with_baseline(part: Recording) -> list[bool]:
    """Check of each prompt group whether it has a greedy response."""
    has_one: dict[int, bool] = {}
    for rollout, _ in part.outcomes:
        prompt_id = rollout.prompt.prompt_id
        has_one[prompt_id] = has_one.get(prompt_id, False) or rollout.is_baseline
    return list(has_one.values())
