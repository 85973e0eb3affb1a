"""Rewarded rollouts become this rank's packed micro-batches: exchange, balance, pack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.aggregation import token_weights
from spmdrl.algo.metrics import Mean, Metrics, Total, merge_all
from spmdrl.algo.packing import (
    balance,
    fill_fraction,
    idle_fraction,
    imbalance,
    num_micro_batches,
    pack,
    padding_tokens,
    sequence_costs,
)
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import failing_together
from spmdrl.dist.exchange import SequenceSize, exchange, gather_sizes
from spmdrl.dist.mesh import Meshes
from spmdrl.types import FILLING, MicroBatch, MiniBatch, RewardedRollout, Rollout, Sequence, TrainingDiverged


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's share of a step. Each phase between packing and the updates takes one and returns one."""

    # One for each of the step's updates, as many micro-batches in each on every rank; without any where the step has
    # fewer prompt groups than updates.
    mini_batches: list[MiniBatch]
    metrics: Metrics
    # The advantage of every sequence of the step, on every rank, by index; the mean of its tokens' where they differ.
    advantages: Mapping[int, float] = field(default_factory=dict)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all mini-batches, in order."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]

    def with_micro_batches(self, micro_batches: Iterable[MicroBatch]) -> Batch:
        """Return the batch with these instead of its `micro_batches`, in the same mini-batches."""
        in_order = iter(micro_batches)
        return replace(self, mini_batches=[[next(in_order) for _ in mini_batch] for mini_batch in self.mini_batches])


def to_sequences(rewarded: Iterable[RewardedRollout], mesh: DeviceMesh) -> list[Sequence]:
    """Convert this rank's rollouts; every rank of the mesh must call this, and all raise what one of them raises."""
    with failing_together(mesh):
        return [to_sequence(one) for one in rewarded]


def to_sequence(rewarded: RewardedRollout) -> Sequence:
    """Prompt and response as training sees them: only the response is trained."""
    prompt, response = rewarded.rollout.prompt.token_ids, rewarded.rollout.response
    _require_finite_logprobs(rewarded.rollout)
    return Sequence(
        index=rewarded.index,
        token_ids=prompt + response.token_ids,
        loss_mask=(False,) * len(prompt) + (True,) * len(response.token_ids),
        rollout_logprobs=(0.0,) * len(prompt) + response.logprobs,
        reward=rewarded.outcome.reward,
        baseline_reward=rewarded.baseline.reward if rewarded.baseline else math.nan,
    )


def _require_finite_logprobs(rollout: Rollout) -> None:
    # Checked here, not in the loss: with clipping, an infinite ratio can give a finite loss.
    if not all(map(math.isfinite, rollout.response.logprobs)):
        raise TrainingDiverged(
            f"the engine (version {rollout.response.oldest_version}) reported a log-probability that is not finite "
            f"for sample {rollout.sample_index} of prompt {rollout.prompt.prompt_id}"
        )


def build_batch(sequences: list[Sequence], plan: Plan, meshes: Meshes, *, aggregation: str) -> Batch:
    """Give every rank its micro-batches of every mini-batch of the step: ranks of a share the same.

    The result depends on the step's sequences and not on which rank sampled them: every rank knows all sizes and
    computes the same plan. Each `MicroBatch.loss_weights` already carries the global denominator. A step may have fewer
    prompt groups than planned: whole groups are cut into mini-batches as evenly as they can be.
    """
    sizes = gather_sizes(sequences, meshes.training)
    me = meshes.data.get_local_rank()
    shares: list[list[list[SequenceSize]]] = []  # of each mini-batch, of each place on the data mesh
    for mini_batch in _mini_batches(sizes, plan):
        parts = balance(_costs(mini_batch, plan), meshes.data.size())
        shares.append([[mini_batch[i] for i in part] for part in parts])
    goes_to = {size.index: place for share in shares for place, part in enumerate(share) for size in part}
    received = exchange(sequences, sizes, goes_to, meshes.training, ranks_per_share=meshes.ranks_per_share)
    mine = {sequence.index: sequence for sequence in received}

    mini_batches: list[MiniBatch] = []
    metrics: list[Metrics] = [{"batch/loss_tokens": Total(0.0)}]
    for share in shares:
        if not any(share):
            mini_batches.append([])
            continue
        bins = _micro_batches(share, plan, multiple=meshes.model.cp.size())
        weights = _loss_weights([size for part in share for size in part], plan, aggregation)
        mini_batches.append(
            [
                lay_end_to_end([mine[size.index] for size in sizes], weights, multiple=meshes.model.cp.size())
                for sizes in bins[me]
            ]
        )
        metrics.append(_pack_metrics(bins, plan, place=me))
    return Batch(mini_batches, merge_all(metrics) if meshes.speaks_for_data else {})


