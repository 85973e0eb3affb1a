"""Tables about the run as a whole: its length and seed, checkpoints, exports, faults, reports and their sinks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from spmdrl.config.base import Count, NonNegativeInt, PathText, Section, rule

# Tables about sinks: the trackers that get a run's metrics besides its own files.


Project = Annotated[str, Field(min_length=1, max_length=200)]


class TrackioSinkConfig(Section):
    project: Project = "spmdrl"
    """The project that the run belongs to."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tracker's `init`, such as `group`."""


class WandbSinkConfig(TrackioSinkConfig):
    offline: bool = False
    """Write to `sinks/` in the run's folder only, without a network; the tracker's own `sync` sends it later."""


class SwanlabSinkConfig(WandbSinkConfig):
    pass


class MlflowSinkConfig(Section):
    project: Project = "spmdrl"
    """The experiment that the run belongs to."""
    tracking_uri: str | None = None
    """The server or database. Unset: that of MLFLOW_TRACKING_URI, or else `sinks/mlflow.db` in the run's folder."""


class FunctionSinkConfig(Section):
    name: Annotated[str, Field(pattern=":")]
    """A function of yours, `package.module:function` or `path/file.py:function`. It is called with `step`, `metrics`
    (numbers by name, those of the step that it has not seen) and `run`, as far as it has such parameters."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class SinksConfig(Section):
    """Trackers that get every number of metrics.jsonl; see `docs/seeing.md`. An empty table uses its defaults."""

    wandb: WandbSinkConfig | None = None
    """Send to Weights & Biases."""
    trackio: TrackioSinkConfig | None = None
    """Send to trackio, whose database is on this machine unless `params` name a `space_id`."""
    mlflow: MlflowSinkConfig | None = None
    """Send to MLflow."""
    swanlab: SwanlabSinkConfig | None = None
    """Send to SwanLab."""
    function: FunctionSinkConfig | None = None
    """Call a function."""

    @property
    def by_kind(self) -> dict[str, Section]:
        """The sinks that are set, by the names of their tables."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: sink for name, sink in named.items() if sink is not None}


# Tables about the run as a whole: its length and seed, checkpoints, exports, faults and reports.


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]


class RunConfig(Section):
    name: RunName
    """The run's folder is `dir/name`; letters, digits, `.`, `_` and `-`."""
    dir: PathText = "runs"
    """The directory of all run folders."""
    num_steps: Count
    """Steps to train; each is rollout, reward, batch, logprobs, update and refit."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random number of the run; none depends on a rank."""
    deterministic: bool = False
    """Deterministic kernels and a fixed assignment of prompts to engines and of work to batches."""
    patience_minutes: Annotated[int, Field(ge=1, le=10**6)] = 180
    """Minutes that a rank waits for the others before it ends the run, even if they make progress. Set it above the
    longest rollout phase or evaluation, in which ranks that share an engine wait for the one that leads it."""
    download: bool = False
    """Fetch models and data that are named on a hub (`hf:...`) and not in the cache. See `docs/data.md`."""
    stop_before: Annotated[datetime, Field(strict=False)] | None = None
    """Save and stop before this time, such as `"2026-11-21T08:00"`, local unless it names a zone. No step begins that
    would end later if it took as long as the longest so far; a step that is running at this time stops after its phase.
    See `docs/faults.md`."""
    threads_per_rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of each rank; 0 shares the machine's cores among its ranks."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 0
    """Steps between two checkpoints; the last step saves too. 0: only a run that is asked to stop saves one."""
    keep_last: Count = 2
    """Newest checkpoints to keep. Older ones are removed, except those that the next two settings keep."""
    keep_every: NonNegativeInt = 0
    """Keep the checkpoint of every N-th step for good; 0: of none."""
    keep_best: Annotated[str, Field(pattern="^eval/")] | None = None
    """Keep the checkpoint with the highest value of this evaluation metric, such as `eval/accuracy`, too."""


class ExportConfig(Section):
    at_end: bool = True
    """Write the final model as a Hugging Face directory, `hf/` in the run's folder."""
    every: NonNegativeInt = 0
    """Also write the model after every N-th step, to `hf-` and the step; 0: only at the end."""
    merged: bool = True
    """With `[lora]`: write the whole model, adapters merged into their base. The adapters alone are written too, to
    `adapter/` or `adapter-` and the step, as a PEFT directory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "source"] = "auto"
    """Dtype of the whole model's weights. `auto`: the one that the run samples with. `source`: each weight as
    `model.path` stores it, FP8 and MXFP4 with their scales (`docs/checkpoints.md`)."""


class ResumeConfig(Section):
    checkpoint: PathText = "auto"
    """`auto` continues from the newest checkpoint in the run's folder, and stops when that cannot be loaded. `never`
    refuses a folder that holds a run. The directory of a checkpoint, of any run: start from it while this run has no
    checkpoint of its own."""
    allow_older: bool = False
    """When the newest checkpoint cannot be loaded, continue from the newest one that can."""
    changed: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Settings, or whole tables of them, that may differ from those the checkpoint was saved with. Settings that do
    not change the results always may: see `docs/checkpoints.md`."""


class WatchdogConfig(Section):
    timeout_s: Annotated[float, Field(ge=0.0, le=1e8)] = 1800.0
    """Seconds without a new phase or a finished rollout on any rank after which the run is stuck: it ends with every
    rank's stacks and the name of the rank that holds up the others. 0: never. At most `run.patience_minutes`."""


class ReportConfig(Section):
    samples_per_step: NonNegativeInt = 4
    """Prompt groups, spread over all ranks, of which each step writes a rollout to samples.jsonl and TensorBoard."""
    whole_groups: bool = False
    """Write all rollouts of these groups, so that the responses to a prompt can be compared."""
    eval_samples: NonNegativeInt = 0
    """Held-out prompts, the same in every evaluation, whose answers are written to eval_samples.jsonl: one of each, or
    all with `whole_groups`."""
    console: Literal["auto", "live", "plain"] = "auto"
    """`auto` shows a live display on a terminal, and prints one line for each step elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard files; metrics.jsonl is always written."""
    sinks: SinksConfig = SinksConfig()
    memory: bool = False
    """Print a table of the memory at each change between trainer and engine, and write it to memory.jsonl."""


class DebugConfig(Section):
    assert_on_policy: bool = False
    """End the run unless, in each step's first update, every ratio is exactly 1 and the KL to the old policy exactly 0.
    With `correction.old = "rollout"` that says that engine and trainer agree to the last bit."""
    save_rollouts: Count | Literal["all"] | None = None
    """Write each step's rollouts and rewards, and the results computed from them, to `rollouts/` in the run's folder;
    keep those of the last N steps, or `"all"`. `python -m spmdrl.tools.replay` computes a step again: see
    `docs/replay.md`."""
    load_rollouts: PathText | None = None
    """Train on the rollouts and rewards in this folder, the `rollouts/` of another run, instead of sampling: no engine
    is started."""
    follow_schedule: PathText | None = None
    """Sample by this file, the `schedule.jsonl` of another run with the same settings and as many engines: each engine
    opens the same prompts after the same tokens and pauses where it did. So a run is repeated that went by the real
    clock. For `rollout.partial` without over-sampling."""


@rule(DebugConfig)
def loaded_rollouts_are_not_saved_again(debug: DebugConfig) -> Iterator[str]:
    if debug.load_rollouts is not None and debug.save_rollouts is not None:
        yield "load_rollouts reads what save_rollouts would write, and it is on the disk already; remove one of them"
