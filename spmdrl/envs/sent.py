"""A request that a process is at, and its clock."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from spmdrl.envs.held import Held

_MAX_HOLDS = 1000


@dataclass(slots=True)
class Sent:
    """A request that the process is at."""

    held: Held
    closes: bool  # it frees the environment
    deadline: float  # infinite while the clock stands
    left_s: float  # while the clock stands
    num_holds: int = 0

    @property
    def waits(self) -> bool:
        """True while the clock stands."""
        return math.isinf(self.deadline)

    def hold(self) -> None:
        """Stop the clock: the request waits for a thread. A process that stops it all the time is not heard."""
        self.num_holds += 1
        if not self.waits and self.num_holds <= _MAX_HOLDS:
            self.left_s, self.deadline = self.deadline - time.monotonic(), math.inf

    def go_on(self) -> None:
        """Let the clock run again."""
        if self.waits:
            self.deadline = time.monotonic() + self.left_s
