"""Rollouts in, rewards out: computed in other processes while sampling continues; failures are values."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import JudgeReward, RewardConfig
from spmdrl.data.tokenizer import decode
from spmdrl.faults.text import lines, one_line
from spmdrl.rewards.judge import Judges, question_about, scores_in
from spmdrl.rewards.worker import PROGRAM, RewardItem, RewardJob, Term
from spmdrl.types import Prompt, RewardOutcome, Rollout, UserError
from spmdrl.workers.channel import bounded
from spmdrl.workers.pool import INVALID_ANSWER, FailureKind, Session, WorkerPool, WorkerProgram, unprotected_in
from spmdrl.workers.process import sandbox_hint

# Judges that are asked when a step's rollouts are sampled: about whole groups, or of the policy itself.
#
#     rewarded rollouts -> those that count -> a question for each, or for each group -> answers -> parts of their
#     rewards
#
# A question that cannot be asked, or whose answer does not parse, fails the rollouts that it is about.


Ask = Callable[[Sequence[str]], Sequence[str | ValueError]]  # an answer to each question, or why there is none


def judgments(
    name: str,
    term: JudgeReward,
    rewarded: Sequence[tuple[Rollout, RewardOutcome]],
    read: Callable[[Rollout], RewardItem],
    ask: Ask,
) -> dict[int, float | str]:
    """Return the part that a judge gives to each rollout, or why there is none, by the rollout's place.

    Rollouts whose reward has failed or has this part already, those whose gate is closed, and those of evaluation sets
    are in no question.
    """
    units: dict[tuple[int, int], list[int]] = {}
    for place, (rollout, outcome) in enumerate(rewarded):
        is_asked = rollout.prompt.rule is None and outcome.failure is None and name not in outcome.parts
        if is_asked and term.counts_with(outcome.parts):
            unit = (rollout.prompt.prompt_id, 0 if term.group is not None else place)
            units.setdefault(unit, []).append(place)
    found: dict[int, float | str] = {}
    asked: list[list[int]] = []
    questions: list[str] = []
    for places in units.values():
        try:
            questions.append(question_about([read(rewarded[place][0]) for place in places], term))
            asked.append(places)
        except ValueError as error:
            found |= dict.fromkeys(places, f"{name}: {error}")
    for places, answer in zip(asked, ask(questions), strict=True):
        try:
            if isinstance(answer, ValueError):
                raise answer
            found |= zip(places, scores_in(answer, term, len(places)), strict=True)
        except ValueError as error:
            found |= dict.fromkeys(places, f"{name}: {error}")
    return found


# The rewards of a rank.


Pending = tuple[Rollout, "Future[RewardOutcome]"]
Rewarded = tuple[Rollout, RewardOutcome]
AskPolicy = Callable[[JudgeReward, Sequence[str]], Sequence[str | ValueError]]  # questions to the policy as its judge

_MAX_ANSWER_BYTES = 2**20
_NOTHING = RewardOutcome(reward=0.0, parts={})  # of a run without terms that processes compute


class RewardClient:
    """This rank's reward processes and judges, none where nothing is rewarded. Use it in a `with` statement, which ends
    them."""

    def __init__(
        self,
        cfg: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        judged: Path | None = None,
        sets: Mapping[str, RewardConfig] | None = None,
    ) -> None:
        """`judged` is the folder in which answers of judges are cached; None: only in memory. `sets` are the rewards of
        evaluation sets, by the names of their rules."""
        self.cfg = cfg
        with ExitStack() as exits:
            asked = {name: term for name, term in cfg.judges.items() if not term.is_policy}
            self._judges = exits.enter_context(Judges(asked, judged)) if asked else None
            self._pool = exits.enter_context(RewardPool(cfg)) if cfg.in_processes else None
            self._sets = {rule: exits.enter_context(RewardPool(one)) for rule, one in (sets or {}).items()}
            self._exits = exits.pop_all()
        self._tokenizer = tokenizer

    @property
    def unprotected(self) -> list[str]:
        """Sentences about what the sandbox of the reward processes cannot stop on this machine."""
        return [] if self._pool is None else self._pool.unprotected

    def submit(self, rollout: Rollout) -> Pending:
        """Start to compute the reward of a finished rollout."""
        if rollout.failure is not None:
            return known_reward(rollout, RewardOutcome(reward=0.0, parts={}, failure=rollout.failure))
        if (own := self._sets.get(rollout.prompt.rule or "")) is not None:
            return rollout, own.submit(self._read(rollout))
        if self._pool is None and self._judges is None:
            return known_reward(rollout, _NOTHING)
        item = self._read(rollout)
        return rollout, self._judged(item, known_outcome(_NOTHING) if self._pool is None else self._pool.submit(item))

    def collect(self, pending: Iterable[Pending]) -> list[Rewarded]:
        """Wait for the rewards. One that cannot be computed is 0, with the reason in `failure`."""
        pending = list(pending)
        wait([future for _, future in pending])  # all at once: each wait of its own would wake this thread
        return [(rollout, future.result()) for rollout, future in pending]

    def complete(self, pending: list[Pending], ask_policy: AskPolicy | None = None) -> list[Pending]:
        """Add what judges say that wait for groups, which `pending` has whole; this waits for all other rewards.

        `ask_policy` asks the policy, where it is a judge.
        """
        for name, term in self.cfg.group_judges.items():
            rewarded = self.collect(pending)
            found = judgments(name, term, rewarded, self._read, partial(self._answers, name, term, ask_policy))
            pending = [
                known_reward(rollout, self._with_part(outcome, name, found[place]) if place in found else outcome)
                for place, (rollout, outcome) in enumerate(rewarded)
            ]
        return pending

    def _answers(
        self, name: str, term: JudgeReward, ask_policy: AskPolicy | None, questions: Sequence[str]
    ) -> Sequence[str | ValueError]:
        if not term.is_policy:
            assert self._judges is not None
            return self._judges.answers(name, questions)
        assert ask_policy is not None, "no engine has the policy"
        return ask_policy(term, questions)

    def _with_part(self, outcome: RewardOutcome, name: str, part: float | str) -> RewardOutcome:
        return failed(part) if isinstance(part, str) else weighed({**outcome.parts, name: part}, self.cfg)

    def _read(self, rollout: Rollout) -> RewardItem:
        return item_of(rollout.prompt, decode(self._tokenizer, rollout.turns[-1].response.token_ids), rollout)

    def check(self, prompt: Prompt) -> RewardOutcome:
        """Compute the reward of the reference answer itself. Raises UserError if that fails."""
        item = item_of(prompt, prompt.answer or "")
        others = _NOTHING if self._pool is None else self._pool.check(item)
        outcome = self._judged(item, known_outcome(others)).result()
        if outcome.failure is not None:
            raise UserError(f"the reward failed on a first sample: {outcome.failure}")
        return outcome

    def _judged(self, item: RewardItem, others: Future[RewardOutcome]) -> Future[RewardOutcome]:
        return others if self._judges is None else self._judges.submit(self._judge(item, others))

    async def _judge(self, item: RewardItem, others: Future[RewardOutcome]) -> RewardOutcome:
        """Complete the outcome of the other terms, unless these failed. Judges whose gates they close are not asked."""
        assert self._judges is not None
        try:
            outcome = await asyncio.wrap_future(others)
            if outcome.failure is not None:
                return outcome
            asked = [
                name
                for name, term in self.cfg.judges.items()
                if not term.waits_for_groups and term.counts_with(outcome.parts)
            ]
            return weighed(outcome.parts | await self._judges.score(item, asked), self.cfg)
        except (ValueError, OSError) as error:
            return failed(str(error))
        except asyncio.CancelledError:
            return failed("closed")

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exits.close()


def known_reward(rollout: Rollout, outcome: RewardOutcome) -> Pending:
    """Wrap a rollout whose reward has been computed elsewhere."""
    return rollout, known_outcome(outcome)


def known_outcome(outcome: RewardOutcome) -> Future[RewardOutcome]:
    """Wrap an outcome that is there."""
    future: Future[RewardOutcome] = Future()
    future.set_result(outcome)
    return future


def weighed(parts: dict[str, float], cfg: RewardConfig) -> RewardOutcome:
    """Weigh the parts of a reward, by the names of their terms: 0 and a failure where the sum is out of bounds."""
    try:
        reward = bounded("the weighted sum of the terms", cfg.total(parts))
    except ValueError as error:
        return RewardOutcome(reward=0.0, parts=parts, failure=str(error))
    return RewardOutcome(reward=reward, parts=parts)


def failed(reason: str) -> RewardOutcome:
    """The outcome of a rollout that could not be rewarded."""
    return RewardOutcome(reward=0.0, parts={}, failure=one_line(reason))


def item_of(prompt: Prompt, response: str, rollout: Rollout | None = None) -> RewardItem:
    """Return what rewards read of a response to a prompt."""
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

    Terms of other kinds are left out. An exception, a timeout, a dead worker or a value that is no number within bounds
    gives reward 0 and a `failure`; none of them raises. UserError if the verifiers cannot be loaded. Close it, or use
    it in a `with` statement.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        terms = [
            Term(name=name, kind=term.kind, settings=term.model_dump(exclude={"kind", "weight", "gate", "floor"}))
            for name, term in cfg.in_processes.items()
        ]
        self._workers = WorkerPool(
            WorkerProgram(
                code=PROGRAM,
                table="reward",
                setting="reward.terms",
                sections=[*cfg.in_processes.values()],
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
        session = _RewardSession(item, self._cfg)
        session.outcome.add_done_callback(lambda _: self._workers.release(session))
        self._workers.open(session)
        return session


class _RewardSession(Session):
    """One item, asked once."""

    def __init__(self, item: RewardItem, cfg: RewardConfig) -> None:
        self._item, self._cfg, self._names = item, cfg, cfg.in_processes.keys()
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
            case {"parts": dict(parts), "failure": None, "traceback": ""} if parts.keys() == self._names:
                if all(isinstance(part, float) for part in parts.values()):
                    self._finish(weighed({name: bounded(name, part) for name, part in parts.items()}, self._cfg))
                    return
        raise ValueError(INVALID_ANSWER)

    def fail(self, kind: FailureKind, reason: str) -> None:
        if not self._is_finished:
            self._finish(failed(reason))

    def close(self) -> None:
        self.fail("error", "closed")

    def _finish(self, outcome: RewardOutcome) -> None:
        self._is_finished = True
        self.outcome.set_result(outcome)
