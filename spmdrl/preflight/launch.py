"""Start a program from its command line: arguments, checks, `--dry-run`, and the report of a failure."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import tomlkit
from transformers.utils import logging as transformers_logging

from spmdrl.checkpoint import ResumePoint, preview_resume_point
from spmdrl.checkpoint.manifest import folder_of
from spmdrl.config import Config, MissingSetting, TuningConfig, read_draft
from spmdrl.config.read import read_fields
from spmdrl.config.strict import shown
from spmdrl.data.sources import import_library
from spmdrl.dist.launcher import require_launch_environment
from spmdrl.dist.session import are_restarted, launched_ranks
from spmdrl.faults.failure import failure_in, no_room
from spmdrl.faults.supervise import die_with_parent
from spmdrl.faults.text import OUTPUT, say
from spmdrl.faults.verdict import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    list_problems,
    make_stdio_lenient,
    print_once_per_node,
)
from spmdrl.preflight.checks import decoded_lines
from spmdrl.preflight.hub import located
from spmdrl.preflight.inputs import open_inputs
from spmdrl.preflight.settings import parse
from spmdrl.report import RunFolder
from spmdrl.run import Inputs, Launch, SettingsT, open_launch
from spmdrl.types import UserError


def run_from_command_line(
    kind: type[SettingsT],
    body: Callable[[Launch[SettingsT]], None],
    check: Callable[[SettingsT, Inputs], Sequence[str]],
    argv: Sequence[str] | None,
) -> int:
    """Read the configuration, open what it names, and run `body` on every rank; or only `check` it under --dry-run.

    Returns the process's exit code: see `docs/faults.md`.
    """
    gc.enable()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank, which torchrun's agent has started
        die_with_parent()
    arguments = parse(argv)
    make_stdio_lenient()
    transformers_logging.disable_progress_bar()  # one bar per rank would bury the run's own
    try:
        require_launch_environment()
    except UserError as error:  # nothing is known of other ranks, so every process speaks for itself
        say(list_problems("cannot start", str(error)), sys.stderr)
        return EXIT_USER_ERROR
    try:
        draft = read_draft(kind, arguments.config, arguments.override)
        cfg, problems = located(draft.config)
        if problems:
            draft.refuse(problems)
        inputs = open_inputs(cfg, num_ranks=arguments.ranks or launched_ranks(), refuse=draft.refuse)
        # Only the first start may refuse a folder that holds a run: ranks that are started again find their own.
        folder = RunFolder.of(cfg.run.dir, cfg.run.name, "auto" if are_restarted() else cfg.resume.checkpoint)
        if arguments.dry_run:
            origin = preview_resume_point(cfg, folder.checkpoints)
            _print_dry_run(cfg, inputs, folder, origin, [*check(cfg, inputs), *decoded_lines(cfg, inputs)])
            return 0
        with open_launch(cfg, inputs, folder.create()) as run:
            body(run)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:  # who read it has seen enough
            return 0
        if (failure := failure_in(error)) is not None:
            if failure.words:
                say(failure.words, sys.stderr)
            return failure.exit_code
        # It came before the ranks had met, or on the way to that: each speaks for itself.
        if isinstance(error, UserError):
            print_once_per_node(list_problems("cannot start", str(error)))
            return EXIT_USER_ERROR
        if sentence := no_room(error):
            print_once_per_node(list_problems("cannot go on", sentence))
            return EXIT_USER_ERROR
        if isinstance(error, OSError) and error.filename is not None:  # of a folder or a file that a setting names
            print_once_per_node(list_problems("cannot start", f"{shown(error.filename)}: {error.strerror}"))
            return EXIT_USER_ERROR
        raise
    return 0


def import_libraries(kind: type[SettingsT], path: str, *overrides: str) -> None:
    """Import the libraries that generate the prompts of a configuration, for all processes that this one forks.

    Mistakes in it are not reported: the check that follows tells them.
    """
    with contextlib.suppress(UserError, MissingSetting):
        for source in read_fields(kind, path, overrides).data.sources:
            import_library(source)


def _print_dry_run(
    cfg: Config | TuningConfig, inputs: Inputs, folder: RunFolder, origin: ResumePoint, checked: Sequence[str]
) -> None:
    say("# configuration\n" + tomlkit.dumps(cfg.model_dump(exclude_none=True)))
    say(f"# run folder\n{shown(folder.path)}\n")
    say("# begins")
    for line in _beginning(origin, inputs.plan.num_steps):
        say(line)
    for note in (*origin.notes, *folder.gap_notes(origin.folder, origin.step)):
        say(f"- {note}")
    say("\n# plan")
    for name, value in inputs.plan.as_dict().items():
        say(f"{name} = {value}")
    say("\n# checked")
    for line in checked:
        say(f"- {line}")


def _beginning(origin: ResumePoint, num_steps: int) -> Iterator[str]:
    """Yield the step where the run would begin, and how far its checkpoint was compared."""
    if origin.saved_step is None:
        yield "at step 0: there is no checkpoint to go on from"
    else:
        yield f"after step {origin.step} of {num_steps}: {folder_of(origin.folder, origin.step)}"
        yield "- its files are there and as large as they were written; what is in them is compared by the run itself"
