"""The stages of the proof: which programs run, for how long at most, and what each is expected to show.

A stage fits into a command of ten minutes. Its steps are in the order of what is learnt from them: what comes late is
the first to be left out when time runs short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALL_PASS = "all pass"
TWO_DEVICES = "all pass; skipped on one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A program that shows something by its exit code, by its tests, or by the JSON object that it prints last."""

    name: str
    command: tuple[str, ...]  # from the project's root; "python" is the interpreter that runs the proof
    limit_s: float
    expected: str
    claim: tuple[str, str] | None = None  # section and sentence of claims.py, that a program shows; tests have marks
    alone: bool = False  # it measures time, or what the whole device has left: nothing else may run beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps that run one after the other within a time."""

    about: str
    budget_s: float
    facts: Step  # runs first; prints `machine` and `versions`
    steps: tuple[Step, ...]


def gpu_tests(name: str, *, limit_s: float, expected: str = ALL_PASS, alone: bool = False) -> Step:
    """One file of tests/gpu in a process of its own, so that what a test leaves behind ends with it."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.gpu.proof.tests_seen", "--durations=3")
    command = ("python", "-m", "pytest", *options, f"tests/gpu/test_{name}.py")
    return Step(name=name.replace("_", "-"), command=command, limit_s=limit_s, expected=expected, alone=alone)


def program(name: str, command: str, *, limit_s: float, expected: str, claim: tuple[str, str] | None = None) -> Step:
    """A program of the project, and what it should print; one that shows a claim measures, so it runs alone."""
    words, alone = ("python", *command.split()), claim is not None
    return Step(name=name, command=words, limit_s=limit_s, expected=expected, claim=claim, alone=alone)


FACTS = program("facts", "-m tests.gpu.proof.facts", limit_s=90.0, expected="a device; see the table above")

STAGES: Mapping[str, Stage] = {
    "1": Stage(
        about="facts, CUDA IPC, and everything that needs no SGLang",
        budget_s=480.0,
        facts=FACTS,
        steps=(
            program("doctor", "launch/doctor.py", limit_s=60.0, expected="says what is missing"),
            gpu_tests("refit_processes", limit_s=120.0, alone=True),
            gpu_tests("one_device", limit_s=150.0),
            gpu_tests("memory", limit_s=90.0, alone=True),
            gpu_tests("memory_plan", limit_s=90.0),
            gpu_tests("attention", limit_s=120.0),
            gpu_tests("gated_delta", limit_s=120.0),
            gpu_tests("fused", limit_s=120.0),
            gpu_tests("head", limit_s=90.0),
            gpu_tests("correction", limit_s=60.0),
            gpu_tests("policy_losses", limit_s=60.0),
            gpu_tests("runs", limit_s=150.0),
            gpu_tests("adapters", limit_s=90.0),
            gpu_tests("many_devices", limit_s=90.0, expected=TWO_DEVICES),
            gpu_tests("context", limit_s=120.0, expected=TWO_DEVICES),
        ),
    ),
    "2": Stage(
        about="SGLang: start, refit and digests; sleep and wake with the memory saver, CUDA graphs, a whole run",
        budget_s=510.0,
        facts=FACTS,
        steps=(
            program(
                "refit-0.6b",
                "benchmarks/gpu_refit.py --sizes 0.6b --into sglang --repeats 3",
                limit_s=200.0,
                expected="SGLang starts; digests agree; GB/s of a refit",
                claim=(
                    "SGLang on one device",
                    "SGLang starts, and holds the trainer's weights by digest after a refit.",
                ),
            ),
            gpu_tests("sglang", limit_s=400.0, alone=True),
        ),
    ),
    "5": Stage(
        about="SGLang with adapters, images, experts in fp8 and gated delta nets; run it with --at-once 3",
        budget_s=510.0,
        facts=FACTS,
        steps=(
            gpu_tests("sglang_adapters", limit_s=400.0),
            gpu_tests("images", limit_s=480.0),
            gpu_tests("sglang_families", limit_s=480.0),
        ),
    ),
    "3": Stage(
        about="a run of a 0.6B-shaped model, the refit of 4B, and engine and trainer with the same bits",
        budget_s=510.0,
        facts=FACTS,
        steps=(
            program(
                "run-0.6b",
                "benchmarks/gpu_run.py",
                limit_s=240.0,
                expected="128 responses of 512 tokens a step: seconds of each phase; predicted memory near measured",
                claim=(
                    "Speed",
                    "A run of a 0.6B-shaped model with SGLang: seconds of each phase; predicted and measured memory.",
                ),
            ),
            program(
                "refit-4b",
                "benchmarks/gpu_refit.py --sizes 4b --into sglang --repeats 5",
                limit_s=150.0,
                expected="at most 60 ms, verified 120; a copy alone would take 3.4 ms",
                claim=("Speed", "The refit of 4B into SGLang beside a copy on the device."),
            ),
            gpu_tests("true_on_policy", limit_s=300.0),
        ),
    ),
    "4": Stage(
        about="the speed of the trainer's step",
        budget_s=540.0,
        facts=FACTS,
        steps=(
            program(
                "step",
                "benchmarks/gpu_step.py --minutes 6",
                limit_s=510.0,
                expected="tokens/s, MFU and peak memory at 16k and 64k tokens",
                claim=("Speed", "Tokens per second, MFU and peak memory of the trainer's step."),
            ),
        ),
    ),
}
