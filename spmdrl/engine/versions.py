"""The versions of adapters that an engine holds, and when it may forget one."""

from __future__ import annotations

from collections import Counter


class AdapterRefs:
    """Counts the running requests of each version. A version is dead when it is not the newest and none needs it."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._running: Counter[int] = Counter()

    def hold(self, version: int) -> None:
        """Note that the engine holds the adapters of this version."""
        self._held.add(version)

    def holds(self, version: int) -> bool:
        """Return True when the engine holds the adapters of this version."""
        return version in self._held

    def begin(self, version: int) -> None:
        """Note that a request of this version was taken."""
        self._running[version] += 1

    def end(self, version: int) -> None:
        """Note that a request of this version has ended, in whatever way."""
        self._running[version] -= 1

    def none_running(self) -> None:
        """Note that nothing runs any more: what still ran was given up."""
        self._running.clear()

    def pop_unused(self, newest: int) -> list[int]:
        """Return the versions that no request needs, oldest first, and forget them."""
        dead = sorted(version for version in self._held if version != newest and not self._running[version])
        self._held.difference_update(dead)
        return dead

    def clear(self) -> None:
        """Forget everything: the engine was started again."""
        self._held.clear()
        self._running.clear()
