"""Sample group_size rollouts of each prompt, with seeds that belong to the sample and not to the rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdrl.algo.seeds import rollout_seed
from spmdrl.config import Config
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.types import Prompt, Request, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling the responses of one phase."""

    group_size: int
    temperature: float
    max_response_tokens: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0

    def greedy(self) -> Sampling:
        """Change to sampling the most probable token at every place."""
        return dataclasses.replace(self, temperature=0.0)

    def request(self, prompt: Prompt, seed: int, response_ids: tuple[int, ...] = ()) -> Request:
        """Request a response to the prompt, or the rest of one that begins with `response_ids`."""
        return Request(
            prompt_ids=prompt.token_ids,
            seed=seed,
            max_response_tokens=self.max_response_tokens,
            response_ids=response_ids,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_token_ids=self.stop_token_ids,
        )


def training_sampling(cfg: Config, stop_token_ids: frozenset[int]) -> Sampling:
    """Settings for responses to train on: the policy's own distribution, so neither top-p nor top-k."""
    return Sampling(
        group_size=cfg.rollout.group_size,
        temperature=cfg.rollout.temperature,
        max_response_tokens=cfg.rollout.max_response_tokens,
        stop_token_ids=stop_token_ids,
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


def sample(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, *, run_seed: int, step: int
) -> Iterator[Rollout]:
    """Yield `group_size` rollouts of every prompt, each as soon as it is finished."""
    places = [(prompt, sample_index) for prompt in prompts for sample_index in range(sampling.group_size)]
    seeds = [rollout_seed(run_seed, step, prompt.prompt_id, sample_index) for prompt, sample_index in places]
    requests = [sampling.request(prompt, seed) for (prompt, _), seed in zip(places, seeds, strict=True)]
    for index, response in engine.generate(requests):
        prompt, sample_index = places[index]
        yield Rollout(prompt=prompt, sample_index=sample_index, seed=seeds[index], response=response)
