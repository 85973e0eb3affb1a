"""Requests while the torch engine samples them, and what they share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from spmdrl.engine.torch.cache import Context, KeptRow
from spmdrl.memory.images import PREFILL_TOKENS
from spmdrl.types import FinishReason, Request


@dataclass(slots=True)
class Running:
    """A request that has a row in the cache, or waits for one."""

    index: int
    request: Request
    version: int  # of the weights that sample it
    begun: KeptRow | None = None  # what an earlier request has left of this one's beginning
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    limit: int = field(init=False)  # tokens that may be sampled here
    context: Context = field(init=False)  # what the first token sampled here follows

    def __post_init__(self) -> None:
        request = self.request
        self.limit = request.max_response_tokens - len(request.response_ids)
        self.context = Context(self.version, request.prompt_ids + request.response_ids, request.images)

    @property
    def num_sampled(self) -> int:
        """The response tokens so far, with those of an earlier request that this one continues."""
        return len(self.request.response_ids) + len(self.token_ids)

    @property
    def read(self) -> Context:
        """The context that its row has read: all tokens but the newest."""
        return replace(self.context, token_ids=self.context.token_ids + tuple(self.token_ids[:-1]))

    @property
    def unread(self) -> tuple[int, ...]:
        """The tokens to read before the first one can be sampled."""
        token_ids = self.context.token_ids
        return token_ids if self.begun is None else token_ids[len(self.begun.context.token_ids) :]

    def finish_reason(self) -> FinishReason | None:
        """Say why the response ends with its newest token; None when it goes on."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        if len(self.token_ids) == self.limit:
            return "length"
        return None


def admit(waiting: deque[Running], num_free: int) -> list[Running]:
    """Take requests that fit into the free rows and one prefill, of the first one's kind; always at least one.

    Requests that go on after others are of one kind, those that begin are of the other.
    """
    admitted: list[Running] = []
    others: list[Running] = []
    contexts: set[Context] = set()
    num_tokens = 0
    while waiting and len(admitted) < num_free:
        run = waiting.popleft()
        if admitted and (run.begun is None) != (admitted[0].begun is None):
            others.append(run)
            continue
        if run.begun is not None or run.context not in contexts:
            num_tokens += len(run.unread)
            if admitted and num_tokens > PREFILL_TOKENS:
                others.append(run)
                break
            contexts.add(run.context)
        admitted.append(run)
    waiting.extendleft(reversed(others))
    return admitted
