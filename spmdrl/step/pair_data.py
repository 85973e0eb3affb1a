"""The data of a step on pairs: each pair as two sequences with the same prompt, and the metrics of those held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdrl.config import PreferencesConfig
from spmdrl.data.sources import Row
from spmdrl.data.stream import AnswerLimit, TrainingPair
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.learn.learner import Learner
from spmdrl.learn.update import measure
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch
from spmdrl.step.evaluate import Evaluation
from spmdrl.step.images import Images
from spmdrl.step.logprobs import Forward, add_columns
from spmdrl.step.sft_data import PairEncoder
from spmdrl.types import Sequence as TrainingSequence

AGGREGATION = "sequence_mean_token_sum"  # every pair counts the same


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
        pair_of_sequences = [replace(chosen, reward=pair.margin), replace(rejected, part=1)]
        return [_only_end(one) for one in pair_of_sequences] if self._scores else pair_of_sequences


def _only_end(sequence: TrainingSequence) -> TrainingSequence:
    return replace(sequence, loss_mask=(False,) * (len(sequence.token_ids) - 1) + (True,))


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
        forwards: Mapping[str, Forward],
        encode: ComparisonEncoder,
        images: Images,
    ) -> None:
        """`forwards` compute the columns of the reference. Every rank that trains must make one, and all raise what one
        does."""
        self._learner, self._forwards, self._meshes, self._images = learner, forwards, run.meshes, images
        everything, num_ranks = list(enumerate(run.inputs.held_out_pairs)), run.meshes.training.size()
        mine = everything[run.world.rank :: num_ranks]
        with raise_on_all_ranks(run.meshes.training):
            sequences = [sequence for index, pair in mine for sequence in encode(pair, index)]
        self._pairs, self._restore = [pair for _, pair in mine], run.inputs.held_out.restore_pair
        self._batch = build_batch(sequences, run.plan, run.meshes, aggregation=AGGREGATION)

    def __call__(self) -> Evaluation:
        """Return this rank's part of the metrics, means over pairs; every rank that trains must call this."""
        with raise_on_all_ranks(self._meshes.training):
            for pair in self._pairs:
                self._restore(pair)
        batch, _, _ = self._images.fill(self._batch)
        batch = add_columns(batch, self._forwards, self._meshes.training)
        metrics = measure(self._learner, batch.mini_batches, self._meshes)
        named = {name.replace("pairs/", "eval/"): value for name, value in metrics.items() if name.startswith("pairs/")}
        return Evaluation(named)


def describe_comparison(pair: TrainingPair, sequences: Sequence[TrainingSequence]) -> Sequence[str]:
    """Return lines about a pair for --dry-run."""
    answers = (pair.exchanges[-1].response, pair.rejected[-1].response)
    lengths = [len(sequence.token_ids) - len(pair.prompt.token_ids) for sequence in sequences]
    shown = [f"{text[:200]!r} ({length} tokens)" for text, length in zip(answers, lengths, strict=True)]
    return [f"first pair: {pair.prompt.text[-200:]!r} -> {shown[0]} is preferred to {shown[1]}"]
