"""The wheel, in an environment that has its requirements and no repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import spmdrl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which the wheel is installed; its requirements are those of this environment."""
    folder = tmp_path_factory.mktemp("release")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]  # the wheel from the sdist
    subprocess.run([*build, ROOT], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], env={}, check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A plain path: what is installed there for editing, such as this repository, is not followed.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


def run(installed: Path, folder: Path, *command: str) -> str:
    """Run an installed command in a folder that has nothing of the repository, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [installed / "spmdrl", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_folders_with_the_names_of_other_packages_are_apart(installed: Path) -> None:
    (wheel,) = installed.parents[1].glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if re.search(r"^spmdrl/.*/(triton|torchvision|sgl_kernel|IPython)/", name)]
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "spmdrl_sglang_cpu").rglob("*.py")}
    assert ours and ours <= set(names) and "spmdrl/engine/sglang/startup/sitecustomize.py" in names


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_alone_trains_the_demo_and_a_model_of_ones_own(installed: Path, tmp_path: Path) -> None:
    where = [installed / "python", "-c", "import spmdrl; print(spmdrl.__file__)"]
    file = subprocess.run(where, cwd=tmp_path, env={}, capture_output=True, text=True, check=True).stdout
    assert Path(file.strip()).is_relative_to(installed.parent)
    assert run(installed, tmp_path, "version") == f"spmdrl {spmdrl.__version__}\n"

    short = ("run.name=demo", "run.num_steps=2", "optim.warmup_steps=1", "eval.num_prompts=20")
    shown = run(installed, tmp_path, "demo", *short)
    assert re.search(r"^step 2/2 ", shown, re.MULTILINE), shown
    assert re.search(r'^\{"eval/accuracy": ', shown, re.MULTILINE), shown

    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(50)))
    model = ("--model", "runs/demo/hf", "--data", "sums.jsonl", "--reward", "exact", "--gpus", "0")
    run(installed, tmp_path, "init", *model, "--name", "mine", "--out", "mine.toml")
    run(installed, tmp_path, "train", "mine.toml", "run.num_steps=1", "rollout.prompts_per_step=4")
    assert (tmp_path / "runs" / "mine" / "hf" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", ["tool", "game"])
def test_the_other_demos_find_their_code_in_the_wheel(task: str, installed: Path, tmp_path: Path) -> None:
    short = ("run.name=demo", "run.num_steps=1", "optim.warmup_steps=0", "eval.num_prompts=8")
    assert "step 1/1 " in run(installed, tmp_path, "demo", "--task", task, *short)
