"""Environments on the rank (stand-in until the real module is merged)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation


@dataclass(frozen=True, slots=True)
class EnvironmentFailure:
    kind: Literal["timeout", "error"]
    reason: str


Answer = Observation | EnvironmentFailure


class OpenEnvironment:
    def reset(self) -> Future[Answer]:
        raise NotImplementedError

    def step(self, action: Action) -> Future[Answer]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class EnvironmentClient:
    tools: list[dict[str, Any]]
    unprotected: list[str]

    def __init__(self, cfg: EnvironmentConfig) -> None:
        raise NotImplementedError

    def __enter__(self) -> EnvironmentClient:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def check(self, start: EpisodeStart) -> Observation:
        raise NotImplementedError

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        greeting: Observation | None = None,
    ) -> OpenEnvironment:
        raise NotImplementedError
