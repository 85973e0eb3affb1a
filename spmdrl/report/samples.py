"""Rows of samples.jsonl and eval_samples.jsonl, which are rollouts, and of worst_tokens.jsonl: where engine and trainer
disagree most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algo.metrics import TokenValue
from spmdrl.types import RewardedRollout, RewardOutcome, Rollout, Turn


def sample_rows(
    rewarded: Sequence[RewardedRollout], advantages: Mapping[int, float], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Make a row of each rollout: prompt, response, reward, advantage, and a summary of its logprobs. With an
    environment it also has the conversation, turn by turn."""
    return [_sample_row(item, advantages[item.index], tokenizer) for item in rewarded]


def worst_token_rows(tokens: Sequence[TokenValue], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Make a row of each token, the worst first, with its text, the text before it, and the logprobs of trainer and
    engine."""
    return [
        {
            "sequence_index": token.sequence_index,
            **({"sequence_part": token.sequence_segment} if token.sequence_segment else {}),
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


def _sample_row(rewarded: RewardedRollout, advantage: float, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    greedy = {"greedy_reward": rewarded.baseline.reward} if rewarded.baseline else {}
    return rollout_row(rewarded.rollout, rewarded.outcome, tokenizer, advantage=advantage, **greedy)


def rollout_row(
    rollout: Rollout, outcome: RewardOutcome, tokenizer: PreTrainedTokenizerBase, **trained_on: float
) -> dict[str, Any]:
    """Make the row of a rollout; an answer to a held-out prompt has nothing that is trained on."""
    logprobs = [logprob for response in rollout.responses for logprob in response.logprobs]
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "task": rollout.prompt.task,
        "prompt": rollout.prompt.text,
        "response": tokenizer.decode(rollout.turns[-1].response.token_ids),
        "answer": rollout.prompt.answer,
        "reward": outcome.reward,
        "reward_parts": outcome.parts,
        "failure": outcome.failure,
        **trained_on,
        "finish_reason": rollout.end,
        "response_tokens": rollout.num_sampled,
        "mean_logprob_nats": sum(logprobs) / max(1, len(logprobs)),
        "min_logprob_nats": min(logprobs, default=0.0),
        "version": rollout.oldest_version,
        **(_conversation(rollout, tokenizer) if _has_environment(rollout) else {}),
    }


def _has_environment(rollout: Rollout) -> bool:
    return bool(rollout.observations) or rollout.failure is not None or any(turn.action for turn in rollout.turns)


def _conversation(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "end": rollout.end,
        "environment_failure": rollout.failure,
        "environment_reward": rollout.environment_reward,
        "trajectories": len(rollout.trajectories),
        "turns": [
            _turn_row(turn, start, tokenizer, is_trained=turn.is_trained and not rollout.is_masked)
            for trajectory in rollout.trajectories
            for turn, start in zip(trajectory.turns, trajectory.starts, strict=False)
        ],
    }


def _turn_row(turn: Turn, start: int, tokenizer: PreTrainedTokenizerBase, *, is_trained: bool) -> dict[str, Any]:
    """Make the row of a turn that begins at token `start` of its trajectory. The reward and the metrics are None where
    the environment did not answer."""
    action, observation = turn.action, turn.observation
    return {
        "read": _read(turn, start, tokenizer),
        "written": tokenizer.decode(turn.response.token_ids),
        "tool_calls": [dataclasses.asdict(call) for call in action.tool_calls] if action else [],
        "malformed": action.malformed if action else None,
        "reward": observation.reward if observation else None,
        "metrics": dict(observation.metrics) if observation else None,
        "tool_errors": observation.tool_errors if observation else 0,
        "tokens_read": len(turn.context_ids),
        "tokens_written": len(turn.response.token_ids),
        "finish_reason": turn.response.finish_reason,
        "trained": is_trained,
        **({"summary": True} if turn.is_summary else {}),
    }


def _read(turn: Turn, start: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the policy read before its response, with names of the images."""
    text, done = "", start
    for image in turn.images:
        text += tokenizer.decode(turn.context_ids[done - start : image.start - start]) + image.name
        done = image.end
    return text + tokenizer.decode(turn.context_ids[done - start :])
