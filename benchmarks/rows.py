"""The rows of the table: how each is measured, and against what."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import workload
from program import run
from results import Json

PEER_VENV = ".venv-trl"


class Unit(NamedTuple):
    """A quantity that is compared: its name in a table, and the end of its keys in what programs print."""

    name: str
    key: str


# Where lengths are random, a step's time is divided by its response tokens.
SECONDS, PER_TOKEN = Unit("s", "s"), Unit("us/token", "us_per_token")
UNITS: Mapping[workload.Workload, Unit] = {"fixed": SECONDS, "tail": SECONDS, "natural": PER_TOKEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to measure."""

    repeats: int
    warmup_steps: int
    steps: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The findings of one benchmark. Pair i is spmdrl[i] and peer[i]; with a fixed limit, `peer` holds the limit."""

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
    goal: float | None = None  # the largest ratio that is good enough; None where it is a price, and only told
    measure: Callable[[Settings], Measurement]
    in_readme: bool = False  # the six that `make bench` measures when it gets no names


def verdict(ratio: float, goal: float | None) -> str:
    """The goal, and whether the ratio meets it."""
    return "" if goal is None else f"{goal:.3g} {'met' if ratio <= goal else 'missed'}"


def engine(which: workload.Workload) -> Callable[[Settings], Measurement]:
    """spmdrl's torch engine beside `transformers.generate`, in one process."""

    def measure(settings: Settings) -> Measurement:
        repeats = ["--repeats", str(settings.repeats * 3), "--threads", str(settings.threads)]  # calls are short
        command = ["python", "benchmarks/engine.py", "--workload", which, *repeats]
        output = run(command)
        unit = UNITS[which]
        return Measurement(
            unit=unit.name,
            spmdrl=output[f"spmdrl_{unit.key}"],
            peer=output[f"peer_{unit.key}"],
            peer_name=f"transformers {output['versions']['transformers']}",
            commands=[" ".join(command)],
            outputs=[output],
        )

    return measure


def step(
    which: workload.Workload,
    *,
    beta: float = 0.0,
    size: int = 1,
    rollouts_factor: int = 1,
    ranks: int = 1,
    fewer_steps: int = 1,
    teacher_layers: int = 0,
) -> Callable[[Settings], Measurement]:
    """Whole training steps of spmdrl beside TRL's, each in a process of its own; the ranks share the threads."""

    def measure(settings: Settings) -> Measurement:
        values = {
            "workload": which,
            "beta": beta,
            "size": size,
            "rollouts-factor": rollouts_factor,
            "ranks": ranks,
            "teacher-layers": teacher_layers,
            "threads": max(1, settings.threads // ranks),
            "warmup-steps": settings.warmup_steps,
            "steps": max(1, settings.steps // fewer_steps),
        }
        options = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        sides = {
            "spmdrl": ["python", "benchmarks/spmdrl_step.py", *options],
            "TRL": [f"{PEER_VENV}/bin/python", "benchmarks/trl_step.py", *options],
        }
        outputs: dict[str, list[Json]] = {side: [] for side in sides}
        for _ in range(settings.repeats):
            for side, command in sides.items():
                outputs[side].append(run(command))
        unit = UNITS[which]
        return Measurement(
            unit=unit.name,
            spmdrl=[output[f"median_{unit.key}"] for output in outputs["spmdrl"]],
            peer=[output[f"median_{unit.key}"] for output in outputs["TRL"]],
            peer_name=f"TRL {outputs['TRL'][0]['versions']['trl']}",
            commands=[" ".join(command) for command in sides.values()],
            outputs=[output for pair in zip(*outputs.values(), strict=True) for output in pair],
            phase_fractions={side: median_phases(runs) for side, runs in outputs.items()},
        )

    return measure


def step_over_floor(settings: Settings) -> Measurement:
    """Whole training steps beside their matrix products alone."""
    threads = ["--threads", str(settings.threads)]
    steps = ["--warmup-steps", str(settings.warmup_steps), "--steps", str(settings.steps)]
    sides = {
        "step": ["python", "benchmarks/spmdrl_step.py", "--workload", "fixed", *steps, *threads],
        "floor": ["python", "benchmarks/floor.py", "--repeats", str(settings.steps), *threads],
    }
    outputs: dict[str, list[Json]] = {side: [] for side in sides}
    for _ in range(settings.repeats):
        for side, command in sides.items():
            outputs[side].append(run(command))
    floor = outputs["floor"]
    training = statistics.median(output["training_gflop"] / statistics.median(output["training_s"]) for output in floor)
    sampling = statistics.median(output["sampling_gflop"] / statistics.median(output["sampling_s"]) for output in floor)
    return Measurement(
        unit="s",
        spmdrl=[output["median_s"] for output in outputs["step"]],
        peer=[statistics.median(output["floor_s"]) for output in floor],
        peer_name="products alone",
        commands=[" ".join(command) for command in sides.values()],
        outputs=[output for pair in zip(*outputs.values(), strict=True) for output in pair],
        phase_fractions={"spmdrl": median_phases(outputs["step"])},
        notes=[
            f"{floor[0]['training_gflop']:.1f} GFLOP of training at {training:.0f} GFLOP/s, "
            f"{floor[0]['sampling_gflop']:.1f} of sampling at {sampling:.0f}"
        ],
    )


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
            peer_name="plain mode",
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
        peer_name="1.25 x shard + 512 MiB",
        commands=[" ".join(command)],
        outputs=[output],
    )


def data_load(settings: Settings) -> Measurement:
    """The growth of RssAnon while a large file is opened beside its limit, for the worse of two files."""
    command = ["python", "benchmarks/data_load.py"]
    output = run(command)
    worst = max(output["files"].values(), key=lambda file: file["growth_over_limit"])
    grown = worst["peak_anon_mib"] - worst["anon_before_mib"]
    return Measurement(
        unit="MiB",
        spmdrl=[grown],
        peer=[grown / worst["growth_over_limit"]],
        peer_name="512 MiB + 32 bytes x rows",
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
        peer_name="one call for each tensor",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"{size}: {refit_note(size, found)}" for size, found in output["sizes"].items()],
    )


