"""The tickets of one step, which decide which engine opens which prompt group.

Ticket t is a place in the step's prompts. An engine that has room takes one and opens its group, which is later
accepted or dropped. Engines either share one counter in the store of the process group, so that a fast one takes more,
or each have tickets of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.distributed import PrefixStore, Store

from spmdrl.rollout.clock import RecordedClock, VirtualClock


class Tickets(Protocol):
    """One engine's view of the tickets of a step. No method is a collective: an engine calls them when it likes."""

    @abstractmethod
    def take(self) -> int | None:
        """Take the next ticket; None when no group may be opened now. Each group is accepted or dropped later."""

    @abstractmethod
    def accept(self) -> bool:
        """Count one more group as accepted; False, and it does not count, when the step has enough already."""

    @abstractmethod
    def drop(self) -> None:
        """Count one group as dropped: another may be opened in its place."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return True when enough groups are accepted, so that open ones are not needed. Any thread may call this."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Return True when `take` has no more tickets to give, whatever happens to the open groups."""

    def note_evaluation(self) -> None:
        """Note that this engine has to sample its part of an evaluation, or has sampled it."""
        return

    def cancel(self) -> None:
        """End the step for every engine, because this one cannot continue."""
        return

    def interrupt(self) -> None:
        """Let engines that wait for others stop waiting until `resume`: this one cannot continue for now."""
        return

    def is_interrupted(self) -> bool:
        """Return True when an engine has interrupted the step since this one last resumed."""
        return False

    def resume(self) -> None:
        """Continue after an interruption; every engine does, after each has stopped and before any continues."""
        return

    def close(self) -> None:
        """Remove the step's counters from the store. One engine calls this, when no other will ask again."""
        return


class SharedTickets(Tickets):
    """Tickets from counters in a store that all engines reach.

    `permits` groups may be open or accepted at the same time, and tickets 0 to `num_tickets` - 1 may be taken. As long
    as there are as many permits as groups wanted, the accepted groups do not depend on timing: they are those of the
    shortest run of tickets that has enough of them.
    """

    def __init__(self, store: Store, *, step: int, wanted: int, permits: int, num_tickets: int) -> None:
        self._store = PrefixStore(f"tickets/{step}", store)
        self._wanted, self._permits, self._num_tickets = wanted, permits, num_tickets
        self._known_over = self._known_empty = False  # neither is ever taken back
        self._seen_interruptions = 0

    def take(self) -> int | None:
        """Take a permit, then the next ticket of all engines; see `Tickets`."""
        # Read before counting up: engines that wait would otherwise take permits from each other for moments.
        if self._known_empty or self._count("permits") >= self._permits:
            return None
        if self._count("permits", 1) <= self._permits:
            ticket = self._count("taken", 1) - 1
            if ticket < self._num_tickets:
                return ticket
            self._known_empty = True
        self._count("permits", -1)
        return None

    def accept(self) -> bool:
        if self._known_over:
            return False
        place = self._count("accepted", 1)
        self._known_over |= place >= self._wanted
        return place <= self._wanted

    def drop(self) -> None:
        self._count("permits", -1)

    def is_over(self) -> bool:
        self._known_over = self._known_over or self._count("accepted") >= self._wanted
        return self._known_over

    def is_empty(self) -> bool:
        self._known_empty = self._known_empty or self._count("taken") >= self._num_tickets
        return self._known_empty

    def cancel(self) -> None:
        self._count("accepted", self._wanted)

    def interrupt(self) -> None:
        self._count("interrupted", 1)

    def is_interrupted(self) -> bool:
        return self._count("interrupted") > self._seen_interruptions

    def resume(self) -> None:
        self._seen_interruptions = self._count("interrupted")

    def close(self) -> None:
        for name in ("permits", "taken", "accepted", "interrupted"):
            self._store.delete_key(name)

    def _count(self, name: str, change: int = 0) -> int:
        """Change a counter and return its value; counters begin at 0."""
        return self._store.add(name, change)


class StaticTickets(Tickets):
    """Engine i of E has tickets i, i + E, i + 2E, ..., and an even share of the groups wanted, whatever others do.

    It takes them in rounds: groups that are missing after a round are opened when every group of it has been accepted
    or dropped, and none after the first while an evaluation is sampled. So neither the samples nor which of them are
    sampled together depend on how long a reward takes. Engines never wait for each other, so there is nothing to cancel
    or to interrupt.
    """

    def __init__(
        self, *, engine_index: int, num_engines: int, wanted: int, num_tickets: int, evaluates: Callable[[], bool]
    ) -> None:
        """`evaluates` says whether an evaluation is being sampled."""
        self._mine = iter(range(engine_index, num_tickets, num_engines))
        self._num_left = len(range(engine_index, num_tickets, num_engines))
        self._wanted = len(range(engine_index, wanted, num_engines))
        self._accepted = self._undecided = self._left_in_round = 0
        self._evaluates, self._is_first_round = evaluates, True

    def take(self) -> int | None:
        """Take the next of this engine's tickets, in a round; see `Tickets`."""
        if not self._left_in_round and not self._undecided and (self._is_first_round or not self._evaluates()):
            self._is_first_round = False
            self._left_in_round = min(self._wanted - self._accepted, self._num_left)
        if not self._left_in_round:
            return None
        self._left_in_round -= 1
        self._num_left -= 1
        self._undecided += 1
        return next(self._mine)

    def accept(self) -> bool:
        self._undecided -= 1
        self._accepted += 1
        return True

    def drop(self) -> None:
        self._undecided -= 1

    def is_over(self) -> bool:
        return self._accepted == self._wanted

    def is_empty(self) -> bool:
        return not self._num_left


class OwnTickets(Tickets):
    """Tickets of one engine, which takes them in order until all engines pause by the virtual clock.

    `wanted` of the groups that it has or opens are trained on in this step. None is ever dropped.
    """

    def __init__(self, mine: Iterable[int], *, wanted: int, clock: VirtualClock, evaluates: Callable[[], bool]) -> None:
        """`evaluates` says whether an evaluation is being sampled."""
        self._mine, self._num_missing, self._clock, self._evaluates = deque(mine), wanted, clock, evaluates
        self._note()

    def take(self) -> int | None:
        return self._mine.popleft() if self._mine else None

    def accept(self) -> bool:
        self._num_missing -= 1
        self._note()
        return True

    def note_evaluation(self) -> None:
        self._note()

    def drop(self) -> None:
        raise AssertionError("groups that are trained on in their order have no substitutes")

    def is_over(self) -> bool:
        return self._clock.is_over

    def is_empty(self) -> bool:
        return not self._mine

    def cancel(self) -> None:
        self._clock.cancel()

    def close(self) -> None:
        self._clock.close()

    def _note(self) -> None:
        self._clock.note_due(not self._num_missing and not self._evaluates())


class RecordedTickets(Tickets):
    """Tickets that an engine takes when it took them in another run."""

    def __init__(self, opened: Iterable[tuple[int, int]], *, clock: RecordedClock) -> None:
        """`opened`: each ticket, and the tokens of each row that the engine had sampled before it took it."""
        self._opened, self._clock = deque(opened), clock

    def take(self) -> int | None:
        if not self._opened or self._opened[0][1] > self._clock.num_tokens:
            return None
        return self._opened.popleft()[0]

    def accept(self) -> bool:
        return True

    def drop(self) -> None:
        raise AssertionError("groups that are trained on in their order have no substitutes")

    def is_over(self) -> bool:
        return self._clock.is_over

    def is_empty(self) -> bool:
        return not self._opened
