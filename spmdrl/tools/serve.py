"""Serve a model or a run's exported model on this machine: chat completions, completions with log-probabilities,
responses, and Anthropic's messages, so that evaluation harnesses and agents can ask it.

It samples with the torch engine. There is no key: who reaches the port may use it, which by default is this machine.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from spmdrl.algo.seeds import mix
from spmdrl.config import ModelConfig
from spmdrl.config.base import Count
from spmdrl.data.tokenizer import encode_prompt, encode_text, load_tokenizer, stop_token_ids
from spmdrl.data.turns import action_of, parse
from spmdrl.dist.session import default_device_type
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.envs.forms import MODEL, CallError, CallForm, ChatForm, MessagesForm, Reply, ResponsesForm
from spmdrl.faults.text import Parser, of_error, say
from spmdrl.model.attention import choose_kernel
from spmdrl.model.load import compute_dtype, load_plain, weights_of
from spmdrl.preflight.hub import PREFIX, model_folder
from spmdrl.refit.refit import load_whole
from spmdrl.tools.program import option, program
from spmdrl.types import Request, Response, UserError

MAX_BODY_BYTES = 16 * 2**20
MOST_CHOICES = 128  # of one call, as OpenAI's
MOST_TOP = 20  # tokens named in the place of one of a chat completion, as OpenAI's
USUAL_TOKENS = 16  # of a completion that names no limit, as OpenAI's
FORMS: Mapping[str, CallForm] = {
    "/v1/chat/completions": ChatForm(),
    "/v1/responses": ResponsesForm(),
    "/v1/messages": MessagesForm(),
}


class Scored(NamedTuple):
    """A token of a text, with what the model itself says, at temperature 1."""

    text: str
    logprob: float | None  # given the tokens before it; None of the first
    best: Sequence[tuple[str, float]]  # tokens that are the most probable in its place, with their log-probabilities


class EngineThread:
    """An engine in a thread of its own, which others ask for responses."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: queue.SimpleQueue[tuple[Request, Future[Response]] | None] = queue.SimpleQueue()
        self._running: dict[int, Future[Response]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Response]:
        """Ask for a response; any thread may."""
        future: Future[Response] = Future()
        self._waiting.put((request, future))
        self._engine.ask_soon()
        return future

    def close(self) -> None:
        """End when what was asked for is answered."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            for place, response in self._engine.generate(self._requests()):
                self._running.pop(place).set_result(response)
        except Exception as error:
            say(f"the engine has failed: {of_error(error)}", sys.stderr)
            for future in self._running.values():
                future.set_exception(error)
            while (given := self._waiting.get()) is not None:  # nothing answers what comes now
                given[1].set_exception(error)

    def _requests(self) -> Iterator[Request | None]:
        for place in itertools.count():
            while True:
                try:
                    given = self._waiting.get(block=not self._running)
                    break
                except queue.Empty:
                    yield None
            if given is None:
                return
            request, self._running[place] = given
            yield request


@dataclass(frozen=True, slots=True)
class Served:
    """A model that answers calls."""

    folder: str
    tokenizer: Any
    model: Any  # transformers' own, for the log-probabilities of given tokens
    sampling: EngineThread
    stops: frozenset[int]
    max_tokens: int  # of a prompt and its response
    numbers: Iterator[int]  # of replies
    scoring: threading.Lock

    def answer(self, form: CallForm, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a conversation, as often as `n` says. Raises CallError."""
        count, top = 1, None
        if isinstance(form, ChatForm):  # its form, which agents in training have too, knows neither
            top, body = _num_top(body), body | {"logprobs": None}
            if not body.get("stream"):
                count, body = body.get("n") or 1, body | {"n": 1}
            if not isinstance(count, int) or not 1 <= count <= MOST_CHOICES:
                raise CallError(f"n must be a whole number from 1 to {MOST_CHOICES}, not {count!r}")
        call, number = form.read(body), next(self.numbers)
        try:
            prompt, _ = encode_prompt(
                self.tokenizer, [*call.messages], system_prompt=None, chat_template="auto", tools=call.tools
            )
        except UserError as error:
            raise CallError(str(error)) from error
        limit = call.max_tokens or self.max_tokens - len(prompt)
        sampled = [self._submit(prompt, body, limit, _seed(body, number, place=place)) for place in range(count)]
        answers = []
        for response in (future.result() for future in sampled):
            action = action_of(self.tokenizer, response.token_ids, parse, stop_token_ids=self.stops)
            read = call.cut(action)
            stopped = read.text != action.text
            counted = replace(
                read,
                is_cut=response.finish_reason == "length" and not stopped,
                num_context_tokens=len(prompt),
                num_tokens=len(response.token_ids),
            )
            answers.append(form.write(Reply(number=number, action=counted), body))
            if top is not None:
                is_whole = read.tool_calls or not stopped  # no stop takes calls away
                said = response.token_ids if is_whole else self._until(response.token_ids, read.text)
                answers[-1]["choices"][0]["logprobs"] = self._chat_logprobs(prompt, said, top)
        return answers[0] if count == 1 else _together(answers)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Continue texts or token ids. Raises CallError."""
        number, used = next(self.numbers), [0, 0]
        choices: list[dict[str, Any]] = []
        if body.get("stream"):
            raise CallError("stream = true is not supported for completions; leave it out")
        limit, top, count = body.get("max_tokens", USUAL_TOKENS), body.get("logprobs"), body.get("n", 1)
        whole = (limit, 0 if top is None else top, count)
        if not all(isinstance(one, int) and one >= 0 for one in whole) or not 1 <= count <= MOST_CHOICES:
            raise CallError(f"max_tokens, logprobs and n must be whole numbers, and n from 1 to {MOST_CHOICES}")
        if not isinstance(stop := body.get("stop") or [], str | list) or not all(isinstance(one, str) for one in stop):
            raise CallError("stop must be a text or a list of texts")
        asked = [prompt for prompt in self._prompts(body.get("prompt", "")) for _ in range(count)]
        sampled = [  # together
            self._submit(prompt, body, limit, _seed(body, number, place=place)) if limit else None
            for place, prompt in enumerate(asked)
        ]
        for place, (prompt, future) in enumerate(zip(asked, sampled, strict=True)):
            response = None if future is None else future.result()
            choices.append(self._choice(prompt, response, body, place=place))
            used = [used[0] + len(prompt), used[1] + (len(response.token_ids) if response else 0)]
        return {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": 0,
            "model": str(body.get("model") or MODEL),
            "choices": choices,
            "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
        }

    def _prompts(self, given: Any) -> list[tuple[int, ...]]:
        several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        found = []
        for one in several:
            if isinstance(one, str):
                ids = encode_text(self.tokenizer, one)
            elif isinstance(one, list) and all(isinstance(token, int) and token >= 0 for token in one):
                ids = tuple(one)
            else:
                raise CallError("prompt must be a text, token ids, or a list of these")
            if not ids or max(ids) >= self.model.config.get_text_config().vocab_size:
                raise CallError("a prompt has no token, or one that the model does not know")
            found.append(ids)
        return found

    def _submit(self, prompt: tuple[int, ...], body: Mapping[str, Any], limit: int, seed: int) -> Future[Response]:
        temperature, top_p = body.get("temperature"), body.get("top_p")
        temperature, top_p = 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p
        if not (isinstance(temperature, int | float) and 0 <= temperature <= 1000):
            raise CallError(f"temperature must be a number from 0 to 1000, not {temperature!r}")
        if not (isinstance(top_p, int | float) and 0 < top_p <= 1):
            raise CallError(f"top_p must be above 0 and at most 1, not {top_p!r}")
        if len(prompt) + limit > self.max_tokens or limit < 1:
            raise CallError(
                f"a prompt of {len(prompt)} tokens and a response of {limit} do not fit into the model's "
                f"{self.max_tokens}"
            )
        request = Request(
            prompt_ids=prompt,
            seed=seed,
            max_response_tokens=limit,
            temperature=float(temperature),
            top_p=float(top_p),
            stop_token_ids=self.stops,
        )
        return self.sampling.submit(request)

    def _choice(
        self, prompt: tuple[int, ...], response: Response | None, body: Mapping[str, Any], *, place: int
    ) -> dict[str, Any]:
        sampled = () if response is None else response.token_ids
        ended = bool(sampled) and sampled[-1] in self.stops
        text = self._text(sampled[:-1] if ended else sampled, skip_special_tokens=True)
        stop = body.get("stop") or []
        ends = [text.find(mark) for mark in ([stop] if isinstance(stop, str) else stop) if mark and mark in text]
        if ends:
            text, ended = text[: min(ends)], True
            sampled = self._until(sampled, text)
        echoes = bool(body.get("echo"))
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = self._logprobs(prompt, sampled, int(body["logprobs"]), echoes=echoes)
        return {
            "index": place,
            "text": (self._text(prompt) if echoes else "") + text,
            "finish_reason": "stop" if ended else "length",
            "logprobs": logprobs,
        }

    def _until(self, sampled: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Return the tokens that hold a text which a stop has cut: the stop may begin inside the last one."""

        def holds(count: int) -> bool:
            return self._text(sampled[:count], skip_special_tokens=True).startswith(text)

        return sampled[: bisect.bisect_left(range(len(sampled)), True, key=holds)]

    def _logprobs(
        self, prompt: tuple[int, ...], sampled: tuple[int, ...], top: int, *, echoes: bool
    ) -> dict[str, list[Any]]:
        """The log-probabilities of a text's tokens, as completions have them."""
        scored = self._scores(prompt, sampled, top, echoes=echoes)
        tokens = [one.text for one in scored]
        tops = [_by_text(one.best) or None for one in scored]
        begin = 0 if echoes else len(self._text(prompt))
        offsets = [*itertools.accumulate(map(len, tokens), initial=begin)][:-1]
        own = [one.logprob for one in scored]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _chat_logprobs(self, prompt: tuple[int, ...], sampled: tuple[int, ...], top: int) -> dict[str, Any]:
        """Those of a response, as chat completions have them, with the token that ended it."""

        def named(text: str, logprob: float | None) -> dict[str, Any]:
            # A token may be a part of a character.
            return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

        content = [
            named(one.text, one.logprob) | {"top_logprobs": [named(*best) for best in one.best]}
            for one in self._scores(prompt, sampled, top, echoes=False)
        ]
        return {"content": content, "refusal": None}

    @torch.no_grad()
    def _scores(self, prompt: tuple[int, ...], sampled: tuple[int, ...], top: int, *, echoes: bool) -> list[Scored]:
        """Score the tokens of a response, and with `echoes` those of its prompt before them."""
        token_ids, begin = (*prompt, *sampled), 1 if echoes else len(prompt)
        given, asked = torch.tensor([token_ids], device=self.model.device), len(token_ids) - begin + 1
        with self.scoring:
            logits = self.model(given, logits_to_keep=asked).logits[0, -asked:-1]  # a few models compute all of them
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(-1, given[0, begin:, None])[:, 0].tolist()
        values, ids = (found.tolist() for found in logprobs.topk(min(top, logprobs.shape[-1]), dim=-1))
        scored = [Scored(self._piece(token_ids[0], begins=True), None, [])] if echoes else []
        for place, (value, *best) in enumerate(zip(own, ids, values, strict=True), start=begin):
            piece = functools.partial(self._piece, begins=place == len(prompt))
            scored.append(Scored(piece(token_ids[place]), value, [*zip(map(piece, best[0]), best[1], strict=True)]))
        return scored

    def _piece(self, token: int, *, begins: bool) -> str:
        """Return a token's part of a text; some tokenizers leave out a space with which a text begins."""
        alone = self._text((token,))
        return alone if begins else self._text((token, token))[len(alone) :]

    def _text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


