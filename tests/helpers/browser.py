"""A browser for tests: Chromium, spoken to over two pipes by its DevTools protocol, without a port or a package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

_OPTIONS = (
    "--headless=shell",
    "--remote-debugging-pipe",
    "--no-sandbox",  # so that it starts for root, too: the pages are those of the tests
    "--no-zygote",
    "--in-process-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--force-color-profile=srgb",
    "--window-size=1280,900",
    "about:blank",
)
_READS, _WRITES = 3, 4  # the file descriptors that Chromium expects
_SPARE = 20  # lowest number of a copy, clear of those


class Browser:
    """One page of a Chromium of its own, which ends with the `with` statement."""

    def __init__(self, program: str, folder: Path, *, timeout_s: float = 60.0) -> None:
        """`folder` is for its profile; `timeout_s` is for each answer."""
        self.events: list[dict[str, Any]] = []
        self._timeout_s, self._received, self._number, self._session = timeout_s, b"", 0, None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        copies = [fcntl.fcntl(pipe, fcntl.F_DUPFD, _SPARE) for pipe in (theirs_in, theirs_out)]

        def connect() -> None:
            for copy, number in zip(copies, (_READS, _WRITES), strict=True):
                os.dup2(copy, number)

        # The libraries that came with it, where there are some.
        environment = os.environ | {"LD_LIBRARY_PATH": str(Path(program).parent / "lib")}
        self._process = subprocess.Popen(
            [program, f"--user-data-dir={folder}", *_OPTIONS],
            env=environment,
            preexec_fn=connect,
            close_fds=False,  # those of Python close at exec; a fork may have closed what had the two numbers here
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pipe in (theirs_in, theirs_out, *copies):
            os.close(pipe)
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._to, self._from):
            os.close(pipe)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come before its answer are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + self._timeout_s
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser did not answer within {self._timeout_s:g} s"
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def named(self, event: str) -> list[dict[str, Any]]:
        """The parameters of all events of this name so far."""
        return [one["params"] for one in self.events if one.get("method") == event]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it may look at the page."""
        until = time.monotonic() + self._timeout_s
        while not condition():
            assert time.monotonic() < until, "the page did not come to it"
            time.sleep(0.01)

    def open(self, page: Path | str) -> None:
        """Open a file or an address and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for(
            lambda: self.value("document.readyState") == "complete" and bool(self.named("Page.loadEventFired"))
        )

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, in JSON's types."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """A picture of the window, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
