"""Environments for tests of what the rank does with them: answers come from threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.envs.protocol import Answer, EnvironmentFailure
from spmdrl.rollout.env_context import EnvContext

Step = Callable[[EpisodeStart, int, Action], Answer]  # (start, number of the step from 0, action) -> answer


class FakeEnvironments:
    """An `EnvironmentClient` whose environments are one function of the start, the number of the step, the action."""

    def __init__(
        self,
        step: Step,
        *,
        initial_observation: Observation | EnvironmentFailure | None = None,
        delay_s: Callable[[int], float] | None = lambda _: 0.0,
    ) -> None:
        """Answers come from other threads, `delay_s` of the episode's seed and step later; None: at once, from none."""
        self.step, self.initial_observation, self.delay_s = step, initial_observation or Observation(), delay_s
        self.num_open = self.most_open = self.num_replayed = 0
        self.lock = threading.Lock()
        self.tools: list[dict[str, Any]] = []
        self.gives_rewards = True

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        initial_observation: Observation | None = None,
    ) -> FakeEnvironment:
        for number, (action, observation) in enumerate(history):
            assert self.step(start, number, action) == observation
            self.num_replayed += 1
        with self.lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        return FakeEnvironment(self, start, len(history))


def fake_world(step: Step, cfg: EnvironmentConfig, *, run_seed: int = 5, **client: Any) -> EnvContext:
    """Episodes in fake environments, for tokens that stand for themselves."""
    return EnvContext(
        cfg=cfg,
        client=cast(Any, FakeEnvironments(step, **client)),
        encoder=cast(Any, FakeEncoder()),
        action_of=lambda ids: Action(text=" ".join(map(str, ids))),
        run_seed=run_seed,
    )


class FakeEnvironment:
    """One episode's environment."""

    def __init__(self, client: FakeEnvironments, start: EpisodeStart, number: int) -> None:
        self._client, self._start, self._number = client, start, number

    def reset(self) -> Future[Answer]:
        return self._answered(lambda: self._client.initial_observation)

    def step(self, action: Action) -> Future[Answer]:
        number, self._number = self._number, self._number + 1
        return self._answered(lambda: self._client.step(self._start, number, action))

    def close(self) -> None:
        with self._client.lock:
            self._client.num_open -= 1

    def _answered(self, answer: Callable[[], Answer]) -> Future[Answer]:
        delay_s = self._client.delay_s
        done: Future[Answer] = Future()

        def give(after_s: float) -> None:
            time.sleep(after_s)
            try:
                done.set_result(answer())
            except Exception as error:
                done.set_exception(error)

        if delay_s is None:
            give(0.0)
        else:  # a thread for each answer: the idle ones of a pool outlive the test, a hundred of them after a file
            threading.Thread(target=give, args=(delay_s(self._start.seed + self._number),), daemon=True).start()
        return done


class FakeEncoder:
    """A `TurnEncoder` for tokens that stand for themselves: a message is a list of numbers, written as text."""

    def __init__(self, *, rewrites: bool = False) -> None:
        """With `rewrites`, answers before the last message are replaced by one token."""
        self._rewrites = rewrites

    def rendered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        rendered: tuple[int, ...] = ()
        for place, message in enumerate(messages):
            numbers = tuple(int(word) for word in message["content"].split())
            if message["role"] == "assistant":
                rendered += (99,) if self._rewrites else numbers
            else:
                rendered += numbers if place == 0 else (1, *numbers, 3)
        return rendered

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> FakeEncoder:
        assert not tools, "no number stands for a tool"
        return self

    def appended(self, messages: Sequence[Message], *, after: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *(int(word) for message in messages for word in message["content"].split()), 3)
