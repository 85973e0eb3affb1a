"""An OpenAI-compatible server on loopback, with a key for each episode."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http import HttpProcessingError

from spmdrl.envs.agent_calls import MODEL, Call, CallError, Form, Reply
from spmdrl.envs.chat_form import ChatForm
from spmdrl.envs.responses_form import ResponsesForm
from spmdrl.types import UserError

HOST = "127.0.0.1"
MAX_BODY_BYTES = 16 * 2**20
_REMEMBERED_KEYS = 10_000  # of episodes that have ended
_FORMS: Mapping[str, Form] = {"/v1/chat/completions": ChatForm(), "/v1/responses": ResponsesForm()}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Desk(Protocol):
    """The place where the calls with one key are answered."""

    async def answer(self, call: Call) -> Reply:
        """Return the policy's answer. Raises EpisodeEnded."""

    def refuse(self) -> None:
        """Count a call that cannot be answered."""

    def add_reward(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Add to the reward of the last response. Raises ValueError for what is no number within bounds."""


class EpisodeEnded(Exception):
    """The episode of a call is over."""


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Log(logging.Logger):
    """The log of the server. A request that is not HTTP is counted, where aiohttp would print a traceback."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("endpoint")
        self._endpoint = endpoint

    def handle(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            self._endpoint.num_refused += 1
        elif record.levelno >= logging.WARNING:
            super().handle(record)


class Endpoint:
    """The server of a rank. All of it belongs to one asyncio loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._desks: dict[str, tuple[str, Desk]] = {}  # the secret and the desk of each key, by the key's name
        self._ended: deque[str] = deque(maxlen=_REMEMBERED_KEYS)
        self.num_refused = 0  # calls without the key of an open episode, and what is not HTTP

    async def start(self) -> None:
        """Listen. Raises UserError when the port is not free."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_in_openai_form])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/reward", self._reward)
        for path in _FORMS:
            app.router.add_post(path, self._call)
        # Who has hung up is not answered: the policy does not sample for it.
        self._runner = web.AppRunner(
            app, access_log=None, logger=_Log(self), handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"environment.source.port = {self._port} cannot be used ({error.strerror}); set it to 0, which takes "
                "any free one"
            ) from error

    @property
    def url(self) -> str:
        """The address that clients call their base URL."""
        _, port = self._runner.addresses[0][:2]
        return f"http://{HOST}:{port}/v1"

    async def close(self) -> None:
        """Stop listening, and hang up."""
        await self._runner.cleanup()

    def admit(self, desk: Desk) -> str:
        """Return a new key, whose calls go to this desk."""
        name, secret = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self._desks[name] = secret, desk
        return f"{name}.{secret}"

    def dismiss(self, key: str) -> None:
        """Refuse calls with this key from now on."""
        name, _, _ = key.partition(".")
        if self._desks.pop(name, None):
            self._ended.append(key)

    def _desk(self, request: web.Request) -> Desk:
        """Return the desk of a request's key. Raises _Refusal."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        name, _, secret = key.strip().partition(".")
        known, desk = self._desks.get(name, ("", None))
        if scheme.lower() == "bearer" and secrets.compare_digest(secret.encode(), known.encode()) and desk is not None:
            return desk
        self.num_refused += 1
        if any(secrets.compare_digest(key.encode(), ended.encode()) for ended in self._ended):
            raise _Refusal(410, "the episode of this key is over")
        raise _Refusal(401, "the API key is not that of an open episode; use OPENAI_API_KEY as it was given")

    async def _models(self, request: web.Request) -> web.Response:
        self._desk(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "spmdrl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        desk = self._desk(request)
        match await _body(request):
            case {"reward": int() | float() as reward, **others}:
                metrics = others.get("metrics") or {}
                if isinstance(metrics, dict) and all(map(_is_number, [reward, *metrics.values()])):
                    try:
                        desk.add_reward(reward, metrics)
                    except ValueError as error:
                        raise _Refusal(400, str(error)) from error
                    return web.json_response({})
        raise _Refusal(400, 'the body must be {"reward": NUMBER, "metrics": {NAME: NUMBER}}; metrics can be left out')

    async def _call(self, request: web.Request) -> web.StreamResponse:
        desk, form = self._desk(request), _FORMS[request.path]
        try:
            body = await _body(request)
            call = form.read(body)
        except (_Refusal, CallError) as error:
            desk.refuse()
            raise _Refusal(getattr(error, "status", 400), str(error)) from error
        try:
            reply = await desk.answer(call)
        except EpisodeEnded as error:
            raise _Refusal(410, "the episode of this key is over") from error
        response = form.write(reply, body)
        if not body.get("stream"):
            return web.json_response(response)
        return await _stream(request, form.events(response, body), ends_with_done=isinstance(form, ChatForm))


async def _stream(
    request: web.Request, events: list[tuple[str | None, dict[str, Any]]], *, ends_with_done: bool
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


async def _body(request: web.Request) -> dict[str, Any]:
    """Read a request's JSON object. Raises _Refusal."""
    try:
        body = json.loads(await request.read())
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Refusal(400, "the body has half of a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, "the body is not JSON") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _Refusal(413, f"the body is longer than {MAX_BODY_BYTES} bytes") from error
    if not isinstance(body, dict):
        raise _Refusal(400, "the body is not a JSON object")
    return body


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write errors as OpenAI does."""
    try:
        return await handler(request)
    except _Refusal as refusal:
        status, message = refusal.status, str(refusal)
    except web.HTTPException as error:
        status, message = error.status, f"{request.method} {request.path}: {error.reason}"
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    content = {"message": message, "type": kind, "param": None, "code": None}
    return web.json_response({"error": content}, status=status)
