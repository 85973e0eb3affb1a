"""Accuracy: from which reward a response is right, and what --dry-run says when the reference answer earns another."""

from __future__ import annotations

from typing import Any

import pytest

from spmdrl.algo.metrics import scalars
from spmdrl.config import Config
from spmdrl.rollout.sampling import Sampling, eval_sampling
from spmdrl.step.evaluate import eval_metrics
from spmdrl.train import success_lines
from spmdrl.types import RewardOutcome
from tests.helpers.rollouts import byte_tokenizer, chat_prompt, one_turn, response_of

SOURCES = [{"kind": "jsonl", "path": "rows.jsonl"}]


def config(**evaluation: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "a-name", "num_steps": 3},
            "model": {"path": "tiny"},
            "data": {"sources": SOURCES, "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 8},
            "reward": {"terms": [{"kind": "exact"}, {"kind": "math", "weight": 0.5}]},
            "optim": {"lr": 1e-6},
            "pack": {"max_tokens_per_micro_batch": 64},
            "eval": {"sources": SOURCES, "num_prompts": 2} | evaluation,
        }
    )


@pytest.mark.parametrize(
    ("success_at", "accuracy"), [(None, 1 / 4), (0.5, 3 / 4), (0.0, 1.0), (1.2, 1 / 4), (2.0, 0.0)]
)
def test_accuracy_is_the_share_of_rewards_that_are_a_success(success_at: float | None, accuracy: float) -> None:
    tokenizer = byte_tokenizer()
    rollout = one_turn(chat_prompt(tokenizer, "1 + 1?"), response_of(tokenizer, "2"))
    rewards = [0.0, 0.5, 1.0, 1.5 - 1e-9]  # a sum of weighted terms rounds
    outcomes = [(rollout, RewardOutcome(reward=reward, parts={}, failure=None)) for reward in rewards]
    metrics = eval_metrics(outcomes, success_at=config(success_at=success_at).success_at)
    assert scalars(metrics)["eval/accuracy"] == accuracy


def test_held_out_answers_are_sampled_as_eval_says_and_not_as_rollouts() -> None:
    stops = frozenset({1})
    drawn = {"samples_per_prompt": 3, "temperature": 0.7, "top_p": 0.9, "max_response_tokens": 5}
    assert eval_sampling(config(**drawn), stops) == Sampling(
        group_size=3, temperature=0.7, top_p=0.9, max_response_tokens=5, stop_token_ids=stops
    )
    greedy = Sampling(group_size=1, temperature=0.0, max_response_tokens=8, stop_token_ids=stops)
    assert eval_sampling(config(), stops) == greedy, "of a rollout's length"
    assert (
        Sampling(
            group_size=1, temperature=1.0, top_p=0.5, top_k=4, max_response_tokens=8, stop_token_ids=stops
        ).greedy()
        == greedy
    )


@pytest.mark.parametrize("reward", [0.5, 1.7])
def test_a_reference_answer_that_earns_something_else_draws_a_warning(reward: float) -> None:
    (warning,) = success_lines(config(), chat_prompt(byte_tokenizer(), "1 + 1?", answer="2"), reward)
    assert f"counts a reward of 1.5 or more as right, and the reference answer gets {reward:g}" in warning
    assert warning.endswith(f"set eval.success_at = {reward:g}")


def test_one_that_earns_full_marks_or_what_was_set_draws_none() -> None:
    prompt = chat_prompt(byte_tokenizer(), "1 + 1?", answer="2")
    assert list(success_lines(config(), prompt, 1.5)) == list(success_lines(config(success_at=0.5), prompt, 0.5)) == []