def refit_lora(settings: Settings) -> Measurement:
    """SGLang refitted with adapters beside refits of all weights that are verified too, in one process."""
    repeats = str(settings.repeats * 3)
    command = ["python", "benchmarks/refit.py", "--sizes", "200m", "--lora", "8", "--repeats", repeats]
    output = run(command)
    found = output["sizes"]["200m"]
    return Measurement(
        unit="s",
        spmdrl=found["adapters_s"],
        peer=found["verified_s"],
        peer_name="all weights, verified too",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[
            f"rank 8: {found['adapters_gb'] * 1e3:.1f} MB, {100 * found['share_of_bytes']:.2f} % of the bytes; "
            f"all weights without digests {found['whole_median_s'] * 1e3:.0f} ms"
        ],
    )


def refit_note(size: str, found: Json) -> str:
    """Tell how long one model's refits took, beside the goals."""
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
    """The wait of a step for a checkpoint in the background, beside one that it waits for whole, in one process."""
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
        peer_name="all logits at once",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[logprob_note(output)],
    )


def tower(settings: Settings) -> Measurement:
    """Images that a frozen tower looks at once a step, beside in every pass over every sequence, in one process."""
    options = ["--repeats", str(settings.repeats), "--threads", str(settings.threads)]
    command = ["python", "benchmarks/tower.py", *options]
    output = run(command)
    return Measurement(
        unit="s",
        spmdrl=output["spmdrl_s"],
        peer=output["peer_s"],
        peer_name="in every pass over every sequence",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[
            f"{output['spmdrl_patches']:,} patches beside {output['peer_patches']:,}, "
            f"{output['spmdrl_patches'] / output['peer_patches']:.3f} of them; "
            f"{output['features_mib']:.1f} MiB of features on the host; load average {output['load_average']:.1f}"
        ],
    )


