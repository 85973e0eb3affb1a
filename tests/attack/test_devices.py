"""Terminals, virtual machines and other devices: a program can neither open them nor set them by ioctl.

Nor does it become another user by a set-user-id program.

Each wall alone is tried too, because no machine has all of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import CodeReward, RewardConfig
from spmdrl.config.environment import (
    ClassEnvironment,
    EnvironmentConfig,
    EnvironmentSource,
    PythonTool,
    ToolsEnvironment,
)
from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs.client import EnvironmentClient
from spmdrl.rewards.client import RewardPool
from spmdrl.types import RewardOutcome
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item, python_path

TYPED = b"secret\n"
# `successes(terminal)` gives the names of the attacks that succeeded. A file that is opened with 3 can neither be read
# nor written, and takes ioctl.
ATTACKS = r"""
import contextlib, fcntl, glob, os, struct, termios

def set_terminal(file):
    settings = termios.tcgetattr(file)
    settings[3] &= ~(termios.ECHO | termios.ISIG)
    termios.tcsetattr(file, termios.TCSANOW, settings)

TERMINAL = {
    "typed text": lambda file: os.read(file, 100),
    "settings": set_terminal,
    "window": lambda file: fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", 1, 1, 0, 0)),
    "control": lambda file: fcntl.ioctl(file, termios.TIOCSCTTY, 0),
    "input": lambda file: fcntl.ioctl(file, termios.TIOCSTI, b"x"),
    "console": lambda file: fcntl.ioctl(file, 0x541C, b"\x06"),
}
DEVICES = {
    "/dev/kvm": lambda file: fcntl.ioctl(file, 0xAE01, 0),
    "/dev/userfaultfd": lambda file: fcntl.ioctl(file, 0xAA00, 0),
    "/dev/loop-control": lambda file: fcntl.ioctl(file, 0x4C82),
    "/dev/kmsg": lambda file: os.read(file, 100),
    "/dev/ptmx": lambda file: fcntl.ioctl(file, 0x80045430, bytes(4)),
    **{f"/dev/{os.path.basename(disk)}": lambda file: os.read(file, 512) for disk in glob.glob("/sys/class/block/*")},
}

def successes(terminal):
    found = set()
    with contextlib.suppress(OSError):
        os.setsid()
    tries = [(terminal, name, attack) for name, attack in TERMINAL.items()] + [(d, d, a) for d, a in DEVICES.items()]
    for place, name, attack in tries:
        for flags in (os.O_RDONLY, 3):
            with contextlib.suppress(OSError, termios.error):
                attack(os.open(place, flags | os.O_NONBLOCK | (os.O_NOCTTY if name != "control" else 0)))
                found.add(name)
    return sorted(found)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A terminal that nobody controls, in which something was typed."""

    ours: int
    theirs: int
    path: str

    def is_untouched(self) -> bool:
        """True when its settings and size are as they were, and what was typed can still be read."""
        flags = termios.tcgetattr(self.theirs)[3]
        size = fcntl.ioctl(self.theirs, termios.TIOCGWINSZ, bytes(8))
        os.set_blocking(self.theirs, False)
        is_set = bool(flags & termios.ECHO and flags & termios.ISIG) and struct.unpack("HHHH", size) == (24, 80, 0, 0)
        return is_set and os.read(self.theirs, 100) == TYPED


@pytest.fixture
def terminal() -> Iterator[Pair]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.write(ours, TYPED)
    yield Pair(ours=ours, theirs=theirs, path=os.ttyname(theirs))
    os.close(ours)
    os.close(theirs)


# Each combination of walls and user is a fork of one process, with a terminal of its own.
WALLS = """
import json, os, pty, socket, subprocess, sys
from spmdrl.workers import sandbox
from spmdrl.workers.sandbox import Sandbox, enter

limits = {"max_memory_bytes": 2**31, "max_processes": 9, "max_file_bytes": 2**20, "max_open_files": 64}
folder, root_id, source = sys.argv[1:]  # the second is a program of root's with set-user-id, which names its user
exec(source)

def nothing(name):
    setattr(sandbox, name, {"_problem_of": lambda _: "absent", "fence": lambda _: 0, "refuse_system_calls": list}[name])

