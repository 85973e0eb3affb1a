"""The claims about GPUs: each has its tests, each test its claim and its step, and the page shows what is committed."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import commit
from tests.gpu.proof import facts, gpu_proof, gpu_report, tests_seen
from tests.gpu.proof.claims import Claim, claims
from tests.gpu.proof.gpu_report import NO_EVIDENCE, judge, outcomes
from tests.gpu.proof.run import FAILED, KILLED, NOT_REACHED, PASSED, last_object
from tests.gpu.proof.stages import STAGES, Step

ROOT = Path(__file__).parents[2]
GPU_TESTS = ROOT / "tests/gpu"
MAX_STAGE_S = 9 * 60.0


def all_steps() -> list[Step]:
    return [step for stage in STAGES.values() for step in stage.steps]


def test_every_test_has_a_claim_and_every_case_of_a_claim_exists() -> None:
    claimed = {test for claim in claims() for test in claim.tests}
    for path in GPU_TESTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.stem.removeprefix('test_')}::{node.name}"
                cases = {test.removeprefix(f"{name}[")[:-1] for test in claimed if test.startswith(f"{name}[")}
                assert cases or name in claimed, f"{name} has no mark `claim`"
                words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                assert cases <= words, f"{name} has other cases than its claims: {cases}"


def test_a_sentence_is_one_claim_with_all_of_its_evidence() -> None:
    assert len({claim.sentence for claim in claims()}) == len(claims())
    (refit,) = (claim for claim in claims() if claim.sentence.startswith("The embedded torch engine holds"))
    assert refit.tests == (
        "one_device::test_engine_and_trainer_agree_after_a_refit",
        "memory::test_a_refit_from_the_host_gives_the_engine_the_trainers_weights",
    )


def test_every_file_of_tests_is_run_once_and_every_program_is_there() -> None:
    names = [step.name for step in all_steps()]
    assert len(set(names)) == len(names)
    files = [word for step in all_steps() for word in step.command if word.startswith("tests/")]
    assert sorted(files) == sorted(f"tests/gpu/{path.name}" for path in GPU_TESTS.glob("test_*.py"))
    programs = {word for step in all_steps() for word in step.command if word.endswith(".py")}
    assert [name for name in sorted(programs) if not (ROOT / name).is_file()] == []


def test_a_stage_ends_within_nine_minutes() -> None:
    for stage in STAGES.values():
        assert stage.budget_s <= MAX_STAGE_S
        assert all(step.limit_s < stage.budget_s for step in (stage.facts, *stage.steps))


def test_the_page_is_what_the_tool_makes_of_the_committed_results() -> None:
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in gpu_report.committed(ROOT)}
    shown = (ROOT / "docs/gpu-confirmed.md").read_text(encoding="utf-8")
    assert shown == gpu_report.page(records, claims(), emulated=gpu_report.emulated()), (
        "run `python -m tests.gpu.proof.gpu_report`"
    )


def record(*steps: dict[str, Any], date: str = "2026-01-02T00:00:00Z") -> dict[str, Any]:
    machine = {"devices": ["NVIDIA H200 (sm_90, 140 GiB)"], "driver": "580.1", "cuda": "13.0"}
    return {"date": date, "commit": "abc", "machine": machine, "versions": {"torch": "2.11.0"}, "steps": list(steps)}


def of_tests(*, status: str = PASSED, passed: tuple[str, ...] = (), **reasons: Any) -> dict[str, Any]:
    seen = {"passed": dict.fromkeys(passed, 1.0), "failed": {}, "skipped": {}} | reasons
    command = "python -m pytest tests/gpu/test_a.py"
    return {"name": "a", "command": command, "status": status, "exit_code": 0, "seconds": 9.0, "tests": seen}


A, B = "tests/gpu/test_a.py::test_one", "tests/gpu/test_a.py::test_two"
CLAIM = Claim("Training", "Both.", tests=("a::test_one", "a::test_two"))


@pytest.mark.parametrize(
    ("step", "result"),
    [
        (of_tests(passed=(A, f"{B}[x]", f"{B}[y]")), "confirmed, by 3 tests"),
        (
            of_tests(passed=(A, f"{B}[x]"), skipped={f"{B}[y]": "needs two CUDA devices"}),
            "in part, by 2 tests; not yet run: `a::test_two[y]` (needs two CUDA devices)",
        ),
        (of_tests(passed=(A,)), "in part, by 1 test; not yet run: `a::test_two`"),
        (of_tests(passed=(A,), failed={f"{B}[y]": "1 == 2"}), "failed: `a::test_two[y]`: 1 == 2"),
        (
            of_tests(status=KILLED, passed=(A,)),
            "in part, by 1 test; not yet run: `a::test_two` (killed after 9 s)",
        ),
        (
            of_tests(status=KILLED, failed={A: "1 == 2", B: "rank 0 died"}, last=B),
            "failed: `a::test_one`: 1 == 2",
        ),
        (
            of_tests(status=KILLED, passed=(B,), failed={A: "1 == 2"}, last=B),
            "failed: `a::test_one`: 1 == 2",
        ),
        (
            of_tests(status=KILLED, passed=(A,), failed={B: "rank 0 died"}, last=B),
            "in part, by 1 test; not yet run: `a::test_two` (killed after 9 s)",
        ),
        (of_tests(skipped={A: "no device", B: "no device"}), "not yet run (no device)"),
        (
            of_tests(status=FAILED, failed={"tests/gpu/test_a.py": "ImportError"}),
            "failed: `tests/gpu/test_a.py`: ImportError",
        ),
        ({"name": "b", "command": "python x.py", "status": PASSED}, "not yet run"),
        (
            {"name": "a", "command": "python -m pytest tests/gpu/test_a.py", "status": NOT_REACHED},
            "not yet run (no time was left)",
        ),
    ],
)
def test_what_was_seen_of_a_claim(step: dict[str, Any], result: str) -> None:
    assert judge(CLAIM, outcomes({"gpu-proof-1": record(step)})).result == result


def test_a_claim_about_a_program_follows_from_its_step() -> None:
    step = {"name": "refit", "command": "python x.py", "status": PASSED, "exit_code": 0, "seconds": 1.0}
    claim = Claim("Speed", "Fast.", steps=("refit",))
    assert judge(claim, outcomes({"one": record(step)})).result == "ran; the figures are below"
    failed = step | {"status": FAILED, "exit_code": 1, "tail": ["Traceback", "ValueError: no", ""]}
    assert judge(claim, outcomes({"one": record(failed)})).result == "failed: `refit`: exit code 1: ValueError: no"
    assert judge(Claim("Speed", "Unseen."), outcomes({"one": record(step)})).result == NO_EVIDENCE


def test_the_newest_record_decides_and_one_that_skipped_does_not() -> None:
    passed = record(of_tests(passed=(A, B)), date="2026-01-02T00:00:00Z")
    failed = record(of_tests(passed=(A,), failed={B: "no"}), date="2026-01-03T00:00:00Z")
    skipped = record(of_tests(skipped={A: "no device", B: "no device"}), date="2026-01-04T00:00:00Z")
    assert judge(CLAIM, outcomes({"a": passed, "b": failed, "c": skipped})).result.startswith("failed: ")
    assert judge(CLAIM, outcomes({"a": passed, "c": skipped})).result == "confirmed, by 2 tests"
    assert judge(CLAIM, outcomes({"a": passed, "c": skipped})).records == ("a",)


def test_the_page_shows_machines_and_figures() -> None:
    whole = {"size": "4b", "fused": {"gb_per_s": 123.456, "all_s": [1.0]}, "ratio": None}
    measured = {"rows": [whole, {"size": "8b", "failed": "out of memory"}]}
    step = {"name": "refit", "command": "python x.py", "status": PASSED, "figures": measured}
    text = gpu_report.page({"gpu-proof-3": record(step)}, [Claim("Speed", "Fast.", steps=("refit",))])
    assert (
        "| gpu-proof-3 | NVIDIA H200 (sm_90, 140 GiB) | 580.1, 13.0 | torch 2.11.0 | 2026-01-02 | abc | 1 of 1 |"
        in text
    )
    assert "| Fast. | ran; the figures are below | gpu-proof-3 | no | step `refit` |" in text
    assert "| size | fused gb_per_s | failed |\n|---|---|---|\n| 4b | 123.5 | - |\n| 8b | - | out of memory |\n" in text


def test_what_the_emulated_device_showed_is_never_called_seen() -> None:
    passed = outcomes({"emulated-device": record(of_tests(passed=(A, B)))})
    text = gpu_report.page({}, [CLAIM], emulated=passed)
    assert "| Both. | not yet run |  | passed |" in text


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "refit.json"
    other.write_text("{}")
    assert gpu_report.main([str(other), "--page", str(tmp_path / "page.md")]) == 2
    assert f"{other} was not written by launch/gpu_proof.sh" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_a_file_that_saw_no_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu-proof-1.json"
    path.write_text(json.dumps(record() | {"machine": {"devices": []}}))
    assert gpu_report.main([str(path), "--page", str(tmp_path / "page.md")]) == 2
    assert f"cannot report: {path} is of a machine without a CUDA device" in capsys.readouterr().err


STAND_IN = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_name": lambda index: "NVIDIA H200",
    "get_device_capability": lambda index: (9, 0),
    "get_device_properties": lambda index: SimpleNamespace(total_memory=140 * 2**30),
    "mem_get_info": lambda index: (139 * 2**30, 140 * 2**30),
}


def refused() -> str:
    raise RuntimeError("no such device\nand more")


def test_facts_about_a_stand_in_for_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fact that cannot be tried is a row that says why."""
    for name, function in STAND_IN.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(facts, "_cuda_ipc", refused)
    facts.main()
    printed = last_object(capsys.readouterr().out)
    assert printed["machine"]["devices"] == ["NVIDIA H200 (sm_90, 140 GiB)"]
    assert printed["versions"]["torch"] == torch.__version__
    seen = {fact["name"]: fact["seen"] for fact in printed["facts"]}
    assert seen["memory of device 0"] == "139.0 of 140.0 GiB free"
    assert seen["NCCL"] == "2.28.9"
    assert seen["CUDA IPC"] == "RuntimeError: no such device"
    assert {"driver", "libcudart in use", "libcudart of ldconfig", "/dev/shm", "ptrace scope", "nvcc"} <= seen.keys()


