"""Environments of verifiers: what the policy reads is what the package's own rollout would let it read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs.agent import AgentClient
from spmdrl.envs.protocol import EnvironmentFailure
from spmdrl.envs.verifiers_process import _failure
from spmdrl.faults.verdict import list_problems
from spmdrl.types import UserError
from tests.helpers.config_file import GOOD

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests/helpers"
PYTHON = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers/bin/python"))
needs_verifiers = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="there is no .venv-verifiers; `make setup-verifiers` makes it"
)


def config(python: str = PYTHON, **source: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate(
        {
            "source": {"kind": "verifiers", "env": "verifiers_env", "python": python} | source,
            "sandbox": {"mode": "off"},
            "step_timeout_s": 120.0,
        }
    )


def row(number: int) -> dict[str, Any]:
    """A task of the tests' environment, as rows have it: a sum, a capital, an error, a wait."""
    tasks: list[dict[str, Any]] = [
        {"prompt": "How much is 1 + 1?", "answer": "2"},
        {"prompt": "The capital of Peru?", "system_prompt": "Be brief.", "answer": "Lima", "has_tool": True},
        {"prompt": "Why?", "answer": "unknown"},
        {"prompt": "Wait.", "answer": "", "waits": True},
    ]
    return tasks[number]


def start_of(data: dict[str, Any] | None) -> EpisodeStart:
    return EpisodeStart(
        prompt="shown", answer=None, task="default", metadata={} if data is None else {"task_data": data}, seed=3
    )


def episode(client: AgentClient, data: dict[str, Any] | None, *actions: Action) -> list[Any]:
    """Everything that the environment answers: to the reset, and to each action."""
    opened = client.open(start_of(data))
    try:
        return [opened.reset().result(), *(opened.step(action).result() for action in actions)]
    finally:
        opened.close()


def own_rollout(folder: Path, data: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Run verifiers itself: return what a model reads that answers so, and the reward."""
    command = [PYTHON, "-P", str(HELPERS / "verifiers_rollout.py"), "verifiers_env"]
    done = subprocess.run(
        [*command, json.dumps(data), json.dumps(answers)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, which has the environment's module."""
    path, before = tmp_path_factory.mktemp("verifiers"), Path.cwd()
    shutil.copy(HELPERS / "verifiers_env.py", path)
    os.chdir(path)
    yield path
    os.chdir(before)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[AgentClient]:
    os.environ["WAITING"] = str(folder / "waiting")
    try:
        with AgentClient(config()) as opened:
            yield opened
    finally:
        del os.environ["WAITING"]


@needs_verifiers
@pytest.mark.slow
@pytest.mark.parametrize("answer", ["2", "3"])
def test_a_single_turn_is_that_of_verifiers(client: AgentClient, folder: Path, answer: str) -> None:
    first, end = episode(client, row(0), Action(text=answer))
    own = own_rollout(folder, row(0), [{"content": answer}])
    assert own["read"] == [{"messages": list(first.messages), "tools": list(first.tools)}]
    assert (end.done, end.reward) == (True, own["reward"]) == (True, 0.5 if answer == "2" else 0.0)
    assert end.metrics == own["metrics"] | {"is_right": own["reward"], "malformed_calls": 0, "refused_calls": 0}


@needs_verifiers
@pytest.mark.slow
def test_a_conversation_with_a_tool_is_that_of_verifiers(client: AgentClient, folder: Path) -> None:
    call = ToolCall(name="lookup", arguments={"country": "Peru"})
    first, second, end = episode(client, row(1), Action(text="", tool_calls=(call,)), Action(text="It is Lima."))
    written = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"country": "Peru"}'}}
    own = own_rollout(folder, row(1), [{"content": "", "tool_calls": [written]}, {"content": "It is Lima."}])
    assert [len(call["messages"]) for call in own["read"]] == [2, 4]
    assert own["read"][0] == {"messages": list(first.messages), "tools": list(first.tools)}
    said = own["read"][1]["messages"][-1]
    assert [(message["role"], message["content"]) for message in second.messages] == [(said["role"], said["content"])]
    assert second.branch is None, "it goes on with the tokens so far"
    assert (end.done, end.reward) == (True, own["reward"]) == (True, 0.5)
    assert end.metrics["turns"] == own["metrics"]["turns"] == 2.0


@needs_verifiers
@pytest.mark.slow
def test_episodes_are_open_at_once_and_do_not_mix(client: AgentClient) -> None:
    opened = [client.open(start_of({"prompt": f"Say {number}.", "answer": str(number)})) for number in range(4)]
    firsts = [future.result() for future in [one.reset() for one in opened]]
    assert [first.messages[0]["content"] for first in firsts] == [f"Say {number}." for number in range(4)]
    ends = [future.result() for future in [one.step(Action(text=str(i % 2))) for i, one in enumerate(opened)]]
    assert [end.reward for end in ends] == [0.5, 0.5, 0.0, 0.0]
    for one in opened:
        one.close()


