"""Requests while the torch engine samples them, and what they share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spmdrl.memory.images import PREFILL_TOKENS
from spmdrl.types import FinishReason, ImageSpan, Request


@dataclass(frozen=True, slots=True)
class Context:
    """The beginning that a first sampled token follows, and the weights that read it. Equal ones share a prefill."""

    version: int
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]  # by digest: placeholders alone do not say what they stand for

    @property
    def order(self) -> tuple[int, int, tuple[int, ...], tuple[str, ...]]:
        """The place of a context among others: short ones first."""
        return len(self.token_ids), self.version, self.token_ids, tuple(image.digest for image in self.images)


@dataclass(slots=True)
class Running:
    """A request that has a row in the cache, or waits for one."""

    index: int
    request: Request
    version: int  # of the weights that sample it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    limit: int = field(init=False)  # tokens that may be sampled here

    def __post_init__(self) -> None:
        self.limit = self.request.max_response_tokens - len(self.request.response_ids)

    @property
    def num_sampled(self) -> int:
        """The response tokens so far, with those of an earlier request that this one continues."""
        return len(self.request.response_ids) + len(self.token_ids)

    @property
    def context(self) -> Context:
        """The beginning that the first token sampled here follows."""
        request = self.request
        return Context(self.version, request.prompt_ids + request.response_ids, request.images)

    def finish_reason(self) -> FinishReason | None:
        """Say why the response ends with its newest token; None when it goes on."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        if len(self.token_ids) == self.limit:
            return "length"
        return None


def admit(waiting: deque[Running], num_free: int) -> list[Running]:
    """Take requests from the front that fit into the free rows and one prefill; always at least one."""
    admitted: list[Running] = []
    contexts: set[Context] = set()
    num_tokens = 0
    while waiting and len(admitted) < num_free:
        context = waiting[0].context
        if context not in contexts:
            num_tokens += len(context.token_ids)
            if contexts and num_tokens > PREFILL_TOKENS:
                break
            contexts.add(context)
        admitted.append(waiting.popleft())
    return admitted
