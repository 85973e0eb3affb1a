"""Which rollouts of a step are shown: as many as asked for, spread over the ranks, whatever each rank holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spmdrl.config import ReportConfig
from spmdrl.step import samples
from spmdrl.step.samples import chosen, gather_answers, gather_samples
from spmdrl.types import RewardedRollout
from tests.helpers.rollouts import byte_tokenizer, recorded_episodes


@given(counts=some.lists(some.integers(0, 9), min_size=1, max_size=8), limit=some.integers(0, 40))
def test_as_many_as_there_are_up_to_the_limit_and_those_of_one_rank(counts: list[int], limit: int) -> None:
    places = chosen(counts, limit)
    assert [sorted({*own}) for own in places] == places, "each once, in order"
    assert all(0 <= place < count for own, count in zip(places, counts, strict=True) for place in own)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    together = [start + place for start, own in zip(starts, places, strict=True) for place in own]
    assert [together] == chosen([sum(counts)], limit), "the same groups however ranks share them"
    assert len(together) == min(limit, sum(counts))


def test_every_rank_has_its_share() -> None:
    assert chosen([8, 8, 8, 8], 4) == [[0], [0], [0], [0]]
    assert chosen([0, 3], 2) == [[], [0, 1]]


class Alone:
    """A mesh of one rank."""

    def get_local_rank(self) -> int:
        return 0


@pytest.mark.parametrize("whole_groups", [False, True])
def test_one_rollout_of_a_group_or_all_of_them(whole_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "gather_objects", lambda mesh, value: [value])
    recorded = recorded_episodes(byte_tokenizer())
    rewarded = [RewardedRollout(index=i, rollout=one, outcome=outcome) for i, (one, outcome) in enumerate(recorded)]
    cfg = ReportConfig(samples_per_step=100, whole_groups=whole_groups)
    rows = gather_samples(rewarded, dict.fromkeys(range(len(rewarded)), 0.5), byte_tokenizer(), cfg, Alone())  # type: ignore[arg-type]
    ids = [(one.prompt.prompt_id, one.sample_index) for one, _ in recorded]
    first = {prompt_id: (prompt_id, sample) for prompt_id, sample in reversed(ids)}
    expected = sorted(ids) if whole_groups else sorted(first.values())
    assert sorted((row["prompt_id"], row["sample_index"]) for row in rows) == expected


@pytest.mark.parametrize("whole_groups", [False, True])
def test_answers_shown_are_those_to_the_same_prompts_however_ranks_share_them(
    whole_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, tokenizer = recorded_episodes(byte_tokenizer()), byte_tokenizer()
    cfg, parts = ReportConfig(eval_samples=6, whole_groups=whole_groups), list[list[dict[str, Any]]]()

    def gather(_: Any, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        parts.append(rows)
        return parts

    monkeypatch.setattr(samples, "gather_objects", gather)
    found = []
    for num_ranks in (1, 2, 3):
        parts.clear()
        for rank in range(num_ranks):
            shown = gather_answers(recorded[rank::num_ranks], tokenizer, cfg, Alone(), num_prompts=6)  # type: ignore[arg-type]
        found.append(shown)
    assert found[0] == found[1] == found[2]
    expected = [(one.prompt.prompt_id, one.sample_index) for one, _ in recorded if whole_groups or not one.sample_index]
    assert [(row["prompt_id"], row["sample_index"]) for row in found[0]] == sorted(expected)
    assert all("advantage" not in row for row in found[0])


def test_no_answers_are_shown_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "gather_objects", lambda mesh, value: [value])
    recorded = recorded_episodes(byte_tokenizer())
    assert gather_answers(recorded, byte_tokenizer(), ReportConfig(), Alone(), num_prompts=6) == []  # type: ignore[arg-type]
    few = gather_answers(recorded, byte_tokenizer(), ReportConfig(eval_samples=1), Alone(), num_prompts=6)  # type: ignore[arg-type]
    assert [row["prompt_id"] for row in few] == [0]
