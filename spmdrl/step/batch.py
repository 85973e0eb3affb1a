"""Turn rewarded rollouts into this rank's packed micro-batches: exchange, balance, pack.

step            every rank knows index, lengths and reward of all its sequences (`SequenceInfo`)
  mini-batch    the rollouts behind one optimizer step, with all their sequences: whole prompt groups
    unit        what stays in one micro-batch: `step/units.py`
    share       the sequences of one place on the data mesh; the cp x tp ranks at that place get the same ones
      micro-batch    sequences laid end to end within the token budget; the same number in every share
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.losses import token_weights
from spmdrl.algo.metrics import Mean, Metrics, Total, merge_all
from spmdrl.algo.packing import fill_fraction, idle_fraction, imbalance, padding_tokens
from spmdrl.algo.prefix_tree import compared_tokens, prefix_tree
from spmdrl.config import Algorithm, DistillConfig
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.dist.exchange import SequenceInfo, exchange, gather_infos, with_block_hashes
from spmdrl.dist.mesh import Meshes
from spmdrl.step.hints import NO_LESSONS, Label, feedback_of
from spmdrl.step.rewards import turn_spans
from spmdrl.step.units import Packed, pack_over_places
from spmdrl.types import (
    NO_TEACHER,
    PADDING_INDEX,
    MicroBatch,
    MiniBatch,
    RewardedRollout,
    Rollout,
    Sequence,
    TrainingDiverged,
    Trajectory,
    UserError,
)

T = TypeVar("T")
NO_ALGORITHMS: Mapping[str, int] = MappingProxyType({})  # of data sources: all rollouts have the run's


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's share of a step. Each phase between packing and the updates takes one and returns one."""

    # One for each update of the step. Each has the same number of micro-batches on every rank; none where the step has
    # fewer prompt groups than updates.
    mini_batches: list[MiniBatch]
    metrics: Metrics
    # The advantage of every rollout of the step, on every rank, by index; its tokens' mean where they differ.
    advantages: Mapping[int, float] = field(default_factory=dict)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all mini-batches, in order."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]

    def with_micro_batches(self, micro_batches: Iterable[MicroBatch]) -> Batch:
        """Return the batch with these instead of its `micro_batches`, in the same mini-batches."""
        in_order = iter(micro_batches)
        return replace(self, mini_batches=[[next(in_order) for _ in mini_batch] for mini_batch in self.mini_batches])


def to_sequences(
    rewarded: Iterable[RewardedRollout],
    mesh: DeviceMesh,
    label: Label = NO_LESSONS,
    *,
    turn_weight: float = 0.0,
    needs_routes: bool = False,
    needs_candidates: bool = False,
    algorithms: Mapping[str, int] = NO_ALGORITHMS,
) -> list[Sequence]:
    """Convert this rank's rollouts; every rank of the mesh must call this.

    `turn_weight` is what the rewards that an environment gives for turns count in a rollout's reward, `label` gives
    the place of a rollout's teacher, and what that reads, and `algorithms` that of its algorithm, by its task; others
    have the first. Sequences have routes where they are needed, and candidates where they were reported. Raises
    TrainingDiverged on all ranks when an engine has reported a log-probability that is not finite to one, and UserError
    when routes or candidates are missing that are needed.
    """
    with raise_on_all_ranks(mesh):
        return [
            replace(sequence, algorithm=algorithms.get(one.rollout.prompt.task, 0))
            for one in rewarded
            for sequence in _sequences_of(one, turn_weight, (needs_routes, needs_candidates), label)
        ]


