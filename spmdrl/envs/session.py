"""An environment as its rank sees it: the request that its process is at, its clock, and what was answered so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.protocol import Answer, Close, EnvironmentFailure, Request, Reset, Step

# A request that a process is at, and its clock.


_MAX_HOLDS = 1000


@dataclass(slots=True)
class InFlightRequest:
    """A request that the process is at."""

    held: EnvSession
    closes: bool  # it frees the environment
    deadline: float  # infinite while the clock stands
    left_s: float  # while the clock stands
    num_holds: int = 0

    @property
    def waits(self) -> bool:
        """True while the clock stands."""
        return math.isinf(self.deadline)

    def hold(self) -> None:
        """Stop the clock: the request waits for a thread. A process that stops it all the time is not heard."""
        self.num_holds += 1
        if not self.waits and self.num_holds <= _MAX_HOLDS:
            self.left_s, self.deadline = self.deadline - time.monotonic(), math.inf

    def go_on(self) -> None:
        """Let the clock run again."""
        if self.waits:
            self.deadline = time.monotonic() + self.left_s


# One environment as its rank knows it: what it was asked and has answered, and what it is asked now.


MAX_IDLE_DEATHS = 3


class EnvSession:
    """An environment, which any process can continue: a new one gets the same requests again, up to the present one.

    An environment that then answers otherwise has failed. Only the thread that owns the process calls the methods.
    """

    def __init__(self, number: int, start: EpisodeStart, log: Sequence[tuple[Action | None, Observation]]) -> None:
        self._number, self._start = number, start
        self._log = list(log)  # the reset, which has no action, and the steps
        self._num_repeated = 0  # answers of the present process
        self._asked: tuple[Action | None, Future[Answer]] | None = None
        self._failure: EnvironmentFailure | None = None
        self._num_idle_deaths = 0  # since the last answer
        self.is_in_process = False
        self.is_closed = False
        self.num_deaths = 0  # of processes that were at the present request

    @property
    def is_replaying(self) -> bool:
        """True while the process has not given all answers of the log."""
        return self._num_repeated < len(self._log)

    @property
    def has_request(self) -> bool:
        """True when there is something to send to the process, unless it is at it already."""
        return self.request(0) is not None

    def ask(self, action: Action | None, future: Future[Answer]) -> None:
        """Take the next request: an action, or None for the reset."""
        assert self._asked is None, "an environment is asked one thing at a time"
        if self._failure is not None:
            future.set_result(self._failure)
            return
        assert (action is None) == (not self._log), "an episode begins with one reset"
        self._asked = action, future

    def close(self) -> None:
        """End the episode. What is asked gets the failure "closed"."""
        self.is_closed = True
        self.fail(EnvironmentFailure(kind="error", reason="closed"))

    def request(self, number: int) -> Request | None:
        """Return the next request to the process, under this number; None if there is none."""
        if self._failure is not None:
            return Close(number=number, environment=self._number) if self.is_closed and self.is_in_process else None
        if self.is_replaying:
            if self._asked is None and self._log[-1][1].done:
                return None  # it is over: nobody will ask it again
            action = self._log[self._num_repeated][0]
        elif self._asked is not None:
            action = self._asked[0]
        else:
            return None
        if action is None:
            return Reset(number=number, environment=self._number, start=self._start)
        return Step(number=number, environment=self._number, action=action)

    def take(self, observation: Observation) -> None:
        """Take the process's answer to the last request."""
        if self._failure is not None:  # closed meanwhile
            return
        if self.is_replaying:
            if not _is_same(observation, self._log[self._num_repeated][1]):
                self.fail(EnvironmentFailure(kind="error", reason=self._difference()))
            self._num_repeated += 1
        else:
            self._take_new(observation)
        if not self.is_replaying and self._asked is None:
            self.num_deaths = 0

    def _take_new(self, observation: Observation) -> None:
        assert self._asked is not None, "only what was asked is answered"
        action, future = self._asked
        if action is not None and not observation.messages and not observation.done:
            reason = "ValueError: a step returned neither a message for the policy nor done"
            self.fail(EnvironmentFailure(kind="error", reason=reason))
            return
        self._asked = None
        self._log.append((action, observation))
        self._num_repeated += 1
        self._num_idle_deaths = 0
        future.set_result(observation)

    def fail(self, failure: EnvironmentFailure) -> None:
        """Give up the environment. What it is asked, now and later, gets this failure."""
        self._failure = self._failure or failure
        if self._asked is not None:
            _, future = self._asked
            self._asked = None
            future.set_result(failure)

    def leave(self, *, died_idle: bool, how: str) -> None:
        """Prepare for a new process. One that dies again and again while nothing is asked ends its environments."""
        self.is_in_process = False
        self._num_repeated = 0
        self._num_idle_deaths += died_idle
        if self._num_idle_deaths >= MAX_IDLE_DEATHS:
            self.fail(EnvironmentFailure(kind="error", reason=f"the process {how}, again and again"))

    def _difference(self) -> str:
        what = "the reset" if self._num_repeated == 0 else f"step {self._num_repeated}"
        return f"the environment does not repeat itself: asked again, {what} gave another observation"


def _is_same(one: Observation, other: Observation) -> bool:
    """Compare what an episode depends on, which metrics such as a duration are not."""
    return _told(one) == _told(other)


def _told(observation: Observation) -> tuple[Any, ...]:
    return (*observation.messages, *observation.images, observation.reward, observation.done, observation.state)