def trees(settings: Settings) -> Measurement:
    """Sequences that begin alike as a tree beside the same sequences in a row, in one process."""
    command = ["python", "benchmarks/prefix_tree.py", "--repeats", str(max(3, settings.repeats)), "--threads", "1"]
    output = run(command)
    return Measurement(
        unit="s",
        spmdrl=output["cases"]["group"]["tree_s"],
        peer=output["cases"]["group"]["row_s"],
        peer_name="each sequence whole",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[
            f"{case}: {found['computed_tokens']} of {found['tokens']} tokens in {found['ratio']:.2f} of the time and "
            f"{found['peak_mib']['tree'] / found['peak_mib']['row']:.2f} of the memory"
            for case, found in output["cases"].items()
        ],
    )


def recurrent(layer: str) -> Callable[[Settings], Measurement]:
    """A recurrent layer on packed sequences beside a call of transformers' layer for each length."""

    def measure(settings: Settings) -> Measurement:
        options = ["--layer", layer, "--repeats", str(max(3, settings.repeats)), "--threads", "1"]
        command = ["python", "benchmarks/gated_delta.py", *options]
        output = run(command)
        found = output["cases"][output["headline"]]
        return Measurement(
            unit="s",
            spmdrl=found["pass_s"]["packed"],
            peer=found["pass_s"]["per_length"],
            peer_name=f"a call for each length, transformers {output['versions']['transformers']}",
            commands=[" ".join(command)],
            outputs=[output],
            notes=[recurrent_note(case, found) for case, found in output["cases"].items()],
        )

    return measure


def recurrent_note(case: str, found: Json) -> str:
    """Say what a pass is, and give its time and memory beside both other ways."""
    times, peaks = found["median_s"], found["peak_mib"]
    return (
        f"{case}: {found['tokens']} tokens, {found['sequences']} sequences, {found['different_lengths']} lengths up to "
        f"{found['longest']}: {times['per_length'] / times['packed']:.1f} times as fast as a call for each length, "
        f"{times['padded'] / times['packed']:.1f} times as padding; peak {peaks['packed']:.0f} MiB, "
        f"{peaks['per_length']:.0f} and {peaks['padded']:.0f}"
    )


def logprob_note(output: Json) -> str:
    """How the peak grows with the tokens, and what it costs in time."""
    peaks = ", ".join(f"{int(n) // 1024}k: {found['peak_mib']:.0f}" for n, found in output["memory"]["tiled"].items())
    ratios = ", ".join(f"{int(n) // 1024}k: {found['ratio']:.2f}" for n, found in output["times"].items())
    plain = "measured" if output["plain_peak_is_measured"] else "from smaller ones"
    prompts = ", ".join(
        f"{int(n) // 1024}k: {found['after_prompts_ratio']:.2f}" for n, found in output["times"].items()
    )
    return (
        f"peak MiB by tokens {peaks} (all logits at 4k {plain}); time over all logits at once {ratios} (goal 1.15); "
        f"half of the tokens prompts, over all scored: time {prompts}, "
        f"memory {output['after_prompts_memory_ratio']:.2f}"
    )


def episodes(which: str) -> Callable[[Settings], Measurement]:
    """Episodes with a tool of 50 ms beside a loop that waits turn by turn, on one engine, in one process."""

    def measure(settings: Settings) -> Measurement:
        options = ["--repeats", str(settings.repeats), "--threads", str(settings.threads)]
        command = ["python", "benchmarks/episodes.py", "--engine", which, *options]
        output = run(command)
        middle = output["delays_ms"]["50"]
        return Measurement(
            unit="s",
            spmdrl=middle["spmdrl_s"],
            peer=middle["peer_s"],
            peer_name="turn by turn",
            commands=[" ".join(command)],
            outputs=[output],
            notes=[f"{delay_ms} ms: {episodes_note(found)}" for delay_ms, found in output["delays_ms"].items()],
        )

    return measure


def episodes_note(found: Json) -> str:
    """Tell what both loops reached with one delay."""
    ours, theirs = found["spmdrl_shares"], found["peer_shares"]
    return (
        f"{found['spmdrl_tokens_per_s']:,.0f} tokens/s beside {found['peer_tokens_per_s']:,.0f}, "
        f"{statistics.median(found['ratios']):.2f} of the time; the engine idle for {ours['idle']:.3f} of it beside "
        f"{theirs['idle']:.3f}, and reading prompts for {ours['prefill']:.2f}; of later prompts {ours['cached']:.2f} "
        f"were in its cache, beside {theirs['cached']:.2f}"
    )


