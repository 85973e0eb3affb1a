"""Every program of benchmarks/ runs at its smallest size and prints what it says that it prints; no figure is checked.

The programs whose tests are selected run two at a time, from the moment when the first test asks for one. Those of this
environment are forked from a server that has imported everything, which saves most of their time.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TRL, VERL = ".venv-trl/bin/python", ".venv-verl/bin/python"
STEP_KEYS = "trainer steps_s response_tokens us_per_token median_s phase_fractions reward_mean peak_rss_mib versions"
STEP = "--warmup-steps 1 --steps 1 --threads 1"
TIMEOUT_S = 200.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program at its smallest size."""

    options: str  # {folder} holds a tiny model
    keys: str = ""  # of the JSON object that is the last line of stdout; none: it prints no such object
    python: str = ""  # of an environment of its own
    module: str = ""  # beyond what is always installed

    @property
    def missing(self) -> str:
        """A requirement that this machine lacks; the program is then only asked for its help."""
        if self.python and not (ROOT / self.python).exists():
            return self.python
        return self.module if self.module and importlib.util.find_spec(self.module) is None else ""


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


# The slowest first, so that two at a time end together.
PROGRAMS = {
    "refit.py": Program(
        options="--sizes tiny --repeats 1 --copy-mib 8", keys="bucket_mib sizes versions", module="sglang"
    ),
    "self_distillation.py": Program(
        options="--hidden 32 --rows 20 --start-steps 1 --steps 1 --sequences 16",
        keys="accuracy kept settings",
    ),
    "spmdrl_step.py": Program(options=f"--workload tail --teacher-layers 5 {STEP}", keys=STEP_KEYS),
    "trl_step.py": Program(options=f"--workload tail --teacher-layers 5 {STEP}", keys=STEP_KEYS, python=TRL),
    "mismatch.py": Program(
        options="--model {folder}/model --variants TIS --seeds 1 --runs {folder}/runs --result {folder}/m.json "
        "--picture {folder}/m.svg run.num_steps=1 optim.warmup_steps=0 rollout.prompts_per_step=2 eval.num_prompts=2",
        keys="result picture runs accuracy",
    ),
    "sanity.py": Program(
        options="--algorithms grpo gdpo pass_at_k --model {folder}/model --runs {folder}/sanity --sums 3 --samples 2 "
        "--band 0 1 --questions 2 run.num_steps=1 optim.warmup_steps=0 rollout.prompts_per_step=2",
        keys="before commit date machine questions rows solved",
    ),
    "demo_seeds.py": Program(
        options="--model {folder}/model --runs {folder}/seeds --seeds 1 --staleness 2 --stale-seeds 1 run.num_steps=8 "
        "rollout.group_size=2 optim.warmup_steps=0 rollout.prompts_per_step=2 eval.num_prompts=2 eval.every=1",
        keys="band commit date forecasts held machine recorded runs staleness",
    ),
    "kept_cache.py": Program(
        options="--model {folder}/model --runs {folder}/kept --seeds 1 run.num_steps=3 rollout.max_running=3 "
        "rollout.group_size=2 optim.warmup_steps=0 rollout.prompts_per_step=2 eval.num_prompts=2",
        keys="about commit date keep_over_recompute machine runs",
    ),
    "demo_trees.py": Program(
        options="--tasks distill --start-steps 1 --runs {folder}/trees "
        "run.num_steps=1 optim.warmup_steps=0 rollout.prompts_per_step=2",
        keys="about commit date machine start_steps tasks",
    ),
    "gpu_run.py": Program(
        options="--device cpu --size tiny --steps 2", keys="steps_s loss_tokens mismatch_max_abs_nats rows versions"
    ),
    "tickets.py": Program(options="--engines 2 --seconds 0.1 --repeats 1", keys="engines requests versions"),
    "ahead.py": Program(
        options="--gpus 16 --staleness 1 --steps 3 --warmup 1", keys="commit machine date rows simulated"
    ),
    "reward_rate.py": Program(options="--workers 1 --rewards 20 --repeats 1", keys="modes room_us versions"),
    "checkpoint_files.py": Program(options="--files 5 10 --repeats 1 --folder {folder}", keys="files times_s"),
    "data_load.py": Program(options="--rows 200 --parquet-gb 0.001", keys="files"),
    "lora_memory.py": Program(options="--rank 2 --layers 1 --vocabulary 512", keys="adapters whole"),
    "logprob_memory.py": Program(
        options="--tokens 64 --vocabulary 512 --repeats 1", keys="memory times tiled_peak_mib plain_peak_mib versions"
    ),
    "tower.py": Program(
        options="--prompts 1 --group-size 2 --repeats 1 --threads 1",
        keys="spmdrl_s peer_s spmdrl_patches peer_patches features_mib ratio versions",
    ),
    "gated_delta.py": Program(
        options="--layer mamba2 --cases short --tokens 200 --repeats 1", keys="cases headline versions"
    ),
    "prefix_tree.py": Program(options="--size 1 --scale 4 --repeats 1", keys="cases size threads versions"),
    "start.py": Program(options="--repeats 1", keys="first_step_s floor_s import_s median_first_step_s load_average"),
    "bench.py": Program(options="engine-natural --repeats 1 --threads 1 --results {folder}/results"),
    "scale.py": Program(options="--ranks 8 --layouts fsdp --hidden-size 128", keys="commit machine rows"),
    "load_memory.py": Program(
        options="--ranks 1 --layers 1 --vocabulary 256", keys="anon_over_limit within_limit ranks versions"
    ),
    "gpu_refit.py": Program(
        options="--device cpu --sizes tiny --transport shared_memory --into process --repeats 1 --copy-mib 8",
        keys="commit machine rows versions",
    ),
    "gpu_attention.py": Program(
        options="--device cpu --tokens 64 --turns 1", keys="commit machine device rows versions"
    ),
    "gpu_step.py": Program(
        options="--device cpu --sizes tiny --tokens 64 --sequence-tokens 40 --recompute none full --repeats 1",
        keys="commit machine device peak_flops rows versions",
    ),
    "true_on_policy.py": Program(
        options="--repeats 1 --threads 1", keys="exact_s plain_s sampling_ratios training_ratios mismatch versions"
    ),
    "episodes.py": Program(
        options="--engine clock --delays-ms 0 5 --prompts 1 --max-running 4 --repeats 1 --threads 1",
        keys="engine episodes max_running delays_ms versions",
    ),
    "generate_peer.py": Program(
        options="--workload natural --repeats 1 --threads 1",
        keys="durations_s median_s median_us_per_token response_tokens versions",
    ),
    "checkpoint.py": Program(options="--sizes tiny --repeats 1", keys="sizes versions"),
    "packing.py": Program(
        options="--largest 1000 --repeats 1" + ("" if (ROOT / VERL).exists() else " --without-peer"),
        keys="peer spmdrl_s peer_s cases summaries never_slower_nor_less_even versions",
    ),
    "layer_bytes.py": Program(options="--sizes tiny", keys="tokens sequence_tokens sizes"),
    "floor.py": Program(options="--repeats 1 --threads 1", keys="floor_s sampling_gflop training_gflop versions"),
    "engine.py": Program(options="--help"),  # bench.py has run it
    "packing_peer.py": Program(options="--help"),  # packing.py asks it, in an environment of its own
    "same_bits.py": Program(options="{folder}/bits.json --runs tool sft"),
    "check.py": Program(options="--help"),  # tests/unit/test_bench_check.py
    "scale_on_paper.py": Program(options="--help"),  # docs/gen/predictions.py has its tables
    "launches.py": Program(options="--help"),  # tests/unit/test_emulated_cuda.py has run it
    "memory_plan.py": Program(options="--help"),  # tests/fake_cuda has what it needs
}


