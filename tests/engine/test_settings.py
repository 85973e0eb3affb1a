"""Settings of SGLang that cannot work: every problem in one answer, exit code 2, before anything is started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdrl.config import Config, read_config
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang import surroundings
from spmdrl.engine.start import engine_problems
from spmdrl.model.load import load_model_config
from spmdrl.train import main
from spmdrl.types import UserError
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.fake_packages import RUNTIME, make_package, make_runtime, make_saver
from tests.helpers.small_run import write_small_run

WRONG = (
    "rollout.tp_size=3",
    "rollout.sglang.max_prefil_tokens=5",
    "rollout.sglang.mem_fraction_static=0.5",
    "rollout.sglang.load_format=auto",
    "rollout.sglang.chunked_prefill_size=64",
    "rollout.sglang.page_size=many",
    "rollout.sglang.schedule_policy=nonsense",
    "rollout.attention_backend=fa33",
    "rollout.max_kv_tokens=20",
    "rollout.stop_token_ids=[5]",
)
GOOD = ("run.deterministic=false", "rollout.tp_size=2", "rollout.sglang.max_prefill_tokens=4096")
Answer = tuple[int, str]  # the exit code, and what is said of an error


def _asked(folder: Path, cases: dict[str, tuple[str, ...]]) -> tuple[dict[str, Answer], dict[str, list[str]]]:
    """All in one process, because importing SGLang takes longer than all of them."""
    return _dry_runs(folder, cases), {name: _on_a_device(folder, name) for name in ("other-torch", "no-runtime")}


def _on_a_device(folder: Path, packages: str) -> list[str]:
    """Return the problems of good settings on a machine with a CUDA device and the packages in a folder."""
    sys.path.insert(0, str(folder / packages))
    sys.modules.pop("sgl_kernel", None)
    torch.cuda.get_device_capability = lambda: (9, 0)  # of this process alone
    cfg = read_config(Config, str(folder / "c.toml"), ["rollout.engine=sglang", "run.deterministic=false"])
    model = load_model_config(cfg.model)
    return list(engine_problems(cfg, model, None, num_ranks=1, device_type="cuda"))


def _dry_runs(folder: Path, cases: dict[str, tuple[str, ...]]) -> dict[str, Answer]:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[variable]  # nobody starts a dry run by torchrun
    answers = {}
    for name, overrides in cases.items():
        argv = [str(folder / "c.toml"), "--dry-run", "--ranks", "2", "rollout.engine=sglang", *overrides]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            answers[name] = main(argv), said.getvalue()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings")
    write_small_run(path, model={"hidden_size": 128, "num_layers": 1})
    config = json.loads((path / "model/config.json").read_text())
    for name, architectures in (("unheard-of", ["UnheardOfForCausalLM"]), ("unnamed", None)):
        shutil.copytree(path / "model", path / name)
        (path / name / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
    return path


@pytest.fixture(scope="module")
def asked(folder: Path) -> tuple[dict[str, Answer], dict[str, list[str]]]:
    models = ("unheard-of", "unnamed")
    cases = {name: ("run.deterministic=false", f"model.path={folder / name}") for name in models}
    code = "raise ImportError('common_ops.abi3.so: undefined symbol: headeronly_Tag')"
    for packages, kernels in (("other-torch", code), ("no-runtime", "")):
        (folder / packages).mkdir()
        make_package(folder / packages, "sglang-kernel", version="0.4.10", module="sgl_kernel", code=kernels)
    make_saver(folder / "no-runtime", make_runtime(folder / "nowhere"))
    return run_engine_ranks(1, _asked, folder, cases | {"wrong": WRONG, "good": GOOD})[0]


@pytest.fixture
def answers(asked: tuple[dict[str, Answer], dict[str, list[str]]]) -> dict[str, Answer]:
    return asked[0]


@pytest.fixture
def device_answers(asked: tuple[dict[str, Answer], dict[str, list[str]]]) -> dict[str, list[str]]:
    return asked[1]


def test_all_of_it_is_told_at_once(folder: Path, answers: dict[str, Answer]) -> None:
    code, said = answers["wrong"]
    assert code == 2 and "Traceback" not in said
    for sentence in (
        "rollout.tp_size = 3 does not divide the 2 ranks; set it to 1 or 2",
        "rollout.tp_size = 3 does not divide the model's 4 attention heads; set it to 1, 2 or 4",
        "rollout.sglang.max_prefil_tokens: SGLang 0.5.23 has no such argument; did you mean max_prefill_tokens?",
        "rollout.sglang.mem_fraction_static follows from rollout.memory_fraction; set that instead",
        "rollout.sglang.load_format is not for the user to choose",
        "rollout.sglang.chunked_prefill_size follows from rollout.chunked_prefill_tokens; set that instead",
        'rollout.attention_backend = "fa33": expected one of ',
        "rollout.max_kv_tokens = 20 cannot hold one prompt and its response of together 30 tokens; set it to 38",
        "rollout.sglang.page_size = 'many': expected `int | null`, got `str`",
        "rollout.sglang.schedule_policy = 'nonsense': expected one of lpm",
        "responses end at [5], but SGLang always stops at [1] as well",
        "run.deterministic = true cannot be kept",
    ):
        assert sentence in said, said
    assert not (folder / "runs").exists()


def test_settings_that_work_pass(answers: dict[str, Answer]) -> None:
    code, said = answers["good"]
    assert code == 0, said


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("unheard-of", "has the architecture UnheardOfForCausalLM, which SGLang 0.5.23 does not know"),
        ("unnamed", "its config.json names no architecture, and SGLang finds its model by that"),
    ],
)
def test_a_model_that_sglang_does_not_know(answers: dict[str, Answer], model: str, sentence: str) -> None:
    code, said = answers[model]
    assert code == 2 and "Traceback" not in said
    assert sentence in said


def test_kernels_that_the_installed_torch_cannot_load(device_answers: dict[str, list[str]]) -> None:
    (sentence,) = device_answers["other-torch"]
    assert sentence.startswith('rollout.engine = "sglang": sglang-kernel 0.4.10 cannot be loaded with torch ')
    assert "undefined symbol: headeronly_Tag" in sentence and "make setup-sglang" in sentence


def test_a_cuda_runtime_that_the_loader_does_not_find(device_answers: dict[str, list[str]]) -> None:
    attention, sentence = device_answers["no-runtime"]
    assert 'SGLang\'s own choice for this device is "fa3"' in attention
    assert sentence.startswith('rollout.engine = "sglang": its processes load the library of torch_memory_saver first')
    assert f"{RUNTIME}: cannot open shared object file" in sentence and "on LD_LIBRARY_PATH" in sentence


def test_sglang_that_is_missing_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_process.check_installed()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.17")
    with pytest.raises(UserError, match=r"works with SGLang 0.5.23, but 0.5.17 is installed; run: make setup-sglang"):
        sglang_process.check_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed; run: make setup-sglang"):
        sglang_process.check_installed()


def test_processes_of_an_earlier_run_are_named() -> None:
    surroundings.check_orphans()
    program = "import time; time.sleep(60)"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = subprocess.Popen([sys.executable, "-c", program], env={surroundings.OWNER_VARIABLE: str(gone.pid)})
    owned = subprocess.Popen([sys.executable, "-c", program], env={surroundings.OWNER_VARIABLE: str(orphan.pid)})
    try:
        with pytest.raises(UserError, match=rf"still there: {orphan.pid} \(.*\); end them: kill -9 {orphan.pid}$"):
            surroundings.check_orphans()
    finally:
        for process in (orphan, owned):
            process.kill()
            process.wait()
