"""Agents as environments: what a program asks of an OpenAI-compatible server is what the policy reads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spmdrl.config import EnvironmentConfig
from spmdrl.config.environment import AgentEnvironment, VerifiersEnvironment
from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.data.turns import message_of
from spmdrl.envs.endpoint import HOST, Endpoint, EpisodeEnded
from spmdrl.envs.forms import Call, Reply
from spmdrl.envs.observations import numbers_of, to_json
from spmdrl.envs.protocol import Answer, EnvironmentFailure, Environments, MetricNames, OpenEpisode
from spmdrl.envs.verifiers_process import LOAD_S, VerifiersProcess
from spmdrl.types import UserError
from spmdrl.workers.channel import bounded
from spmdrl.workers.folders import LockedFolder, sweep
from spmdrl.workers.pool import all_loaded
from spmdrl.workers.process import GuardedProcess, process_variables

# One episode of an agent: a run of its command, whose calls are observations and whose answers are actions.


Log = Sequence[tuple[Action | None, Observation]]  # of an episode: the reset, which has no action, and the steps
Waiting = tuple[Call, "asyncio.Future[Reply]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The parts that all runs share."""

    endpoint: Endpoint
    names: MetricNames
    command: tuple[str, ...]
    variables: Mapping[str, str]  # of its environment
    gives_answer: bool
    limit_s: float  # between an answer and the next call
    max_characters: int  # of a message


