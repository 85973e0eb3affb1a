"""Restart engines that die, and repeat the work that was lost: `rollout.restart_engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.engine.protocol import EngineDied

MAX_RESTARTS = 3  # of one piece of work: an error that kills an engine more often will not go away

T = TypeVar("T")


class Restarts:
    """Runs work on the engines of all ranks of a mesh, and repeats it when one of them dies."""

    def __init__(self, mesh: DeviceMesh, revive: Callable[[], None] | None, *, message: Callable[[str], None]) -> None:
        """`revive` restarts engines that have died and gives all engines their weights; without it a death ends the
        run. `message` shows the user a line."""
        self._mesh, self._revive, self._message = mesh, revive, message
        self._count = 0

    @property
    def wanted(self) -> bool:
        """True when the run continues after the death of an engine."""
        return self._revive is not None

    def carry(self, work: Callable[[], T], *, during: str, before_revival: Callable[[], None] = lambda: None) -> T:
        """Run `work`, which is local to this rank, and return its result; every rank must call this.

        After a death every rank repeats its work. `before_revival` runs on every rank when all have stopped and none
        has started again. Raises what `work` does; a UserError on every rank.
        """
        for attempt in range(MAX_RESTARTS + 1):
            death: EngineDied | None = None
            with raise_on_all_ranks(self._mesh):
                try:
                    result = work()
                except EngineDied as error:
                    if self._revive is None or attempt == MAX_RESTARTS:
                        raise
                    death = error
            if self._revive is None:
                return result
            deaths = [said for said in gather_objects(self._mesh, str(death) if death else None) if said]
            if not deaths:
                return result
            self._count += 1
            self._message(f"{during}: {'; '.join(deaths)}; it is started again")
            before_revival()
            self._revive()
        raise AssertionError("the last attempt returns or raises")

    def take_count(self) -> int:
        """Count the restarts since the last call; the same on every rank."""
        count, self._count = self._count, 0
        return count
