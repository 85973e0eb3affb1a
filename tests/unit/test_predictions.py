"""What is predicted about shipped configurations and about whole steps is what their files say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import scale_on_paper as scale
from docs.gen.predictions import memory_page, predicted, scaling_page, with_memory
from spmdrl.config import ModelConfig
from spmdrl.preflight.forecast import Model
from spmdrl.tools import fit
from spmdrl.tools.model_source import published_config
from spmdrl.types import UserError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.toml") if not path.stem.startswith("demo"))
SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")

# Parameters in billions, from the makers' model cards.
BILLIONS = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Qwen3-VL-4B-Instruct": 4.4,
    "Llama-3.1-8B": 8.0,
    "gemma-4-31B-it": 31.3,
}


@pytest.fixture(autouse=True)
def _with_the_torch_of_gpu_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of constraints/cuda.txt, whatever is installed here."""
    monkeypatch.setattr("spmdrl.preflight.forecast.varlen_takes_groups", lambda: True)


@pytest.mark.parametrize("name", BILLIONS)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    model = Model.read(published_config(name), ModelConfig(path=name))
    billions = sum(map(math.prod, model.shapes.values())) / 1e9
    assert round(billions, 1) == BILLIONS[name]


def test_another_model_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match='the shape of "Qwen9" is not known; name one of Qwen3-0'):
        published_config("Qwen9")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_says_what_it_needs_and_leaves_a_tenth_of_its_machine_free(path: Path) -> None:
    text, prediction = path.read_text(encoding="utf-8"), predicted(path)
    assert prediction is not None
    stale = text.replace("GiB: rollout", "GiB: another")
    assert stale != with_memory(stale, prediction) == text, "run `make docs`"
    assert not prediction.problems
    assert max(phase.device_bytes for phase in prediction.phases) < 0.9 * prediction.rank.device_bytes


def test_the_planner_shows_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / "qwen3-4b-math-1node.toml"
    assert fit.main([str(path), "--ranks", "8", "--gpu-gib", "79", "--shape", "Qwen3-4B"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("predicted for"))
    assert f"# memory    {line}\n" in path.read_text(encoding="utf-8")
    assert "4.02 billion parameters" in shown and "are not its share: engine workspace" in shown


def test_what_is_beside_tensors_can_be_read_by_programs(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / "qwen3-0.6b-math-1gpu.toml"
    assert fit.main([str(path), "--ranks", "1", "--gpu-gib", "79", "--shape", "Qwen3-0.6B", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    gpu = {row["phase"]: row["gpu"] for row in answer["phases"]}
    sampling, training = (answer["beside_tensors"][f"while_{side}"] for side in ("sampling", "training"))
    assert sampling.items() <= gpu["rollout"].items() and training.items() <= gpu["forward-backward"].items()
    assert sampling.keys() - training.keys() == {"engine workspace"}
    assert {"context", "engine context", "engine graphs"} <= training.keys()


def test_a_row_of_whole_steps_is_that_of_the_page() -> None:
    (row,) = scale.steps_table(["Qwen3-8B"], [8], scale.WORK).splitlines()[2:]
    assert row in SCALING, "run `make docs`"
    assert scale.rates_table(scale.H200) in SCALING, "run `make docs`"
    assert scale.steps_table(["Qwen3-235B-A22B"], [8], scale.WORK).endswith("| Qwen3-235B-A22B | 8 | does not fit |")


@pytest.mark.slow
def test_every_row_of_whole_steps_is_that_of_the_page() -> None:
    assert scaling_page(SCALING) == SCALING, "run `make docs`"


def test_the_example_of_the_planner_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert memory_page(page) == page, "run `make docs`"
    assert memory_page(page.replace("| forward-backward |", "| backward |")) == page


def test_the_shortest_step_fits_and_its_numbers_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--models", "Qwen3-30B-A3B", "--gpus", "8", "--rollouts", "512", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fullest_bytes"] < 0.9 * scale.DEVICE_GIB * 2**30
    phases = ("rollout", "logprobs", "update", "refit", "handover")
    assert row["step_s"] == pytest.approx(sum(row["time"][phase] for phase in phases))
    assert row["tokens_per_gpu_s"] == pytest.approx(512 * 4096 / 8 / row["step_s"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "12"], "--gpus are multiples of 8"),
        (["--gpus", "8000000000"], "--gpus are multiples of 8"),
        (["--rollouts", "100"], "--rollouts is a multiple of 8192"),
        (["--mean-tokens", "20000"], "--mean-tokens lies between 0 and --longest-tokens"),
    ],
)
def test_work_that_cannot_be_divided_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(arguments)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
