"""An environment, as its process sees it; and what travels between that process and its rank."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.faults.text import lines, one_line
from spmdrl.workers.sandbox import Sandbox

# The names under which environments report metrics: as many as a run can show, however many there are.


MAX_NAMES = 200  # of a rank, over the whole launch
DROPPED = "dropped_metrics"


class MetricNames:
    """Stores the first `MAX_NAMES` names that a rank's environments use.

    Every name is a curve of the run, with its place in each row of metrics.jsonl. A name with a random part, such as an
    episode's, would make them without end. It may be asked from several threads.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def known(self, observation: Observation) -> Observation:
        """Return an observation with the metrics that have a place, and the number of the others as a metric."""
        with self._lock:
            for name in observation.metrics:
                if len(self._known) < MAX_NAMES:
                    self._known.add(name)
            known = {name: value for name, value in observation.metrics.items() if name in self._known}
        if num_dropped := len(observation.metrics) - len(known):
            return dataclasses.replace(observation, metrics={**known, DROPPED: float(num_dropped)})
        return observation


class Environment(Protocol):
    """The environment of one episode. Its methods are called one after the other."""

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode; returns messages to add to the prompt's, maybe none."""

    async def step(self, action: Action) -> Observation:
        """Answer an action of the policy's."""

    async def close(self) -> None:
        """Free what the episode used."""


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Maker:
    """A source of environments: the loader of a kind returns it, or a coroutine that does."""

    make: Callable[[], Environment]  # the environment of one episode
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas, as chat templates take them
    close: Callable[[], Awaitable[None]] = _nothing  # frees what the environments share
    gives_rewards: bool = True  # as far as is known before an episode


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailure:
    """The reason why there is no observation, in printable words."""

    kind: Literal["timeout", "error"]
    reason: str  # one line
    traceback: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))
        object.__setattr__(self, "traceback", lines(self.traceback))


Answer = Observation | EnvironmentFailure


class OpenEpisode:
    """The environment of one episode, as its rank asks it: one thing at a time. Its futures never raise."""

    def reset(self) -> Future[Answer]:
        """Begin the episode."""
        return self._ask(None)

    def step(self, action: Action) -> Future[Answer]:
        """Ask for the answer to an action."""
        return self._ask(action)

    def close(self) -> None:
        """End the episode. What is asked gets the failure "closed"."""
        raise NotImplementedError

    def _ask(self, action: Action | None) -> Future[Answer]:
        raise NotImplementedError


class Environments(AbstractContextManager["Environments"]):
    """The environments of a rank."""

    tools: list[dict[str, Any]]  # JSON schemas, as chat templates take them
    gives_rewards: bool
    unprotected: list[str]  # what the sandbox cannot stop on this machine

    def check(self, start: EpisodeStart) -> Observation:
        """Begin an episode and end it. Raises UserError if that fails."""
        raise NotImplementedError

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        initial_observation: Observation | None = None,
    ) -> OpenEpisode:
        """Open an episode. With an initial observation, it is replayed up to the end of its history."""
        raise NotImplementedError

    def close(self) -> None:
        """End all that is open. What is asked gets the failure "closed"."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvJob:
    """A process's task: the first message it receives."""

    kind: str
    settings: dict[str, Any]  # arguments of the kind's `load`
    sandbox: Sandbox | None
    max_threads: int  # for code that is not async
    max_characters: int  # of an observation's texts together


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A process's answer to its job."""

    tools: list[dict[str, Any]]  # JSON schemas, as chat templates take them
    gives_rewards: bool
    unprotected: list[str]  # what the sandbox cannot stop on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """A request to make an environment and begin its episode."""

    number: int  # of the request
    environment: int
    start: EpisodeStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request to answer an action."""

    number: int
    environment: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A request to free an environment."""

    number: int
    environment: int


EnvRequest = Reset | Step | Close


# Calls of the user's code in an environment's process, sync or async.


async def run(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function and return its result; one that is not async runs in a thread, so that others do not wait.

    Raises RuntimeError for a function that calls sys.exit, which would end all episodes of the process.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await asyncio.to_thread(_call, function, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise _exit_error(function, error) from error


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except SystemExit as error:  # a thread hands it to the event loop, which would end
        raise _exit_error(function, error) from error


def _exit_error(function: Callable[..., Any], error: SystemExit) -> RuntimeError:
    named = getattr(function, "func", function)  # of a partial call
    return RuntimeError(f"{getattr(named, '__name__', 'it')} called sys.exit({error.code!r})")