@needs_verifiers
@pytest.mark.slow
def test_an_episode_goes_on_after_its_run_was_killed(client: AgentClient) -> None:
    call = Action(text="", tool_calls=(ToolCall(name="lookup", arguments={"country": "Peru"}),))
    initial_observation, second = episode(client, row(1), call)
    resumed = client.open(start_of(row(1)), history=[(call, second)], initial_observation=initial_observation)
    assert resumed.step(Action(text="Lima")).result().reward == 0.5
    resumed.close()


@needs_verifiers
@pytest.mark.slow
def test_failures_are_those_of_the_episode_alone(client: AgentClient) -> None:
    _, end = episode(client, row(2), Action(text="because"))
    assert isinstance(end, EnvironmentFailure) and end.kind == "error"
    assert "TaskError" in end.reason and "no one knows the answer" in end.reason
    (end,) = episode(client, None)
    assert isinstance(end, EnvironmentFailure) and "has no column task_data" in end.reason
    assert episode(client, row(0), Action(text="2"))[-1].reward == 0.5


@needs_verifiers
@pytest.mark.slow
def test_an_episode_that_is_closed_ends_with_all_that_it_has_started(client: AgentClient, folder: Path) -> None:
    (first,) = episode(client, row(3))  # closed in the middle
    assert isinstance(first, Observation)
    pids = [int(pid) for pid in (folder / "waiting").read_text(encoding="utf-8").split()]
    assert len(pids) == 2
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "they still run"
        time.sleep(0.05)


@needs_verifiers
@pytest.mark.slow
def test_the_environment_of_the_documentation_runs(folder: Path) -> None:
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8").split("\n## verifiers\n")[1]
    program, settings = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "toml"))
    (folder / "capitals.py").write_text(program, encoding="utf-8")
    table = tomllib.loads(settings)["environment"]
    table["source"]["python"] = PYTHON
    with AgentClient(EnvironmentConfig.model_validate(table)) as client:
        data = {"prompt": "The capital of Peru?", "answer": "Lima"}
        first, end = episode(client, data, Action(text="It is Lima."))
    assert first.messages[-1] == {"role": "user", "content": "The capital of Peru?"}
    assert (end.done, end.reward, end.metrics["is_right"]) == (True, 1.0, 1.0)


@needs_verifiers
@pytest.mark.slow
def test_the_tool_writes_the_tasks_as_rows(folder: Path) -> None:
    settings = f"""
        [environment]
        sandbox = {{ mode = "off" }}
        [environment.source]
        kind = "verifiers"
        env = "verifiers_env"
        args = {{ taskset = {{ sums = 2 }} }}
        python = "{PYTHON}"
    """
    (folder / "run.toml").write_text(GOOD + textwrap.dedent(settings), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "spmdrl.tools.verifiers_data", "run.toml", "rows.jsonl", "--limit", "3"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote rows.jsonl: 3 rows\n"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["prompt"] for one in rows] == ["How much is 1 + 1?", "How much is 2 + 2?", "The capital of Peru?"]
    assert [one["task_data"]["answer"] for one in rows] == ["2", "4", "Lima"]


@needs_verifiers
@pytest.mark.slow
def test_an_environment_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(UserError, match=r"environment\.source cannot be loaded by .*: .*'nowhere' not found"):
        AgentClient(config(env="nowhere"))


def test_a_traceback_belongs_to_its_sentence() -> None:
    error = _failure("python", "it ended", "Traceback (most recent call last):\n  File x\n\n\nValueError: no name\n")
    assert list_problems("cannot start", str(error)) == (
        "cannot start: environment.source cannot be loaded by python: ValueError: no name\n"
        "    Traceback (most recent call last):\n      File x"
    )
    assert str(_failure("python", "it ended", " \n")) == "environment.source cannot be loaded by python: it ended"


def test_without_the_interpreter_a_sentence_says_what_makes_it() -> None:
    with pytest.raises(UserError, match=r"source\.python = nowhere/python does not exist; `make setup-verifiers`"):
        AgentClient(config(python="nowhere/python"))


def test_without_the_package_a_sentence_says_what_installs_it() -> None:
    with pytest.raises(UserError, match=r"cannot be loaded by .*: verifiers is not installed .*`make setup-verifiers`"):
        AgentClient(config(python=sys.executable))


@pytest.mark.parametrize(("setting", "value"), [("sandbox", {"mode": "auto"}), ("history", "template")])
def test_settings_that_it_cannot_keep_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r'source\.kind = "verifiers"'):
        EnvironmentConfig.model_validate(config().model_dump() | {setting: value})
