"""A prompt group while it is being sampled and rewarded, and its form in a checkpoint."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.algo.seeds import rollout_seed
from spmdrl.conversation import Action, Observation, ToolCall
from spmdrl.rewards.client import Pending
from spmdrl.rollout.episode import EnvContext, Episode
from spmdrl.rollout.sample import Sampling
from spmdrl.types import ImageSpan, Prompt, Response, RewardOutcome, Span, Turn

# Episodes in a checkpoint: their form in JSON's types.


def response_as_json(response: Response) -> dict[str, Any]:
    """Convert a response to JSON's types."""
    return {
        "token_ids": list(response.token_ids),
        "logprobs": list(response.logprobs),
        "finish_reason": response.finish_reason,
        "spans": [[span.version, span.num_tokens] for span in response.spans],
    }


def response_from_json(saved: Mapping[str, Any]) -> Response:
    """Restore a response."""
    return Response(
        token_ids=tuple(saved["token_ids"]),
        logprobs=tuple(saved["logprobs"]),
        finish_reason=saved["finish_reason"],
        spans=tuple(Span(*span) for span in saved["spans"]),
    )


def turn_as_json(turn: Turn) -> dict[str, Any]:
    """Convert a turn to JSON's types."""
    return {
        "context_ids": list(turn.context_ids),
        "response": response_as_json(turn.response),
        "action": action_as_json(turn.action),
        "observation": observation_as_json(turn.observation),
        "images": images_as_json(turn.images),
    }


def turn_from_json(saved: Mapping[str, Any]) -> Turn:
    """Restore a turn."""
    return Turn(
        context_ids=tuple(saved["context_ids"]),
        response=response_from_json(saved["response"]),
        action=action_from_json(saved["action"]),
        observation=observation_from_json(saved["observation"]),
        images=images_from_json(saved["images"]),
    )


def images_as_json(images: Iterable[ImageSpan]) -> list[dict[str, Any]]:
    """Convert images to JSON's types."""
    return [dataclasses.asdict(image) for image in images]


def images_from_json(saved: Iterable[Mapping[str, Any]]) -> tuple[ImageSpan, ...]:
    """Restore images."""
    return tuple(ImageSpan(**{**image, "grid": tuple(image["grid"])}) for image in saved)


def action_as_json(action: Action | None) -> dict[str, Any] | None:
    """Convert an action to JSON's types."""
    return None if action is None else dataclasses.asdict(action)


def action_from_json(saved: Mapping[str, Any] | None) -> Action | None:
    """Restore an action."""
    if saved is None:
        return None
    return Action(**{**saved, "tool_calls": tuple(ToolCall(**call) for call in saved["tool_calls"])})


def observation_as_json(observation: Observation | None) -> dict[str, Any] | None:
    """Convert an observation to JSON's types."""
    if observation is None:
        return None
    return {
        **{field.name: getattr(observation, field.name) for field in dataclasses.fields(observation)},
        "messages": [dict(message) for message in observation.messages],
        "images": [base64.b64encode(image).decode() for image in observation.images],
        "metrics": dict(observation.metrics),
    }


def observation_from_json(saved: Mapping[str, Any] | None) -> Observation | None:
    """Restore an observation."""
    if saved is None:
        return None
    lists = {name: tuple(saved[name]) for name in ("messages", "branch", "tools") if saved[name] is not None}
    images = tuple(map(base64.b64decode, saved.get("images", ())))  # which earlier versions did not have
    return Observation(**{**saved, **lists, "images": images})


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
        world: EnvContext | None,
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
        cls, saved: Mapping[str, Any], prompt: Prompt, sampling: Sampling, world: EnvContext | None
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


def _episodes(prompt: Prompt, sampling: Sampling, world: EnvContext | None, seeds: list[int]) -> list[Episode]:
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
