"""Data of fine-tuning and of preferences: pairs as sequences, and the metrics of those that are held out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.algo.metrics import Mean, Metrics, merge_all
from spmdrl.config import PreferencesConfig, SftConfig, TuningConfig
from spmdrl.conversation import num_images
from spmdrl.data.sources import Exchange, Row
from spmdrl.data.stream import AnswerLimit, TrainingPair, require_response
from spmdrl.data.tokenizer import encode_text
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import ImageIntake, expanded
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.learn.learner import Learner
from spmdrl.learn.update import measure
from spmdrl.model.frozen import FrozenModel
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import reshard
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch
from spmdrl.step.evaluate import Evaluation
from spmdrl.step.hints import Label
from spmdrl.step.images import Images
from spmdrl.step.logprobs import add_reference
from spmdrl.types import Sequence as TrainingSequence
from spmdrl.types import UserError


class PairEncoder:
    """Turns pairs into the sequences that are trained on: of all tokens, those of responses."""

    def __init__(
        self,
        cfg: TuningConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: frozenset[int],
        images: ImageIntake,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens, self._setting = cfg.answers.max_response_tokens, f"{cfg.table}.max_response_tokens"
        self._images = images
        self._turns = TurnEncoder(
            tokenizer, chat_template=cfg.data.chat_template, tools=(), stop_token_ids=stop_token_ids, images=images
        )

    @classmethod
    def of(cls, cfg: TuningConfig, inputs: Inputs) -> PairEncoder:
        """Make that of a run."""
        return cls(cfg, inputs.tokenizer, inputs.stop_token_ids, inputs.images)

    def __call__(self, pair: TrainingPair, index: int) -> TrainingSequence:
        """Return prompt, responses with an end-of-sequence token each, and between them the messages to the policy.

        Raises UserError when too much follows the prompt.
        """
        prompt = pair.prompt
        token_ids, trained = list(prompt.token_ids), [False] * len(prompt.token_ids)
        images, later = list(prompt.images), iter(pair.images)
        for said, response, shown in self._encoded(pair.exchanges):
            read, placed = expanded(said, list(itertools.islice(later, shown)), self._images, start=len(token_ids))
            token_ids += [*read, *response]
            images += placed
            trained += [False] * len(read) + [True] * len(response)
        if (num_tokens := len(token_ids) - len(prompt.token_ids)) > self._max_tokens:
            raise UserError(
                f"{pair.where}: what follows the prompt ({prompt.text[:60]!r}) has {num_tokens} tokens, more than "
                f"{self._setting} = {self._max_tokens}; set it to {num_tokens} or more, or remove the row"
            )
        return TrainingSequence(
            index=index,
            token_ids=tuple(token_ids),
            loss_mask=tuple(trained),
            rollout_logprobs=(0.0,) * len(token_ids),
            reward=0.0,
            images=tuple(images),
        )

    def num_tokens(self, exchanges: Sequence[Exchange]) -> int:
        """Count the tokens that follow a prompt, without those of images."""
        return sum(len(said) + len(response) for said, response, _ in self._encoded(exchanges))

    def _encoded(self, exchanges: Sequence[Exchange]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield the tokens of messages to the policy, with one for each image, its response, and the images."""
        end = self._tokenizer.eos_token_id
        assert end is not None
        response: tuple[int, ...] = ()
        for exchange in exchanges:
            said = self._turns.appended(exchange.messages, after=response) if exchange.messages else ()
            response = (*encode_text(self._tokenizer, exchange.response), end)
            yield said, response, sum(map(num_images, exchange.messages))


def answer_limit(cfg: SftConfig, encode: PairEncoder, images: ImageIntake) -> AnswerLimit:
    """Return the limit on what follows a row's prompt."""

    def num_tokens(row: Row) -> int:
        require_response(row)
        return encode.num_tokens(row.exchanges) + sum(images.num_tokens(image) - 1 for image in row.later_images)

    most, setting = cfg.sft.max_response_tokens, "sft.max_response_tokens"
    return AnswerLimit(num_tokens, most, setting, holds_for_held_out=False)


def read_pairs(run: Launch[SftConfig], encode: PairEncoder, step: int, label: Label) -> list[TrainingSequence]:
    """Return this rank's pairs of a step, with the teachers that `label` gives their prompts; every rank that trains
    must call this, and all raise what one does."""
    first, rank = run.plan.first_rollout(run.world.rank), run.world.rank
    with raise_on_all_ranks(run.meshes.training):
        pairs = run.inputs.prompts.pairs(run.plan.first_prompt(step, rank), run.plan.prompts_per_rank)
        sequences = [encode(pair, index) for index, pair in enumerate(pairs, start=first)]
        labels = [label(pair.prompt, None) for pair in pairs]
        return [
            dataclasses.replace(sequence, teacher=teacher, hint=hint)
            for sequence, (teacher, hint) in zip(sequences, labels, strict=True)
        ]


class _HeldOutPairs:
    """This rank's held-out pairs, with their places among those of all ranks."""

    def __init__(self, run: Launch[Any]) -> None:
        self._run, mesh = run, run.meshes.training
        self.mine: list[tuple[int, TrainingPair]] = list(enumerate(run.inputs.held_out_pairs))[
            run.world.rank :: mesh.size()
        ]

    def restore_images(self) -> None:
        """Read their images again where the store has removed them; all ranks raise what one does."""
        with raise_on_all_ranks(self._run.meshes.training):
            for _, pair in self.mine:
                self._run.inputs.held_out.restore_pair(pair)


