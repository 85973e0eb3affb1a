"""Requests in the torch engine: they wait, run with a row of the cache each, and finish.

    RequestQueue -> waiting -> schedule() -> running -> postprocess() -> finished -> PrefixCache

`running[i]` has row i. The row of a finished request may be stored in the prefix cache, for what follows in its
episode, which then prefills only the tokens after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spmdrl.engine.protocol import RequestQueue
from spmdrl.engine.torch.cache import RowContents
from spmdrl.memory.images import PREFILL_TOKENS
from spmdrl.types import Candidates, FinishReason, ImageSpan, Request, Response, Routes, Span

ASK_AGAIN_TOKENS = 16  # of each row, after which a caller that had nothing to start is asked again
PREFILL_AFTER_TOKENS = 4  # of each row, so that requests that come one by one are prefilled together


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before a first sampled token, and the weights that read them. Equal ones share a prefill."""

    version: int
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]  # by digest: placeholders alone do not identify them

    @property
    def sort_key(self) -> tuple[int, int, tuple[int, ...], tuple[str, ...]]:
        """The order of prefixes in a prefill: short ones first."""
        return len(self.token_ids), self.version, self.token_ids, tuple(image.digest for image in self.images)

    def begins(self, other: Prefix, *, any_version: bool = False) -> bool:
        """Return True when the other is this one with more text; for `any_version`, also to other weights."""
        length = len(self.token_ids)
        return (
            length < len(other.token_ids)
            and self.token_ids[-1] == other.token_ids[length - 1]  # most differ here, and this is cheap
            and (any_version or self.version == other.version)
            and self.images == other.images
            and self.token_ids == other.token_ids[:length]
        )


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A copy of the row that has read a prefix."""

    prefix: Prefix
    contents: RowContents
    oldest_version: int  # of the weights that read any of it
    routes: Tensor | None = None  # of its tokens, [n, L, k] int16, on the host


@dataclass(slots=True)
class RequestState:
    """A request that waits for a row of the cache or has one, with the tokens sampled for it."""

    index: int
    request: Request
    version: int  # of the weights that sample it
    cached: CachedPrefix | None = None  # the row that an earlier request has left, until it is copied into this one's
    num_cached: int = 0  # tokens of its prefix that another request's row has read, or reads in the same prefill
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)  # of each token, where the request has a top_k: [K]
    routes: list[Tensor] = field(default_factory=list)  # of the tokens that its row has read, in order: [n, L, k] each
    finish_reason: FinishReason | None = None
    limit: int = field(init=False)  # tokens that may be sampled here
    prefix: Prefix = field(init=False)  # before the first token sampled here
    oldest_version: int = field(init=False)  # of the weights that its row was read by

    def __post_init__(self) -> None:
        request, self.oldest_version = self.request, self.version
        self.limit = request.max_response_tokens - len(request.response_ids)
        self.prefix = Prefix(self.version, request.prompt_ids + request.response_ids, request.images)

    @property
    def num_sampled(self) -> int:
        """The response tokens so far, with those of an earlier request that this one continues."""
        return len(self.request.response_ids) + len(self.token_ids)

    @property
    def row_prefix(self) -> Prefix:
        """The prefix that its row has read: all tokens but the newest."""
        return replace(self.prefix, token_ids=self.prefix.token_ids + tuple(self.token_ids[:-1]))

    @property
    def uncached_ids(self) -> tuple[int, ...]:
        """The tokens to prefill before the first one can be sampled."""
        token_ids = self.prefix.token_ids
        return token_ids if self.cached is None else token_ids[len(self.cached.prefix.token_ids) :]

    def append(self, token: int, logprob: float, candidates: Tensor | None = None) -> None:
        """Add a sampled token, which may finish the request."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if (top_k := self.request.top_k) is not None:
            assert candidates is not None
            self.candidates.append(candidates[:top_k])
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"

    def response(self) -> Response:
        """Return what was sampled; the reason is "abort" unless the request has finished."""
        return Response(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            spans=(Span(self.version, len(self.token_ids)),) if self.token_ids else (),
            routes=self._reported_routes(),
            candidates=Candidates.of(len(self.prefix.token_ids), torch.stack(self.candidates))
            if self.candidates
            else None,
            num_cached=self.num_cached,
        )

    def _reported_routes(self) -> Routes | None:
        start = self.request.routes_from
        return Routes.of(start, torch.cat(self.routes)[start:]) if start is not None and self.routes else None


