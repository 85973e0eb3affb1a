"""Derived counts, and sentences for those that do not work out."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from spmdrl.config import Config
from spmdrl.config.plan import make_plan, router_lines
from spmdrl.types import UserError
from tests.helpers.config_file import GOOD, read


def config(tmp_path: Path, *overrides: str) -> Config:
    return read(tmp_path, GOOD, *overrides)


def test_the_counts_of_a_step_fit_together(tmp_path: Path) -> None:
    plan = make_plan(config(tmp_path, "rollout.prompts_per_step=12", "loss.updates_per_step=3"), num_ranks=4)
    assert plan.prompts_per_rank == 3
    assert plan.rollouts_per_step == 24
    assert plan.rollouts_per_mini_batch == 8
    assert plan.num_updates == 9
    assert plan.max_sequence_tokens == 13
    places = [plan.first_prompt(step, rank) for step in (1, 2, 3) for rank in range(4)]
    assert places == list(range(0, 36, 3))
    assert [plan.first_rollout(rank) for rank in range(4)] == [0, 6, 12, 18]


@pytest.mark.parametrize("prompts", [12, 48, 60])
@pytest.mark.parametrize(("num_ranks", "updates"), [(4, 1), (1, 3), (4, 6), (12, 2)])
def test_prompts_that_ranks_and_updates_divide_are_shared_evenly(
    tmp_path: Path, prompts: int, num_ranks: int, updates: int
) -> None:
    overrides = (f"rollout.prompts_per_step={prompts}", f"loss.updates_per_step={updates}")
    plan = make_plan(config(tmp_path, *overrides), num_ranks=num_ranks)
    assert plan.prompts_per_rank * num_ranks == prompts
    assert plan.rollouts_per_mini_batch * updates == plan.rollouts_per_step == 2 * prompts


@pytest.mark.parametrize("prompts", [1, 5, 7, 13, 62])
@pytest.mark.parametrize(("num_ranks", "updates"), [(4, 1), (1, 3), (4, 6), (16, 1)])
def test_the_numbers_that_are_offered_work(tmp_path: Path, prompts: int, num_ranks: int, updates: int) -> None:
    overrides = (f"rollout.prompts_per_step={prompts}", f"loss.updates_per_step={updates}")
    with pytest.raises(UserError, match=f"rollout.prompts_per_step = {prompts} cannot be") as caught:
        make_plan(config(tmp_path, *overrides), num_ranks=num_ranks)
    offered = re.findall(r"\d+", str(caught.value).splitlines()[0].partition("set it to")[2])
    common = math.lcm(num_ranks, updates)
    below = prompts // common * common
    assert [int(number) for number in offered] == [number for number in (below, below + common) if number]
    for number in offered:
        make_plan(config(tmp_path, f"rollout.prompts_per_step={number}", overrides[1]), num_ranks=num_ranks)


def test_a_budget_must_hold_the_longest_sequence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_tokens_per_micro_batch = 12 cannot hold a sequence of 13 tokens"):
        make_plan(config(tmp_path, "pack.max_tokens_per_micro_batch=12"), num_ranks=1)


def test_how_many_groups_may_be_opened(tmp_path: Path) -> None:
    def opened(*overrides: str) -> tuple[int, int]:
        plan = make_plan(config(tmp_path, "rollout.prompts_per_step=30", *overrides), num_ranks=1)
        return plan.extra_groups, plan.max_groups

    assert opened() == (0, 30)
    assert opened("rollout.oversample_fraction=0.1") == (3, 33)
    assert opened("rollout.oversample_fraction=0.11") == (4, 34)
    assert opened("rollout.dynamic_sampling=true", "rollout.max_draw_ratio=1.1") == (0, 33)
    assert opened("rollout.partial=true", "rollout.max_staleness=2", "run.deterministic=true", TIS) == (60, 90)
    assert opened("rollout.partial=true", "rollout.max_staleness=0") == (0, 30)


def test_determinism_and_oversampling_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rollout.oversample_fraction = 0.5 trains on .* run.deterministic = true; set"
    ):
        make_plan(config(tmp_path, "rollout.oversample_fraction=0.5", "run.deterministic=true"), num_ranks=1)


def test_when_to_evaluate_and_save(tmp_path: Path) -> None:
    held_out = ('eval.sources=[{kind="jsonl",path="e.jsonl"}]', "eval.num_prompts=3")
    plan = make_plan(config(tmp_path, *held_out, "eval.every=2", "checkpoint.every=2", "run.num_steps=5"), num_ranks=1)
    assert [step for step in range(6) if plan.evaluates_after(step)] == [0, 2, 4, 5]
    assert [step for step in range(1, 6) if plan.saves_after(step)] == [2, 4, 5]
    neither = make_plan(config(tmp_path), num_ranks=1)
    assert not any(neither.evaluates_after(step) or neither.saves_after(step) for step in range(1, 4))


TIS = "correction.kind=tis"  # which tokens of older weights need


def apart(num_ranks: int, *more: str) -> tuple[str, ...]:
    return ('rollout.placement="disaggregated"', f"rollout.num_ranks={num_ranks}", *more)


def test_counts_of_ranks_that_only_hold_engines(tmp_path: Path) -> None:
    cfg = config(tmp_path, *apart(2), "rollout.prompts_per_step=6", "pack.max_tokens_per_micro_batch=13")
    plan = make_plan(cfg, num_ranks=5)
    assert (plan.training_ranks, plan.engine_ranks) == (3, 2)
    assert plan.prompts_per_rank == 3  # of 2 ranks that sample
    assert make_plan(config(tmp_path), num_ranks=4).engine_ranks == 0


def test_how_far_engines_may_be_ahead(tmp_path: Path) -> None:
    def ahead(*overrides: str) -> int:
        return make_plan(config(tmp_path, *overrides), num_ranks=2).steps_ahead

    partial = ("rollout.oversample_fraction=0.5", "rollout.partial=true")
    assert ahead() == ahead(*partial, "rollout.max_staleness=3", TIS) == 0
    assert [ahead(*apart(1, f"rollout.max_staleness={limit}", TIS)) for limit in range(4)] == [0, 1, 2, 3]
    assert [ahead(*apart(1, *partial, f"rollout.max_staleness={limit}", TIS)) for limit in range(4)] == [0, 0, 1, 2]
    oldest_first = [apart(1, "rollout.partial=true", f"rollout.max_staleness={limit}", TIS) for limit in range(4)]
    assert [ahead(*settings) for settings in oldest_first] == [0, 1, 1, 1]
    plans = [make_plan(config(tmp_path, *settings), num_ranks=2) for settings in oldest_first]
    assert [plan.extra_groups / plan.prompts_per_step for plan in plans] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "usual"),
    [
        ((), "none"),
        (("loss.updates_per_step=2",), "R2"),
        (apart(1, "rollout.max_staleness=3", "correction.kind=tis"), "R3"),
        (apart(1, "rollout.max_staleness=0"), "none"),
    ],
)
def test_an_unusual_replay_of_routes_is_told(tmp_path: Path, overrides: tuple[str, ...], usual: str) -> None:
    cfg = config(tmp_path, *overrides)
    for kind in ("none", "R2", "R3"):
        chosen = cfg.model_copy(update={"correction": cfg.correction.model_copy(update={"router_replay": kind})})
        assert list(router_lines(chosen, has_routes=False)) == []
        lines = list(router_lines(chosen, has_routes=True))
        assert lines == [] if kind == usual else f'takes "{usual}"' in lines[0]


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "expected"),
    [
        (apart(4), 4, "leaves none of the 4 ranks to train; set it to 3 or less, or start 5 ranks or more"),
        (apart(1), 1, "leaves none of the 1 ranks to train; start 2 ranks or more"),
        (apart(3), 4, "cannot be split over 3 ranks that hold engines; set it to 3 or 6"),
        (
            apart(1, "rollout.max_staleness=2", TIS, "run.deterministic=true"),
            2,
            "set partial = true, max_staleness = 0 or 1",
        ),
    ],
)
def test_placements_that_do_not_work_out(
    tmp_path: Path, overrides: tuple[str, ...], num_ranks: int, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(config(tmp_path, *overrides), num_ranks=num_ranks)
    assert expected in str(caught.value)
