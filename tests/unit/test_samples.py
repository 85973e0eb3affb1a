"""Which rollouts of a step are shown: as many as asked for, spread over the ranks, whatever each rank holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spmdrl.config import ReportConfig
from spmdrl.step import samples
from spmdrl.step.samples import chosen, gather_samples
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
