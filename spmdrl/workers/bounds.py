"""Numbers from outside: rewards and metrics that a verifier, an environment or an agent gave."""

from __future__ import annotations

import math
from typing import SupportsFloat

# Sums of the squares of 10^14 such numbers are finite in float32, in which advantages and losses are computed.
MAX_SIZE = 1e12


def bounded(what: str, value: SupportsFloat) -> float:
    """Return a number as a float. Raises ValueError, naming `what` it is, if it is not finite or beyond `MAX_SIZE`."""
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        number = math.inf
    if not abs(number) <= MAX_SIZE:
        limit = f", which is beyond +-{MAX_SIZE:g}" if math.isfinite(number) else ""
        raise ValueError(f"{what} is {number:g}{limit}")
    return number
