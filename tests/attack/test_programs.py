"""Programs of the policy's that attack the sandbox, the rollouts after them, or the trainer.

After each attack come a right and a wrong program: the right one is rewarded, the wrong one is not, and neither fails.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl.config import CodeReward, RewardConfig, SandboxConfig
from spmdrl.config.environment import EnvironmentConfig, PythonTool, ToolsEnvironment
from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs.client import EnvironmentClient
from spmdrl.rewards.client import RewardPool
from spmdrl.rewards.worker import RewardItem
from spmdrl.types import RewardOutcome
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item, running

TESTS = [{"input": "3 4\n", "output": "7\n"}]
RIGHT = "print(sum(map(int, input().split())))"
WRONG = "print(8)"
BEGIN = "import ctypes, fcntl, os, resource, signal, socket, subprocess, sys, tempfile, threading, time\n"
# Twice forked, in a session of its own, without the program's files: nobody waits for it any more.
DETACHED = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 64)
        os.chdir("/")
        while True:
            {body}
            time.sleep(0.0005)
    os._exit(0)
"""


def detached(body: str) -> str:
    """A program that leaves a process, which does this again and again."""
    return BEGIN + DETACHED.replace("{body}", f"exec({body!r}, globals())")


FORGE = """
for folder in os.listdir(HOME):
    try:
        with open(f"{HOME}/{folder}/program.py", "w") as file: file.write("print(7)")
    except OSError: pass
"""
KILL = """
for pid in range(3, 400):
    if pid != os.getpid():
        try: os.kill(pid, 9)
        except OSError: pass
"""
STOP = KILL.replace("9)", "signal.SIGSTOP)")
LIMITS = """
for pid in range(3, 400):
    if pid != os.getpid():
        try: resource.prlimit(pid, resource.RLIMIT_AS, (4096, 4096))
        except OSError: pass
"""
FILL = """
try:
    with open(f"{HOME}/full", "ab") as file: file.write(bytes(2**20))
except OSError: pass
"""
REMOVE = """
for folder in os.listdir(HOME):
    try: os.rename(f"{HOME}/{folder}", f"{HOME}/gone")
    except OSError: pass
"""
INPUT = """
for folder in os.listdir(HOME):
    try:
        with open(f"{HOME}/{folder}/input", "w") as file: file.write("1 1")
    except OSError: pass
"""
HOME = "HOME = os.path.dirname(os.environ['HOME'])\n"

# What is left to disturb whoever comes next.
LEAVES = {
    "forges the next programs": HOME + FORGE,
    "forges the next inputs": HOME + INPUT,
    "kills the next programs": KILL,
    "stops the next programs": STOP,
    "takes their memory": LIMITS,
    "keeps the folder full": HOME + FILL,
    "renames their folders": HOME + REMOVE,
    "burns time": "resource.setrlimit(resource.RLIMIT_CPU, (10**6, -1))\nfor _ in range(10**5): pass",
    "multiplies": "pid = os.fork()\nif pid == 0 or len(os.listdir('/proc/self/fd')) > 90: pass",
    "moves on": "if os.fork(): os._exit(0)",
    "fills the shared memory": "open(f'/dev/shm/{time.time()}', 'wb').write(bytes(2**20))",
    "holds a lock": "held = open('/dev/null'); fcntl.flock(held, fcntl.LOCK_EX)",
}