class Scheduler:
    """Decides which requests are prefilled, which decode, and which have finished."""

    def __init__(
        self, requests: Iterable[Request | None], *, max_running: int, start: Callable[[int, Request], RequestState]
    ) -> None:
        """`start` is called with each request when it is taken, and its index."""
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._requests = RequestQueue(requests)
        self._max_running, self._start = max_running, start
        self._is_prefilling = False  # until no request waits

    def schedule(self, num_decodes: int) -> list[RequestState]:
        """Take requests as there is room; return those to prefill now, which are the last of `running`.

        None of them: all that run decode. `num_decodes` steps were decoded since the last prefill, or fewer.
        """
        num_free = self._max_running - len(self.running) - len(self.waiting)
        self.waiting.extend(self._start(index, request) for index, request in self._requests.take(num_free))
        is_due = num_decodes >= PREFILL_AFTER_TOKENS or len(self.waiting) >= len(self.running)
        self._is_prefilling = bool(self.waiting) and (self._is_prefilling or is_due)
        if not self._is_prefilling:
            return []
        admitted = admit(self.waiting, self._max_running - len(self.running))
        self.running += admitted
        return admitted

    def postprocess(
        self,
        states: Sequence[RequestState],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        candidates: Sequence[Tensor | None],
    ) -> bool:
        """Append the token that was sampled for each of these requests; return True when one has finished."""
        for state, token, logprob, of_token in zip(states, tokens, logprobs, candidates, strict=True):
            state.append(token, logprob, of_token)
        return any(state.finish_reason is not None for state in states)

    def remove_finished(self) -> tuple[list[RequestState], list[int]]:
        """Remove the finished requests from `running`; return them, and the row that each of the others had.

        Those at the end take the places of the finished ones, so that few rows move.
        """
        finished = [state for state in self.running if state.finish_reason is not None]
        num_left = len(self.running) - len(finished)
        movers = iter(row for row in range(num_left, len(self.running)) if self.running[row].finish_reason is None)
        rows = [row if self.running[row].finish_reason is None else next(movers) for row in range(num_left)]
        self.running = [self.running[row] for row in rows]
        return finished, rows

    def ask_again(self) -> None:
        """Ask the caller for requests again, who had none to start."""
        self._requests.ask_again()

    @property
    def is_done(self) -> bool:
        """True when nothing waits or runs and the caller has no more requests."""
        return self._requests.is_empty and not self.waiting and not self.running


def admit(waiting: deque[RequestState], num_free: int) -> list[RequestState]:
    """Take requests that fit into the free rows and one prefill, of the first one's kind; always at least one.

    Requests with a cached prefix are of one kind, those without are of the other.
    """
    admitted: list[RequestState] = []
    others: list[RequestState] = []
    prefixes: set[Prefix] = set()
    num_tokens = 0
    while waiting and len(admitted) < num_free:
        state = waiting.popleft()
        if admitted and (state.cached is None) != (admitted[0].cached is None):
            others.append(state)
            continue
        if state.cached is not None or state.prefix not in prefixes:
            num_tokens += len(state.uncached_ids)
            if admitted and num_tokens > PREFILL_TOKENS:
                others.append(state)
                break
            prefixes.add(state.prefix)
        admitted.append(state)
    waiting.extendleft(reversed(others))
    return admitted


class PrefixCache:
    """The newest rows that fit into `max_bytes`; the prefix of an evicted one is prefilled again.

    A row that a request has followed stays, because an episode may have branches, but is the first to be evicted: most
    have no other. A row that other weights have read serves no request but one that continues what they sampled.

    Its contents depend on the requests and on their order alone, so that a deterministic run repeats itself.
    """

    def __init__(self, max_bytes: int, *, max_age: int = 0) -> None:
        """Rows that any weights more than `max_age` versions older have read serve nothing."""
        self._max_bytes, self._num_bytes, self._max_age = max_bytes, 0, max_age
        self._rows: deque[CachedPrefix] = deque()

    def make_room(self, num_bytes: int) -> bool:
        """Evict the oldest rows until `num_bytes` more fit; return False where they never would."""
        if num_bytes > self._max_bytes:
            return False
        while self._num_bytes + num_bytes > self._max_bytes:
            self._evict(self._rows[0])
        return True

    def store(self, row: CachedPrefix) -> None:
        """Add a row, for which there is room."""
        self._rows.append(row)
        self._num_bytes += row.contents.num_bytes

    def find(self, prefix: Prefix, *, continues: bool = False) -> CachedPrefix | None:
        """Return the row that has read most of a prefix; None where no row has read its beginning.

        With `continues` the prefix ends in a part of a response, which older weights may have sampled. Rows that are
        too old are evicted: no later request is for their weights.
        """
        for row in [row for row in self._rows if not 0 <= prefix.version - row.oldest_version <= self._max_age]:
            self._evict(row)
        matching = (row for row in self._rows if row.prefix.begins(prefix, any_version=continues))
        found = max(matching, key=lambda row: len(row.prefix.token_ids), default=None)
        if found is not None:
            self._rows.remove(found)
            self._rows.appendleft(found)
        return found

    def _evict(self, row: CachedPrefix) -> None:
        self._rows.remove(row)
        self._num_bytes -= row.contents.num_bytes