MISSING = {
    "all walls": (),
    "no namespaces": ("_problem_of",),
    "namespaces alone": ("fence", "refuse_system_calls"),
    "Landlock alone": ("_problem_of", "refuse_system_calls"),
    "filter alone": ("_problem_of", "fence"),
}
for user in (0, 65534) if os.getuid() == 0 else (os.getuid(),):
    for name, missing in {"no walls": None, **MISSING}.items():
        ours, theirs = pty.openpty()
        path = os.ttyname(theirs)
        os.write(ours, b"typed\\n")
        if os.getuid() != user:
            os.chown(path, user, user)
        child = os.fork()
        if child == 0:
            os.close(ours), os.close(theirs)
            if os.getuid() != user:
                os.setgroups([]), os.setgid(user), os.setuid(user)
                sandbox.call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is ours again
            unprotected = []
            if missing is not None:
                for wall in missing:
                    nothing(wall)
                pipe, other = socket.socketpair()
                other.close()
                inside = Sandbox(setting="s", folder=folder, is_strict=False, **limits)
                unprotected = enter(inside, pipe.fileno()).missing
            found = successes(path)
            if user and subprocess.run([root_id, "-u"], capture_output=True).stdout == b"0\\n":
                found.append("another user")
            print(json.dumps([name, user, found, unprotected]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(ours), os.close(theirs)
"""
READS = {"typed text", "/dev/kmsg"}  # no ioctl, so that no filter of requests sees them


def test_each_wall_alone_keeps_devices_out(tmp_path: Path) -> None:
    for place in (tmp_path, *(one for one in tmp_path.parents if one.name.startswith(("pytest-", "popen-")))):
        place.chmod(0o755)  # another user comes in
    folder, root_id = tmp_path / "folder", tmp_path / "id"
    folder.mkdir()
    shutil.copy(shutil.which("id") or "", root_id)
    root_id.chmod(0o4755)
    command = [sys.executable, "-c", WALLS, str(folder), str(root_id), ATTACKS]
    environment = os.environ | python_path()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, start_new_session=True)
    assert done.stderr == ""
    seen: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        name, _, *found = json.loads(line)
        seen.setdefault(name, []).append(found)
    users = 2 if os.getuid() == 0 else 1
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, users) and len(seen) == 6
    assert all({"typed text", "settings", "window", "control"} <= {*found} for found, _ in seen["no walls"])
    assert os.getuid() or "another user" in seen["no walls"][1][0]
    for name, results in seen.items():
        for found, unprotected in results:
            if name == "filter alone":
                assert {one for one in found if not os.path.exists(f"/sys/class/block/{Path(one).name}")} <= READS
            elif name != "no walls" and not any(sentence.startswith("files") for sentence in unprotected):
                assert found == [], (name, unprotected)


def test_a_rewards_program_cannot_set_or_read_a_terminal(terminal: Pair) -> None:
    terms = (CodeReward(kind="code"),)
    program = f"```python\n{ATTACKS}\nprint(7 if successes({terminal.path!r}) else 8)\n```"
    with RewardPool(RewardConfig(terms=terms)) as pool:
        if pool.unprotected:
            pytest.skip("; ".join(pool.unprotected))
        outcome, control = outcomes_of(
            pool, *(item(program, tests=[{"input": "", "output": printed}]) for printed in ("7", "8"))
        )
    assert outcome == RewardOutcome(reward=0.0, parts={"code": 0.0}) and control.reward == 1.0
    assert terminal.is_untouched()


@pytest.mark.parametrize("kind", ["tools", "class"])
def test_an_environment_cannot_set_or_read_a_terminal(kind: str, terminal: Pair, tmp_path: Path) -> None:
    attack = f"{ATTACKS}\nprinted = str(successes({terminal.path!r}))\n"
    (tmp_path / "attacker.py").write_text(
        f"{attack}\nclass Env:\n    def reset(self): pass\n    def step(self, text): return printed, 0.5, False\n"
    )
    source: EnvironmentSource = ClassEnvironment(kind="class", name=f"{tmp_path / 'attacker.py'}:Env")
    calls: tuple[ToolCall, ...] = ()
    if kind == "tools":
        source = ToolsEnvironment(kind="tools", tools=(PythonTool(kind="python"),))
        calls = (ToolCall(name="python", arguments={"code": f"{attack}\nprint(printed)"}),)
    with EnvironmentClient(EnvironmentConfig(source=source)) as client:
        if client.unprotected:
            pytest.skip("; ".join(client.unprotected))
        episode = client.open(EpisodeStart(prompt="p", answer=None, task="default", metadata={}, seed=0))
        episode.reset().result()
        answer = episode.step(Action(text="", tool_calls=calls)).result()
        episode.close()
    assert isinstance(answer, Observation) and str(answer.messages[0]["content"]).strip() == "[]"
    assert terminal.is_untouched()