PROGRAMS = {
    "a folder of mode 0 that is full": BEGIN
    + """
os.chdir("..")
for depth in range(3):
    os.mkdir("hidden"); os.chdir("hidden")
    open("data", "wb").write(bytes(2**18))
for depth in range(3):
    os.chmod(".", 0); os.chdir("..")
""",
    "folders deeper than any path": BEGIN
    + """
os.chdir("..")
for depth in range(600):
    os.mkdir("d" * 60); os.chdir("d" * 60)
open("data", "w").close()
""",
    "as many files as there can be": BEGIN
    + """
os.chdir("..")
try:
    for number in range(10**5): os.symlink("/etc", f"link{number}")
except OSError: pass
""",
    "names that are no text": BEGIN
    + """
os.chdir(b"..")
for name in (b"\\xff\\xfe", b"\\n", b"\\x1b[2J", b"-rf", b"0", b"1", b" "):
    os.mkdir(name); os.mkdir(name + b"/" + name); os.chmod(name, 0)
""",
    "links to what it must not empty": BEGIN
    + """
os.chdir("..")
os.symlink("/", "root"); os.symlink("..", "up"); os.symlink("self", "self")
""",
    "pipes and sockets for files": BEGIN
    + """
os.chdir("..")
os.mkfifo("fifo"); os.chmod("fifo", 0)
""",
    "shared memory for ever": BEGIN
    + """
with open("/dev/shm/left", "wb") as file:
    try: file.write(bytes(2**24))
    except OSError: pass
os.chmod("/dev/shm", 0)
""",
    "its own folder away": BEGIN + "os.rename(os.getcwd(), '../moved'); os.symlink('/', os.environ['HOME'])",
    "the sandbox's folder closed": BEGIN + "os.chmod('..', 0)",
    "its judge stopped": BEGIN + "os.kill(os.getppid(), signal.SIGTERM); os.kill(os.getppid(), signal.SIGINT)",
    "threads without end": BEGIN
    + """
try:
    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError: pass
os._exit(0)
""",
    "many processes": BEGIN
    + """
try:
    for _ in range(60):
        if os.fork() == 0: os.setsid(); time.sleep(60)
except OSError: pass
time.sleep(60)
""",
    "descriptors sent to itself": BEGIN
    + """
one, other = socket.socketpair()
for _ in range(200):
    try: socket.send_fds(one, [b"x"], [one.fileno(), other.fileno()])
    except OSError: break
""",
    "queued signals": BEGIN
    + """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
for _ in range(10**4): os.kill(os.getpid(), 40)
""",
    "output without end": "while True: print('x' * 2**16)",
    "an input that is read for ever": "while True: open(0, closefd=False).read()",
    "NUL and half characters": "import os; os.write(1, b'\\0\\xff\\xed\\xa0\\x80' * 1000)",
    "a hole of a terabyte": BEGIN + "os.lseek(1, 2**40, 0); os.write(1, b'7')",
    "numbers without end": "print(9**9**9)",
    "text that is not UTF-8": "# -*- coding: utf-7 -*-\nprint('+AGE-')",
    "a right answer and an error": "print(7); raise SystemExit(1)",
    "a right answer by a child that stays": BEGIN
    + "print(7, flush=True)\nif os.fork() == 0: time.sleep(60)\nos._exit(1)",
}


def fenced(program: str, tests: object = TESTS) -> RewardItem:
    return item(f"```python\n{program}\n```", tests=tests)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    sandbox = SandboxConfig(max_processes=32, max_file_gib=2**-8, max_memory_gib=1.0)
    terms = (CodeReward(kind="code", tests_timeout_s=1.0),)
    with RewardPool(RewardConfig(terms=terms, timeout_s=4.0, sandbox=sandbox)) as opened:
        yield opened


def survived(pool: RewardPool, *attacks: str) -> list[RewardOutcome]:
    """The outcomes of attacks, after all of which right and wrong programs are told apart as ever."""
    outcomes = outcomes_of(pool, *map(fenced, attacks))
    after = outcomes_of(pool, *(fenced(program) for program in (RIGHT, WRONG, RIGHT)))
    assert [(outcome.reward, outcome.failure) for outcome in after] == [(1.0, None), (0.0, None), (1.0, None)]
    assert all(outcome.reward == 0.0 for outcome in outcomes)
    return outcomes


