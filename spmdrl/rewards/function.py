"""A reward function of the user's, from a module or from a file."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from spmdrl import user_code
from spmdrl.rewards.item import RewardItem


def load(function: str) -> Callable[[RewardItem], Any]:
    """Return the function of this name (`package.module:function` or `path/to/file.py:function`) as a verifier.

    It is called with the keyword arguments prompt, response, answer and metadata, and with `turns`, pairs of an
    `Action` and an `Observation`, if it has such a parameter; if it is async, it is awaited.
    """
    found = user_code.load(function)
    takes_turns = "turns" in inspect.signature(found).parameters
    _require_arguments(found, {"turns": ()} if takes_turns else {})

    def reward(item: RewardItem) -> Any:
        others = {"turns": item.turns} if takes_turns else {}
        value = found(prompt=item.prompt, response=item.response, answer=item.answer, metadata=item.metadata, **others)
        return asyncio.run(_result(value)) if inspect.isawaitable(value) else value

    return reward


def _require_arguments(function: Callable[..., Any], others: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(prompt="", response="", answer=None, metadata={}, **others)
    except TypeError as error:
        raise ValueError(
            f"{getattr(function, '__name__', 'it')} must take the keyword arguments prompt, response, answer and "
            f"metadata: {error}"
        ) from error


async def _result(value: Awaitable[Any]) -> Any:
    return await value
