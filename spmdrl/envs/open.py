"""Open the environments of a configuration, of whichever kind."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from spmdrl.config import EnvironmentConfig
from spmdrl.config.environment import AgentEnvironment, VerifiersEnvironment
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.client import EnvironmentClient
from spmdrl.envs.protocol import Answer
from spmdrl.types import UserError


class OpenEpisode(Protocol):
    """The environment of one episode, asked one thing at a time. Its futures never raise."""

    def reset(self) -> Future[Answer]:
        """Begin the episode."""

    def step(self, action: Action) -> Future[Answer]:
        """Ask for the answer to an action."""

    def close(self) -> None:
        """End the episode."""


class Environments(Protocol):
    """The environments of a rank."""

    tools: list[dict[str, Any]]  # JSON schemas, as chat templates take them
    unprotected: list[str]  # what the sandbox cannot stop on this machine

    def check(self, start: EpisodeStart) -> Observation:
        """Begin an episode and end it. Raises UserError if that fails."""

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        greeting: Observation | None = None,
    ) -> OpenEpisode:
        """Open an episode. With a greeting, it is played again up to the end of its history."""


def open_environments(cfg: EnvironmentConfig) -> AbstractContextManager[Environments]:
    """Start what the environments of a rank run in. Raises UserError when they cannot be loaded."""
    if not isinstance(cfg.source, AgentEnvironment | VerifiersEnvironment):
        return EnvironmentClient(cfg)
    try:
        from spmdrl.envs.agent import AgentClient
    except ImportError as error:
        raise UserError(
            f'environment.source.kind = "{cfg.source.kind}" needs a package that cannot be imported: {error}; install '
            'it with pip install "spmdrl[endpoint]"'
        ) from error
    return AgentClient(cfg)
