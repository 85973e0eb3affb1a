"""An engine that computes nothing and takes the time of one on an accelerator.

A response takes a fixed time for each token, however many run: a decode step there is bound by reading the weights, and
the prefix of an episode is cached. As SGLang it works while the rank's thread does something else.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Iterator

from spmdrl.algo.seeds import mix
from spmdrl.engine.protocol import RequestQueue
from spmdrl.types import Request, Response, Span

FIRST_TOKEN, NUM_TOKENS = 3, 94  # those that stand for a character


class ClockEngine:
    """Decodes up to `max_running` requests together, a token of each every `step_s` seconds."""

    def __init__(self, *, max_running: int, step_s: float) -> None:
        self._max_running, self._step_s = max_running, step_s
        self._woken = threading.Event()

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Yield each response after the ticks that its tokens take; see `RolloutEngine.generate`."""
        source = RequestQueue(requests)
        running: list[tuple[float, int, Request]] = []  # by the time when it is finished
        while True:
            for index, request in source.take(self._max_running - len(running)):
                end = time.perf_counter() + request.max_response_tokens * self._step_s
                heapq.heappush(running, (end, index, request))
            if not running:
                assert source.is_empty, "nothing is running, so the caller must have another request or none at all"
                return
            self._woken.wait(max(0.0, running[0][0] - time.perf_counter()))
            self._woken.clear()
            if running[0][0] <= time.perf_counter():
                _, index, request = heapq.heappop(running)
                yield index, _response(request)
            source.ask_again()

    def ask_soon(self) -> None:
        """Ask for requests soon; see `RolloutEngine.ask_soon`."""
        self._woken.set()

    def abort(self) -> None:
        """Do nothing: no benchmark stops it."""


def _response(request: Request) -> Response:
    count = request.max_response_tokens
    token_ids = tuple(FIRST_TOKEN + mix(request.seed, place) % NUM_TOKENS for place in range(count))
    return Response(
        token_ids=token_ids, logprobs=(0.0,) * count, finish_reason="length", spans=(Span(version=0, num_tokens=count),)
    )
