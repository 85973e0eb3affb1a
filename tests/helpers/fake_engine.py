"""An engine for tests of what is sampled when."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from spmdrl.algo.seeds import mix
from spmdrl.engine.protocol import Clock
from spmdrl.types import FinishReason, Request, Response, Span


@dataclass
class Row:
    place: int
    request: Request
    num_sampled: int = 0


class FakeEngine:
    """Samples tokens that follow from the request's seed, one a tick for all that run."""

    leads = True
    clock: Clock | None = None

    def __init__(
        self,
        *,
        max_running: int = 6,
        tick_s: float = 0.0,
        length: Callable[[int], int] | None = None,
        reason: FinishReason = "length",
        abort_after: int | None = None,
    ) -> None:
        """Whole responses have the finish reason; with `abort_after`, `generate` ends after so many ticks."""
        self.version = 0
        self.requests: dict[int, Request] = {}  # by seed
        self._reason, self._abort_after = reason, abort_after
        self.asked: list[tuple[int, int]] = []  # (tick, seed) of each request
        self.greedy_seeds: set[int] = set()
        self._max_running, self._tick_s = max_running, tick_s
        self._length = length or (lambda seed: 1 + seed % 30)
        self._aborted = False

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        self._aborted = False
        asked, places = iter(requests), itertools.count()
        rows: list[Row] = []
        for tick in itertools.count():
            if self._aborted or tick == self._abort_after:
                yield from ((row.place, self._response(row, "abort")) for row in rows)
                return
            while len(rows) < self._max_running and (request := next(asked, None)):
                rows.append(Row(next(places), request))
                self.asked.append((tick, request.seed))
                self.requests[request.seed] = request
                self.greedy_seeds |= {request.seed} if request.temperature == 0 else set()
            if not rows:
                assert next(asked, "end") == "end", "nothing is running, and the caller has nothing to start"
                return
            time.sleep(self._tick_s)
            for row in rows:
                row.num_sampled += 1
            finished = [row for row in rows if self._is_whole(row)]
            rows = [row for row in rows if not self._is_whole(row)]
            yield from ((row.place, self._response(row, self._reason_of(row))) for row in finished)
            if self.clock is not None and self.clock.advance():
                self._aborted = True

    def abort(self) -> None:
        self._aborted = True

    def ask_soon(self) -> None:
        pass  # it asks at every tick

    def _is_whole(self, row: Row) -> bool:
        num_sampled = len(row.request.response_ids) + row.num_sampled
        return num_sampled >= min(self._length(row.request.seed), row.request.max_response_tokens)

    def _reason_of(self, row: Row) -> FinishReason:
        is_cut = self._length(row.request.seed) > row.request.max_response_tokens
        return "length" if is_cut else self._reason

    def _response(self, row: Row, reason: FinishReason) -> Response:
        first = len(row.request.response_ids)
        token_ids = tuple(mix(row.request.seed, first + place) % 50 for place in range(row.num_sampled))
        spans = (Span(self.version, row.num_sampled),) if row.num_sampled else ()
        logprobs = tuple(-token / 50 for token in token_ids)
        return Response(token_ids=token_ids, logprobs=logprobs, finish_reason=reason, spans=spans)
