"""Verifier for Python programs: runs the response's program with the prompt's tests, inside the worker's sandbox."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

from spmdrl.rewards.item import RewardItem
from spmdrl.workers.program import run_program

_BLOCK = re.compile(r"^```[ \t]*(?:python|python3|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def load(*, tests: str, score: Literal["share", "all"], tests_timeout_s: float) -> Callable[[RewardItem], float]:
    """Make a verifier that runs the response's last code block with each of the tests in the metadata column `tests`.

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
