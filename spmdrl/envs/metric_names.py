"""The names under which environments report metrics: as many as a run can show, however many there are."""

from __future__ import annotations

import dataclasses
import threading

from spmdrl.conversation import Observation

MAX_NAMES = 200  # of a rank, over the whole launch
DROPPED = "dropped_metrics"


class MetricNames:
    """Keeps the first `MAX_NAMES` names that a rank's environments use.

    Every name is a curve of the run, with its place in each row of metrics.jsonl. A name with a random part, such as an
    episode's, would make them without end. It may be asked from several threads.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def kept(self, observation: Observation) -> Observation:
        """Return an observation with the metrics that have a place, and the number of the others as a metric."""
        with self._lock:
            for name in observation.metrics:
                if len(self._known) < MAX_NAMES:
                    self._known.add(name)
            kept = {name: value for name, value in observation.metrics.items() if name in self._known}
        if num_dropped := len(observation.metrics) - len(kept):
            return dataclasses.replace(observation, metrics={**kept, DROPPED: float(num_dropped)})
        return observation
