"""Corrections of the mismatch equal their slow twins in loss and gradient, wherever a batch is cut, and each has one
effect on the denominator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from spmdrl.algo.correction import bounded_weights, log_weights, off_policy_sequences, vetoed
from spmdrl.algo.formula import POLICY_LOSSES
from spmdrl.algo.metrics import EffectiveFraction, Metrics, TokenValue, Worst, fetched, merge_all
from spmdrl.config import CorrectionConfig, LossConfig, MismatchLimits
from spmdrl.config.plan import needs_old_logprobs
from spmdrl.learn.correction import effective_fraction, exceeded, importance_weights, worst_of
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.policy import TokenLogprobs
from spmdrl.report.samples import worst_token_rows
from spmdrl.types import MicroBatch
from tests.helpers import oracle
from tests.helpers.corrections import (
    CLIP,
    CORRECTIONS,
    CUTS,
    LEVELS,
    MAX_RESPONSE_TOKENS,
    MODES,
    batch,
    corrected,
    random_columns,
)


def log_weights_of(micro_batch: MicroBatch, level: str) -> Tensor:
    mismatch = micro_batch.old_logprobs - micro_batch.rollout_logprobs
    return log_weights(mismatch, micro_batch.loss_mask, micro_batch.cu_seqlens, level=level)


def loss_and_gradient(
    parts: list[tuple[MicroBatch, Tensor]], correction: CorrectionConfig
) -> tuple[float, list[float], Metrics]:
    """Summed over micro-batches; the gradient is that of the loss tokens, in their order."""
    objective = PolicyObjective(LossConfig(clip_low=CLIP, clip_high=CLIP), correction=correction)
    total, slopes, effective = 0.0, [], []
    for micro_batch, now in parts:
        logprobs = now.clone().requires_grad_()
        result = objective(TokenLogprobs(logprobs, torch.zeros_like(logprobs)), micro_batch)
        result.loss_sum.backward()
        total += float(result.loss_sum.detach())
        slopes += logprobs.grad[micro_batch.loss_mask].tolist()
        assert (logprobs.grad[~micro_batch.loss_mask] == 0).all()
        parts = {k: effective_fraction(*w) for k, w in result.weights.items()}
        effective += fetched([parts])
    return total, slopes, merge_all(effective)


def slow(sequences: list[dict[str, Tensor]], settings: dict[str, Any], aggregation: str) -> Iterator[Any]:
    """The oracle's loss, then its slope at each loss token."""
    kind = settings.get("kind", "none")
    options = {
        "level": settings.get("level", "token"),
        "mode": {"none": "none", "tis": "truncate", "icepop": "mask"}.get(kind) or settings["mode"],
        "low": settings.get("low", 0.5),
        "high": settings.get("high", 5.0 if kind == "icepop" else 2.0),
        "batch_normalize": settings.get("batch_normalize", False),
        "reject": settings.get("reject", "none"),
        "reject_low": settings.get("reject_low", 0.5),
        "reject_high": settings.get("reject_high", 2.0),
        "veto_below": settings.get("veto_below"),
        "opsm_delta_nats": settings.get("opsm_delta_nats"),
        "aggregation": aggregation,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "clip": CLIP,
    }
    rows = [
        [list(row) for row in zip(*(s[name][s["mask"]].tolist() for name in ("n", "o", "b", "A")), strict=True)]
        for s in sequences
    ]
    yield oracle.corrected_loss(rows, **options)
    for row in itertools.chain(*rows):

        def at(now: float, row: list[float] = row) -> float:
            before, row[0] = row[0], now
            value = oracle.corrected_loss(rows, **options)
            row[0] = before
            return value

        yield oracle.slope(at, row[0])


