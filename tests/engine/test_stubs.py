"""SGLang runs without a GPU, and what makes it run there is seen by nothing else."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.sglang.surroundings import cpu_environment
from spmdrl.model.load import load_policy
from spmdrl.step.export import export_hf
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.configs import model_config
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sglang_engine import change, trainer_logprobs

pytestmark = pytest.mark.skipif(
    find_spec("triton") is not None, reason="triton is installed, as SGLang's CUDA packages are, and needs no stub"
)


def stand_ins_seen() -> list[str]:
    """Where this process would import stubs from."""
    specs = map(find_spec, ("triton", "torchvision", "sgl_kernel", "IPython"))
    return [spec.origin for spec in specs if spec and "sglang_cpu" in (spec.origin or "")]


def python(*arguments: str, **environment: str) -> list[str]:
    """The lines that a new Python prints."""
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_engine_can_be_imported() -> None:
    code = """
import spmdrl_sglang_cpu
spmdrl_sglang_cpu.enable()
spmdrl_sglang_cpu.enable()
import sglang
from sglang.srt.entrypoints.engine import Engine
print(sglang.__version__)

# torch.compile asks on a CPU too, and takes an error for "no GPU".
from torch.utils._triton import has_triton_package, triton_backend
try:
    triton_backend()
except RuntimeError as error:
    print(error)

# torch and transformers have looked for the real packages before the stubs were there.
from transformers.utils import is_torchvision_available
import triton, torchvision
print([has_triton_package(), is_torchvision_available()], "sglang_cpu" in torchvision.__file__)
"""
    assert python("-c", code) == ["0.5.23", "triton is not installed", "[False, False] True"]


def _without_sglang(path: str) -> tuple[bool, list[str]]:
    model = AutoModelForCausalLM.from_pretrained(path)
    return bool(model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()), stand_ins_seen()


@pytest.mark.slow
def test_other_processes_see_no_stubs(tmp_path: Path) -> None:
    assert run_ranks(1, _without_sglang, save_qwen3(tmp_path)) == [(True, [])]


def test_processes_of_the_engine_see_none_before_sglang(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    environment = cpu_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import os, runpy\nfrom importlib.util import find_spec\n" + inspect.getsource(stand_ins_seen)
    code += "print(runpy.run_path(os.environ['SPMDRL_SGLANG_CPU'])['installed'](), stand_ins_seen())"
    assert python("-c", code, **environment) == ["the other one", "True []"]


def _changed(path: str, export: Path | None, sequences: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Export a policy whose weights were changed since it was loaded; its log-probabilities of the sequences."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        change(policy, 0.01)
        if export:
            sizes = {"bucket_bytes": 2**14, "file_bytes": 2**16}
            export_hf(policy, character_tokenizer(), export, meshes, dtype=torch.float32, **sizes)
        return trainer_logprobs(policy, sequences)


@pytest.mark.slow
def test_an_export_gives_the_trainers_log_probabilities(tmp_path: Path) -> None:
    path, export, prompts = save_qwen3(tmp_path / "model"), tmp_path / "hf", [[5, 6, 7], [9]]
    run_engine_ranks(2, _changed, path, export, [])
    answers = json.loads(python("-m", "tests.helpers.sglang_generate", str(export), json.dumps(prompts), "12")[-1])
    sequences = [(*prompt, *(token for token, _ in answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    expected, _ = run_engine_ranks(2, _changed, path, None, sequences)
    model = AutoModelForCausalLM.from_pretrained(export)
    for prompt, answer, ids, of_trainer in zip(prompts, answers, sequences, expected, strict=True):
        with torch.no_grad():
            of_transformers = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert ids[len(prompt) :] == tuple(of_transformers.argmax(-1)[len(prompt) - 1 :].tolist()), "greedy"
        chosen = of_transformers.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(chosen, of_trainer, atol=1e-5, rtol=0)
        of_sglang = torch.tensor([logprob for _, logprob in answer])
        torch.testing.assert_close(of_sglang, of_trainer[len(prompt) - 1 :], atol=1e-5, rtol=0)


def test_a_process_of_an_engine_ends_at_once_when_its_rank_has_ended_before() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = os.environ | cpu_environment() | {"SPMDRL_ENGINE_OF": str(gone.pid)}
    late = subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], env=environment, timeout=50)
    assert late.returncode == 1


def test_processes_of_an_engine_end_with_their_rank_from_the_first_moment() -> None:
    child = "import time; print('running', flush=True); time.sleep(60)"
    rank = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=sys.stdout); "
    rank += "print(p.pid, flush=True); time.sleep(60)"
    environment = os.environ | cpu_environment()
    parent = f"import os, sys; os.environ['SPMDRL_ENGINE_OF'] = str(os.getpid()); exec({rank!r})"
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip() for _ in range(2)}
    assert "running" in lines
    child_id = int((lines - {"running"}).pop())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path("/proc", str(child_id)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path("/proc", str(child_id)).exists()
