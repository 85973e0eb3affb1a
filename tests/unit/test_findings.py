"""tools.doctor RUN: each rule sees a run that has its fault, and no rule sees one in a run that has none."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.gen.config_reference import settings
from spmdrl.config import Config
from spmdrl.faults.lock import owned
from spmdrl.report.findings import MIN_STEPS, RULES, Rule, findings
from spmdrl.report.series import History
from spmdrl.tools import doctor
from tests.helpers.pages import is_broken

ROOT = Path(__file__).parents[2]
NUM_STEPS = 100
RECORDED = sorted((ROOT / "tests/data/recorded").iterdir())

Values = Callable[[int], float | None]
"""The value of a scalar at a step."""


def wobble(step: int) -> float:
    """Scatter between -1 and 1 that is the same in every test."""
    return random.Random(step).uniform(-1.0, 1.0)


HEALTHY: dict[str, Values] = {
    "reward/mean": lambda step: 0.2 + 0.005 * step + 0.02 * wobble(step),
    "reward/equal_groups_fraction": lambda step: 0.2 + 0.003 * step,
    "reward/failed_count": lambda step: 0.0,
    "episode/failed_count": lambda step: 0.0,
    "rollout/response_tokens": lambda step: 100 + 0.3 * step + 5 * wobble(step),
    "rollout/truncated_fraction": lambda step: 0.05 + 0.02 * wobble(step),
    "update/loss": lambda step: 0.01 * wobble(step),
    "update/entropy_nats": lambda step: 1.0 - 0.006 * step,
    "update/k3_ref_nats": lambda step: 0.0005 * step,
    "update/clip_fraction": lambda step: 0.02,
    "update/grad_norm": lambda step: 0.5 + 0.3 * wobble(step),
    "mismatch/mean_abs_nats": lambda step: 0.01 + 0.001 * wobble(step),
    "mismatch/effective_fraction": lambda step: 0.99,
    "critic/explained_variance": lambda step: 0.01 * step - 0.1,
    "batch/idle_fraction": lambda step: 0.04 + 0.03 * wobble(step),
    "time/rollout_s": lambda step: 30.0 + 3 * wobble(step),
    "time/update_s": lambda step: 10.0,
    "time/step_s": lambda step: 45.0,
}

FAULTY: dict[str, dict[str, Values]] = {
    "numbers that are not finite": {"update/loss": lambda step: None if step == 40 else 0.0},
    "steps trained on nothing": {
        "batch/loss_tokens": lambda step: 0.0 if step == 40 else 1000.0,
        "update/entropy_nats": lambda step: None if step == 40 else 1.0 - 0.006 * step,
    },
    "the reward never moves": {"reward/mean": lambda step: 0.0},
    "rewards failed": {"reward/failed_count": lambda step: float(step == 17)},
    "environments failed": {"episode/failed_count": lambda step: float(step > 90)},
    "the reward fell back": {"reward/mean": lambda step: 0.2 + 0.01 * min(step, 100 - step) + 0.02 * wobble(step)},
    "most groups agree": {"reward/equal_groups_fraction": lambda step: 0.5 + 0.0045 * step},
    "entropy collapsed": {
        "update/entropy_nats": lambda step: math.exp(-0.05 * step),
        "reward/mean": lambda step: min(0.5, 0.2 + 0.02 * step) + 0.02 * wobble(step),
    },
    "responses grow and the reward does not": {
        "rollout/response_tokens": lambda step: 100 + 3 * step,
        "reward/mean": lambda step: 0.5 + 0.02 * wobble(step),
    },
    "late responses are thrown away": {"rollout/sampled_tokens": lambda step: 120 + 0.3 * step},
    "many responses are cut": {"rollout/truncated_fraction": lambda step: 0.004 * step},
    "engine and trainer drift apart": {"mismatch/mean_abs_nats": lambda step: 0.01 + 0.001 * step},
    "engine and trainer disagree": {"mismatch/effective_fraction": lambda step: 1.0 - 0.007 * step},
    "the policy has left the reference": {"update/k3_ref_nats": lambda step: 0.01 * step},
    "many ratios are clipped": {"update/clip_fraction": lambda step: 0.003 * step},
    "the gradient spikes": {"update/grad_norm": lambda step: 20.0 if step == 60 else 0.5},
    "the critic explains nothing": {"critic/explained_variance": lambda step: -0.5},
    "ranks wait for each other": {"batch/idle_fraction": lambda step: 0.4},
    "a phase has become slow": {"time/update_s": lambda step: 10.0 + 0.3 * step},
    "no answer counts as right": {
        "eval/accuracy": lambda step: 0.0,
        "eval/reward": lambda step: 0.4,
    },
}


def rows(series: dict[str, Values], num_steps: int = NUM_STEPS) -> list[dict[str, float | None]]:
    return [{"step": step} | {name: value(step) for name, value in series.items()} for step in range(1, num_steps + 1)]


def names(series: dict[str, Values], num_steps: int = NUM_STEPS) -> list[str]:
    return [one.rule.name for one in findings(History(rows(series, num_steps)))]


@pytest.mark.parametrize("num_steps", [0, 1, 4, 5, 19, 20, 21, 40, NUM_STEPS])
def test_a_healthy_run_has_no_finding_at_any_length(num_steps: int) -> None:
    assert names(HEALTHY, num_steps) == []


def test_a_step_without_rollouts_of_a_data_source_is_no_fault() -> None:
    of_sources: dict[str, Values] = {
        "loss/mean_style": lambda step: None if step % 3 == 0 else 0.1,
        "update/entropy_nats_style": lambda step: None if step % 3 == 0 else 1.0,
        "loss/mean_others": lambda step: None,  # all sources have an algorithm of their own
        "update/entropy_nats_others": lambda step: None,
    }
    assert names(HEALTHY | of_sources) == []
    assert names(HEALTHY | of_sources | FAULTY["numbers that are not finite"]) == ["numbers that are not finite"]


def test_every_rule_is_tried() -> None:
    assert sorted(FAULTY) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize("name", FAULTY)
def test_a_rule_sees_its_fault_and_no_other_does(name: str) -> None:
    assert names(HEALTHY | FAULTY[name]) == [name]


@pytest.mark.parametrize(
    ("name", "excuse"),
    [
        ("entropy collapsed", {"reward/mean": HEALTHY["reward/mean"]}),
        ("entropy collapsed", {"eval/accuracy": lambda step: 0.95}),
        ("responses grow and the reward does not", {"reward/mean": HEALTHY["reward/mean"]}),
        ("most groups agree", {"eval/accuracy": lambda step: 0.97}),
        ("engine and trainer drift apart", {"mismatch/mean_abs_nats": lambda step: 1e-7 * step}),
        ("a phase has become slow", {"rollout/response_tokens": lambda step: 100 + step * 1.5}),
    ],
)
def test_what_success_explains_is_no_fault(name: str, excuse: dict[str, Values]) -> None:
    assert names(HEALTHY | FAULTY[name] | excuse) == []


def test_a_finding_names_numbers_and_steps() -> None:
    seen = {one.rule.name: one.seen for fault in FAULTY.values() for one in findings(History(rows(HEALTHY | fault)))}
    assert seen["the gradient spikes"] == "update/grad_norm was 40 times its median before in step 60"
    assert seen["rewards failed"] == "reward/failed_count adds up to 1, in step 17 of 100"
    assert seen["many responses are cut"] == (
        "rollout/truncated_fraction is 0.382 (median of steps 91 to 100), above 0.250"
    )
    assert seen["a phase has become slow"] == (
        "time/update_s was 11.7 at first and is 38.6 (median of steps 91 to 100), of 45.0 s for a step"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_remedies_name_settings_metrics_files_and_pages_that_are_there(rule: Rule) -> None:
    known = {name for name, _ in settings(Config)} | {
        "mismatch.stop",
        "samples.jsonl",
        "worst_tokens.jsonl",
        "spmdrl ps",
    }
    named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", rule.remedy))
    assert named <= known
    assert not is_broken(rule.page, ROOT / "docs/README.md")


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.name)
def test_the_recorded_runs_of_the_demo_are_healthy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(run)]) == 0
    told = capsys.readouterr().out
    assert "nothing looks wrong" in told and "is not judged" not in told


def test_doctor_does_not_call_a_short_run_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = rows(HEALTHY)[: MIN_STEPS - 1]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    assert doctor.main([str(tmp_path)]) == 0
    assert f"that wants {MIN_STEPS} steps, and {MIN_STEPS - 1} were recorded" in capsys.readouterr().out


def test_a_run_without_rewards_is_judged_by_the_rest() -> None:
    taught = {name: of for name, of in HEALTHY.items() if not name.startswith("reward/")}
    fallen = taught | {"update/entropy_nats": lambda step: 3.0 * 0.8**step, "rollout/response_tokens": lambda _: 5.0}
    assert names(taught) == [] and names(fallen) == ["entropy collapsed"]
    short = fallen | {"rollout/sampled_tokens": lambda _: 6.0}
    (seen,) = (one.seen for one in findings(History(rows(short))) if "sampled_tokens" in one.seen)
    assert seen.endswith(")") and "rewards" not in seen


def test_doctor_tells_what_it_saw_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = HEALTHY | FAULTY["rewards failed"] | FAULTY["many ratios are clipped"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(faulty)))
    assert doctor.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "1. rewards failed" in told and "2. many ratios are clipped" in told
    assert "in step 17 of 100" in told and "docs/data.md#rewards" in told


def test_doctor_tells_what_the_metrics_of_a_run_that_has_ended_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(row) + "\n" for row in rows(HEALTHY)]
    (tmp_path / f"checkpoints/step-{NUM_STEPS:08d}").mkdir(parents=True)

    def told(content: str) -> str:
        (tmp_path / "metrics.jsonl").write_text(content)
        code, said = doctor.main([str(tmp_path)]), capsys.readouterr().out
        assert code == int("warning:" in said) and ("nothing looks wrong" in said) is not bool(code)
        return said

    assert "warning" not in told("".join(lines))
    said = told("".join(lines[:50]) + lines[50][:20])
    assert "ends in the middle of a line" in said and f"no row of steps 51-{NUM_STEPS}, although" in said
    assert "no row of steps 4-9, although" in told("".join(lines[:3] + lines[9:]))
    with owned(tmp_path):  # rows are being written: only those between others are missing
        assert "warning" not in told("".join(lines[:50]) + lines[50][:20])
        assert "no row of steps 4-9, although" in told("".join(lines[:3] + lines[9:50]))


def test_a_folder_without_a_run_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
