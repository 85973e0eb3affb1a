"""The clocks by which engines pause while some of their rollouts continue in the next step.

A clock counts tokens of each running row: an engine that decodes n tokens of every row is n later. By the real clock
engines sample ahead until the last rollout that the step trains on is finished anywhere. By the virtual clock they do
so until each has counted as many tokens as the slowest needed for its own of these rollouts, so that nothing depends on
how long a token takes.

With a refit in flight a step has two parts: engines pause once more, for new weights, and the step does not end before
that. By the real clock each does so when the weights are there, by the virtual clock after a certain number of tokens,
and one that has nothing to sample waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.distributed import PrefixStore, Store

TOKENS_PER_TICK = 16  # of each row, after which engines compare their clocks
POLL_S = 0.002  # how soon a clock that waits sees another's next tick


@dataclass(frozen=True, slots=True)
class RefitInFlight:
    """The weights that come while a step is sampled."""

    is_announced: Callable[[], bool]  # whether they are there; any thread may call this
    take: Callable[[], None]  # waits for them and loads them; every rank that holds an engine must call this


class TokenClock:
    """Counts the tokens of each row that an engine has sampled in a step."""

    is_virtual: ClassVar[bool] = False  # whether engines pause by it

    def __init__(self, refit_due: Callable[[], bool] | None = None) -> None:
        """`refit_due` says when the engine pauses for the step's refit in flight; None: there is none."""
        self.num_tokens = 0
        self.refit_at: int | None = None  # tokens of each row before the refit in flight
        self._refit_due = refit_due

    def advance(self) -> bool:
        """Count one more token; return True when the engine pauses after it."""
        self.num_tokens += 1
        return False

    @property
    def awaits_refit(self) -> bool:
        """True until the step's refit in flight."""
        return self._refit_due is not None and self.refit_at is None

    @property
    def is_refit_due(self) -> bool:
        """True when the engine pauses for the step's refit in flight."""
        return self.refit_at is None and self._refit_due is not None and self._refit_due()

    def num_to_begin(self, part: int) -> int | None:
        """Return how many episodes the engine begins in a part of the step; None: that is not known beforehand."""
        return None

    def note_refit(self) -> None:
        """Note that the engine has got its weights in flight."""
        self.refit_at = self.num_tokens


class RecordedClock(TokenClock):
    """A clock by which an engine pauses where it did in another run."""

    is_virtual = True

    def __init__(self, num_tokens: int, *, refit_at: int | None = None, started: Sequence[int] = ()) -> None:
        """`num_tokens`: those of each row until then; `refit_at`: those before the refit in flight, if there was one;
        `started`: episodes that were started before and after that. An engine starts none once it knows that the step
        is over, some tokens before it pauses."""
        super().__init__(None if refit_at is None else lambda: self.num_tokens >= refit_at)
        self._end, self._started = num_tokens, started

    def num_to_begin(self, part: int) -> int | None:
        return self._started[part] if part < len(self._started) else None

    def advance(self) -> bool:
        super().advance()
        return self.is_over or self.is_refit_due

    @property
    def is_over(self) -> bool:
        """True when the engine pauses until the next step."""
        return self.num_tokens >= self._end and not self.awaits_refit


class VirtualClock(TokenClock):
    """The clock of one of `count` engines that pause at the same tick of a step.

    An engine is due at the tick after it has finished the last rollout of its own that the step trains on, and its part
    of an evaluation; all pause at the latest of these ticks. Until every engine is known to be due, none passes the
    latest tick that is known. With a refit in flight, all of this begins with the tick at which they pause for it.
    """

    is_virtual = True

    def __init__(self, store: Store, *, step: int, index: int, count: int, refit_after: int | None = None) -> None:
        """`refit_after`: tokens of each row, a whole number of ticks, before the refit in flight; None: there is
        none."""
        super().__init__(None if refit_after is None else lambda: self.num_tokens >= refit_after)
        self._store = PrefixStore(f"clocks/{step}", store)
        self._index, self._count = index, count
        self._num_ticks = 0  # published: no engine pauses before it
        self._is_due = self.is_over = False

    def advance(self) -> bool:
        """Count one more token; at each tick, publish it and read the others' clocks, which may wait for them."""
        super().advance()
        tick, rest = divmod(self.num_tokens, TOKENS_PER_TICK)
        if rest or self.is_over:
            return self.is_over
        if not self._is_due:
            self._publish(tick)
        if self.awaits_refit:
            return self.is_refit_due
        return self._is_due and self._ends_at(tick)

    def note_refit(self) -> None:
        """Note the refit in flight; an engine that was due before it is counted as due from here on."""
        super().note_refit()
        if self._is_due:
            self._store.add("num_due", 1)
            tick, rest = divmod(self.num_tokens, TOKENS_PER_TICK)
            if not rest:
                self._ends_at(tick)

    def note_due(self, is_due: bool) -> None:
        """Note whether this engine has finished all that it must before it pauses. Once it has, only a refit in flight
        can bring more: an evaluation. So others learn of it after that."""
        if is_due and not self._is_due:
            self._publish(self.num_tokens // TOKENS_PER_TICK + 1)  # of the token that is being sampled
            if not self.awaits_refit:
                self._store.add("num_due", 1)
        self._is_due = is_due

    def cancel(self) -> None:
        """Let no engine wait for this one, which cannot continue."""
        self._store.add("num_due", self._count)

    def close(self) -> None:
        """Remove the step's counters from the store. One engine calls this, when no other will ask again."""
        for name in ("num_due", *map(str, range(self._count))):
            self._store.delete_key(name)

    def _ends_at(self, tick: int) -> bool:
        """Return True when the step ends at this tick; wait until that is known."""
        while self._latest() <= tick and not self.is_over:
            self.is_over = self._num_due() >= self._count and self._latest() <= tick
            if not self.is_over:
                time.sleep(POLL_S)
        return self.is_over

    def _publish(self, tick: int) -> None:
        self._store.add(str(self._index), tick - self._num_ticks)
        self._num_ticks = tick

    def _num_due(self) -> int:
        return self._store.add("num_due", 0)

    def _latest(self) -> int:
        """The latest tick that an engine has come to, or at which it is due."""
        return max(self._store.add(str(index), 0) for index in range(self._count))
