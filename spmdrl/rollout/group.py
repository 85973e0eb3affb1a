"""A prompt group while it is being sampled and rewarded, and its state in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spmdrl.algo.seeds import rollout_seed
from spmdrl.rewards.client import Pending
from spmdrl.rollout.codec import Codec
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode, SavedEpisode
from spmdrl.rollout.sampling import Sampling
from spmdrl.types import ImageSpan, Prompt, Response, RewardOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A prompt group in a checkpoint; the prompt itself comes from the stream again, and must be the same."""

    prompt_id: int
    prompt_ids: tuple[int, ...]
    prompt_images: tuple[ImageSpan, ...]
    opened_in: int  # step
    seeds: tuple[int, ...]  # of the episodes
    episodes: tuple[SavedEpisode, ...]
    outcomes: dict[int, RewardOutcome]  # by sample_index


SAVED_GROUP = Codec[SavedGroup](SavedGroup)


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The rollouts of one prompt, followed by its greedy rollout where rewards are compared with one.

    It may take several steps, with the seeds it was opened with.
    """

    prompt: Prompt
    group_size: int  # rollouts to be trained on
    opened_in: int  # step
    episodes: list[Episode]  # by sample_index
    # The finished ones by sample_index, with their rewards to come.
    pending: dict[int, Pending] = field(default_factory=dict)

    @classmethod
    def opened(
        cls,
        prompt: Prompt,
        sampling: Sampling,
        env_context: EnvContext | None,
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
        return cls(prompt, sampling.group_size, step, _episodes(prompt, sampling, env_context, seeds))

    def copy(self) -> PromptGroup:
        """Copy the group, so that the copy can be sampled without changing this one."""
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
    def tokens_of_each(self) -> list[int]:
        """The tokens sampled so far of each rollout that is to be trained on."""
        trained = (episode for episode in self.episodes if not episode.is_baseline)
        return [sum(len(response.token_ids) for response in episode.responses) for episode in trained]

    @property
    def known_rewards(self) -> list[float]:
        """The rewards that are known, without that of the greedy rollout."""
        known = (index for index in range(self.group_size) if index in self.pending and self.pending[index][1].done())
        return [self._reward(index) for index in known]

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that sampled any of it; None when nothing is sampled."""
        responses = [response for episode in self.episodes for response in episode.responses]
        return min((response.oldest_version for response in responses if response.spans), default=None)

    def pending_rollouts(self) -> list[Pending]:
        """List the rollouts of a finished group with their rewards to come, in order; the greedy one is the last."""
        return [self.pending[index] for index in range(len(self.episodes))]

    def saved(self) -> SavedGroup:
        """Return the group's state for a checkpoint; waits for the rewards that are being computed."""
        return SavedGroup(
            prompt_id=self.prompt.prompt_id,
            prompt_ids=self.prompt.token_ids,
            prompt_images=self.prompt.images,
            opened_in=self.opened_in,
            seeds=tuple(episode.seed for episode in self.episodes),
            episodes=tuple(episode.saved() for episode in self.episodes),
            outcomes={index: future.result() for index, (_, future) in sorted(self.pending.items())},
        )

    @classmethod
    def restored(
        cls, saved: SavedGroup, prompt: Prompt, sampling: Sampling, env_context: EnvContext | None
    ) -> PromptGroup:
        """Restore a saved group."""
        episodes = _episodes(prompt, sampling, env_context, saved.seeds)
        for episode, state in zip(episodes, saved.episodes, strict=True):
            episode.restore(state)
        group = cls(prompt, sampling.group_size, saved.opened_in, episodes)
        for index, outcome in saved.outcomes.items():
            future: Future[RewardOutcome] = Future()
            future.set_result(outcome)
            group.pending[index] = (episodes[index].rollout(), future)
        return group

    def _reward(self, index: int) -> float:
        return self.pending[index][1].result().reward


def _episodes(
    prompt: Prompt, sampling: Sampling, env_context: EnvContext | None, seeds: Sequence[int]
) -> list[Episode]:
    """Make the episodes of a group, by sample_index; what is beyond the group's size is greedy."""
    return [
        Episode(
            prompt=prompt,
            sample_index=index,
            seed=seed,
            sampling=sampling if index < sampling.group_size else sampling.greedy(),
            env_context=env_context,
            is_baseline=index >= sampling.group_size,
        )
        for index, seed in enumerate(seeds)
    ]