def test_facts_without_a_device_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no CUDA device here"):
        facts.main()
    assert last_object(capsys.readouterr().out)["machine"]["devices"] == []


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu_proof.main(["9"])
    assert end.value.code == 2
    assert "invalid choice: '9'" in capsys.readouterr().err


def test_the_figures_of_a_program_are_the_last_object_that_it_printed() -> None:
    assert last_object('{"rows": [1]}\n{"rows": [2]}\n[3]\n4\nwarning: {}\n') == {"rows": [2]}
    assert last_object("nothing\n") == {}


def test_a_test_that_began_and_did_not_end_has_failed(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "outcome": "failed", "reason": tests_seen.UNFINISHED},
        {"id": "a", "outcome": "passed", "seconds": 1},
    ]
    lines += [{"id": "b", "outcome": "failed", "reason": tests_seen.UNFINISHED}]
    (tmp_path / "seen").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "c", "outc')
    seen = tests_seen.read(tmp_path / "seen")
    assert seen is not None
    assert (seen["passed"], seen["failed"]) == ({"a": 1}, {"b": tests_seen.UNFINISHED})
    assert tests_seen.read(tmp_path / "none") is None


def test_a_copy_without_git_is_known_by_its_stamp(tmp_path: Path) -> None:
    copy, stamp = tmp_path / "copy", tmp_path / "commit.json"
    (copy / "spmdrl").mkdir(parents=True)
    (copy / "spmdrl/train.py").write_text("step = 1\n")
    assert commit.commit_id(copy, stamp) == "unknown"
    stamp.write_text(json.dumps({"commit": "abc with changes", "sources": commit.sources_digest(copy)}))
    assert commit.commit_id(copy, stamp) == "abc with changes"
    stamp.write_text(json.dumps({"commit": "abc", "sources": commit.sources_digest(copy)}))
    assert commit.commit_id(copy, stamp) == "abc"
    (copy / "spmdrl/train.py").write_text("step = 2\n")
    assert commit.commit_id(copy, stamp) == "abc with changes"


def test_a_checkout_is_known_by_git_and_a_copy_inside_one_is_not(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "spmdrl").mkdir()
    (tmp_path / "spmdrl/train.py").write_text("step = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit.stamp(tmp_path) == {"commit": head, "sources": commit.sources_digest(tmp_path)}
    (tmp_path / "spmdrl/train.py").write_text("step = 2\n")
    assert commit.commit_id(tmp_path, None) == f"{head} with changes"
    assert commit.commit_id(tmp_path / "spmdrl", None) == "unknown"
