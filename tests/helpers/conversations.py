"""Conversations with an engine: every response is followed by some tokens, and then by another response."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.engine.torch.runner import Sampled
from spmdrl.engine.torch.scheduler import RequestState
from spmdrl.types import Request, Response


def conversations(
    engine: TorchEngine, begins: Sequence[Request], said: Sequence[tuple[int, ...]], *, num_turns: int
) -> list[tuple[Request, Response]]:
    """Return all turns, those of a conversation next to each other; in conversation i `said[i]` follows a response."""
    turns: list[list[tuple[Request, Response]]] = [[] for _ in begins]
    waiting = deque(enumerate(begins))
    numbers: list[int] = []  # the conversation of each request that the engine took
    asked: list[Request] = []

    def source() -> Iterator[Request | None]:
        while sum(map(len, turns)) < len(turns) * num_turns:
            if waiting:
                number, request = waiting.popleft()
                numbers.append(number)
                asked.append(request)
                yield request
            else:
                yield None

    for place, response in engine.generate(source()):
        number, request = numbers[place], asked[place]
        turns[number].append((request, response))
        if len(turns[number]) < num_turns:
            so_far = request.prompt_ids + response.token_ids + said[number]
            waiting.append((number, replace(request, prompt_ids=so_far, seed=request.seed + 1000)))
    return [turn for conversation in turns for turn in conversation]


def count_read(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the engine will append the tokens that each of its prefills reads."""
    read: list[int] = []
    prefill = engine.runner.prefill

    def counted(admitted: list[RequestState], running: list[RequestState], *, num_waiting: int) -> Sampled:
        read.append(sum(map(len, {state.prefix: state.uncached_ids for state in admitted}.values())))
        return prefill(admitted, running, num_waiting=num_waiting)

    monkeypatch.setattr(engine.runner, "prefill", counted)
    return read
