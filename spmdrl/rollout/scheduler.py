"""Run episodes on an engine: those that an environment has answered continue before new ones begin.

An engine asks for requests only as it has room, and an episode that waits for its environment takes none. So more
episodes are open than the engine has slots, and slow tools do not idle it.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from spmdrl.engine.protocol import RolloutEngine
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.types import Prompt, Request, Rollout

POLL_S = 0.1  # how soon an engine sees what others have done

T = TypeVar("T")
Wait = Callable[[Collection["Future[Any]"]], object]
RestoreImages = Callable[[Episode], object]  # puts its prompt's images back where engines find them


class EpisodeScheduler:
    """Runs the episodes of one engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        restore_images: RestoreImages | None = None,
        in_order: bool = False,
        max_open: int | None = None,
    ) -> None:
        """`restore_images` is called with the episode of each request; None where there are no images. At most
        `max_open` episodes are open. With `in_order`, all environments that were asked are waited for each time
        the engine asks for requests, so that which requests run together does not depend on how long an environment
        takes."""
        self._engine, self._restore_images, self._in_order, self._max_open = engine, restore_images, in_order, max_open
        self._requested: list[Episode] = []  # the episode of each request, by place
        self._waiting: list[Episode] = []  # for their environments, in the order in which these were asked
        self._ready: list[Episode] = []  # for another request at once, because what they have sampled was a summary
        self._is_stopped = False
        self.num_running = 0  # requests
        self.idle_s = 0.0  # the engine had nothing to run but what waited for environments

    def run(
        self, episodes: Iterable[Episode | None], finished: Callable[[Episode], None], *, wait: Wait | None = None
    ) -> None:
        """Run episodes until there are no more and all are finished, or until `stop`.

        None among the episodes means that there is none to begin now. `finished` is called with each finished episode.
        `wait` waits a moment for one of some futures, and for whatever else could let an episode begin.
        """
        self._requested, self._waiting, self._ready, self._is_stopped, self.num_running = [], [], [], False, 0
        requests = self._requests(iter(episodes), finished, wait or _wait)
        for place, response in self._engine.generate(requests):
            episode = self._requested[place]
            self.num_running -= 1
            episode.add(response)
            if episode.is_finished:
                finished(episode)
            elif episode.is_waiting:
                self._wait_for(episode)
            elif response.finish_reason != "abort":
                self._ready.append(episode)

    def stop(self) -> None:
        """Begin nothing more and end what is running; any thread may call this."""
        self._is_stopped = True
        self._engine.abort()

    def _requests(
        self, new: Iterator[Episode | None], finished: Callable[[Episode], None], wait: Wait
    ) -> Iterator[Request | None]:
        is_empty = False  # there are no more new ones
        while not self._is_stopped:
            if self._ready:
                episode: Episode | None = self._ready.pop(0)
            elif (episode := self._take_answered()) is not None:
                episode.take_answer()
            elif not is_empty and not self._is_full:
                try:
                    episode = next(new)
                except StopIteration:
                    is_empty = True
                    continue
                if episode is not None:
                    episode.begin()
            elif not self._waiting and not self.num_running:
                return
            if episode is None:
                if self.num_running:
                    yield None
                else:
                    self._wait(wait)
            elif episode.is_finished:
                finished(episode)
            elif episode.is_waiting:
                self._wait_for(episode)
            else:
                self._requested.append(episode)
                self.num_running += 1
                if self._restore_images is not None:
                    self._restore_images(episode)
                    episode.restore_images()
                yield episode.request()

    @property
    def _is_full(self) -> bool:
        return self._max_open is not None and self.num_running + len(self._waiting) >= self._max_open

    def _take_answered(self) -> Episode | None:
        """Take an episode that its environment has answered."""
        if self._in_order and self._waiting:
            self._wait(concurrent.futures.wait)
        for place, episode in enumerate(self._waiting):
            if _awaited(episode).done():
                return self._waiting.pop(place)
        return None

    def _wait_for(self, episode: Episode) -> None:
        self._waiting.append(episode)
        _awaited(episode).add_done_callback(lambda _: self._engine.ask_soon())

    def _wait(self, wait: Wait) -> None:
        began = time.perf_counter()
        wait([_awaited(episode) for episode in self._waiting])
        if self._waiting:
            self.idle_s += time.perf_counter() - began


def sample(
    engine: RolloutEngine,
    prompts: Iterable[Prompt],
    sampling: Sampling,
    env_context: EnvContext | None,
    each: Callable[[Rollout], T],
    *,
    run_seed: int,
    step: int,
    restore_images: RestoreImages | None = None,
    in_order: bool = False,
) -> list[T]:
    """Sample `group_size` rollouts of every prompt, with seeds that belong to the sample and not to the rank; return
    what `each` makes of each as soon as it is finished."""
    results: list[T] = []
    groups = [
        PromptGroup.opened(prompt, sampling, env_context, step=step, run_seed=run_seed)
        for prompt in (prompts if engine.leads else ())
    ]
    episodes = [episode for group in groups for episode in group.episodes]
    max_open = env_context.cfg.max_open if env_context is not None else None
    try:
        EpisodeScheduler(engine, restore_images=restore_images, in_order=in_order, max_open=max_open).run(
            episodes, lambda episode: results.append(each(episode.rollout()))
        )
    finally:  # after the death of an engine everything is sampled again, in new environments
        for group in groups:
            group.close()
    return results


def _awaited(episode: Episode) -> Future[Any]:
    assert episode.env_future is not None
    return episode.env_future


def _wait(futures: Collection[Future[Any]]) -> None:
    concurrent.futures.wait(futures, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED)
