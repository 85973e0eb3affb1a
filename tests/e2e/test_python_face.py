"""A run from Python is the run of the command line, and so is a loop of one's own that makes the same calls."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from spmdrl import Callback, StopRequested, Trainer, UserError, load_config
from spmdrl.report import Report
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import assert_same_weights, rows, steady_rows, write_small_run

PAGE = Path(__file__).parents[2] / "docs/python.md"
ONE_UPDATE = ("loss.updates_per_step=1", "debug.assert_on_policy=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("face")
    write_small_run(path, model={"num_layers": 1}, run={"num_steps": 3}, report={"tensorboard": False})
    return path


class Log(Callback):
    def __init__(self, stops_at: tuple[str, int]) -> None:
        self.seen: list[tuple[str, int]] = []
        self._stops_at = stops_at

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert "reward/mean" in metrics
        self._see("step", step)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        assert "eval/accuracy" in metrics
        self._see("evaluation", step)

    def on_save(self, step: int, folder: Path) -> None:
        assert folder.name == f"step-{step:08d}"
        self._see("save", step)

    def _see(self, what: str, step: int) -> None:
        self.seen.append((what, step))
        if self._stops_at == (what, step):
            raise StopRequested


def _trained(config: str, *overrides: str, stops_at: tuple[str, int] = ("", 0)) -> list[tuple[str, int]]:
    log = Log(stops_at)
    with mock.patch.object(Report, "_write_curves", lambda *_: "no curves"):
        Trainer(load_config(config, *overrides), callbacks=[log]).train()
    return log.seen


def _looped(config: str, *overrides: str) -> list[dict[str, float]]:
    found = []
    with (
        mock.patch.object(Report, "_write_curves", lambda *_: "no curves"),
        Trainer(load_config(config, *overrides)).loop() as loop,
    ):
        for _ in loop:
            loop.forward_backward(loop.sample())
            found.append(loop.optim_step())
    return found


def test_the_calls_with_their_defaults_are_the_runs_own_loop(folder: Path) -> None:
    config = str(folder / "c.toml")
    follower = 'models={reference={weights="average",decay=0.5}}'  # which a loop has to have follow as well
    seen, again = run_ranks(2, _trained, config, "run.name=whole", *ONE_UPDATE, follower)
    assert seen == again
    steps = ["evaluation 0", "step 1", "evaluation 2", "save 2", "step 2", "evaluation 3", "save 3", "step 3"]
    assert [f"{what} {step}" for what, step in seen] == steps
    found, others = run_ranks(2, _looped, config, "run.name=looped", *ONE_UPDATE, follower)
    assert found == others
    assert_same_weights(folder / "runs/whole", folder / "runs/looped")
    for one, other in zip(steady_rows(folder / "runs/whole"), steady_rows(folder / "runs/looped"), strict=True):
        differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
        assert not {name for name in differ if not name.startswith("refit/")}
    assert [one["update/grad_norm"] for one in found] == [
        row["update/grad_norm"] for row in rows(folder / "runs/looped")[1:]
    ]


def _listed(script: str, *arguments: str) -> None:
    with (
        mock.patch.object(Report, "_write_curves", lambda *_: "no curves"),
        mock.patch.object(sys, "argv", [script, *arguments]),
    ):
        runpy.run_path(script)


@pytest.mark.slow
def test_grpo_on_the_page_learns_and_is_the_settings_grpo(folder: Path) -> None:
    (script,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "# grpo.py" in block]
    assert len(script.splitlines()) <= 40
    (folder / "grpo.py").write_text(script)
    settings = ["run.name=listed", *ONE_UPDATE, "loss.kl_coef=0.0", "loss.clip_high=0.2"]
    run_ranks(2, _listed, str(folder / "grpo.py"), str(folder / "c.toml"), *settings)
    listed = rows(folder / "runs/listed")
    assert [row["step"] for row in listed] == [0, 1, 2, 3]
    # One optimizer step on each set of rollouts is what the settings say.
    (folder / "once.py").write_text(script.replace("range(2)", "range(1)"))
    run_ranks(2, _listed, str(folder / "once.py"), str(folder / "c.toml"), *settings, "run.name=once")
    run_ranks(2, _trained, str(folder / "c.toml"), *settings, "run.name=settings")
    for one, other in zip(rows(folder / "runs/once")[1:], rows(folder / "runs/settings")[1:], strict=True):
        for name in ("reward/mean", "update/grad_norm", "update/loss", "rollout/response_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name


def _half(config: str, *overrides: str) -> list[Any]:
    """A loop that saves, is left by `break`, and gives some rollouts alone."""
    with Trainer(load_config(config, *overrides)).loop() as loop:
        for step in loop:
            rollouts = loop.sample()
            loop.forward_backward(rollouts[:3], [1.0] * len(rollouts[:3]))
            loop.forward_backward(rollouts[3:5], [-1.0] * len(rollouts[3:5]))
            loop.optim_step()
            loop.save()
            if step == 2:
                break
    return [step]


@pytest.mark.slow
def test_a_script_saves_stops_and_goes_on(folder: Path) -> None:
    config = str(folder / "c.toml")
    settings = ["run.name=half", *ONE_UPDATE, "checkpoint.every=0"]
    run_ranks(2, _half, config, *settings)
    assert [row["step"] for row in rows(folder / "runs/half")] == [0, 1, 2]
    assert (folder / "runs/half/checkpoints/step-00000002/manifest.json").is_file()
    assert run_ranks(1, _looped, config, *settings)[0]
    assert [row["step"] for row in rows(folder / "runs/half")] == [0, 1, 2, 3]
    for stops_at, last in ((("step", 1), ("save", 1)), (("evaluation", 2), ("step", 2))):
        seen = run_ranks(2, partial(_trained, stops_at=stops_at), config, "run.name=asked", *ONE_UPDATE)[0]
        assert seen[-1] == last
    run_ranks(2, _trained, config, "run.name=asked", *ONE_UPDATE)
    run_ranks(2, _trained, config, "run.name=whole2", *ONE_UPDATE)
    assert_same_weights(folder / "runs/whole2", folder / "runs/asked")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.placement=disaggregated", "a script has one for all"),
        ("advantage.estimator=gae", "a critic, which a loop of one's own has not"),
        ("debug.save_rollouts=all", "not those of a script"),
        ("correction.router_replay=R2", "which a loop of one's own decides"),
    ],
)
def test_a_loop_that_cannot_be_is_refused_before_it_starts(folder: Path, override: str, sentence: str) -> None:
    name, value = override.split("=")
    extra = ["rollout.num_ranks=1"] if "disaggregated" in value else []
    cfg = load_config(str(folder / "c.toml"), f'{name}="{value}"', *extra)
    with pytest.raises(UserError, match=sentence), Trainer(cfg).loop():
        pass


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, spmdrl; print(sorted({'torch', 'pydantic', 'transformers', 'spmdrl.trainer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    with pytest.raises(ImportError, match="Trainr"):
        exec("from spmdrl import Trainr")