NODES_64 = 512  # engines of one GPU each


def tickets(settings: Settings) -> Measurement:
    """Requests of the engines of 64 nodes that wait for tickets at one store, beside those that fill its core."""
    command = ["python", "benchmarks/tickets.py", "--repeats", str(settings.repeats)]
    output = run(command)
    (found,) = output["engines"].values()
    asked_per_s = NODES_64 * output["requests"]["look"] / output["poll_s"]
    return Measurement(
        unit="requests/s",
        spmdrl=[asked_per_s for _ in found["store_us"]],
        peer=[1e6 / us for us in found["store_us"]],
        peer_name="that fill a core",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"{count} engines: {tickets_note(found)}" for count, found in output["engines"].items()],
    )


def tickets_note(found: Json) -> str:
    """Tell what some number of waiting engines ask for, and what they got on this machine."""
    median = {name: statistics.median(found[name]) for name in ("store_us", "busy", "requests_per_s")}
    return (
        f"{found['asked_per_s']:,.0f} requests/s fill {median['busy']:.2f} of the store's core, "
        f"{median['store_us']:.1f} us each; here {median['requests_per_s']:,.0f} were answered in a second"
    )


def reward_rate(settings: Settings) -> Measurement:
    """The processors' time for a trivial reward in a sandboxed worker, beside what 10,000 a second leave on 2 cores."""
    command = ["python", "benchmarks/reward_rate.py", "--repeats", str(settings.repeats)]
    output = run(command)
    taken = output["modes"]["strict"]["cpu_us"]
    return Measurement(
        unit="us",
        spmdrl=taken,
        peer=[output["room_us"]] * len(taken),
        peer_name="for 10,000 a second",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"sandbox {mode}: {reward_note(found)}" for mode, found in output["modes"].items()],
    )


def reward_note(found: Json) -> str:
    """Tell what one pool reached, and where the time of the processors went."""
    median = {name: statistics.median(values) for name, values in found.items()}
    return (
        f"{median['rank_us']:.0f} us of the rank and {median['worker_us']:.0f} of the workers for a reward; here "
        f"{median['rewards_per_s']:,.0f} a second"
    )


def checkpoint_files(settings: Settings) -> Measurement:
    """All that is done with the files of a checkpoint, for 10,000 of them beside ten times that for 1,000."""
    command = ["python", "benchmarks/checkpoint_files.py", "--folder", "/dev/shm", "--repeats", str(settings.repeats)]
    output = run(command)
    many = str(output["files"][1])
    parts = ", ".join(
        f"{name} {statistics.median(times[many]):.2f} s (growth {output['growth'][name]:.2f})"
        for name, times in output["times_s"].items()
    )
    return Measurement(
        unit="s",
        spmdrl=output["many_s"],
        peer=output["few_s"],
        peer_name="ten times 1,000 files",
        commands=[" ".join(command)],
        outputs=[output],
        notes=[f"{many} files: {parts}"],
    )


