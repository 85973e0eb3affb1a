"""A reward process can do its work and nothing else: tried from inside, with what its functions and programs see."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import CodeReward, FunctionReward, RewardConfig, SandboxConfig
from spmdrl.rewards.client import RewardPool
from spmdrl.types import RewardOutcome
from spmdrl.workers.folders import LockedFolder, sweep
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item, python_path, running, wait_for

# The response is what is tried; what it gives is raised, so that the outcome says it.
FUNCTION = '''
import contextlib, ctypes, os, resource, socket, stat, subprocess, time
from pathlib import Path

def say(answer):
    """Write to the trainer what the worker should."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, answer)

def attempt(prompt, response, answer, metadata):
    try:
        value = eval(response)
    except (OSError, MemoryError) as error:
        raise RuntimeError(type(error).__name__) from error
    raise RuntimeError(repr(value))

def as_configured(prompt, response, answer, metadata):
    return float(response)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "attempts.py"
    path.write_text(FUNCTION)
    return path


def config(functions: Path, name: str = "attempt", timeout_s: float = 2.0, **sandbox: Any) -> RewardConfig:
    term = FunctionReward(kind="function", function=f"{functions}:{name}")
    return RewardConfig(terms=(term,), timeout_s=timeout_s, sandbox=SandboxConfig(**sandbox))


