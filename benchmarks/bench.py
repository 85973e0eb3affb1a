"""Measure the rows of the README, or those that are named, and print them as a table.

    bash benchmarks/run.sh [NAME ...] [--repeats 3] [--steps 20]

A benchmark's two sides run alternately (A B A B ...), so that a busy machine slows both; the ratio of each pair counts,
and the median of those ratios is reported. Below 1 spmdrl is faster, or within its limit. `rows.py` has the benchmarks;
`check.py --write` puts the results into the documentation.

Each side is a program that prints progress to stderr and, as the last line of stdout, one JSON object:

- `*_step.py --workload fixed|tail|natural --beta B --warmup-steps N --steps M --threads T --size S --rollouts-factor F
  --ranks R`: training steps of one trainer. `steps_s` (the duration of each of the M counted steps), `response_tokens`
  (of each), `us_per_token` (microseconds of a step for each of its response tokens), `median_s`, `median_us_per_token`,
  `phase_fractions` (name to share of the counted time), `reward_mean` (over the counted steps), `reward_first` and
  `reward_last` (over 10 steps each), `peak_rss_mib` (of the largest process), `parameters`, `rollouts` (a step),
  `num_ranks`, `threads_per_rank`, `load_average`, `versions`. spmdrl's steps last from report to report, TRL's from the
  end of one optimizer step to the end of the next. spmdrl adds `linear_kernels` and `layers_in_c`, which the run chose.
- `engine.py --workload fixed|tail|natural --repeats N --threads T`: both engines in one process, on the same weights.
  `spmdrl_s` and `peer_s` (N durations each, of calls that alternated), `spmdrl_response_tokens` and
  `peer_response_tokens`, `spmdrl_us_per_token` and `peer_us_per_token`, `load_average`, `versions`.
- `floor.py --size S --repeats N --threads T`: the linear layers' products of one step alone, N times. `sampling_s`,
  `training_s` and their sum `floor_s`, `sampling_gflop` and `training_gflop`, `parameters`, `load_average`, `versions`.
- `packing.py --repeats N`: `cases` (see there), of the one that counts `spmdrl_s` and `peer_s`, `peer` (its name and
  version), `summaries` (a line for each case), `never_slower_nor_less_even`, `load_average`, `versions`.
- `load_memory.py`: `anon_over_limit`, `within_limit`, `ranks`, `versions`.
- `logprob_memory.py --repeats N --threads T`: `tiled_peak_mib` and `plain_peak_mib` at 4096 tokens, `memory` and
  `times` by number of tokens, `plain_peak_is_measured` (or from smaller ones), `versions`.
- `true_on_policy.py --workload fixed|tail --repeats N --threads T`: both modes in one process, on the same weights.
  `exact_s` and `plain_s` (N durations each, of sampling and training together, that alternated), `sampling_ratios` and
  `training_ratios` (of each pair), `mismatch` (the largest, nats, by mode), `load_average`, `versions`.
- `refit.py --sizes S ... --repeats N`: `sizes`, by size: `parameters`, `tensors`, `buckets`, `gb` (10^9 bytes that the
  engine gets), `spmdrl_s` and `peer_s` (N refits each, that alternated), `ratios` (of those), `verified_s` (N refits
  that compare digests, after each pair), `verified_ratios` (of those and `spmdrl_s`), `gb_per_s` (median),
  `copy_gb_per_s` (of a plain copy, median), `shares_of_copy` (the first over the second, N times), `digests_s` (what
  comparing them adds), or `left_out` (why); `bucket_mib`, `load_average`, `versions`. The file's own ratio is that of
  the 200m model; `notes` has the others, with their goals.
- `episodes.py --engine torch|clock|sglang --delays-ms D ... --repeats N --threads T`: `delays_ms`, by the tool's delay:
  `spmdrl_s` and `peer_s` (N runs each, that alternated), `ratios` (of those), `response_tokens` (of each pair),
  `spmdrl_tokens_per_s` and `peer_tokens_per_s` (medians), `spmdrl_shares` and `peer_shares` (medians: `idle`, `waiting`
  and `prefill` of the time, `cached` of later prompts), `episodes_of_other_tokens` (of each pair); `episodes`,
  `max_running`, `parameters`, `load_average`, `versions`. The file's own ratio is that at 50 ms.
- `checkpoint.py --sizes S ... --repeats N`: `sizes`, by size: `parameters`, `gb` (10^9 bytes of weights and optimizer
  state), N times each `stall_s` (what a step waits), `written_s` (until it is on disk), `torch_s` (torch's distributed
  checkpoint, waited for), `disk_s` (one file of as many bytes), `copy_s`, `work_s` and `work_while_writing_s` (a fixed
  amount of work); the ratios of these; `stall_s_per_gb`; `load_average`, `versions`. The file's own ratio is that of
  the 100m model; `notes` has the others.
- `tickets.py --engines N ... --repeats N`: `engines`, by their number: `requests_per_s` and `store_us` (N times each:
  requests that the store answered in a second, and its processor time for one), `asked_per_s` (by so many waiting
  engines), `busy` (the share of one core that those take, N times); `requests` (of one look, and of opening a group),
  `poll_s`, `load_average`, `versions`. The file's own ratio is for 512 engines.
- `reward_rate.py --workers N --rewards N --repeats N`: `modes`, by the sandbox's mode, N times each: `rewards_per_s`,
  `rank_us` and `worker_us` (processor time for one reward), `cpu_us` (their sum); `workers`, `rewards`, `room_us` (what
  10,000 a second leave for each on 2 cores), `load_average`, `versions`. The file's own ratio is that in a sandbox.
- `checkpoint_files.py --files FEW MANY --repeats N`: `times_s` (processor time of each thing done, by number of files,
  N times), `growth` (of each, from few to many, per file: 1 is linear), `many_s` and `few_s` (all of it for many, and
  the same number of files in checkpoints of few, N times), `files`, `file_bytes`, `load_average`, `versions`.

To each, `cores_used_by_others` (mean, while it ran) is added. Whatever else such an object holds is kept in the result
file as it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from program import ProgramFailed
from results import RESULTS, Json, provenance, write_result
from rows import BENCHMARKS, Benchmark, Measurement, Settings, verdict

LENGTHS = ("repeats", "warmup_steps", "steps")
QUIET_CORES = 0.1  # a run during which other programs used more than this is pointed out


def main() -> int:
    """Run the benchmarks that were asked for; 1 when one of them could not be measured."""
    args = parse_arguments()
    settings = Settings(repeats=args.repeats, warmup_steps=args.warmup_steps, steps=args.steps, threads=args.threads)
    table, failures = [], []
    for name in args.names:
        benchmark = BENCHMARKS[name]
        before = {**provenance(), "load_average_before": os.getloadavg()[0]}  # of what is about to run
        try:
            measurement = benchmark.measure(settings)
        except ProgramFailed as error:
            failures.append(f"{name}: {error}")
            continue
        content = {"benchmark": name, "about": benchmark.about, **before, **result(benchmark, settings, measurement)}
        write_result(args.results / f"{name}.json", content)
        table.append((name, benchmark, measurement))
    print_table(table)
    for failure in failures:
        print(f"not measured: {failure}")
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: those in README.md; there are {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--repeats", type=int, default=3, help="pairs of each benchmark")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps of a run that are not counted")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run that are counted; larger ones take fewer")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where result files are written")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    args.names = args.names or [name for name, benchmark in BENCHMARKS.items() if benchmark.in_readme]
    shorter = [f"--{name.replace('_', '-')}" for name in LENGTHS if getattr(args, name) < parser.get_default(name)]
    if shorter and args.results.resolve() == RESULTS:
        parser.error(f"{' and '.join(shorter)} measure less than the results that are kept; name another --results")
    return args


def result(benchmark: Benchmark, settings: Settings, found: Measurement) -> Json:
    """Make the part of a result file that is about the measurement itself."""
    ratio = statistics.median(found.ratios)
    return {
        "settings": asdict(settings),
        "peer": found.peer_name,
        "unit": found.unit,
        "spmdrl_median": statistics.median(found.spmdrl),
        "peer_median": statistics.median(found.peer),
        "ratio": ratio,
        "goal": benchmark.goal,
        "goal_met": None if benchmark.goal is None else ratio <= benchmark.goal,
        "ratios": found.ratios,
        "phase_fractions": found.phase_fractions,
        "notes": found.notes,
        "commands": found.commands,
        "outputs": found.outputs,
    }


def print_table(table: Sequence[tuple[str, Benchmark, Measurement]]) -> None:
    """Medians; the median and the range of the pairs' ratios; the share of each phase of a step."""
    print(f"{'benchmark':<26}{'spmdrl':>16}{'peer':>16} {'':<26}{'ratio':>6}  {'range':<11}{'goal':>5}")
    for name, benchmark, found in table:
        ours, theirs = (f"{statistics.median(side):.4g} {found.unit}" for side in (found.spmdrl, found.peer))
        ratio = statistics.median(found.ratios)
        spread = f"{min(found.ratios):.2f}-{max(found.ratios):.2f}"
        row = f"{name:<26}{ours:>16}{theirs:>16} {found.peer_name:<26}{ratio:>6.2f}"
        print(f"{row}  {spread:<11}{verdict(ratio, benchmark.goal)}")
        for side, phases in found.phase_fractions.items():
            shares = ", ".join(f"{phase} {fraction:.2f}" for phase, fraction in phases.items())
            print(f"{'':<26}{side}: {shares}")
        for note in found.notes:
            print(f"{'':<26}{note}")
        if (others := max(output["cores_used_by_others"] for output in found.outputs)) > QUIET_CORES:
            print(f"{'':<26}not quiet: other programs used up to {others:.2f} cores; threads that wait for each other")
            print(f"{'':<26}then lose far more than their share. Measure again before believing this.")


if __name__ == "__main__":
    sys.exit(main())