def _routes_of(trajectory: Trajectory, rollout: Rollout) -> Tensor | None:
    """Return the routes of a trajectory's tokens; raises UserError when those of one are missing that its trained
    tokens depend on: all but the last."""
    routes, trained = trajectory.routes, trajectory.trained
    num_needed = len(trained) - 1 - trained[::-1].index(True) if True in trained and not rollout.is_masked else 0
    num_known = int((routes[:num_needed] >= 0).flatten(1).all(1).sum()) if routes is not None else 0
    if num_known < num_needed:
        raise UserError(
            f'correction.router_replay = "R3", but the engine has reported the routes of {num_known} of the '
            f"{num_needed} tokens before the last of sample {rollout.sample_index} of prompt "
            f'{rollout.prompt.prompt_id}; set it to "none", or to "R2" with several updates a step'
        )
    return routes


def _candidates_of(trajectory: Trajectory, rollout: Rollout, *, is_needed: bool) -> Tensor | None:
    """Return the candidates of a trajectory's tokens; raises UserError where a trained token has none that it needs."""
    candidates, trained = trajectory.candidates, torch.tensor(trajectory.trained)
    known = torch.zeros(len(trained), dtype=torch.bool) if candidates is None else (candidates >= 0).any(1)
    if is_needed and not rollout.is_masked and (num_unknown := int((trained & ~known).sum())):
        raise UserError(
            f"rollout.top_k is set, but the engine has not reported from which tokens {num_unknown} of the "
            f"{int(trained.sum())} tokens of sample {rollout.sample_index} of prompt {rollout.prompt.prompt_id} were "
            "sampled; remove top_k and top_p"
        )
    return candidates


def _sequences_of(
    rewarded: RewardedRollout,
    turn_weight: float,
    needs: tuple[bool, bool],
    label: Label,
) -> Iterator[Sequence]:
    """Yield a sequence for each trajectory of a rollout, of which only what the policy sampled is trained; it `needs`
    routes and candidates or not."""
    rollout, prior_turn_rewards, (needs_routes, needs_candidates) = rewarded.rollout, 0.0, needs
    teacher, hint = label(rollout.prompt, feedback_of(rollout))
    _require_finite_logprobs(rollout)
    if rewarded.outcome.failure is not None:  # the reward is 0, and so are its parts
        turn_weight = 0.0
    of_parts = zip(rollout.trajectories, turn_spans(rollout, turn_weight), strict=True)
    for segment, (trajectory, turns) in enumerate(of_parts):
        token_ids = trajectory.token_ids
        loss_mask = (False,) * len(token_ids) if rollout.is_masked else trajectory.trained
        logprobs = zip(trajectory.logprobs, loss_mask, strict=True)
        yield Sequence(
            index=rewarded.index,
            segment=segment,
            token_ids=token_ids,
            loss_mask=loss_mask,
            rollout_logprobs=tuple(logprob if is_trained else 0.0 for logprob, is_trained in logprobs),
            reward=rewarded.compared,
            baseline_reward=rewarded.baseline.reward if rewarded.baseline else math.nan,
            turns=turns,
            prior_turn_rewards=prior_turn_rewards,
            images=trajectory.images,
            teacher=teacher,
            hint=hint,
            routes=_routes_of(trajectory, rollout) if needs_routes else None,
            candidates=_candidates_of(trajectory, rollout, is_needed=needs_candidates),
        )
        prior_turn_rewards += sum(turn.reward for turn in turns)


def _require_finite_logprobs(rollout: Rollout) -> None:
    # Checked here, not in the loss: with clipping, an infinite ratio can give a finite loss.
    for response in rollout.responses:
        if not all(map(math.isfinite, response.logprobs)):
            raise TrainingDiverged(
                f"the engine (version {response.oldest_version}) reported a log-probability that is not finite "
                f"for sample {rollout.sample_index} of prompt {rollout.prompt.prompt_id}"
            )