def _mini_batches(sizes: list[SequenceSize], plan: Plan) -> list[list[SequenceSize]]:
    """The step's sequences, in their global order, by mini-batch; some may be empty."""
    num_groups, rest = divmod(len(sizes), plan.rollouts_per_prompt)
    assert not rest, f"{len(sizes)} sequences are no whole groups of {plan.rollouts_per_prompt}"
    edges = [
        number * num_groups // plan.updates_per_step * plan.rollouts_per_prompt
        for number in range(plan.updates_per_step + 1)
    ]
    return [sizes[start:end] for start, end in itertools.pairwise(edges)]


def _costs(sizes: list[SequenceSize], plan: Plan) -> list[int]:
    return sequence_costs(
        [size.num_tokens for size in sizes], linear=plan.cost_per_token, quadratic=plan.cost_per_squared_token
    )


def _micro_batches(share: list[list[SequenceSize]], plan: Plan, *, multiple: int) -> list[list[list[SequenceSize]]]:
    """The sequences of each micro-batch of each place on the data mesh: as many everywhere, so some may be empty."""
    limits: dict[str, int | None] = {
        "max_tokens": plan.max_tokens_per_micro_batch,
        "sequences_per_micro_batch": plan.sequences_per_micro_batch,
    }
    lengths = [[size.num_tokens for size in part] for part in share]
    most = max(num_micro_batches(of_part, **limits, multiple=multiple) for of_part in lengths)
    return [
        [
            [part[i] for i in indices]
            for indices in pack(of_part, **limits, min_bins=most, multiple=multiple, costs=_costs(part, plan))
        ]
        for part, of_part in zip(share, lengths, strict=True)
    ]


def _loss_weights(sizes: list[SequenceSize], plan: Plan, aggregation: str) -> dict[int, float]:
    """The weight of one loss token of each sequence in the mini-batch's loss, by sequence index."""
    counts = [size.num_loss_tokens for size in sizes]
    weights = token_weights(
        counts,
        aggregation=aggregation,
        global_loss_tokens=sum(counts),
        global_sequences=sum(count > 0 for count in counts),
        max_response_tokens=plan.max_response_tokens,
    )
    return {size.index: weight for size, weight in zip(sizes, weights, strict=True)}


def lay_end_to_end(sequences: list[Sequence], weights: dict[int, float], *, multiple: int = 1) -> MicroBatch:
    """Make one micro-batch of these sequences; `weights` are those of their loss tokens, by sequence index.

    One more sequence, which is not trained on, fills it up to a multiple of `multiple` tokens. Without any sequence the
    micro-batch is all filling: every rank must run the forward.
    """
    filling = (
        padding_tokens(sum(len(sequence.token_ids) for sequence in sequences), multiple) if sequences else multiple
    )
    if filling:
        empty = Sequence(
            index=FILLING,
            token_ids=(0,) * filling,
            loss_mask=(False,) * filling,
            rollout_logprobs=(0.0,) * filling,
            reward=0.0,
        )
        sequences = [*sequences, empty]
    seqlens = [len(sequence.token_ids) for sequence in sequences]
    loss_mask = torch.tensor([masked for sequence in sequences for masked in sequence.loss_mask])

    def per_token(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(seqlens))

    weight_of_each = [weights.get(sequence.index, 0.0) for sequence in sequences]

    return MicroBatch(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence.token_ids]),
        positions=torch.cat([torch.arange(n) for n in seqlens]),
        cu_seqlens=torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32),
        loss_mask=loss_mask,
        loss_weights=per_token(weight_of_each, torch.float32) * loss_mask,
        rollout_logprobs=torch.tensor([x for sequence in sequences for x in sequence.rollout_logprobs]),
        rewards=per_token([sequence.reward for sequence in sequences], torch.float64),
        baseline_rewards=per_token([sequence.baseline_reward for sequence in sequences], torch.float64),
        sequence_index=tuple(sequence.index for sequence in sequences),
    )


def _pack_metrics(bins: list[list[list[SequenceSize]]], plan: Plan, *, place: int) -> Metrics:
    """Packing metrics: global values are computed alike on every rank, values of one place are reported by that one."""
    tokens = [sum(size.num_tokens for size in sizes) for sizes in bins[place]]
    costs = [[sum(_costs(sizes, plan)) for sizes in of_place] for of_place in bins]
    num_micro_batches = float(len(tokens))
    return {
        "batch/fill_fraction": Mean(
            num_micro_batches * fill_fraction(tokens, plan.max_tokens_per_micro_batch or max(1, *tokens)),
            num_micro_batches,
        ),
        "batch/loss_tokens": Total(float(sum(size.num_loss_tokens for sizes in bins[place] for size in sizes))),
        "batch/micro_batches": Mean(num_micro_batches, 1.0),
        "batch/rank_imbalance": Mean(imbalance([sum(of_place) for of_place in costs]), 1.0),
        "batch/idle_fraction": Mean(idle_fraction(costs), 1.0),
    }
