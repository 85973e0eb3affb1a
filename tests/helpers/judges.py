"""A judge's server on this machine: it answers as OpenAI's, or fails in the way that a question asks for."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """A question that holds the word `fails:KIND` fails so; others get a score that follows from their text."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[tuple[str, str]] = Counter()  # by the judge's name and the question's text
        self.busy_once = False  # refuses every first question, as a server that is busy does
        self.most_at_once = 0
        self.at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def term(self, **settings: Any) -> dict[str, Any]:
        """A term of `[reward]` that asks this server."""
        return {
            "kind": "judge",
            "url": self.url,
            "model": "judge",
            "rubric": "Be right.",
            "max_retries": 1,
            "timeout_s": 5.0,
            **settings,
        }


def score_of(question: str) -> int:
    """The score of a question, 0 to 10."""
    return hashlib.sha256(question.encode()).digest()[0] % 11


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


FAILURES = {
    "429": "answers 429",
    "500": "answers 500",
    "404": "answers 404",
    "half": "is no JSON",
    "nonsense": "is no JSON",
    "empty": "is no JSON",
    "shape": "has no choices with a message",
    "silent": "no answer of the judge in 2 tries of 0.6 s",
    "trickle": "no answer of the judge in 2 tries of 0.6 s",
    "closes": "does not answer",
    "short": "does not answer",
    "no_score": 'no JSON object with "score"',
    "words": "and no number",
    "nan": "and no number",
    "beyond": "the judge's score is 11, not from 0 to 10",
}  # the ways, and what is said of them


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = request["messages"][-1]["content"]
        asked = (request["model"], question)
        with self.server.lock:
            self.server.asked[asked] += 1
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            is_first = self.server.asked[asked] == 1
        try:
            fails = next((kind for kind in FAILURES if f"fails:{kind}." in question), "")
            self._answer("429" if self.server.busy_once and is_first else fails, question)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def _answer(self, fails: str, question: str) -> None:
        said = {"no_score": "Good.", "words": '{"score": "high"}', "nan": '{"score": NaN}', "beyond": '{"score": 11}'}
        each = [(score_of(question) + 3 * place) % 11 for place in range(question.count("Response "))]
        scores = f'"score": {score_of(question)}, "scores": {each}, "ranking": {[*range(1, len(each) + 1)]}'
        content = said.get(fails, f'It is so {{so}}. {{{scores}, "why": {{"a": 1}}}}')
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        match fails:
            case "429" | "500" | "404":
                self._send(json.dumps({"error": {"message": "no"}}).encode(), status=int(fails))
            case "half":
                self._send(body[: len(body) // 2])
            case "nonsense":
                self._send(b"<html>welcome</html>")
            case "empty":
                self._send(b"")
            case "shape":
                self._send(b'{"choices": []}')
            case "silent":
                time.sleep(2.0)
                self.close_connection = True
            case "trickle":
                self._send(b"", length=1000)
                with suppress(OSError):  # nobody listens any more
                    for _ in range(30):
                        self.wfile.write(b" ")
                        time.sleep(0.1)
            case "closes":
                self.close_connection = True
            case "short":
                self._send(body, length=len(body) + 10)
                self.close_connection = True
            case _:
                self._send(body)

    def _send(self, body: bytes, *, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
