"""Measure everything that benchmarks/results/ reports, and print it as a table.

    bash benchmarks/run.sh [NAME ...] [--repeats 3] [--steps 20]

A benchmark's two sides run alternately (A B A B ...), so that a busy machine slows both; the ratio of each pair counts,
and the median of those ratios is reported. Below 1 spmdrl is faster, or within its limit.

Each side is a program that prints progress to stderr and, as the last line of stdout, one JSON object:

- `*_step.py --workload fixed|tail --beta B --warmup-steps N --steps M --threads T`: training steps of one trainer.
  `steps_s` (the duration of each of the M counted steps, from the end of one optimizer step to the end of the next),
  `median_s` (of those), `phase_fractions` (name to share of the counted time), `response_tokens` (a step, mean),
  `response_tokens_per_s`, `reward_mean` (over the counted steps), `reward_first` and `reward_last` (over 10 steps
  each), `peak_rss_mib`, `num_ranks`, `threads_per_rank`, `load_average`, `versions`.
- `engine.py --workload fixed|tail --repeats N --threads T`: both engines in one process, on the same weights.
  `spmdrl_s` and `peer_s` (N durations each, of calls that alternated), `response_tokens` (a call), `load_average`,
  `versions`.
- `packing.py --repeats N`: `cases` (see there), of the one that counts `spmdrl_s` and `peer_s`, `peer` (its name and
  version), `summaries` (a line for each case), `never_slower_nor_less_even`, `load_average`, `versions`.
- `load_memory.py`: `anon_over_limit`, `within_limit`, `ranks`, `versions`.
- `logprob_memory.py --repeats N --threads T`: `tiled_peak_mib` and `plain_peak_mib` at 4096 tokens, `memory` and
  `times` by number of tokens, `plain_peak_is_measured` (or from smaller ones), `versions`.
- `true_on_policy.py --workload fixed|tail --repeats N --threads T`: both modes in one process, on the same weights.
  `exact_s` and `plain_s` (N durations each, of sampling and training together, that alternated), `sampling_ratios` and
  `training_ratios` (of each pair), `mismatch` (the largest, nats, by mode), `load_average`, `versions`.
- `refit.py --sizes S ... --repeats N`: `sizes`, by size: `parameters`, `tensors`, `buckets`, `gb` (10^9 bytes that the
  engine gets), `spmdrl_s` and `peer_s` (N refits each, that alternated), `ratios` (of those), `gb_per_s` (median),
  `copy_gb_per_s` (of a plain copy, median), `shares_of_copy` (the first over the second, N times), `digests_s` (what
  comparing them adds), or `left_out` (why); `bucket_mib`, `load_average`, `versions`. The file's own ratio is that of
  the 200m model; `notes` has the others, with their goals.
- `checkpoint.py --sizes S ... --repeats N`: `sizes`, by size: `parameters`, `gb` (10^9 bytes of weights and optimizer
  state), N times each `stall_s` (what a step waits), `written_s` (until it is on disk), `torch_s` (torch's distributed
  checkpoint, waited for), `disk_s` (one file of as many bytes), `copy_s`, `work_s` and `work_while_writing_s` (a fixed
  amount of work); the ratios of these; `stall_s_per_gb`; `load_average`, `versions`. The file's own ratio is that of
  the 100m model; `notes` has the others.

To each, `cores_used_by_others` (mean, while it ran) is added. Whatever else such an object holds is kept in the result
file as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PEER_VENV = ".venv-trl"
QUIET_CORES = 0.1  # a run during which other programs used more than this is pointed out

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to measure."""

    repeats: int
    warmup_steps: int
    steps: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one benchmark found. Pair i is spmdrl[i] and peer[i]; with a fixed limit, `peer` holds the limit."""

    unit: str
    spmdrl: list[float]
    peer: list[float]
    peer_name: str
    commands: list[str]
    outputs: list[Json]  # what the programs printed, in the order in which they ran
    phase_fractions: dict[str, dict[str, float]] = field(default_factory=dict)  # by side, median over its runs
    notes: list[str] = field(default_factory=list)  # what else was found, a line each

    @property
    def ratios(self) -> list[float]:
        """spmdrl / peer, of each pair."""
        return [ours / theirs for ours, theirs in zip(self.spmdrl, self.peer, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One row of the table."""

    about: str
    goal: float | None  # the largest ratio that is good enough; None where it is a price, and only told
    measure: Callable[[Settings], Measurement]


