"""A reward process: reads items from a socket, writes their rewards back, and never outlives the trainer.

It imports a verifier's own package only when that verifier is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import numbers
import os
import pickle
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdrl import user_code
from spmdrl.conversation import Action, Observation
from spmdrl.faults.text import of_error
from spmdrl.workers.channel import bounded, connect, line, needs_package, program, receive
from spmdrl.workers.program import clear, run_program
from spmdrl.workers.sandbox import Sandbox, continue_below, enter, limit_cpu

PROGRAM = program("spmdrl.rewards.worker")
_MAX_REASON_CHARACTERS = 200
_MAX_TRACEBACK_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One verifier that a worker runs."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the verifier's `load`, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardJob:
    """A worker's task: the first message it receives."""

    terms: list[Term]
    limit_s: float  # for each item
    sandbox: Sandbox | None


def main() -> None:
    """Serve requests until the socket closes."""
    trainer = connect()
    messages = trainer.makefile("rb")
    job = pickle.loads(receive(messages))
    try:
        isolation = enter(job.sandbox, trainer.fileno()) if job.sandbox else continue_below(trainer.fileno())
        loaded = {term.name: load(term.kind, term.settings) for term in job.terms}
        users = {term.name for term in job.terms if term.kind == "function"}
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else of_error(error)
        trainer.sendall(line({"problem": problem}))
        return
    if job.sandbox:
        os.chdir(job.sandbox.folder)  # after loading: a function's file is relative to the trainer's directory
    trainer.sendall(line({"unprotected": isolation.missing}))
    while message := receive(messages):
        if job.sandbox:
            limit_cpu(job.limit_s)
        reply = _reply(loaded, message, users)
        clear(isolation)
        trainer.sendall(line(reply))


def _reply(loaded: dict[str, Verifier], message: bytes, users: Collection[str]) -> dict[str, Any]:
    """Return the rewards of an item's terms, or the reason of a failure, as the rank reads them.

    `users` are the terms that are code of the user's, who needs the traceback of what it raises.
    """
    name = "item"
    parts = {}
    try:
        item = pickle.loads(message)
        for name, verifier in loaded.items():
            parts[name] = _number(verifier(item))
    except BaseException as error:  # whatever a reward function raises, even SystemExit, fails only this item
        is_sentence = isinstance(error, ValueError) and name in loaded.keys() - users
        reason = f"{name}: {error}" if is_sentence else f"{name}: {of_error(error)}"
        how = "" if is_sentence else traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:]
        return {"parts": {}, "failure": reason.splitlines()[0][:_MAX_REASON_CHARACTERS], "traceback": how}
    return {"parts": parts, "failure": None, "traceback": ""}


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward is not a number but {type(value).__name__}")
    return bounded("the reward", value)


# The verifiers, one for each `kind` of a reward's terms: one rollout as text in, a number out.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One rollout as text, with the prompt's data."""

    prompt: str
    response: str  # the last one of an episode
    answer: str | None  # the reference answer, when the data has one
    metadata: dict[str, Any]  # the prompt's
    task: str  # the data source it came from
    # What the policy did in each turn of an episode, and what its environment answered.
    turns: tuple[tuple[Action | None, Observation | None], ...] = ()
    environment_reward: float = 0.0  # the sum of what the environment gave for each turn

    def reference_answer(self) -> str:
        """Return the answer, for verifiers that need one. Raises ValueError if there is none."""
        if self.answer is None:
            raise ValueError("the data has no reference answer for this prompt; set answer_column")
        return self.answer


Verifier = Callable[[RewardItem], Any]


def load(kind: str, settings: dict[str, Any]) -> Verifier:
    """Return the verifier of a kind. Raises ValueError, with a sentence, when it cannot be loaded."""
    return _LOADERS[kind](**settings)


def exact(item: RewardItem) -> float:
    """Return 1 if response and reference answer are equal up to surrounding white space, else 0."""
    return float(item.response.strip() == item.reference_answer().strip())


def environment(item: RewardItem) -> float:
    """Return the sum of what the environment of an episode gave for each turn."""
    return item.environment_reward


# What announces the final answer to a multiple choice, the surest form first. A letter is one that no other follows,
# and an "a" before a word is an article.
_LETTER = r"[*_\s]*\(?([A-Za-z])(?!(?<=(?-i:a))\s+\w)\)?(?![A-Za-z'])"
_CHOSEN = [
    re.compile(form, re.IGNORECASE)
    for form in (
        rf"\\boxed\{{(?:\\text\{{)?{_LETTER}",
        rf"<answer>{_LETTER}",
        rf"\banswer(?: is|[*_]*:|[*_]* is:){_LETTER}",
    )
]
_ALONE = re.compile(rf"{_LETTER}[.):*_\s]*")


def choice(item: RewardItem) -> float:
    """Return 1 if the last letter that the response gives as its answer is the reference answer's, else 0."""
    answer = _ALONE.fullmatch(item.reference_answer().strip())
    if answer is None:
        raise ValueError(f"the reference answer of a multiple choice is one letter, not {item.answer!r}")
    found = next((letters for form in _CHOSEN if (letters := form.findall(item.response))), None)
    alone = _ALONE.fullmatch(item.response.strip())
    chosen = found[-1] if found else alone[1] if alone else ""
    return float(chosen.upper() == answer[1].upper())


def load_format(*, pattern: str) -> Verifier:
    """Make a verifier that returns 1 if the whole response, apart from white space around it, matches, else 0."""
    form = re.compile(pattern, re.DOTALL)
    return lambda item: float(form.fullmatch(item.response.strip()) is not None)


