"""Terms of a reward: gates between them, normalization one by one, and how far they agree."""

from __future__ import annotations

import random
from statistics import correlation, mean, stdev
from typing import Any

import pytest
import torch

from spmdrl.algo.advantage import EPS, normalized_terms
from spmdrl.algo.metrics import merge_all, scalars
from spmdrl.config import Config
from spmdrl.rewards.client import weighed
from spmdrl.step.rewards import shape_rewards, term_metrics
from spmdrl.types import RewardedRollout, RewardOutcome
from tests.helpers.configs import minimal_config
from tests.helpers.rollouts import byte_tokenizer, chat_prompt, one_turn, response_of

TERMS: list[dict[str, Any]] = [
    {"kind": "exact"},
    {"kind": "function", "function": "a:b", "weight": 0.5, "gate": "exact", "floor": 0.5},
    {"kind": "function", "function": "a:c", "weight": -2.0},
]
GROUP_SIZE = 4


def config(**tables: Any) -> Config:
    rollout = {"group_size": GROUP_SIZE, "prompts_per_step": 4, "max_response_tokens": 8}
    return minimal_config(**({"rollout": rollout, "reward": {"terms": TERMS}} | tables))


def rewarded(cfg: Config, *, scale: float = 1.0, fails: int = 3) -> list[RewardedRollout]:
    """Four groups with random parts; `scale` is that of the last term, and one reward has failed."""
    draw, tokenizer = random.Random(0), byte_tokenizer()
    outcomes = []
    for place in range(4 * GROUP_SIZE):
        prompt = chat_prompt(tokenizer, "a", prompt_id=place // GROUP_SIZE)
        rollout = one_turn(prompt, response_of(tokenizer, "b"), sample_index=place % GROUP_SIZE)
        parts = {"exact": float(draw.random() < 0.5), "function": draw.random(), "function_2": scale * draw.random()}
        failed = RewardOutcome(reward=0.0, parts={}, failure="timeout")
        outcomes.append((rollout, failed if place == fails else weighed(parts, cfg.reward)))
    draw.shuffle(outcomes)
    return shape_rewards(outcomes, lambda one: one.prompt.prompt_id * GROUP_SIZE + one.sample_index, cfg)


def columns(found: list[RewardedRollout]) -> dict[str, list[float]]:
    """The parts as they count, by hand."""
    of = {name: [one.outcome.parts.get(name, 0.0) for one in found] for name in ("exact", "function", "function_2")}
    of["function"] = [part if right >= 0.5 else 0.0 for part, right in zip(of["function"], of["exact"], strict=True)]
    return of


WEIGHTS = {"exact": 1.0, "function": 0.5, "function_2": -2.0}


def groups(values: list[float]) -> list[list[float]]:
    return [values[start : start + GROUP_SIZE] for start in range(0, len(values), GROUP_SIZE)]


def test_a_closed_gate_counts_0_and_the_rest_is_a_weighted_sum() -> None:
    found = rewarded(config())
    terms = columns(found)
    for place, one in enumerate(found):
        expected = sum(weight * terms[name][place] for name, weight in WEIGHTS.items())
        assert one.outcome.reward == pytest.approx(expected, abs=1e-12) and one.normalized is None
        assert one.compared == one.outcome.reward
    assert any(one.outcome.parts.get("function", 0.0) > 0 and one.outcome.parts["exact"] == 0 for one in found)


def test_gdpo_is_its_slow_twin_and_no_term_drowns_in_another() -> None:
    cfg = config(advantage={"estimator": "gdpo"})
    found = rewarded(cfg)
    slow = [0.0] * len(found)
    for name, values in columns(found).items():
        normalized = [(value - mean(group)) / (stdev(group) + EPS) for group in groups(values) for value in group]
        slow = [x + WEIGHTS[name] * y for x, y in zip(slow, normalized, strict=True)]
    assert [one.compared for one in found] == pytest.approx(slow, abs=1e-9)
    large = [one.compared for one in rewarded(cfg, scale=1000.0)]
    assert large == pytest.approx(slow, abs=1e-4)
    alone = rewarded(config())
    assert [one.outcome for one in found] == [one.outcome for one in alone], "what is measured does not change"


def test_a_group_is_normalized_alike_among_others() -> None:
    terms = torch.rand(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = normalized_terms(terms, [1.0, 0.5, -2.0])
    assert torch.equal(whole[3:4], normalized_terms(terms[:, 3:4], [1.0, 0.5, -2.0]))
    assert torch.equal(normalized_terms(torch.ones(2, 1, 4), [1.0, 1.0]), torch.zeros(1, 4))


def test_spreads_and_agreements_are_those_within_groups_on_all_ranks_together() -> None:
    cfg = config()
    found = rewarded(cfg)
    parts = [
        term_metrics(found[: 2 * GROUP_SIZE], cfg),
        term_metrics(found[2 * GROUP_SIZE :], cfg),
        term_metrics([], cfg),
    ]
    metrics = scalars(merge_all(parts))
    centred = {
        name: [value - mean(group) for group in groups(values) for value in group]
        for name, values in columns(found).items()
    }
    for name, own in centred.items():
        others = [sum(WEIGHTS[x] * centred[x][place] for x in WEIGHTS if x != name) for place in range(len(own))]
        assert metrics[f"reward/std_{name}"] == pytest.approx(mean([x * x for x in own]) ** 0.5)
        assert metrics[f"reward/agreement_{name}"] == pytest.approx(correlation(own, others))
    assert term_metrics(found, config(reward={"terms": TERMS[:1]})) == {}
