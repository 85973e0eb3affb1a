"""Who opens which prompt group: the tickets of one step.

Ticket t is a place in the step's prompts. An engine that has room draws one and opens its group, which is later kept or
dropped. Engines either share one counter in the store of the process group, so that a fast one takes more, or each have
tickets of their own.
"""

from __future__ import annotations

from typing import Protocol

from torch.distributed import PrefixStore, Store


class Tickets(Protocol):
    """One engine's view of the tickets of a step. Nothing here is a collective: an engine asks when it likes."""

    def draw(self) -> int | None:
        """The next ticket, or None when no group may be opened now; each that is drawn is kept or dropped later."""
        ...

    def keep(self) -> bool:
        """Count one more group as kept; False, and it does not count, when the step has enough already."""
        ...

    def drop(self) -> None:
        """Count one group as dropped: another may be opened in its place."""
        ...

    def is_over(self) -> bool:
        """Whether enough groups are kept, so that what is still open is not needed. Any thread may ask."""
        ...

    def is_empty(self) -> bool:
        """Whether `draw` has no more tickets to give, whatever happens to the open groups."""
        ...

    def cancel(self) -> None:
        """End the step for every engine, because this one cannot go on."""
        ...

    def interrupt(self) -> None:
        """Let engines that wait for others stop waiting until `resume`: this one cannot go on for now."""
        ...

    def is_interrupted(self) -> bool:
        """Whether an engine has interrupted the step since this one last resumed."""
        ...

    def resume(self) -> None:
        """Go on after an interruption; every engine does, after each has stopped and before any goes on."""
        ...

    def close(self) -> None:
        """Remove what the step left in the store. One engine calls this, when no other will ask again."""
        ...


class SharedTickets:
    """Tickets from counters in a store that all engines reach.

    `permits` groups may be open or kept at the same time, and tickets 0 to `max_draws` - 1 may be drawn. As long as
    there are as many permits as groups wanted, the groups that are kept do not depend on timing: they are those of the
    shortest run of tickets that holds enough of them.
    """

    def __init__(self, store: Store, *, step: int, wanted: int, permits: int, max_draws: int) -> None:
        self._store = PrefixStore(f"tickets/{step}", store)
        self._wanted, self._permits, self._max_draws = wanted, permits, max_draws
        self._known_over = self._known_empty = False  # neither is ever taken back
        self._seen_interruptions = 0

    def draw(self) -> int | None:
        """See `Tickets.draw`."""
        # Looked at before it is counted up: engines that wait would otherwise take permits from each other for moments.
        if self.is_empty() or self._count("held") >= self._permits:
            return None
        if self._count("held", 1) <= self._permits:
            ticket = self._count("drawn", 1) - 1
            if ticket < self._max_draws:
                return ticket
        self._count("held", -1)
        return None

    def keep(self) -> bool:
        """See `Tickets.keep`."""
        if self._known_over:
            return False
        place = self._count("kept", 1)
        self._known_over |= place >= self._wanted
        return place <= self._wanted

    def drop(self) -> None:
        """See `Tickets.drop`."""
        self._count("held", -1)

    def is_over(self) -> bool:
        """See `Tickets.is_over`."""
        self._known_over = self._known_over or self._count("kept") >= self._wanted
        return self._known_over

    def is_empty(self) -> bool:
        """See `Tickets.is_empty`."""
        self._known_empty = self._known_empty or self._count("drawn") >= self._max_draws
        return self._known_empty

    def cancel(self) -> None:
        """See `Tickets.cancel`."""
        self._count("kept", self._wanted)

    def interrupt(self) -> None:
        """See `Tickets.interrupt`."""
        self._count("interrupted", 1)

    def is_interrupted(self) -> bool:
        """See `Tickets.is_interrupted`."""
        return self._count("interrupted") > self._seen_interruptions

    def resume(self) -> None:
        """See `Tickets.resume`."""
        self._seen_interruptions = self._count("interrupted")

    def close(self) -> None:
        """See `Tickets.close`."""
        for name in ("held", "drawn", "kept", "interrupted"):
            self._store.delete_key(name)

    def _count(self, name: str, change: int = 0) -> int:
        """A counter after a change to it; counters begin at 0."""
        return self._store.add(name, change)


class StaticTickets:
    """Engine i of E has tickets i, i + E, i + 2E, ..., and an even share of the groups wanted, whatever others do.

    Its share is drawn in rounds: what is missing after a round is drawn when every group of it has been kept or
    dropped. So neither what is sampled nor what is sampled together depends on how long a reward takes.
    """

    def __init__(self, *, engine_index: int, num_engines: int, wanted: int, max_draws: int) -> None:
        self._mine = iter(range(engine_index, max_draws, num_engines))
        self._num_left = len(range(engine_index, max_draws, num_engines))
        self._wanted = len(range(engine_index, wanted, num_engines))
        self._kept = self._undecided = self._left_in_round = 0

    def draw(self) -> int | None:
        """See `Tickets.draw`."""
        if not self._left_in_round and not self._undecided:
            self._left_in_round = min(self._wanted - self._kept, self._num_left)
        if not self._left_in_round:
            return None
        self._left_in_round -= 1
        self._num_left -= 1
        self._undecided += 1
        return next(self._mine)

    def keep(self) -> bool:
        """See `Tickets.keep`."""
        self._undecided -= 1
        self._kept += 1
        return True

    def drop(self) -> None:
        """See `Tickets.drop`."""
        self._undecided -= 1

    def is_over(self) -> bool:
        """See `Tickets.is_over`."""
        return self._kept == self._wanted

    def is_empty(self) -> bool:
        """See `Tickets.is_empty`."""
        return not self._num_left

    def cancel(self) -> None:
        """Nobody waits for this engine's groups."""

    def interrupt(self) -> None:
        """Nobody waits for this engine's groups."""

    def is_interrupted(self) -> bool:
        """Engines have nothing to do with each other."""
        return False

    def resume(self) -> None:
        """There was no interruption."""

    def close(self) -> None:
        """There is nothing to remove."""
