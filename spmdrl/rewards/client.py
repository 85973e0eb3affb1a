"""Rollouts in, rewards out: computed in other processes while sampling continues; failures are values."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import RewardConfig
from spmdrl.data.tokenizer import decode
from spmdrl.faults.text import lines, one_line
from spmdrl.rewards.verifiers import RewardItem
from spmdrl.rewards.worker import PROGRAM, RewardJob, Term
from spmdrl.types import Prompt, RewardOutcome, Rollout, UserError
from spmdrl.workers.channel import bounded
from spmdrl.workers.pool import INVALID_ANSWER, FailureKind, Session, WorkerPool, WorkerProgram, unprotected_in
from spmdrl.workers.process import sandbox_hint

Pending = tuple[Rollout, "Future[RewardOutcome]"]
Rewarded = tuple[Rollout, RewardOutcome]

_MAX_ANSWER_BYTES = 2**20
_NOTHING = RewardOutcome(reward=0.0, parts={})  # of a run without terms that processes compute


class RewardClient:
    """This rank's reward processes, none where nothing is rewarded. Use it in a `with` statement, which ends them."""

    def __init__(self, cfg: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.cfg = cfg
        self._pool = RewardPool(cfg.in_processes) if cfg.in_processes.terms else None
        self._tokenizer = tokenizer

    @property
    def unprotected(self) -> list[str]:
        """Sentences about what the sandbox of the reward processes cannot stop on this machine."""
        return [] if self._pool is None else self._pool.unprotected

    def submit(self, rollout: Rollout) -> Pending:
        """Start to compute the reward of a finished rollout."""
        if rollout.failure is not None:
            return known_reward(rollout, RewardOutcome(reward=0.0, parts={}, failure=rollout.failure))
        if self._pool is None:
            return known_reward(rollout, _NOTHING)
        response = decode(self._tokenizer, rollout.turns[-1].response.token_ids)
        return rollout, self._pool.submit(_item(rollout.prompt, response, rollout))

    def collect(self, pending: Iterable[Pending]) -> list[Rewarded]:
        """Wait for the rewards. One that cannot be computed is 0, with the reason in `failure`."""
        pending = list(pending)
        wait([future for _, future in pending])  # all at once: each wait of its own would wake this thread
        return [(rollout, future.result()) for rollout, future in pending]

    def check(self, prompt: Prompt) -> RewardOutcome:
        """Compute the reward of the reference answer itself. Raises UserError if that fails."""
        if self._pool is None:
            return _NOTHING
        return self._pool.check(_item(prompt, prompt.answer or ""))

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close()


def known_reward(rollout: Rollout, outcome: RewardOutcome) -> Pending:
    """Wrap a rollout whose reward has been computed elsewhere."""
    future: Future[RewardOutcome] = Future()
    future.set_result(outcome)
    return rollout, future


def _item(prompt: Prompt, response: str, rollout: Rollout | None = None) -> RewardItem:
    return RewardItem(
        prompt=prompt.text,
        response=response,
        answer=prompt.answer,
        metadata=prompt.metadata,
        task=prompt.task,
        turns=() if rollout is None else tuple((turn.action, turn.observation) for turn in rollout.turns),
        environment_reward=0.0 if rollout is None else rollout.environment_reward,
    )


class RewardPool:
    """Computes rewards in `reward.num_workers` processes, each at one item at a time.

    An exception, a timeout, a dead worker or a value that is no number within bounds gives reward 0 and a `failure`;
    none of them raises. UserError if the verifiers cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        terms = _named(cfg)
        self._weights = {term.name: written.weight for term, written in zip(terms, cfg.terms, strict=True)}
        self._workers = WorkerPool(
            WorkerProgram(
                code=PROGRAM,
                table="reward",
                setting="reward.terms",
                sections=cfg.terms,
                sandbox=cfg.sandbox,
                job=lambda sandbox: RewardJob(terms=terms, limit_s=cfg.timeout_s, sandbox=sandbox),
                loaded=unprotected_in,
                name="the worker",
                limit_s=cfg.timeout_s,
                too_late="timeout",
                max_answer_bytes=_MAX_ANSWER_BYTES,
                max_deaths=1,
                max_sessions=1,
            ),
            cfg.num_workers,
        )
        self.unprotected = self._workers.loaded  # what the sandbox of the workers cannot stop on this machine

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def submit(self, item: RewardItem) -> Future[RewardOutcome]:
        """Start to compute the reward of one item; the future's result never raises."""
        return self._open(item).outcome

    def check(self, item: RewardItem) -> RewardOutcome:
        """Compute the reward of one item. Raises UserError with the verifier's traceback if that fails."""
        session = self._open(item)
        outcome = session.outcome.result()
        if outcome.failure == "timeout":
            raise UserError(
                f"the reward took more than reward.timeout_s = {self._cfg.timeout_s:g} seconds on a first sample"
            )
        if outcome.failure is not None:
            where = f"on a first sample{sandbox_hint('reward', self._cfg.sandbox)}"
            how = textwrap.indent(session.traceback, "    ", lambda line: True)
            raise UserError(f"the reward failed {where}: {outcome.failure}\n{how}".rstrip())
        return outcome

    def close(self) -> None:
        """Kill the workers. Items without a reward get the failure "closed"."""
        self._workers.close()

    def _open(self, item: RewardItem) -> _RewardSession:
        if self._workers.is_closed:
            raise RuntimeError("this reward pool is closed")
        session = _RewardSession(item, self._weights)
        session.outcome.add_done_callback(lambda _: self._workers.release(session))
        self._workers.open(session)
        return session


class _RewardSession(Session):
    """One item, asked once."""

    def __init__(self, item: RewardItem, weights: dict[str, float]) -> None:
        self._item, self._weights = item, weights
        self._is_finished = False
        self.outcome: Future[RewardOutcome] = Future()
        self.traceback = ""  # set before the outcome

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def request(self, number: int) -> RewardItem | None:
        return None if self._is_finished else self._item

    def take(self, request: Any, answer: Any) -> None:
        match answer:
            case {"parts": dict(parts), "failure": str(failure), "traceback": str(traceback)} if not parts:
                self.traceback = lines(traceback)
                self.fail("error", failure)
                return
            case {"parts": dict(parts), "failure": None, "traceback": ""} if parts.keys() == self._weights.keys():
                if all(isinstance(part, float) for part in parts.values()):
                    self._weigh({name: bounded(name, part) for name, part in parts.items()})
                    return
        raise ValueError(INVALID_ANSWER)

    def fail(self, kind: FailureKind, reason: str) -> None:
        if not self._is_finished:
            self._finish(RewardOutcome(reward=0.0, parts={}, failure=one_line(reason)))

    def close(self) -> None:
        self.fail("error", "closed")

    def _weigh(self, parts: dict[str, float]) -> None:
        reward, failure = sum(self._weights[name] * part for name, part in parts.items()), None
        try:
            reward = bounded("the weighted sum of the terms", reward)
        except ValueError as error:
            reward, failure = 0.0, str(error)
        self._finish(RewardOutcome(reward=reward, parts=parts, failure=failure))

    def _finish(self, outcome: RewardOutcome) -> None:
        self._is_finished = True
        self.outcome.set_result(outcome)


def _named(cfg: RewardConfig) -> list[Term]:
    """Name terms by their kind; the second of a kind gets the suffix _2, and so on."""
    seen: Counter[str] = Counter()
    named = []
    for term in cfg.terms:
        seen[term.kind] += 1
        name = term.kind if seen[term.kind] == 1 else f"{term.kind}_{seen[term.kind]}"
        settings = term.model_dump(exclude={"kind", "weight"})  # what is special to its kind
        named.append(Term(name=name, kind=term.kind, settings=settings))
    return named
