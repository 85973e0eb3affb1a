"""This rank's environments: many open episodes on few processes; failures are values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from spmdrl.config import EnvironmentConfig
from spmdrl.config.environment import AgentEnvironment, VerifiersEnvironment
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.observations import from_json, max_answer_bytes
from spmdrl.envs.protocol import (
    Answer,
    Close,
    EnvironmentFailure,
    Environments,
    EnvJob,
    EnvRequest,
    Loaded,
    MetricNames,
    OpenEpisode,
    Reset,
    Step,
)
from spmdrl.envs.worker import PROGRAM
from spmdrl.types import UserError
from spmdrl.workers.pool import INVALID_ANSWER, FailureKind, Session, WorkerPool, WorkerProgram, unprotected_in
from spmdrl.workers.process import sandbox_hint
from spmdrl.workers.sandbox import Sandbox

_THREADS_WITHOUT_SANDBOX = 64
_MAX_IDLE_DEATHS = 3


def open_environments(cfg: EnvironmentConfig) -> Environments:
    """Start what the environments of a rank run in. Raises UserError when they cannot be loaded."""
    if not isinstance(cfg.source, AgentEnvironment | VerifiersEnvironment):
        return EnvironmentClient(cfg)
    try:
        from spmdrl.envs.agent import AgentClient
    except ImportError as error:
        raise UserError(
            f'environment.source.kind = "{cfg.source.kind}" needs a package that cannot be imported: {error}; install '
            'it with pip install "spmdrl[endpoint]"'
        ) from error
    return AgentClient(cfg)


class EnvironmentClient(Environments):
    """Runs environments in `environment.num_workers` processes.

    UserError if their source cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: EnvironmentConfig) -> None:
        self._cfg = cfg
        self._numbers = itertools.count(1)  # of environments
        self._names = MetricNames()
        self._workers = WorkerPool(
            WorkerProgram(
                code=PROGRAM,
                table="environment",
                setting="environment.source",
                sections=[cfg.source],
                sandbox=cfg.sandbox,
                job=self._job,
                loaded=_loaded,
                name="the environment's process",
                limit_s=cfg.step_timeout_s,
                too_late=f"no answer within environment.step_timeout_s = {cfg.step_timeout_s:g} seconds",
                max_answer_bytes=max_answer_bytes(cfg.max_observation_characters),
                max_deaths=2,
                has_time_to_close=True,
            ),
            cfg.num_workers,
        )
        self.tools = self._workers.loaded.tools  # JSON schemas, as chat templates take them
        self.gives_rewards = self._workers.loaded.gives_rewards
        self.unprotected = self._workers.loaded.unprotected  # what the sandbox cannot stop on this machine

    def check(self, start: EpisodeStart) -> Observation:
        """Begin an episode and end it. Raises UserError, with the environment's traceback, if that fails."""
        opened = self.open(start)
        answer = opened.reset().result()
        opened.close()
        if isinstance(answer, Observation):
            if answer.done:
                raise UserError("the environment's first reset returned done, so that there is nothing to act in")
            return answer
        if answer.kind == "timeout":
            raise UserError(
                f"the environment's first reset took more than environment.step_timeout_s = "
                f"{self._cfg.step_timeout_s:g} seconds"
            )
        # No sandbox makes a value another one.
        is_of_values = answer.reason.startswith(("TypeError: ", "ValueError: "))
        hint = "" if is_of_values else sandbox_hint("environment", self._cfg.sandbox)
        raise UserError(f"the environment's first reset failed{hint}: {answer.reason}\n{answer.traceback}".rstrip())

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        initial_observation: Observation | None = None,
    ) -> OpenEnvironment:
        """Open the environment of an episode, in the process that has fewest.

        With an initial observation, the answer to its reset, it is replayed up to the end of its history. If that does
        not give the same observations, the next request fails.
        """
        assert initial_observation is not None or not history, "an episode begins with a reset"
        log = [] if initial_observation is None else [(None, initial_observation), *history]
        session = EnvSession(next(self._numbers), start, log, self)
        self._workers.open(session)  # what has a history is replayed from now on
        return OpenEnvironment(session, self._workers)

    def close(self) -> None:
        """End the processes. What is asked gets the failure "closed"."""
        self._workers.close()

    def read(self, written: Any) -> Observation:
        """Read the observation of a process. Raises ValueError if it is none."""
        return self._names.known(from_json(written, self._cfg.max_observation_characters))

    def _job(self, sandbox: Sandbox | None) -> EnvJob:
        settings = self._cfg.source.model_dump()
        return EnvJob(
            kind=settings.pop("kind"),
            settings=settings,
            sandbox=sandbox,
            # The other half is for the programs that tools start.
            max_threads=max(1, self._cfg.sandbox.max_processes // 2) if sandbox else _THREADS_WITHOUT_SANDBOX,
            max_characters=self._cfg.max_observation_characters,
        )


class OpenEnvironment(OpenEpisode):
    """An `OpenEpisode`, whose `reset` and `step` it has, in a worker process: each request is posted to its session.

    Its futures never raise.
    """

    def __init__(self, session: EnvSession, workers: WorkerPool[Loaded]) -> None:
        assert session.worker is not None, "a process may have any number of environments"
        self._session, self._workers, self._post = session, workers, session.worker.post
        self._is_closed = False

    def close(self) -> None:
        """End the episode and free the environment. What is asked gets the failure "closed"."""
        if not self._is_closed:
            self._is_closed = True
            self._workers.release(self._session)
            self._post(self._session, self._session.close)

    def _ask(self, action: Action | None) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it: its result is set by another thread
        self._post(self._session, functools.partial(self._session.ask, action, future))
        return future


class EnvSession(Session):
    """An environment, which any process can continue: a new one gets the same requests again, up to the present one.

    An environment that then answers otherwise has failed.
    """

    def __init__(
        self,
        number: int,
        start: EpisodeStart,
        log: Sequence[tuple[Action | None, Observation]],
        client: EnvironmentClient,
    ) -> None:
        self._number, self._start, self._client = number, start, client
        self._log = list(log)  # the reset, which has no action, and the steps
        self._num_replayed = 0  # answers of the present process
        self._pending: tuple[Action | None, Future[Answer]] | None = None
        self._failure: EnvironmentFailure | None = None
        self._num_idle_deaths = 0  # since the last answer
        self._is_closed = False

    @property
    def is_replaying(self) -> bool:
        return self._num_replayed < len(self._log)

    @property
    def is_finished(self) -> bool:
        return self._is_closed and not self.is_in_process

    def ask(self, action: Action | None, future: Future[Answer]) -> None:
        """Take the next request: an action, or None for the reset."""
        assert self._pending is None, "an environment is asked one thing at a time"
        if self._failure is not None:
            future.set_result(self._failure)
            return
        assert (action is None) == (not self._log), "an episode begins with one reset"
        self._pending = action, future

    def close(self) -> None:
        self._is_closed = True
        self.fail("error", "closed")

    def request(self, number: int) -> EnvRequest | None:
        """Return what the process must be asked next: earlier actions while it is replayed, then the pending one."""
        if self._failure is not None:
            return Close(number=number, environment=self._number) if self._is_closed and self.is_in_process else None
        if self.is_replaying:
            if self._pending is None and self._log[-1][1].done:
                return None  # nobody will ask it again
            action = self._log[self._num_replayed][0]
        elif self._pending is not None:
            action = self._pending[0]
        else:
            return None
        if action is None:
            return Reset(number=number, environment=self._number, start=self._start)
        return Step(number=number, environment=self._number, action=action)

    def take(self, request: EnvRequest, answer: Any) -> None:
        """Take the answer to a request. An invalid observation fails the episode; ValueError for what is no answer."""
        if isinstance(request, Close):
            self.is_in_process = False
        elif "observation" in answer:
            try:
                self._take_observation(self._client.read(answer["observation"]))
            except ValueError as error:
                self.fail("error", f"the environment's answer is invalid: {error}")
        else:
            reason, traceback = answer["failure"], answer["traceback"]
            if not isinstance(reason, str) or not isinstance(traceback, str):
                raise ValueError(INVALID_ANSWER)
            self._fail(EnvironmentFailure(kind="error", reason=reason, traceback=traceback))

    def _take_observation(self, observation: Observation) -> None:
        """Take the answer to the last request. Raises ValueError for an observation that cannot be one."""
        if self._failure is not None:  # closed meanwhile
            return
        if self.is_replaying:
            if _replay_key(observation) != _replay_key(self._log[self._num_replayed][1]):
                what = "the reset" if self._num_replayed == 0 else f"step {self._num_replayed}"
                self.fail(
                    "error", f"the environment does not repeat itself: asked again, {what} gave another observation"
                )
            self._num_replayed += 1
        else:
            assert self._pending is not None, "only what was asked is answered"
            action, future = self._pending
            if action is not None and not observation.messages and not observation.done:
                self.fail("error", "ValueError: a step returned neither a message for the policy nor done")
                return
            self._pending = None
            self._log.append((action, observation))
            self._num_replayed += 1
            self._num_idle_deaths = 0
            future.set_result(observation)
        if not self.is_replaying and self._pending is None:
            self.num_deaths = 0

    def fail(self, kind: FailureKind, reason: str) -> None:
        self._fail(EnvironmentFailure(kind=kind, reason=reason))

    def leave(self, *, died_idle: bool, how: str) -> None:
        """Prepare for a new process. One that dies again and again while nothing is asked ends its environments."""
        super().leave(died_idle=died_idle, how=how)
        self._num_replayed = 0
        self._num_idle_deaths += died_idle
        if self._num_idle_deaths >= _MAX_IDLE_DEATHS:
            self.fail("error", f"the process {how}, again and again")

    def _fail(self, failure: EnvironmentFailure) -> None:
        self._failure = self._failure or failure
        if self._pending is not None:
            _, future = self._pending
            self._pending = None
            future.set_result(failure)


def _replay_key(observation: Observation) -> tuple[Any, ...]:
    """Return the fields that an episode depends on; metrics such as a duration are not among them."""
    return (*observation.messages, *observation.images, observation.reward, observation.done, observation.state)


def _loaded(answer: Any) -> Loaded:
    match answer:
        case {"tools": list(tools), "gives_rewards": bool(gives)} if all(isinstance(tool, dict) for tool in tools):
            return Loaded(tools=tools, gives_rewards=gives, unprotected=unprotected_in(answer))
    raise ValueError(INVALID_ANSWER)
