"""Processes that lie to their rank: whatever a worker or an environment says, the run goes on and shows plain text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl.config import FunctionReward, RewardConfig
from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.client import EnvironmentClient
from spmdrl.envs.protocol import DROPPED, MAX_NAMES, EnvironmentFailure
from spmdrl.faults.text import MAX_LINE_CHARACTERS
from spmdrl.rewards.client import RewardPool
from spmdrl.types import UserError
from spmdrl.workers.channel import MAX_SIZE
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item

SAYS = """
import contextlib, ctypes, json, os, signal, socket, stat, sys, threading, time

def say(answer):
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, answer)

def reply(parts, failure=None, traceback=""):
    say(json.dumps({"parts": parts, "failure": failure, "traceback": traceback}).encode() + b"\\n")
    time.sleep(60)

def fail(failure):
    say(json.dumps({"parts": {}, "failure": failure, "traceback": failure}).encode() + b"\\n")
    os._exit(0)

def hang_up():
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)

class Liar(float):
    def __float__(self): return 1e300
    def __abs__(self): return 0.0

class Unsayable(Exception):
    def __str__(self): return "\\x1b[2J" + chr(0xd800) + "\\x9b31m" + chr(0x202e) + "\\r\\0\\nstep 99/1  reward 1e6"

def raises(error): raise error

def f(prompt, response, answer, metadata):
    return eval(response)
"""
# What is said in the place of an answer. None of it is one.
LIES = {
    "nothing but a line": "say(b'\\n') or time.sleep(60)",
    "half a line": "say(b'{') or time.sleep(60)",
    "bytes": "say(bytes(range(1, 256)).replace(b'\\n', b'') + b'\\n') or time.sleep(60)",
    "a number": "say(b'1.0\\n') or time.sleep(60)",
    "a list": "say(b'[]\\n') or time.sleep(60)",
    "a deep list": "say(b'[' * 10**5 + b']' * 10**5 + b'\\n') or time.sleep(60)",
    "more than a megabyte": "say(b' ' * 2**21) or time.sleep(60)",
    "another term": "reply({'other': 1.0})",
    "two terms": "reply({'function': 1.0, 'other': 1.0})",
    "a whole number": "reply({'function': 10**400})",
    "a truth": "reply({'function': True})",
    "a text": "reply({'function': '1.0'})",
    "no number": "reply({'function': None})",
    "nan": 'say(b\'{"parts": {"function": NaN}, "failure": null, "traceback": ""}\\n\') or time.sleep(60)',
    "infinity": "reply({'function': float('-inf')})",
    "more than float32": "reply({'function': 1e39})",
    "more than the bound": f"reply({{'function': {math.nextafter(MAX_SIZE, math.inf)}}})",
    "a number of 4301 digits": "say(b'{\"parts\": {\"function\": ' + b'9' * 4301 + b'}}\\n') or time.sleep(60)",
    "a reward and a failure": "reply({'function': 1.0}, 'failed')",
    "a failure that is a list": "reply({}, ['failed'])",
    "a traceback and a reward": "reply({'function': 1.0}, None, 'text')",
    "two answers in one line": "say(b'{} {}\\n') or time.sleep(60)",
    "two answers": 'reply({\'function\': 1.0}) if say(b\'{"parts": {"function": 1.0}, "failure": null, \''
    'b\'"traceback": ""}\\n{"parts"\') is None else 0',
    "the end of the line": "hang_up() or time.sleep(60)",
    "a liar": "Liar(0.0)",
    "a failure of control characters": "raises(Unsayable())",
    "a failure of a megabyte": "raises(ValueError('x' * 2**20))",
    "a failure of its own words": "fail(str(Unsayable()) * 9999)",
    "a name that is no text": "raises(type(chr(0xdfff), (Exception,), {})())",
    "a group of errors": "raises(ExceptionGroup('x' * 999, [ValueError(chr(0xd800))]))",
    "a cancelled call": "raises(__import__('asyncio').CancelledError())",
    "an end of a generator": "raises(StopIteration())",
}


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    path = tmp_path_factory.mktemp("functions") / "liars.py"
    path.write_text(SAYS)
    term = FunctionReward(kind="function", function=f"{path}:f")
    with RewardPool(RewardConfig(terms=(term,), timeout_s=1.5, num_workers=2)) as pool:
        yield pool


def is_plain(text: str) -> bool:
    return text.isprintable() and len(text) <= MAX_LINE_CHARACTERS


@pytest.mark.parametrize("name", LIES)
def test_no_answer_of_a_worker_is_believed_that_is_none(liars: RewardPool, name: str) -> None:
    outcomes = outcomes_of(liars, item(LIES[name]), item("0.5"), item("0.25"))
    assert [(outcome.reward, outcome.failure) for outcome in outcomes[1:]] == [(0.5, None), (0.25, None)]
    if name == "two answers":  # the first one was an answer
        return
    assert outcomes[0].reward == 0.0 and outcomes[0].failure is not None and is_plain(outcomes[0].failure)


def test_an_answer_that_comes_too_early_is_no_other_rollouts(liars: RewardPool) -> None:
    early = 'say(b\'{"parts": {"function": 7.0}, "failure": null, "traceback": ""}\\n\' * 3) or 0.0'
    outcomes = outcomes_of(liars, *[item(early), item("0.5")] * 4)
    assert [outcome.reward for outcome in outcomes[1::2]] == [0.5] * 4


EARLY = b'{"parts": {"function": 7.0}, "failure": null, "traceback": ""}\n'


def test_an_answer_between_two_rollouts_ends_the_worker(liars: RewardPool) -> None:
    outcomes_of(liars, *[item(f"threading.Timer(0.3, say, [{EARLY!r}]).start() or 0.0")] * 2)
    time.sleep(0.6)
    assert [outcome.reward for outcome in outcomes_of(liars, item("0.5"), item("0.25"))] == [0.5, 0.25]


# When a module is imported


IMPORTED = {
    "a list of no sentences": "say(b'{\"unprotected\": [1]}\\n'); time.sleep(60)",
    "no list": "say(b'{\"unprotected\": 5}\\n'); time.sleep(60)",
    "a problem of control characters": 'say(json.dumps({"problem": "\\x1b[2J\\nx" + chr(0xd800)}).encode() + b"\\n")',
    "an end": "os._exit(0)",
    "an exit": "sys.exit(0)",
    "an error": "raise Unsayable()",
}


@pytest.mark.parametrize("name", IMPORTED)
def test_a_module_that_lies_when_it_is_imported_is_refused_in_plain_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SAYS + IMPORTED[name])
    term = FunctionReward(kind="function", function=f"{tmp_path / 'module.py'}:f")
    with pytest.raises((UserError, SystemExit)) as raised:
        RewardPool(RewardConfig(terms=(term,), timeout_s=2.0))
    assert str(raised.value).replace("\n", "").isprintable()


# Environments

ENVIRONMENT = (
    SAYS
    + """
