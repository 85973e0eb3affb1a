"""One episode of an agent: a run of its command, whose calls are observations and whose answers are actions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.envs.agent_calls import Branches, Call, Reply
from spmdrl.envs.endpoint import Endpoint, EpisodeEnded
from spmdrl.envs.observations import numbers_of, to_json
from spmdrl.envs.protocol import Answer, EnvironmentFailure, MetricNames
from spmdrl.faults import guard
from spmdrl.workers.channel import bounded
from spmdrl.workers.folders import HeldFolder

# One run of an agent's command, with its folder and the end of what it printed.


_GUARD = Path(str(guard.__file__))
_MAX_KEPT_BYTES = 8192  # of each of its streams
_DRAIN_S = 1.0  # for the end of the streams of a command that has ended


class AgentProcess:
    """A command that is running, with its guard. Start it in a thread that outlives it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: HeldFolder) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process, self._folder = process, folder
        self._streams = [_Tail(process.stderr), _Tail(process.stdout)]
        self.ended: asyncio.Task[int] = asyncio.ensure_future(self._end())  # its exit code, as a shell gives it

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], start: EpisodeStart, *, gives_answer: bool
    ) -> AgentProcess:
        """Start the command in a folder of its own, where the episode's file is. Raises OSError or ValueError."""
        folder = HeldFolder()
        file = Path(folder.path, "episode.json")
        try:
            file.write_text(_written(start, gives_answer), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())),
                *(argument.replace("{prompt}", start.prompt) for argument in command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder.path,
                env={
                    **variables,
                    "TMPDIR": folder.path,
                    "SPMDRL_EPISODE": str(file),
                    "SPMDRL_SEED": str(start.seed),
                },
                start_new_session=True,  # keeps a terminal's Ctrl-C away
            )
        except BaseException:
            folder.remove()
            raise
        return cls(process, folder)

    def last_lines(self) -> str:
        """Return the end of its standard error or, if that is empty, of its standard output."""
        texts = (stream.text() for stream in self._streams)
        return next(filter(None, texts), "")

    async def close(self) -> None:
        """Kill the command with all that it has started, if it has not ended, and remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)  # the guard's signal to end it all
        await self.ended
        await asyncio.to_thread(self._folder.remove)

    async def _end(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([stream.read for stream in self._streams], timeout=_DRAIN_S)
        for stream in self._streams:
            stream.read.cancel()
        return code if code >= 0 else 128 - code


class _Tail:
    """Reads a stream to its end and keeps the last bytes."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = b""
        self.read = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while read := await stream.read(_MAX_KEPT_BYTES):
            self._kept = (self._kept + read)[-_MAX_KEPT_BYTES:]

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


def _written(start: EpisodeStart, gives_answer: bool) -> str:
    content = {"prompt": start.prompt, "task": start.task, "metadata": start.metadata, "seed": start.seed}
    return json.dumps(content | ({"answer": start.answer} if gives_answer else {}), default=str)


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
        """With a log it begins by repeating that; what it then says must be the same."""
        self._agent, self._start, self._log = agent, start, log
        self._process: AgentProcess | None = None
        self._key: str | None = None
        self._calls: asyncio.Queue[Waiting] = asyncio.Queue()
        self._open_call: Waiting | None = None  # the one that the policy is answering
        self._branches = Branches()
        self._num_replies = 0
        self._reward = 0.0  # since the last observation
        self._metrics: dict[str, float] = {}
        self._num_malformed = 0
        self._failure: EnvironmentFailure | None = None  # all answers from then on
        self._is_closed = False

    # What the episode asks

    async def ask(self, action: Action | None) -> Answer:
        """Give the policy's action, None for the reset, and return what the agent then says, or why it has failed."""
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
            await self._begin()
        except (OSError, ValueError) as error:  # a prompt that is too long for an argument, or has a null character
            return _failure(f"the agent cannot be started: {error}")
        for earlier, said in self._log:
            again = await self._observe(earlier)
            if isinstance(again, EnvironmentFailure):
                return again
            if not _is_same(again, said):
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

    def add_reward(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Add to the reward of the last response. Raises ValueError for what is no number within bounds."""
        total = bounded("the reward", bounded("the reward", reward) + self._reward)
        self._metrics = numbers_of({**self._metrics, **metrics})
        self._reward = total

    async def _begin(self) -> None:
        """Start the command. Raises OSError or ValueError."""
        agent = self._agent
        self._key = agent.endpoint.admit(self)
        variables = {"OPENAI_BASE_URL": agent.endpoint.url, "OPENAI_API_KEY": self._key}
        self._process = await AgentProcess.start(
            agent.command, {**agent.variables, **variables}, self._start, gives_answer=agent.gives_answer
        )
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
            branch=place.branch,
            tools=call.tools,
            max_tokens=call.max_tokens,
        )

    def _reply(self, action: Action) -> None:
        assert self._open_call is not None, "an action answers a call"
        call, waiting = self._open_call
        reply = Reply(number=self._num_replies, action=call.cut(action))
        self._branches.add(reply.action)
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
        code, printed = self._process.ended.result(), self._process.last_lines()
        if self._is_closed:
            return _failure("closed")
        if code != 0:
            last = f": {printed.splitlines()[-1]}" if printed else ""
            return _failure(f"the agent ended with exit code {code}{last}", printed)
        if is_reset:
            return _failure("the agent ended without a call of the policy", printed)
        ended = self._agent.names.kept(Observation(reward=self._take_reward(), done=True, metrics=self._metrics))
        return dataclasses.replace(ended, metrics={**ended.metrics, **self._counts()})

    def _counts(self) -> dict[str, float]:
        """The calls that were refused: this run's own, and those with no open key since an episode last ended."""
        endpoint = self._agent.endpoint
        refused, endpoint.num_refused = endpoint.num_refused, 0
        return {"malformed_calls": self._num_malformed, "refused_calls": refused}

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