def build_batch(
    sequences: list[Sequence],
    plan: Plan,
    meshes: Meshes,
    *,
    aggregation: str,
    environment_coef: float = 0.0,
    distill: DistillConfig | None = None,
    others: SequenceOf[Algorithm] = (),
) -> Batch:
    """Give every rank the micro-batches of its share of each mini-batch.

    The result depends on the step's sequences and not on which rank sampled them: every rank knows all infos and
    computes the same assignment. `MicroBatch.loss_weights` hold the denominator of the whole mini-batch, as long as no
    correction rejects tokens. A step may have fewer prompt groups than planned: they are divided into mini-batches as
    evenly as whole groups can be. With an `environment_coef`, tokens of environments have weights of their own, and
    with `distill` so have the tokens that teachers teach.

    These are about the sequences of the run's algorithm, and `others` are the algorithms of the rest; the tokens of
    each are counted by themselves.
    """
    weightings = [_Weighting(aggregation, environment_coef), *map(_Weighting.of, others)]
    place, multiple = meshes.data.get_local_rank(), meshes.model.cp.size()
    infos = gather_infos(sequences, meshes.training)
    if plan.shares_prefixes:
        infos = with_block_hashes(infos, sequences, meshes.training)
    packed = [
        pack_over_places(mini_batch, plan, num_places=meshes.data.size(), multiple=multiple)
        for mini_batch in _mini_batches(infos, plan)
    ]
    place_of = {info.place: number for one in packed for number, of_place in enumerate(one.infos) for info in of_place}
    received = exchange(sequences, infos, place_of, meshes.training, ranks_per_share=meshes.ranks_per_share)
    mine = {sequence.place: sequence for sequence in received}

    mini_batches: list[MiniBatch] = []
    metrics: list[Metrics] = [{"batch/loss_tokens": Total(0.0)}]  # also of a step without any group
    for one in packed:
        everything = [info for of_place in one.infos for info in of_place]
        if not everything:
            mini_batches.append([])
            continue
        weights, more = _weights(everything, plan, weightings, distill)
        in_bins = [[mine[info.place] for unit in in_bin for info in unit.infos] for in_bin in one.bins[place]]
        shares_prefixes = one.shares_prefixes
        mini_batches.append(
            [
                lay_end_to_end(in_bin, weights, multiple=multiple, shares_prefixes=shares_prefixes, **more)
                for in_bin in in_bins
            ]
        )
        metrics.append(_packing_metrics(one, plan, place=place))
        if distill is not None and distill.reads_feedback:
            taught = (float(info.teacher != NO_TEACHER) for info in one.infos[place])
            metrics.append({"distill/taught_fraction": Mean.of(taught)})
        if plan.shares_prefixes:
            metrics.append({"batch/shared_fraction": _shared_fraction(mini_batches[-1])})
    return Batch(mini_batches, merge_all(metrics) if meshes.is_data_leader else {})


