"""A prompt group while it is being sampled and rewarded, and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.algo.seeds import rollout_seed
from spmdrl.rewards.client import Pending
from spmdrl.rollout.episode import Episode, World
from spmdrl.rollout.sample import Sampling
from spmdrl.rollout.saved import (
    images_as_json,
    images_from_json,
    observation_as_json,
    observation_from_json,
    response_as_json,
    response_from_json,
    turn_as_json,
    turn_from_json,
)
from spmdrl.types import Prompt, Response, RewardOutcome


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The rollouts of one prompt, followed by its greedy rollout where rewards are compared with one.

    It may take several steps, and keeps the seeds it was opened with.
    """

    prompt: Prompt
    group_size: int  # rollouts to be trained on
    opened_in: int  # step
    episodes: list[Episode]  # by sample_index
    pending: dict[int, Pending] = field(
        default_factory=dict
    )  # the finished ones by sample_index, with their rewards to come

    @classmethod
    def opened(
        cls,
        prompt: Prompt,
        sampling: Sampling,
        world: World | None,
        *,
        step: int,
        run_seed: int,
        with_baseline: bool = False,
    ) -> PromptGroup:
        """Open a group of which nothing has been sampled."""
        seeds = [
            rollout_seed(run_seed, step, prompt.prompt_id, index)
            for index in range(sampling.group_size + with_baseline)
        ]
        return cls(prompt, sampling.group_size, step, _episodes(prompt, sampling, world, seeds))

    def copy(self) -> PromptGroup:
        """Copy the group, so that the copy can go on without changing this one."""
        return dataclasses.replace(
            self, episodes=[episode.copy() for episode in self.episodes], pending=dict(self.pending)
        )

    def close(self) -> None:
        """Give up the environments of unfinished episodes."""
        for episode in self.episodes:
            episode.close()

    @property
    def trained(self) -> Iterator[Response]:
        """The responses to be trained on."""
        return (response for episode in self.episodes if not episode.is_baseline for response in episode.responses)

    @property
    def unfinished(self) -> list[Episode]:
        """The unfinished episodes."""
        return [episode for episode in self.episodes if not episode.is_finished]

    @property
    def is_sampled(self) -> bool:
        """True when every episode is finished."""
        return len(self.pending) == len(self.episodes)

    @property
    def is_rewarded(self) -> bool:
        """True when every reward is known."""
        return self.is_sampled and all(future.done() for _, future in self.pending.values())

    @property
    def rewards(self) -> list[float]:
        """The rewards, when all are known, without that of the greedy rollout."""
        return [self._reward(index) for index in range(self.group_size)]

    @property
    def has_equal_rewards(self) -> bool:
        """True when the group teaches nothing: its rewards, with that of the greedy rollout, are all equal."""
        return len({self._reward(index) for index in range(len(self.episodes))}) == 1

    @property
    def num_failed(self) -> int:
        """The number of rewards that could not be computed, when all are known."""
        return sum(future.result().failure is not None for _, future in self.pending.values())

    @property
    def num_tokens(self) -> int:
        """The tokens sampled so far."""
        return sum(len(response.token_ids) for episode in self.episodes for response in episode.responses)

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that sampled any of it; None when nothing is sampled."""
        responses = [response for episode in self.episodes for response in episode.responses]
        return min((response.oldest_version for response in responses if response.spans), default=None)

    def pending_rollouts(self) -> list[Pending]:
        """List the rollouts of a finished group with their rewards to come, in order; the greedy one is the last."""
        return [self.pending[index] for index in range(len(self.episodes))]

    def as_json(self) -> dict[str, Any]:
        """Convert the group to JSON's types; waits for the rewards that are being computed."""
        return {
            "prompt_id": self.prompt.prompt_id,
            "prompt_ids": list(self.prompt.token_ids),
            "prompt_images": images_as_json(self.prompt.images),
            "opened_in": self.opened_in,
            "seeds": [episode.seed for episode in self.episodes],
            "episodes": [_episode_as_json(episode) for episode in self.episodes],
            "outcomes": {
                str(index): dataclasses.asdict(future.result()) for index, (_, future) in sorted(self.pending.items())
            },
        }

    @classmethod
    def from_json(
        cls, saved: Mapping[str, Any], prompt: Prompt, sampling: Sampling, world: World | None
    ) -> PromptGroup:
        """Restore a saved group; the prompt itself comes from the stream again."""
        episodes = _episodes(prompt, sampling, world, saved["seeds"])
        for episode, state in zip(episodes, saved["episodes"], strict=True):
            _restore(episode, state)
        group = cls(prompt, sampling.group_size, saved["opened_in"], episodes)
        for index, outcome in saved["outcomes"].items():
            future: Future[RewardOutcome] = Future()
            future.set_result(RewardOutcome(**outcome))
            group.pending[int(index)] = (episodes[int(index)].rollout(), future)
        return group

    def _reward(self, index: int) -> float:
        return self.pending[index][1].result().reward


def _episodes(prompt: Prompt, sampling: Sampling, world: World | None, seeds: list[int]) -> list[Episode]:
    """Make the episodes of a group, by sample_index; what is beyond the group's size is greedy."""
    return [
        Episode(
            prompt=prompt,
            sample_index=index,
            seed=seed,
            sampling=sampling if index < sampling.group_size else sampling.greedy(),
            world=world,
            is_baseline=index >= sampling.group_size,
        )
        for index, seed in enumerate(seeds)
    ]


def _episode_as_json(episode: Episode) -> dict[str, Any]:
    return {
        "trajectories": [[turn_as_json(turn) for turn in turns] for turns in episode.trajectories],
        "context_ids": None if episode.context_ids is None else list(episode.context_ids),
        "context_images": images_as_json(episode.context_images),
        "response": response_as_json(episode.response),
        "greeting": observation_as_json(episode.greeting),
        "end": episode.end,
        "failure": episode.failure,
    }


def _restore(episode: Episode, saved: Mapping[str, Any]) -> None:
    episode.trajectories = tuple(tuple(map(turn_from_json, turns)) for turns in saved["trajectories"])
    episode.context_ids = None if saved["context_ids"] is None else tuple(saved["context_ids"])
    episode.context_images = images_from_json(saved["context_images"])
    episode.response = response_from_json(saved["response"])
    episode.greeting = observation_from_json(saved["greeting"])
    episode.end, episode.failure = saved["end"], saved["failure"]
