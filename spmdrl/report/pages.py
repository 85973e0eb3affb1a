"""HTML pages that need nothing else: no server, no network.

A page is `page/NAME.html`, a template of jinja's, with its style sheet and its program in place. Texts are escaped, and
what cannot be printed is written as Python escapes it; data are JSON in a block that is no program. A content security
policy admits the page's own style and program by their digests, so nothing else that comes into it can run.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from spmdrl.faults.text import escaped
from spmdrl.report.console import format_number

_PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("spmdrl.report", "page"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: escaped(value) if type(value) is str else value,
)
_PAGES.filters["number"] = format_number
_PAGES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def assembled(name: str, *, title: str, **values: Any) -> str:
    """Put a page together of the values that its template names."""
    folder = files("spmdrl.report") / "page"
    parts: dict[str, Any] = {}
    for part, suffix in (("style", "css"), ("program", "js")):
        file = folder / f"{name}.{suffix}"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        parts |= {part: Markup(text), f"{part}_digest": Markup(digest)}
    return _PAGES.get_template(f"{name}.html").render(title=title, **parts, **values)
