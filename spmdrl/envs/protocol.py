"""An environment, as its process holds it; and what travels between that process and its rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.faults.text import lines, one_line
from spmdrl.workers.sandbox import Sandbox


class Environment(Protocol):
    """The environment of one episode. Its methods are called one after the other, as the episode goes."""

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode; returns messages to add to the prompt's, maybe none."""

    async def step(self, action: Action) -> Observation:
        """Answer an action of the policy's."""

    async def close(self) -> None:
        """Free what the episode held."""


class Maker(Protocol):
    """A source of environments: the `load(**settings)` of a kind returns it, or a coroutine that does."""

    tools: list[dict[str, Any]]  # JSON schemas, as chat templates take them; none without tools

    def __call__(self) -> Environment:
        """Make the environment of one episode."""

    async def close(self) -> None:
        """Free what the environments share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailure:
    """The reason why there is no observation, in words fit to be shown, whoever said them."""

    kind: Literal["timeout", "error"]
    reason: str  # one line
    traceback: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))
        object.__setattr__(self, "traceback", lines(self.traceback))


Answer = Observation | EnvironmentFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """A question whether the process still reads what it is sent."""

    number: int


Request = Reset | Step | Close
