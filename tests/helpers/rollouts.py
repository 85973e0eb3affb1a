"""Rollouts for tests."""

from __future__ import annotations

from typing import Any

from spmdrl.types import Prompt, Response, Rollout, Trajectory, Turn


def one_turn(prompt: Prompt, response: Response, **others: Any) -> Rollout:
    """A rollout without an environment: one response."""
    turn = Turn(context_ids=prompt.token_ids, response=response)
    defaults = {"sample_index": 0, "seed": 0, "end": response.finish_reason}
    return Rollout(prompt=prompt, trajectories=(Trajectory(turns=(turn,)),), **(defaults | others))