IN_THE_GATE = ("scale.py", "checkpoint_files.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, for what programs write."""
    folder = tmp_path_factory.mktemp("benchmarks")
    save_tiny_model(folder / "model", num_layers=1, hidden_size=32)
    return folder


@pytest.fixture(scope="module")
def outcomes(place: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Done]]]:
    """How each program ends that a selected test asks for."""
    asked = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(outcome, name, program, place) for name, program in PROGRAMS.items() if name in asked}
        pool.shutdown(cancel_futures=True)


def outcome(name: str, program: Program, place: Path) -> Done:
    """How a program ends; one that lacks something prints its help."""
    options = ["--help"] if program.missing else program.options.format(folder=place).split()
    if program.python and not program.missing:
        command = [str(ROOT / program.python), f"benchmarks/{name}", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        return Done(done.returncode, done.stdout, done.stderr)
    paths = [place / f"{name}.{stream}" for stream in ("stdout", "stderr")]
    [code] = run_ranks(1, run_here, name, options, paths, timeout_s=TIMEOUT_S)
    return Done(code, *(path.read_text(encoding="utf-8") for path in paths))


def run_here(name: str, options: Sequence[str], paths: Sequence[Path]) -> int:
    """Run a program in this process, from the root and with its own standard streams; return its exit code."""
    for stream, path in zip((1, 2), paths, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[variable]
    sys.path.insert(0, str(BENCHMARKS))
    os.chdir(ROOT)
    sys.argv = [str(BENCHMARKS / name), *options]
    workload = importlib.import_module("workload")
    # What a busy machine finds out about its kernels is not for later runs.
    os.environ.update(workload.best_environment(threads=1), PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(paths[0].parent))
    try:
        code = importlib.import_module(name.removesuffix(".py")).main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    return 1 if isinstance(code, str) else code or 0


def test_every_program_is_in_the_list() -> None:
    files = BENCHMARKS.glob("*.py")
    programs = {file.name for file in files if "__main__" in file.read_text(encoding="utf-8")}
    assert programs == {*PROGRAMS, "commit.py"}  # of which tests/e2e/test_gpu_proof.py shows what it prints


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_prints_what_it_says(name: str, outcomes: dict[str, Future[Done]]) -> None:
    program, done = PROGRAMS[name], outcomes[name].result()
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if program.missing:
        pytest.skip(f"{program.missing} is not there; {name} --help works")
    if program.keys:
        assert set(program.keys.split()) <= json.loads(done.stdout.splitlines()[-1]).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench.py"])
def test_bench_writes_a_result_that_says_where_it_comes_from(
    name: str, place: Path, outcomes: dict[str, Future[Done]]
) -> None:
    assert outcomes[name].result().code == 0
    result = json.loads((place / "results/engine-natural.json").read_text(encoding="utf-8"))
    assert result.keys() >= {"date", "commit", "machine", "spmdrl_median", "peer_median", "ratios"}
    assert result["unit"] == "us/token"
    [printed] = result["outputs"]
    assert len(result["ratios"]) == len(printed["spmdrl_s"]) == len(printed["peer_s"]) == 3
    assert printed.keys() >= {"spmdrl_response_tokens", "peer_response_tokens", "load_average", "versions"}


@pytest.mark.slow
def test_two_ranks_share_the_rollouts_of_a_step(place: Path) -> None:
    for name in ("spmdrl_step.py", "trl_step.py"):
        program = dataclasses.replace(PROGRAMS[name], options=f"--workload tail --ranks 2 {STEP}")
        if program.missing:
            continue
        done = outcome(name, program, place)
        assert done.code == 0, done.stderr[-4000:]
        assert json.loads(done.stdout.splitlines()[-1])["num_ranks"] == 2
