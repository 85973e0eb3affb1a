"""Agents: programs whose calls of an OpenAI-compatible server are what the policy reads."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import Action, Observation, ToolCall
from spmdrl.envs.agent import AgentClient, Branches, CallPlace
from spmdrl.envs.forms import Call, CallError, ChatForm, ResponsesForm
from spmdrl.envs.protocol import EnvironmentFailure
from spmdrl.types import UserError
from tests.helpers.agents import START, agent_config, agents, script

ROOT = Path(__file__).parents[2]
TALK = """
    messages = [user(episode["prompt"])]
    for number in range(3):
        messages += [chat(messages), user(f"and {number}?")]
    post("/reward", {"reward": 0.25, "metrics": {"turns": 3}})
    post("/reward", {"reward": 0.5})
"""


def said(text: str) -> Action:
    return Action(text=text)


def episode(client: AgentClient, *actions: Action, start: Any = START) -> list[Any]:
    """Everything that the environment answers: to the reset, and to each action."""
    opened = client.open(start)
    try:
        return [opened.reset().result(), *(opened.step(action).result() for action in actions)]
    finally:
        opened.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_calls_of_a_program_are_what_the_policy_reads(tmp_path: Path) -> None:
    with agents(script(tmp_path, TALK)) as client:
        first, second, third, end = episode(client, *map(said, ["four", " four ", "4"]))
    assert first == Observation(messages=(user("How much is 2 + 2?"),), branch=(0, 0), tools=())
    assert second == Observation(messages=(user("and 0?"),), tools=())
    assert third == Observation(messages=(user("and 1?"),), tools=())
    assert end == Observation(
        done=True, reward=0.75, metrics={"turns": 3.0, "malformed_calls": 0.0, "refused_calls": 0.0}
    )


def test_a_reward_belongs_to_the_response_before_it(tmp_path: Path) -> None:
    body = """
        post("/reward", {"reward": 1})
        for reward in (2, 4):
            chat([user(str(reward))])
            post("/reward", {"reward": reward})
    """
    with agents(script(tmp_path, body)) as client:
        assert [seen.reward for seen in episode(client, said("a"), said("b"))] == [0.0, 3.0, 4.0]


def test_a_role_is_in_the_models_name_and_has_rewards_of_its_own(tmp_path: Path) -> None:
    body = """
        for role, said in (("solver", "?"), ("critic", "!"), ("solver", ".")):
            post("/chat/completions", {"model": f"policy/{role}", "messages": [user(said)]})
            post("/reward", {"reward": 1})
            post("/reward", {"reward": 4, "role": "solver"})
        code, answer = post("/reward", {"reward": 4, "role": "judge"})
        assert code == 400 and "'judge', in which the policy has not answered" in answer["error"]["message"]
    """
    with agents(script(tmp_path, body)) as client:
        found = episode(client, said("a"), said("b"), said("c"))
    assert [seen.role for seen in found] == ["solver", "critic", "solver", None]
    assert [seen.reward for seen in found] == [0.0, 1.0, 1.0, 1.0]
    assert [seen.role_rewards for seen in found] == [{}, *[{"solver": 4.0}] * 3]


def test_the_file_of_an_episode_has_the_answer_only_where_that_is_asked_for(tmp_path: Path) -> None:
    command = script(tmp_path, "chat([user(json.dumps(episode) + os.environ['SPMDRL_SEED'])])")
    common = {"prompt": START.prompt, "task": "sums", "metadata": {"level": 1}, "seed": 7}
    for gives_answer, expected in ((False, common), (True, common | {"answer": "4"})):
        with agents(command, source={"gives_answer": gives_answer}) as client:
            assert episode(client)[0].messages == (user(json.dumps(expected) + "7"),)


def test_the_prompt_can_be_an_argument(tmp_path: Path) -> None:
    command = script(tmp_path, "chat([user(sys.argv[1])])")
    with agents([*command, "--task={prompt}"]) as client:
        assert episode(client)[0].messages == (user(f"--task={START.prompt}"),)
        for prompt in ("\0", "x" * 2**20):
            (answer,) = episode(client, start=replace(START, prompt=prompt))
            assert "the agent cannot be started: " in answer.reason


def test_a_program_that_is_run_again_goes_on_where_it_was(tmp_path: Path) -> None:
    actions = list(map(said, ["four", "4", "vier"]))
    with agents(script(tmp_path, TALK)) as client:
        greeting, *observations = episode(client, *actions)
        history = list(zip(actions, observations, strict=True))
        for length in range(3):
            opened = client.open(START, history[:length], greeting)
            assert opened.step(actions[length]).result() == observations[length]
            opened.close()
        changed = [(said("five"), Observation(messages=(user("and 9?"),), tools=()))]
        opened = client.open(START, changed, greeting)
        answer = opened.step(said("6")).result()
        opened.close()
    assert isinstance(answer, EnvironmentFailure) and "does not repeat itself" in answer.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", "the agent ended without a call of the policy"),
        ("sys.exit('no model')", "the agent ended with exit code 1: no model"),
        ("print('out', flush=True); os.kill(os.getpid(), 9)", "the agent ended with exit code 137: out"),
        ("chat([])", "the agent ended with exit code 1: AssertionError.*the conversation has no message.*"),
    ],
)
def test_a_program_that_fails_before_its_first_call_is_an_error(tmp_path: Path, body: str, reason: str) -> None:
    with agents(script(tmp_path, body)) as client:
        (answer,) = episode(client)
        assert answer.kind == "error" and re.fullmatch(reason, answer.reason)
        with pytest.raises(UserError, match=r"environment.source.command fails: the agent ended"):
            client.check(START)


def test_a_program_that_fails_later_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with agents(script(tmp_path, "chat([user('?')]); print('x' * 10**6); raise ValueError('lost')")) as client:
        *_, answer = episode(client, said("a"))
    assert answer == EnvironmentFailure(kind="error", reason="the agent ended with exit code 1: ValueError: lost")
    assert "Traceback" in answer.traceback


def test_a_program_that_hangs_is_a_timeout_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    body = f"""
        import subprocess
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{sleeper.pid}} {{os.getcwd()}}")
        chat([user("?")])
        time.sleep(600)
    """
    with agents(script(tmp_path, body), step_timeout_s=2.0) as client:
        first, answer = episode(client, said("a"))
        assert first.messages == (user("?"),) and answer == EnvironmentFailure(kind="timeout", reason="timeout")
        *pids, folder = (tmp_path / "pids").read_text().split()
        wait_until(lambda: not any(map(is_alive, pids)) and not Path(folder).exists())


def test_a_program_that_kills_its_guard_ends_with_it(tmp_path: Path) -> None:
    body = f"""
        import signal
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        chat([user("?")])
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    """
    with agents(script(tmp_path, body)) as client:
        _, answer = episode(client, said("a"))
    assert answer == EnvironmentFailure(kind="error", reason="the agent ended with exit code 137")
    wait_until(lambda: not is_alive((tmp_path / "pid").read_text()))  # the kernel tells it after the guard's end


def test_programs_die_with_the_rank(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = script(tmp_path, f"open({str(pids)!r}, 'w').write(str(os.getpid())); chat([user('?')])")

    def rank() -> None:
        agents(command).open(START).reset().result()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    wait_until(lambda: not is_alive(pids.read_text()))


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_calls_that_cannot_be_answered_are_refused_counted_and_survived(tmp_path: Path) -> None:
    body = """
        def refused(status, part, *sent, **keys):
            code, answer = post(*sent, **keys)
            assert code == status and part in answer["error"]["message"], (code, answer)

        asks = {"messages": [user("?")]}
        refused(400, "not JSON", "/chat/completions", b"{")
        refused(400, "not a JSON object", "/chat/completions", [])
        refused(400, "surrogate", "/chat/completions", b'{"messages": "\\\\ud800"}')
        refused(400, "n = 2", "/chat/completions", asks | {"n": 2})
        refused(400, "a role's name is", "/chat/completions", asks | {"model": "policy/"})
        refused(400, "stop must be", "/chat/completions", asks | {"stop": [1]})
        refused(400, "image_url", "/chat/completions", {"messages": [user([{"type": "image_url"}])]})
        refused(400, "previous_response_id", "/responses", {"input": "?", "previous_response_id": "r"})
        refused(400, "NUMBER", "/reward", {"reward": True})
        refused(400, "the reward is nan", "/reward", b'{"reward": NaN}')
        refused(400, "the reward is inf", "/reward", {"reward": 10**400})
        refused(400, "the reward is 1e+39, which is beyond", "/reward", {"reward": 1e39})
        refused(400, "the metric m is inf", "/reward", {"reward": 0, "metrics": {"m": 10**400}})
        refused(400, "not printable text", "/reward", {"reward": 0, "metrics": {"a" * 101: 1}})
        calls = {"role": "assistant", "content": "", "tool_calls": 5}
        refused(400, "tool_calls must be a list", "/chat/completions", {"messages": [calls, user("?")]})
        refused(413, "longer than", "/responses", b'"' + b" " * 2**24 + b'"')
        refused(404, "/v1/embeddings", "/embeddings", {})
        for key in ("", "x", "x.y", os.environ["OPENAI_API_KEY"] + "x", "ü"):
            refused(401, "API key", "/responses", asks, key=key)
        chat(**asks)
    """
    with agents(script(tmp_path, body)) as client:
        first, end = episode(client, said("a"))
    assert first.messages == (user("?"),)
    assert end.done and end.metrics == {"malformed_calls": 10, "refused_calls": 5}


def test_calls_after_the_end_of_their_episode_or_with_a_key_of_none_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "key"
    body = f"open({str(out)!r}, 'w').write(json.dumps(dict(os.environ))); chat([user('?')])"
    with agents(script(tmp_path, body)) as client:
        assert episode(client, said("a"))[-1].metrics["refused_calls"] == 0
        given = json.loads(out.read_text())
        assert "127.0.0.1" in given["NO_PROXY"]
        for _ in range(2):
            assert status_of(given["OPENAI_BASE_URL"], given["OPENAI_API_KEY"]) == 410
        assert status_of(given["OPENAI_BASE_URL"], "another") == 401
        assert episode(client, said("a"))[-1].metrics["refused_calls"] == 3


def test_calls_with_the_key_of_another_open_episode_are_taken_for_that_ones_own(tmp_path: Path) -> None:
    """Test what docs/security.md says: no sandbox keeps a key from another program of the same user."""
    found = tmp_path / "pid"
    body = f"""
        if episode["prompt"] == "kept":
            open({str(found)!r}, "w").write(str(os.getpid()))
            chat([user("mine")])
            time.sleep(600)
        given = open(f"/proc/{{open({str(found)!r}).read()}}/environ").read().split("\\0")
        key = dict(line.split("=", 1) for line in given if line)["OPENAI_API_KEY"]
        assert key != os.environ["OPENAI_API_KEY"]
        assert post("/chat/completions", {{"messages": [user("taken")]}}, key=key)[0] == 200
        chat([user("my own")])
    """
    with agents(script(tmp_path, body)) as client:
        kept = client.open(replace(START, prompt="kept"))
        assert kept.reset().result().messages == (user("mine"),)
        taker = client.open(replace(START, prompt="takes"))
        first = taker.reset()
        assert kept.step(said("a")).result().messages == (user("taken"),)
        kept.step(said("b"))
        assert first.result().messages == (user("my own"),)
        assert taker.step(said("c")).result().metrics == {"malformed_calls": 0, "refused_calls": 0}
        for opened in (kept, taker):
            opened.close()


def test_names_of_metrics_come_to_an_end_and_counts_stay(tmp_path: Path) -> None:
    body = """
        post("/reward", {"reward": 0, "metrics": {f"{episode['prompt']}{n}": 1 for n in range(90)}})
        chat([user("?")])
    """
    with agents(script(tmp_path, body)) as client:
        ends = [episode(client, said("a"), start=replace(START, prompt=prompt))[-1].metrics for prompt in "abca"]
    counts = {"malformed_calls": 0, "refused_calls": 0}
    assert ends[0] == ends[3] == {f"a{n}": 1.0 for n in range(90)} | counts
    assert ends[2] == {f"c{n}": 1.0 for n in range(20)} | {"dropped_metrics": 70.0} | counts


def status_of(url: str, key: str) -> int:
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_stop_ends_what_the_agent_reads(tmp_path: Path) -> None:
    body = """
        answer = chat([user("?")], stop=["Observation:", "\\n\\n"])
        assert answer["content"] == "Act", answer
        chat([user("?"), answer, user("!")])
    """
    with agents(script(tmp_path, body)) as client:
        assert episode(client, said("Act\n\nmore Observation: none"))[-1].messages == (user("!"),)


def test_parallel_calls_are_answered_one_after_another(tmp_path: Path) -> None:
    body = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda text: chat([user(text)])["content"], "abc"))
        assert answers == ["A", "B", "C"], answers
    """
    with agents(script(tmp_path, body)) as client:
        opened = client.open(START)
        seen = [opened.reset().result()]
        while not seen[-1].done:
            seen.append(opened.step(said(seen[-1].messages[0]["content"].upper())).result())
        opened.close()
    assert sorted(one.messages[0]["content"] for one in seen[:-1]) == ["a", "b", "c"]
    assert all(one.branch == (0, 0) for one in seen[:-1])