@pytest.mark.parametrize("name", LEAVES)
def test_nothing_that_a_program_leaves_reaches_the_next(pool: RewardPool, name: str) -> None:
    if pool.unprotected:
        pytest.skip("; ".join(pool.unprotected))
    survived(pool, detached(LEAVES[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_does_to_its_folder_and_its_judge_ends_with_it(pool: RewardPool, name: str) -> None:
    if pool.unprotected:
        pytest.skip("; ".join(pool.unprotected))
    survived(pool, PROGRAMS[name])


def test_no_process_is_left_while_the_worker_lives(pool: RewardPool) -> None:
    if pool.unprotected:
        pytest.skip("; ".join(pool.unprotected))
    survived(pool, detached("subprocess.Popen(['sleep', '600.7'], start_new_session=True); time.sleep(600)"))
    assert not running("sleep", "600.7")


def test_shared_memory_is_empty_for_the_next(pool: RewardPool) -> None:
    if pool.unprotected:
        pytest.skip("; ".join(pool.unprotected))
    survived(pool, PROGRAMS["shared memory for ever"])
    locks = "import multiprocessing\nwith multiprocessing.Lock(): " + RIGHT
    (outcome,) = outcomes_of(pool, fenced(locks))
    assert outcome.reward == 1.0


@pytest.mark.parametrize("name", ["forges the next programs", "kills the next programs", "keeps the folder full"])
def test_a_tools_program_does_not_reach_episodes_that_begin_when_none_is_open(name: str) -> None:
    source = ToolsEnvironment(kind="tools", tools=(PythonTool(kind="python", timeout_s=1.0),))
    sandbox = SandboxConfig(max_file_gib=2**-8)
    with EnvironmentClient(EnvironmentConfig(source=source, sandbox=sandbox)) as client:
        if client.unprotected:
            pytest.skip("; ".join(client.unprotected))
        run_by_tool(client, detached(LEAVES[name]))
        printed = [run_by_tool(client, WRONG) for _ in range(3)]
    assert printed == ["8\n"] * 3


def run_by_tool(client: EnvironmentClient, program: str) -> str:
    """Return the tool's answer to the one call of an episode, or the reason why there is none."""
    episode = client.open(EpisodeStart(prompt="p", answer=None, task="default", metadata={}, seed=0))
    episode.reset().result()
    call = ToolCall(name="python", arguments={"code": program})
    answer = episode.step(Action(text="", tool_calls=(call,))).result()
    episode.close()
    return str(answer.messages[0]["content"]) if isinstance(answer, Observation) else answer.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_attacks_leaves_right_and_wrong_apart(seed: int) -> None:
    attacks = [*map(detached, LEAVES.values()), *PROGRAMS.values()] * 2
    random.Random(seed).shuffle(attacks)
    terms = (CodeReward(kind="code", tests_timeout_s=1.0),)
    with RewardPool(RewardConfig(terms=terms, timeout_s=4.0, num_workers=2)) as pool:
        if pool.unprotected:
            pytest.skip("; ".join(pool.unprotected))
        programs = [program for attack in attacks for program in (attack, RIGHT, WRONG)]
        outcomes = outcomes_of(pool, *map(fenced, programs))
    assert [(outcome.reward, outcome.failure) for outcome in outcomes[1::3]] == [(1.0, None)] * len(attacks)
    assert [(outcome.reward, outcome.failure) for outcome in outcomes[2::3]] == [(0.0, None)] * len(attacks)


# What a program may not do at all. It prints 7, and so is rewarded, only if it could.
CALLS = {
    "SysV shared memory": "assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0",
    "SysV semaphores": "assert ctypes.CDLL(None).semget(0, 1, 0o1600) >= 0",
    "SysV messages": "assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    "POSIX messages": "assert ctypes.CDLL('librt.so.1').mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0",
    "a file in memory": "os.memfd_create('x')",
    "keys of the kernel": "assert ctypes.CDLL(None).syscall(250 if X86 else 219, 0, -3, 1) >= 0",
    "a user namespace": "assert ctypes.CDLL(None).unshare(0x10000000) >= 0",
    "a cloned namespace": "assert ctypes.CDLL(None).syscall(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "another's namespace": "assert ctypes.CDLL(None).setns(os.open('/proc/self/ns/net', 0), 0) >= 0",
    "a child of its judge's": "assert ctypes.CDLL(None).syscall(56 if X86 else 220, 0x8000 | 17, 0, 0, 0, 0) >= 0",
    "a trace": "assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) >= 0",
    "memory of its judge's": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "a datagram": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a packet": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "a connection": "socket.create_connection(('127.0.0.1', 9), 1)",
    "a socket of the kernel's": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a virtual machine's socket": "socket.socket(40, socket.SOCK_STREAM)",
    "programs for the kernel": "assert ctypes.CDLL(None).syscall(321 if X86 else 280, 0, 0, 0) >= 0",
    "the performance counters": "assert ctypes.CDLL(None).syscall(298 if X86 else 241, 0, 0, -1, -1, 0) >= 0",
    "what belongs to processes": """
def refused(x86, other, *arguments): return ctypes.CDLL(None).syscall(x86 if X86 else other, *arguments) < 0
number = ctypes.c_uint64(1)
me, handle, here = os.getpid(), os.pidfd_open(os.getpid()), (ctypes.c_size_t * 2)(ctypes.addressof(number), 8)
assert not all([
    refused(310, 270, me, here, 1, here, 1, 0), refused(311, 271, me, here, 1, here, 1, 0),
    refused(438, 438, handle, 0, 0), refused(312, 272, me, me, 1, 0, 0), refused(447, 447, 0),
    refused(248, 217, b"user", b"name", b"x", 1, -3), refused(249, 218, b"user", b"name", None, -3),
])
""",
    "page faults": "assert ctypes.CDLL(None).syscall(323 if X86 else 282, 0) >= 0",
    "io_uring": "assert ctypes.CDLL(None).syscall(425, 1, bytes(120)) >= 0",
    "an x32 call": "assert X86 and ctypes.CDLL(None).syscall(0x40000000 + 39) >= 0",
    "a new root": "os.chroot('.')",
    "a device": "os.mknod('null', 0o20666, os.makedev(1, 3)); open('null', 'w')",
    "a mount": "assert ctypes.CDLL(None).mount(b'x', b'.', b'tmpfs', 0, None) >= 0",
    "a file outside": "open('/var/tmp/spmdrl-attack', 'w')",
    "a folder outside": "os.mkdir('/var/tmp/spmdrl-attack')",
    "a removal outside": "os.unlink(FIFO)",
    "a core dump": "resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
    "a pipe outside": "os.close(os.open(FIFO, os.O_RDWR))",
    "the trainer's terminal": "assert [open(f'/dev/pts/{t}', 'w') for t in os.listdir('/dev/pts') if t.isdigit()]",
    "the kernel's log": "open('/dev/kmsg', 'w')",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "a signal to the trainer": "os.kill(TRAINER, 0)",
    "a signal to the first process": "os.kill(1, 0)",
    "a handle of the trainer": "os.pidfd_open(TRAINER)",
    "the trainer's variables": "open(f'/proc/{TRAINER}/environ', 'rb').read()",
    "the trainer's descriptors": "os.readlink(f'/proc/{TRAINER}/fd/0')",
    "the trainer's folder": "os.listdir(f'/proc/{TRAINER}/cwd')",
    "the trainer's order of death": "open(f'/proc/{TRAINER}/oom_score_adj', 'w')",
    "the priority of the trainer": "os.setpriority(os.PRIO_PROCESS, TRAINER, 19)",
    "the processors of the trainer": "os.sched_setaffinity(TRAINER, {0})",
    "the limits of the trainer": "resource.prlimit(TRAINER, resource.RLIMIT_CPU, (1, 1))",
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_program_may_not_do(pool: RewardPool, name: str, tmp_path: Path) -> None:
    if pool.unprotected:
        pytest.skip("; ".join(pool.unprotected))
    os.mkfifo(tmp_path / "fifo")
    given = f"TRAINER, FIFO, X86 = {os.getpid()}, {str(tmp_path / 'fifo')!r}, os.uname().machine == 'x86_64'\n"
    (outcome,) = outcomes_of(pool, fenced(f"{BEGIN}{given}{CALLS[name]}\nprint(7)"))
    assert outcome == RewardOutcome(reward=0.0, parts={"code": 0.0})


ORDINARY = {
    "threads": "import threading\none = threading.Thread(target=lambda: None)\none.start(); one.join()\n" + RIGHT,
    "processes": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'pass'], check=True)\n" + RIGHT,
    "a pool": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: pool.map(abs, [1])\n" + RIGHT,
    "asyncio": "import asyncio\nasyncio.run(asyncio.sleep(0))\n" + RIGHT,
    "a shell": "import os\nassert os.system('echo 1 | cat >file && test -s file') == 0\n" + RIGHT,
    "shared memory": "from multiprocessing.shared_memory import *\ns = SharedMemory(create=True, size=9); s.unlink()\n"
    + RIGHT,
    "temporary files": "import tempfile\ntempfile.TemporaryFile().write(b'x')\ntempfile.mkdtemp()\n" + RIGHT,
    "callbacks": "import ctypes\nassert ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 3)() == 3\n" + RIGHT,
    "/dev/null": "open('/dev/null', 'w').write('x')\nimport os; os.urandom(3)\n" + RIGHT,
    "moving folders": "import os\nos.makedirs('a/b'); os.rename('a/b', 'c')\n" + RIGHT,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_notice_nothing(pool: RewardPool, name: str) -> None:
    (outcome,) = outcomes_of(pool, fenced(ORDINARY[name]))
    assert outcome == RewardOutcome(reward=1.0, parts={"code": 1.0})
