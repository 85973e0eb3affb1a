"""HTML pages that need nothing else: no server, no network.

A page is `page/NAME.html` with its style sheet in place, and with its program and data or with markup made here. The
data are JSON in a block that is no program. A content security policy admits the page's own style and program by their
digests, so nothing else that comes into the page can run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any


def assembled(name: str, *, title: str, data: Any = None, markup: str = "") -> str:
    """Put a page together. `data` must be what JSON can hold; texts in `markup` must have been escaped."""
    folder = files("spmdrl.report") / "page"
    read = {
        file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.startswith(f"{name}.")
    }
    page, style, program = (read.get(f"{name}.{suffix}", "") for suffix in ("html", "css", "js"))
    # ASCII, and without the characters that could end the block or begin a comment in it.
    written = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    parts = {"TITLE": html.escape(title), "STYLE": style, "PROGRAM": program, "DATA": written, "MARKUP": markup}
    parts |= {"STYLE-DIGEST": _digest(style), "PROGRAM-DIGEST": _digest(program)}
    # One pass over the page: nothing is looked for in what was put in.
    head, *rest = page.split("{{")
    return head + "".join(parts[name] + after for name, after in (part.split("}}", 1) for part in rest))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