class ProgramFailed(Exception):
    """A program ended with an error or printed no JSON object."""


def main() -> int:
    """Run the benchmarks that were asked for; 1 when one of them could not be measured."""
    args = parse_arguments()
    settings = Settings(repeats=args.repeats, warmup_steps=args.warmup_steps, steps=args.steps, threads=args.threads)
    table, failures = [], []
    for name in args.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        commit, load_average = commit_id(), os.getloadavg()[0]  # of what is about to run
        try:
            measurement = benchmark.measure(settings)
        except ProgramFailed as error:
            failures.append(f"{name}: {error}")
            continue
        write_result(name, benchmark, settings, measurement, commit=commit, load_average=load_average)
        table.append((name, benchmark, measurement))
    print_table(table)
    for failure in failures:
        print(f"not measured: {failure}")
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of each benchmark")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps of a run that are not counted")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run that are counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    return args


def engine(which: workload.Workload) -> Callable[[Settings], Measurement]:
    """spmdrl's torch engine beside `transformers.generate`, in one process."""

    def measure(settings: Settings) -> Measurement:
        repeats = ["--repeats", str(settings.repeats * 5), "--threads", str(settings.threads)]  # calls are short
        command = ["python", "benchmarks/engine.py", "--workload", which, *repeats]
        output = run(command)
        return Measurement(
            unit="s",
            spmdrl=output["spmdrl_s"],
            peer=output["peer_s"],
            peer_name="generate",
            commands=[" ".join(command)],
            outputs=[output],
        )

    return measure


def step(which: workload.Workload, *, beta: float) -> Callable[[Settings], Measurement]:
    """Whole training steps of spmdrl beside TRL's, each in a process of its own."""

    def measure(settings: Settings) -> Measurement:
        options = ["--workload", which, "--beta", str(beta), "--warmup-steps", str(settings.warmup_steps)]
        options += ["--steps", str(settings.steps), "--threads", str(settings.threads)]
        sides = {
            "spmdrl": ["python", "benchmarks/spmdrl_step.py", *options],
            "TRL": [f"{PEER_VENV}/bin/python", "benchmarks/trl_step.py", *options],
        }
        outputs: dict[str, list[Json]] = {side: [] for side in sides}
        for _ in range(settings.repeats):
            for side, command in sides.items():
                outputs[side].append(run(command))
        return Measurement(
            unit="s",
            spmdrl=[output["median_s"] for output in outputs["spmdrl"]],
            peer=[output["median_s"] for output in outputs["TRL"]],
            peer_name="TRL",
            commands=[" ".join(command) for command in sides.values()],
            outputs=[output for pair in zip(*outputs.values(), strict=True) for output in pair],
            phase_fractions={side: median_phases(runs) for side, runs in outputs.items()},
        )

    return measure


def median_phases(outputs: Sequence[Json]) -> dict[str, float]:
    """The median share of each phase over several runs."""
    names = outputs[0]["phase_fractions"]
    return {name: statistics.median(output["phase_fractions"][name] for output in outputs) for name in names}


