"""An OpenAI-compatible server on loopback, with a key for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import socket
import sys
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from spmdrl.envs.forms import MODEL, Call, CallError, CallForm, ChatForm, Reply, ResponsesForm
from spmdrl.faults.text import lines, say
from spmdrl.types import UserError

# Limits of the endpoint: the connections that are open, and the bytes of requests that are being answered.


MAX_CONNECTIONS = 1024
HEAD_S = 5  # for a connection's first request with a key
MAX_BYTES_OF_A_KEY = 32 * 2**20
MAX_BYTES = 128 * 2**20


def max_connections() -> int:
    """Return a quarter of the descriptors that this process may open, so that the rank always has its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(min(limit // 4, MAX_CONNECTIONS), 8)


class NoRoom(Exception):
    """Every connection with a key has a request that is being answered."""


@dataclass(slots=True)
class _Stranger:
    seconds: int = 0
    is_refused: bool = False


class Connections:
    """The open connections. Those that have shown a key and strangers have room apart, so neither takes the other's.

    Where the room is used up, the oldest stranger is hung up on, or the connection with a key that has been idle
    longest. All of it belongs to one asyncio loop.
    """

    def __init__(self, most: int) -> None:
        self.num_silent = 0  # strangers that were hung up on before they had sent a request
        self._most_strangers = most // 4
        self.most_with_key = most - self._most_strangers
        self._strangers: dict[asyncio.BaseTransport, _Stranger] = {}  # the oldest first
        self._idle: dict[asyncio.BaseTransport, None] = {}  # the one that has been idle longest first
        self._busy: set[asyncio.BaseTransport] = set()

    def add(self, transport: asyncio.BaseTransport) -> None:
        """Count a new connection among the strangers."""
        self._forget_closed()
        self._strangers[transport] = _Stranger()
        if len(self._strangers) > self._most_strangers:
            self._hang_up(next(iter(self._strangers)))

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport) -> Iterator[None]:
        """Count a connection that has shown a key, which is not idle inside of this. Raises NoRoom."""
        self._idle.pop(transport, None)
        if len(self._busy) + len(self._idle) >= self.most_with_key:
            self._forget_closed()
        if len(self._busy) >= self.most_with_key:
            raise NoRoom
        if len(self._busy) + len(self._idle) >= self.most_with_key:
            self._hang_up(next(iter(self._idle)))
        self._strangers.pop(transport, None)
        self._busy.add(transport)
        try:
            yield
        finally:
            self._busy.discard(transport)
            self._idle[transport] = None

    def is_strangers(self, transport: asyncio.BaseTransport) -> bool:
        """Return True for a connection that has shown no key. It is not silent: a request of it is being refused."""
        if transport in self._strangers:
            self._strangers[transport].is_refused = True
        return transport not in self._idle

    def tick(self) -> None:
        """Let a second pass. Seconds are counted, not measured: a loop that was blocked hangs up on nobody."""
        self._forget_closed()
        for transport, stranger in list(self._strangers.items()):
            stranger.seconds += 1
            if stranger.seconds > HEAD_S:
                self._hang_up(transport)

    def _hang_up(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._idle.pop(transport, None)
        if (stranger := self._strangers.pop(transport, None)) is not None:
            self.num_silent += not stranger.is_refused
        transport.abort()

    def _forget_closed(self) -> None:
        for open_ones in (self._strangers, self._idle):
            for transport in [one for one in open_ones if one.is_closing()]:
                del open_ones[transport]


class Bytes:
    """The bytes of requests that are being read or answered: of each key, and of all. Who finds no room waits."""

    def __init__(self, of_a_key: int = MAX_BYTES_OF_A_KEY, of_all: int = MAX_BYTES) -> None:
        self._of_a_key, self._of_all = of_a_key, of_all
        self._taken: Counter[bytes] = Counter()
        self._waiting: deque[tuple[bytes, int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, key: bytes, size: int) -> AsyncIterator[None]:
        """Take that many bytes, of which there are never more than one key may have."""
        assert size <= self._of_a_key <= self._of_all
        place = key, size, asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._let_in()
        try:
            await place[2]
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                self._taken[key] -= size
            self._taken += Counter()  # forgets the keys that have none
            self._let_in()

    def _let_in(self) -> None:
        """Let those in for whom there is room, in their order: only a key that has its share is passed over."""
        for place in list(self._waiting):
            key, size, has_room = place
            if has_room.done() or self._taken[key] + size > self._of_a_key:  # done: it has hung up
                continue
            if self._taken.total() + size > self._of_all:
                return
            self._waiting.remove(place)
            self._taken[key] += size
            has_room.set_result(None)


# The server.


HOST = "127.0.0.1"
MAX_BODY_BYTES = 16 * 2**20
_BODY_S = 60.0
_IDLE_S = 75.0  # between two requests with a key; more than clients keep a connection, so that they hang up first
_MAX_HEADERS = 64
_READ_BYTES = 2**16  # of a body that nobody reads yet, on each connection
_BACKLOG = 1024
_ACCEPT_AGAIN_S = 0.1
_SHOW_EVERY_S = 60
_REMEMBERED_KEYS = 10_000  # of episodes that have ended
_IS_OVER = "the episode of this key is over"
_TOO_LONG = f"the body is longer than {MAX_BODY_BYTES} bytes"
_FORMS: Mapping[str, CallForm] = {"/v1/chat/completions": ChatForm(), "/v1/responses": ResponsesForm()}

_Handler = Callable[["Desk", web.BaseRequest], Awaitable[web.StreamResponse]]


class Desk(Protocol):
    """The place where the calls with one key are answered."""

    async def answer(self, call: Call) -> Reply:
        """Return the policy's answer. Raises EpisodeEnded."""

    def refuse(self) -> None:
        """Count a call that cannot be answered."""

    def add_reward(self, reward: float, metrics: Mapping[str, float], role: str | None = None) -> None:
        """Add to the reward of the last response, or of the last one in a role. Raises ValueError for what is no number
        within bounds, and for a role in which the policy has not answered."""


class EpisodeEnded(Exception):
    """The episode of a call is over."""


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _ServerLogger(logging.Logger):
    """The log of the server. What it says is about requests that are not HTTP: they are counted, and not shown."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("endpoint")
        self._endpoint = endpoint

    def handle(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._endpoint.count("malformed")


class Endpoint:
    """The server of a rank. All of it belongs to one asyncio loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._keys: dict[bytes, tuple[bytes, Desk | None]] = {}  # by name: the secret, and the desk while it is open
        self._ended: deque[bytes] = deque()  # the names of keys without a desk
        self._connections = Connections(max_connections())
        self._bytes = Bytes()
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[tuple[str, str], _Handler] = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/reward"): self._reward,
            **{("POST", path): self._call for path in _FORMS},
        }
        self._unshown: Counter[str] = Counter()  # refused requests, by why
        self._unshown_s = 0
        self.num_refused = 0  # calls without the key of an open episode, and what is not HTTP

    @property
    def max_clients(self) -> int:
        """The number of connections with a key that can be open at once."""
        return self._connections.most_with_key

    async def start(self) -> None:
        """Listen. Raises UserError when the port is not free."""
        self._server = web.Server(
            self._serve,
            handler_cancellation=True,  # who has hung up is not answered: the policy does not sample for it
            access_log=None,
            logger=_ServerLogger(self),
            auto_decompress=False,
            keepalive_timeout=_IDLE_S,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_BYTES,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            self._socket = socket.create_server((HOST, self._port), backlog=_BACKLOG)
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"environment.source.port = {self._port} cannot be used ({error.strerror}); set it to 0, which takes "
                "any free one"
            ) from error
        self._socket.setblocking(False)
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}/v1"  # the address that clients call their base URL
        self._tasks = [asyncio.ensure_future(self._accept()), asyncio.ensure_future(self._watch())]

    async def close(self) -> None:
        """Stop listening, and hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._socket.close()
        await self._runner.cleanup()
        self._show()

    def count(self, reason: str) -> None:
        """Count a request that was refused."""
        self.num_refused += 1
        self._unshown[reason] += 1

    def admit(self, desk: Desk) -> str:
        """Return a new key, whose calls go to this desk."""
        name, secret = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self._keys[name.encode()] = secret.encode(), desk
        return f"{name}.{secret}"

    def dismiss(self, key: str) -> None:
        """Refuse calls with this key from now on."""
        name = key.encode().partition(b".")[0]
        secret, desk = self._keys.get(name, (b"", None))
        if desk is not None:
            self._keys[name] = secret, None
            self._ended.append(name)
            if len(self._ended) > _REMEMBERED_KEYS:
                del self._keys[self._ended.popleft()]

    async def _accept(self) -> None:
        """Take connections one by one: between two of them, those that are there are read.

        A server of asyncio's takes as many as its backlog at once, and has opened their descriptors before any can be
        counted.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
                transport, _ = await loop.connect_accepted_socket(self._server, connection)
            except OSError:  # the client is gone, or the process has used up its descriptors for something else
                await asyncio.sleep(_ACCEPT_AGAIN_S)
            else:
                self._connections.add(transport)

    async def _watch(self) -> None:
        """Hang up on those who send nothing, and show what was refused."""
        while True:
            await asyncio.sleep(1.0)
            self._connections.tick()
            self._unshown_s += 1
            if self._unshown_s >= _SHOW_EVERY_S:
                self._show()

    def _show(self) -> None:
        """Print how many requests and connections were refused since the last time, and nothing of their contents."""
        refused, silent = self._unshown.total(), self._connections.num_silent
        reasons = [f"{number} {reason}" for reason, number in sorted(self._unshown.items())]
        what = [f"refused {refused} requests ({', '.join(reasons)})"] if refused else []
        what += [f"hung up on {silent} connections that had sent none"] if silent else []
        if what:
            with contextlib.suppress(OSError):  # the console is gone
                say(f"the server of agents at {self.url} {' and '.join(what)}", sys.stderr)
        self._unshown.clear()
        self._connections.num_silent = self._unshown_s = 0

    def _desk(self, request: web.BaseRequest) -> tuple[bytes, Desk]:
        """Return the name of a request's key, and its desk. Raises _Refusal."""
        # Bytes, as they came: a header may have what is no UTF-8.
        header = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        scheme, _, key = header.partition(b" ")
        name, _, secret = key.strip().partition(b".")
        known, desk = self._keys.get(name, (b"", None))
        if not (known and scheme.lower() == b"bearer" and secrets.compare_digest(secret, known)):
            self.count("without a key")
            raise _Refusal(401, "the API key is not that of an open episode; use OPENAI_API_KEY as it was given")
        if desk is None:
            self.num_refused += 1
            raise _Refusal(410, _IS_OVER)
        return name, desk

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Errors are written as OpenAI does, and who has shown no key is hung up on."""
        transport = request.transport
        try:
            name, desk = self._desk(request)
            return await self._answer(name, desk, request)
        except _Refusal as refusal:
            status, message = refusal.status, str(refusal)
        except (web.RequestPayloadError, ConnectionError):
            status, message = 400, "the body is broken off, or is not HTTP"
        except Exception as error:
            status, message = 500, "the server has failed; the run's console has its traceback"
            with contextlib.suppress(OSError):
                say(lines("".join(traceback.format_exception(error))), sys.stderr)
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        content = {"message": message, "type": kind, "param": None, "code": None}
        response = web.json_response({"error": content}, status=status)
        if transport is None or self._connections.is_strangers(transport):
            response.force_close()
        return response

    async def _answer(self, name: bytes, desk: Desk, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request with a key, once there is room for it. Raises _Refusal."""
        handler = self._handlers.get((request.method, request.path))
        if handler is None:
            raise _Refusal(404, f"there is no {request.method} {request.path}")
        if request.transport is None:
            raise ConnectionResetError
        try:
            with self._connections.answering(request.transport):
                async with self._bytes.taken(name, _size(request)):
                    return await handler(desk, request)
        except NoRoom as error:
            raise _Refusal(
                429,
                f"all of the {self.max_clients} connections that the server has for calls with a key are in use, a "
                "number that follows from `ulimit -n`; call again later",
            ) from error
        except _Refusal as refusal:
            if request.path in _FORMS and refusal.status != 410:
                desk.refuse()
            raise

    async def _models(self, desk: Desk, request: web.BaseRequest) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "spmdrl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, desk: Desk, request: web.BaseRequest) -> web.StreamResponse:
        match await _body(request):
            case {"reward": int() | float() as reward, **others}:
                metrics, role = others.get("metrics") or {}, others.get("role")
                if (
                    isinstance(metrics, dict)
                    and isinstance(role, str | None)
                    and all(map(_is_number, [reward, *metrics.values()]))
                ):
                    try:
                        desk.add_reward(reward, metrics, role)
                    except ValueError as error:
                        raise _Refusal(400, str(error)) from error
                    return web.json_response({})
        raise _Refusal(
            400,
            'the body must be {"reward": NUMBER, "metrics": {NAME: NUMBER}, "role": NAME}; the last two are optional',
        )

    async def _call(self, desk: Desk, request: web.BaseRequest) -> web.StreamResponse:
        form = _FORMS[request.path]
        body = await _body(request)
        try:
            call = form.read(body)
        except CallError as error:
            raise _Refusal(400, str(error)) from error
        try:
            reply = await desk.answer(call)
        except EpisodeEnded as error:
            raise _Refusal(410, _IS_OVER) from error
        response = form.write(reply, body)
        if not body.get("stream"):
            return web.json_response(response)
        return await _stream(request, form.events(response, body), ends_with_done=isinstance(form, ChatForm))


async def _stream(
    request: web.BaseRequest, events: list[tuple[str | None, dict[str, Any]]], *, ends_with_done: bool
) -> web.StreamResponse:
    """Send server-sent events, as far as the client reads them."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with contextlib.suppress(ConnectionError):  # it has hung up
        await stream.prepare(request)
        for name, event in events:
            line = f"event: {name}\n" if name else ""
            await stream.write(f"{line}data: {json.dumps(event)}\n\n".encode())
        if ends_with_done:
            await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
    return stream


def _size(request: web.BaseRequest) -> int:
    """Return the most bytes that the body can have. Raises _Refusal."""
    if "Content-Encoding" in request.headers:
        raise _Refusal(415, "the body has a Content-Encoding; send it as it is, without this header")
    if not request.body_exists:
        return 0
    if (length := request.content_length) is None:  # it comes in chunks
        return MAX_BODY_BYTES
    if length > MAX_BODY_BYTES:
        raise _Refusal(413, _TOO_LONG)
    return length


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    """Read a request's JSON object. Raises _Refusal."""
    try:
        async with asyncio.timeout(_BODY_S):
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = json.loads(await _read(request))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Refusal(400, "the body has half of a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, "the body is not JSON") from error
    except TimeoutError as error:
        raise _Refusal(408, f"the body has not come within {_BODY_S:g} seconds") from error
    if not isinstance(body, dict):
        raise _Refusal(400, "the body is not a JSON object")
    return body


async def _read(request: web.BaseRequest) -> bytearray:
    """Read a body. `request.read()` would let the server hold it twice."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _Refusal(413, _TOO_LONG)
    return body


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