@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_loss_and_gradient_equal_the_oracle_wherever_the_batch_is_cut(settings: dict[str, Any]) -> None:
    sequences, correction = random_columns(), CorrectionConfig(**settings)
    plain = next(slow(sequences, {}, "token_mean"))
    expected, *slopes = slow(sequences, settings, "token_mean")
    assert (abs(expected - plain) > 1e-3) == bool(settings), "a correction that changes nothing proves nothing"
    for cut in CUTS:
        micro_batches, nows = zip(*batch(sequences, cut), strict=True)
        parts = list(zip(corrected(list(micro_batches), correction), nows, strict=True))
        loss, gradient, _ = loss_and_gradient(parts, correction)
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx(slopes, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
@pytest.mark.parametrize("settings", [CORRECTIONS[-2], {"reject": "token"}, {"kind": "icepop"}], ids=str)
def test_every_aggregation_has_the_denominator_of_what_is_left(settings: dict[str, Any], aggregation: str) -> None:
    sequences, correction = random_columns(3), CorrectionConfig(**settings)
    expected = next(slow(sequences, settings, aggregation))
    micro_batches, nows = zip(*batch(sequences, [3, 5], aggregation), strict=True)
    parts = list(zip(corrected(list(micro_batches), correction, aggregation), nows, strict=True))
    assert loss_and_gradient(parts, correction)[0] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("settings", [c for c in CORRECTIONS[:14]], ids=str)
def test_without_a_pass_the_forward_itself_says_what_old_is(settings: dict[str, Any]) -> None:
    """With one update o is n without its gradient: the same loss and gradient as with a column that holds n."""
    sequences, correction = random_columns(1), CorrectionConfig(**settings)
    sequences = [sequence | {"o": sequence["n"]} for sequence in sequences]
    with_column = batch(sequences, [3, 5])
    without = [(replace(m, old_logprobs=None), now) for m, now in with_column]
    assert loss_and_gradient(without, correction) == loss_and_gradient(with_column, correction)


DENOMINATORS = [
    # settings, what the mean loss of 4 tokens with loss 1 each becomes when one of them has the weight e^2
    ({"kind": "tis"}, (3 + 2) / 4),
    ({"kind": "mis", "mode": "clip"}, (3 + 2) / 4),
    ({"kind": "mis", "mode": "mask"}, 3 / 4),
    ({"kind": "icepop"}, 3 / 4),
    ({"kind": "mis", "mode": "mask", "level": "sequence"}, 2 / 4),
    ({"opsm_delta_nats": 0.5}, 2 / 4),
    ({"reject": "token"}, 3 / 3),
    ({"reject": "sequence"}, 2 / 2),
    ({"reject": "geometric"}, 2 / 2),
    ({"veto_below": 0.5}, 2 / 2),
    ({"kind": "tis", "batch_normalize": True}, 1.0),
]


@pytest.mark.parametrize(("settings", "expected"), DENOMINATORS, ids=str)
def test_weights_keep_the_denominator_and_rejections_leave_it(settings: dict[str, Any], expected: float) -> None:
    """The table of docs/agreement.md."""
    off = -2.0 if {"veto_below", "opsm_delta_nats"} & settings.keys() else 2.0
    column = {"A": -torch.ones(2), "b": torch.full((2,), -3.0), "mask": torch.ones(2, dtype=torch.bool)}
    old = [torch.tensor([-3.0, -3.0 + off]), torch.tensor([-3.0, -3.0])]
    parts = batch([column | {"o": o.double(), "n": o.double()} for o in old], [2])
    correction = CorrectionConfig(**settings)
    micro_batch = corrected([parts[0][0]], correction)[0]
    assert loss_and_gradient([(micro_batch, parts[0][1])], correction)[0] == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "expected"), DENOMINATORS, ids=str)
def test_what_needs_the_whole_batch_takes_a_pass_and_nothing_else(settings: dict[str, Any], expected: float) -> None:
    takes_a_pass = bool({"reject", "veto_below", "batch_normalize"} & settings.keys())
    loss, correction, engines = LossConfig(), CorrectionConfig(**settings), CorrectionConfig(old="rollout")
    assert needs_old_logprobs(loss, correction, num_updates=1) == takes_a_pass
    assert needs_old_logprobs(loss, correction, num_updates=1, penalizes_divergence=True)
    assert needs_old_logprobs(LossConfig(kind="clip_cov"), correction, num_updates=1)
    assert needs_old_logprobs(loss, correction, num_updates=2)
    assert not needs_old_logprobs(LossConfig(kind="clip_cov"), engines, num_updates=2, penalizes_divergence=True)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_weights_multiply_every_policy_loss(kind: str) -> None:
    """Where o - b is the same on all tokens, so is the weight, and it factors out of loss and gradient."""
    (micro_batch, now), *_ = batch(random_columns(), [8])
    cov_selected = torch.arange(len(now)) % 3 == 0
    shifted = micro_batch.old_logprobs - math.log(1.5)
    micro_batch = replace(micro_batch, rollout_logprobs=shifted, cov_selected=cov_selected)
    outcomes = []
    for correction in (CorrectionConfig(), CorrectionConfig(kind="tis")):
        objective = PolicyObjective(LossConfig(kind=kind, updates_per_step=2), correction=correction)
        logprobs = now.clone().requires_grad_()
        loss = objective(TokenLogprobs(logprobs, torch.zeros_like(logprobs)), micro_batch).loss_sum
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, logprobs)))
    for plain, weighed in zip(*outcomes, strict=True):
        torch.testing.assert_close(weighed, 1.5 * plain)
    assert outcomes[0][1].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_normalised_weights_have_the_mean_one(level: str, mode: str) -> None:
    correction = CorrectionConfig(kind="mis", mode=mode, level=level, batch_normalize=True, reject="token")
    micro_batches = corrected([m for m, _ in batch(random_columns(), [3, 5])], correction)
    weights = []
    for m in micro_batches:
        of_tokens = importance_weights(m.old_logprobs - m.rollout_logprobs, m.old_logprobs, m, correction).weights
        for start, end in itertools.pairwise(m.cu_seqlens.tolist()):
            kept = of_tokens[start:end][m.loss_weights[start:end] != 0]
            weights += kept.tolist() if level == "token" else kept[:1].tolist()
    assert len(weights) > 4
    assert sum(weights) / len(weights) == pytest.approx(1.0, rel=1e-6)


