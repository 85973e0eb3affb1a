"""Settings for sampling: of rollouts to train on, and of answers to held-out prompts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from spmdrl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling the rollouts of one phase."""

    group_size: int
    temperature: float
    max_response_tokens: int  # in a trajectory, everything after the prompt
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int | None = None  # then responses report their candidates
    reports_routes: bool = False  # the experts that tokens went to are wanted

    def greedy(self) -> Sampling:
        """Change to sampling the most probable token at every place."""
        return dataclasses.replace(self, temperature=0.0, top_p=1.0, top_k=None)


def training_sampling(cfg: Config, stop_token_ids: frozenset[int]) -> Sampling:
    """Settings for responses to train on: the policy's own distribution, or what top-k and top-p leave of it."""
    return Sampling(
        group_size=cfg.rollout.group_size,
        temperature=cfg.rollout.temperature,
        max_response_tokens=cfg.rollout.max_response_tokens,
        stop_token_ids=stop_token_ids,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        reports_routes=cfg.correction.router_replay == "R3",
    )


def eval_sampling(cfg: Config, stop_token_ids: frozenset[int]) -> Sampling:
    """Settings for responses to held-out prompts."""
    assert cfg.eval is not None
    return Sampling(
        group_size=cfg.eval.samples_per_prompt,
        temperature=cfg.eval.temperature,
        max_response_tokens=cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens,
        stop_token_ids=stop_token_ids,
        top_p=cfg.eval.top_p,
    )
