"""Each kind of environment answers as its own kind's users know it, and what cannot be used is said in a sentence."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs import sources, tools
from spmdrl.envs.observations import from_json, to_json
from spmdrl.envs.protocol import Environment, Maker

START = EpisodeStart(prompt="What is 2 + 3?", answer="5", task="sums", metadata={"level": 2}, seed=7)


def calls(*wanted: tuple[str, dict[str, Any]], text: str = "", malformed: str | None = None) -> Action:
    made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in wanted)
    return Action(text=text, tool_calls=made, malformed=malformed)


def contents(observation: Observation) -> list[Any]:
    return [message["content"] for message in observation.messages]


async def episode(maker: Maker, *actions: Action, start: EpisodeStart = START) -> list[Observation]:
    """The observations of an episode, that of its reset first."""
    environment: Environment = maker.make()
    observations = [await environment.reset(start)]
    observations += [await environment.step(action) for action in actions]
    await environment.close()
    return observations


def played(load: Callable[[], Any], *actions: Action, start: EpisodeStart = START) -> list[Observation]:
    async def play() -> list[Observation]:
        loaded = load()
        maker = await loaded if isinstance(loaded, Awaitable) else loaded
        try:
            return await episode(maker, *actions, start=start)
        finally:
            await maker.close()

    return asyncio.run(play())


FUNCTIONS = '''
from __future__ import annotations
import asyncio, sys, time
from typing import Literal

def add(a: int, b: int = 10, how: Literal["plain", "loud"] = "plain") -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second, in case
            there is one.
    """
    return a + b

async def later(text: str, wait_s: float) -> str:
    """Return a text after some time.

    Parameters
    ----------
    text : str
        What to return.
    """
    await asyncio.sleep(wait_s)
    return text

def slow(text: str, wait_s: float) -> str:
    """Return a text after some time, without async."""
    time.sleep(wait_s)
    return text

def answers(kind: str):
    """Return something of a kind."""
    match kind:
        case "bytes": return b"123"
        case "list": return [1, "ä", None]
        case "object": return object()
        case "raise": raise KeyError("gone")
        case "mute": raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
        case "exit": sys.exit(3)

async def leaves():
    """Leave."""
    sys.exit(4)

class Others:
    def add(self, a: int) -> int:
        """Add nothing."""

other_add = Others().add

