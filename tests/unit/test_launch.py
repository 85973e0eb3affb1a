"""The launch scripts, the doctor, and the configurations that come with spmdrl."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import spmdrl
from spmdrl.faults import supervise
from spmdrl.faults.supervise import Commands
from spmdrl.preflight import launch
from spmdrl.tools import command, doctor, local
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main, prepare
from tests.helpers import fake_packages

ROOT = Path(__file__).parents[2]
SCRIPTS = [*(ROOT / "launch").glob("*.sh"), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Stubs:
    """`python`, `torchrun`, `srun` and the like that only write down how they were called, first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls"

    def add(self, name: str, *, exit_code: int = 0, prints: str = "") -> None:
        script = self.folder / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\nprintf "%s" "{prints}"\nexit {exit_code}\n')
        script.chmod(0o755)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "OMP_", "SLURM_"))
        }
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command, cwd=ROOT, env=inherited | {"PATH": path} | environment, capture_output=True, text=True
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def test_local_hands_its_variables_to_the_program_that_starts_ranks(stubs: Stubs) -> None:
    stubs.add("python", exit_code=2)
    assert stubs.run("launch/local.sh", "some.toml", "optim.lr=1", NPROC="4", MODULE="spmdrl.sft").returncode == 2
    assert stubs.run("launch/local.sh", "some.toml").returncode == 2
    assert stubs.calls == [
        "python -m spmdrl.tools.local spmdrl.sft --nproc 4 some.toml optim.lr=1",
        "python -m spmdrl.tools.local spmdrl.train some.toml",
    ]