def load_length(*, full_characters: int, max_characters: int) -> Verifier:
    """Make a verifier that returns 1 up to a length, from there linearly less, and 0 from another length on."""
    fall = max_characters - full_characters
    return lambda item: min(1.0, max(0.0, (max_characters - len(item.response)) / fall))


_MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def load_math() -> Verifier:
    """Make a verifier that compares the last answer in the response with the reference answer as mathematics.

    It returns 1 if they are equal, else 0.
    """
    with needs_package("math"):
        from math_verify import parse, verify

    # math-verify's time limits use alarm signals. They are disabled below, because the pool has its own limit, and
    # math-verify would warn about that in every process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def reward(item: RewardItem) -> float:
        answer = item.reference_answer()
        # math-verify recognizes bare LaTeX such as \frac{1}{2} only inside a mathematical environment.
        delimited = answer if any(mark in answer for mark in _MATH_DELIMITERS) else f"\\boxed{{{answer}}}"
        expected = parse(delimited, parsing_timeout=None)
        if not expected:
            raise ValueError(f"math-verify finds no mathematics in the reference answer {answer!r}")
        return float(verify(expected, parse(item.response, parsing_timeout=None), timeout_seconds=None))

    return reward


def load_reasoning_gym() -> Verifier:
    """Make a verifier that returns the task's own rating, 0 to 1, of the last <answer> tags or the whole response."""
    with needs_package("reasoning_gym"):
        from spmdrl.workers.reasoning_gym import rate

    def reward(item: RewardItem) -> float:
        return rate(item.response, question=item.prompt, answer=item.answer, task=item.task, metadata=item.metadata)

    return reward


def load_function(function: str) -> Verifier:
    """Return the function of this name (`package.module:function` or `path/to/file.py:function`) as a verifier.

    It is called with the keyword arguments prompt, response, answer and metadata, and with `turns`, pairs of an
    `Action` and an `Observation`, if it has such a parameter; if it is async, it is awaited.
    """
    found = user_code.load(function)
    takes_turns = "turns" in inspect.signature(found).parameters
    _require_arguments(found, {"turns": ()} if takes_turns else {})

    def reward(item: RewardItem) -> Any:
        others = {"turns": item.turns} if takes_turns else {}
        value = found(prompt=item.prompt, response=item.response, answer=item.answer, metadata=item.metadata, **others)
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    return reward


def _require_arguments(function: Callable[..., Any], others: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(prompt="", response="", answer=None, metadata={}, **others)
    except TypeError as error:
        raise ValueError(
            f"{getattr(function, '__name__', 'it')} must take the keyword arguments prompt, response, answer and "
            f"metadata: {error}"
        ) from error


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


_BLOCK = re.compile(r"^```[ \t]*(?:python|python3|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def load_code(*, tests: str, score: Literal["share", "all"], tests_timeout_s: float) -> Verifier:
    """Make a verifier that runs the response's last code block with each of the tests in the metadata column `tests`,
    inside the process's sandbox.

    The reward is the share of tests that pass; with `score` "all" it is 1 only if all pass.
    """

    def verify(item: RewardItem) -> float:
        cases = _tests(item.metadata, tests)
        blocks = _BLOCK.findall(item.response)
        if not blocks:
            return 0.0
        deadline = time.monotonic() + tests_timeout_s
        passed = (_passes(blocks[-1], case, deadline) for case in cases)  # lazy: `all` stops at the first failure
        return sum(passed) / len(cases) if score == "share" else float(all(passed))

    return verify


def _tests(metadata: dict[str, Any], column: str) -> list[Any]:
    """Read a prompt's tests, which may be JSON text: statements, or pairs of input and output."""
    cases = metadata.get(column)
    if isinstance(cases, str):
        with contextlib.suppress(ValueError):
            cases = json.loads(cases)
    if not isinstance(cases, list) or not cases or not all(map(_is_test, cases)):
        raise ValueError(
            f'the column "{column}" must hold a list of tests, each a Python statement such as an assert, or '
            f'{{"input": ..., "output": ...}}, but it is {str(cases)[:80]}'
        )
    return cases


def _is_test(case: Any) -> bool:
    if isinstance(case, dict):
        return isinstance(case.get("input"), str) and isinstance(case.get("output"), str)
    return isinstance(case, str)


def _passes(program: str, case: str | dict[str, str], deadline: float) -> bool:
    if isinstance(case, dict):
        output = _run(program, case["input"], deadline)
        return output is not None and _lines(output) == _lines(case["output"])
    # The random word is printed after the test: a program that exits early, even without an error, does not pass. One
    # that reads its own file does: see docs/data.md.
    word = secrets.token_hex(16)
    output = _run(f"{program}\n{case}\nimport os\nos.write(1, b'{word}')\n", "", deadline)
    return output is not None and output.endswith(word)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(program: str, given: str, deadline: float) -> str | None:
    """Run a program and return its output; None if it fails or does not end by the deadline."""
    if time.monotonic() >= deadline:
        return None
    end = run_program(program, given, deadline, with_errors=False)
    return None if end.exit_code != 0 or end.is_cut else end.output


_LOADERS: dict[str, Callable[..., Verifier]] = {
    "exact": lambda: exact,
    "environment": lambda: environment,
    "math": load_math,
    "reasoning_gym": load_reasoning_gym,
    "function": load_function,
    "code": load_code,
    "choice": lambda: choice,
    "format": load_format,
    "length": load_length,
}