def everything(*numbers: int): "Take everything."
def named(**numbers: int): "Take everything."
def by_place(a: int, /): "Take one."
def unknown(a): "Take something."
def silent(a: int): pass
def strange(a: Others): "Take something strange."
def absent(a: Absent): "Take something absent."
'''


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def function_tools(functions: Path, *names: str) -> Callable[[], Any]:
    functions_of = tuple({"kind": "function", "function": f"{functions}:{name}"} for name in names)
    return lambda: tools.load_tools(tools=functions_of)


def test_a_functions_schema_comes_from_its_signature_and_docstring(functions: Path) -> None:
    maker = asyncio.run(function_tools(functions, "add", "later")())
    assert maker.tools == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "The first."},
                        "b": {"type": "integer", "description": "The second, in case\nthere is one."},
                        "how": {"type": "string", "enum": ["plain", "loud"]},
                    },
                    "required": ["a"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "later",
                "description": "Return a text after some time.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "description": "What to return."},
                        "wait_s": {"type": "number"},
                    },
                    "required": ["text", "wait_s"],
                },
            },
        },
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("everything", "the tool everything takes *numbers: 'int', which no schema describes"),
        ("named", "the tool named takes **numbers: 'int', which no schema describes"),
        ("by_place", "the tool by_place takes a: 'int' by position only, which no schema describes"),
        ("unknown", "the parameter a of the tool unknown has neither an annotation nor a line in the docstring"),
        ("silent", "the tool silent has no docstring"),
        ("strange", "the tool strange has no schema"),
        ("absent", "the annotations of the tool absent cannot be read: name 'Absent' is not defined"),
        ("nowhere", "has no function or class nowhere"),
    ],
)
def test_a_tool_without_a_schema_is_refused(functions: Path, name: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        asyncio.run(function_tools(functions, name)())
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_two_tools_of_one_name_are_refused(functions: Path) -> None:
    with pytest.raises(ValueError, match=r"^two tools are called add, and a call could mean either; rename one$"):
        asyncio.run(function_tools(functions, "add", "other_add")())


def test_results_are_text_or_json_and_failures_are_answers(functions: Path) -> None:
    wanted = [
        ("add", {"a": 1}),
        ("add", {"a": "2", "b": 3}),
        ("add", {"a": "two", "c": 1}),
        ("add", {}),
        ("subtract", {"a": 1}),
        *(("answers", {"kind": kind}) for kind in ("list", "bytes", "object", "raise", "mute", "exit")),
        ("leaves", {}),
    ]
    greeting, answer, end = played(
        function_tools(functions, "add", "answers", "leaves"), calls(*wanted), calls(text="The end.")
    )
    assert greeting == Observation()
    assert [(message["role"], message["name"]) for message in answer.messages] == [("tool", name) for name, _ in wanted]
    assert contents(answer) == [
        "11",
        "5",
        "error: wrong arguments of add: a: input should be a valid integer, unable to parse string as an integer; "
        "there is no argument c",
        "error: wrong arguments of add: a is missing",
        "error: there is no tool subtract; there are add, answers, leaves",
        '[1, "ä", null]',
        "error: the tool returned bytes, which is neither text nor JSON: Object of type bytes is not JSON serializable",
        "error: the tool returned object, which is neither text nor JSON: Object of type object is not JSON "
        "serializable",
        "error: KeyError: 'gone'",
        "error: Mute: its text cannot be read: ZeroDivisionError",
        "error: RuntimeError: answers called sys.exit(3)",
        "error: RuntimeError: leaves called sys.exit(4)",
    ]
    assert (answer.tool_errors, answer.done) == (9, False)
    assert end == Observation(done=True)


def test_calls_of_one_action_run_at_the_same_time_and_are_answered_in_order(functions: Path) -> None:
    wanted = [("later", {"text": "1", "wait_s": 0.3}), ("slow", {"text": "2", "wait_s": 0.3})]
    wanted += [("later", {"text": "3", "wait_s": 0.1}), ("slow", {"text": "4", "wait_s": 0.3})]
    began = time.monotonic()
    _, answer = played(function_tools(functions, "later", "slow"), calls(*wanted))
    assert contents(answer) == ["1", "2", "3", "4"]
    assert time.monotonic() - began < 0.7


def test_what_begins_like_a_call_is_answered_and_the_episode_goes_on(functions: Path) -> None:
    _, alone, beside = played(
        function_tools(functions, "add"), calls(malformed="not JSON"), calls(("add", {"a": 1}), malformed="not JSON")
    )
    assert alone.messages == ({"role": "user", "content": "error: this is no tool call: not JSON"},)
    assert [message["role"] for message in beside.messages] == ["tool", "tool"]
    assert [(one.tool_errors, one.done) for one in (alone, beside)] == [(1, False), (1, False)]


def test_the_python_tool_runs_programs(tmp_path: Path) -> None:
    left = tmp_path / "left"
    child = f"import time; time.sleep(1.5); open({str(left)!r}, 'w')"
    programs = [
        "print(2 + 3)",
        "print('before')\n1 / 0",
        "print('before', flush=True)\nwhile True: pass",
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])",
        "print('x' * 2**21)",
    ]
    source = {"kind": "python", "timeout_s": 1.0}
    _, answer = played(
        lambda: tools.load_tools(tools=(source,)), calls(*(("python", {"code": program}) for program in programs))
    )
    plain, failing, hanging, childish, long = contents(answer)
    assert plain == "5\n" and childish == ""
    assert failing.startswith('before\nTraceback (most recent call last):\n  File "program.py", line 2')
    assert failing.endswith("ZeroDivisionError: division by zero\nerror: the program ended with exit code 1")
    assert hanging == "before\nerror: the program was stopped after 1 s"
    assert long == "x" * 2**20 + "\n[the rest of the output is left out]"
    assert answer.tool_errors == 2
    time.sleep(1.0)
    assert not left.exists(), "a program's own processes end with it"


SERVER = '''
import base64, io, os
import PIL.Image
from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent

server = MCPServer("words", log_level="CRITICAL")
asked = []

@server.tool()
def meaning(word: str) -> str:
    """Say what a word means."""
    asked.append(word)
    return f"{word} is number {len(asked)}"

