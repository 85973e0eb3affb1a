"""`python -m spmdrl.tools.watch RUN`: a run as it is now, on a terminal, drawn again every second; Ctrl-C leaves.

It reads the run's files and nothing else, so the run may be on any machine that shares them. Where the output is no
terminal, or with `--once`, it prints one page.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from spmdrl.config.base import Seconds
from spmdrl.faults.text import Parser
from spmdrl.report.watching import Watcher, watch_page
from spmdrl.tools.program import ToolConsole, option, program
from spmdrl.types import UserError


def print_once(watcher: Watcher, console: Console) -> None:
    """Print one page. Raises UserError where no run has left a trace."""
    snapshot = watcher.read(now=time.time())
    if not snapshot.begun:
        raise UserError(f"{watcher.path} holds no run; name a run's folder, such as runs/demo")
    console.print(watch_page(snapshot, width=console.width))


def watch(watcher: Watcher, console: Console, *, every_s: float) -> None:
    """Draw the page on the whole terminal until the user leaves. A run that has not begun is waited for."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(watch_page(watcher.read(now=time.time()), width=console.width), refresh=True)
            time.sleep(every_s)


@program("cannot watch")
def main(argv: Sequence[str] | None = None) -> None:
    """Show the run, once or until the user leaves."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, such as runs/demo")
    parser.add_argument("--once", action="store_true", help="print one page")
    parser.add_argument("--every", metavar="SECONDS", type=option(Seconds), default=1.0, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    watcher, console = Watcher(arguments.run), ToolConsole()
    if arguments.once or not console.is_terminal:
        print_once(watcher, console)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the user has seen enough
        watch(watcher, console, every_s=arguments.every)


if __name__ == "__main__":
    sys.exit(main())