def true_on_policy(which: workload.Workload) -> Callable[[Settings], Measurement]:
    """Sampling and training with the same bits beside the plain mode, in one process."""

    def measure(settings: Settings) -> Measurement:
        repeats = ["--repeats", str(settings.repeats * 5), "--threads", str(settings.threads)]  # calls are short
        command = ["python", "benchmarks/true_on_policy.py", "--workload", which, *repeats]
        output = run(command)
        ratios = {phase: statistics.median(output[f"{phase}_ratios"]) for phase in ("sampling", "training")}
        return Measurement(
            unit="s",
            spmdrl=output["exact_s"],
            peer=output["plain_s"],
            peer_name="plain",
            commands=[" ".join(command)],
            outputs=[output],
            notes=[
                f"sampling {ratios['sampling']:.2f} and training {ratios['training']:.2f} times the plain mode; "
                f"mismatch {output['mismatch']['true_on_policy']:g} nats beside {output['mismatch']['plain']:.1e}; "
                f"load average {output['load_average']:.1f}"
            ],
        )

    return measure


def packing(settings: Settings) -> Measurement:
    """The balance of sequences over ranks beside verl's."""
    command = ["python", "benchmarks/packing.py", "--repeats", str(settings.repeats)]
    output = run(command)
    return Measurement(
        unit="s",
        spmdrl=output["spmdrl_s"],
        peer=output["peer_s"],
        peer_name=output["peer"],
        commands=[" ".join(command)],
        outputs=[output],
        notes=output["summaries"],
    )


def load_memory(settings: Settings) -> Measurement:
    """The worst rank's peak of RssAnon beside its limit."""
    command = ["python", "benchmarks/load_memory.py"]
    output = run(command)
    worst = max(output["ranks"], key=lambda rank: rank["anon_over_limit"])
    return Measurement(
        unit="MiB",
        spmdrl=[worst["peak_anon_mib"]],
        peer=[worst["limit_mib"]],
        peer_name="limit",
        commands=[" ".join(command)],
        outputs=[output],
    )


def refit(settings: Settings) -> Measurement:
    """SGLang refitted in buckets beside one call for each tensor, in one process."""
    command = ["python", "benchmarks/refit.py", "--repeats", str(settings.repeats * 3)]  # refits are short
    output = run(command)
    middle = output["sizes"]["200m"]
    return Measurement(
        unit="s",
        spmdrl=middle["spmdrl_s"],
        peer=middle["peer_s"],
        peer_name="by tensor",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"{size}: {refit_note(size, found)}" for size, found in output["sizes"].items()],
    )


def refit_note(size: str, found: Json) -> str:
    """What one model's refits took, beside what is asked of it."""
    if "left_out" in found:
        return f"left out: {found['left_out']}"
    ratio, share = (statistics.median(found[name]) for name in ("ratios", "shares_of_copy"))
    asked = {"10m": f" (goal 0.33 {'met' if ratio <= 1 / 3 else 'missed'})"}.get(size, "")
    of_copy = {"200m": f" (goal 0.33 {'met' if share >= 1 / 3 else 'missed'})"}.get(size, "")
    return (
        f"{found['tensors']} tensors in {found['buckets']} buckets, {found['spmdrl_median_s'] * 1e3:.0f} ms beside "
        f"{found['peer_median_s'] * 1e3:.0f}: {ratio:.2f}{asked}; {found['gb_per_s']:.1f} GB/s, {share:.2f} of a "
        f"copy's {found['copy_gb_per_s']:.1f}{of_copy}; digests +{found['digests_s'] * 1e3:.0f} ms"
    )


def checkpoint(settings: Settings) -> Measurement:
    """What a step waits for a checkpoint in the background, beside one that it waits for whole, in one process."""
    command = ["python", "benchmarks/checkpoint.py", "--repeats", str(settings.repeats + 2)]
    output = run(command)
    largest = output["sizes"]["100m"]
    return Measurement(
        unit="s",
        spmdrl=largest["stall_s"],
        peer=largest["torch_s"],
        peer_name="dcp.save",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"{size}: {checkpoint_note(found)}" for size, found in output["sizes"].items()],
    )