@server.tool()
def picture(width: int) -> list[TextContent | ImageContent]:
    """Draw."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, 2)).save(file, "PNG")
    drawn = ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")
    return [TextContent(type="text", text="drawn:"), drawn]

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

server.run()
'''


@pytest.fixture
def server(tmp_path: Path) -> Path:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path / "server.py"


def test_tools_of_an_mcp_server_share_its_session_between_episodes(server: Path) -> None:
    async def play() -> None:
        maker = await tools.load_tools(tools=({"kind": "mcp", "command": (sys.executable, str(server))},))
        (meaning, *_) = (tool["function"] for tool in maker.tools)
        assert (meaning["name"], meaning["description"]) == ("meaning", "Say what a word means.")
        assert meaning["parameters"]["required"] == ["word"]
        for number in (1, 2):
            _, answer = await episode(maker, calls(("meaning", {"word": "one"})))
            assert contents(answer) == [f"one is number {number}"] and answer.tool_errors == 0
        _, wrong = await episode(maker, calls(("meaning", {"wort": "one"})))
        assert "Field required" in contents(wrong)[0] and wrong.tool_errors == 1
        _, drawn = await episode(maker, calls(("picture", {"width": 3})))
        seen = from_json(to_json(drawn, 1000), 1000)
        assert contents(seen) == [[{"type": "text", "text": "drawn:"}, {"type": "image"}]]
        assert PIL.Image.open(io.BytesIO(seen.images[0])).size == (3, 2)
        # A server that dies takes the episode with it; the next one has a new server.
        with pytest.raises(Exception, match="the MCP server of the tool leave has ended"):
            await episode(maker, calls(("leave", {})))
        _, answer = await episode(maker, calls(("meaning", {"word": "one"})))
        assert contents(answer) == ["one is number 1"]
        await maker.close()

    asyncio.run(play())


@pytest.mark.parametrize("command", [("no-such-program",), (sys.executable, "-c", "raise SyntaxError('mine')")])
def test_an_mcp_server_that_does_not_start_is_refused(command: tuple[str, ...]) -> None:
    pytest.importorskip("mcp")
    words = "; it said last: SyntaxError: mine" if "mine" in command[-1] else ""
    with pytest.raises(ValueError, match=f"^the MCP server {command[0]}.* cannot be used: .*{words}$"):
        asyncio.run(tools.load_tools(tools=({"kind": "mcp", "command": command},)))


# Modelled on what TRL's documentation shows: state in attributes, tools with Google docstrings, a reward that is read.
TRL = '''
import time

class Guess:
    """A number to guess."""

    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.kwargs = kwargs
        self.reward, self.done, self.secret = 0.0, False, kwargs["level"] + 1
        return "I think of a number."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            The answer.
        """
        if self.done:
            raise ValueError("Game over.")
        if number == self.secret:
            self.reward, self.done = 1.0, True
            return "Yes!"
        self.reward = 0.25
        return "Higher." if number < self.secret else "Lower."

    async def hint(self) -> str:
        """Get a hint."""
        return f"It is {self._how()}."

    @property
    def never(self):
        raise AssertionError("properties are not looked at")

    def _how(self) -> str:
        return "small"

class Owned:
    def reset(self, prompt, level):
        self.seen = (prompt, level)
        self.count = 0

    def knock(self):
        """Knock."""
        count = self.count
        time.sleep(0.05)
        self.count = count + 1
        return self.seen

    async def get_reward(self) -> float:
        return self.count / 2

class Untold:
    def reset(self): return None
    def mute(self, a): "Do."

class Unreset:
    def mute(self): "Do."

class Needy:
    def __init__(self, what): pass
