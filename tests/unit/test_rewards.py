"""Verifiers agree with what is right, and whatever a reward function does, the other rollouts get their scores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from pydantic import ValidationError

from spmdrl.config import (
    CodeReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    LengthReward,
    MathReward,
    ReasoningGymData,
    ReasoningGymReward,
    RewardConfig,
    RewardTerm,
    SandboxConfig,
)
from spmdrl.data.sources import ReasoningGymSource
from spmdrl.rewards import worker
from spmdrl.rewards.client import RewardPool
from spmdrl.rewards.worker import PROGRAM
from spmdrl.types import RewardOutcome, UserError
from spmdrl.workers import pool as pools
from tests.helpers.broken_library import break_library
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item, python_path, running, wait_for

FUNCTIONS = '''
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def misbehave(prompt, response, answer, metadata):
    match response:
        case "sleep": time.sleep(600)
        case "spin":
            while True: pass
        case "die": os._exit(3)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "exit": sys.exit("bye")
        case "raise": raise KeyError("no such thing")
        case "mute": raise Mute
        case "nan": return float("nan")
        case "nothing": return None
        case "text": return "0.5"
        case "interrupted":
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        case "child":
            subprocess.Popen(["sleep", metadata["seconds"]], start_new_session=metadata["detached"])
            time.sleep(600)
    return len(response)

async def slowly(prompt, response, answer, metadata):
    await asyncio.sleep(0.01)
    return metadata["value"] if response == answer else -1.0

def meet(prompt, response, answer, metadata):
    """1 when `metadata["party"]` workers are here at the same time."""
    (Path(metadata["place"]) / response).touch()
    deadline = time.monotonic() + 5
    while len(os.listdir(metadata["place"])) < metadata["party"]:
        if time.monotonic() > deadline: return 0
        time.sleep(0.01)
    return 1

def imports(prompt, response, answer, metadata):
    return "torch" in sys.modules or "pytest" in sys.modules

def silent_death(prompt, response, answer, metadata):
    """Answers, then dies before the next item."""
    if response == "last words":
        import threading
        threading.Timer(0.2, os._exit, [1]).start()
    return 1

def complains_at_length(prompt, response, answer, metadata):
    raise ValueError("\\u6b69" * 30_000 + " at last")

def hides_python(prompt, response, answer, metadata):
    import wave
    return not hasattr(wave, "Wave_read")

def wrong_arguments(prompt, completion):
    return 0
'''


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FunctionReward]:
    path = tmp_path_factory.mktemp("functions") / "wave.py"  # a name that must not hide Python's own
    path.write_text(FUNCTIONS)
    return lambda name, **changes: FunctionReward(kind="function", function=f"{path}:{name}", **changes)


@pytest.fixture(scope="module", params=["auto", "off"])
def misbehaving(function: Callable[..., FunctionReward], request: pytest.FixtureRequest) -> Iterator[RewardPool]:
    cfg = RewardConfig(
        terms=(function("misbehave"),), timeout_s=0.7, num_workers=2, sandbox=SandboxConfig(mode=request.param)
    )
    with RewardPool(cfg) as pool:
        yield pool


# Verifiers


def test_exact_ignores_outer_white_space_only() -> None:
    assert worker.exact(item(" 42\n", "42")) == 1.0
    assert worker.exact(item("4 2", "42")) == worker.exact(item("42.", "42")) == 0.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1/2", "The answer is $0.5$"),
        ("\\frac{1}{2}", "so we get \\boxed{\\frac{2}{4}}"),
        ("x^2+2x+1", "\\boxed{(x+1)^2}"),
        ("$\\sqrt{8}$", "\\boxed{2\\sqrt{2}}"),
        ("{1,2}", "\\boxed{\\{2, 1\\}}"),
        ("1,000", "#### 1000"),
        ("7", "<think> first 3, then 4 </think> The final answer is 7."),
    ],
)
def test_math_accepts_equivalent_forms(answer: str, response: str) -> None:
    assert worker.load_math()(item(response, answer)) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [("1/2", "0.51"), ("x^2+2x+1", "\\boxed{(x-1)^2}"), ("7", "7, or rather \\boxed{8}"), ("7", "no idea"), ("7", "")],
)
def test_math_refuses_other_answers(answer: str, response: str) -> None:
    assert worker.load_math()(item(response, answer)) == 0.0


def test_verifiers_need_their_reference_answer() -> None:
    for verifier in (worker.exact, worker.choice, worker.load_math()):
        with pytest.raises(ValueError, match="no reference answer"):
            verifier(item("7"))
    with pytest.raises(ValueError, match="is one letter, not '12'"):
        worker.choice(item("A", "12"))
    with pytest.raises(ValueError, match="no mathematics"):
        worker.load_math()(item("7", ""))


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (b). ", "B"),
        ("**C**", "C"),
        ("A is tempting, but the answer is (D).", "D"),
        ("**Answer:** C", "C"),
        ("The correct answer is: **B**", "B"),
        ("answer: A, no: Answer: B", "B"),
        ("So it is \\boxed{\\text{A}}, and not answer: B", "A"),
        ("<think>answer: C</think><answer> d) oxygen</answer>", "D"),
        ("The answer is Avogadro's number", ""),
        ("The answer is a prime number", ""),
        ("The answer is (b), as the answer is a prime", "B"),
        ("The answer is A because the others are even", "A"),
        ("answer: (a) oxygen", "A"),
        ("A or B", ""),
        ("", ""),
    ],
)
def test_a_choice_is_the_letter_that_is_given_last(response: str, letter: str) -> None:
    found = {one for one in "ABCD" if worker.choice(item(response, f"({one.lower()})")) == 1.0}
    assert found == {*letter}


def test_formats_are_of_the_whole_response_and_lengths_fall() -> None:
    with RewardPool(RewardConfig(terms=(FormatReward(kind="format"), LengthReward(kind="length")))) as pool:
        right = "<think>\nso\n</think>\n<answer>7</answer>\n"
        texts = [right, f"First: {right}", right.replace("</think>", ""), right + right, "x" * 5000, "x" * 9000]
        parts = [outcome.parts for outcome in outcomes_of(pool, *map(item, texts))]
    assert [part["format"] for part in parts] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [part["length"] for part in parts] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ValidationError, match="is no regular expression: missing \\)"):
        FormatReward(kind="format", pattern="(")


@pytest.mark.parametrize(
    ("printed", "passes"),
    [("1 2\n  3", True), ("1 2  \n  3 \n\n", True), ("1 2\n3", False), (" 1 2\n  3", False), ("1 2\n\n  3", False)],
)
def test_of_what_a_program_prints_only_white_space_at_ends_of_lines_does_not_count(
    monkeypatch: pytest.MonkeyPatch, printed: str, passes: bool
) -> None:
    monkeypatch.setattr(worker, "_run", lambda program, given, deadline: printed)
    verify = worker.load_code(tests="tests", score="all", tests_timeout_s=9.0)
    assert verify(item("```python\npass\n```", tests=[{"input": "", "output": "1 2\n  3\n"}])) == passes


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "puzzle24"])
def test_reasoning_gym_scores_its_own_items(task: str) -> None:
    source = ReasoningGymSource(ReasoningGymData(kind="reasoning_gym", task=task), seed=0)
    for index in range(5):
        row = source.row(index)
        assert row.answer is not None
        scored = {"answer": row.answer, "task": task, **row.metadata}
        right, wrong = f"I think 5.\n<answer> {row.answer} </answer>", f"{row.answer}<answer>?</answer>"
        assert worker.load_reasoning_gym()(item(row.answer + "\n", **scored)) == 1.0
        assert worker.load_reasoning_gym()(item(right, **scored)) == 1.0
        assert worker.load_reasoning_gym()(item(wrong, **scored)) < 1.0


def test_reasoning_gym_scores_under_the_parameters_of_the_data() -> None:
    def puzzle(**params: int) -> float:
        return worker.load_reasoning_gym()(item("6 * 4 * 1 * 1", "", task="puzzle24", question="", params=params))

    assert puzzle() == puzzle(min_value=1) == 1.0
    assert puzzle(min_value=2) < 1.0


def test_reasoning_gym_scores_rows_of_a_file() -> None:
    assert worker.load_reasoning_gym()(item("+5.0", "5", task="chain_sum")) == 1.0


# The pool


def test_misbehaviour_is_counted_and_the_others_still_score(misbehaving: RewardPool) -> None:
    failures = {
        "sleep": "timeout",
        "spin": "timeout",
        "die": "the worker exited with code 3",
        "segfault": "the worker was killed by SIGSEGV",
        "exit": "function: SystemExit: bye",
        "raise": "function: KeyError: 'no such thing'",
        "mute": "function: Mute: its text cannot be read: RuntimeError",
        "nan": "function: ValueError: the reward is nan",
        "nothing": "function: TypeError: the reward is not a number but NoneType",
        "text": "function: TypeError: the reward is not a number but str",
    }
    responses = [response for bad in failures for response in (bad, f"good after {bad}")]
    outcomes = outcomes_of(misbehaving, *[item(response) for response in responses])
    for response, outcome in zip(responses, outcomes, strict=True):
        if response in failures:
            assert outcome == RewardOutcome(reward=0.0, parts={}, failure=failures[response])
        else:
            assert outcome == RewardOutcome(reward=float(len(response)), parts={"function": float(len(response))})


def test_the_jobs_signals_do_not_fail_a_reward(misbehaving: RewardPool) -> None:
    assert outcomes_of(misbehaving, item("interrupted"))[0].failure is None


def test_items_that_cannot_be_sent_are_counted(misbehaving: RewardPool) -> None:
    outcomes = outcomes_of(misbehaving, item("bad", local=lambda: None), item("good"))
    assert "pickle" in str(outcomes[0].failure) and outcomes[0].reward == 0.0
    assert outcomes[1].reward == 4.0


def test_a_timeout_ends_what_the_function_started(misbehaving: RewardPool) -> None:
    future = misbehaving.submit(item("child", seconds="600.1", detached=False))
    assert wait_for(lambda: bool(running("sleep", "600.1")))
    assert future.result().failure == "timeout"
    assert wait_for(lambda: not running("sleep", "600.1"))


def test_check_raises_with_the_traceback(misbehaving: RewardPool) -> None:
    assert misbehaving.check(item("fine")).reward == 4.0
    with pytest.raises(UserError, match=r"(?s)no such thing.*in misbehave.*raise KeyError"):
        misbehaving.check(item("raise"))
    with pytest.raises(UserError, match=r"reward.timeout_s = 0.7"):
        misbehaving.check(item("sleep"))


@pytest.mark.parametrize(
    ("term", "problem"),
    [
        (CodeReward(kind="code"), 'code: the column "tests" must hold a list of tests'),
        (ReasoningGymReward(kind="reasoning_gym"), "reasoning_gym: 'default' is no task of reasoning-gym"),
    ],
)
def test_a_reward_that_the_data_does_not_fit_is_told_in_a_sentence(term: RewardTerm, problem: str) -> None:
    with RewardPool(RewardConfig(terms=(term,))) as pool, pytest.raises(UserError) as caught:
        pool.check(item("1", "1"))
    assert f": {problem}" in str(caught.value) and "\n" not in str(caught.value)


def test_an_answer_that_is_read_in_many_parts_is_whole(function: Callable[..., FunctionReward]) -> None:
    """20,000 characters of a traceback, each of which takes six bytes on the way."""
    with RewardPool(RewardConfig(terms=(function("complains_at_length"),))) as pool:
        with pytest.raises(UserError) as caught:
            pool.check(item("1"))
        assert str(caught.value).count("\u6b69") > 19_000 and str(caught.value).endswith(" at last")
        assert pool.submit(item("1")).result().failure.startswith("function: ValueError: \u6b69")


def test_terms_are_weighed_and_named(function: Callable[..., FunctionReward]) -> None:
    terms = (ExactReward(kind="exact", weight=10.0), function("slowly", weight=-2.0), ExactReward(kind="exact"))
    with RewardPool(RewardConfig(terms=terms)) as pool:
        right, wrong = outcomes_of(pool, item("a", "a", value=numpy.float32(0.25)), item("b", "a", value=0.25))
    assert right == RewardOutcome(reward=10.5, parts={"exact": 1.0, "function": 0.25, "exact_2": 1.0})
    assert wrong == RewardOutcome(reward=2.0, parts={"exact": 0.0, "function": -1.0, "exact_2": 0.0})


def test_one_failing_term_fails_the_reward(function: Callable[..., FunctionReward]) -> None:
    with RewardPool(RewardConfig(terms=(ExactReward(kind="exact"), function("slowly")))) as pool:
        outcome = outcomes_of(pool, item("a", "a"))[0]
    assert outcome == RewardOutcome(reward=0.0, parts={}, failure="function: KeyError: 'value'")


def test_packaged_verifiers_work_in_workers() -> None:
    with RewardPool(RewardConfig(terms=(MathReward(kind="math"), ReasoningGymReward(kind="reasoning_gym")))) as pool:
        outcomes = outcomes_of(pool, item("0.50", "1/2", task="chain_sum"), item("5.0", "5", task="chain_sum"))
    assert outcomes[0].parts == {"math": 1.0, "reasoning_gym": 0.0}
    assert outcomes[1].parts == {"math": 1.0, "reasoning_gym": 1.0}


def test_functions_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards").mkdir()
    (tmp_path / "my_rewards" / "lengths.py").write_text("def f(response, **rest): return len(response)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    term = FunctionReward(kind="function", function="my_rewards.lengths:f")
    with RewardPool(RewardConfig(terms=(term,))) as pool:
        assert outcomes_of(pool, item("abc"))[0].reward == 3.0


def test_functions_that_cannot_be_loaded_are_explained(function: Callable[..., FunctionReward], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(2)\n")
    for name, message in (
        (function("misbehav").function, "no function or class misbehav; did you mean misbehave?"),
        (function("wrong_arguments").function, "wrong_arguments must take the keyword arguments"),
        ("absent.py:f", "there is no file absent.py"),
        ("no_such_package.rewards:f", "there is no module no_such_package"),
        (
            f"{tmp_path}/broken.py:f",
            "broken.py cannot be imported: .*broken.py:[0-9]+: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (f"{tmp_path}/leaving.py:f", "leaving.py cannot be imported: .*leaving.py:[0-9]+: SystemExit: 2"),
        ("nowhere", "package.module:function"),
    ):
        with pytest.raises(UserError, match=message):
            RewardPool(RewardConfig(terms=(FunctionReward(kind="function", function=name),)))


def test_a_slow_import_is_told_once_and_waited_for(
    function: Callable[..., FunctionReward],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\ndef f(response, **rest): return len(response)\n")
    slow = FunctionReward(kind="function", function=f"{tmp_path}/slow.py:f")
    cfg = RewardConfig(terms=(ExactReward(kind="exact"), slow), num_workers=2)
    monkeypatch.setattr(pools, "ANNOUNCE_AFTER_S", 0.1)
    with RewardPool(cfg) as pool:
        assert outcomes_of(pool, item("abc", "abc"))[0].reward == 4.0
    assert capsys.readouterr() == (
        "",
        'waiting for reward.terms to be loaded: kind = "exact" and kind = "function", '
        f'function = "{slow.function}"; it is given up after 300 s\n',
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    with RewardPool(cfg):
        assert capsys.readouterr() == ("", "")  # the node's first rank has told it
    monkeypatch.setattr(pools, "ANNOUNCE_AFTER_S", 60.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with RewardPool(cfg):
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("library", "term"),
    [("reasoning_gym", ReasoningGymReward(kind="reasoning_gym")), ("math_verify", MathReward(kind="math"))],
)
def test_a_library_that_cannot_be_imported_is_named(
    library: str, term: ReasoningGymReward | MathReward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = break_library(library, tmp_path, monkeypatch)
    with pytest.raises(UserError, match=f'cannot be loaded: kind = "{term.kind}" needs a package .*: {lacks}; install'):
        RewardPool(RewardConfig(terms=[term], num_workers=1))


def test_a_file_does_not_hide_a_module_of_python(function: Callable[..., FunctionReward]) -> None:
    with RewardPool(RewardConfig(terms=(function("hides_python"),))) as pool:
        assert pool.check(item("")).reward == 0.0


def test_workers_score_at_the_same_time(function: Callable[..., FunctionReward], tmp_path: Path) -> None:
    cfg = RewardConfig(terms=(function("meet"),), num_workers=3, sandbox=SandboxConfig(mode="off"))
    with RewardPool(cfg) as pool:
        futures = [pool.submit(item(str(i), place=str(tmp_path), party=3)) for i in range(3)]
        assert [future.result().reward for future in futures] == [1.0, 1.0, 1.0]


def test_workers_import_neither_torch_nor_the_main_module(function: Callable[..., FunctionReward]) -> None:
    assert "torch" in sys.modules and "pytest" in sys.modules
    terms = (ExactReward(kind="exact"), MathReward(kind="math"), ReasoningGymReward(kind="reasoning_gym"))
    with RewardPool(RewardConfig(terms=(*terms, function("imports")))) as pool:
        assert pool.check(item("1", "1", task="chain_sum")).parts["function"] == 0.0


def test_a_worker_that_died_idle_costs_no_item(function: Callable[..., FunctionReward]) -> None:
    with RewardPool(RewardConfig(terms=(function("silent_death"),))) as pool:
        assert outcomes_of(pool, item("last words"))[0].reward == 1.0
        time.sleep(0.6)
        assert outcomes_of(pool, item("next"))[0] == RewardOutcome(reward=1.0, parts={"function": 1.0})


def test_closing_does_not_wait_and_leaves_nothing(function: Callable[..., FunctionReward]) -> None:
    pool = RewardPool(RewardConfig(terms=(function("misbehave"),), timeout_s=60.0))
    assert running(PROGRAM, str(os.getpid()))
    waiting = [pool.submit(item("child", seconds="600.2", detached=False)) for _ in range(3)]
    assert wait_for(lambda: bool(running("sleep", "600.2")))  # the first of them is under way
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    assert [future.result().failure for future in waiting] == ["closed"] * 3
    assert wait_for(lambda: not running("sleep", "600.2"))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(item("late"))
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's end")
def test_workers_and_what_a_reward_has_detached_die_with_a_killed_trainer(
    function: Callable[..., FunctionReward],
) -> None:
    """In a sandbox and without one, and while they are busy."""
    program = f"""
import time
from spmdrl.config import FunctionReward, RewardConfig, SandboxConfig
from spmdrl.rewards.worker import RewardItem
from spmdrl.rewards.client import RewardPool
term = FunctionReward(kind="function", function={function("misbehave").function!r})
for mode in ("off", "auto"):
    pool = RewardPool(RewardConfig(terms=(term,), timeout_s=60.0, sandbox=SandboxConfig(mode=mode)))
    metadata = {{"seconds": "600.8", "detached": True}}
    pool.submit(RewardItem(prompt="", response="child", answer=None, metadata=metadata, task=""))
    globals()[mode] = pool
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], env=os.environ | python_path())
    assert wait_for(lambda: len(running("sleep", "600.8")) == 2, limit_s=60)
    assert len(running(PROGRAM, str(trainer.pid))) >= 2
    time.sleep(0.3)  # so that they are busy
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert wait_for(lambda: not running("sleep", "600.8") and not running(PROGRAM, str(trainer.pid)))
