"""Channels between ranks that train and ranks that hold engines, disaggregated, and the orders of a refit.

orders    first rank that trains -> every rank that holds an engine: a refit begins, and the digests it must produce;
          or adapters, which come with their order
buckets   the same way, by broadcast
replies   first rank that holds an engine -> first rank that trains
rollouts  every rank that leads an engine -> every rank that trains: its part of a step, of an evaluation, and
          its answers to the probe, after a refit
"""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.refit.bucket import Bucket
from spmdrl.refit.sink import AdapterVersion

ORDERS, REPLIES, ROLLOUTS, PROBES, HELD_OUT = range(1, 6)
FIRST = 0  # the rank that sends weights and receives replies; the first of all, so it trains
ANNOUNCED = "refits_announced"  # a counter in the shared store


@dataclass(frozen=True, slots=True)
class RefitOrder:
    """Announces the weights of `version`, in these buckets; None: in those of the last order."""

    version: int
    buckets: tuple[Bucket, ...] | None


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Brings the adapters of a version, in host memory. Nobody waits for those who receive them."""

    adapters: AdapterVersion
    digest: str  # of their memory as it was sent


class Dismissed(Exception):
    """The run ends or stops; sent instead of an order, and raised where it is received."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last value on its channel from a rank that leads an engine and was dismissed."""
