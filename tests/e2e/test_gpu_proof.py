"""A stage of the proof runs to its end whatever its steps do, writes down what it saw, and the report says it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commit import stamp
from tests.gpu.proof import gpu_proof, gpu_report
from tests.gpu.proof.claims import Claim
from tests.gpu.proof.run import FAILED, KILLED, NOT_REACHED, PASSED, run_stage
from tests.gpu.proof.stages import Stage, Step, gpu_tests

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
TESTS = """\
import os
import pytest

def test_good(): ...
@pytest.mark.parametrize("case", ["x", "y"])
def test_half(case): assert case == "x"
def test_alone(): pytest.skip("needs two CUDA devices")
def test_dies(): os._exit(3)
def test_later(): ...
"""
HANGS = """\
import subprocess, sys, tempfile, time
# As torchrun starts its ranks, and `finished_torchrun` keeps what they write.
program = "import time; print('step 3', flush=True); sleeps = time.sleep; sleeps(600)"
file = tempfile.NamedTemporaryFile(prefix="torchrun-")
child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=file, stderr=file)
print("child", child.pid)
time.sleep(600)
"""
ALONE = """\
import sys
from pathlib import Path
sys.exit(not (Path("met-a").exists() and Path("met-b").exists()))"""
FACTS = """print('{"machine": {"devices": ["a stand-in"]}, "versions": {"torch": "2.11.0"}}')"""


def step(name: str, program: str, *, limit_s: float = LONG_S) -> Step:
    return Step(name=name, command=("python", "-c", program), limit_s=limit_s, expected="as told")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a stage whose steps pass, fail, hang and are not reached."""
    root = tmp_path_factory.mktemp("root")
    (root / "tests/gpu").mkdir(parents=True)
    for name, text in (("mixed", TESTS), ("broken", "import no_such_module")):
        (root / f"tests/gpu/test_{name}.py").write_text(text)
    stage = Stage(
        about="a trial",
        budget_s=LONG_S,
        facts=step("facts", FACTS),
        steps=(
            step("measured", """print('{"rows": [{"size": "tiny", "s": 0.5}]}'); print("later")"""),
            step("wrong", "import sys; print('why'); sys.exit('a sentence')"),
            gpu_tests("mixed", limit_s=LONG_S),
            gpu_tests("broken", limit_s=LONG_S),
            step("hangs", HANGS, limit_s=2.0),
            step("late", "", limit_s=100 * LONG_S),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        run_stage("t", stage, root=root, folder=root / "out", commit="abc")
    found: dict[str, Any] = json.loads((root / "out/gpu-proof-t.json").read_text())
    assert not list((root / "out").glob("*.new"))
    return found | {"log": (root / "out/gpu-proof-t.log").read_text()}


def test_steps_run_beside_each_other_and_those_that_must_be_alone_after_them(tmp_path: Path) -> None:
    """The first two wait for each other, and the last one says whether they have ended."""
    (tmp_path / "meet").mkdir()
    meets = """\
import sys, time
from pathlib import Path
Path("meet", "{own}").touch()
while not Path("meet", "{other}").exists(): time.sleep(0.01)
time.sleep(0.2)
Path("met-{own}").touch()"""
    steps = (
        Step(name="last", command=("python", "-c", ALONE), limit_s=LONG_S, expected="as told", alone=True),
        *(step(own, meets.format(own=own, other=other)) for own, other in ("ab", "ba")),
    )
    stage = Stage(about="a trial", budget_s=LONG_S, facts=step("facts", FACTS), steps=steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        found = run_stage("t", stage, root=tmp_path, folder=tmp_path / "out", commit="abc", at_once=2)
    assert {one["name"]: one["status"] for one in found["steps"]} == dict.fromkeys(("facts", "last", "a", "b"), PASSED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "sglang"), "--only sglang: stage 1 has the steps doctor, refit-processes, "),
        (("--at-once", "0"), "--at-once 0: at least one step runs at a time"),
    ],
)
def test_a_choice_of_steps_that_cannot_be_is_refused(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_proof.main(["1", *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_every_step_is_recorded_as_it_ended(record: dict[str, Any]) -> None:
    assert {one["name"]: one["status"] for one in record["steps"]} == {
        "facts": PASSED,
        "measured": PASSED,
        "wrong": FAILED,
        "mixed": FAILED,
        "broken": FAILED,
        "hangs": KILLED,
        "late": NOT_REACHED,
    }
    assert (record["machine"], record["versions"]) == ({"devices": ["a stand-in"]}, {"torch": "2.11.0"})
    of = {one["name"]: one for one in record["steps"]}
    assert of["measured"]["figures"] == {"rows": [{"size": "tiny", "s": 0.5}]}
    assert (of["wrong"]["exit_code"], of["wrong"]["tail"][-1]) == (1, "a sentence")


def test_tests_are_recorded_one_by_one_with_reasons(record: dict[str, Any]) -> None:
    """Also those that ran before one that took the process with it."""
    of = {one["name"]: one.get("tests") for one in record["steps"]}
    file = "tests/gpu/test_mixed.py"
    assert of["mixed"]["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert of["mixed"]["passed"].keys() == {f"{file}::test_good", f"{file}::test_half[x]"}
    assert of["mixed"]["failed"].keys() == {f"{file}::test_half[y]", f"{file}::test_dies"}
    assert "assert 'y' == 'x'" in of["mixed"]["failed"][f"{file}::test_half[y]"]
    assert of["mixed"]["failed"][f"{file}::test_dies"] == "began and did not end"
    assert of["mixed"]["skipped"] == {f"{file}::test_alone": "needs two CUDA devices"}
    assert "no_such_module" in of["broken"]["failed"]["tests/gpu/test_broken.py"]


def test_a_step_that_hangs_is_ended_with_all_that_it_started_and_says_where(record: dict[str, Any]) -> None:
    (hung,) = (one for one in record["steps"] if one["name"] == "hangs")
    assert hung["seconds"] < 20
    assert re.search(r'File "<string>", line \d+ in <module>', record["log"])  # the stacks
    run = "\n".join(hung["tail"]).partition("-- torchrun-")[2]
    assert re.search(r"\nstep 3\n.*Fatal Python error: Aborted.*line 1 in <module>", run, re.DOTALL)
    assert run in record["log"]
    (child,) = re.findall(r"^child (\d+)$", record["log"], re.MULTILINE)
    assert not is_alive(int(child))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_report_says_what_was_seen(record: dict[str, Any]) -> None:
    claims = [
        Claim("All", "Measured.", steps=("measured",)),
        Claim("All", "Good.", tests=("mixed::test_good",)),
        Claim("All", "Half.", tests=("mixed::test_half",)),
        Claim("All", "Two devices.", tests=("mixed::test_alone",)),
        Claim("All", "Broken.", tests=("broken::test_any",)),
        Claim("All", "Died.", tests=("mixed::test_dies",)),
        Claim("All", "Later.", tests=("mixed::test_later",)),
        Claim("All", "Hung.", steps=("hangs",)),
        Claim("All", "Late.", steps=("late",)),
    ]
    lines = gpu_report.page({"gpu-proof-t": record}, claims).splitlines()
    seen = [line.split(" | ")[1].partition(" in test")[0] for line in lines if re.match(r"\| [\w ]+\. \|", line)]
    assert seen[:2] == ["ran; the figures are below", "confirmed, by 1 test"]
    assert seen[2].startswith("failed: `mixed::test_half[y]`: AssertionError: assert 'y' == 'x'")
    assert seen[3] == "not yet run (needs two CUDA devices)"
    assert seen[4].startswith("failed: `tests/gpu/test_broken.py`: ") and "no_such_module" in seen[4]
    assert seen[5] == "failed: `mixed::test_dies`: began and did not end"
    assert seen[6].startswith("not yet run (exit code 3")
    assert re.fullmatch(r"failed: `hangs`: killed after \d+ s", seen[7])
    assert seen[8:] == ["not yet run (no time was left)"]


def test_the_table_names_what_was_seen_beside_what_was_expected(record: dict[str, Any]) -> None:
    rows = {line.split()[0]: line for line in gpu_proof.table(record)}
    assert re.search(r"2 passed, 2 failed, 1 skipped, \d+ s +all pass$", rows["mixed"])
    assert re.search(r"failed, exit code 1, \d+ s +as told$", rows["wrong"])
    assert re.search(r"killed, \d+ s +as told$", rows["hangs"])
    assert re.search(r"not reached +as told$", rows["late"])
    assert "failed: wrong: a sentence" in list(gpu_proof.reasons(record))
    assert gpu_proof.verdict(record) == "2 of 7 steps passed, 4 failed, 1 were not reached."
    assert not gpu_proof.is_as_expected(record)


def test_without_a_device_nothing_is_proved(record: dict[str, Any]) -> None:
    bare = record | {"machine": {"devices": []}, "steps": [one for one in record["steps"] if one["status"] == PASSED]}
    assert "no CUDA device" in gpu_proof.verdict(bare)
    assert not gpu_proof.is_as_expected(bare)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, a bundle of one module, and a Python that says how it was called."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/gpu_proof.sh", tmp_path / "launch")
    (tmp_path / "bundle/site").mkdir(parents=True)
    (tmp_path / "bundle/site/bundled.py").write_text("")
    pack = "tar cJ -C site . >site.tar.xz.00 && sha256sum site.tar.xz.* >SHA256SUMS && rm -r site"
    subprocess.run(["bash", "-c", pack], cwd=tmp_path / "bundle", check=True)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$PYTHONPATH $SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK $*"\n')
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def proof(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BUNDLE")}
    return subprocess.run(
        [checkout / "launch/gpu_proof.sh", "1"],
        env=inherited | {"PYTHON": str(checkout / "python")} | environment,
        capture_output=True,
        text=True,
    )


def test_the_bundle_is_unpacked_once_and_comes_after_the_checkout(checkout: Path) -> None:
    first, second = proof(checkout), proof(checkout)
    (site,) = (checkout / "runs").iterdir()
    assert (site / "bundled.py").is_file()
    called = f"{checkout}:{site} 1 -m tests.gpu.proof.gpu_proof 1 --commit-file bundle/commit.json"
    assert first.stdout.splitlines() == [f"unpacking bundle into {site}", called]
    assert second.stdout.splitlines() == [called]


def test_a_damaged_bundle_is_not_used(checkout: Path) -> None:
    with open(checkout / "bundle/site.tar.xz.00", "ab") as file:
        file.write(b"more")
    done = proof(checkout)
    assert done.returncode != 0 and "site.tar.xz.00: FAILED" in done.stdout + done.stderr
    assert not (checkout / "runs").exists()


def test_without_a_bundle_what_is_installed_is_used(checkout: Path) -> None:
    shutil.rmtree(checkout / "bundle")
    assert proof(checkout).stdout.split()[:2] == [str(checkout), "-m"]
    named = proof(checkout, BUNDLE="elsewhere")
    assert named.returncode == 2
    assert "BUNDLE=elsewhere: there is no elsewhere/SHA256SUMS" in named.stderr


PYTHON_WITHOUT_NETWORK = """\
#!/bin/sh
[ "$2" = pip ] || exec {python} "$@"
while [ "$1" != --dest ]; do shift; done
mkdir -p "$2"
case $3 in sglang==*) cp "{folder}/sglang.whl" "$2" ;; esac
"""


def test_what_make_bundle_packs_is_what_the_proof_unpacks(checkout: Path) -> None:
    """With one wheel that is here, and none of the others."""
    with zipfile.ZipFile(checkout / "sglang.whl", "w") as wheel:
        for name in ("sglang/srt.py", "sglang/test/x.py", "sgl_kernel/sm90/common_ops.so", "sgl_kernel/sm100/other.so"):
            wheel.writestr(name, "")
    stub = checkout / "python-without-network"
    stub.write_text(PYTHON_WITHOUT_NETWORK.format(python=sys.executable, folder=checkout))
    stub.chmod(0o755)
    bundle = checkout / "packed"
    pack = [ROOT / "launch/make_bundle.sh", bundle]
    subprocess.run(pack, env=os.environ | {"PYTHON": str(stub)}, check=True, capture_output=True)
    assert json.loads((bundle / "commit.json").read_text()) == stamp(ROOT)
    assert proof(checkout, BUNDLE=str(bundle)).returncode == 0
    (site,) = (checkout / "runs").iterdir()
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {"sglang/srt.py", "sgl_kernel/sm90/common_ops.so", "IPython/__init__.py"} <= files
    assert not {"sglang/test/x.py", "sgl_kernel/sm100/other.so"} & files
