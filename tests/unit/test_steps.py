"""A run that is asked to stop before its first phase ends as one that is asked to stop in a later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from spmdrl.step import steps as module
from spmdrl.step.steps import Steps


def started(*, asked_to_stop: bool, newest: int | None) -> tuple[Steps[Any], mock.Mock]:
    """Steps of a run at step 0 whose evaluation is due, and everything that they call."""
    calls = mock.MagicMock()
    calls.run.plan.num_steps = 2
    calls.run.resume_point = SimpleNamespace(step=0, metrics=None, is_evaluated=False)
    calls.run.watch.agree_to_stop.return_value = asked_to_stop
    calls.run.watch.agree_to_stop_before_step.return_value = False
    calls.saver.newest, calls.sampler.answers_beside = newest, False
    return Steps(calls.run, calls.policy, calls.saver, calls.handover, calls.sampler), calls


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "merge_over", lambda mesh, metrics: {})
    monkeypatch.setattr(module, "gather_answers", lambda *_, **__: [])
    monkeypatch.setattr(module, "resource_metrics", lambda peaks: {})
    monkeypatch.setattr(module, "eval_metrics", lambda outcomes, success_at: {})


@pytest.mark.parametrize("newest", [None, 0])
def test_a_stop_before_the_first_evaluation_saves_what_is_not_saved_and_requeues(newest: int | None) -> None:
    steps, calls = started(asked_to_stop=True, newest=newest)
    with steps.until_stopped():
        assert list(steps) == [], "never reached"
    assert calls.saver.save.called == (newest is None)
    calls.run.watch.write_requeue.assert_called_once_with(step=0, num_steps=2)
    calls.sampler.dismiss.assert_called_once_with()
    assert not calls.run.report.eval.called


def test_every_step_is_counted_and_the_model_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = {name: mock.Mock() for name in ("export_hf", "export_adapter")}
    for name, export in exports.items():
        monkeypatch.setattr(module, name, export)
    steps, calls = started(asked_to_stop=False, newest=None)
    calls.run.plan.saves_after.return_value = calls.run.plan.exports_after.return_value = False
    seen = []
    with steps.until_stopped():
        for step in steps:
            seen.append(step)
            steps.finish(step, {})
    assert seen == [1, 2]
    assert calls.run.report.eval.call_args.args[0] == 0, "the policy that the run begins with is evaluated first"
    for export in exports.values():
        export.assert_called_once()
    assert not calls.run.watch.write_requeue.called
