"""The whole demo, without a GPU: `python -m spmdrl.tools.demo [--task NAME] [section.key=value ...]`.

It makes a tiny model, fine-tunes it a little, trains it by reinforcement learning on 2 ranks, or from a teacher, and
evaluates the exported model on the held-out prompts. Every call starts a new run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spmdrl.faults.supervise import Requests, dry_run, shell_code
from spmdrl.faults.text import Parser, say, tolerates_lost_output
from spmdrl.preflight.settings import require_settings
from spmdrl.tools.demo_data import COLOURS, CONFIGS, PICTURE_WORDS
from spmdrl.tools.program import inline

RANKS = 2
LAUNCHER = "spmdrl.tools.local"
# The demos compute on a CPU, and read nothing but what they have written.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_CHECK = "--dry-run"


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A demo's task: what its model needs, and settings for SGLang, which is slow on a CPU and takes fewer steps."""

    with_sglang: tuple[str, ...]
    words: tuple[str, ...] = ()  # texts that are one token each; () where the model needs no chat
    form: str = "--chat"  # of the model that has such words
    hidden_size: int = 128
    teacher: tuple[str, ...] = ()  # settings of the warm start that make a teacher of the same model; the plain task
    ranks: bool = False  # a reward model is made of pairs of answers; the plain task too

    @property
    def is_plain(self) -> bool:
        """True where the task is the plain demo's, with its warm start."""
        return bool(self.teacher) or self.ranks

    @property
    def model_options(self) -> list[str]:
        """The options of the program that makes the model."""
        sizes = ["--num-layers", "2", "--hidden-size", str(self.hidden_size)]
        return [*sizes, *((self.form, "--words", *self.words) if self.words else ())]


# With adapters, which choose among what their base can do: a warm start for them, and a learning rate.
TRUTH, MEASURED = '[{kind="exact"}]', '{kind="exact",weight=0.0}'
ADAPTED_START, ADAPTED_LR = "demo-lora-sft", "optim.lr=2e-3"

TASKS: Mapping[str, DemoTask] = {
    "text": DemoTask(("run.num_steps=230",)),
    "tool": DemoTask(("run.num_steps=50", "optim.lr=1e-3"), ("colour of ", "lookup", "key", *COLOURS)),
    "game": DemoTask(
        ("run.num_steps=100", "loss.updates_per_step=4", "optim.lr=1.5e-3"),
        ("game ", "10", "higher", "lower", "no number"),
    ),
    "vision": DemoTask(("run.num_steps=60",), PICTURE_WORDS, "--vision", hidden_size=64),
    "notes": DemoTask(("run.num_steps=30",), ("box ", "open", "shut", "inside?", " note?", " note: ")),
    "pairs": DemoTask(("run.num_steps=20",), ranks=True),
    "distill": DemoTask(("run.num_steps=30",), teacher=("run.num_steps=500", "optim.schedule=linear")),
}


