"""Result files of benchmarks: what each says about where it comes from, and whether it measured today's code.

A result names the code that it measured by a digest of what Python reads of it, without comments, docstrings and
layout. Neither the history of the repository nor the version of Python matters.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdrl.tools.proof import commit

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Json = Mapping[str, Any]


def provenance(code: Iterable[str]) -> dict[str, Any]:
    """The entries of a result file that say when, on what, and of which code it is measured: call it before."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit_id(),
        "code_digest": code_digest(code),
        "machine": machine(),
    }


def write_result(path: Path, content: Json, *, indent: int | None = 1) -> None:
    """Write a result file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    unfinished.replace(path)


def is_stale(result: Json, code: Iterable[str], root: Path = ROOT) -> bool:
    """True when the code has changed since it was measured, or the result does not say what it measured."""
    return result.get("code_digest") != code_digest(code, root)


def code_digest(code: Iterable[str], root: Path = ROOT) -> str:
    """The sha256 of files of Python and C, which patterns such as `spmdrl/algo/**/*.py` name below `root`."""
    files = set[Path]()
    for pattern in code:
        found = set(root.glob(pattern))
        assert found, f"benchmarks/rows.py: there is no file {pattern}; name what is measured"
        files |= found
    outlines = []
    for path in sorted(files):
        reduced = outline if path.suffix == ".py" else _without_comments
        outlines.append(f"{path.relative_to(root).as_posix()} {reduced(path.read_text('utf-8'))}")
    return hashlib.sha256("\n".join(outlines).encode()).hexdigest()


def _without_comments(source: str) -> str:
    """A file of C without comments to the end of a line, and with one space between words."""
    return " ".join(" ".join(line.partition("//")[0] for line in source.splitlines()).split())


@functools.cache
def outline(source: str) -> str:
    """The syntax tree of a file without docstrings, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                del node.body[0]
    return _text(tree)


def _text(node: object) -> str:
    """`ast.dump` without empty fields: versions of Python differ in which of those they have and show."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)


def commit_id() -> str:
    """The commit that is measured, marked when files differ from it (the results themselves aside)."""
    return commit.commit_id(ROOT, ROOT / "bundle" / "commit.json")


def machine() -> Mapping[str, Any]:
    """Describe this machine."""
    from spmdrl.model.calibration import processor  # it needs torch, which reading results does not

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
