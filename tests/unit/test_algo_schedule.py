"""The learning rate equals its slow twin at every step, rises and falls where it should, and never ends at nothing."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

from spmdrl.algo.schedules import lr_fraction
from spmdrl.learn.update import update
from tests.helpers import oracle

SCHEDULES = ["constant", "linear", "cosine", "wsd"]


def test_updates_are_numbered_through_the_steps_whether_taken_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[tuple[int, bool]] = []

    def taken(*_: object, number: int, is_first: bool, **__: object) -> mock.Mock:
        numbers.append((number, is_first))
        return mock.Mock(beyond_kl_limit=False, metrics={})

    monkeypatch.setattr("spmdrl.learn.update._optimizer_step", taken)
    monkeypatch.setattr("spmdrl.learn.update.follow", lambda *_, **__: None)
    learner = mock.Mock(frozen_steps=0, guards=None)
    for step, mini_batches in enumerate(([1, 1, 1], [[], 1, 1], [1, [], []]), start=1):
        update(learner, mini_batches, mock.Mock(), step=step)
    assert numbers == [(1, True), (2, False), (3, False), (5, True), (6, False), (7, True)]


def fractions(**settings: object) -> list[float]:
    return [lr_fraction(step, **settings) for step in range(1, settings["num_steps"] + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_to_the_oracle(schedule: str) -> None:
    for num_steps, warmup, decay, floor in itertools.product(
        [1, 2, 7, 40], [0, 1, 2, 5, 40], [0, 1, 3, 12, 60], [0.0, 0.1]
    ):
        if warmup > num_steps:
            continue
        settings = {"num_steps": num_steps, "warmup_steps": warmup, "decay_steps": decay, "min_lr_fraction": floor}
        slow = oracle.lr_fractions(schedule=schedule, **settings)
        assert fractions(schedule=schedule, **settings) == pytest.approx(slow, abs=1e-12), settings


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rises_to_one_then_falls_to_the_floor_and_every_step_learns(schedule: str) -> None:
    settings = {"num_steps": 30, "warmup_steps": 4, "decay_steps": 10}
    for floor in (0.0, 0.25):
        curve = fractions(schedule=schedule, min_lr_fraction=floor, **settings)
        assert curve[:4] == [0.25, 0.5, 0.75, 1.0]
        assert all(a >= b for a, b in itertools.pairwise(curve[3:]))
        assert all(fraction > floor for fraction in curve[3:])
        beyond = lr_fraction(31, schedule=schedule, min_lr_fraction=floor, **settings)
        assert beyond == pytest.approx(1.0 if schedule == "constant" else floor)


def test_worked_examples() -> None:
    short = {"warmup_steps": 0, "decay_steps": 2, "min_lr_fraction": 0.0}
    assert fractions(schedule="linear", num_steps=4, **short) == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])
    assert fractions(schedule="cosine", num_steps=3, **short) == pytest.approx([1, 3 / 4, 1 / 4])
    assert fractions(schedule="wsd", num_steps=5, **short) == pytest.approx([1, 1, 1, 2 / 3, 1 / 3])
    assert fractions(schedule="constant", num_steps=3, **short) == [1, 1, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_longer_than_the_run(schedule: str) -> None:
    settings = {"num_steps": 3, "warmup_steps": 10, "decay_steps": 2, "min_lr_fraction": 0.5}
    assert fractions(schedule=schedule, **settings) == pytest.approx([0.1, 0.2, 0.3])


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="sawtooth"):
        fractions(schedule="sawtooth", num_steps=1, warmup_steps=0, decay_steps=0, min_lr_fraction=0.0)