@tolerates_lost_output
def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs of the demo in turn; returns the exit code of the first that fails."""
    arguments = _parse(argv)
    config = "demo" if arguments.task == "text" else f"demo-{arguments.task}"
    task = TASKS[arguments.task]
    has_files = config != "demo" and not task.is_plain
    set_by_user = dict(setting.partition("=")[::2] for setting in arguments.override)
    folder = set_by_user.get("run.dir", "runs")
    name = set_by_user.get("run.name", f"{config}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_folder = f"{folder}/{name}"
    is_adapted = config == "demo" and any(setting.startswith("lora.") for setting in set_by_user)
    warm_start = ADAPTED_START if is_adapted else f"{'demo' if task.is_plain else config}-sft"
    sft = [LAUNCHER, "spmdrl.sft", str(CONFIGS / f"{warm_start}.toml"), f"run.dir={folder}"]
    sft += [f"model.path={run_folder}-base", *_held_out(set_by_user, has_files=has_files)]
    rl = [LAUNCHER, "spmdrl.train", str(CONFIGS / f"{config}.toml"), f"run.dir={folder}"]
    rl += [f"run.name={name}", f"model.path={run_folder}-sft/hf", *_code_of_ours(config)]
    if arguments.engine == "sglang":
        rl += ["rollout.engine=sglang", *task.with_sglang]
    if is_adapted:
        say(f"== with adapters: a warm start of their own ({warm_start}.toml), and {ADAPTED_LR} unless you set it")
        rl.append(ADAPTED_LR)
    nproc = ["--nproc", str(arguments.nproc)]
    trial = [*rl, *arguments.override, f"model.path={run_folder}-base", *nproc, _CHECK]
    if task.teacher:
        trial.insert(-1, f"models.teacher.path={run_folder}-base")
        rl.append(f"models.teacher.path={run_folder}-teacher/hf")
    if task.ranks:
        trial.insert(-1, f"reward.terms={TRUTH}")
        rl.append(f'reward.terms=[{{kind="model",path="{run_folder}-rank/hf",template="pairs"}},{MEASURED}]')
    rl += arguments.override
    require_settings("spmdrl.train", dry_run(rl[2:], arguments.nproc))
    last_title = "the exported model, loaded by transformers, on the same held-out prompts"
    last = ["spmdrl.tools.evaluate", run_folder]
    if task.ranks:
        last_title = "the responses of all steps: what the reward model made of them before, and now the truth"
        last = ["spmdrl.tools.rescore", run_folder, f"reward.terms={TRUTH}"]
    ranking = [LAUNCHER, "spmdrl.pairs", str(CONFIGS / "demo-pairs-rank.toml"), f"run.dir={folder}"]
    ranking += [f"run.name={name}-rank", f"model.path={run_folder}-sft/hf", *nproc]
    stages: dict[str, list[list[str]]] = {
        "1/3 a tiny model, warm-started by supervised fine-tuning": [
            *([["spmdrl.tools.demo_data", arguments.task, f"runs/{config}-data"]] if has_files or task.ranks else []),
            ["spmdrl.tools.tiny_model", f"{run_folder}-base", *task.model_options],
            trial,  # a mistake is reported before anything is trained
            [*sft, f"run.name={name}-sft", *nproc],
            *([[*sft, f"run.name={name}-teacher", *task.teacher, *nproc]] if task.teacher else []),
            *([ranking] if task.ranks else []),
        ],
        f"2/3 {'learning from the teacher' if task.teacher else 'reinforcement learning'} on {arguments.nproc} ranks": [
            [*rl, *nproc]
        ],
        f"3/3 {last_title}": [last],
    }
    with Requests() as requests:
        for title, programs in stages.items():
            say(f"== {title}")
            for program in programs:
                if code := _run(program, requests):
                    if requests.received:
                        say(_after_interrupt(title, program), sys.stderr)
                    return code
    say(f"curves: {run_folder}/curves.png    tensorboard --logdir {run_folder}/tensorboard")
    return 0


def _tells_its_end(program: Sequence[str]) -> bool:
    """True for a program that ends in order when it is asked to, and says how; the others have nothing to keep."""
    return program[0] == LAUNCHER and _CHECK not in program


def _after_interrupt(title: str, program: Sequence[str]) -> str:
    """Say that the demo starts a new run each time, and how this program's run is resumed, if it can be."""
    text = f"interrupted in {title}; the demo starts a new run each time"
    if not _tells_its_end(program):
        return text
    command = shlex.join(["spmdrl", program[1].removeprefix("spmdrl."), *program[2:]])
    return f"{text}; this one alone is resumed by\n    {command}"


def _run(program: Sequence[str], requests: Requests) -> int:
    """Run a program and hand requests to stop on to it; returns its exit code, as a shell shows it."""
    command = [sys.executable, "-m", *program]
    shown = subprocess.DEVNULL if _CHECK in program else None
    process = subprocess.Popen(command, stdout=shown, env=os.environ | _ENVIRONMENT, start_new_session=True)
    for new in requests.during(process):
        for number in new:
            process.send_signal(number if _tells_its_end(program) else signal.SIGTERM)
    return shell_code(process)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Train a tiny model on a CPU, and watch it learn.")
    parser.add_argument("override", nargs="*", help="section.key=value: settings of the demo's configuration")
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="text",
        help="tool: look up what cannot be known; game: turns; vision: pictures; notes: a summary of "
        "one's own; distill: learn from a teacher; pairs: from a reward model",
    )
    parser.add_argument("--engine", choices=("torch", "sglang"), default="torch", help="that samples")
    parser.add_argument("--nproc", type=int, default=RANKS, help="processes that train")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: a run has at least 1 process")
    return arguments


def _held_out(set_by_user: Mapping[str, str], *, has_files: bool) -> Iterator[str]:
    """Yield settings of the warm start: it must hold out the same prompts, which some tasks have in a file."""
    for setting in () if has_files else ("num_prompts", "sources"):
        if (value := set_by_user.get(f"eval.{setting}")) is not None:
            yield f"held_out.{setting}={value}"


def _code_of_ours(config: str) -> Iterator[str]:
    """Yield the setting that names the demo's tool or game where it is, whatever directory the demo starts in."""
    table = tomllib.loads((CONFIGS / f"{config}.toml").read_text(encoding="utf-8")).get("environment")
    if table is not None:
        here = json.loads(json.dumps(table["source"]).replace('"configs/', f'"{CONFIGS}/'))
        yield f"environment.source={inline(here)}"


if __name__ == "__main__":
    sys.exit(main())
