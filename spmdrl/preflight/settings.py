"""The first check of a program of ranks: its arguments and its settings, before what takes seconds to import."""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config import Config, PreferencesConfig, SftConfig, TuningConfig, read_draft
from spmdrl.config.plan import plan_problems
from spmdrl.conversation import UserError
from spmdrl.faults.text import Parser
from spmdrl.faults.verdict import EXIT_USER_ERROR, list_problems, make_stdio_lenient, print_once_per_node

KINDS: dict[str, type[Config | TuningConfig]] = {
    "spmdrl.train": Config,
    "spmdrl.sft": SftConfig,
    "spmdrl.pairs": PreferencesConfig,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a program of ranks. Raises SystemExit for wrong ones."""
    parser = Parser(
        description="Settings are documented in docs/configuration.md.",
        epilog="example: torchrun --nproc-per-node 2 -m spmdrl.train configs/demo.toml optim.lr=3e-4",
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    parser.add_argument("--ranks", type=int, default=None, help="with --dry-run: the ranks torchrun will start")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ranks is not None and (arguments.ranks < 1 or not arguments.dry_run):
        parser.error("--ranks needs --dry-run and a number of at least 1; torchrun decides the ranks of a run")
    return arguments


def before_imports(module: str) -> None:
    """Check the settings on a rank's command line, and prepare for the seconds that its imports take.

    Python collects no garbage until `run_from_command_line`: they make none, and would take a fifth longer. Nor does it
    look through all that was imported once more as the process ends.
    """
    require_settings(module)
    gc.disable()
    atexit.register(gc.freeze)


def require_settings(module: str, argv: Sequence[str] | None = None) -> Path:
    """Read the settings of a program of ranks, and end the process where some are wrong, with exit code 2.

    `--ranks` checks the counts that follow from them too. What settings name, such as models, is checked later. Returns
    the folder of the run.
    """
    arguments = parse(argv)
    try:
        draft = read_draft(KINDS[module], arguments.config, arguments.override)
        draft.refuse()
        if arguments.ranks is not None:
            draft.refuse(plan_problems(draft.config, arguments.ranks))
    except UserError as error:
        make_stdio_lenient()
        print_once_per_node(list_problems("cannot start", str(error)))
        sys.exit(EXIT_USER_ERROR)
    return Path(draft.config.run.dir, draft.config.run.name)