def test_a_batch_of_which_nothing_is_left_has_no_loss() -> None:
    sequences = [sequence | {"b": sequence["o"] + 9} for sequence in random_columns()]
    for settings in ({"reject": "token"}, {"kind": "mis", "mode": "mask", "batch_normalize": True}):
        correction = CorrectionConfig(**settings)
        micro_batches, nows = zip(*batch(sequences, [3, 5]), strict=True)
        parts = list(zip(corrected(list(micro_batches), correction), nows, strict=True))
        loss, gradient, effective = loss_and_gradient(parts, correction)
        assert loss == 0.0 and set(map(abs, gradient)) == {0.0}
        assert effective["correction/effective_fraction"].value() == 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mismatch_at_a_loss_token_that_is_no_number_is_not_hidden(level: str, mode: str) -> None:
    cu_seqlens, mask = torch.tensor([0, 2, 4]), torch.tensor([True, True, True, False])
    log_weight = log_weights(torch.tensor([0.0, math.nan, 0.1, math.nan]), mask, cu_seqlens, level=level)
    weights = bounded_weights(log_weight, mode=mode, low=0.5, high=2.0)
    assert weights[1].isnan() and weights[2:].isfinite().all()


def test_long_responses_do_not_overflow() -> None:
    mask, cu_seqlens = torch.ones(4000, dtype=torch.bool), torch.tensor([0, 2000, 4000])
    mismatch = torch.cat([torch.full((2000,), 3.0), torch.full((2000,), -3.0)])
    raw = log_weights(mismatch, mask, cu_seqlens, level="sequence")
    assert set(bounded_weights(raw, mode="clip", low=0.5, high=2.0).tolist()) == {0.5, 2.0}
    assert set(bounded_weights(raw, mode="mask", low=0.5, high=2.0).tolist()) == {0.0}


def test_no_sequence_depends_on_its_neighbours() -> None:
    """Bitwise: what a response weighs is the same in every micro-batch."""
    sequences = random_columns(size=3.0)
    for level in ("sequence", "geometric"):
        parts = [[m for m, _ in batch(sequences, cut)] for cut in CUTS[:3]]
        whole, *others = (torch.cat([log_weights_of(m, level) for m in ms]) for ms in parts)
        assert all(torch.equal(whole, other) for other in others)


def test_veto_and_opsm_take_whole_sequences() -> None:
    cu_seqlens, mask = torch.tensor([0, 3, 5, 7]), torch.tensor([False, True, True, True, True, True, True])
    engine, trainer = torch.zeros(7), torch.tensor([-99.0, -0.1, -9.3, -0.1, -9.1, 0.0, 0.0])
    assert vetoed(trainer - engine, mask, cu_seqlens, below=1e-4).tolist() == [True] * 3 + [False] * 4
    advantages = torch.tensor([-9.0, 1.0, -0.5, -1.0, -1.0, -1.0, -1.0])  # of the first response the sum is positive
    masked = off_policy_sequences(trainer, engine, advantages, mask, cu_seqlens, delta_nats=4.5)
    assert masked.tolist() == [False] * 3 + [True] * 2 + [False] * 2


