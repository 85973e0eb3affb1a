"""Random episodes: several trajectories of several turns, with rewards of their environment."""

from __future__ import annotations

import json
import random

from spmdrl.conversation import Observation
from spmdrl.rollout.group import SAVED_GROUP, PromptGroup, SavedGroup
from spmdrl.types import Prompt, Response, RewardedRollout, RewardOutcome, Rollout, Span, Trajectory, Turn
from tests.helpers.models import VOCABULARY

MASKED, UNSAMPLED, FAILED = 3, 5, 6  # indices of rollouts that are not trained, sampled, or rewarded
STATES = 3  # an environment has few, so that the rollouts of a group meet in them


def random_episodes(num_groups: int, group_size: int, *, seed: int = 0, weight: float = 1.0) -> list[RewardedRollout]:
    """The step's rollouts in order; `weight` is what the environment's rewards count, beside those of other terms."""
    rng = random.Random(seed)
    return [
        _episode(rng, *divmod(index, group_size), index=index, weight=weight)
        for index in range(num_groups * group_size)
    ]


def _episode(rng: random.Random, prompt_id: int, sample_index: int, *, index: int, weight: float) -> RewardedRollout:
    prompt = Prompt(prompt_id=prompt_id, token_ids=(5, 6), text="", answer=None, task="", metadata={})
    num_turns = 0 if index == UNSAMPLED else rng.randint(1, 5)
    turns = [_turn(rng, is_first=number == 0) for number in range(num_turns)]
    cuts = sorted({0, *(rng.randrange(1, num_turns) for _ in range(rng.randint(0, 2)) if num_turns > 1)})
    parts = [turns[start:end] for start, end in zip(cuts, [*cuts[1:], None], strict=True)]
    nothing = Turn(context_ids=(5, 6), response=Response(token_ids=(), logprobs=(), finish_reason="length", spans=()))
    rollout = Rollout(
        prompt=prompt,
        sample_index=sample_index,
        seed=0,
        trajectories=tuple(Trajectory(turns=tuple(part)) for part in parts)
        if turns
        else (Trajectory(turns=(nothing,)),),
        end="environment_error" if index == FAILED else "done",
        initial_observation=Observation(state="start", role="role 0"),
        failure="it broke" if index == FAILED else None,
        is_masked=index == MASKED,
    )
    reward = weight * rollout.environment_reward + rng.uniform(-1, 1)
    failed = index == FAILED
    outcome = RewardOutcome(reward=0.0 if failed else reward, parts={}, failure="it broke" if failed else None)
    return RewardedRollout(index=index, rollout=rollout, outcome=outcome)


def _turn(rng: random.Random, *, is_first: bool) -> Turn:
    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(least, most)))

    response = tokens(1, 4)
    return Turn(
        context_ids=(5, 6) if is_first else tokens(1, 4),
        response=Response(
            token_ids=response,
            logprobs=tuple(-3 - rng.random() for _ in response),
            finish_reason="stop",
            spans=(Span(0, len(response)),),
        ),
        observation=_answer(rng),
    )


def _answer(rng: random.Random) -> Observation:
    reward, state = rng.choice([0.0, 0.5, -0.25]), rng.randrange(STATES)
    return Observation(reward=reward, state=str(state), role=f"team/{state}" if state else "role 0")


def reloaded(group: PromptGroup) -> SavedGroup:
    """The group's state, written to JSON and read again."""
    return SAVED_GROUP.load(json.loads(json.dumps(SAVED_GROUP.dump(group.saved()))))