def checkpoint_note(found: Json) -> str:
    """The stall of one model beside everything it can be compared with."""
    median = {name: statistics.median(values) for name, values in found.items() if isinstance(values, list)}
    return (
        f"{found['gb']:.2f} GB, stall {median['stall_s'] * 1e3:.0f} ms ({found['stall_s_per_gb'] * 1e3:.0f} ms/GB): "
        f"{median['stall_over_torch']:.3f} of dcp.save, {median['stall_over_disk']:.3f} of the disk's own time, "
        f"{median['stall_over_copy']:.2f} copies; dcp.save takes {median['torch_over_disk']:.2f} times the disk's; "
        f"work goes on {median['work_slowdown']:.2f} times as long while it is written"
    )


def logprob_memory(settings: Settings) -> Measurement:
    """Scores of tokens from tiles of the logits beside all logits at once: peak memory at 4096 tokens."""
    options = ["--repeats", str(settings.repeats), "--threads", str(settings.threads)]
    command = ["python", "benchmarks/logprob_memory.py", *options]
    output = run(command)
    return Measurement(
        unit="MiB",
        spmdrl=[output["tiled_peak_mib"]],
        peer=[output["plain_peak_mib"]],
        peer_name="[T, V]",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[logprob_note(output)],
    )


def logprob_note(output: Json) -> str:
    """How the peak grows with the tokens, and what it costs in time."""
    peaks = ", ".join(f"{int(n) // 1024}k: {found['peak_mib']:.0f}" for n, found in output["memory"]["tiled"].items())
    ratios = ", ".join(f"{int(n) // 1024}k: {found['ratio']:.2f}" for n, found in output["times"].items())
    plain = "measured" if output["plain_peak_is_measured"] else "from smaller ones"
    return f"peak MiB by tokens {peaks} (all logits at 4k {plain}); time over all logits at once {ratios} (goal 1.15)"


BENCHMARKS: Mapping[str, Benchmark] = {
    "engine-fixed": Benchmark(about="128 requests x 32 tokens", goal=1.0, measure=engine("fixed")),
    "engine-tail": Benchmark(about="128 requests, lognormal lengths", goal=1 / 3, measure=engine("tail")),
    "step-fixed": Benchmark(about="a step of 128 x 32 tokens", goal=1.0, measure=step("fixed", beta=0.0)),
    "step-fixed-kl": Benchmark(about="the same with a reference", goal=1.0, measure=step("fixed", beta=0.04)),
    "step-tail": Benchmark(about="a step, lognormal lengths", goal=1 / 3, measure=step("tail", beta=0.0)),
    "refit": Benchmark(about="SGLang, 200M float32 parameters", goal=1.0, measure=refit),
    "checkpoint": Benchmark(about="stall, 100M parameters, AdamW", goal=0.1, measure=checkpoint),
    "logprob-memory": Benchmark(about="scores of 4096 x 151936", goal=0.1, measure=logprob_memory),
    "true-on-policy-fixed": Benchmark(about="128 x 32 tokens, exact", goal=None, measure=true_on_policy("fixed")),
    "true-on-policy-tail": Benchmark(about="lognormal lengths, exact", goal=None, measure=true_on_policy("tail")),
    "packing-verl": Benchmark(about="10,000 lognormal lengths over 64 ranks", goal=1.0, measure=packing),
    "load-memory": Benchmark(about="anonymous memory, 1e9 on 2 ranks", goal=1.0, measure=load_memory),
}