@pytest.fixture(scope="module")
def sandboxed(functions: Path) -> Iterator[RewardPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", "secret")
        limits = {"max_memory_gib": 2.0, "max_file_gib": 2**-10, "max_open_files": 32, "max_processes": 9}
        with RewardPool(config(functions, **limits)) as pool:
            yield pool


def given(pool: RewardPool, attempt: str) -> str:
    failure = outcomes_of(pool, item(attempt))[0].failure
    assert failure is not None
    return failure.removeprefix("function: RuntimeError: ")


def test_limits(sandboxed: RewardPool) -> None:
    assert given(sandboxed, "resource.getrlimit(resource.RLIMIT_AS)[1]") == str(2 * 2**30)
    assert given(sandboxed, "len(bytearray(3 * 2**30))") == "MemoryError"
    assert given(sandboxed, "len([open('/dev/null') for _ in range(40)])") == "OSError"
    assert given(sandboxed, "Path('large').write_bytes(bytes(2**20 + 1))") == "OSError"
    assert given(sandboxed, "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 33))").startswith("function: ValueError")


def test_environment_and_place(sandboxed: RewardPool) -> None:
    kept = eval(given(sandboxed, "sorted(os.environ.keys() - {'LC_CTYPE'})"))
    assert {"HOME", "TMPDIR"} <= {*kept}
    assert {*kept} <= {
        *("HOME", "TMPDIR", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    }
    assert given(sandboxed, "os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR']") == "True"
    assert given(sandboxed, "Path('small').write_text('abc')") == "3"
    # The standard three, which lead nowhere, and its socket; Python opens another to list them.
    assert given(sandboxed, "{os.fstat(fd).st_rdev for fd in (0, 1, 2)} == {os.stat('/dev/null').st_rdev}") == "True"
    assert given(sandboxed, "len(os.listdir('/proc/self/fd'))") == "5"


def test_privileges(sandboxed: RewardPool) -> None:
    for name in ("CapEff", "CapBnd"):
        status = f"Path('/proc/self/status').read_text().partition('{name}:')[2].split()[0]"
        assert given(sandboxed, status) == repr("0" * 16)
    assert given(sandboxed, "ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)") == "1"  # PR_GET_NO_NEW_PRIVS
    assert given(sandboxed, "ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)") == "0"  # PR_GET_DUMPABLE


def test_sockets(sandboxed: RewardPool) -> None:
    if any("sockets" in sentence for sentence in sandboxed.unprotected):
        pytest.skip("; ".join(sandboxed.unprotected))
    assert given(sandboxed, "socket.create_connection(('127.0.0.1', 9))") == "PermissionError"
    assert given(sandboxed, "socket.socket(socket.AF_UNIX)") == "PermissionError"
    # Another architecture's calls would have other numbers; here, those of x32.
    if platform.machine() == "x86_64":
        assert given(sandboxed, "ctypes.CDLL(None).syscall(0x40000000 + 41, 1, 1, 0)") == "-1"
    assert given(sandboxed, "ctypes.CDLL(None).syscall(425, 1, bytes(120))") == "-1"  # io_uring_setup
    assert given(sandboxed, "len(socket.socketpair())") == "2"  # which asyncio needs


def test_namespaces(sandboxed: RewardPool, tmp_path: Path) -> None:
    if sandboxed.unprotected:
        pytest.skip("; ".join(sandboxed.unprotected))
    assert given(sandboxed, "Path('/proc/self/net/dev').read_text().count(':')") == "1"  # the loopback device
    assert given(sandboxed, f"Path({str(tmp_path)!r}, 'file').write_text('')") == "OSError"
    assert not list(tmp_path.iterdir())
    assert given(sandboxed, "ctypes.CDLL(None).mount(None, b'/', None, 32 | 4096, None)") == "-1"  # no way back
    assert given(sandboxed, "os.listdir('/dev/shm')") == "[]"
    assert given(sandboxed, "(os.getpid(), os.getppid())") == "(2, 1)"
    assert given(sandboxed, f"os.kill({os.getpid()}, 0)").startswith("ProcessLookupError")
    assert given(sandboxed, f"len(Path('/proc/{os.getpid()}/environ').read_bytes())") == "PermissionError"


def test_what_detaches_itself_ends_too(sandboxed: RewardPool) -> None:
    if sandboxed.unprotected:
        pytest.skip("; ".join(sandboxed.unprotected))
    detached = "subprocess.Popen(['sleep', '600.3'], start_new_session=True)"
    future = sandboxed.submit(item(f"{detached}, time.sleep(0.5), os._exit(7)"))
    assert wait_for(lambda: bool(running("sleep", "600.3")))
    assert future.result().failure == "the worker exited with code 7"
    assert wait_for(lambda: not running("sleep", "600.3"))


PROCESSES = """
import ctypes, os, platform, resource, socket, sys, time
from spmdrl.workers.sandbox import Sandbox, enter
if os.getuid() == 0:  # whom Linux does not hold to a number of processes
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is ours again
pipe, _ = socket.socketpair()
limits = {"max_memory_bytes": 2**31, "max_processes": 9, "max_file_bytes": 2**20, "max_open_files": 32}
sandbox = Sandbox(setting="reward.sandbox", folder=sys.argv[1], is_strict=False, **limits)
print(enter(sandbox, pipe.fileno()).missing, flush=True)
started = 0
try:
    while started < 100:
        if os.fork() == 0:
            time.sleep(60)
        started += 1
except BlockingIOError:
    print(started, flush=True)
os._exit(0)
"""


def test_number_of_processes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", PROCESSES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | python_path())
    assert done.stderr == ""
    missing, *started = done.stdout.splitlines()
    if "processes" in missing:
        pytest.skip(missing)
    assert started == ["8"]


def test_nothing_the_worker_writes_stops_the_trainer(sandboxed: RewardPool, functions: Path) -> None:
    assert given(sandboxed, "(say(b'half a line'), time.sleep(60))") == "timeout"
    answers = [
        b"no json\n",
        b'{"parts": {}}\n',
        b'{"parts": {"other": 1.0}, "failure": null, "traceback": ""}\n',
        b'{"parts": {"function": NaN}, "failure": null, "traceback": ""}\n',
        b"[" * 50_000 + b"\n",
    ]
    with RewardPool(config(functions, timeout_s=50.0)) as patient:
        for answer in answers:
            said = given(patient, f"(say({answer!r}), time.sleep(60))")
            assert said == "the worker was killed: its answer is invalid", answer
        assert outcomes_of(patient, item("1"))[0].failure == "function: RuntimeError: 1"


WITHOUT_NAMESPACES = """
import os, resource, socket
from spmdrl.workers.sandbox import Sandbox, enter
limits = {"max_memory_bytes": 2**31, "max_processes": 9, "max_file_bytes": 2**20, "max_open_files": 32}
pipe, _ = socket.socketpair()
try:
    enter(Sandbox(setting="reward.sandbox", folder="/", is_strict=True, **limits), pipe.fileno())
except ValueError as error:
    print(error)
print(enter(Sandbox(setting="reward.sandbox", folder="/", is_strict=False, **limits), pipe.fileno()).missing)
try:
    socket.socket()
except PermissionError as error:
    print(error.strerror)
print([resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in ("AS", "FSIZE", "NOFILE")])
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not there")
def test_what_a_machine_cannot_protect_is_told_or_refused() -> None:
    # Inside a user namespace that may have none of its own.
    forbid = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", WITHOUT_NAMESPACES],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | python_path(),
    )
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    refused, told, socket_refused, limits = done.stdout.splitlines()
    missing = r"files( in /dev/shm)?( and other processes)? are within reach, and processes are not counted \(no user n"
    assert re.match(rf'reward\.sandbox\.mode = "strict", but {missing}', refused)
    assert re.match(rf"\['{missing}", told)
    assert socket_refused == "Permission denied"
    assert eval(limits) == [2**31, 2**20, 32]


FENCED = """
import json, os, resource, socket, sys, time
from pathlib import Path
from spmdrl.workers.sandbox import Sandbox, enter
limits = {"max_memory_bytes": 2**31, "max_processes": 9, "max_file_bytes": 2**20, "max_open_files": 32}
folder, outside = sys.argv[1:]
pipe, _ = socket.socketpair()
walls = enter(Sandbox(setting="reward.sandbox", folder=folder, is_strict=False, **limits), pipe.fileno())

def refused(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False

Path(folder, "a/b").mkdir(parents=True)
Path(folder, "a/b").rename(Path(folder, "c"))
open("/dev/null", "w").close()
files = [
    lambda: Path(outside, "file").write_text("x"),
    lambda: Path(outside, "old").write_text("x"),
    lambda: os.truncate(Path(outside, "old"), 0),
    lambda: os.rename(Path(outside, "old"), Path(folder, "old")),
    lambda: os.unlink(Path(outside, "old")),
    lambda: os.mkdir(Path(outside, "folder")),
    lambda: os.open(Path(outside, "fifo"), os.O_RDWR),
]
processes = [lambda: os.kill(os.getppid(), 0), lambda: os.kill(int(os.environ["OTHER"]), 0)]
print(json.dumps([walls.missing[0], [refused(one) for one in files], [refused(one) for one in processes]]))
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "600.9"])
time.sleep(0.3)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not there")
def test_without_namespaces_landlock_keeps_files_and_processes_apart(tmp_path: Path) -> None:
    forbid = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/old").write_text("old")
    os.mkfifo(tmp_path / "outside/fifo")
    with subprocess.Popen(["sleep", "600"]) as other:
        done = subprocess.run(
            [
                *("unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", FENCED),
                *(str(tmp_path / "inside"), str(tmp_path / "outside")),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | python_path() | {"OTHER": str(other.pid)},
        )
        other.kill()
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    missing, files, processes = json.loads(done.stdout)
    if missing.startswith("files and"):
        pytest.skip("this kernel has no Landlock")
    assert all(files) and len(files) == 7
    assert all(processes) or "other processes" in missing
    assert wait_for(lambda: not running("sleep", "600.9"))  # it had detached itself


def test_one_rollout_leaves_the_next_no_files(sandboxed: RewardPool) -> None:
    for _ in range(3):
        assert given(sandboxed, "Path('file').write_bytes(bytes(2**20 - 8192))") == str(2**20 - 8192)
    assert given(sandboxed, "os.listdir('.')") == "[]"


@pytest.mark.parametrize(
    "trace",
    [
        "os.mkdir('folder')",
        "os.symlink('nothing', 'link')",
        "os.mkfifo('pipe')",
        "os.close(os.open('/dev/shm/empty', os.O_CREAT))",
        "os.chmod('.', 0o500)",
        "os.chmod('/dev/shm', 0)",
    ],
)
def test_one_rollout_leaves_the_next_no_trace(sandboxed: RewardPool, trace: str) -> None:
    """Also of those that take no room."""
    if sandboxed.unprotected:
        pytest.skip(sandboxed.unprotected[0])
    seen = "[(oct(os.stat(place).st_mode)[-3:], os.listdir(place)) for place in ('.', '/dev/shm')]"
    assert given(sandboxed, trace) == "None"
    assert given(sandboxed, seen) == "[('700', []), ('700', [])]"


def test_leaves_no_folder(functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RewardPool(config(functions, "as_configured")) as pool:
        assert outcomes_of(pool, item("2"))[0].reward == 2.0
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


HOLDS = """
import sys
from spmdrl.workers.folders import LockedFolder
folder = LockedFolder()
open(folder.path + "/file", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_what_killed_trainers_have_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", HOLDS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | python_path()}
    with subprocess.Popen(command, **pipes) as lives, subprocess.Popen(command, **pipes) as killed:
        assert lives.stdout is not None and killed.stdout is not None
        held, left = (Path(trainer.stdout.readline().strip()) for trainer in (lives, killed))
        stranger = tmp_path / "spmdrl-sandbox-link"
        stranger.symlink_to(held)
        mine = LockedFolder()
        sweep()
        assert {*tmp_path.iterdir()} == {held, left, stranger, Path(mine.path)}
        killed.kill()
        killed.wait()
        sweep()
        assert {*tmp_path.iterdir()} == {held, stranger, Path(mine.path)}
        mine.remove()
        lives.kill()
    sweep()
    assert {*tmp_path.iterdir()} == {stranger}


# Programs of the model


ADD = "print(sum(map(int, input().split())))"
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}, {"input": "2 3", "output": "6"}]
ASSERTS = ["assert double(2) == 4", "assert double(3) == 6"]


@pytest.fixture(scope="module")
def programs() -> Iterator[RewardPool]:
    terms = (CodeReward(kind="code", tests_timeout_s=2.0), CodeReward(kind="code", tests_timeout_s=2.0, score="all"))
    with RewardPool(RewardConfig(terms=terms, timeout_s=8.0)) as pool:
        yield pool


def fenced(program: str) -> str:
    return f"So:\n```\nraise SystemExit(1)\n```\nor rather\n```python\n{program}\n```\nas asked."


@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        (ADD, PAIRS, 2 / 3),
        (ADD, PAIRS[:2], 1.0),
        ("def double(x):\n    return 2 * x", ASSERTS, 1.0),
        ("double = lambda x: 4", ASSERTS, 0.5),
        ("double = lambda x: 4", '["assert double(2) == 4"]', 1.0),  # as text, which files often hold
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("import os; os._exit(0)", ASSERTS, 0.0),
        ("double = '''", ASSERTS, 0.0),
        ("print(open('/etc/hostname', 'a'))", ASSERTS, 0.0),
        ("print('x' * 2**21)", PAIRS[:1], 0.0),
    ],
)
def test_programs(programs: RewardPool, program: str, tests: Any, share: float) -> None:
    outcome = outcomes_of(programs, item(fenced(program), tests=tests))[0]
    assert outcome.failure is None
    assert outcome.parts == {"code": share, "code_2": float(share == 1.0)}


def test_a_program_without_end_has_failed_and_is_no_failure_of_the_reward() -> None:
    with RewardPool(RewardConfig(terms=(CodeReward(kind="code", tests_timeout_s=0.5),), timeout_s=5.0)) as pool:
        outcome = outcomes_of(pool, item(fenced("while True: pass"), tests=PAIRS))[0]
    assert outcome == RewardOutcome(reward=0.0, parts={"code": 0.0})


def test_a_response_without_a_program(programs: RewardPool) -> None:
    (outcome,) = outcomes_of(programs, item(ADD, tests=PAIRS))
    assert outcome == RewardOutcome(reward=0.0, parts={"code": 0.0, "code_2": 0.0})


def test_prompts_without_tests_are_counted(programs: RewardPool) -> None:
    for tests in (None, [], "text", [1], [{"input": "1"}]):
        failure = outcomes_of(programs, item(fenced(ADD), tests=tests))[0].failure
        assert failure is not None and 'the column "tests" must hold a list of tests' in failure


def test_a_program_that_kills_its_judge_costs_only_itself(programs: RewardPool) -> None:
    killer = item(fenced("import os; os.kill(os.getppid(), 9)"), tests=PAIRS)
    killed, good = outcomes_of(programs, killer, item(fenced(ADD), tests=PAIRS[:2]))
    assert killed.failure == "the worker was killed by SIGKILL" and killed.reward == 0.0
    assert good.reward == 2.0


def test_programs_need_the_sandbox() -> None:
    with pytest.raises(ValueError, match=r'sandbox.mode = "off" would let that do anything'):
        RewardConfig(terms=(CodeReward(kind="code"),), sandbox=SandboxConfig(mode="off"))