'''


@pytest.fixture
def trl_classes(tmp_path: Path) -> Path:
    (tmp_path / "classes.py").write_text(TRL)
    return tmp_path / "classes.py"


def test_a_class_of_trls_plays_unmodified(trl_classes: Path) -> None:
    maker = tools.load_trl(name=f"{trl_classes}:Guess")
    assert [tool["function"]["name"] for tool in maker.tools] == ["guess", "hint"]
    guess = maker.tools[0]["function"]
    assert (guess["description"], guess["parameters"]["required"]) == ("Guess the number.", ["number"])
    greeting, low, right, over, end = played(
        lambda: maker,
        calls(("guess", {"number": 1}), ("hint", {})),
        calls(("guess", {"number": 3})),
        calls(("guess", {"number": 3})),
        calls(text="It is 3."),
    )
    assert greeting.messages == ({"role": "user", "content": "I think of a number."},)
    assert contents(low) == ["Higher.", "It is small."]
    assert contents(right) == ["Yes!"]
    assert contents(over) == ["error: ValueError: Game over."] and over.tool_errors == 1
    assert [one.reward for one in (low, right, over, end)] == [0.25, 0.75, 0.0, 0.0]
    assert [one.done for one in (low, right, over, end)] == [False, False, False, True]


def test_a_class_of_trls_may_own_its_reward(trl_classes: Path) -> None:
    maker = tools.load_trl(name=f"{trl_classes}:Owned")
    greeting, knock, end = played(lambda: maker, calls(("knock", {}), ("knock", {})), calls(text="Bye."))
    assert greeting == Observation()
    # Calls run one after the other: they share the instance.
    assert contents(knock) == ['["What is 2 + 3?", 2]'] * 2
    assert (knock.reward, end.reward, end.done) == (1.0, 0.0, True)


def test_episodes_of_a_class_of_trls_do_not_share_an_instance(trl_classes: Path) -> None:
    async def play() -> None:
        maker = tools.load_trl(name=f"{trl_classes}:Owned")
        first, second = maker.make(), maker.make()
        for environment in (first, second):
            await environment.reset(START)
        await first.step(calls(("knock", {})))
        assert (await second.step(calls(text="Bye."))).reward == 0.0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Untold", "the parameter a of the tool mute has neither"),
        ("Unreset", "has no method reset"),
        ("Needy", "cannot be made without arguments: TypeError"),
    ],
)
def test_a_class_that_trl_would_not_take_is_refused(trl_classes: Path, name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tools.load_trl(name=f"{trl_classes}:{name}")


GYMNASIUM = """
class Walk:
    def __init__(self, goal):
        self.goal = goal

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return f"seed {seed}, level {options['level']}, {options['prompt']}", {}

    def step(self, action):
        self.place += len(action)
        return f"at {self.place}", 0.5, self.place == self.goal, self.place > self.goal, {"x": 1}

    def close(self):
        print("closed")

class Bare:
    def reset(self, seed):
        return None, {}

    def step(self, action):
        return (Array() if action == "array" else 3, 0.0, False, False, {}) if action else "text"

class Array:
    def __eq__(self, other):
        raise ValueError("The truth value of an array is ambiguous")
"""


@pytest.fixture
def gymnasium_classes(tmp_path: Path) -> Path:
    (tmp_path / "gyms.py").write_text(GYMNASIUM)
    return tmp_path / "gyms.py"


@pytest.mark.parametrize("last", ["ab", "abc"], ids=["terminated", "truncated"])
def test_a_class_like_gymnasiums_plays_in_text(
    gymnasium_classes: Path, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    greeting, step, end = played(
        lambda: sources.load_gymnasium(name=f"{gymnasium_classes}:Walk", params={"goal": 3}),
        Action(text="a"),
        Action(text=last),
    )
    assert greeting.messages == ({"role": "user", "content": "seed 7, level 2, What is 2 + 3?"},)
    assert step == Observation(messages=({"role": "user", "content": "at 1"},), reward=0.5)
    assert end.done and end.reward == 0.5
    assert capsys.readouterr().out == "closed\n"


def test_what_is_not_text_is_an_error(gymnasium_classes: Path) -> None:
    def bare() -> Any:
        return sources.load_gymnasium(name=f"{gymnasium_classes}:Bare", params={})

    assert played(bare) == [Observation()]
    with pytest.raises(TypeError, match="the observation is int and neither text nor a list of parts"):
        played(bare, Action(text="a"))
    with pytest.raises(TypeError, match="the observation is Array and neither text nor a list of parts"):
        played(bare, Action(text="array"))
    with pytest.raises(TypeError, match="step must return"):
        played(bare, Action(text=""))


def test_a_name_without_a_colon_is_an_id_of_gymnasiums() -> None:
    library = pytest.importorskip("gymnasium")

    class Echo(library.Env):  # type: ignore[misc, name-defined]
        observation_space = action_space = library.spaces.Text(100)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return f"{self.np_random.integers(100)}", {}

        def step(self, action: str) -> Any:
            return action, 1.0, True, False, {}

    library.register("spmdrl/Echo-v0", Echo)
    greeting, end = played(lambda: sources.load_gymnasium(name="spmdrl/Echo-v0", params={}), Action(text="hello"))
    assert greeting == played(lambda: sources.load_gymnasium(name="spmdrl/Echo-v0", params={}))[0]
    assert (contents(end), end.reward, end.done) == (["hello"], 1.0, True)
    with pytest.raises(ValueError, match='name = "spmdrl/Ekko-v0" is no id that gymnasium knows'):
        sources.load_gymnasium(name="spmdrl/Ekko-v0", params={})


def test_without_gymnasium_a_name_needs_a_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r'name = "Maze-v0" has no colon, .*install gymnasium, or give package'):
        sources.load_gymnasium(name="Maze-v0", params={})


def reasoning_start() -> EpisodeStart:
    from reasoning_gym.factory import create_dataset

    params = {"size": 1, "seed": 3}
    (entry,) = create_dataset("chain_sum", **params)
    metadata = {"metadata": entry["metadata"], "params": params}
    return EpisodeStart(prompt=entry["question"], answer=entry["answer"], task="chain_sum", metadata=metadata, seed=1)


def test_the_reward_of_several_attempts_is_the_score_of_the_best() -> None:
    start = reasoning_start()
    attempts = [Action(text=text) for text in ("<answer>x</answer>", f"{start.answer} maybe", "no", f"{start.answer}")]
    greeting, *answers = played(
        lambda: sources.load_reasoning_gym(feedback="{score!r}, again."), *attempts, start=start
    )
    assert greeting == Observation()
    *tries, last = answers
    scores = [float(text.removesuffix(", again.")) for one in tries for text in contents(one)]
    assert len(scores) == 3 and 0.0 < max(scores) < 1.0
    best = 0.0
    for one, score in zip(tries, scores, strict=True):
        assert (one.reward, one.done) == (max(0.0, score - best), False)
        best = max(best, score)
    assert (last.messages, last.done) == ((), True)
    assert sum(one.reward for one in answers) == pytest.approx(1.0)


@pytest.mark.parametrize("feedback", ["{points}", "{", "{score.x}", "{}"])
def test_a_feedback_that_cannot_be_filled_in_is_refused(feedback: str) -> None:
    with pytest.raises(ValueError, match=r"^feedback = .* cannot be filled in"):
        sources.load_reasoning_gym(feedback=feedback)


OPENENV = """
import socket, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, prompt=None, **kwargs):
        self.count = 0
        return Heard(text=f"{prompt} seed {seed} level {kwargs.get('level')}")

    def step(self, action, **kwargs):
        self.count += 1
        return Heard(text=action.message * self.count, reward=0.5, done=self.count == 2)

    @property
    def state(self):
        return State(step_count=self.count)

app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""


@pytest.fixture
def openenv_url(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("openenv.core.generic_client")
    (tmp_path / "echo_server.py").write_text(OPENENV)
    with subprocess.Popen([sys.executable, str(tmp_path / "echo_server.py")], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(one.stdout.readline())}"
        finally:
            one.kill()


def test_an_openenv_server_plays_over_its_websocket(openenv_url: str) -> None:
    def load() -> Any:
        return sources.load_openenv(url=openenv_url, action="message")

    greeting, first, second = played(load, Action(text="a"), Action(text="b"))
    assert contents(greeting) == ["What is 2 + 3? seed 7 level 2"]
    assert (contents(first), first.reward, first.done) == (["a"], 0.5, False)
    assert (contents(second), second.reward, second.done) == (["bb"], 0.5, True)
    with pytest.raises(RuntimeError, match="Server error"):
        played(lambda: sources.load_openenv(url=openenv_url, action="massage"), Action(text="a"))
    with pytest.raises(ConnectionError):
        played(lambda: sources.load_openenv(url="http://127.0.0.1:9", action="message"))


def test_kinds_load_without_torch() -> None:
    program = (
        "import sys; from spmdrl.envs import sources, tools; from spmdrl.workers import reasoning_gym; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
