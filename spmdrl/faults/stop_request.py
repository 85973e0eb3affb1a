"""Requests to stop the run: from a signal, from the file `stop`, from another rank, or because of `run.stop_before`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to save and stop the run."""

    reason: str
    again: bool = True  # False where a restart at once would stop at once


class StopRequests:
    """The stop requests that this rank knows of; ranks agree on one in `Watch.agree_to_stop`."""

    def __init__(self, before: datetime | None = None) -> None:
        """`before` is `run.stop_before`: no step begins that is expected to end later, and one that is running then
        stops. Without a time zone it is local time."""
        self._before = before
        self._received: StopRequest | None = None
        self._last_end: float | None = None
        self._longest_step_s = 0.0

    def add(self, request: StopRequest) -> None:
        """Keep a request. The user is shown the reason of the first one."""
        self._received = self._received or request

    def end_step(self, now: float) -> None:
        """Measure the step that ends at unix time `now`; the first call starts the clock."""
        if self._last_end is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._last_end)
        self._last_end = now

    def current(self, now: float) -> StopRequest | None:
        """Return the request received so far, or one for `run.stop_before` if that time has come at unix time `now`."""
        if self._received is not None or self._before is None or now < self._before.timestamp():
            return self._received
        return StopRequest(f"run.stop_before = {self._before.isoformat(timespec='minutes')}", again=False)

    def before_step(self, now: float) -> StopRequest | None:
        """Like `current`, between two steps: also stops if another step as long as the longest would end too late."""
        return self.current(now + self._longest_step_s)
