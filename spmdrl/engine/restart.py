"""Work that engines do, carried past the death of an engine where the user wants that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import failing_together, gather_objects
from spmdrl.engine.protocol import EngineDied

MAX_RESTARTS = 3  # during one piece of work: what kills an engine that often will do so again

T = TypeVar("T")


class Restarts:
    """Does work with the engines of all ranks of a mesh, and does it again when one of them dies meanwhile."""

    def __init__(self, mesh: DeviceMesh, revive: Callable[[], None] | None, *, message: Callable[[str], None]) -> None:
        """`revive` starts engines that have died anew and gives all engines their weights; without it a death ends
        the run. `message` shows the user a line."""
        self._mesh, self._revive, self._message = mesh, revive, message
        self._count = 0

    @property
    def wanted(self) -> bool:
        """Whether the death of an engine may be survived at all."""
        return self._revive is not None

    def carry(self, work: Callable[[], T], *, during: str, before_revival: Callable[[], None] = lambda: None) -> T:
        """What `work`, which is local to this rank, returns; every rank must call this.

        After a death every rank's work begins again. `before_revival` is called on every rank when the work of all has
        stopped and none goes on yet. Raises what `work` does; a UserError on every rank.
        """
        for attempt in range(MAX_RESTARTS + 1):
            death: EngineDied | None = None
            with failing_together(self._mesh):
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
        """How often engines were started again since the last call; the same on every rank."""
        count, self._count = self._count, 0
        return count