def _by_text(best: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return log-probabilities by their texts: of tokens with the same one the most probable's, which comes first."""
    found: dict[str, float] = {}
    for text, value in best:
        found.setdefault(text, value)
    return found


def _num_top(body: Mapping[str, Any]) -> int | None:
    """Return how many tokens a chat completion is to name in the place of each; None where it wants no
    log-probabilities."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted not in (None, False, True):
        raise CallError(f"logprobs must be true or false, not {wanted!r}")
    if top is not None and (type(top) is not int or not 0 <= top <= MOST_TOP):
        raise CallError(f"top_logprobs must be a whole number from 0 to {MOST_TOP}, not {top!r}")
    if top and not wanted:
        raise CallError(f"top_logprobs = {top} needs logprobs = true")
    return (top or 0) if wanted else None


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put chat completions of one conversation into one."""
    choices = [answer["choices"][0] | {"index": place} for place, answer in enumerate(answers)]
    usage = answers[0]["usage"]
    written = sum(answer["usage"]["completion_tokens"] for answer in answers)
    usage |= {"completion_tokens": written, "total_tokens": usage["prompt_tokens"] + written}
    return answers[0] | {"choices": choices, "usage": usage}


def _seed(body: Mapping[str, Any], number: int, *, place: int) -> int:
    """Return the seed of a request's response at this place; of one that names no seed it is the request's own."""
    given = body.get("seed")
    if given is not None and not isinstance(given, int):
        raise CallError(f"seed must be a whole number, not {given!r}")
    return mix(number, place) if given is None else mix(given, place, 0)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"

    def __init__(self, served: Served, *others: Any) -> None:
        self._served = served
        super().__init__(*others)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "spmdrl"}]})
        else:
            self._refuse(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        """Answer a call."""
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 <= size <= MAX_BODY_BYTES:
                raise CallError(f"the body is longer than {MAX_BODY_BYTES} bytes")
            body = json.loads(self.rfile.read(size))
            if not isinstance(body, dict):
                raise CallError("the body is no JSON object")
            if self.path == "/v1/completions":
                self._send(200, self._served.complete(body))
            elif (form := FORMS.get(self.path)) is not None:
                answer = self._served.answer(form, body)
                self._stream(form.events(answer, body)) if body.get("stream") else self._send(200, answer)
            else:
                self._refuse(404, f"there is no {self.path}; there are /v1/completions, {', '.join(FORMS)}")
        except (CallError, ValueError, RecursionError) as error:
            self._refuse(400, str(error))
        except ConnectionError:  # who has asked does not wait for an answer
            self.close_connection = True
        except Exception as error:
            self._refuse(500, of_error(error))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # the body may not have been read
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._send(status, {"error": error})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _stream(self, events: Sequence[tuple[str | None, dict[str, Any]]]) -> None:
        parts = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in events]
        end = "" if events[-1][0] else "data: [DONE]\n\n"
        self._write(200, "text/event-stream", ("".join(parts) + end).encode())

    def _write(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:  # a client that expects it to stay sends its next request into the end of this one
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def open_served(path: str, *, max_running: int) -> Served:
    """Load a model directory, or a run's exported model, into an engine. Raises UserError."""
    exported = Path(path, "hf")
    if Path(path, "config.toml").is_file() and not exported.joinpath("config.json").is_file():
        raise UserError(f"{path}/hf holds no exported model; `spmdrl export {path}` writes one from a checkpoint")
    folder = str(exported) if exported.joinpath("config.json").is_file() else path
    folder = model_folder(folder, False) if folder.startswith(PREFIX) else folder
    cfg, device = ModelConfig(path=folder), torch.device(default_device_type())
    tokenizer, dtype = load_tokenizer(folder), compute_dtype(cfg.compute_dtype, device.type)
    model = load_plain(cfg, dtype).to(device).eval()
    kernel = choose_kernel(cfg.attention, device.type, dtype)
    engine = TorchEngine(model.config, device=device, dtype=dtype, kernel=kernel, max_running=max_running)
    load_whole(engine, weights_of(model), version=0)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # for one text at a time
    return Served(
        folder=folder,
        tokenizer=tokenizer,
        model=model,
        sampling=EngineThread(engine),
        stops=stop_token_ids(tokenizer, folder),
        max_tokens=model.config.get_text_config().max_position_embeddings,
        numbers=itertools.count(),
        scoring=threading.Lock(),
    )


class Server(ThreadingHTTPServer):
    """Takes the connections of a harness that opens hundreds at once; the usual backlog is 5."""

    request_queue_size = 1024
    daemon_threads = True


@program("cannot serve")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("model", help="a run's folder, a model directory, or hf:ORGANISATION/NAME")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--max-running", type=option(Count), default=32, help="default: %(default)s")
    given = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    served = open_served(given.model, max_running=given.max_running)
    try:
        server = Server((given.host, given.port), functools.partial(Handler, served))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{given.host}:{given.port} cannot be listened on ({reason}); choose another --port") from error
    with server:
        say(f"serving {served.folder} at http://{given.host}:{server.server_address[1]}/v1, Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would be a traceback of what ends with torch
            say("ended")


if __name__ == "__main__":
    sys.exit(main())
