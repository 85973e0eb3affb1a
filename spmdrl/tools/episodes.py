"""`python -m spmdrl.tools.episodes RUN --step N`: write the episodes of a recorded step as one HTML page.

The page shows what each policy read and wrote, token by token, with its turns, tool calls and rewards. It needs the
rollouts that `debug.save_rollouts` kept, and the tokenizer of the run's model; it opens in a browser without a network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from spmdrl.config import Config, read_config
from spmdrl.config.base import NonNegativeInt
from spmdrl.config.strict import shown
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.faults.text import Parser, say
from spmdrl.replay.recorder import TrainerLogprobs, read_trainer_logprobs
from spmdrl.report import RunFolder
from spmdrl.report.episodes import Episode, episodes_page
from spmdrl.rewards.client import Rewarded
from spmdrl.rollout.files import as_collected, read_parts
from spmdrl.tools.program import option, program, writing
from spmdrl.types import UserError

NOT_TRAINED = -1  # index of a greedy baseline, which has no place in the step's order


def write_page(path: Path, step: int, *, output: Path | None = None, prompt_id: int | None = None) -> Path:
    """Write the page of a run's step, of all prompts or of one; returns where it is. Raises UserError when there is
    nothing to show."""
    folder = RunFolder(path)
    folder.require_launch()
    model = read_config(Config, str(folder.config), []).model
    parts = read_parts(folder.rollouts, step)
    trainers = read_trainer_logprobs(folder.rollouts, step, num_ranks=parts[0].num_ranks)
    collected = as_collected(parts, group_size=parts[0].config["rollout"]["group_size"])
    episodes = [
        _episode(one, trainers, NOT_TRAINED if one[0].is_baseline else collected.index_of(one[0]))
        for part in parts
        for one in part.outcomes
    ]
    found = [one for one in episodes if prompt_id in (None, one.rollout.prompt.prompt_id)]
    if not found:
        raise UserError(_nothing(episodes, step, prompt_id))
    page = episodes_page(
        found,
        load_tokenizer(model.path, model.trust_remote_code),
        run=Path(os.path.realpath(path)).name,
        step=step,
        shows_mismatch=bool(trainers),
    )
    output = output or folder.episodes(step)
    with writing(output):
        output.write_text(page, encoding="utf-8")
    return output


def _episode(rewarded: Rewarded, trainers: TrainerLogprobs, index: int) -> Episode:
    """Join a rollout with what the trainer says about its tokens; `index` is its place in the step's order."""
    rollout, outcome = rewarded
    found = [(trajectory, trainers.get((index, trajectory.token_ids))) for trajectory in rollout.trajectories]
    # In float32, as the run's own mismatch.
    mismatch = [None if kept is None else (kept - torch.tensor(t.logprobs)).tolist() for t, kept in found]
    return Episode(rollout=rollout, outcome=outcome, mismatch=mismatch)


def _nothing(episodes: Sequence[Episode], step: int, prompt_id: int | None) -> str:
    if not episodes:
        return f"step {step} has no episodes: it was recorded without any prompt group"
    ids = sorted({episode.rollout.prompt.prompt_id for episode in episodes})
    return f"--prompt {prompt_id}: step {step} has no such prompt; its prompts: {', '.join(map(str, ids))}"


@program("cannot show episodes")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--step", type=option(NonNegativeInt), required=True, help="a step whose rollouts were kept")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: RUN/episodes-STEP.html")
    parser.add_argument(
        "--prompt", metavar="ID", type=option(NonNegativeInt), help="show the episodes of one prompt only"
    )
    arguments = parser.parse_args(argv)
    written = write_page(arguments.run, arguments.step, output=arguments.output, prompt_id=arguments.prompt)
    say(f"wrote {shown(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