def test_weights_carry_no_gradient() -> None:
    micro_batch, now = batch(random_columns(), [8])[0]
    logprobs = now.requires_grad_()
    correction = CorrectionConfig(kind="tis", level="sequence", opsm_delta_nats=0.0)
    assert not importance_weights(
        logprobs - micro_batch.rollout_logprobs, logprobs, micro_batch, correction
    ).weights.requires_grad


def test_effective_fraction_and_worst_tokens_do_not_depend_on_where_a_batch_is_cut() -> None:
    sequences = random_columns(5)
    mismatches = [float(s) for row in sequences for s in (row["o"] - row["b"])[row["mask"]]]
    for cut in CUTS:
        worst, effective = Worst(()), EffectiveFraction(0.0, 0.0, 0.0)
        for micro_batch, _ in batch(sequences, cut):
            mismatch = micro_batch.old_logprobs - micro_batch.rollout_logprobs
            parts = {
                "worst": worst_of(mismatch, micro_batch),
                "effective": effective_fraction(mismatch.exp(), micro_batch.loss_mask),
            }
            (found,) = fetched([parts])
            worst, effective = worst.merge(found["worst"]), effective.merge(found["effective"])
        assert effective.value() == pytest.approx(oracle.effective_fraction([math.exp(s) for s in mismatches]))
        assert [t.value for t in worst.tokens] == sorted(mismatches, key=abs, reverse=True)[:10]
        assert worst.value() == max(map(abs, mismatches))
        for token in worst.tokens:
            row = sequences[token.sequence_index]
            assert float((row["o"] - row["b"])[token.position]) == token.value
            assert float(row["b"][token.position]) == token.rollout_logprob
            assert len(token.token_ids) == token.position + 1  # these sequences are shorter than the context


def test_where_engine_and_trainer_agree_there_is_no_worst_token() -> None:
    micro_batch, _ = batch(random_columns(), [8])[0]
    nowhere = worst_of(torch.where(micro_batch.loss_mask, 0.0, math.nan), micro_batch)
    worst = fetched([{"worst": nowhere}])[0]["worst"]
    assert worst.value() == 0.0 and worst_token_rows(worst.tokens, None) == []  # type: ignore[arg-type]


def test_worst_tokens_are_written_with_their_text() -> None:
    class Letters:
        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(chr(token_id) for token_id in token_ids)

    token = TokenValue(-0.5, sequence_index=7, position=3, token_ids=(97, 98, 99), rollout_logprob=-1.0)
    (row,) = worst_token_rows([token], Letters())  # type: ignore[arg-type]
    assert row == {
        "sequence_index": 7,
        "position": 3,
        "token_id": 99,
        "token": "c",
        "context": "ab",
        "mismatch_nats": -0.5,
        "old_logprob_nats": -1.5,
        "rollout_logprob_nats": -1.0,
    }


def test_limits_are_exceeded_upwards_except_the_effective_sample_size() -> None:
    limits = MismatchLimits(max_abs_nats=1.0, effective_fraction=0.5)
    fine = {"mismatch/max_abs_nats": 1.0, "mismatch/effective_fraction": 0.5, "mismatch/k3_nats": 9.0}
    assert exceeded(fine, limits) == []
    assert exceeded(fine | {"mismatch/max_abs_nats": 1.5}, limits) == ["mismatch/max_abs_nats is 1.5, above 1"]
    assert exceeded(fine | {"mismatch/effective_fraction": 0.25}, limits) == [
        "mismatch/effective_fraction is 0.25, below 0.5"
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"low": 0.5}, 'low has no meaning for kind = "none"'),
        ({"batch_normalize": True}, 'batch_normalize has no meaning for kind = "none"'),
        ({"kind": "mis"}, "needs a mode"),
        ({"kind": "tis", "mode": "clip"}, 'mode has no meaning for kind = "tis"'),
        ({"kind": "tis", "low": 0.5}, "no lower bound"),
        ({"kind": "mis", "mode": "truncate", "low": 0.5}, "no lower bound"),
        ({"kind": "icepop", "level": "sequence"}, 'set kind = "mis" with mode = "mask"'),
        ({"kind": "tis", "high": 0.9}, "set it to 1 or more"),
        ({"kind": "icepop", "low": 1.1}, "set it to 1 or less"),
        ({"reject_low": 0.5}, 'reject_low has no meaning for reject = "none"'),
        ({"old": "rollout", "kind": "tis"}, "no mismatch left for kind to correct"),
        ({"old": "rollout", "veto_below": 1e-4}, "no mismatch left for veto_below to correct"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match="(?s)" + sentence.replace("(", r"\(")):
        CorrectionConfig(**settings)
