"""Strangers, and clients that break every rule, at the server of agents: those with a key are served meanwhile.

The server is a process of its own, so that its memory, its descriptors and its console can be seen. FUZZ_SECONDS=600
makes the slow case that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spmdrl.conversation import Action
from spmdrl.envs import endpoint
from spmdrl.envs.endpoint import HOST, MAX_BODY_BYTES, Endpoint
from spmdrl.envs.forms import Call, Reply
from spmdrl.workers.channel import bounded

LINE = re.compile(
    r"the server of agents at http://127\.0\.0\.1:\d+/v1 (refused \d+ requests \(\d+ [a-z ]+(, \d+ [a-z ]+)*\)"
    r"( and (?=h))?)?(hung up on \d+ connections that had sent none)?"
)
MIB = 2**20


class Echo:
    """A desk whose policy says what it was asked last."""

    async def answer(self, call: Call) -> Reply:
        await asyncio.sleep(0.001)
        return Reply(number=0, action=Action(text=str(call.messages[-1]["content"])[:1000]))

    def refuse(self) -> None:
        pass

    def add_reward(self, reward: float, metrics: Any, role: str | None = None) -> None:
        bounded("the reward", reward)


async def serve(pipe: Any) -> None:
    served = Endpoint(0)
    await served.start()
    keys = [served.admit(Echo()) for _ in range(3)]
    served.dismiss(keys[2])
    pipe.send((int(served.url.split(":")[2].split("/")[0]), keys))
    await asyncio.to_thread(pipe.recv)
    await served.close()
    pipe.send(served.num_refused)


def process(pipe: Any, console: Path, max_files: int) -> None:
    sys.stdout = sys.stderr = console.open("w", encoding="utf-8")
    for stream in (1, 2):
        os.dup2(sys.stderr.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    asyncio.run(serve(pipe), debug=False)


@dataclass
class Server:
    """A server that is running, as its clients and its user see it."""

    pid: int
    pipe: Any
    port: int
    key: str
    other_key: str
    ended_key: str
    console: Path
    num_refused: int = 0

    def memory(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=20)

    def ask(self, sent: bytes) -> bytes:
        """Send bytes, and read the beginning of the answer."""
        with self.connect() as connection:
            connection.sendall(sent)
            return connection.recv(1000)

    def head(self, key: str, *lines: str, path: str = "/v1/chat/completions") -> bytes:
        first = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}"]
        return "\r\n".join([*first, *lines, "", ""]).encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def server(folder: Path, *, max_files: int = 1024) -> Iterator[Server]:
    """Run a server, and check at its end that its console shows counts at most."""
    context = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    console = folder / "console"
    child = context.Process(target=process, args=(other, console, max_files))
    child.start()
    assert child.pid is not None and pipe.poll(60)
    port, keys = pipe.recv()
    running = Server(child.pid, pipe, port, *keys, console=console)
    try:
        yield running
        pipe.send("stop")
        assert pipe.poll(60)
        running.num_refused = pipe.recv()
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    for line in console.read_text(encoding="utf-8").splitlines():
        assert LINE.fullmatch(line), line


@dataclass
class Client:
    """A client with a key that calls all the time, every second call on a new connection."""

    server: Server
    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Client:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert not self.failures, self.failures[:3]

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(0.002):
            connection = http.client.HTTPConnection(HOST, self.server.port, timeout=30)
            for _ in range(2):
                number += 1
                try:
                    self._call(connection, f"call {number}")
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    self.failures.append(f"call {number}: {type(error).__name__}: {error}")
            connection.close()

    def _call(self, connection: http.client.HTTPConnection, text: str) -> None:
        before = time.monotonic()
        body = json.dumps({"messages": [{"role": "user", "content": text}]})
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {self.server.other_key}"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        assert json.loads(answer)["choices"][0]["message"]["content"] == text
        self.times_s.append(time.monotonic() - before)


def until(condition: Any, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_bytes_of_strangers_are_answered_and_counted(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        requests = {
            b"401": [
                running.head("a.\udcff"),
                running.head("\udcff\udcfe\xe4."),
                running.head("."),
                running.head(running.key[:-1], "Content-Encoding: deflate", "Content-Length: 100") + b"\xff" * 100,
            ],
            b"410": [running.head(running.ended_key)],
            b"415": [
                running.head(running.key, f"Content-Encoding: {name}", "Content-Length: 100") + b"\xff" * 100
                for name in ("deflate", "gzip", "br", "zstd", "identity", "")
            ],
            b"413": [running.head(running.key, f"Content-Length: {MAX_BODY_BYTES + 1}")],
            b"400": [
                b"\x16\x03\x01" * 99,
                b"GET /\x1b[2J HTTP/1.1\r\nHost: x\r\n\r\n",
                running.head(running.key, "Content-Length: -1"),
                running.head(running.key, "Transfer-Encoding: chunked") + b"\x1b[2J no number\r\n",
                running.head(running.key, *(f"X-{n}: x" for n in range(100))),
            ],
        }
        for status, sent in requests.items():
            for one in sent:
                assert running.ask(one)[9:12] == status, one[:200]
    assert running.num_refused == 10
    assert "5 malformed, 4 without a key)" in running.console.read_text(), running.console.read_text()


def test_silent_connections_cost_those_with_a_key_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEAD_S", 1)
    with server(tmp_path, max_files=256) as running, contextlib.ExitStack() as closing, Client(running) as client:
        before = running.num_files()
        for number in range(400):
            connection = closing.enter_context(running.connect())
            if number % 2:
                connection.sendall(running.head(running.key)[: number % 90])
        assert running.num_files() - before <= 64
        until(lambda: running.num_files() - before <= 2)  # the client's own, and one that is just being closed
        until(lambda: len(client.times_s) > 20)
    assert "hung up on 400 connections that had sent none" in running.console.read_text()


def test_a_connection_that_is_idle_after_an_answer_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_IDLE_S", 1.0)
    with server(tmp_path) as running, running.connect() as idle, Client(running) as client:
        idle.sendall(running.head(running.key, path="/v1/models").replace(b"POST", b"GET"))
        assert idle.recv(2**16).startswith(b"HTTP/1.1 200")
        assert idle.recv(1) == b""  # within the 20 s of its timeout
        until(lambda: len(client.times_s) > 20)


def test_open_bodies_of_a_key_are_bounded_together(tmp_path: Path) -> None:
    """64 bodies that lack their last byte: two are read, and the others wait without being read."""
    size = MAX_BODY_BYTES - 10**6
    with server(tmp_path) as running, contextlib.ExitStack() as closing, Client(running) as client:
        before, left = running.memory(), {}
        for _ in range(64):
            connection = closing.enter_context(running.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            connection.sendall(running.head(running.key, f"Content-Length: {size}"))
            connection.setblocking(False)
            left[connection] = memoryview(bytes(size - 1))
        most = quiet_s = 0.0
        while quiet_s < 0.3:
            progress = 0
            for connection, rest in left.items():
                with contextlib.suppress(BlockingIOError):
                    progress += (sent := connection.send(rest))
                    left[connection] = rest[sent:]
            most = max(most, running.memory() - before)
            quiet_s = 0.0 if progress else quiet_s + 0.02
            time.sleep(0.0 if progress else 0.02)
        assert sum(not rest for rest in left.values()) == 2
        assert most < 150 * MIB
        until(lambda: len(client.times_s) > 20)


WORDS = [*b'\xff \0 \r\n \r\n\r\n \x1b[2J : %ff { " 99999999999999999999'.split(b" "), b" ", "ü\u202e".encode()]
VALUES = ("", "x", "\udcff", "\x1b[2J", "0", "-1", "9" * 30, "chunked", "gzip", "deflate", "100-continue", "close")
NAMES = ("Content-Length", "Transfer-Encoding", "Content-Encoding", "Expect", "Connection", "Upgrade", "Cookie")
CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/responses", "/v1/reward", "/v1/models", "/", "*", "/%ff/..", "http://x:99999/", "/\udcff")
WEIGHTS = (8, 4, 2, 1, 1, 1, 1, 1, 1)  # of the paths
ROLE = '{"messages": [{"role": []}]}'
BODIES = ("{", "[" * 2000, '"\\ud800"', "[1e999]", "9" * 5000, '{"input": {}, "tools": 1}', '{"reward": NaN}', ROLE)


class Fuzzer:
    """One who sends whatever there is, to a server that serves others."""

    def __init__(self, running: Server, seed: int) -> None:
        self._server, self._random = running, random.Random(seed)
        self._open: list[socket.socket] = []
        self.statuses: Counter[str] = Counter()
        self.num_sent = 0

    def attack(self) -> None:
        """Send something on a new connection or on one that is still open, and read, wait, close or reset it."""
        pick, self.num_sent = self._random, self.num_sent + 1
        with contextlib.suppress(OSError):
            if self._open and pick.random() < 0.2:
                connection = self._open.pop(pick.randrange(len(self._open)))
            else:
                connection = self._server.connect()
                connection.settimeout(0.05)
            try:
                for piece in self._pieces(self._sent()):
                    connection.sendall(piece)
                self._end(connection)
            except OSError:
                connection.close()
        if len(self._open) > 100:
            self._open.pop(0).close()

    def close(self) -> None:
        """Hang up."""
        for connection in self._open:
            connection.close()

    def _end(self, connection: socket.socket) -> None:
        end = self._random.random()
        if end < 0.6:
            answer = connection.recv(100)
            self.statuses[answer[9:12].decode("ascii", "replace") or "closed"] += 1
        if end < 0.5:
            connection.close()
        elif end > 0.8:
            self._open.append(connection)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    def _pieces(self, sent: bytes) -> list[bytes]:
        if self._random.random() < 0.7:
            return [sent]
        at = self._random.randrange(len(sent) + 1)
        return [sent[:at], sent[at:]]

    def _sent(self) -> bytes:
        pick = self._random
        kind = pick.random()
        if kind < 0.1:
            return pick.randbytes(pick.randrange(2000))
        sent = b"".join(self._request() for _ in range(pick.choice((1, 1, 1, 2, 40))))
        if kind < 0.3:
            for _ in range(pick.randrange(1, 5)):
                at, cut = pick.randrange(len(sent)), pick.randrange(3)
                sent = sent[:at] + pick.choice((*WORDS, b"", pick.randbytes(3))) + sent[at + cut :]
        return sent[: pick.randrange(len(sent) + 1)] if pick.random() < 0.2 else sent

    def _request(self) -> bytes:
        pick, running = self._random, self._server
        key = pick.choice(
            (running.key, running.key, running.key, running.ended_key, running.key[:-1], "a.\udcff", "\udcfe")
        )
        lines = [f"{pick.choice(NAMES)}: {pick.choice(VALUES)}" for _ in range(pick.choice((0, 0, 0, 0, 1, 2)))]
        if pick.random() < 0.1:
            lines += pick.choice((["X: " + "y" * pick.randrange(20_000)], ["X: y"] * pick.randrange(200)))
        body = self._body()
        if pick.random() < 0.2:
            length = pick.choice((*[f"{len(body):x}"] * 6, f"{len(body) + 1:x}", "-1", "f" * 20)).encode()
            lines.append("Transfer-Encoding: chunked")
            body = length + b"\r\n" + body + pick.choice((*[b"\r\n0\r\n\r\n"] * 6, b"", b"\r\n"))
        else:
            lines.append(f"Content-Length: {max(len(body) + pick.choice((0, 0, 0, 0, 0, 0, 1, -1, 10**7)), 0)}")
        return running.head(key, *lines, path=pick.choices(PATHS, WEIGHTS)[0]) + body

    def _body(self) -> bytes:
        pick = self._random
        if pick.random() < 0.3:
            return pick.choice(BODIES).encode()
        text = pick.choice(("x", "x" * 10**5, "\\u202e\\n\\u001b[2J"))
        others = pick.choice(
            ("", ', "stream": true', ', "n": 2', ', "stop": 5', ', "max_tokens": -1', ', "tools": [{}]')
        )
        return f'{{"messages": [{{"role": "user", "content": "{text}"}}], "input": "?", "reward": 1{others}}}'.encode()


def fuzz(folder: Path, *, seconds: float, seed: int) -> str:
    """Attack a server for that long, and return what was seen."""
    with server(folder) as running, Client(running) as client:
        fuzzer = Fuzzer(running, seed)
        files, began = running.num_files(), time.monotonic()
        memory: list[int] = []
        while (passed := time.monotonic() - began) < seconds:
            fuzzer.attack()
            if passed > seconds / 3 * (1 + len(memory)) or (passed > seconds / 3 and not fuzzer.num_sent % 5000):
                memory.append(running.memory())
        fuzzer.close()
        until(lambda: running.num_files() <= files + 2)
        memory.append(running.memory())
        num_calls, slowest_s = len(client.times_s), max(client.times_s)
    assert num_calls > 10 and fuzzer.num_sent > 50
    assert max(memory) - memory[0] < 32 * MIB, memory
    statuses = ", ".join(f"{status}: {number}" for status, number in sorted(fuzzer.statuses.items()))
    assert {"200", "400", "401", "410"} <= set(fuzzer.statuses) and "500" not in fuzzer.statuses, statuses
    return (
        f"{fuzzer.num_sent} attacks in {seconds:g} s, answered {statuses}; {running.num_refused} counted; {num_calls} "
        f"calls with a key served, the slowest in {slowest_s:.2f} s; memory {memory[0] / MIB:.1f} to "
        f"{memory[-1] / MIB:.1f} MiB, at most {max(memory) / MIB:.1f}"
    )


def test_a_client_with_a_key_is_served_while_others_send_anything(tmp_path: Path) -> None:
    fuzz(tmp_path, seconds=2.0, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_same_for_longer(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    print(fuzz(tmp_path, seconds=float(os.environ.get("FUZZ_SECONDS", "60")), seed=seed))
