"""Curricula pass over prompts of the stream, by what was measured, and go on from a checkpoint as if nothing was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from spmdrl.config import CurriculumConfig
from spmdrl.data.stream import PromptStream, make_training_stream
from spmdrl.preflight.inputs import curriculum_problems
from spmdrl.rewards.client import known_outcome
from spmdrl.rollout.curriculum import MEASUREMENTS, Curriculum, Measurements
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.types import RewardOutcome, UserError
from tests.helpers.config_file import GOOD, problems
from tests.helpers.prompt_data import byte_tokenizer, data, jsonl

NUM_ROWS = 40


def stream(tmp_path: Path, *tasks: str, order_column: str | None = None) -> PromptStream:
    """Rows of one file for each task; row i has the level -i."""
    entries = [
        jsonl(
            tmp_path / f"{task}.jsonl",
            [{"prompt": f"{task} {i}", "answer": str(i), "level": -(i // 2)} for i in range(NUM_ROWS)],
            task=task,
            order_column=order_column,
        )
        for task in tasks
    ]
    return make_training_stream(data(*entries), None, seed=3, tokenizer=byte_tokenizer())


def curriculum(prompts: PromptStream, **settings: Any) -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate(settings), prompts, success_at=1.0, seed=11)


class Steps:
    """Takes `size` prompts a step, whose success rate is a function of the task and the row."""

    def __init__(self, chosen: Curriculum, prompts: PromptStream, success: Callable[[str, int], float]) -> None:
        self.chosen, self.prompts, self.success = chosen, prompts, success
        self.measured, self.first = Measurements(), 0

    def step(self, size: int = 10) -> list[int]:
        positions = self.chosen.positions(self.first, 4 * size, self.measured)
        taken = [positions[ticket] for ticket in range(size)]
        assert taken == sorted(set(taken)) and [positions[ticket] for ticket in reversed(range(size))] == taken[::-1]
        rates = [(index, self.success(*self.row(index))) for index in taken]
        # Ranks have their parts in any order.
        before, self.measured = self.measured, self.chosen.after(self.measured, rates[::-1])
        assert self.measured == self.chosen.after(before, rates)
        assert self.chosen.after(self.measured, []) == self.measured
        self.first = taken[-1] + 1
        return taken

    def row(self, index: int) -> tuple[str, int]:
        item = self.prompts.item(index)
        assert item.row is not None
        return item.task, item.row


def by_row(task: str, row: int) -> float:
    return min(row // 10, 4) / 4  # ten rows each are solved 0, 1, 2 and 3 of 4 times


def test_a_band_takes_what_was_within_and_sometimes_the_rest(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "a")
    steps = Steps(curriculum(prompts, kind="band", low=0.2, high=0.6, explore=0.1), prompts, by_row)
    first = [index for _ in range(4) for index in steps.step()]
    assert first == list(range(NUM_ROWS)), "what was never sampled is taken"
    later = Counter(by_row(*steps.row(index)) for _ in range(60) for index in steps.step())
    assert later[0.25] + later[0.5] > 0.85 * later.total() and min(later[0.0], later[0.75]) > 0
    metrics = steps.chosen.metrics(steps.measured, 0, steps.first)
    assert metrics["curriculum/left_fraction"].value() == 0.5
    assert metrics["curriculum/measured_fraction"].value() == 1.0
    assert metrics["curriculum/success_mean"].value() == pytest.approx(0.375)
    assert metrics["curriculum/epochs"].value() == steps.first / NUM_ROWS > 20


def test_learnability_takes_by_the_variance(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "a")
    steps = Steps(curriculum(prompts, kind="learnability", explore=0.05), prompts, by_row)
    for _ in range(4):
        steps.step()
    began = steps.first
    found = Counter(by_row(*steps.row(index)) for _ in range(200) for index in steps.step())
    each = (steps.first - began) / 4  # rows of each rate whose turn came
    for success, chance in {0.0: 0.05, 0.25: 0.75, 0.5: 1.0, 0.75: 0.75}.items():
        assert found[success] / each == pytest.approx(chance, abs=0.05)


def test_gates_open_one_after_the_other_and_stay_open(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "hard", "easy", "middle")
    gates = [
        {"opens": "middle", "after": "easy", "success": 0.5, "groups": 10},
        {"opens": "hard", "after": "middle", "success": 0.5, "groups": 4},
    ]
    level = {"easy": 0.25, "middle": 0.5, "hard": 0.0}
    steps = Steps(curriculum(prompts, gates=gates), prompts, lambda task, _: level[task])

    def tasks() -> set[str]:
        return {steps.row(index)[0] for index in steps.step()}

    assert tasks() == tasks() == {"easy"}
    level["easy"] = 0.75
    assert tasks() == {"easy"}
    level["easy"] = 0.0
    assert tasks() == {"easy", "middle"}
    assert tasks() == {"easy", "middle", "hard"}
    assert steps.chosen.metrics(steps.measured, 0, 1)["curriculum/open_gates_count"].value() == 2


def test_two_gates_may_open_after_one_source_with_numbers_of_groups_of_their_own(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "easy", "middle", "hard")
    gates = [
        {"opens": "middle", "after": "easy", "success": 0.5, "groups": 4},
        {"opens": "hard", "after": "easy", "success": 0.5, "groups": 12},
    ]
    steps = Steps(curriculum(prompts, gates=gates), prompts, lambda task, _: 0.5)
    opened = [(steps.step(4), steps.measured.opened)[1] for _ in range(6)]
    assert opened[:2] == [("middle",)] * 2 and opened[-1] == ("middle", "hard")


def test_a_rate_is_that_of_the_rewards_that_were_computed(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "a")
    sampling = Sampling(group_size=4, temperature=1.0, max_response_tokens=1, stop_token_ids=frozenset())
    failed = RewardOutcome(reward=0.0, parts={}, failure="timeout")
    whole, nearly, none = (RewardOutcome(reward=reward, parts={}) for reward in (1.0, 0.7 + 0.2 + 0.1, 0.0))
    assert nearly.reward < 1.0
    groups = [PromptGroup.opened(prompt, sampling, None, step=1, run_seed=0) for prompt in prompts.take(5, 3)]
    for group, outcomes in zip(groups, ([whole, nearly, none, failed], [failed] * 4, [none] * 4), strict=True):
        group.pending |= {index: (mock.Mock(), known_outcome(one)) for index, one in enumerate(outcomes)}
    assert curriculum(prompts, kind="band").rates(groups) == [(5, 2 / 3), (7, 0.0)]


def test_a_function_says_the_chance(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def chance(*, success, visits, metadata):\n    return float(visits < 2 and metadata['level'] > -5)\n"
        "def unread(*, visits):\n    return 1.0\n"
        "def nothing(*, task):\n    return 0\n"
        "def wrong(*, task):\n    return 'much'\n"
        "def asks(*, level):\n    return 1\n"
    )
    prompts = stream(tmp_path, "a")

    def ask(name: str) -> Steps:
        return Steps(curriculum(prompts, kind="function", function=f"{tmp_path}/mine.py:{name}"), prompts, by_row)

    steps = ask("chance")
    with mock.patch.object(prompts, "metadata", wraps=prompts.metadata) as read:
        steps.chosen.positions(0, 10, Measurements())[9]
        steps.chosen.positions(0, 10, Measurements())[9]
        seen = [call.args[0] for call in read.call_args_list]
        assert len(seen) == len(set(seen)) > 0, "a row is read once"
        ask("unread").chosen.positions(0, 10, Measurements())[9]
        assert read.call_count == len(seen), "and none for a function that does not ask for it"
    assert Counter(steps.row(index)[1] for _ in range(2) for index in steps.step()) == dict.fromkeys(range(10), 2)
    with pytest.raises(UserError, match="gave each of 41 prompts, all that there are, the chance 0"):
        steps.step()
    with pytest.raises(UserError, match="return more than 0 for some"):
        ask("nothing").step()
    with pytest.raises(UserError, match="returned 'much' for prompt 0; return a number from 0 to 1"):
        ask("wrong").step()
    config = CurriculumConfig(kind="function", function=f"{tmp_path}/mine.py:asks")
    assert "asks for level, which is neither a column" in curriculum_problems(config)[0]
    config = CurriculumConfig(kind="function", function=f"{tmp_path}/mine.py:absent")
    assert "has no function or class absent" in curriculum_problems(config)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "band", "low": 0.2, "high": 0.6},
        {"kind": "learnability", "gates": [{"opens": "b", "after": "a", "success": 0.3, "groups": 6}]},
    ],
    ids=["band", "gates"],
)
def test_what_a_checkpoint_has_goes_on_with_the_same_prompts(tmp_path: Path, settings: dict[str, Any]) -> None:
    prompts = stream(tmp_path, "a", "b")
    whole = Steps(curriculum(prompts, **settings), prompts, by_row)
    taken = [whole.step(7) for _ in range(12)]
    stopped = Steps(curriculum(prompts, **settings), prompts, by_row)
    for _ in range(5):
        stopped.step(7)
    again = Steps(curriculum(prompts, **settings), prompts, by_row)
    again.measured = MEASUREMENTS.load(json.loads(json.dumps(MEASUREMENTS.dump(stopped.measured))))
    again.first = stopped.first
    assert again.measured == stopped.measured
    assert [again.step(7) for _ in range(7)] == taken[5:]
    assert taken != [list(range(7 * step, 7 * step + 7)) for step in range(12)]
    again.chosen.require_same_sources(stopped.measured)
    with pytest.raises(UserError, match=r"of sources with 40, 40 rows, and data\.sources now have 40;"):
        curriculum(stream(tmp_path, "a"), kind="band").require_same_sources(stopped.measured)


def test_rows_come_in_the_order_of_a_column(tmp_path: Path) -> None:
    prompts = stream(tmp_path, "a", order_column="level")
    passes = [[prompts.item(index).row for index in range(NUM_ROWS * n, NUM_ROWS * (n + 1))] for n in range(2)]
    for rows in passes:
        assert sorted(map(str, rows)) == sorted(map(str, range(NUM_ROWS)))
        assert [row // 2 for row in rows if row is not None] == [i // 2 for i in reversed(range(NUM_ROWS))]
    assert passes[0] != passes[1], "equal rows are shuffled in every pass"
    assert [prompts.metadata(index)["level"] for index in (0, 39)] == [-19, 0]
    with pytest.raises(UserError, match=r'line 1: it has no column "lvel" \(order_column\); .*; did you mean level'):
        stream(tmp_path, "a", order_column="lvel")
    records = [{"prompt": str(i), "answer": "1", "level": 1, "name": "x"} for i in range(3)]
    for column, sentence in (("level", "is 1 in every row, which is no order"), ("name", "must be a finite number")):
        with pytest.raises(UserError, match=sentence):
            source = jsonl(tmp_path / "flat.jsonl", records, order_column=column)
            make_training_stream(data(source), None, seed=3, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    ("table", "others", "sentence"),
    [
        ("kind = 'all'", "", "without gates takes every prompt"),
        ("kind = 'band'\nlow = 0.6\nhigh = 0.4", "", "low = 0.6 is above high = 0.4"),
        ("kind = 'band'\nlow = 0.6\nhigh = 0.9", "", "no success rate of rollout.group_size = 2 responses lies from"),
        ("kind = 'learnability'\nlow = 0.2", "", 'low has no meaning for kind = "learnability"'),
        ("kind = 'function'", "", "function is not set"),
        ("gates = [{opens = 'x', after = 'default', success = 0.5}]", "", '"x" is the task of no source'),
        (
            "gates = [{opens = 'a', after = 'b', success = 0.5}, {opens = 'b', after = 'a', success = 0.5}]",
            "",
            "waits for itself",
        ),
        ("kind = 'band'", "debug.load_rollouts=runs/x", "load_rollouts samples nothing"),
        ("kind = 'band'", "reward.terms=[]", "no reward.terms says what a success is"),
        ("kind = 'band'", 'data.sources=[{kind="reasoning_gym",task="chain_sum"}]', "never come again"),
        ("kind = 'band'", "rollout.partial=true", "prompts in the order of the stream"),
        ("kind = 'learnability'", "rollout.group_size=1", "no signal with rollout.group_size = 1"),
    ],
)
def test_a_curriculum_without_a_signal_is_refused(tmp_path: Path, table: str, others: str, sentence: str) -> None:
    text = GOOD.replace("[optim]", f"[data.curriculum]\n{table}\n[optim]")
    found = problems(tmp_path, text, *([others] if others else []))
    assert any(sentence in line for line in found), found
