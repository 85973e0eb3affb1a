"""Environments that start processes without end: their episode fails, and the episodes after it find room again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl.config import SandboxConfig
from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.client import EnvironmentClient
from spmdrl.envs.protocol import Answer, EnvironmentFailure
from tests.helpers.rewards import running, wait_for

# The bombs have an end, because nothing limits root's processes.
BOMBS = """
import os, subprocess, time

class Env:
    def reset(self):
        pass

    def step(self, text: str):
        if text != "good":
            globals()[text]()
        return "good", 0.5, False

def start():
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "600.6"])

def goes_off():
    for _ in range(100):
        start()

def never_gives_up():
    for _ in range(100):
        try:
            start()
        except OSError:
            pass
    time.sleep(600)

def branches():
    for _ in range(6):
        try:
            os.fork()
        except OSError:
            pass
    os.execvp("sleep", ["sleep", "600.6"])

def is_full():
    start()
    raise BlockingIOError(11, "Resource temporarily unavailable")
"""
MAX_PROCESSES, MANY = 32, 12


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentClient]:
    path = tmp_path_factory.mktemp("environments") / "bombs.py"
    path.write_text(BOMBS)
    source = ClassEnvironment(kind="class", name=f"{path}:Env")
    sandbox = SandboxConfig(max_processes=MAX_PROCESSES)
    with EnvironmentClient(EnvironmentConfig(source=source, step_timeout_s=3.0, sandbox=sandbox)) as opened:
        yield opened


def at_once(client: EnvironmentClient, *texts: str) -> list[Answer]:
    """Play one step of as many episodes at the same time, and close them."""
    start = EpisodeStart(prompt="p", answer=None, task="default", metadata={}, seed=0)
    episodes = [client.open(start) for _ in texts]
    for episode in episodes:
        assert isinstance(episode.reset().result(timeout=60), Observation)
    asked = [episode.step(Action(text=text)) for episode, text in zip(episodes, texts, strict=True)]
    answers = [future.result(timeout=60) for future in asked]
    for episode in episodes:
        episode.close()
    return answers


@pytest.mark.parametrize(
    "bomb", ["goes_off", "never_gives_up", pytest.param("branches", marks=pytest.mark.slow), "is_full"]
)
def test_a_fork_bomb_costs_its_episode_and_leaves_room_for_the_next(client: EnvironmentClient, bomb: str) -> None:
    if client.unprotected:
        pytest.skip("; ".join(client.unprotected))
    (answer,) = at_once(client, bomb)
    if bomb != "goes_off" or os.getuid() != 0:
        assert isinstance(answer, EnvironmentFailure), answer
        assert wait_for(lambda: not running("sleep", "600.6"))
    if bomb == "goes_off" and isinstance(answer, EnvironmentFailure):
        assert answer.reason.startswith("BlockingIOError")
    for _ in range(2):
        answers = at_once(client, *["good"] * MANY)
        assert [isinstance(one, Observation) and one.reward for one in answers] == [0.5] * MANY


def test_no_bomb_is_left_when_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "bombs.py").write_text(BOMBS)
    source = ClassEnvironment(kind="class", name=f"{tmp_path / 'bombs.py'}:Env")
    with EnvironmentClient(EnvironmentConfig(source=source, sandbox=SandboxConfig(max_processes=64))) as client:
        if client.unprotected:
            pytest.skip("; ".join(client.unprotected))
        at_once(client, "goes_off")
    assert wait_for(lambda: not running("sleep", "600.6"))
