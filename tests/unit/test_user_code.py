"""Code of the user's is found by module or by file, once, and what is wrong with it is said in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import OptimConfig
from spmdrl.learn.optim import optimizer_problems
from spmdrl.train import main
from spmdrl.user_code import argument_problems, call, load, with_metrics
from tests.helpers.small_run import write_config


def test_a_file_is_imported_once_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 3\n")
    file = tmp_path / "mine.py"
    file.write_text("import neighbour\ndef f(): return neighbour.value\ndef g(): return f\n")
    assert load(f"{file}:f")() == 3
    assert load(f"{file}:g")() is load(f"{file}:f")


def test_files_of_the_same_name_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"def f(): return {number}\n")
    assert [load(f"{tmp_path}/{number}/mine.py:f")() for number in (1, 2)] == [1, 2]


def test_a_module_is_imported_by_its_name() -> None:
    assert load("pathlib:Path") is Path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "it must look like package.module:function or path/to/file.py:function"),
        (":f", "it must look like"),
        ("pathlib:", "it must look like"),
        ("absent.py:f", "there is no file absent.py"),
        ("absent.module:f", "there is no module absent"),
        ("pathlib:Pathh", "pathlib has no function or class Pathh; did you mean Path?"),
        ("sys:maxsize", "maxsize of sys is neither a function nor a class, but int"),
    ],
)
def test_what_cannot_be_found_is_said(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("?", r"\?")):
        load(name)


def test_a_file_that_fails_says_where_and_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import sys\nsys.exit('enough')\n")
    with pytest.raises(ValueError, match=r"mine\.py cannot be imported: .*mine\.py:2: SystemExit: enough"):
        load(f"{file}:f")
    file.write_text("def f(): return 1\n")
    assert load(f"{file}:f")() == 1


def by_name(a, b=2, *, c):
    return a, b, c


def anything(**columns):
    return columns


def by_position(a, /):
    return a


def test_a_call_passes_what_parameters_name() -> None:
    assert call(by_name, {"a": 1, "other": 9}, {"c": 3}) == (1, 2, 3)
    assert call(anything, {"a": 1, "other": 9}, {"c": 3}) == {"a": 1, "other": 9, "c": 3}


@pytest.mark.parametrize(
    ("function", "settings", "problems"),
    [
        (by_name, {"c": 3}, []),
        (anything, {"c": 3}, []),
        (by_name, {}, ["by_name asks for c, which is neither a column nor in params; columns are a, x"]),
        (by_name, {"c": 3, "d": 4}, ["params has d, but by_name takes no such argument"]),
        (anything, {"x": 3}, ["params has x, which is the name of a column; use another name"]),
        (by_position, {}, ["by_position takes a by position only, but it is called by keyword"]),
    ],
)
def test_what_a_call_could_not_pass_is_said(function: Any, settings: dict[str, Any], problems: list[str]) -> None:
    assert list(argument_problems(function, ["a", "x"], settings)) == problems


def test_a_pair_of_value_and_metrics_is_split() -> None:
    assert with_metrics((1, {"m": 2})) == (1, {"m": 2})
    assert with_metrics(1) == (1, {})
    assert with_metrics((1, 2)) == ((1, 2), {})


def test_it_imports_nothing_beyond_python() -> None:
    program = (
        "import sys; before = set(sys.modules); import spmdrl.user_code; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {'spmdrl'})"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("adamww", 'is not known; use "adamw", "sgd", "package.module:Class" or "path/file.py:Class"'),
        ("torch.optim:Adamm", "torch.optim has no function or class Adamm; did you mean Adam?"),
        ("torch.nn:Linear", "is not a torch.optim.Optimizer"),
        ("torch.optim:LBFGS", "does not work with these settings"),
    ],
)
def test_what_is_no_optimizer_is_refused(name: str, sentence: str) -> None:
    (problem,) = optimizer_problems(OptimConfig(name=name, lr=0.1))
    assert problem.startswith(f'optim.name = "{name}"') and sentence in problem


def test_an_optimizer_can_be_a_class_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    assert not list(optimizer_problems(OptimConfig(name=f"{tmp_path}/mine.py:Mine", lr=0.1)))


def test_files_of_two_folders_import_their_own_neighbours(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour.py").write_text(f"name = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text("import neighbour\ndef f():\n    return neighbour.name\n")
    functions = [load(f"{tmp_path}/{folder}/mine.py:f") for folder in ("one", "other")]
    assert [function() for function in functions] == ["one", "other"]


def test_sys_exit_in_a_function_does_not_look_like_success() -> None:
    def leaving(advantages: float) -> None:
        raise SystemExit(0)

    with pytest.raises(RuntimeError, match=r"leaving called sys\.exit\(0\)"):
        call(leaving, {"advantages": 1.0}, {})


def test_a_syntax_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"cannot be imported: .*wrong\.py:1: SyntaxError: [^\n]*$"):
        load(f"{tmp_path}/wrong.py:f")


def test_code_that_is_not_there_is_told_beside_a_model_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        tmp_path,
        model={"path": "no/model"},
        rollout={"engine": "no.py:Engine"},
        reward={"terms": [{"kind": "function", "function": "nowhere.py:reward"}]},
        loss={"kind": "absent.py:loss"},
    )
    assert main([str(config), "--dry-run"]) == 2
    said = capsys.readouterr().err
    for missing in (
        'model.path = "no/model" does not exist',
        "no file no.py",
        "no file nowhere.py",
        "no file absent.py",
    ):
        assert said.count(missing) == 1, said