def _mini_batches(infos: list[SequenceInfo], plan: Plan) -> list[list[SequenceInfo]]:
    """Divide the step's sequences, in their global order, into mini-batches of whole groups; some may be empty."""
    group_size, num_updates = plan.rollouts_per_prompt, plan.updates_per_step
    rollouts = [list(parts) for _, parts in itertools.groupby(infos, key=lambda info: info.index)]
    num_groups, rest = divmod(len(rollouts), group_size)
    assert not rest, f"{len(rollouts)} rollouts are not a whole number of groups of {group_size}"
    edges = [(number * num_groups // num_updates) * group_size for number in range(num_updates + 1)]
    return [list(itertools.chain(*rollouts[start:end])) for start, end in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class _Weighting:
    """How the tokens of an algorithm's sequences count in a mini-batch's loss."""

    aggregation: str
    environment_coef: float
    weight: float = 1.0

    @classmethod
    def of(cls, algorithm: Algorithm) -> _Weighting:
        return cls(**algorithm.loss.weighting, weight=algorithm.weight)


def _weights(
    infos: list[SequenceInfo], plan: Plan, weightings: list[_Weighting], distill: DistillConfig | None
) -> tuple[dict[int, float], dict[str, Any]]:
    """The weight of one loss token of each rollout in the mini-batch's loss, by the rollout's index, and the other
    weights that `lay_end_to_end` takes."""
    loss: dict[int, float] = {}
    environment: dict[int, float] = {}
    taught: dict[tuple[int, int], float] = {}
    for place, one in enumerate(weightings):
        own = [info for info in infos if info.algorithm == place]
        loss |= {index: one.weight * weight for index, weight in _loss_weights(own, plan, one.aggregation).items()}
        num_read = sum(info.num_read_tokens for info in own)
        environment[place] = one.weight * one.environment_coef / max(1, num_read)
        if distill is not None:
            factor = one.weight if distill.over_vocabulary else 1.0  # else in the advantage, which `loss` weighs
            weights = _distill_weights(own, distill)
            taught |= {(place, teacher): factor * weight for teacher, weight in weights.items()}
    return loss, {"environment": environment, "distill": None if distill is None else taught}


def _loss_weights(infos: list[SequenceInfo], plan: Plan, aggregation: str) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for info in infos:
        counts[info.index] += info.num_loss_tokens
    weights = token_weights(
        list(counts.values()),
        aggregation=aggregation,
        global_loss_tokens=counts.total(),
        global_rollouts=sum(count > 0 for count in counts.values()),
        max_response_tokens=plan.max_response_tokens,
    )
    return dict(zip(counts, weights, strict=True))


def _distill_weights(infos: list[SequenceInfo], distill: DistillConfig) -> dict[int, float]:
    """The weight of the divergence of one loss token in the mini-batch, by its teacher's place."""
    counts: Counter[int] = Counter()
    for info in infos:
        counts[info.teacher] += info.num_loss_tokens if distill.over_vocabulary else 0
    teachers = enumerate(distill.by_place)
    return {place: distill.coef * one.weight / max(1, counts[place]) for place, one in teachers}


_FILLING = -1 << 62  # compared, no token is like one that fills a micro-batch up


def lay_end_to_end(
    sequences: list[Sequence],
    weights: dict[int, float],
    *,
    multiple: int = 1,
    shares_prefixes: bool = False,
    environment: Mapping[int, float] = MappingProxyType({}),
    distill: Mapping[tuple[int, int], float] | None = None,
) -> MicroBatch:
    """Make one micro-batch of these sequences; `weights` are those of their loss tokens, by rollout index, and
    `environment` that of each token in their `observation_spans`, by algorithm; `distill` are those of the divergence
    of loss tokens, by algorithm and teacher.

    With `shares_prefixes` it has a tree, where any of them begin alike. One more sequence, which is not trained on,
    fills it up to a multiple of `multiple` tokens that are computed. Without any sequence the micro-batch is all
    filling: every rank must run the forward.
    """
    compared = [compared_tokens(sequence) for sequence in sequences] if shares_prefixes else []
    tree = prefix_tree(compared)
    num_computed = sum(len(sequence.token_ids) for sequence in sequences) if tree is None else len(tree.tokens)
    filling = padding_tokens(num_computed, multiple) if sequences else multiple
    if filling and tree is not None:
        tree = prefix_tree([*compared, (_FILLING,) * filling])
    if filling:
        padding = Sequence(
            index=PADDING_INDEX,
            token_ids=(0,) * filling,
            loss_mask=(False,) * filling,
            rollout_logprobs=(0.0,) * filling,
            reward=0.0,
        )
        sequences = [*sequences, padding]
    seqlens = [len(sequence.token_ids) for sequence in sequences]
    lengths, starts = torch.tensor(seqlens), [*itertools.accumulate(seqlens, initial=0)]
    loss_mask = torch.tensor(_joined(sequence.loss_mask for sequence in sequences))

    def per_token(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    if distill is not None:
        by_teacher = [distill.get((sequence.algorithm, sequence.teacher), 0.0) for sequence in sequences]
        distill_weights = per_token(by_teacher, torch.float32) * loss_mask
    weight_of_each = [weights.get(sequence.index, 0.0) for sequence in sequences]
    return MicroBatch(
        token_ids=torch.tensor(_joined(sequence.token_ids for sequence in sequences)),
        positions=torch.arange(starts[-1]) - per_token(starts[:-1], torch.int64),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        loss_mask=loss_mask,
        loss_weights=per_token(weight_of_each, torch.float32) * loss_mask,
        rollout_logprobs=torch.tensor(_joined(sequence.rollout_logprobs for sequence in sequences)),
        rewards=per_token([sequence.reward for sequence in sequences], torch.float64),
        baseline_rewards=per_token([sequence.baseline_reward for sequence in sequences], torch.float64),
        sequence_index=tuple(sequence.index for sequence in sequences),
        sequence_segment=tuple(sequence.segment for sequence in sequences),
        turns=tuple(sequence.turns for sequence in sequences),
        prior_turn_rewards=tuple(sequence.prior_turn_rewards for sequence in sequences),
        images=tuple(
            image.moved(start) for sequence, start in zip(sequences, starts, strict=False) for image in sequence.images
        ),
        after_refit=torch.cat([_after_refit(one) for one in sequences])
        if any(turn.newest for one in sequences for turn in one.turns)
        else None,
        environment_weights=torch.cat([_on_read_tokens(one, environment.get(one.algorithm, 0.0)) for one in sequences])
        if any(environment.values())
        else None,
        distill_weights=None if distill is None else distill_weights,
        sequence_teacher=tuple(sequence.teacher for sequence in sequences),
        sequence_algorithm=tuple(sequence.algorithm for sequence in sequences),
        hints=tuple(sequence.hint for sequence in sequences),
        routes=_laid_out([sequence.routes for sequence in sequences], seqlens),
        candidates=_laid_out([sequence.candidates for sequence in sequences], seqlens),
        tree=tree,
    )


def _laid_out(of_sequences: list[Tensor | None], seqlens: list[int]) -> Tensor | None:
    """Return the columns of sequences end to end, [T, ...], -1 for those without one; None where none has one."""
    known = [column for column in of_sequences if column is not None]
    if not known:
        return None
    lengths = zip(of_sequences, seqlens, strict=True)
    return torch.cat([known[0].new_full((n, *known[0].shape[1:]), -1) if x is None else x for x, n in lengths])


def _joined(parts: Iterable[tuple[T, ...]]) -> list[T]:
    return list(itertools.chain.from_iterable(parts))


def _on_read_tokens(sequence: Sequence, weight: float) -> torch.Tensor:
    weights = torch.zeros(len(sequence.token_ids))
    for start, end in sequence.observation_spans:
        weights[start:end] = weight
    return weights


def _after_refit(sequence: Sequence) -> torch.Tensor:
    found = torch.zeros(len(sequence.token_ids), dtype=torch.bool)
    for turn in sequence.turns:
        if turn.newest:
            found[turn.newest : turn.end] = True
    return found


def _packing_metrics(packed: Packed, plan: Plan, *, place: int) -> Metrics:
    """Metrics of a mini-batch: global values, alike on every rank, and those of this place's share."""
    tokens = [sum(unit.num_tokens for unit in in_bin) for in_bin in packed.bins[place]]
    num_micro_batches = float(len(tokens))
    return {
        "batch/fill_fraction": Mean(
            num_micro_batches * fill_fraction(tokens, plan.max_tokens_per_micro_batch or max(1, *tokens)),
            num_micro_batches,
        ),
        "batch/loss_tokens": Total(float(sum(info.num_loss_tokens for info in packed.infos[place]))),
        "batch/micro_batches": Mean(num_micro_batches, 1.0),
        "batch/rank_imbalance": Mean(imbalance([sum(of_place) for of_place in packed.costs]), 1.0),
        "batch/idle_fraction": Mean(idle_fraction(packed.costs), 1.0),
    }


def _shared_fraction(mini_batch: MiniBatch) -> Mean:
    """The share of a mini-batch's tokens that need not be computed, because another sequence has them."""
    total = sum(len(one.token_ids) for one in mini_batch)
    return Mean(float(total - sum(one.num_computed for one in mini_batch)), float(total))
