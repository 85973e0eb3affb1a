"""Whatever an environment does, its episode gets an answer in time, and the others the answers they would have had."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import SandboxConfig
from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs.client import EnvironmentClient, OpenEnvironment
from spmdrl.envs.protocol import Answer, EnvironmentFailure
from spmdrl.envs.worker import PROGRAM
from spmdrl.types import UserError
from spmdrl.workers import pool as pools
from tests.helpers.rewards import running, wait_for

CLASSES = '''
import asyncio, contextlib, os, random, signal, socket, stat, subprocess, sys, threading, time
from pathlib import Path
from spmdrl.envs import Action, Observation

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

class Counts:
    """Counts its steps from a random number; what it is told to do, it does."""

    def __init__(self, factor=1):
        self.factor = factor

    def reset(self, prompt, seed, metadata):
        self.count = random.Random(seed).randrange(1000) * self.factor
        self.metadata = metadata
        if prompt == "fails":
            raise KeyError("no such prompt")
        if prompt == "hangs":
            time.sleep(600)
        return f"{prompt} {self.count}"

    def step(self, text: str):
        self.count += 1
        kind, _, argument = text.partition(" ")
        match kind:
            case "hang": time.sleep(600)
            case "sleep": time.sleep(float(argument))
            case "exit": sys.exit("bye")
            case "raise": raise ValueError("bad\\nnews")
            case "mute": raise Mute
            case "stop": raise StopIteration
            case "die": os._exit(3)
            case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
            case "die_later": threading.Timer(0.1, os._exit, [4]).start()
            case "die_once":
                if not os.path.exists(argument):
                    open(argument, "w").close()
                    os._exit(5)
            case "say":
                for fd in map(int, os.listdir("/proc/self/fd")):
                    with contextlib.suppress(OSError):
                        if stat.S_ISSOCK(os.fstat(fd).st_mode):
                            os.write(fd, argument.encode() + b"\\n")
                time.sleep(600)
            case "child":
                subprocess.Popen(["sleep", argument])
                time.sleep(600)
            case "evaluate":
                value = eval(argument)
                return (value, 0.0, False) if isinstance(value, str) else value
        return f"{text} {self.count}", self.count / 4, kind == "last", {"steps": 1}

class Async:
    async def reset(self, **start):
        self.start = start
        await asyncio.sleep(0)

    async def step(self, action):
        kind, _, argument = action.text.partition(" ")
        match kind:
            case "sleep": await asyncio.sleep(float(argument))
            case "hang": await asyncio.sleep(600)
            case "block": time.sleep(600)
            case "exit": sys.exit("bye")
            case "cancel": asyncio.current_task().cancel(); await asyncio.sleep(1)
        calls = [(call.name, call.arguments) for call in action.tool_calls]
        return Observation(messages=({"role": "tool", "content": f"{calls} {sorted(self.start.items())}"},), reward=1.0)

    async def close(self):
        Path("closed").touch()

class Unsteady:
    def reset(self):
        return str(time.time())

    def step(self, action):
        return Observation(messages=({"role": "user", "content": "same"},), metrics={"time": time.time()})

class Closes:
    def reset(self, metadata):
        self.place = metadata["place"]

    def step(self, action):
        return str(os.listdir(".")), Path("file").write_text("x"), False

    def close(self):
        if self.place == "hang":
            time.sleep(600)
        if self.place:
            Path(self.place).touch()
        raise RuntimeError("not counted")

class Picky:
    def reset(self, prompt, difficulty): ...
    def step(self, action): ...

class Half:
    def reset(self): ...

class Deaf:
    def reset(self): ...
    def step(self): ...

class Short:
    def reset(self): return Observation(done=True)
    def step(self, action): ...

class Odd:
    def reset(self): return 5
    def step(self, action): ...

class Leaves:
    def __init__(self):
        raise SystemExit(0)
    def reset(self): ...
    def step(self, action): ...
'''


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without a sandbox write where the run was started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classes") / "classes.py"
    path.write_text(CLASSES)
    return path


def config(file: Path, name: str, *, mode: str = "off", params: Any = None, **limits: Any) -> EnvironmentConfig:
    source = ClassEnvironment(kind="class", name=f"{file}:{name}", params=params or {})
    return EnvironmentConfig(source=source, sandbox=SandboxConfig(mode=mode), **{"step_timeout_s": 20.0, **limits})


@pytest.fixture(scope="module")
def counts(file: Path) -> Iterator[EnvironmentClient]:
    with EnvironmentClient(config(file, "Counts", max_observation_characters=1000)) as client:
        yield client


@pytest.fixture(scope="module")
def impatient(file: Path) -> Iterator[EnvironmentClient]:
    with EnvironmentClient(config(file, "Counts", step_timeout_s=0.5)) as client:
        yield client


def begin(prompt: str = "prompt", seed: int = 0, **metadata: Any) -> EpisodeStart:
    return EpisodeStart(prompt=prompt, answer="42", task="task", metadata=metadata, seed=seed)


def act(text: str, *calls: ToolCall) -> Action:
    return Action(text=text, tool_calls=calls)


def got(future: Future[Answer]) -> Observation:
    answer = future.result(timeout=60)
    assert isinstance(answer, Observation), answer
    return answer


def failed(future: Future[Answer]) -> EnvironmentFailure:
    answer = future.result(timeout=60)
    assert isinstance(answer, EnvironmentFailure), answer
    return answer


def text(observation: Observation) -> str:
    return "".join(message["content"] for message in observation.messages)


def play(environment: OpenEnvironment, *texts: str) -> list[Observation]:
    return [got(environment.reset()), *(got(environment.step(act(each))) for each in texts)]


def play_alone(client: EnvironmentClient, seed: int, *texts: str) -> list[Observation]:
    """The observations of an episode when nothing happens to its process."""
    environment = client.open(begin(seed=seed))
    answers = play(environment, *texts)
    environment.close()
    return answers


# Classes


def test_episodes_of_one_seed_are_equal_and_others_are_not(counts: EnvironmentClient) -> None:
    first, again, other = (play_alone(counts, seed, "a", "last") for seed in (1, 1, 2))
    assert first == again != other
    start = int(text(first[0]).split()[1])
    assert first[1] == Observation(
        messages=({"role": "user", "content": f"a {start + 1}"},), reward=(start + 1) / 4, metrics={"steps": 1.0}
    )
    assert [observation.done for observation in first] == [False, False, True]


def test_many_are_open_at_once_and_each_keeps_its_order(counts: EnvironmentClient) -> None:
    opened = [counts.open(begin(seed=seed)) for seed in range(100)]
    answers = [[future] for future in [environment.reset() for environment in opened]]
    for turn in range(3):
        for environment, futures in zip(opened, answers, strict=True):
            got(futures[-1])
            futures.append(environment.step(act(f"{turn}")))
    for seed, futures in enumerate(answers):
        assert [got(future) for future in futures] == play_alone(counts, seed, "0", "1", "2")
    for environment in opened:
        environment.close()


@pytest.mark.parametrize("name", ["Counts", "Async"])
def test_slow_steps_overlap(file: Path, name: str) -> None:
    with EnvironmentClient(config(file, name, mode="auto")) as client:
        opened = [client.open(begin(seed=seed)) for seed in range(20)]
        for future in [environment.reset() for environment in opened]:
            got(future)
        began = time.monotonic()
        for future in [environment.step(act("sleep 0.5")) for environment in opened]:
            got(future)
        assert time.monotonic() - began < 3.0  # one after the other: 10


def test_a_step_that_waits_for_a_thread_is_not_late(file: Path) -> None:
    cfg = config(file, "Counts", step_timeout_s=0.6)
    sandbox = SandboxConfig(max_processes=8)  # 4 threads
    with EnvironmentClient(cfg.model_copy(update={"sandbox": sandbox})) as client:
        opened = [client.open(begin(seed=seed)) for seed in range(12)]
        for future in [environment.reset() for environment in opened]:
            got(future)
        for future in [environment.step(act("sleep 0.4")) for environment in opened]:
            assert got(future).messages


def test_an_async_class_gets_the_start_and_the_whole_action(file: Path) -> None:
    with EnvironmentClient(config(file, "Async")) as client:
        assert client.tools == []
        environment = client.open(begin(seed=3, column=[1]))
        assert got(environment.reset()) == Observation()
        observation = got(environment.step(act("text", ToolCall(name="look", arguments={"at": 1}))))
    start = "[('answer', '42'), ('metadata', {'column': [1]}), ('prompt', 'prompt'), ('seed', 3), ('task', 'task')]"
    assert observation.messages == ({"role": "tool", "content": f"[('look', {{'at': 1}})] {start}"},)
    assert observation.reward == 1.0


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        ("('text', float('nan'), False)", "ValueError: the reward is nan"),
        ("('text', 'high', False)", "ValueError: the reward is str 'high' and not a number"),
        ("('text', 1.0, 'no')", "ValueError: done is str 'no'"),
        ("('text', 1.0, False, {'m': float('inf')})", "ValueError: the metric m is inf"),
        ("(b'\\xff', 1.0, False)", "ValueError: step must return an Observation, (text, reward, done)"),
        ("bytes(10**8)", "ValueError: step must return an Observation, (text, reward, done)"),
        ("7", "ValueError: step must return an Observation, (text, reward, done)"),
        ("(None, 1.0, False)", "ValueError: a step returned neither a message for the policy nor done"),
        ("Observation(messages=[{'role': 'user', 'content': b'x'}])", "ValueError: a message's content is bytes b'x'"),
        ("Observation(messages=['text'])", "ValueError: a message is str 'text' and not a mapping"),
        ("Observation(messages=[{'role': 'user', 'content': '', 'extra': {1}}])", "TypeError: Object of type set"),
        ("Observation(messages=[{'role': 'user', 'content': '', 'extra': 'x' * 2**21}])", "ValueError: the observat"),
        (
            "Observation(messages=[{'role': 'assistant', 'content': '', 'tool_calls': [1]}])",
            "ValueError: a message's",
        ),
        (
            "Observation(messages=[{'role': 'assistant', 'content': '', 'tool_calls': 5}])",
            "ValueError: a message's",
        ),
        ("Observation(done=True, tool_errors=-1)", "ValueError: tool_errors is -1"),
        ("Observation(done=True, tool_errors=10**400)", "ValueError: tool_errors is 1000"),
        ("Observation(done=True, reward=10**400)", "ValueError: the reward is inf"),
    ],
)
def test_what_is_no_observation_is_named(counts: EnvironmentClient, value: str, failure: str) -> None:
    environment = counts.open(begin())
    play(environment, "a")
    answer = failed(environment.step(act(f"evaluate {value}")))
    assert answer.kind == "error" and answer.reason.startswith(failure)
    assert failed(environment.step(act("a"))) == answer  # its episode is over
    environment.close()


def test_texts_are_cut_and_made_valid(counts: EnvironmentClient) -> None:
    environment = counts.open(begin())
    play(environment)
    for value, expected in (
        ("'x' * 10**8", "x" * 1000 + "\n[99999000 more characters are left out]"),
        ("'a\\ud800b\\ud83d\\ude00'", "a\ufffdb\U0001f600"),
        ("'\\x00\\x1b[0m<|im_end|>\\u2028\\n'", "\x00\x1b[0m<|im_end|>\u2028\n"),
    ):
        assert text(got(environment.step(act(f"evaluate {value}")))) == expected
    environment.close()


# Failures


@pytest.mark.parametrize(
    ("told", "failure"),
    [
        ("raise", "ValueError: bad"),
        ("mute", "Mute: its text cannot be read: RuntimeError"),
        ("exit", "RuntimeError: step called sys.exit('bye')"),
        ("stop", "RuntimeError: StopIteration"),
        ("die", "the environment's process exited with code 3"),
        ("segfault", "the environment's process was killed by SIGSEGV"),
    ],
)
def test_a_failure_is_its_episodes_alone(counts: EnvironmentClient, told: str, failure: str) -> None:
    others = [counts.open(begin(seed=seed)) for seed in range(5)]
    began = [play(environment, "a") for environment in others]
    bad = counts.open(begin(seed=9))
    play(bad, "a")
    pending = [environment.step(act("sleep 0.1")) for environment in others[1:]]
    answer = failed(bad.step(act(told)))
    assert (answer.kind, answer.reason) == ("error", failure)
    pending.insert(0, others[0].step(act("sleep 0.1")))
    for seed, (environment, future) in enumerate(zip(others, pending, strict=True)):
        answers = [*began[seed], got(future), got(environment.step(act("last")))]
        assert answers == play_alone(counts, seed, "a", "sleep 0.1", "last")
        environment.close()
    bad.close()


def test_a_step_that_kills_its_process_once_is_asked_again(counts: EnvironmentClient, tmp_path: Path) -> None:
    told = f"die_once {tmp_path / 'died'}"
    assert play_alone(counts, 1, "a", told, "b") == play_alone(counts, 1, "a", told, "b")


def test_a_process_that_dies_when_nothing_is_asked_is_not_started_for_ever(counts: EnvironmentClient) -> None:
    environment = counts.open(begin())
    assert text(play(environment, "die_later")[1]).startswith("die_later")
    assert wait_for(lambda: environment._session._failure is not None, 30.0)
    answer = failed(environment.step(act("a")))
    assert answer.kind == "error" and "exited with code 4" in answer.reason
    environment.close()
    assert play_alone(counts, 1, "a")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("Counts", "auto"),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("Counts", "off"), ("Async", "off"), ("Async", "auto"))
        ),
    ],
)
def test_a_hang_is_a_timeout_and_the_others_are_played_again(file: Path, name: str, mode: str) -> None:
    with EnvironmentClient(config(file, name, step_timeout_s=1.2, mode=mode)) as client:
        others = [client.open(begin(seed=seed)) for seed in range(5)]
        began = [play(environment, "a", "b") for environment in others]
        hangs = client.open(begin(seed=9))
        play(hangs, "a")
        hung = hangs.step(act("hang"))
        time.sleep(0.8)
        pending = [environment.step(act("sleep 0.6")) for environment in others]  # under way when it is killed
        assert failed(hung) == EnvironmentFailure(
            kind="timeout", reason="no answer within environment.step_timeout_s = 1.2 seconds"
        )
        for seed, (environment, future) in enumerate(zip(others, pending, strict=True)):
            answers = [*began[seed], got(future), got(environment.step(act("c")))]
            assert answers == play_alone(client, seed, "a", "b", "sleep 0.6", "c")


def test_who_blocks_the_loop_times_out_and_nobody_else(file: Path) -> None:
    with EnvironmentClient(config(file, "Async", step_timeout_s=0.5)) as client:
        opened = [client.open(begin(seed=seed)) for seed in range(5)]
        for environment in opened:
            play(environment)
        told = ["sleep 0.3", "sleep 0.3", "block", "sleep 0", "sleep 0.1"]
        futures = [environment.step(act(each)) for environment, each in zip(opened, told, strict=True)]
        assert failed(futures.pop(2)).kind == "timeout"
        for future in futures:
            got(future)


@pytest.mark.parametrize("said", ["no json", "[]", "{}", '{"number": 10000}', '{"number": {}}', "[" * 50_000])
def test_nothing_a_process_writes_stops_the_rank(counts: EnvironmentClient, said: str) -> None:
    other, bad = counts.open(begin(seed=1)), counts.open(begin(seed=2))
    play(other, "a"), play(bad, "a")
    answer = failed(bad.step(act(f"say {said}")))
    assert answer.kind == "error" and answer.reason.endswith("was killed: its answer is invalid")
    assert got(other.step(act("b"))) == play_alone(counts, 1, "a", "b")[2]
    other.close(), bad.close()


def test_exceptions_that_end_loops_fail_an_async_step_only(file: Path) -> None:
    with EnvironmentClient(config(file, "Async")) as client:
        for told, failure in (("exit", "RuntimeError: step called sys.exit('bye')"), ("cancel", "CancelledError: ")):
            environment = client.open(begin())
            play(environment)
            assert failed(environment.step(act(told))).reason == failure


def test_a_timeout_ends_what_a_step_started(impatient: EnvironmentClient) -> None:
    environment = impatient.open(begin())
    play(environment)
    assert failed(environment.step(act("child 600.4"))).kind == "timeout"
    assert wait_for(lambda: not running("sleep", "600.4"))
    environment.close()


# Replay


def test_an_episode_goes_on_from_its_history(counts: EnvironmentClient) -> None:
    greeting, *answers = play_alone(counts, 5, "a", "b", "c")
    history = list(zip(map(act, "ab"), answers, strict=False))
    resumed = counts.open(begin(seed=5), history, greeting)
    assert got(resumed.step(act("c"))) == answers[2]
    unbegun = counts.open(begin(seed=5), (), greeting)
    assert got(unbegun.step(act("a"))) == answers[0]
    resumed.close()
    unbegun.close()


def test_an_environment_that_does_not_repeat_itself_is_refused(counts: EnvironmentClient, file: Path) -> None:
    greeting, first, second = play_alone(counts, 5, "a", "b")
    wrong = counts.open(begin(seed=5), [(act("a"), second)], greeting)
    answer = failed(wrong.step(act("b")))
    assert answer.kind == "error" and "step 1 gave another observation" in answer.reason
    wrong.close()
    with EnvironmentClient(config(file, "Unsteady")) as client:
        greeting, first = play_alone(client, 0, "a")
        assert (
            "the reset gave another"
            in failed(client.open(begin(), [(act("a"), first)], greeting).step(act("b"))).reason
        )


def test_processes_share_the_episodes(file: Path) -> None:
    with EnvironmentClient(config(file, "Counts", num_workers=2)) as client:
        opened = [client.open(begin()) for _ in range(4)]

        def pids() -> list[str]:
            return [text(got(environment.step(act("evaluate str(os.getpid())")))) for environment in opened]

        for environment in opened:
            got(environment.reset())
        first = pids()
        assert len({*first}) == 2 and first[:2] == first[2:]
        opened[0].close(), opened[2].close()
        opened = [client.open(begin()) for _ in range(2)]
        for environment in opened:
            got(environment.reset())
        assert pids() == [first[0]] * 2


# Starting, the sandbox and the end


def test_the_sandbox_is_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    with EnvironmentClient(config(file, "Counts", mode="auto")) as client:

        def given(attempt: str) -> str:
            environment = client.open(begin())
            play(environment)
            answer = environment.step(act(f"evaluate str({attempt})")).result()
            environment.close()
            return text(answer) if isinstance(answer, Observation) else answer.reason

        assert given("os.environ.get('API_KEY')") == "None"
        if not any("sockets" in sentence for sentence in client.unprotected):
            assert given("socket.create_connection(('127.0.0.1', 9))").startswith("PermissionError")
        if not client.unprotected:
            assert given(f"open({str(file)!r}, 'a')").startswith("OSError")
        assert given("'torch' in sys.modules or 'pytest' in sys.modules") == "False"
        assert given("os.getcwd() == os.environ['HOME']") == "True"
        with pytest.raises(UserError, match=r"first reset failed \(in a sandbox, .*\): KeyError"):
            client.check(begin("fails"))
    with EnvironmentClient(config(file, "Odd", mode="auto")) as odd, pytest.raises(UserError, match="failed: ValueErr"):
        odd.check(begin())


def test_files_go_when_no_episode_is_open(file: Path) -> None:
    with EnvironmentClient(config(file, "Closes", mode="auto", step_timeout_s=0.5)) as client:
        one, other = (client.open(begin(place="")) for _ in range(2))
        seen = [text(play(one, "a", "b")[2]), text(play(other, "a")[1])]
        one.close()
        seen.append(text(got(other.step(act("b")))))
        other.close()
        time.sleep(0.3)  # nobody is told that it is closed
        third = client.open(begin(place="hang"))
        seen.append(text(play(third, "a")[1]))
        assert seen == ["['file']"] * 3 + ["[]"]
        third.close()  # hangs, which nobody waits for
        for _ in range(3):
            assert got(client.open(begin(place="")).reset()) == Observation()
            time.sleep(0.3)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Count", {}, r"the environment cannot be loaded: .*no function or class Count; did you mean Counts\?"),
        ("Half", {}, r"Half has no method step; an environment has reset\(prompt, seed\) and step\(action\)"),
        ("Deaf", {}, "Deaf has a step that cannot be called with an action: too many positional arguments"),
        ("Picky", {}, "Picky has a reset that cannot be called: .* asks for difficulty"),
        ("Counts", {"size": 1}, "Counts cannot be made of params = .*unexpected keyword argument 'size'"),
    ],
)
def test_classes_that_cannot_be_used_are_explained(file: Path, name: str, params: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvironmentClient(config(file, name, params=params))


def test_a_module_that_cannot_be_imported_is_explained(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    with pytest.raises(UserError, match=r"broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"):
        EnvironmentClient(config(tmp_path / "broken.py", "Any"))


def test_a_slow_import_is_told_and_waited_for(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(0.5)\n{file.read_text()}")
    monkeypatch.setattr(pools, "ANNOUNCE_AFTER_S", 0.1)
    with EnvironmentClient(config(tmp_path / "slow.py", "Counts")) as client:
        assert text(client.check(begin("hello"))).startswith("hello ")
    assert capsys.readouterr().err == (
        f'waiting for environment.source to be loaded: kind = "class", name = "{tmp_path}/slow.py:Counts"; '
        "it is given up after 300 s\n"
    )


def test_the_first_reset_is_checked(impatient: EnvironmentClient, file: Path) -> None:
    assert text(impatient.check(begin("hello"))).startswith("hello ")
    with pytest.raises(
        UserError, match=r"(?s)first reset failed: KeyError: 'no such prompt'.*in reset.*raise KeyError"
    ) as failure:
        impatient.check(begin("fails"))
    assert "spmdrl" not in str(failure.value)  # only the user's own code is in the traceback
    with pytest.raises(UserError, match=r"environment.step_timeout_s = 0.5"):
        impatient.check(begin("hangs"))
    with EnvironmentClient(config(file, "Leaves")) as leaves, pytest.raises(UserError, match="SystemExit: 0"):
        leaves.check(begin())
    with EnvironmentClient(config(file, "Short")) as short, pytest.raises(UserError, match="first reset returned done"):
        short.check(begin())
    with EnvironmentClient(config(file, "Odd")) as odd, pytest.raises(UserError, match=r"returned int 5\Z"):
        odd.check(begin())


def test_what_cannot_be_sent_fails(counts: EnvironmentClient) -> None:
    environment = counts.open(begin(local=lambda: None))
    assert "pickle" in failed(environment.reset()).reason
    environment.close()


def test_what_is_open_at_the_end_is_closed(file: Path, tmp_path: Path) -> None:
    with EnvironmentClient(config(file, "Closes")) as client:
        for place in (tmp_path / "a", tmp_path / "b", "hang"):
            got(client.open(begin(place=str(place))).reset())
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_closing_does_not_wait_and_leaves_nothing(file: Path) -> None:
    before = {*running(PROGRAM, str(os.getpid()))}
    client = EnvironmentClient(config(file, "Counts", num_workers=2))
    assert len({*running(PROGRAM, str(os.getpid()))} - before) == 4  # each has a guard
    opened = [client.open(begin()) for _ in range(4)]
    for environment in opened:
        play(environment)
    pending = [environment.step(act("hang")) for environment in opened]
    opened[0].close()
    assert failed(pending[0]).reason == "closed"
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10
    assert [failed(future).reason for future in pending] == ["closed"] * 4
    assert failed(opened[1].step(act("late"))).reason == "closed"
    assert failed(client.open(begin()).reset()).reason == "closed"
    assert wait_for(lambda: {*running(PROGRAM, str(os.getpid()))} == before)
    client.close()
