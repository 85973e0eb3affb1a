"""Rewards by models: the scores of a step's responses, packed and sharded like everything that the trainer computes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.config.rewards import ModelReward
from spmdrl.data.tokenizer import ScoredText, decode, load_tokenizer
from spmdrl.dist.collectives import gather_objects
from spmdrl.model.policy import RewardModel
from spmdrl.model.reward_model import load_scorer, num_labels_of
from spmdrl.model.sharding import turn_of
from spmdrl.rewards.client import Pending, Rewarded, failed, known_reward, weighed
from spmdrl.run import Launch
from spmdrl.step.batch import build_batch
from spmdrl.types import PADDING_INDEX, Place, RewardOutcome, Rollout, Sequence, UserError
from spmdrl.workers.channel import bounded


@dataclass(frozen=True, slots=True)
class _Scorer:
    """A reward model with what it reads."""

    name: str  # of its part of a reward: "model", then "model_2" and so on
    term: ModelReward
    model: RewardModel
    encode: ScoredText
    max_tokens: int


class Scorers:
    """The reward models of a run, which compute one after the other when neither engine nor trainer does."""

    def __init__(self, run: Launch[Config]) -> None:
        """Every rank that trains must make one, which reads its shards of each model."""
        self._rewards, self._meshes, self._tokenizer = run.rewards, run.meshes, run.inputs.tokenizer
        # All sequences of a step in one mini-batch, each by itself.
        self._plan = dataclasses.replace(run.plan, prompts_per_step=1, rollouts_per_step=1, updates_per_step=1)
        terms = run.cfg.reward.model_terms.items()
        self._scorers = [self._open(number, place, term, run) for number, (place, term) in enumerate(terms, start=1)]

    def _open(self, number: int, place: int, term: ModelReward, run: Launch[Config]) -> _Scorer:
        settings = run.cfg.scorer_model(place)
        num_labels, label = num_labels_of(settings.path), term.label or 0
        meshes = run.meshes.of(f"reward.terms.{place}")
        model = load_scorer(settings, meshes, term, num_labels=num_labels, label=label)
        tokenizer = load_tokenizer(settings.path, settings.trust_remote_code)
        longest = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
        return _Scorer(
            name="model" if number == 1 else f"model_{number}",
            term=term,
            model=model,
            encode=ScoredText(tokenizer, term.template),
            max_tokens=min(_most_tokens(run.plan, multiple=run.meshes.model.cp.size()), longest or 2**31),
        )

    def complete(self, pending: list[Pending]) -> list[Pending]:
        """Add the scores to the rewards that processes compute, for which this waits; every rank that trains must call
        this. A score that cannot be computed fails the reward, as it does in a process.

        Rewards that have failed, or were recorded with their scores, stay as they are.
        """
        if not self._scorers:
            return pending
        rewarded = self._rewards.collect(pending)
        for scorer in self._scorers:
            rewarded = self._with_scores(scorer, rewarded)
        return [known_reward(*one) for one in rewarded]

    def _with_scores(self, scorer: _Scorer, rewarded: list[Rewarded]) -> list[Rewarded]:
        wanted = {
            _place(rollout): self._encoded(scorer, rollout)
            for rollout, outcome in rewarded
            if outcome.failure is None and scorer.name not in outcome.parts and scorer.term.counts_with(outcome.parts)
            if rollout.prompt.rule is None
        }
        scores = self._score(scorer, {place: found for place, found in wanted.items() if not isinstance(found, str)})

        def completed(rollout: Rollout, outcome: RewardOutcome) -> RewardOutcome:
            found = wanted.get(_place(rollout))
            if found is None:
                return outcome
            return failed(found) if isinstance(found, str) else self._added(outcome, scorer, scores[_place(rollout)])

        return [(rollout, completed(rollout, outcome)) for rollout, outcome in rewarded]

    def _added(self, outcome: RewardOutcome, scorer: _Scorer, score: float) -> RewardOutcome:
        try:
            part = bounded(scorer.name, score)
        except ValueError as error:
            return failed(str(error))
        return weighed({**outcome.parts, scorer.name: part}, self._rewards.cfg)

    def _encoded(self, scorer: _Scorer, rollout: Rollout) -> tuple[int, ...] | str:
        """Return what the model reads of a rollout, or why it cannot."""
        try:
            token_ids = scorer.encode(rollout.prompt, decode(self._tokenizer, rollout.turns[-1].response.token_ids))
        except UserError as error:
            return f"{scorer.name}: {error}"
        if len(token_ids) > scorer.max_tokens:
            return f"{scorer.name}: prompt and response are {len(token_ids)} of its tokens, beyond {scorer.max_tokens}"
        return token_ids

    @torch.no_grad()
    def _score(self, scorer: _Scorer, texts: dict[Place, tuple[int, ...]]) -> dict[Place, float]:
        """Return the scores of all ranks' texts, by their places; every rank that trains must call this."""
        sequences = [_sequence(place, token_ids) for place, token_ids in texts.items()]
        batch = build_batch(sequences, self._plan, self._meshes, aggregation="token_mean")
        found: dict[Place, float] = {}
        with turn_of(scorer.model, gathers_once=not scorer.term.reshard_after_forward):
            for micro_batch in batch.micro_batches:
                scores = scorer.model(micro_batch).cpu()[micro_batch.loss_mask]
                places = [place for place in micro_batch.places if place[0] != PADDING_INDEX]
                found |= dict(zip(places, scores.tolist(), strict=True))
        return {place: score for part in gather_objects(self._meshes.training, found) for place, score in part.items()}


def _most_tokens(plan: Plan, *, multiple: int) -> int:
    """Count the tokens of the longest sequence that a micro-batch can have."""
    budget = plan.max_tokens_per_micro_batch
    return 2**31 if budget is None else budget - budget % multiple


def _place(rollout: Rollout) -> Place:
    return rollout.prompt.prompt_id, rollout.sample_index


def _sequence(place: Place, token_ids: tuple[int, ...]) -> Sequence:
    index, segment = place
    return Sequence(
        index=index,
        segment=segment,
        token_ids=token_ids,
        loss_mask=(False,) * (len(token_ids) - 1) + (True,),  # the score is at the last token
        rollout_logprobs=(0.0,) * len(token_ids),
        reward=0.0,
    )