def test_who_hangs_up_and_calls_again_gets_the_answer_to_the_first_call(tmp_path: Path) -> None:
    body = """
        import socket
        try:
            urllib.request.urlopen(urllib.request.Request(
                os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                json.dumps({"messages": [user("?")]}).encode(),
                {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            ), timeout=0.3)
        except TimeoutError:
            pass
        assert chat([user("?")])["content"] == "late"
    """
    with agents(script(tmp_path, body)) as client:
        opened = client.open(START)
        first = opened.reset().result()
        time.sleep(1.5)
        end = opened.step(said("late")).result()
        opened.close()
    assert first.messages == (user("?"),) and end.done


def test_clients_that_break_http_or_hang_up_are_counted_and_no_traceback_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        import socket, struct

        host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")

        def send(content):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(content)
            return connection

        for broken in (b"GET / HTTP/9.9\\r\\n\\r\\n", b"POST " + b"/" * 10**5, b"\\x16\\x03\\x01" * 99):
            assert b"400 Bad Request" in send(broken).recv(4096)
        asks = json.dumps({"messages": [user("?")], "stream": True}).encode()
        key = os.environ["OPENAI_API_KEY"].encode()
        head = b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\nContent-Length: %d"
        for number in range(40):
            connection = send(head % (key, len(asks)) + b"\\r\\n\\r\\n" + asks)
            time.sleep(number / 4000)
            if number % 2:  # reset, not closed
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        chat([user("last")])
    """
    with agents(script(tmp_path, body)) as client:
        opened = client.open(START)
        answer = opened.reset().result()
        while isinstance(answer, Observation) and not answer.done:
            answer = opened.step(said("a" * 1000)).result()
        opened.close()
    assert isinstance(answer, Observation), answer
    assert answer.metrics == {"malformed_calls": 0, "refused_calls": 3}
    assert "Traceback" not in capfd.readouterr().err


def test_long_texts_are_cut_but_not_the_agent_s_instructions(tmp_path: Path) -> None:
    body = "chat([{'role': 'developer', 'content': 'i' * 100}, user('x' * 100)])"
    with agents(script(tmp_path, body), max_observation_characters=10) as client:
        system, question = episode(client)[0].messages
    assert system == {"role": "system", "content": "i" * 100}
    assert question["content"] == "x" * 10 + "\n[90 more characters are left out]"


def test_what_cannot_run_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no program no-such-program"):
        agents(["no-such-program"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"environment.source.port = {port} cannot be used .* set it to 0"):
            agents(["true"], source={"port": port})
    with pytest.raises(ValueError, match=r'source\.kind = "agent" opens connections'):
        agent_config(["true"], sandbox={"mode": "auto"})
    with pytest.raises(ValueError, match='set history = "append"'):
        agent_config(["true"], history="template")
    with (
        agents(script(tmp_path, "time.sleep(60)"), step_timeout_s=0.5) as client,
        pytest.raises(UserError, match=r"has not called the policy within environment.step_timeout_s = 0.5 seconds"),
    ):
        client.check(START)


def test_a_closed_client_ends_everything(tmp_path: Path) -> None:
    client = agents(script(tmp_path, "chat([user('?')]); time.sleep(600)"))
    opened = client.open(START)
    assert opened.reset().result().messages
    asked = opened.step(said("a"))
    client.close()
    assert asked.result() == EnvironmentFailure(kind="error", reason="closed")
    assert opened.step(said("a")).result() == asked.result()
    opened.close()


# The forms of calls

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CONVERSATION = (
    {"role": "system", "content": "Be kind."},
    user("2 + 3?"),
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "name": "add"},
)


def test_both_forms_are_the_same_conversation() -> None:
    arguments = '{"b": 3, "a": 2}'
    chat = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
            {"role": "user", "content": "2 + 3?", "name": None},
            {
                "role": "assistant",
                "content": "Let me see.",
                "refusal": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ],
        "tools": [{"type": "function", "function": TOOL | {"strict": True}}],
        "max_completion_tokens": 9,
        "temperature": 0.3,
    }
    responses = {
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
        ],
        "tools": [{"type": "function", "strict": False} | TOOL],
        "max_output_tokens": 9,
    }
    assert ChatForm().read(chat) == Call(messages=CONVERSATION, tools=(SCHEMA,), max_tokens=9)
    assert ResponsesForm().read(responses) == ChatForm().read(chat)


def deep_tool(levels: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for _ in range(levels):
        parameters = {"items": parameters}
    return {"type": "function", "function": {"name": "deep", "parameters": parameters}}


def assistant_call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "I"}]}, "the last message must not be the assistant's"),
        ({"messages": [{"role": "robot", "content": "I"}]}, "one of the roles"),
        ({"messages": [user("?")], "tools": [SCHEMA, SCHEMA]}, "two tools have the same name"),
        ({"messages": [user("?")], "tools": [{"type": "web_search"}]}, "tools other than functions"),
        ({"messages": [user("?")], "tools": [{"type": "function", "function": {}}]}, "a function with a name"),
        (
            {"messages": [user("?")], "tools": [deep_tool(900)]},
            "the description of a tool is nested more than 100 deep",
        ),
        ({"messages": [user("?")], "max_tokens": -1}, "the limit of tokens must be a positive number"),
        ({"messages": [user("?")], "response_format": {"type": "json_object"}}, "response_format = "),
        ({"messages": [user("?")], "logprobs": True}, "logprobs = true"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, user("?")]}, "an assistant's tool_calls must have"),
        ({"messages": [assistant_call('{"a":' * 900 + "1" + "}" * 900), user("?")]}, "nested more than 100 deep"),
        ({"messages": 1}, "messages must be a list"),
    ],
)
def test_calls_that_the_policy_cannot_answer_have_a_reason(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        ChatForm().read(body)


# Where a call goes on


def call(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> Call:
    return Call(messages=messages, tools=tools, max_tokens=None)


def assistant(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def test_a_call_goes_on_after_the_deepest_conversation_that_it_begins_with() -> None:
    branches = Branches()
    calls = Action(text="", tool_calls=(ToolCall(name="add", arguments={"a": 1, "b": 2}),))
    same = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
    result = {"role": "tool", "content": "3", "name": "add"}

    assert branches.place(call(user("q"))) == CallPlace((0, 0), (user("q"),))
    branches.add(calls)
    assert branches.place(call(user("q"), assistant("", same), result)) == CallPlace(None, (result,))
    branches.add(said("3\n"))
    so_far = (user("q"), assistant("", same), result)
    # Trimmed by the client, and something appended.
    assert branches.place(call(*so_far, assistant("3"), user("why?"))) == CallPlace(None, (user("why?"),))
    branches.add(said("so"))
    # The same once more: a branch before the last turn, which begins trajectory 1.
    assert branches.place(call(*so_far, assistant("3"), user("why?"))) == CallPlace((0, 2), (user("why?"),))
    branches.add(said("because"))
    # What goes on after either of the two.
    more = (*so_far, assistant("3"), user("why?"), assistant("because"), user("ah"))
    assert branches.place(call(*more)) == CallPlace(None, (user("ah"),))
    branches.add(said("yes"))
    assert branches.place(call(*so_far, assistant("3"), user("why?"), assistant("so"), user("oh"))) == CallPlace(
        (0, 3), (user("oh"),)
    )
    branches.add(said("no"))
    # A rewritten answer, an added instruction, other tools: nothing is kept from there on.
    changed = (user("q"), assistant("", same), result, assistant("4"), user("why?"))
    assert branches.place(call(*changed)) == CallPlace((0, 0), changed)
    branches.add(said("x"))
    ordered = (user("q"), assistant("", same), result, {"role": "system", "content": "Be brief."})
    assert branches.place(call(*ordered, user("?"))) == CallPlace((0, 0), (*ordered, user("?")))
    branches.add(said("x"))
    assert branches.place(call(*more, tools=(SCHEMA,))) == CallPlace((0, 0), more)


# Official clients, and an agent of others

ASKED = {"model": "policy", "tools": [SCHEMA]}


def words_of(client: AgentClient, actions: list[Action]) -> list[Any]:
    """Run an agent that checks by itself what it is answered; returns its calls."""
    *calls, end = episode(client, *actions)
    assert isinstance(end, Observation) and end.done, end
    return calls


CALLS_ADD = Action(
    text="", tool_calls=(ToolCall(name="add", arguments={"a": 2, "b": 3}),), num_context_tokens=11, num_tokens=4
)


def test_the_official_client_talks_calls_tools_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    body = f"""
        import asyncio
        from openai import AsyncOpenAI, NotFoundError, OpenAI

        asked = {{"model": "policy", "tools": [{SCHEMA!r}]}}
        client = OpenAI(max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        messages = [{{"role": "user", "content": "2 + 3?"}}]

        first = client.chat.completions.create(messages=messages, **asked)
        (choice,), usage = first.choices, first.usage
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 4, 15)
        (called,) = choice.message.tool_calls
        assert (called.function.name, called.function.arguments) == ("add", '{{"a": 2, "b": 3}}')
        messages += [choice.message, {{"role": "tool", "tool_call_id": called.id, "content": "5"}}]

        async def whole():
            async with AsyncOpenAI(max_retries=0) as later:
                return (await later.chat.completions.create(messages=messages, **asked)).choices[0]

        second = asyncio.run(whole())
        assert (second.message.content, second.finish_reason) == ("It is 5.", "stop")
        messages += [second.message.model_dump(), {{"role": "user", "content": "sure?"}}]

        options = {{"stream": True, "stream_options": {{"include_usage": True}}}}
        chunks = list(client.chat.completions.create(messages=messages, max_tokens=3, **asked, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Very su"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].usage.total_tokens == 0
        messages += [{{"role": "assistant", "content": "Very su"}}, {{"role": "user", "content": "again"}}]

        async def streamed():
            async with AsyncOpenAI(max_retries=0) as later:
                chunks = await later.chat.completions.create(messages=messages, stream=True, **asked)
                return [chunk.choices[0].delta.tool_calls async for chunk in chunks]

        (again,), nothing = asyncio.run(streamed())
        assert (again.index, again.id, again.function.name, nothing) == (0, "c0003x000", "add", None)
        try:
            client.embeddings.create(model="policy", input="?")
        except NotFoundError as error:
            assert "POST /v1/embeddings" in error.message
        """
    actions = [CALLS_ADD, said("It is 5."), Action(text="Very su", is_cut=True), CALLS_ADD]
    with agents(script(tmp_path, body, prelude="")) as client:
        calls = words_of(client, actions)
    assert [one.messages for one in calls] == [
        (user("2 + 3?"),),
        ({"role": "tool", "content": "5", "name": "add"},),
        (user("sure?"),),
        (user("again"),),
    ]
    assert [one.branch for one in calls] == [(0, 0), None, None, None]
    assert [one.max_tokens for one in calls] == [None, None, 3, None]
    assert all(one.tools == (SCHEMA,) for one in calls)


def test_the_official_client_s_responses_are_the_same_conversation(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    body = f"""
        from openai import OpenAI

        asked = {{"model": "policy", "instructions": "Be kind.", "tools": [{{"type": "function", **{TOOL!r}}}]}}
        client = OpenAI(max_retries=0)
        items = [{{"role": "user", "content": "2 + 3?"}}]

        first = client.responses.create(input=items, **asked)
        (called,) = first.output
        assert (called.type, called.name, called.arguments) == ("function_call", "add", '{{"a": 2, "b": 3}}')
        assert (first.status, first.usage.total_tokens) == ("completed", 15)
        items += [called, {{"type": "function_call_output", "call_id": called.call_id, "output": "5"}}]

        with client.responses.stream(input=items, **asked) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            second = stream.get_final_response()
        assert second.output_text == "".join(deltas) == "It is 5."
        items += [*second.output, {{"role": "user", "content": "sure?"}}]

        for event in client.responses.create(input=items, stream=True, **asked):
            last = event
        assert last.type == "response.completed" and last.response.output[0].arguments == '{{"a": 2, "b": 3}}'
        items += [*last.response.output, {{"type": "function_call_output", "call_id": "c0002x000", "output": "5"}}]

        cut = client.responses.create(input=items, max_output_tokens=2, **asked)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        """
    actions = [CALLS_ADD, said("It is 5."), CALLS_ADD, Action(text="Ye", is_cut=True)]
    with agents(script(tmp_path, body, prelude="")) as client:
        calls = words_of(client, actions)
    result = {"role": "tool", "content": "5", "name": "add"}
    assert [one.messages for one in calls] == [
        ({"role": "system", "content": "Be kind."}, user("2 + 3?")),
        (result,),
        (user("sure?"),),
        (result,),
    ]
    assert [one.branch for one in calls] == [(0, 0), None, None, None]


def test_an_agent_of_a_library_runs_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("smolagents")
    pytest.importorskip("openai")
    body = """
        import json, os
        from smolagents import OpenAIServerModel, ToolCallingAgent, tool

        @tool
        def add(a: int, b: int) -> int:
            '''Adds.

            Args:
                a: One.
                b: Another.
            '''
            return a + b

        episode = json.load(open(os.environ["SPMDRL_EPISODE"]))
        model = OpenAIServerModel(
            model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
        )
        answer = ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run(episode["prompt"])
        model.client.post("/reward", body={"reward": float(answer == "5")}, cast_to=object)
        """
    final = Action(text="", tool_calls=(ToolCall(name="final_answer", arguments={"answer": "5"}),))
    with agents(script(tmp_path, body, prelude="")) as client:
        first, second, end = episode(client, CALLS_ADD, final)
        assert isinstance(first, Observation), first.traceback
    assert {tool["function"]["name"] for tool in first.tools} == {"add", "final_answer"}
    assert first.messages[0]["role"] == "system" and START.prompt in first.messages[-1]["content"]
    assert "5" in second.messages[-1]["content"]
    assert end.done and end.reward == 1.0


def test_the_agent_of_the_documentation_runs(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8").split("\n## Agents\n")[1]
    settings, program = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("toml", "python"))
    command = script(tmp_path, program, prelude="")
    written = tomllib.loads(settings)
    table = written["environment"]
    table["source"]["command"] = command
    assert [term["kind"] for term in written["reward"]["terms"]] == ["environment"]
    with AgentClient(EnvironmentConfig.model_validate(table)) as client:
        *_, end = episode(client, said("5"), said(" 4 "))
    assert (end.done, end.reward, end.metrics["asked"]) == (True, 1.0, 3.0)
