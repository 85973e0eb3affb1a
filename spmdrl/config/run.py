"""Tables about the run as a whole: its length and seed, checkpoints, exports, faults and reports."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, NonNegative, Section, rule


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder is `dir/name`; letters, digits, `.`, `_` and `-`."""
    dir: str = "runs"
    """Where run folders are made."""
    num_steps: Count
    """Steps to train: rollout, reward, pack, update, refit, once around."""
    seed: int = 0
    """Every random number of the run follows from this one and from what it is for, never from a rank."""
    deterministic: bool = False
    """Deterministic kernels and a fixed assignment of prompts to engines and of work to batches."""
    patience_minutes: Count = 180
    """A rank that has waited so long for the others ends the run, although they get on: longer than the longest rollout
    phase or evaluation, in which ranks that share an engine wait for the one that leads it."""
    stop_before: Annotated[datetime, Field(strict=False)] | None = None
    """Save and stop in time for this, such as `"2026-11-21T08:00"`, in local time unless it names a zone: a step is
    not begun when one as long as the longest so far would end later, and one that has begun stops at the next edge
    between two phases when this time has come. See `docs/faults.md`."""
    threads_per_rank: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each rank; 0 shares the machine's cores among its ranks."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Save after every so many steps, and after the last; 0 saves none, except when the run is told to stop."""
    keep_last: Count = 2
    """Older checkpoints are removed, but for those that the next two settings name."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of every so many steps are kept for good; 0: none for that reason."""
    keep_best: Annotated[str, Field(pattern="^eval/")] | None = None
    """The checkpoint in whose step this metric of the evaluation was highest, such as `eval/accuracy`, is kept too."""


class ExportConfig(Section):
    at_end: bool = True
    """Write the final model as a Hugging Face directory, `hf/` in the run's folder."""
    every: Annotated[int, Field(ge=0)] = 0
    """Write the model after every so many steps too, to `hf-` and the step; 0: only at the end."""


class ResumeConfig(Section):
    checkpoint: str = "auto"
    """`auto` goes on from the newest checkpoint in the run's folder, and stops when that cannot be loaded. `never`
    refuses a folder that holds a run. The directory of a checkpoint, of any run: where this run starts while it has
    none of its own."""
    allow_older: bool = False
    """When the newest checkpoint cannot be loaded, go on from the newest one that can."""
    changed: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Settings, or whole tables of them, that may differ from those the checkpoint was saved with. Those that do not
    change what is computed always may: see `docs/checkpoints.md`."""


class WatchdogConfig(Section):
    timeout_s: NonNegative = 1800.0
    """A run in which no rank has entered a phase or finished a rollout for so long is stuck: it ends with every rank's
    stacks and the name of the one that holds up the others. 0: it waits. Not above `run.patience_minutes`."""


class ReportConfig(Section):
    samples_per_step: Annotated[int, Field(ge=0)] = 4
    """Rollouts written to samples.jsonl and TensorBoard each step."""
    console: Literal["auto", "live", "plain"] = "auto"
    """`auto` draws a live display on a terminal and prints a line a step elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard files; metrics.jsonl is always written."""
    memory: bool = False
    """Print a table of the memory at each change between trainer and engine, and write it to memory.jsonl."""


class DebugConfig(Section):
    assert_on_policy: bool = False
    """End the run unless, in each step's first update, every ratio is exactly 1 and the KL to the old policy exactly 0.
    With `correction.old = "rollout"` that says that engine and trainer agree to the last bit."""
    save_rollouts: Count | Literal["all"] | None = None
    """Write each step's scored rollouts, and what the step computed from them, to `rollouts/` in the run's folder, and
    keep those of the last so many steps, or `"all"`. `python -m spmdrl.tools.replay` computes a step again: see
    `docs/replay.md`."""
    load_rollouts: str | None = None
    """Train on the rollouts and rewards in this folder, the `rollouts/` of another run, instead of sampling: no engine
    is started."""


@rule(DebugConfig)
def loaded_rollouts_are_not_saved_again(debug: DebugConfig) -> Iterator[str]:
    if debug.load_rollouts is not None and debug.save_rollouts is not None:
        yield "load_rollouts reads what save_rollouts would write, and it is on the disk already; remove one of them"