import math
from spmdrl.envs import Observation

class Env:
    def reset(self, prompt):
        return "begin"

    def step(self, text: str):
        if text == "good":
            return "good", 0.5, False
        value = eval(text, globals(), {"self": self})
        return value

CYCLE = []
CYCLE.append(CYCLE)
DEEP = {}
for _ in range(10**5):
    DEEP = {"d": DEEP}

class Endless(dict):
    def items(self):
        while True: yield "x", 1.0

def message(**others):
    return Observation(messages=({"role": "user", "content": "x"} | others,))

def measured(**metrics):
    return Observation(messages=({"role": "user", "content": "x"},), metrics=metrics)

def answers(*lines):
    for line in lines:
        say(json.dumps(line).encode() + b"\\n")
    time.sleep(60)
"""
)
OBSERVATION = {"messages": [], "reward": 1.0, "done": True, "metrics": {}, "tool_errors": 0, "state": None}
OBSERVATION |= {"role": None, "role_rewards": {}}
STEPS = {
    "a cycle": "message(tool_calls=CYCLE)",
    "a cycle in a message": "message(other=CYCLE)",
    "depth": "message(other=DEEP)",
    "an endless mapping": "Observation(metrics=Endless(x=1.0))",
    "a huge reward": "('x', 1e39, False)",
    "an infinite reward": "('x', -math.inf, False)",
    "a reward that is text": "('x', '1', False)",
    "a huge whole number": "('x', 10**400, False)",
    "a huge metric": "measured(m=1e300)",
    "a metric that is none": "measured(m='1')",
    "a metric of control characters": "measured(**{'\\x1b[2J': 1.0})",
    "a metric of half a character": "measured(**{chr(0xd800): 1.0})",
    "a metric of a thousand characters": "measured(**{'m' * 1000: 1.0})",
    "a metric without a name": "measured(**{'': 1.0})",
    "ten thousand metrics": "measured(**{f'm{n}': 1.0 for n in range(10**4)})",
    "a message that is huge elsewhere": "message(other='x' * 2**23)",
    "a role of no text": "message(role=5)",
    "errors below zero": "Observation(messages=({'role': 'user', 'content': 'x'},), tool_errors=-1)",
    "errors without end": "Observation(messages=({'role': 'user', 'content': 'x'},), tool_errors=10**400)",
    "a done that is text": "('x', 0.0, 'no')",
    "a state that is none": "Observation(messages=({'role': 'user', 'content': 'x'},), state=5)",
    "a role without a name": "Observation(messages=({'role': 'user', 'content': 'x'},), role='')",
    "a role's reward that is none": "Observation(done=True, role_rewards={'a': 'x'})",
    "a class": "Observation",
    "an error that cannot be shown": "raises(Unsayable())",
    "no JSON": "say(b'no\\n') or time.sleep(60)",
    "another's number": f"answers({ {'number': 10**6, 'observation': OBSERVATION} })",
    "a number that is none": f"answers({ {'number': [], 'observation': OBSERVATION} })",
    "every number with no observation": "answers(*({'number': n, 'observation': {}} for n in range(99)))",
    "a failure that is none": "answers({'number': 2, 'failure': 5, 'traceback': 5})",
    "a line of 64 MiB": "say(b' ' * 2**26) or time.sleep(60)",
    "a line that never ends": "[say(b'x' * 2**16) for _ in iter(int, 1)]",
}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentClient]:
    path = tmp_path_factory.mktemp("environments") / "liars.py"
    path.write_text(ENVIRONMENT)
    source = ClassEnvironment(kind="class", name=f"{path}:Env")
    with EnvironmentClient(EnvironmentConfig(source=source, step_timeout_s=1.5)) as client:
        yield client


def begin() -> EpisodeStart:
    return EpisodeStart(prompt="p", answer=None, task="default", metadata={}, seed=0)


@pytest.mark.parametrize("name", STEPS)
def test_whatever_an_environment_answers_only_its_episode_fails(environments: EnvironmentClient, name: str) -> None:
    bad, good = environments.open(begin()), environments.open(begin())
    for opened in (bad, good):
        assert isinstance(opened.reset().result(timeout=60), Observation)
    answer = bad.step(Action(text=STEPS[name])).result(timeout=60)
    assert isinstance(answer, EnvironmentFailure), answer
    assert is_plain(answer.reason) and answer.traceback.replace("\n", "").isprintable()
    said = good.step(Action(text="good")).result(timeout=60)
    assert isinstance(said, Observation) and said.reward == 0.5
    for opened in (bad, good):
        opened.close()


NAMES_WITHOUT_END = """
import itertools
from spmdrl.envs import Observation

NUMBERS = itertools.count()

class Env:
    def reset(self):
        pass

    def step(self, text: str):
        metrics = {"steady": 1.0} | {f"m{next(NUMBERS)}": 1.0 for _ in range(99)}
        return Observation(messages=({"role": "user", "content": "x"},), metrics=metrics)
"""


def test_names_of_metrics_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text(NAMES_WITHOUT_END)
    source = ClassEnvironment(kind="class", name=f"{tmp_path / 'names.py'}:Env")
    told: list[dict[str, float]] = []
    with EnvironmentClient(EnvironmentConfig(source=source)) as client:
        for _ in range(4):
            opened = client.open(begin())
            opened.reset().result(timeout=60)
            for _ in range(3):
                answer = opened.step(Action(text="")).result(timeout=60)
                assert isinstance(answer, Observation)
                told.append(dict(answer.metrics))
            opened.close()
    assert [metrics.get(DROPPED, 0.0) for metrics in told] == [0.0, 0.0, 98.0, *[99.0] * 9]
    assert all(metrics["steady"] == 1.0 for metrics in told)
    assert len({name for metrics in told for name in metrics} - {DROPPED}) == MAX_NAMES