class AgentRun:
    """One run. Everything about it happens in the loop of the endpoint; its calls are answered one after another."""

    def __init__(self, agent: Agent, start: EpisodeStart, log: Log) -> None:
        """With a log it first repeats that, and must make the same calls."""
        self._agent, self._start, self._log = agent, start, log
        self._process: GuardedProcess | None = None
        self._key: str | None = None
        self._calls: asyncio.Queue[Waiting] = asyncio.Queue()
        self._open_call: Waiting | None = None  # the one that the policy is answering
        self._branches = Branches()
        self._num_replies = 0
        self._reward = 0.0  # since the last observation
        self._role_rewards: dict[str, float] = {}  # since then
        self._roles: set[str | None] = set()  # in which the policy has answered
        self._metrics: dict[str, float] = {}
        self._num_malformed = 0
        self._failure: EnvironmentFailure | None = None  # all answers from then on
        self._is_closed = False

    # What the episode asks

    async def ask(self, action: Action | None) -> Answer:
        """Give the policy's action, None for the reset, and return what the agent asks then, or why it has failed."""
        if self._failure is None and self._process is None:
            self._failure = await self._repeat()
        if self._failure is None:
            answer = await self._observe(action)
            if isinstance(answer, Observation):
                return answer
            self._failure = answer
        return self._failure

    async def _repeat(self) -> EnvironmentFailure | None:
        """Start the command, and go through the log."""
        try:
            await self._start_command()
        except (OSError, ValueError) as error:  # a prompt that is too long for an argument, or has a null character
            return _failure(f"the agent cannot be started: {error}")
        for earlier, recorded in self._log:
            again = await self._observe(earlier)
            if isinstance(again, EnvironmentFailure):
                return again
            if not _is_same(again, recorded):
                return _failure("the agent does not repeat itself: run again, it made another call")
        return None

    async def close(self) -> None:
        """End the run, if it has not ended."""
        self._is_closed = True
        self._hang_up()
        if self._process is not None:
            await self._process.close()

    # What the endpoint asks

    async def answer(self, call: Call) -> Reply:
        """Return the policy's answer to a call. Raises EpisodeEnded."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((call, reply))
        return await reply

    def refuse(self) -> None:
        """Count a call that cannot be answered."""
        self._num_malformed += 1

    def add_reward(self, reward: float, metrics: Mapping[str, float], role: str | None = None) -> None:
        """Add to the reward of the last response, or of the last one in a role. Raises ValueError for what is no number
        within bounds, and for a role in which the policy has not answered."""
        if role is not None and role not in self._roles:
            raise ValueError(f"the role is {role!r}, in which the policy has not answered")
        before = self._reward if role is None else self._role_rewards.get(role, 0.0)
        total = bounded("the reward", bounded("the reward", reward) + before)
        self._metrics = numbers_of({**self._metrics, **metrics})
        if role is None:
            self._reward = total
        else:
            self._role_rewards[role] = total

    async def _start_command(self) -> None:
        """Start the command. Raises OSError or ValueError."""
        agent = self._agent
        self._key = agent.endpoint.admit(self)
        start = self._start
        content = {"prompt": start.prompt, "task": start.task, "metadata": start.metadata, "seed": start.seed}
        written = json.dumps(content | ({"answer": start.answer} if agent.gives_answer else {}), default=str)
        folder = LockedFolder()
        file = Path(folder.path, "episode.json")
        file.write_text(written, encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": agent.endpoint.url,
            "OPENAI_API_KEY": self._key,
            "TMPDIR": folder.path,
            "SPMDRL_EPISODE": str(file),
            "SPMDRL_SEED": str(start.seed),
        }
        command = [argument.replace("{prompt}", start.prompt) for argument in agent.command]
        self._process = await GuardedProcess.start(command, {**agent.variables, **variables}, folder, cwd=folder.path)
        if self._is_closed:  # meanwhile
            await self.close()

    async def _observe(self, action: Action | None) -> Answer:
        """Answer the open call, and wait for the next one or for the end."""
        if action is not None:
            self._reply(action)
        try:
            async with asyncio.timeout(self._agent.limit_s):
                call = await self._next_call()
        except TimeoutError:
            return EnvironmentFailure(kind="timeout", reason="timeout")
        if call is None:
            return self._ended(is_reset=action is None)
        place = self._branches.place(call)
        return Observation(
            messages=tuple(self._cut(message) for message in place.messages),
            # A reward before the first response has none to belong to; the first step takes it.
            reward=0.0 if action is None else self._take_reward(),
            role=call.role,
            role_rewards=self._take_role_rewards(),
            branch=place.branch,
            tools=call.tools,
            max_tokens=call.max_tokens,
        )

    def _reply(self, action: Action) -> None:
        assert self._open_call is not None, "an action answers a call"
        call, waiting = self._open_call
        reply = Reply(number=self._num_replies, action=call.cut(action))
        self._branches.add(reply.action)
        self._roles.add(call.role)
        self._num_replies += 1
        self._open_call = None
        while waiting.done() and not self._calls.empty():  # the agent has hung up, perhaps to call again
            again, waiting = self._calls.get_nowait()
            if again != call:
                self._calls.put_nowait((again, waiting))
                return
        if not waiting.done():
            waiting.set_result(reply)

    async def _next_call(self) -> Call | None:
        """Wait for the next call of which the agent still awaits the answer; None when the command has ended."""
        assert self._process is not None
        while True:
            arriving = asyncio.ensure_future(self._calls.get())
            try:
                await asyncio.wait({arriving, self._process.ended}, return_when=asyncio.FIRST_COMPLETED)
                if self._process.ended.done():
                    return None
                self._open_call = arriving.result()
            finally:
                arriving.cancel()
            call, reply = self._open_call
            if not reply.done():
                return call

    def _ended(self, *, is_reset: bool) -> Answer:
        """Return what the command's end means."""
        assert self._process is not None
        self._hang_up()
        code, printed = self._process.ended.result(), self._process.printed()
        if self._is_closed:
            return _failure("closed")
        if code != 0:
            last = f": {printed.splitlines()[-1]}" if printed else ""
            return _failure(f"the agent ended with exit code {code}{last}", printed)
        if is_reset:
            return _failure("the agent ended without a call of the policy", printed)
        ended = self._agent.names.known(
            Observation(
                reward=self._take_reward(), role_rewards=self._take_role_rewards(), done=True, metrics=self._metrics
            )
        )
        # The calls that were refused: this run's own, and those with no open key since an episode last ended.
        endpoint = self._agent.endpoint
        refused, endpoint.num_refused = endpoint.num_refused, 0
        counts = {"malformed_calls": self._num_malformed, "refused_calls": refused}
        return dataclasses.replace(ended, metrics={**ended.metrics, **counts})

    def _take_role_rewards(self) -> dict[str, float]:
        rewards, self._role_rewards = self._role_rewards, {}
        return rewards

    def _take_reward(self) -> float:
        reward, self._reward = self._reward, 0.0
        return reward

    def _cut(self, message: Message) -> Message:
        """Cut a long text that is not the agent's own instructions."""
        if message["role"] == "system":
            return message
        written = to_json(Observation(messages=(message,)), self._agent.max_characters)
        return dict(written["messages"][0])

    def _hang_up(self) -> None:
        """Refuse the calls that wait, and those that come."""
        if self._key is not None:
            self._agent.endpoint.dismiss(self._key)
        waiting = [self._open_call] if self._open_call is not None else []
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait())
        for _, reply in waiting:
            if not reply.done():
                reply.set_exception(EpisodeEnded())


