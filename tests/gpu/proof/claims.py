"""Claims about GPUs. One that a test of tests/gpu shows is a mark on it, and this module collects the marks:

    @pytest.mark.claim("Memory", "A sleeping trainer gives its memory back.")             section, sentence
    @pytest.mark.claim("Speed", "Triton is as fast as it was.", case="triton")            one case of the test

All tests with one sentence show one claim. One that a step shows is a field of it in stages.py; the rest are UNTESTED.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.gpu.proof.stages import STAGES

SECTIONS = (
    *("Training on one device", "Attention and models", "Memory", "Weights reach the engine", "SGLang on one device"),
    *("Several devices", "Speed", "Adapters", "Images", "Whole machines"),
)
UNTESTED: Mapping[str, tuple[str, ...]] = {
    "Adapters": (
        "8B on one GPU of 80 GB and 32B on eight train with adapters within the memory that the planner says.",
    ),
    "Images": ("`configs/qwen3-vl-4b-geo3k-1node.toml` trains within the memory that the planner says.",),
    "Whole machines": (
        "The shipped configurations that train whole models run on the machines that they name, within the memory that "
        "the planner says.",
        "Ranks on several nodes train together, started by torchrun, SLURM or Kubernetes.",
        "The image of `launch/Dockerfile` can be built, and trains.",
    ),
}


class Claim(NamedTuple):
    """A sentence and all of its evidence."""

    section: str
    sentence: str
    tests: tuple[str, ...] = ()  # "memory::test_x" is in tests/gpu/test_memory.py; "[case]" after it is one case of it
    steps: tuple[str, ...] = ()  # names of steps of stages.py


def claims() -> list[Claim]:
    """Return the claims by section, in the order in which the stages show them."""
    found: dict[str, Claim] = {}
    for step in (step for stage in STAGES.values() for step in stage.steps):
        of_tests = marks(Path(step.command[-1])) if step.command[-1].startswith("tests/") else ()
        for claim in [Claim(*step.claim, steps=(step.name,))] if step.claim else of_tests:
            before = found.get(claim.sentence, claim._replace(tests=(), steps=()))
            found[claim.sentence] = claim._replace(tests=before.tests + claim.tests, steps=before.steps + claim.steps)
    untested = [Claim(section, sentence) for section, some in UNTESTED.items() for sentence in some]
    return sorted([*found.values(), *untested], key=lambda claim: SECTIONS.index(claim.section))


def marks(file: Path) -> Iterator[Claim]:
    """Yield a claim for each mark in a file of tests."""
    name = file.stem.removeprefix("test_")
    for test, function in vars(import_module(f"tests.gpu.{file.stem}")).items():
        for mark in getattr(function, "pytestmark", []) if test.startswith("test_") else []:
            if mark.name == "claim":
                case = f"[{mark.kwargs['case']}]" if mark.kwargs else ""
                yield Claim(*mark.args, tests=(f"{name}::{test}{case}",))
