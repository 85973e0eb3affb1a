"""Generate docs/tools.md, every program and its arguments: `python -m docs.gen.tools_reference`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from unittest import mock

import spmdrl.tools
from spmdrl.faults.text import say
from spmdrl.tools.command import PROGRAMS

_PROGRAMS = ("spmdrl.train", "spmdrl.sft", "spmdrl.pairs")

_INTRODUCTION = """\
# Programs

<!-- Generated from the programs' own parsers by `make docs`; a test compares the two. -->

Each is started as `python -m NAME`, or as `spmdrl NAME` where that is its name. Those that take a configuration also
take settings after it, as `section.key=value` ([configuration.md](configuration.md)). The programs in `launch/` are
shell scripts that say at the top what they take.
"""


class _Seen(Exception):
    """A parser that is complete, instead of what it would have parsed."""


def reference() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    commands = {name: one for name, one in PROGRAMS.items() if one.function != "main"}
    mains = {name: (name, "main") for name in (*_PROGRAMS, *_tools())}
    mains |= {f"spmdrl {name}": (one.module, one.function) for name, one in commands.items()}
    for name, (module, function) in mains.items():
        parser = _parser(module, function)
        shown = [action for action in parser._actions if argparse.SUPPRESS not in (action.dest, action.help)]
        rows = [_row(action) for action in shown if not isinstance(action, argparse._HelpAction)]
        description = " ".join((parser.description or "").split())
        table = ["| argument | default | |", "|---|---|---|", *rows] if rows else []
        parts.append("\n".join([f"## `{name}`", "", description, "", *table]).rstrip() + "\n")
    return "\n".join(parts)


def _tools() -> list[str]:
    """The modules of `spmdrl.tools` that are programs for users, by their full names."""
    modules = [f"spmdrl.tools.{module.name}" for module in pkgutil.iter_modules(spmdrl.tools.__path__)]
    found = {name: importlib.import_module(name) for name in modules}
    return [name for name, module in found.items() if hasattr(module, "Parser") and hasattr(module, "main")]


def _parser(name: str, function: str) -> argparse.ArgumentParser:
    """The parser with which a program reads its command line."""
    main = getattr(importlib.import_module(name), function)

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Seen(parser)

    with (
        mock.patch.object(sys, "argv", [f"python -m {name}", "CONFIG"]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_intermixed_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
    ):
        try:
            main(sys.argv[1:])
        except _Seen as seen:
            parser: argparse.ArgumentParser = seen.args[0]
            return parser
    raise AssertionError(f"{name} reads its command line in another way")


def _row(action: argparse.Action) -> str:
    metavar = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    shown = metavar if isinstance(metavar, str) else " ".join(metavar)
    name = f"{', '.join(action.option_strings)} {shown}".strip() if action.option_strings else shown
    hidden = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
    default = "" if hidden else f"`{action.default}`"
    text = (action.help or "") % (vars(action) | {"prog": ""})
    return f"| `{name}` | {default} | {' '.join(text.split())} |".replace("|  |", "| |")


if __name__ == "__main__":
    say(reference().removesuffix("\n"))
