"""Rows of samples.jsonl: rollouts, and the tokens with the largest mismatch between engine and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algo.metrics import TokenValue
from spmdrl.types import RewardedRollout


def sample_rows(rewarded: Sequence[RewardedRollout], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Make a row of one rollout of each group: prompt, response, reward, and the engine's mean and lowest logprob."""
    groups: dict[int, RewardedRollout] = {}
    for item in rewarded:
        groups.setdefault(item.rollout.prompt.prompt_id, item)
    return [_row(item, tokenizer) for item in groups.values()]


def worst_token_rows(tokens: Sequence[TokenValue], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Make one row that lists these tokens, the worst first, each with its text, the text before it, and the logprobs
    of trainer and engine; no row without tokens."""
    if not tokens:
        return []
    return [
        {
            "worst_tokens": [
                {
                    "sequence_index": token.sequence_index,
                    "position": token.position,
                    "token_id": token.token_ids[-1],
                    "token": tokenizer.decode(token.token_ids[-1:]),
                    "context": tokenizer.decode(token.token_ids[:-1]),
                    "mismatch_nats": token.value,
                    "old_logprob_nats": token.rollout_logprob + token.value,
                    "rollout_logprob_nats": token.rollout_logprob,
                }
                for token in tokens
            ]
        }
    ]


def _row(rewarded: RewardedRollout, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    rollout, response = rewarded.rollout, rewarded.rollout.response
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "task": rollout.prompt.task,
        "prompt": rollout.prompt.text,
        "response": tokenizer.decode(response.token_ids),
        "answer": rollout.prompt.answer,
        "reward": rewarded.outcome.reward,
        "reward_parts": rewarded.outcome.parts,
        **({"greedy_reward": rewarded.baseline.reward} if rewarded.baseline else {}),
        "failure": rewarded.outcome.failure,
        "advantage": rewarded.advantage,
        "finish_reason": response.finish_reason,
        "response_tokens": len(response.token_ids),
        "mean_logprob_nats": sum(response.logprobs) / max(1, len(response.logprobs)),
        "min_logprob_nats": min(response.logprobs, default=0.0),
        "version": response.oldest_version,
    }
