"""The objective of pairs: the losses of `algo.preferences`, of two neighbouring sequences of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algo.preferences import PairLoss, bradley_terry_loss, preference_loss
from spmdrl.algo.sequences import sequence_sums
from spmdrl.config import PairsConfig
from spmdrl.learn.objective import Objective, ObjectiveFunction
from spmdrl.model.policy import TokenLogprobs
from spmdrl.types import PADDING_INDEX, MicroBatch


class Pairs:
    """The P pairs of a micro-batch: a chosen sequence and the rejected one after it, then perhaps padding."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._cu_seqlens = micro_batch.cu_seqlens
        self._num_sequences = sum(index != PADDING_INDEX for index in micro_batch.sequence_index)
        assert micro_batch.sequence_segment[: self._num_sequences] == (0, 1) * (self._num_sequences // 2), (
            "pairs were divided"
        )
        self._num_tokens = len(micro_batch.token_ids)
        # A pair's weight, and its metrics, are at the last token of its chosen answer, which is trained.
        self._places = micro_batch.cu_seqlens.long()[1 : self._num_sequences + 1 : 2] - 1

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum values [T] over the chosen sequences [P] and over the rejected ones [P]."""
        sums = sequence_sums(values, self._cu_seqlens)[: self._num_sequences]
        return sums[0::2], sums[1::2]

    def at(self, values: Tensor) -> Tensor:
        """Return the values [P] of per-token values [T] that each pair has."""
        return values[self._places]

    def per_token(self, values: Tensor) -> Tensor:
        """Return values [P] as per-token values [T], where `is_place` is True; 0 elsewhere."""
        return values.new_zeros(self._num_tokens).index_copy(0, self._places, values)

    @property
    def is_place(self) -> Tensor:
        """[T] bool, True at one token for each pair."""
        return self.per_token(torch.ones(len(self._places), dtype=torch.bool, device=self._places.device))


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """The loss by which a policy learns to prefer the chosen answers, against a frozen reference."""

    cfg: PairsConfig

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        cfg, mask, reference = self.cfg, micro_batch.loss_mask, micro_batch.ref_logprobs
        assert reference is not None, "the batch has not been through the reference"
        pairs = Pairs(micro_batch)
        logprobs = torch.where(mask, outputs.logprobs, 0.0)
        policy = pairs.sums(logprobs)
        result = preference_loss(
            policy,
            pairs.sums(torch.where(mask, reference, 0.0)),
            pairs.sums(mask.to(logprobs.dtype)),
            kind=cfg.preference,
            beta=cfg.beta,
            label_smoothing=cfg.label_smoothing,
            length_normalized=cfg.divides_by_length,
            sft_coef=cfg.sft_coef,
        )
        chosen, rejected = (values.detach() for values in policy)
        return _objective(
            result,
            pairs,
            micro_batch,
            means={"update/entropy_nats": outputs.entropy.detach()},
            metrics={"chosen_logprob_nats": chosen, "rejected_logprob_nats": rejected},
        )


@dataclass(frozen=True, slots=True)
class RankingObjective:
    """The loss by which a reward model learns to give the chosen answers the higher scores."""

    cfg: PairsConfig

    def __call__(self, scores: Tensor, micro_batch: MicroBatch) -> Objective:
        pairs = Pairs(micro_batch)
        margins = pairs.at(micro_batch.rewards).to(scores.dtype)
        result = bradley_terry_loss(pairs.sums(scores), margins, center_coef=self.cfg.center_coef)
        return _objective(result, pairs, micro_batch, means={"pairs/score": scores.detach()}, metrics={})


def pair_objective(cfg: PairsConfig) -> ObjectiveFunction:
    """Return the objective that `pairs.loss` names."""
    return RankingObjective(cfg) if cfg.trains_reward_model else PreferenceObjective(cfg)


def _objective(
    result: PairLoss, pairs: Pairs, micro_batch: MicroBatch, *, means: dict[str, Tensor], metrics: dict[str, Tensor]
) -> Objective:
    """Weigh the losses of pairs; `metrics` are further values of each pair, [P]."""
    chosen, rejected = (values.detach() for values in result.rewards)
    margin, where = chosen - rejected, pairs.is_place
    of_pairs = {
        "loss": result.per_pair.detach(),
        "accuracy": (margin.sign() + 1.0) / 2.0,  # a tie is half right
        "margin": margin,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        **metrics,
    }
    return Objective(
        loss_sum=(result.per_pair * pairs.at(micro_batch.loss_weights)).sum(),
        means=means,
        elsewhere={f"pairs/{name}": (pairs.per_token(values), where) for name, values in of_pairs.items()},
    )
