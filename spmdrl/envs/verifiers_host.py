"""Serves an environment of verifiers, in the virtual environment that has the package.

    python -P verifiers_host.py serve SOURCE SOCKET     runs episodes, each in a fork of this process
    python -P verifiers_host.py rows SOURCE LIMIT       prints the first tasks as rows of a JSON-lines file

SOURCE is the configuration's `environment.source`, as JSON. It imports nothing of spmdrl. It needs `-P` because modules
next to it have the names of packages. To import verifiers takes seconds, and to fork milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "policy"
_MAX_REQUEST_BYTES = 65536
_GUARD = runpy.run_path(str(Path(__file__).parents[1] / "faults/guard.py"))


def main(verb: str, source: str, argument: str) -> None:
    """Run one of the two commands. Exits with a sentence where verifiers is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        sys.exit("verifiers is not installed there; run `make setup-verifiers`, which makes .venv-verifiers")
    environment = load(json.loads(source))
    if verb == "serve":
        serve(environment, argument)
    for row in itertools.islice(rows(environment), int(argument)):
        print(json.dumps(row))


def load(source: dict[str, Any]) -> Any:
    """Make the `verifiers.v1.Env` of a source.

    Agents run on this machine and have the task's tools alone, unless the environment or the source has others:
    verifiers itself would take a sandbox of its authors' service, and give the model a shell.
    """
    import verifiers.v1 as vf

    name, config = source["env"], dict(source["args"])
    config["taskset"] = {**config.get("taskset", {}), "id": name}
    kind = vf.env_config_type(name, config.get("id", ""))
    for role, field in kind.model_fields.items():
        seat = field.default
        if isinstance(seat, vf.AgentConfig):
            given = config[role] = dict(config.get(role, {}))
            if "runtime" not in seat.model_fields_set:
                given.setdefault("runtime", {"type": "subprocess"})
            if seat.harness is None and vf.default_harness_id(name) == "bash":
                given.setdefault("harness", {"id": "null"})
    return vf.load_environment(kind.model_validate(config))


def rows(environment: Any) -> Iterator[dict[str, Any]]:
    """Yield the environment's tasks. An episode is made of `task_data` alone; `prompt` is for who reads the run."""
    for task in environment.taskset:
        data = task.data.model_dump(mode="json", exclude_none=True)
        yield {"prompt": task.data.prompt_text or f"task {task.data.idx}", "answer": "", "task_data": data}


def serve(environment: Any, address: str) -> None:
    """Run an episode for each connection, for ever. Its socket appears when it listens."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(socket.SOMAXCONN)
    gc.freeze()  # the forks share what is loaded for as long as they do not write to it
    os.rename(f"{address}.new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the forks
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):  # a fork must never come back to this loop
                listener.close()
                attend(connection, environment)
            os._exit(0)
        connection.close()


def attend(connection: socket.socket, environment: Any) -> None:
    """Run the episode that the other side asks for, and tell its exit code. It is ended when they hang up."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _GUARD["adopt_orphans"]()
    request, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            connection.close()
            code = run(environment, json.loads(request), streams)
        finally:
            os._exit(code)
    ended = os.pidfd_open(child)
    select.select([connection.fileno(), ended], [], [])
    _GUARD["kill_group"](child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _GUARD["kill_children"]()
    connection.sendall(bytes([code if code >= 0 else 128 - code]))


def run(environment: Any, request: dict[str, Any], streams: list[int]) -> int:
    """Run an episode in this process, with the variables, folder and output of its program; returns the exit code."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    tempfile.tempdir = None  # it has cached the one of this process
    random.seed(int(os.environ["SPMDRL_SEED"]))
    try:
        asyncio.run(play(environment))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


async def play(environment: Any) -> None:
    """Run an episode whose model is the policy, and report its reward. Raises RuntimeError when the episode fails."""
    import verifiers.v1 as vf

    start = json.loads(Path(os.environ["SPMDRL_EPISODE"]).read_text(encoding="utf-8"))
    if "task_data" not in start["metadata"]:
        raise RuntimeError("the row has no column task_data; write the rows with spmdrl.tools.verifiers_data")
    task_type = type(environment.taskset).task_type()
    data = task_type.data_type().model_validate(start["metadata"]["task_data"])
    url = os.environ["OPENAI_BASE_URL"]
    policy = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task_type(data, environment.config.taskset.task), vf.ModelContext(model=MODEL, client=policy)
        )
    if not episode.ok:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == url:
            raise RuntimeError(
                f"the agent {trace.agent.name!r} is not to be trained, but the policy speaks for it; give it another "
                f"model with environment.source.args.{trace.agent.name} = {{ model = ..., client = {{ ... }} }}"
            )
    report([trace for trace in episode.traces if trace.agent.trainable])


def report(traces: list[Any]) -> None:
    """Send the sum of the traces' rewards, and all that they have measured."""
    metrics: dict[str, float] = {}
    for trace in traces:
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    body = json.dumps({"reward": sum(trace.reward for trace in traces), "metrics": metrics}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/reward", body, headers)).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