class HeldOutLoss:
    """The loss of the held-out responses, by the weights that the policy has when it is called."""

    def __init__(self, run: Launch[SftConfig], policy: Policy, encode: PairEncoder, images: Images) -> None:
        """Every rank that trains must make one, and all raise what one does."""
        self._policy, self._meshes, self._images = policy, run.meshes, images
        self._pairs = _HeldOutPairs(run)
        with raise_on_all_ranks(run.meshes.training):
            sequences = [encode(pair, index) for index, pair in self._pairs.mine]
        self._micro_batches = build_batch(sequences, run.plan, run.meshes, aggregation="token_mean").micro_batches

    @torch.no_grad()
    def __call__(self) -> Evaluation:
        """Return this rank's part of the loss, a mean over tokens; every rank that trains must call this."""
        device = torch.device(self._meshes.training.device_type)
        parts: list[Metrics] = []
        self._pairs.restore_images()
        micro_batches, _ = self._images.encode(self._micro_batches)
        for micro_batch in micro_batches:
            logprobs, mask = self._policy(micro_batch).logprobs, micro_batch.loss_mask.to(device)
            loss = -float(torch.where(mask, logprobs, 0.0).sum(dtype=torch.float64))
            parts.append({"eval/loss": Mean(loss, float(mask.sum()))})
        reshard(self._policy)
        return Evaluation(merge_all(parts) if self._meshes.is_data_leader else {})


def describe(pair: TrainingPair, sequence: TrainingSequence) -> Sequence[str]:
    """Return lines about a pair for --dry-run."""
    said = [exchange.response for exchange in pair.exchanges]
    shown = repr(said[0]) if len(said) == 1 else f"{len(said)} responses, the first {said[0]!r}"
    return [
        f"first pair ({len(sequence.token_ids)} tokens, {sum(sequence.loss_mask)} of them trained): "
        f"{pair.prompt.text[-200:]!r} -> {shown}"
    ]


PAIR_AGGREGATION = "sequence_mean_token_sum"  # every pair counts the same


class ComparisonEncoder:
    """Turns comparisons into pairs of sequences: the prompt with the chosen answer, and with the rejected one."""

    def __init__(self, cfg: PreferencesConfig, inputs: Inputs) -> None:
        self._encode = PairEncoder.of(cfg, inputs)
        self._scores = cfg.pairs.trains_reward_model

    def __call__(self, pair: TrainingPair, index: int) -> list[TrainingSequence]:
        """Return the pair's two sequences, the chosen one first, which has the margin as its reward.

        Their loss tokens are the answers'; for a reward model only the last token, at which it scores. Raises UserError
        when an answer is too long.
        """
        chosen, rejected = self._encode(pair, index), self._encode(replace(pair, exchanges=pair.rejected), index)
        pair_of_sequences = [replace(chosen, reward=pair.margin), replace(rejected, segment=1)]
        if not self._scores:
            return pair_of_sequences
        return [replace(x, loss_mask=(False,) * (len(x.token_ids) - 1) + (True,)) for x in pair_of_sequences]


def comparison_limit(cfg: PreferencesConfig, encode: PairEncoder) -> AnswerLimit:
    """Return the limit on the two answers of a row."""

    def num_tokens(row: Row) -> int:
        return max(encode.num_tokens(answer) for answer in (row.exchanges, row.rejected))

    most, setting = cfg.pairs.max_response_tokens, "pairs.max_response_tokens"
    return AnswerLimit(num_tokens, most, setting, holds_for_held_out=True)


def read_comparisons(run: Launch[PreferencesConfig], encode: ComparisonEncoder, step: int) -> list[TrainingSequence]:
    """Return the sequences of this rank's pairs of a step; every rank that trains must call this, and all raise what
    one does."""
    first, rank = run.plan.first_rollout(run.world.rank), run.world.rank
    with raise_on_all_ranks(run.meshes.training):
        pairs = run.inputs.prompts.pairs(run.plan.first_prompt(step, rank), run.plan.prompts_per_rank)
        return [sequence for index, pair in enumerate(pairs, start=first) for sequence in encode(pair, index)]


class HeldOutPairs:
    """The metrics of the held-out pairs, by the weights that the policy has when it is called."""

    def __init__(
        self,
        run: Launch[PreferencesConfig],
        learner: Learner,
        reference: FrozenModel | None,
        encode: ComparisonEncoder,
        images: Images,
    ) -> None:
        """Every rank that trains must make one, and all raise what one does."""
        self._learner, self._reference, self._meshes, self._images = learner, reference, run.meshes, images
        self._pairs = _HeldOutPairs(run)
        with raise_on_all_ranks(run.meshes.training):
            sequences = [sequence for index, pair in self._pairs.mine for sequence in encode(pair, index)]
        self._batch = build_batch(sequences, run.plan, run.meshes, aggregation=PAIR_AGGREGATION)

    def __call__(self) -> Evaluation:
        """Return this rank's part of the metrics, means over pairs; every rank that trains must call this."""
        self._pairs.restore_images()
        batch, _, _ = self._images.encode_batch(self._batch)
        batch = add_reference(batch, self._reference, self._meshes.training)
        metrics = measure(self._learner, batch.mini_batches, self._meshes)
        named = {name.replace("pairs/", "eval/"): value for name, value in metrics.items() if name.startswith("pairs/")}
        return Evaluation(named)


def describe_comparison(pair: TrainingPair, sequences: Sequence[TrainingSequence]) -> Sequence[str]:
    """Return lines about a pair for --dry-run."""
    answers = (pair.exchanges[-1].response, pair.rejected[-1].response)
    lengths = [len(sequence.token_ids) - len(pair.prompt.token_ids) for sequence in sequences]
    shown = [f"{text[:200]!r} ({length} tokens)" for text, length in zip(answers, lengths, strict=True)]
    return [f"first pair: {pair.prompt.text[-200:]!r} -> {shown[0]} is preferred to {shown[1]}"]
