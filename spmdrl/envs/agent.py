"""Agents as environments: what a program asks of an OpenAI-compatible server is what the policy reads."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from spmdrl.config import EnvironmentConfig
from spmdrl.config.environment import AgentEnvironment, VerifiersEnvironment
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.agent_run import Agent, AgentRun, Log
from spmdrl.envs.endpoint import HOST, Endpoint
from spmdrl.envs.protocol import Answer, EnvironmentFailure, MetricNames
from spmdrl.envs.verifiers_process import LOAD_S, VerifiersProcess
from spmdrl.types import UserError
from spmdrl.workers.folders import sweep
from spmdrl.workers.pool import all_loaded
from spmdrl.workers.process import process_variables

_END_S = 5.0  # for what still waits when all is closed

T = TypeVar("T")


class AgentClient:
    """Runs the command of `environment.source` for each episode, and the server that it calls.

    With verifiers the command asks a process that has the environment. UserError if the command does not exist, the
    port is not free, or the environment cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: EnvironmentConfig) -> None:
        source = cfg.source
        assert isinstance(source, AgentEnvironment | VerifiersEnvironment)
        variables = _agent_variables(process_variables(cfg.sandbox))
        sweep()
        self._verifiers: VerifiersProcess | None = None
        if isinstance(source, VerifiersEnvironment):
            self._verifiers = VerifiersProcess(source, variables)
            command, port, gives_answer = self._verifiers.episode_command, 0, False
        else:
            command, port, gives_answer = _command(source.command), source.port, source.gives_answer
        self.tools: list[dict[str, Any]] = []  # they come with each call
        self.gives_rewards = True
        self.unprotected: list[str] = []  # there is no sandbox
        self._runs: set[AgentRun] = set()  # in the loop's thread only
        self._endpoint = Endpoint(port)
        if source.max_open > self._endpoint.max_clients:
            raise UserError(
                f"environment.source.max_open = {source.max_open}, but under this `ulimit -n` the server of agents has "
                f"{self._endpoint.max_clients} connections; set it to at most that, or raise the limit"
            )
        self._agent = Agent(
            endpoint=self._endpoint,
            names=MetricNames(),
            command=command,
            variables=variables,
            gives_answer=gives_answer,
            limit_s=cfg.step_timeout_s,
            max_characters=cfg.max_observation_characters,
        )
        self._limit_s = cfg.step_timeout_s
        self._program = f"environment.source.{'env' if self._verifiers else 'command'}"  # as messages name it
        self._loop = asyncio.new_event_loop()
        # Linux's parent-death signal arrives when the thread that started a process ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        try:
            all_loaded([self.submit(self._start())], "environment.source", [source], limit_s=LOAD_S)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def check(self, start: EpisodeStart) -> Observation:
        """Begin an episode and end it. Raises UserError, with what the agent printed, when there is no first call."""
        opened = self.open(start)
        answer = opened.reset().result()
        opened.close()
        if isinstance(answer, Observation):
            return answer
        if answer.kind == "timeout":
            raise UserError(
                f"{self._program} has not called the policy within environment.step_timeout_s = "
                f"{self._limit_s:g} seconds; it must call {self._endpoint.url}, which it finds in OPENAI_BASE_URL"
            )
        raise UserError(f"{self._program} fails: {answer.reason}\n{answer.traceback}".rstrip())

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        greeting: Observation | None = None,
    ) -> OpenAgent:
        """Open an episode. With a greeting, the command runs again up to the end of the history."""
        assert greeting is not None or not history, "an episode begins with a reset"
        log: Log = [] if greeting is None else [(None, greeting), *history]
        return OpenAgent(self, AgentRun(self._agent, start, log))

    def close(self) -> None:
        """End all runs, and the server."""
        if not self.is_closed:
            self.submit(self._end()).result()
            self._stop()

    @property
    def is_closed(self) -> bool:
        """True when nothing can be asked any more."""
        return self._loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread of the server."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def ask(self, run: AgentRun, action: Action | None) -> Answer:
        """Ask a run, which is ended with the others when the client is closed."""
        self._runs.add(run)
        return await run.ask(action)

    async def end(self, run: AgentRun) -> None:
        """End a run."""
        self._runs.discard(run)
        await run.close()

    async def _start(self) -> None:
        if self._verifiers is not None:
            await self._verifiers.start()
        await self._endpoint.start()

    async def _end(self) -> None:
        await asyncio.gather(*(run.close() for run in self._runs))
        self._runs.clear()
        if self._verifiers is not None:
            await self._verifiers.close()
        await self._endpoint.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_END_S)  # what has been closed comes to an end by itself

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OpenAgent:
    """The agent of one episode. Its futures never raise."""

    def __init__(self, client: AgentClient, run: AgentRun) -> None:
        self._client, self._run = client, run
        self._is_closed = False

    def reset(self) -> Future[Answer]:
        """Start the command, and wait for its first call."""
        return self._ask(None)

    def step(self, action: Action) -> Future[Answer]:
        """Answer its call, and wait for the next one or for its end."""
        return self._ask(action)

    def close(self) -> None:
        """End the command."""
        if not self._is_closed and not self._client.is_closed:
            self._client.submit(self._client.end(self._run))
        self._is_closed = True

    def _ask(self, action: Action | None) -> Future[Answer]:
        if not self._is_closed and not self._client.is_closed:
            return self._client.submit(self._client.ask(self._run, action))
        answer: Future[Answer] = Future()
        answer.set_result(EnvironmentFailure(kind="error", reason="closed"))
        return answer


def _command(written: Sequence[str]) -> tuple[str, ...]:
    """Return the command so that it can be run in another folder. Raises UserError when there is no such program."""
    program, *arguments = (os.path.abspath(part) if os.path.isfile(part) else part for part in written)
    if shutil.which(program) is None:
        raise UserError(
            f"environment.source.command = {list(written)}: there is no program {written[0]}; give its path, or "
            "install it"
        )
    return program, *arguments


def _agent_variables(variables: dict[str, str]) -> dict[str, str]:
    """Keep clients from asking a proxy for the server, and an agent from hashing differently each time."""
    others = variables.get("NO_PROXY") or variables.get("no_proxy")
    hosts = f"{others},{HOST}" if others else HOST
    return {"PYTHONHASHSEED": "0", **variables, "NO_PROXY": hosts, "no_proxy": hosts}
