"""`spmdrl rescore RUN reward.terms='[{ kind = "math" }]'`: apply another reward to rollouts that a run has saved.

It says where the two rewards disagree: in their means, in how they order the responses to a prompt, and about which
responses most. The run needs `debug.save_rollouts`. Nothing is sampled or trained; what judges say is cached in the
run's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from spmdrl.algo.advantage import centre, grpo
from spmdrl.algo.metrics import Correlation
from spmdrl.config import Config, read_config
from spmdrl.config.base import Count, NonNegativeInt
from spmdrl.data.tokenizer import decode, load_tokenizer
from spmdrl.faults.text import Parser, one_line, say
from spmdrl.preflight.hub import with_files_here
from spmdrl.preflight.inputs import open_training_prompts
from spmdrl.report import RunFolder
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.files import read_parts, recorded_steps
from spmdrl.tools.program import option, program, writing
from spmdrl.types import RewardOutcome, Rollout, UserError

_SHOWN_CHARACTERS = 200  # of a prompt or a response, its last ones


@dataclass(frozen=True, slots=True)
class Rescored:
    """A rollout of a step with the reward that the run gave it, and the other one."""

    step: int
    rollout: Rollout
    response: str  # the last one
    before: RewardOutcome
    now: RewardOutcome


def rescore(folder: RunFolder, cfg: Config, steps: Sequence[int]) -> list[Rescored]:
    """Apply `cfg.reward` to the rollouts of these steps, in whole groups. Raises UserError."""
    if cfg.reward.model_terms or cfg.reward.max_judged_tokens:
        kind = 'kind = "model"' if cfg.reward.model_terms else 'url = "policy"'
        raise UserError(f"{kind} is computed by the ranks of a run; rescore with other terms")
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.trust_remote_code)
    prompts, _ = open_training_prompts(cfg)
    saved = [
        (step, rollout, before)
        for step in steps
        for part in read_parts(folder.rollouts, step)
        for rollout, before in part.outcomes
    ]
    data = {one: prompts.take(one, 1)[0] for one in {rollout.prompt.prompt_id for _, rollout, _ in saved}}
    for _, rollout, _ in saved:
        if rollout.prompt.token_ids != data[rollout.prompt.prompt_id].token_ids:
            raise UserError(
                f"prompt {rollout.prompt.prompt_id} is another one now than in the run; set [data] and run.seed as "
                "they were, so that rewards see its other columns"
            )
    with RewardClient(cfg.reward, tokenizer, judged=folder.judged / "rescored") as rewards:
        asked = [
            (step, rewards.submit(replace(rollout, prompt=data[rollout.prompt.prompt_id])))
            for step, rollout, _ in saved
        ]
        of_steps = ([pending for step, pending in asked if step == one] for one in steps)
        outcomes = [outcome for pending in of_steps for outcome in rewards.collect(rewards.complete(pending))]
    return [
        Rescored(step, rollout, decode(tokenizer, rollout.turns[-1].response.token_ids), before, now)
        for (step, _, before), (rollout, now) in zip(saved, outcomes, strict=True)
        if not rollout.is_baseline  # judges of groups have seen it
    ]


def lines(found: Sequence[Rescored], *, num_shown: int) -> Iterator[str]:
    """Describe how two rewards of whole groups differ."""
    group_size = len(found) // len({(one.step, one.rollout.prompt.prompt_id) for one in found})
    before, now = (
        torch.tensor([one.reward for one in outcomes], dtype=torch.float64).view(-1, group_size)
        for outcomes in ([one.before for one in found], [one.now for one in found])
    )
    failed = [sum(one.failure is not None for one in x) for x in ([y.before for y in found], [y.now for y in found])]
    steps = sorted({one.step for one in found})
    yield f"{len(found)} rollouts of steps {steps[0]} to {steps[-1]}: {failed[0]} failed before, {failed[1]} now"
    reasons = Counter(one.now.failure for one in found if one.now.failure is not None)
    yield from (f"  {count} now: {reason}" for reason, count in reasons.most_common(5))
    yield f"mean reward: {before.mean():.4g} before, {now.mean():.4g} now"
    a, b = centre(before), centre(now)
    alike = Correlation(*(float(x.sum()) for x in (a * b, a * a, b * b))).value()
    orders: Counter[str] = Counter(
        _order(*pair)
        for old, new in zip(before, now, strict=True)
        for pair in combinations(zip(old, new, strict=True), 2)
    )
    counts = ", ".join(f"{orders[name]} {name}" for name in _ORDERS)
    yield f"within groups: correlation {alike:.3f}; of {orders.total()} pairs of responses {counts}"
    apart = (grpo(before, divide_by_std=True) - grpo(now, divide_by_std=True)).abs().flatten()
    for place in apart.argsort(descending=True, stable=True)[:num_shown].tolist():
        if apart[place] > 0:
            yield from _shown(found[place])


_ORDERS = ("ordered alike", "the other way round", "apart only before", "apart only now", "alike in both")


def _order(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Name how two rewards order two responses."""
    old, new = (float(torch.sign(x - y)) for x, y in zip(one, other, strict=True))
    if old and new:
        return _ORDERS[0] if old == new else _ORDERS[1]
    return _ORDERS[2] if old else _ORDERS[3] if new else _ORDERS[4]


def _shown(one: Rescored) -> Iterator[str]:
    prompt = one.rollout.prompt
    yield ""
    yield f"step {one.step}, prompt {prompt.prompt_id} ({prompt.task}), sample {one.rollout.sample_index}:"
    for what, outcome in (("before", one.before), ("now", one.now)):
        parts = ", ".join(f"{name} {part:g}" for name, part in outcome.parts.items())
        yield f"  {what}: {outcome.reward:g} ({outcome.failure or parts})"
    yield f"  prompt: ...{one_line(prompt.text[-_SHOWN_CHARACTERS:])}"
    yield f"  response: ...{one_line(one.response[-_SHOWN_CHARACTERS:])}"


def _row(one: Rescored) -> str:
    prompt = one.rollout.prompt
    return json.dumps(
        {
            "step": one.step,
            "prompt_id": prompt.prompt_id,
            "sample_index": one.rollout.sample_index,
            "task": prompt.task,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "response": one.response,
            **{
                name: {"reward": outcome.reward, "parts": outcome.parts, "failure": outcome.failure}
                for name, outcome in (("before", one.before), ("now", one.now))
            },
        }
    )


@program("cannot rescore")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("override", nargs="*", help="section.key=value, such as reward.terms=[...]")
    parser.add_argument("--config", metavar="FILE", help="settings instead of the run's own, for a longer [reward]")
    parser.add_argument("--step", type=option(Count), action="append", help="one of the saved steps; all without it")
    parser.add_argument("--show", type=option(NonNegativeInt), default=5, help="responses that are shown")
    parser.add_argument("--items", type=Path, metavar="FILE", help="write each rollout with both rewards as JSON lines")
    given = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()
    folder = RunFolder(given.run)
    folder.require_launch()
    cfg = with_files_here(read_config(Config, given.config or str(folder.config), given.override))
    steps = sorted({*(given.step or recorded_steps(folder.rollouts))})
    if not steps or not (found := rescore(folder, cfg, steps)):
        raise UserError(f"{folder.rollouts} holds no rollouts; a run saves them with debug.save_rollouts")
    if given.items is not None:
        with writing(given.items, "--items"):
            given.items.write_text("".join(_row(one) + "\n" for one in found), encoding="utf-8")
    say("\n".join(lines(found, num_shown=given.show)))


if __name__ == "__main__":
    sys.exit(main())
