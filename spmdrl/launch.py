"""From the command line to a run that may start: arguments, checks, `--dry-run`, and how failures are told."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tomlkit
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from spmdrl.config import Config, SectionT, SftConfig, read_config
from spmdrl.dist.session import launched_ranks
from spmdrl.inputs import Inputs, open_inputs
from spmdrl.report import RunFolder
from spmdrl.types import CannotGoOn, TrainingDiverged, UserError

EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_LOST_RANK = 4

# How torch's backends say that another process is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "was closed")


def run_from_command_line(
    kind: type[SectionT],
    run: Callable[[SectionT, Inputs, RunFolder], None],
    check: Callable[[SectionT, Inputs], Sequence[str]],
    argv: Sequence[str] | None,
) -> int:
    """Read the configuration, open what it names, and `run` it; or only `check` it under --dry-run.

    Returns the process's exit code: 0, 2 when the user must change something, 3 when training diverged, 4 when another
    rank has ended.
    """
    arguments = _parse(argv)
    transformers_logging.disable_progress_bar()  # one bar per rank would bury the run's own
    try:
        cfg = read_config(kind, arguments.config, arguments.override)
        assert isinstance(cfg, Config | SftConfig)
        inputs = open_inputs(cfg, num_ranks=arguments.ranks or launched_ranks())
        if arguments.dry_run:
            _print_dry_run(cfg, inputs, check(cfg, inputs))
            return 0
        with _quiet_about_lost_ranks():
            run(cfg, inputs, RunFolder.create(cfg.run.dir, cfg.run.name, cfg.resume.checkpoint))
    except UserError as error:
        _tell("cannot go on" if isinstance(error, CannotGoOn) else "cannot start", str(error))
        return EXIT_USER_ERROR
    except _LostRank:
        # A second traceback would only hide the first, which names the cause.
        print(f"rank {os.environ.get('RANK', '0')}: another rank has ended; its own words say why", file=sys.stderr)
        return EXIT_LOST_RANK
    except TrainingDiverged as error:
        _tell("training diverged", str(error))
        return EXIT_DIVERGED
    return 0


class _LostRank(RuntimeError):
    """Another rank of the run has ended."""


@contextmanager
def _quiet_about_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        of_torch = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        if of_torch and any(words in str(error) for words in _LOST):
            raise _LostRank from error
        raise


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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


def _print_dry_run(cfg: Config | SftConfig, inputs: Inputs, checked: Sequence[str]) -> None:
    print("# configuration\n" + tomlkit.dumps(cfg.model_dump(exclude_none=True)))
    print("# plan")
    for name, value in inputs.plan.as_dict().items():
        print(f"{name} = {value}")
    print("\n# checked")
    for line in checked:
        print(f"- {line}")


def _tell(what: str, problems: str) -> None:
    """One rank of each node speaks; what another node lacks, the first may have."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    node = "" if os.environ.get("RANK", "0") == "0" else f"{platform.node()}: "
    lines = problems.splitlines()
    text = f"{what}: {lines[0]}" if len(lines) == 1 else "\n  - ".join([f"{what}:", *lines])
    print(node + text, file=sys.stderr)
