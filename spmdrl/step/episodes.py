"""Metrics of episodes, which are rollouts that had an environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from spmdrl.algo.metrics import Mean, Metrics, Total, Values
from spmdrl.conversation import Observation
from spmdrl.types import EpisodeEnd, Rollout, Turn

ENDS: tuple[str, ...] = tuple(end for end in get_args(EpisodeEnd) if end != "abort")


def episode_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Metrics of the episodes among this rank's rollouts; none where no rollout had an environment."""
    episodes = [rollout for rollout in rollouts if _had_environment(rollout)]
    if not episodes:
        return {}
    turns = [_turns(rollout) for rollout in episodes]
    actions = [turn.action for of_episode in turns for turn in of_episode if turn.action is not None]
    observations = [rollout.observations for rollout in episodes]
    errors = sum(observation.tool_errors for of_episode in observations for observation in of_episode)
    later = [turn for rollout in episodes for one in rollout.trajectories for turn in one.turns[1:]]
    metrics: Metrics = {
        "episode/turns": Values(tuple(float(len(of_episode)) for of_episode in turns)),
        "episode/trajectories": Mean.of(float(len(rollout.trajectories)) for rollout in episodes),
        "episode/context_tokens": Mean.of(float(len(turn.context_ids)) for turn in later),
        "episode/tool_calls": Mean(float(sum(len(action.tool_calls) for action in actions)), float(len(episodes))),
        "episode/tool_errors_count": Total(float(errors)),
        "episode/malformed_calls_count": Total(float(sum(action.malformed is not None for action in actions))),
        "episode/failed_count": Total(float(sum(rollout.failure is not None for rollout in episodes))),
        "episode/masked_fraction": Mean.of(float(rollout.is_masked) for rollout in episodes),
    }
    return metrics | _end_fractions(episodes, "episode") | _environments_own(observations, "environment/")


def held_out_episode_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Metrics of the episodes of an evaluation; none where no rollout had an environment."""
    episodes = [rollout for rollout in rollouts if _had_environment(rollout)]
    if not episodes:
        return {}
    metrics: Metrics = {
        "eval/turns": Mean.of(float(len(_turns(rollout))) for rollout in episodes),
        "eval/failed_count": Total(float(sum(rollout.failure is not None for rollout in episodes))),
    }
    own = _environments_own([rollout.observations for rollout in episodes], "eval/environment_")
    return metrics | _end_fractions(episodes, "eval") | own


def _end_fractions(episodes: Sequence[Rollout], area: str) -> Metrics:
    # Of every end, also of one that this rank has not seen: its episodes count among those of all ranks.
    return {f"{area}/end_{end}_fraction": Mean.of(float(rollout.end == end) for rollout in episodes) for end in ENDS}


def _environments_own(observations: Iterable[Sequence[Observation]], prefix: str) -> Metrics:
    """The means over episodes of what environments measured: of each number the last that an episode told."""
    told: dict[str, list[float]] = {}
    for of_episode in observations:
        last = {name: value for observation in of_episode for name, value in observation.metrics.items()}
        for name, value in last.items():
            told.setdefault(name, []).append(value)
    return {f"{prefix}{name}": Mean.of(values) for name, values in sorted(told.items())}


def _had_environment(rollout: Rollout) -> bool:
    return rollout.greeting is not None or rollout.failure is not None


def _turns(rollout: Rollout) -> list[Turn]:
    """The turns in which the policy sampled something."""
    return [turn for turn in rollout.turns if turn.response.token_ids]