def run(command: Sequence[str]) -> Json:
    """Run a program from the project's root and return the JSON object that it printed last."""
    print(f"+ {' '.join(command)}", file=sys.stderr, flush=True)
    # "python" in what is written down is the interpreter that runs this program.
    program = sys.executable if command[0] == "python" else str(ROOT / command[0])
    started, busy_before, ours_before = time.perf_counter(), busy_cpu_s(), children_cpu_s()
    try:
        done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ProgramFailed(f"there is no {command[0]}; bash benchmarks/run.sh makes it") from error
    if done.returncode:
        sys.stderr.write(done.stderr)
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProgramFailed(f"{' '.join(command)} ended with exit code {done.returncode}: {reason}")
    lines = done.stdout.strip().splitlines()
    try:
        output: Json = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise ProgramFailed(f"{' '.join(command)} did not end with a JSON object") from error
    duration_s = time.perf_counter() - started
    others_s = busy_cpu_s() - busy_before - (children_cpu_s() - ours_before)
    print(f"  {duration_s:.0f} s", file=sys.stderr, flush=True)
    return {**output, "cores_used_by_others": round(max(others_s, 0.0) / duration_s, 3)}


def busy_cpu_s() -> float:
    """CPU seconds that all of the machine's cores have worked, or were taken from it, since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """CPU seconds of the programs that have been run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_result(
    name: str, benchmark: Benchmark, settings: Settings, measurement: Measurement, *, commit: str, load_average: float
) -> None:
    """Write benchmarks/results/<name>.json, complete or not at all."""
    ratio = statistics.median(measurement.ratios)
    content = {
        "benchmark": name,
        "about": benchmark.about,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "machine": machine(),
        "load_average_before": load_average,
        "settings": asdict(settings),
        "peer": measurement.peer_name,
        "unit": measurement.unit,
        "spmdrl_median": statistics.median(measurement.spmdrl),
        "peer_median": statistics.median(measurement.peer),
        "ratio": ratio,
        "goal": benchmark.goal,
        "goal_met": None if benchmark.goal is None else ratio <= benchmark.goal,
        "ratios": measurement.ratios,
        "phase_fractions": measurement.phase_fractions,
        "notes": measurement.notes,
        "commands": measurement.commands,
        "outputs": measurement.outputs,
    }
    RESULTS.mkdir(exist_ok=True)
    unfinished = RESULTS / f"{name}.json.new"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(RESULTS / f"{name}.json")


def verdict(ratio: float, goal: float | None) -> str:
    """The goal, and whether the ratio meets it."""
    return "none" if goal is None else f"{goal:>5.2f} {'met' if ratio <= goal else 'missed'}"


def commit_id() -> str:
    """The commit that is measured, marked when files differ from it (the results themselves aside)."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changes = [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=False).stdout.strip()
    return f"{head or 'unknown'}{' with changes' if changed else ''}"


def machine() -> Mapping[str, Any]:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }


def print_table(table: Sequence[tuple[str, Benchmark, Measurement]]) -> None:
    """Medians; the median and the range of the pairs' ratios; the share of each phase of a step."""
    print(f"{'benchmark':<21}{'':<34}{'spmdrl':>11}{'peer':>11}{'':<10}{'ratio':>6}  {'range':<12}{'goal':>5}")
    for name, benchmark, found in table:
        ours, theirs = (f"{statistics.median(side):.4g} {found.unit}" for side in (found.spmdrl, found.peer))
        ratio = statistics.median(found.ratios)
        spread = f"{min(found.ratios):.2f}-{max(found.ratios):.2f}"
        row = f"{name:<21}{benchmark.about:<34}{ours:>11}{theirs:>11} {found.peer_name:<9}{ratio:>6.2f}"
        print(f"{row}  {spread:<12}{verdict(ratio, benchmark.goal)}")
        for side, phases in found.phase_fractions.items():
            shares = ", ".join(f"{phase} {fraction:.2f}" for phase, fraction in phases.items())
            print(f"{'':<21}{side}: {shares}")
        for note in found.notes:
            print(f"{'':<21}{note}")
        if (others := max(output["cores_used_by_others"] for output in found.outputs)) > QUIET_CORES:
            print(f"{'':<21}not quiet: other programs used up to {others:.2f} cores; threads that wait for each other")
            print(f"{'':<21}then lose far more than their share. Measure again before believing this.")


if __name__ == "__main__":
    sys.exit(main())
