"""Who is hung up on, who waits, and who is refused where the server of agents has no more room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from spmdrl.conversation import Action
from spmdrl.envs import endpoint
from spmdrl.envs import endpoint as endpoint_module
from spmdrl.envs.endpoint import HOST, Bytes, Connections, Endpoint, NoRoom
from spmdrl.envs.forms import Call, Reply
from spmdrl.types import UserError
from tests.helpers.agents import agents, script


class Wire(asyncio.Transport):
    """A connection that can only be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False

    def is_closing(self) -> bool:
        return not self.is_open


def test_the_oldest_stranger_goes_and_then_the_connection_that_is_idle_longest() -> None:
    connections, wires = Connections(8), [Wire() for _ in range(6)]  # room for 2 strangers, and for 6 with a key
    for wire in wires:
        connections.add(wire)
        with connections.answering(wire):
            pass
    strangers = [Wire() for _ in range(4)]
    for stranger in strangers:
        connections.add(stranger)
    assert [one.is_open for one in strangers] == [False, False, True, True]
    assert all(one.is_open for one in wires), "strangers take no room of those with a key"
    with connections.answering(wires[0]), connections.answering(strangers[2]):
        assert [one.is_open for one in wires[:3]] == [True, False, True]
        with contextlib.ExitStack() as entered:
            for wire in wires[2:]:
                entered.enter_context(connections.answering(wire))
            with pytest.raises(NoRoom):
                entered.enter_context(connections.answering(strangers[3]))
    assert connections.is_strangers(strangers[3]) and not connections.is_strangers(strangers[2])
    assert connections.num_silent == 2


def test_seconds_count_for_strangers_only() -> None:
    connections, silent, refused, known = Connections(16), Wire(), Wire(), Wire()
    for wire in (silent, refused, known):
        connections.add(wire)
    with connections.answering(known):
        pass
    assert connections.is_strangers(refused)
    for _ in range(endpoint.HEAD_S):
        connections.tick()
    assert silent.is_open
    connections.tick()
    assert (silent.is_open, refused.is_open, known.is_open, connections.num_silent) == (False, False, True, 1)


def test_a_quarter_of_the_descriptors_is_for_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for limit, most in ((256, 64), (1024, 256), (10**6, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert endpoint.max_connections() == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(UserError, match=r"source.max_open = 49, but under this `ulimit -n` .* has 48 connections"):
        agents(script(tmp_path, ""), source={"max_open": 49})


def test_bytes_are_let_in_by_order_and_a_key_that_has_its_share_is_passed_over() -> None:
    async def run() -> None:
        seen, free = [], Bytes(of_a_key=4, of_all=6)

        async def take(name: str, key: bytes, size: int, until: asyncio.Event) -> None:
            async with free.taken(key, size):
                seen.append(name)
                await until.wait()

        ends = [asyncio.Event() for _ in range(6)]
        sizes = [(b"a", 4), (b"a", 2), (b"b", 1), (b"c", 3), (b"b", 1), (b"b", 0)]
        tasks = [
            asyncio.ensure_future(take(str(n), *one, end)) for n, (one, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        await asyncio.sleep(0.01)
        assert seen == ["0", "2"]  # 1 waits for its key, 3 for all, and 4 and 5 for 3
        tasks[3].cancel()
        await asyncio.sleep(0.01)
        assert seen == ["0", "2", "4", "5"]
        ends[0].set()
        await asyncio.sleep(0.01)
        assert seen == ["0", "2", "4", "5", "1"]
        for end in ends:
            end.set()
        await asyncio.wait(tasks)

    asyncio.run(run())


class Desk:
    """A desk that counts, and answers when it is let."""

    def __init__(self) -> None:
        self.num_refused, self.may_answer = 0, asyncio.Event()

    async def answer(self, call: Call) -> Reply:
        if call.max_tokens == 666:
            raise KeyError("\x1b[2J")
        await self.may_answer.wait()
        return Reply(number=0, action=Action(text="yes"))

    def refuse(self) -> None:
        self.num_refused += 1

    def add_reward(self, reward: float, metrics: Any, role: str | None = None) -> None: ...


async def sent(endpoint: Endpoint, key: str, body: bytes, *lines: str) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection(HOST, int(endpoint.url.split(":")[2].split("/")[0]))
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines, "", ""]
    writer.write("\r\n".join(head).encode() + body)
    return reader, writer


async def status(reader: asyncio.StreamReader, _: Any) -> tuple[int, str]:
    """Read an answer. The writer is an argument because its connection is closed where nothing refers to it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    return int(head[9:12]), (await reader.readexactly(length)).decode()


def test_calls_that_find_no_room_do_not_end_or_are_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint_module, "max_connections", lambda: 4)  # 3 of them with a key
    monkeypatch.setattr(endpoint_module, "_BODY_S", 0.2)
    body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
    length = f"Content-Length: {len(body)}"

    async def run() -> None:
        endpoint, desk = Endpoint(0), Desk()
        await endpoint.start()
        key = endpoint.admit(desk)
        reader, writer = await sent(endpoint, key, b"", length, "Expect: 100-continue")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body[:-1])
        code, text = await status(reader, writer)
        assert code == 408 and "has not come within 0.2 seconds" in text and desk.num_refused == 1
        failing = body.replace(b"}]", b'}], "max_tokens": 666')
        code, text = await status(*await sent(endpoint, key, failing, f"Content-Length: {len(failing)}"))
        assert code == 500 and "KeyError" not in text
        waiting = [await sent(endpoint, key, body, length) for _ in range(3)]
        await asyncio.sleep(0.1)
        code, text = await status(*await sent(endpoint, key, body, length))
        assert code == 429 and "all of the 3 connections" in text
        desk.may_answer.set()
        assert [(await status(*one))[0] for one in waiting] == [200] * 3
        await endpoint.close()

    asyncio.run(run())
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "\x1b" not in shown and "refused" not in shown