BENCHMARKS: Mapping[str, Benchmark] = {
    "engine-fixed": Benchmark(about="torch engine, 128 requests x 32 tokens", goal=0.75, measure=engine("fixed")),
    "engine-tail": Benchmark(about="torch engine, 128 requests, lognormal lengths", goal=0.2, measure=engine("tail")),
    "engine-natural": Benchmark(
        in_readme=True, about="torch engine, responses that end by themselves", goal=0.75, measure=engine("natural")
    ),
    "step-fixed": Benchmark(
        in_readme=True, about="training step, 128 rollouts x 32 tokens", goal=0.85, measure=step("fixed")
    ),
    "step-fixed-kl": Benchmark(about="the same with a reference model", goal=0.8, measure=step("fixed", beta=0.04)),
    "step-natural": Benchmark(
        about="training step, responses that end by themselves", goal=0.85, measure=step("natural")
    ),
    "step-tail": Benchmark(
        in_readme=True, about="training step, lognormal lengths", goal=0.2, measure=step("tail", fewer_steps=2)
    ),
    "step-fixed-2ranks": Benchmark(
        in_readme=True, about="128 x 32 tokens on two ranks of one thread", goal=0.85, measure=step("fixed", ranks=2)
    ),
    "step-fixed-4x-parameters": Benchmark(
        about="128 x 32 tokens, 3.2M parameters", goal=0.85, measure=step("fixed", size=4, fewer_steps=2)
    ),
    "step-fixed-16x-parameters": Benchmark(
        about="128 x 32 tokens, 12.6M parameters", goal=0.85, measure=step("fixed", size=16, fewer_steps=4)
    ),
    "step-fixed-4x-rollouts": Benchmark(
        about="512 rollouts x 32 tokens", goal=0.85, measure=step("fixed", rollouts_factor=4, fewer_steps=4)
    ),
    "step-distill-fixed": Benchmark(
        about="distillation step from twice the layers, 128 responses x 32 tokens",
        goal=0.8,
        measure=step("fixed", teacher_layers=2 * workload.NUM_LAYERS),
    ),
    "step-distill-tail": Benchmark(
        about="the same with lognormal lengths",
        goal=0.25,
        measure=step("tail", teacher_layers=2 * workload.NUM_LAYERS, fewer_steps=2),
    ),
    "step-fixed-floor": Benchmark(about="training step beside its matrix products alone", measure=step_over_floor),
    "refit": Benchmark(in_readme=True, about="refit of SGLang, 200M parameters", goal=1.0, measure=refit),
    "refit-lora": Benchmark(
        about="refit of SGLang with adapters of rank 8, 200M parameters", goal=0.05, measure=refit_lora
    ),
    "packing-verl": Benchmark(
        about="balance of 10,000 lognormal sequences over 64 ranks",
        goal=1.0,
        measure=packing,
    ),
    "logprob-memory": Benchmark(
        about="memory for log-probabilities of 4,096 tokens, vocabulary 151,936",
        goal=0.1,
        measure=logprob_memory,
    ),
    "tower": Benchmark(about="a frozen tower in a step with groups of 8", goal=1 / 8, measure=tower),
    "gated-delta": Benchmark(
        about="gated delta net, lognormal lengths, forward and backward", goal=1 / 3, measure=recurrent("gated-delta")
    ),
    "mamba2": Benchmark(about="Mamba 2, the same lengths", goal=0.4, measure=recurrent("mamba2")),
    "prefix-tree": Benchmark(
        about="16 responses of 64 tokens to a prompt of 512, forward and backward", goal=0.2, measure=trees
    ),
    "load-memory": Benchmark(
        about="anonymous memory while loading 1e9 parameters, 2 ranks", goal=1.0, measure=load_memory
    ),
    "data-load": Benchmark(
        about="anonymous memory while 1,000,000 rows of jsonl or 10 GB of parquet are opened",
        goal=1.0,
        measure=data_load,
    ),
    "checkpoint": Benchmark(about="stall of a save, 100M parameters with AdamW", goal=0.1, measure=checkpoint),
    "checkpoint-files": Benchmark(
        about="what is done with 10,000 files of a checkpoint", goal=1.5, measure=checkpoint_files
    ),
    "tickets": Benchmark(about="512 engines that wait for tickets at one store", goal=1.0, measure=tickets),
    "reward-rate": Benchmark(
        about="a trivial reward in a sandboxed worker, time of the processors", goal=1.0, measure=reward_rate
    ),
    "episodes-clock": Benchmark(
        about="128 episodes with a tool of 50 ms, a simulated engine of 8 ms a token",
        goal=0.5,
        measure=episodes("clock"),
    ),
    "episodes": Benchmark(
        in_readme=True, about="128 episodes with a tool of 50 ms, torch engine", goal=0.5, measure=episodes("torch")
    ),
    "episodes-sglang": Benchmark(
        about="128 episodes with a tool of 50 ms, SGLang on a CPU", goal=0.5, measure=episodes("sglang")
    ),
    "true-on-policy-fixed": Benchmark(about="bitwise agreement, 128 x 32 tokens", measure=true_on_policy("fixed")),
    "true-on-policy-tail": Benchmark(about="bitwise agreement, lognormal lengths", measure=true_on_policy("tail")),
}
