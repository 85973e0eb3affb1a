"""`python -m spmdrl.tools.verifiers_data CONFIG.toml OUT.jsonl`: the tasks of a verifiers environment, as prompts.

It loads the environment that `environment.source` of the configuration names, and writes a row for each of its tasks,
which `[[data.sources]]` reads with `kind = "jsonl"` and `answer_column = ""`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config import Config, read_run_config
from spmdrl.config.environment import VerifiersEnvironment
from spmdrl.envs.verifiers_process import read_rows
from spmdrl.faults.text import Parser, say
from spmdrl.tools.program import program
from spmdrl.types import UserError


@program("cannot write the tasks")
def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and return the exit code."""
    parser = Parser(prog="python -m spmdrl.tools.verifiers_data", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.toml", type=Path)
    parser.add_argument("out", metavar="OUT.jsonl", type=Path)
    parser.add_argument("override", metavar="section.key=value", nargs="*")
    parser.add_argument("--limit", metavar="N", type=int, default=100_000, help="rows at most; default: 100000")
    arguments = parser.parse_args(argv)
    if arguments.limit < 1:
        parser.error("--limit must be at least 1")
    rows = read_rows(_source(read_run_config(arguments.config, arguments.override)), limit=arguments.limit)
    arguments.out.write_text(rows, encoding="utf-8")
    say(f"wrote {arguments.out}: {len(rows.splitlines())} rows")


def _source(cfg: object) -> VerifiersEnvironment:
    environment = cfg.environment if isinstance(cfg, Config) else None
    if environment is None or not isinstance(environment.source, VerifiersEnvironment):
        raise UserError('the configuration has no environment of verifiers; set environment.source.kind = "verifiers"')
    return environment.source


if __name__ == "__main__":
    sys.exit(main())
