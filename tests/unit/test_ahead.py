"""The scheduler of asynchronous rollouts on simulated engines: what it trains on, in which order, and how fast."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ahead

STEPS = {"groups": 32, "steps": 7, "warmup": 3}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GROUP_SIZE", 4), ("MEDIAN_TOKENS", 60.0), ("MAX_TOKENS", 480)):
        monkeypatch.setattr(ahead, name, value)
    monkeypatch.setattr(ahead, "REWARD_S", 0.1)
    monkeypatch.setattr(ahead, "LATE_FRACTION", 0.0)


def simulated(staleness: int, *, apart: bool = False) -> Any:
    return ahead.simulate(32, staleness=staleness, apart=apart, **STEPS)


def test_ahead_nothing_is_lost_or_preferred_and_no_limit_is_passed() -> None:
    in_step = simulated(0)
    for staleness, apart in ((1, False), (2, True)):
        found = simulated(staleness, apart=apart)
        assert len(found.lengths) == 4 * 32 * 4 and not found.lost_lengths
        assert found.staleness == staleness
        assert found.row("", 32, staleness)["length_bias"] == 0.0
        assert sum(found.lengths) / found.seconds > 1.2 * sum(in_step.lengths) / in_step.seconds
    assert in_step.staleness == 0
    assert dataclasses.asdict(simulated(0)) == dataclasses.asdict(in_step)


@pytest.mark.parametrize("apart", [False, True])
def test_an_evaluation_beside_rollouts_loses_nothing_and_takes_no_longer(apart: bool) -> None:
    beside, alone = (
        ahead.simulate(32, staleness=2, apart=apart, in_flight=apart, held_out=8, pauses=pauses, **STEPS)
        for pauses in (False, True)
    )
    assert sorted(beside.lengths) == sorted(alone.lengths) and not beside.lost_lengths
    assert beside.staleness <= 2 and beside.seconds <= (1.0 if apart else 0.95) * alone.seconds


def test_discarding_trains_on_shorter_responses_than_were_sampled() -> None:
    found = ahead.discard(32, groups=32, staleness=1, steps=20, warmup=5)
    row = found.row("", 32, 1)
    assert row["thrown_away_fraction"] > 0.05 and row["length_bias"] < -0.02
