"""Run on this machine: `python -m spmdrl.tools.local spmdrl.train CONFIG.toml [section.key=value ...] [--nproc N]`, or
`train MODEL DATA --reward KIND ...`, for which `tools/init.py` writes the configuration first; the same for `sft`,
`pairs` and `distill`.

The settings are checked once, and then one process for each GPU starts, or two where there is none. Without a GPU what
every process would import is imported once (`faults/forked.py`); on GPUs torchrun starts the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spmdrl.faults.forked import Forked
from spmdrl.faults.lock import FolderInUse, require_unowned
from spmdrl.faults.supervise import Commands, Requests, Starter, count_gpus, dry_run, launch, tell
from spmdrl.faults.text import Parser, say
from spmdrl.faults.verdict import EXIT_INTERRUPTED, EXIT_USER_ERROR, list_problems

# The programs of ranks, by what they are started for.
MODULES = {"train": "spmdrl.train", "sft": "spmdrl.sft", "pairs": "spmdrl.pairs", "distill": "spmdrl.train"}
RANKS_WITHOUT_GPU = 2
# Without --local-addr, rendezvous would use this machine's host name, which may not resolve.
STANDALONE = ("-m", "spmdrl.faults.torchrun", "--standalone", "--local-addr", "127.0.0.1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: see `docs/faults.md`."""
    with Requests() as requests:
        argv = list(sys.argv[1:] if argv is None else argv)
        has_torch = importlib.util.find_spec("torch") is not None
        arguments = _parse(_with_configuration(argv) if has_torch and _names_a_model(argv) else argv)
        if not has_torch:
            say(f"{sys.executable} has no torch: run 'make setup', then 'source .venv/bin/activate'", sys.stderr)
            return EXIT_USER_ERROR
        num_gpus = count_gpus()
        num_ranks = arguments.nproc or num_gpus or RANKS_WITHOUT_GPU
        if num_gpus == 0:  # before torch is imported, which reads the first one then
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        given = [arguments.config, *arguments.override]
        from spmdrl.preflight.settings import require_settings  # only here: --help need not wait for pydantic

        folder = require_settings(arguments.module, dry_run(given, num_ranks))
        if not arguments.dry_run:
            try:
                require_unowned(folder)
            except FolderInUse as error:
                raise _refused(str(error)) from None
            with starter_of(arguments.module, given, num_ranks=num_ranks, num_gpus=num_gpus) as starter:
                return tell(launch(starter, requests))
    try:
        return program_of(arguments.module)(dry_run(given, num_ranks))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def starter_of(
    module: str, given: Sequence[str], *, num_ranks: int, num_gpus: int
) -> contextlib.AbstractContextManager[Starter]:
    """Choose how the ranks start: no device has been used by forked ones yet."""
    if not num_gpus:
        return Forked(module, given, num_ranks=num_ranks)
    command = [sys.executable, *STANDALONE, "--nproc-per-node", str(num_ranks)]
    return contextlib.nullcontext(Commands(module=module, arguments=given, num_ranks=num_ranks, command=command))


def _names_a_model(argv: Sequence[str]) -> bool:
    """True for `train MODEL DATA ...`: neither is a TOML file, an option or a setting."""
    places = argv[1:3]
    is_place = [not (one.startswith("-") or one.endswith(".toml") or "=" in one) for one in places]
    return len(places) == 2 and all(is_place)


def _task(argv: Sequence[str]) -> str:
    """Return what is started: a name of MODULES, also where the module is named."""
    name = argv[0].removeprefix("spmdrl.") if argv else ""
    if name not in MODULES:
        Parser().error(f'"{name}" is no program of ranks; they are {", ".join(MODULES)}')
    return name


def _with_configuration(argv: Sequence[str]) -> list[str]:
    """Write the configuration for a model and its data, and return the arguments that name it instead.

    The file is named after the run, and a second start with the same options finds it. Raises SystemExit where it was
    written for others, and where `spmdrl init` writes none; it has printed why.
    """
    _, model, data, *rest = argv
    task = _task(argv)
    own, options, others = [], [("--model", model), ("--data", data)], iter(rest)
    for one in others:
        name, _, value = one.partition("=")
        if one == "--dry-run" or not one.startswith("-"):
            own.append(one)
        elif one in ("--download", "--no-verdict"):
            options.append((one, ""))
        elif name in ("--nproc", "--ranks"):
            own += [name, value or next(others, "")]
        else:
            options.append((name, value or next(others, "")))
    chosen = dict(options)
    if "--name" not in chosen:
        options.append(("--name", run_name(model, data, task)))
    given = [f"{name}={value}" if value else name for name, value in options]
    written, header = Path(f"{dict(options)['--name']}.toml"), f"# spmdrl {task} {shlex.join(given)}\n"
    if written.exists():
        if written.read_text(encoding="utf-8", errors="replace").startswith(header):
            return [task, str(written), *own]
        raise _refused(
            f"{written} is there already, and was not written for these options; start it with `spmdrl {task} "
            f"{written}`, give the run another --name, or remove the file"
        )
    if "--task" in chosen:
        raise _refused(f"--task has no meaning for spmdrl {task}, which says it; remove it")
    command = [sys.executable, "-m", "spmdrl.tools.init", "--out", str(written), *given, "--task", task]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(code)
    written.write_text(header + written.read_text(encoding="utf-8"), encoding="utf-8")
    say(f"wrote {written}, with every setting that was chosen")
    return [task, str(written), *own]


def _refused(problem: str) -> SystemExit:
    """Say what is wrong, and return how the program ends."""
    say(list_problems("cannot start", problem), sys.stderr)
    return SystemExit(EXIT_USER_ERROR)


def run_name(model: str, data: str, task: str = "train") -> str:
    """Return a name for a run on a model and data, which may be names on a hub; training by rewards adds no word."""
    read = data.split("@")[0].removeprefix("hf:").partition(":")[0] if data.startswith("hf:") else Path(data).stem
    place = Path(model.partition("@")[0])
    text = f"{place.parent.name if place.name == 'hf' else place.name}-{read}"
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return (name.lstrip("._-")[:190] or "run") + ("" if task == "train" else f"-{task}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        description="Check the settings, and run on this machine: one process for each GPU, two without a GPU. "
        "`spmdrl train MODEL DATA --reward KIND`, `spmdrl sft MODEL DATA`, `spmdrl pairs MODEL DATA` and `spmdrl "
        "distill MODEL DATA --teacher MODEL` write the configuration first, with the options of `spmdrl init`.",
        epilog="settings are documented in docs/configuration.md, exit codes in docs/faults.md",
    )
    parser.add_argument("config", nargs="?", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--nproc", "--ranks", type=int, help="another number of processes")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    arguments = parser.parse_intermixed_args(argv[1:])
    arguments.module = MODULES[_task(argv)]
    if arguments.config is None:
        parser.error("name a model and its data, or a TOML file; `spmdrl init` writes one")
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: a run has at least 1 process")
    return arguments


def program_of(module: str) -> Callable[[Sequence[str]], int]:
    """Import a program of ranks, which takes seconds, and return its `main`."""
    gc.disable()  # see `before_imports`
    try:
        program: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    finally:
        gc.enable()
    return program


if __name__ == "__main__":
    sys.exit(main())
