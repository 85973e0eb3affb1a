"""Answers to held-out prompts that an engine samples alongside the rollouts of a step: an evaluation stops none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from spmdrl.rewards.client import Pending
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.types import Rollout


@dataclass(frozen=True, slots=True)
class Rewarding:
    """Computes the rewards of an evaluation while an engine samples."""

    submit: Callable[[Rollout], Pending]  # starts to compute that of a finished episode
    complete: Callable[[list[Pending]], Future[list[Pending]]]  # adds what judges of whole groups say


def as_they_are(pending: list[Pending]) -> Future[list[Pending]]:
    """Add nothing to rewards."""
    rewarded: Future[list[Pending]] = Future()
    rewarded.set_result(pending)
    return rewarded


class HeldOutAnswers:
    """The evaluation of one version: an engine takes no refit, and ends no step, before it is sampled."""

    def __init__(self) -> None:
        self._groups: list[PromptGroup] = []
        self._unfinished: set[int] = set()  # ids of episodes
        self._pending: list[Pending] = []
        self._rewarded: Future[list[Pending]] | None = None
        self._rewarding: Rewarding | None = None
        self._deliver: Callable[[Sequence[Pending]], None] | None = None

    def ask(
        self,
        groups: Sequence[PromptGroup],
        rewarding: Rewarding,
        deliver: Callable[[Sequence[Pending]], None],
    ) -> None:
        """Have these groups sampled with the next rollouts; `deliver` is called once, with all of their episodes, when
        their rewards are there."""
        assert self._deliver is None, "an evaluation begins before the one before is delivered"
        self._groups, self._pending, self._rewarded = [*groups], [], None
        self._rewarding, self._deliver = rewarding, deliver
        self._unfinished = {id(episode) for group in groups for episode in group.episodes}

    @property
    def episodes(self) -> list[Episode]:
        """Its episodes that are not added yet."""
        return [episode for group in self._groups for episode in group.episodes if episode in self]

    @property
    def is_due(self) -> bool:
        """True until it is delivered."""
        return self._deliver is not None

    @property
    def is_sampling(self) -> bool:
        """True until its last episode is finished. Any thread may ask."""
        return bool(self._unfinished)

    def __contains__(self, episode: Episode) -> bool:
        """Return True for an episode of this evaluation that is not added yet."""
        return id(episode) in self._unfinished

    def add(self, episode: Episode) -> None:
        """Add a finished episode."""
        assert self._rewarding is not None
        self._pending.append(self._rewarding.submit(episode.rollout()))
        self._unfinished.remove(id(episode))
        self.deliver()

    def deliver(self, *, waits: bool = False) -> None:
        """Deliver the evaluation if all of its rewards are there, or wait for them; do nothing where there is none."""
        if self._deliver is None or self._rewarding is None or self._unfinished:
            return
        if self._rewarded is None:
            if not waits and not all(future.done() for _, future in self._pending):
                return
            self._rewarded = self._rewarding.complete(self._pending)
        if not waits and not self._rewarded.done():
            return
        for group in self._groups:
            group.close()
        deliver, self._deliver, self._groups = self._deliver, None, []
        deliver(self._rewarded.result())