@pytest.mark.parametrize(("visible", "num_gpus"), [("0,1,2", 3), ("5", 1), ("", 0), ("-1", 0)])
def test_local_counts_the_gpus_that_are_visible(visible: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert supervise.count_gpus() == num_gpus


def test_local_counts_the_gpus_of_the_driver(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.add("nvidia-smi", prints="GPU 0: a\nGPU 1: b\nGPU 2: c\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(stubs.folder))
    assert supervise.count_gpus() == 3


GENERATED = """
data.sources = [{ kind = "reasoning_gym", task = "chain_sum" }, { kind = "jsonl", path = "absent.jsonl" }]
optim.lr = "fast"
"""


@pytest.mark.parametrize(
    ("settings", "overrides", "imported"),
    [
        (GENERATED, ["run.nothing=1", "optim"], ["reasoning_gym", "jsonl"]),
        (GENERATED, ["data.sources=[{ kind = 'reasoning_gym', task = 'letter_counting' }]"], ["reasoning_gym"]),
        ("[data]", [], []),
        ("data = ", [], []),
    ],
)
def test_libraries_of_prompts_are_imported_whatever_else_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, overrides: list[str], imported: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(launch, "import_library", lambda source: found.append(source.kind))
    (tmp_path / "run.toml").write_text(settings)
    prepare([str(tmp_path / "run.toml"), *overrides])
    prepare([str(tmp_path / "absent.toml")])
    assert found == imported


def test_on_gpus_the_ranks_are_torchruns() -> None:
    with local.starter_of("spmdrl.train", ["some.toml"], num_ranks=4, num_gpus=8) as starter:
        assert isinstance(starter, Commands)
    assert starter.command[1:3] == ["-m", "spmdrl.faults.torchrun"]
    assert starter.command[-2:] == ["--nproc-per-node", "4"]
    assert "--standalone --local-addr 127.0.0.1" in " ".join(starter.command)


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_every_command_tells_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_command_that_is_no_command_names_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trian", "some.toml"]) == 2
    assert capsys.readouterr().err == "spmdrl trian: no such command; did you mean spmdrl train?\n"
    assert command.main(["push"]) == 2
    assert capsys.readouterr().err == "spmdrl push: no such command; did you mean spmdrl export --push?\n"
    assert command.main(["version"]) == 0
    assert capsys.readouterr().out == f"spmdrl {spmdrl.__version__}\n"


def test_slurm_hands_its_arguments_to_the_program_that_starts_the_ranks(stubs: Stubs) -> None:
    stubs.add("python", exit_code=75)
    assert stubs.run("bash", "launch/slurm.sbatch", "some.toml", "a.b=1").returncode == 75
    assert stubs.calls == ["python -m spmdrl.faults.slurm some.toml a.b=1"]


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/slurm.sbatch"])
def test_a_script_without_a_configuration_tells_how_it_is_used(stubs: Stubs, script: str) -> None:
    done = stubs.run("bash", script)
    assert done.returncode == 2
    assert f"{script} CONFIG [section.key=value ...]" in done.stderr and "NPROC=4" in done.stderr


def test_doctor_answers_where_nothing_is_installed() -> None:
    # -S: no site-packages; -I: nothing from the environment or the working directory.
    done = subprocess.run([sys.executable, "-I", "-S", ROOT / "launch" / "doctor.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout
    assert "SGLang rollouts: sglang is not installed; run: make setup-sglang" in done.stdout


def test_doctor_answers_here() -> None:
    done = subprocess.run([sys.executable, ROOT / "launch" / "doctor.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gloo                yes" in done.stdout


def test_doctor_names_a_host_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getfqdn", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    line = next(doctor._communication(None))
    assert line.startswith("host name           node7 ") and "does not resolve; torchrun --standalone needs" in line


TORCH = """
import ctypes
from types import SimpleNamespace

__version__ = "2.11.0+cu130"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
distributed = SimpleNamespace(is_available=lambda: False, is_nccl_available=lambda: True)
"""


def test_doctor_tries_to_start_a_process_as_sglang_does(tmp_path: Path) -> None:
    runtime = fake_packages.make_runtime(tmp_path / "nvidia_driver")
    fake_packages.make_saver(tmp_path, runtime)
    fake_packages.make_package(tmp_path, "sglang", version="0.5.23")
    fake_packages.make_package(tmp_path, "sglang-kernel", version="0.4.10", module="sgl_kernel")

    def says(torch: str) -> str:
        (tmp_path / "torch.py").write_text(torch)
        command = [sys.executable, "-S", ROOT / "launch" / "doctor.py"]  # -S: only what PYTHONPATH has
        done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("  SGLang rollouts"))

    sentence = f"no process starts with torch_memory_saver: {sys.executable}: error while loading shared libraries: "
    assert f"{sentence}{fake_packages.RUNTIME}: cannot open shared object file" in says(TORCH)
    assert sentence not in says(f"{TORCH}\nctypes.CDLL({str(runtime)!r})")  # as torch loads its own


QWEN = {
    "qwen3-0.6b-math-1gpu": 1,
    "qwen3-4b-math-1h200": 1,
    "qwen3-4b-math-1node": 8,
    "qwen3-8b-math-1node": 8,
    "qwen3-8b-math-lora-1gpu": 1,
    "qwen3-32b-math-lora-1node": 8,
    "qwen3-4b-math-4node": 32,
    "qwen3-30b-a3b-math-4node": 32,
    "qwen3-vl-4b-geo3k-1node": 8,
}


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks as after the downloads that the Qwen configurations name."""
    folder = tmp_path_factory.mktemp("downloads")
    for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B"):
        save_tiny_model(folder / "models" / name, hidden_size=32, head_dim=4, num_layers=1, max_tokens=40960)
        (folder / "models" / name / "chat_template.jinja").write_text(
            "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
        )
    # The last one has experts.
    experts = folder / "models" / name
    small = AutoConfig.from_pretrained(experts).to_dict()
    shared = ("vocab_size", "hidden_size", "head_dim", "eos_token_id", "num_hidden_layers", "num_attention_heads")
    sizes = {key: small[key] for key in (*shared, "num_key_value_heads", "max_position_embeddings")}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=128, moe_intermediate_size=8)).save_pretrained(experts)
    for name, rows in (("dapo-math-17k", range(40)), ("aime-2024", range(100, 130))):
        file = folder / "datasets" / name / f"{name}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(
            "".join(
                json.dumps({"prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "label": str(i + 1)}) + "\n"
                for i in rows
            )
        )
    save_tiny_model(folder / "models/Qwen3-VL-4B-Instruct", hidden_size=32, num_layers=1, max_tokens=40960, vision=True)
    problems = folder / "datasets/geometry3k/data"
    problems.mkdir(parents=True)
    for name, rows in (("train", range(40)), ("validation", range(100, 400))):
        records = [
            {"images": [{"bytes": png(i), "path": None}], "problem": f"<image>{i}?", "answer": "1"} for i in rows
        ]
        parquet.write_table(pyarrow.Table.from_pylist(records), problems / f"{name}-00000-of-00001.parquet")
    return folder


def png(number: int) -> bytes:
    """A picture of one colour, which differs from others by its number."""
    file = BytesIO()
    Image.new("RGB", (32, 32), (number % 256, number // 256, 0)).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize(("name", "num_ranks"), QWEN.items())
def test_shipped_configuration_passes_its_dry_run(
    name: str, num_ranks: int, downloads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if 'engine = "sglang"' in (ROOT / "configs" / f"{name}.toml").read_text() and find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: make setup-sglang")
    monkeypatch.chdir(downloads)
    # One reward process instead of four: this machine may be small.
    arguments = [str(ROOT / "configs" / f"{name}.toml"), "reward.num_workers=1", "--dry-run", "--ranks", str(num_ranks)]
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"num_ranks = {num_ranks}" in printed.out
    assert "reward of its reference answer: 1 " in printed.out
    assert ("300 held-out prompts" if "geo3k" in name else "30 held-out prompts") in printed.out