def _failure(reason: str, printed: str = "") -> EnvironmentFailure:
    return EnvironmentFailure(kind="error", reason=reason, traceback=printed)


def _is_same(one: Answer, other: Observation) -> bool:
    """Compare all but metrics, such as a duration."""
    return isinstance(one, Observation) and dataclasses.replace(one, metrics={}) == dataclasses.replace(
        other, metrics={}
    )


# Where an agent's call continues: the deepest recorded conversation that its messages begin with.
#
# Trajectories are numbered as the episode numbers them: a call that does not continue after the last turn begins one.


_APPENDED_ROLES = ("user", "tool")  # after a response; other messages are rendered with the whole conversation

Key = tuple[str, ...]  # what a message says, however a client writes it


@dataclass(frozen=True, slots=True)
class CallPlace:
    """The place of a call among the trajectories."""

    branch: tuple[int, int] | None  # as in `Observation`; (0, 0) is the beginning
    messages: tuple[Message, ...]  # those after it


@dataclass(slots=True)
class _Branch:
    tools: tuple[dict[str, Any], ...]
    turns: list[tuple[Key, ...]] = field(default_factory=list)  # the conversation up to and with each response


class Branches:
    """The conversations of one episode."""

    def __init__(self) -> None:
        self._trajectories: list[_Branch] = []
        self._asked: tuple[Key, ...] = ()

    def place(self, call: Call) -> CallPlace:
        """Find the place of a call, which is then the end of its trajectory."""
        self._asked = tuple(_key(message) for message in call.messages)
        depth, index, num_turns = max(self._matches(call), default=(0, 0, 0))
        if (index, num_turns) == self._end and depth:
            return CallPlace(None, call.messages[depth:])
        self._trajectories.append(_Branch(call.tools))
        return CallPlace((index, num_turns), call.messages[depth:])

    def add(self, action: Action) -> None:
        """Record the policy's answer to the call that was placed last."""
        self._trajectories[-1].turns.append((*self._asked, _key(message_of(action))))

    @property
    def _end(self) -> tuple[int, int]:
        """The last trajectory, and the number of its turns."""
        return len(self._trajectories) - 1, len(self._trajectories[-1].turns) if self._trajectories else 0

    def _matches(self, call: Call) -> list[tuple[int, int, int]]:
        """The recorded conversations that the call can be appended to: messages, trajectory, its turns."""
        can_append = len(call.messages)  # from here on there are only messages that can follow a response
        while can_append and call.messages[can_append - 1]["role"] in _APPENDED_ROLES:
            can_append -= 1
        return [
            (len(recorded), index, num_turns)
            for index, trajectory in enumerate(self._trajectories)
            if trajectory.tools == call.tools
            for num_turns, recorded in enumerate(trajectory.turns, start=1)
            if can_append <= len(recorded) < len(self._asked) and self._asked[: len(recorded)] == recorded
        ]


def _key(message: Message) -> Key:
    """Return what identifies a message. Clients trim answers, and write a call's arguments in their own way."""
    content = message["content"]
    if message["role"] != "assistant":
        return message["role"], content
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "assistant", content.strip(), *(json.dumps([c["name"], c["arguments"]], sort_keys=True) for c in calls)


# The runs of a rank, and the loop in which they and the server are.


_END_S = 5.0  # for what still waits when all is closed

T = TypeVar("T")


class AgentClient(Environments):
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
        initial_observation: Observation | None = None,
    ) -> OpenAgent:
        """Open an episode. With an initial observation, the command runs again up to the end of the history."""
        assert initial_observation is not None or not history, "an episode begins with a reset"
        log: Log = [] if initial_observation is None else [(None, initial_observation), *history]
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


class OpenAgent(OpenEpisode):
    """The agent of one episode. Its futures never raise."""

    def __init__(self, client: AgentClient, run: AgentRun) -> None:
        self._client, self._run = client, run
        self._is_closed = False

    def close(self) -> None:
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
