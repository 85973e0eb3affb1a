"""The command `spmdrl`: one name for each program of the package."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from spmdrl import __version__
from spmdrl.faults.text import say, tolerates_lost_output
from spmdrl.faults.verdict import EXIT_INTERRUPTED


class Command(NamedTuple):
    """A function of `argv` that returns an exit code, and the arguments that come before the user's."""

    about: str
    module: str
    before: tuple[str, ...] = ()
    function: str = "main"


PROGRAMS = {
    "init": Command("write a starting configuration for a model and a data file", "spmdrl.tools.init"),
    "demo": Command("train a tiny model on this machine's CPU, in minutes, and watch it learn", "spmdrl.tools.demo"),
    "train": Command("train by reinforcement learning on this machine", "spmdrl.tools.local", ("train",)),
    "sft": Command("fine-tune on responses on this machine", "spmdrl.tools.local", ("sft",)),
    "pairs": Command("train on pairs of answers on this machine", "spmdrl.tools.local", ("pairs",)),
    "distill": Command("learn from a teacher on this machine", "spmdrl.tools.local", ("distill",)),
    "model": Command("say whether a model can be trained here, by a tiny one with its settings", "spmdrl.tools.model"),
    "plan": Command("predict whether a run fits into the memory of its GPUs", "spmdrl.tools.fit"),
    "doctor": Command("say what this machine lacks, or what looks wrong in a run", "spmdrl.tools.doctor"),
    "watch": Command("show a run as it is now, on a terminal", "spmdrl.tools.runs", function="watch"),
    "compare": Command("show the curves of several runs on one page", "spmdrl.tools.runs", function="compare"),
    "ps": Command("show where the ranks of a run are", "spmdrl.tools.runs", function="ps"),
    "plot": Command("draw the curves of runs", "spmdrl.tools.runs", function="plot"),
    "episodes": Command("show the rollouts of a step as a page", "spmdrl.tools.runs", function="episodes"),
    "sync": Command("send a run's metrics to its trackers", "spmdrl.tools.runs", function="sync"),
    "evaluate": Command("evaluate a run's exported model on its held-out prompts", "spmdrl.tools.evaluate"),
    "eval": Command("the same as evaluate", "spmdrl.tools.evaluate"),
    "serve": Command("answer harnesses and agents with a model, over HTTP on this machine", "spmdrl.tools.serve"),
    "export": Command("write a checkpoint as a Hugging Face model", "spmdrl.tools.export"),
    "replay": Command("compute a recorded step again", "spmdrl.tools.replay"),
    "rescore": Command(
        "apply another reward to saved rollouts, and show where the two disagree", "spmdrl.tools.rescore"
    ),
    "parity": Command("compare a step over other ways to split it", "spmdrl.tools.parity"),
    "dequantize": Command("write a checkpoint in MXFP4 or FP8 with bfloat16 weights", "spmdrl.tools.dequantize"),
    "tiny-model": Command("make a small random model to try things with", "spmdrl.tools.tiny_model"),
}


# What other projects call them.
USUAL_NAMES = {
    **dict.fromkeys(("dpo", "rm", "reward"), "pairs"),
    **dict.fromkeys(("grpo", "rl"), "train"),
    "opd": "distill",
    "push": "export --push",
}


@tolerates_lost_output
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names with the others; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help", "help"):
        say("\n".join(_usage()))
        return 0 if given else 2
    name, *others = given
    if name in ("version", "--version"):
        say(f"spmdrl {__version__}")
        return 0
    if name not in PROGRAMS:
        near = [USUAL_NAMES[name]] if name in USUAL_NAMES else difflib.get_close_matches(name, PROGRAMS, n=1)
        hint = f"did you mean spmdrl {near[0]}?" if near else f"there are {', '.join(PROGRAMS)} and version"
        say(f"spmdrl {name}: no such command; {hint}", sys.stderr)
        return 2
    program = PROGRAMS[name]
    sys.argv[0] = f"spmdrl {name}"  # as usage lines name the program
    try:
        main_of: Callable[[Sequence[str]], int | None]
        main_of = getattr(importlib.import_module(program.module), program.function)
        return main_of([*program.before, *others]) or 0
    except KeyboardInterrupt:  # most likely while torch was imported
        return EXIT_INTERRUPTED


def _usage() -> Iterator[str]:
    yield f"spmdrl {__version__}: reinforcement learning of language models as one SPMD program"
    yield ""
    yield "usage: spmdrl COMMAND ..., and spmdrl COMMAND --help for one of them"
    yield ""
    width = max(map(len, PROGRAMS))
    for name, program in PROGRAMS.items():
        yield f"  {name.ljust(width)}  {program.about}"
    yield f"  {'version'.ljust(width)}  print the version"


if __name__ == "__main__":
    sys.exit(main())
