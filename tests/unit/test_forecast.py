"""The first half of a run's evaluations predicts the last, with an interval that holds as often as it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spmdrl.report.comparison import Curve, forecast
from spmdrl.tools.runs import compare
from spmdrl.types import UserError

STEPS = np.arange(0, 201, 10)
SHARE = (0.0, 1.0)
CURVES = [Curve(0.1, 0.9, 1.5, 40.0), Curve(0.0, 0.6, 2.5, 60.0), Curve(0.3, 0.95, 1.0, 25.0)]


def values(curve: Curve, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    exact = np.array([curve.start, *(curve.at(step) for step in STEPS[1:])])
    return exact + np.random.default_rng(seed).normal(0.0, noise, len(STEPS))


@pytest.mark.parametrize("curve", CURVES)
def test_a_curve_without_noise_is_found(curve: Curve) -> None:
    found = forecast(STEPS, values(curve), bounds=SHARE)
    assert found.predicted == pytest.approx(curve.at(200), abs=0.01)
    assert found.curve.asymptote == pytest.approx(curve.asymptote, abs=0.05)
    assert (found.num_fitted, found.fitted_to, found.last_step) == (11, 100, 200)


def test_the_interval_holds_as_often_as_it_says() -> None:
    found = [forecast(STEPS, values(curve, 0.02, seed), bounds=SHARE) for seed in range(8) for curve in CURVES]
    assert sum(one.holds for one in found) / len(found) >= 0.8
    assert np.median([one.high - one.low for one in found]) < 0.25, "an interval that says nothing"


def test_runs_with_other_asymptotes_are_told_apart_by_half_of_their_budget() -> None:
    low, high = (forecast(STEPS, values(Curve(0.1, top, 2.0, 30.0), 0.01), bounds=SHARE) for top in (0.6, 0.9))
    assert low.high < high.low


def test_a_share_that_falls_is_not_predicted_below_0() -> None:
    collapses = np.array([0.435, 0.5025, 0.545, 0.5975, 0.21, 0.22, 0.235, 0.24, 0.14])  # of benchmarks/mismatch.py
    assert forecast(np.arange(0, 161, 20), collapses).predicted < 0
    found = forecast(np.arange(0, 161, 20), collapses, bounds=SHARE)
    assert 0.0 <= found.low <= found.predicted <= found.high <= 1.0
    assert found.curve.asymptote >= 0.0


def _write_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_compare_says_it_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = zip(STEPS.tolist(), values(CURVES[0]).tolist(), strict=True)
    rows = [
        {"step": s, "eval/accuracy": a, "eval/ci95_low": a - 0.02, "eval/ci95_high": a + 0.02} for s, a in accuracies
    ]
    assert compare(["--fit", str(_write_run(tmp_path / "long", rows))]) == 0
    said = capsys.readouterr().out
    assert "long: eval/accuracy at 21 steps; the first 11, to step 100, are fitted:" in said
    assert "measured 0.834, inside" in said
    assert compare(["--fit", str(_write_run(tmp_path / "short", rows[:6]))]) == 2
    assert "6 evaluations are too few to fit a curve to half of them; 9 are needed" in capsys.readouterr().err
    assert compare(["--fit", str(_write_run(tmp_path / "none", [{"step": 1, "reward/mean": 0.5}]))]) == 2
    assert "none has no evaluations to fit" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"lower eval\.every"):
        forecast(STEPS[:8], values(CURVES[0])[:8])
