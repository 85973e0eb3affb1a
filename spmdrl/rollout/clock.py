"""The clocks by which engines pause while some of their rollouts go on in the next step.

A clock counts tokens of each running row: an engine that decodes n tokens of every row is n later. By the real clock
engines sample ahead until the last rollout that the step trains on is finished anywhere. By the virtual clock they do
so until each has counted as many tokens as the slowest needed for its own of these rollouts, so that nothing depends on
how long a token takes.
"""

from __future__ import annotations

import time
from typing import ClassVar

from torch.distributed import PrefixStore, Store

TOKENS_PER_TICK = 16  # of each row, after which engines compare their clocks
POLL_S = 0.002  # how soon a clock that waits sees another's next tick


class TokenClock:
    """Counts the tokens of each row that an engine has sampled in a step."""

    is_virtual: ClassVar[bool] = False  # whether engines pause by it

    def __init__(self) -> None:
        self.num_tokens = 0

    def advance(self) -> bool:
        """Count one more token; return True when the engine pauses after it."""
        self.num_tokens += 1
        return False


class RecordedClock(TokenClock):
    """A clock by which an engine pauses where it did in another run."""

    is_virtual = True

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: those of each row until then."""
        super().__init__()
        self._end = num_tokens

    def advance(self) -> bool:
        super().advance()
        return self.is_over

    @property
    def is_over(self) -> bool:
        """True when the engine pauses."""
        return self.num_tokens >= self._end


class VirtualClock(TokenClock):
    """The clock of one of `count` engines that pause at the same tick of a step.

    An engine is due at the tick after it has finished the last rollout of its own that the step trains on; all pause at
    the latest of these ticks. Until every engine is known to be due, none passes the latest tick that is known.
    """

    is_virtual = True

    def __init__(self, store: Store, *, step: int, index: int, count: int) -> None:
        super().__init__()
        self._store = PrefixStore(f"clocks/{step}", store)
        self._index, self._count = index, count
        self._num_ticks = 0  # published: no engine pauses before it
        self._is_due = self.is_over = False

    def advance(self) -> bool:
        super().advance()
        tick, rest = divmod(self.num_tokens, TOKENS_PER_TICK)
        if rest or self.is_over:
            return self.is_over
        if not self._is_due:
            self._publish(tick)
            return False
        while (latest := self._latest()) <= tick and not self.is_over:
            self.is_over = self._num_due() >= self._count and self._latest() <= tick
            if not self.is_over:
                time.sleep(POLL_S)
        return latest <= tick

    def finish(self) -> None:
        """Note that this engine has finished its rollouts that the step trains on."""
        self._publish(self.num_tokens // TOKENS_PER_TICK + 1)  # of the token that is being sampled
        self._is_due = True
        self._store.add("num_due", 1)

    def cancel(self) -> None:
        """Let no engine wait for this one, which cannot go on."""
        self._store.add("num_due", self._count)

    def close(self) -> None:
        """Remove the step's counters from the store. One engine calls this, when no other will ask again."""
        for name in ("num_due", *map(str, range(self._count))):
            self._store.delete_key(name)

    def _publish(self, tick: int) -> None:
        self._store.add(str(self._index), tick - self._num_ticks)
        self._num_ticks = tick

    def _num_due(self) -> int:
        return self._store.add("num_due", 0)

    def _latest(self) -> int:
        """The latest tick that an engine has come to, or at which it is due."""
        return max(self._store.add(str(index), 0) for index in range(self._count))
