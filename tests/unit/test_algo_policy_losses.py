"""Every policy loss of the table equals its slow twin in value and gradient, packed in any way, whatever is masked."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from typing import Any

import pytest
import torch

from spmdrl.algo.formula import POLICY_LOSSES
from spmdrl.algo.losses import covariances, highest, num_selected, random_priorities, selected_tokens
from spmdrl.algo.sequences import sequence_means
from spmdrl.config import LossConfig
from spmdrl.learn.objective import COLUMNS, PolicyObjective, policy_loss_function, policy_loss_problems
from spmdrl.model.policy import TokenLogprobs
from spmdrl.preflight.inputs import _loss_problems
from spmdrl.types import MicroBatch
from tests.helpers import oracle
from tests.helpers.groups import groups_config
from tests.helpers.policy_losses import CASES, random_micro_batch, with_gradient


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_the_oracle_with_its_gradient(case: dict[str, Any]) -> None:
    cfg, (logprobs, whole) = LossConfig(**case), random_micro_batch()
    loss, gradient = with_gradient(case, logprobs, whole)
    assert whole.old_logprobs is not None and whole.cov_selected is not None
    for a, b in itertools.pairwise(whole.cu_seqlens.tolist()):
        mask = whole.loss_mask[a:b]
        now, old, advantages = (x[a:b][mask].tolist() for x in (logprobs, whole.old_logprobs, whole.advantages))
        selected = whole.cov_selected[a:b][mask].tolist()

        def total(i: int, x: float, now=now, old=old, advantages=advantages, selected=selected) -> float:
            moved = [*now[:i], x, *now[i + 1 :]]
            return math.fsum(
                oracle.sequence_losses(cfg.kind, moved, old, advantages, chosen=selected, held=now, **cfg.settings)
            )

        slow = oracle.sequence_losses(cfg.kind, now, old, advantages, chosen=selected, **cfg.settings)
        slopes = [oracle.slope(lambda x, i=i: total(i, x), now[i]) for i in range(len(now))]
        for fast, expected in ((loss.per_token, slow), (gradient, slopes)):
            torch.testing.assert_close(
                fast[a:b][mask].detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
            )
    assert (loss.per_token[~whole.loss_mask] == 0).all() and (gradient[~whole.loss_mask] == 0).all()
    assert not loss.clipped[~whole.loss_mask].any() and (loss.ratio[~whole.loss_mask] == 1).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_that_bind_are_counted(case: dict[str, Any]) -> None:
    loss, _ = with_gradient(case, *random_micro_batch(drift=2.0))
    assert bool(loss.clipped.any()) is (case["kind"] not in ("sapo", "kl_cov"))
    assert not loss.clipped[~random_micro_batch()[1].loss_mask].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_has_the_same_loss_in_any_company(case: dict[str, Any]) -> None:
    logprobs, whole = random_micro_batch()
    loss, gradient = with_gradient(case, logprobs, whole)
    for a, b in itertools.pairwise(whole.cu_seqlens.tolist()):
        columns = {name: column[a:b] for name, column in whole.columns.items() if name != "cu_seqlens"}
        alone = MicroBatch(cu_seqlens=torch.tensor([0, b - a], dtype=torch.int32), **columns)
        part, slope = with_gradient(case, logprobs[a:b], alone)
        # Vectorised functions round differently by a bit at other places in a tensor.
        torch.testing.assert_close(part.per_token, loss.per_token[a:b], rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(slope, gradient[a:b], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_what_lies_outside_the_mask_is_never_seen(kind: str, garbage: float) -> None:
    case = {"kind": kind, "updates_per_step": 2}
    logprobs, whole = random_micro_batch()
    clean, slope = with_gradient(case, logprobs, whole)
    columns = {
        name: torch.where(whole.loss_mask, getattr(whole, name), garbage)
        for name in ("old_logprobs", "rollout_logprobs", "advantages")
    }
    dirty = torch.where(whole.loss_mask, logprobs, garbage)
    for logs, micro_batch in ((dirty, whole), (logprobs, whole.with_columns(columns))):
        loss, gradient = with_gradient(case, logs, micro_batch)
        for name in ("per_token", "clipped", "ratio"):
            assert torch.equal(getattr(loss, name), getattr(clean, name))
        assert torch.equal(gradient, slope)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("explicit", [False, True])
def test_on_policy_every_loss_has_the_policy_gradient(kind: str, explicit: bool) -> None:
    logprobs, whole = random_micro_batch()
    whole = dataclasses.replace(whole, old_logprobs=logprobs if explicit else None, rollout_logprobs=logprobs)
    loss, gradient = with_gradient({"kind": kind, "updates_per_step": 2}, logprobs, whole)
    trained = whole.loss_mask & ~whole.cov_selected if kind == "clip_cov" else whole.loss_mask  # type: ignore[operator]
    torch.testing.assert_close(gradient, torch.where(trained, -whole.advantages, 0.0), rtol=1e-12, atol=1e-12)
    assert (loss.ratio == 1).all()


@pytest.mark.parametrize("kind", [name for name, kind in POLICY_LOSSES.items() if kind.per_sequence])
def test_weights_of_tokens_act_as_their_mean_on_losses_of_sequences(kind: str) -> None:
    """This is why corrections at token level are refused with them."""
    logprobs, whole = random_micro_batch()
    weights = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = []
    for factors in (weights, sequence_means(weights, whole.loss_mask, whole.cu_seqlens)):
        now = logprobs.clone().requires_grad_()
        per_token = policy_loss_function(LossConfig(kind=kind))(now, -logprobs, whole).per_token
        gradients.append(torch.autograd.grad((factors * per_token).sum(), now)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert gradients[0].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_table_knows_each_function(name: str) -> None:
    kind = POLICY_LOSSES[name]
    assert {*kind.needs, *kind.settings} == set(inspect.signature(kind.function).parameters)
    assert len({"old_logprobs", "rollout_logprobs"} & set(kind.needs)) == 1
    others = {"logprobs", "advantages", "loss_mask", "cu_seqlens", "cov_selected"}
    assert set(kind.needs) <= {"old_logprobs", "rollout_logprobs", *others}
    assert (kind.prioritise is not None) is ("cov_selected" in kind.needs) is ("cov_fraction" in kind.cov_selection)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_a_trust_region_bounds_probabilities_not_ratios(kind: str) -> None:
    """A rare token may become ten times as likely; a likely one may not lose much; back to the engine it always may."""
    sampled = torch.tensor([1e-4, 0.99, 0.2, 0.9, 1.0, 0.5])
    now = torch.tensor([1e-3, 0.70, 0.9, 0.2, 1.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0])
    logprobs = now.log().requires_grad_()
    function, mask = POLICY_LOSSES[kind].function, torch.ones(6, dtype=torch.bool)
    loss = function(logprobs, sampled.log(), advantages, mask, **POLICY_LOSSES[kind].settings)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    assert loss.clipped.tolist() == [False, True, False, False, False, True]
    torch.testing.assert_close(gradient, torch.where(loss.clipped, 0.0, -advantages * now / sampled))
    torch.testing.assert_close(loss.ratio, now / sampled)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("cuts", [[], [7], [0, 1, 60, 400]])
def test_the_choice_over_parts_is_that_over_the_whole(kind: str, cuts: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    num_tokens, formula = 500, POLICY_LOSSES[kind]
    logprobs, advantages = torch.randn(2, num_tokens, generator=draw, dtype=torch.float64)
    seeds, positions = torch.randint(0, 2**62, (2, num_tokens), generator=draw)
    means = {"mean_logprob": float(logprobs.mean()), "mean_advantage": float(advantages.mean())}
    covariance = covariances(logprobs, advantages, **means)
    settings = {"cov_low": 0.1, "cov_high": 1.0} if kind == "clip_cov" else {}
    assert formula.prioritise is not None
    priorities = formula.prioritise(covariance, seeds, positions, **settings)
    parts = [priorities[a:b] for a, b in itertools.pairwise([0, *cuts, num_tokens])]
    count = num_selected(num_tokens, 0.05)
    threshold = float(highest(torch.cat([highest(part, count) for part in parts]), count)[-1])
    found = torch.cat([selected_tokens(part, threshold) for part in parts])
    assert count == 25 and found.tolist() == oracle.chosen(priorities.tolist(), count)
    if kind == "clip_cov":
        assert ((covariance[found] > 0.1) & (covariance[found] < 1.0)).all()
    else:
        assert covariance[found].min() > covariance[~found].max()


def test_fewer_candidates_than_wanted_are_all_chosen() -> None:
    covariance = torch.tensor([0.5, 2.0, 9.0, 3.0], dtype=torch.float64)
    places = torch.arange(4)
    priorities = random_priorities(covariance, places, places, cov_low=1.0, cov_high=5.0)
    assert selected_tokens(priorities, float(highest(priorities, 3)[-1])).tolist() == [False, True, False, True]


def plain(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, scale=1.0):
    return -scale * (logprobs - old_logprobs).exp() * advantages


def two_arguments(logprobs, entropy):
    return logprobs * entropy.exp(), {"surprise": -logprobs}


def all_columns(**columns):
    assert set(columns) == {*COLUMNS} - {"ref_logprobs"}
    return -columns["logprobs"] * columns["advantages"]


def of_the_reference(logprobs, ref_logprobs):
    return logprobs - ref_logprobs


def raises(logprobs):
    raise KeyError("nothing")


def by_position(logprobs, /):
    return logprobs


def a_sum(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens):
    return logprobs.sum()


def infinite(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens):
    return logprobs / 0.0


not_a_function = 3


def test_a_function_of_the_users_is_a_loss() -> None:
    case = {"kind": f"{__name__}:plain", "params": {"scale": 2.0}}
    assert not list(policy_loss_problems(groups_config(loss=case)))
    logprobs, whole = random_micro_batch()
    loss, gradient = with_gradient(case, torch.where(whole.loss_mask, logprobs, math.nan), whole)
    expected, slope = with_gradient({"kind": "ppo", "clip_low": 1.0, "clip_high": 1e9}, logprobs, whole)
    torch.testing.assert_close(loss.per_token, 2 * expected.per_token, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, 2 * slope, rtol=1e-12, atol=0)
    assert torch.equal(loss.ratio, expected.ratio)


tried: list[int] = []


def counted(logprobs, advantages):
    tried.append(1)
    return -logprobs * advantages


def test_a_function_that_several_algorithms_have_is_tried_once() -> None:
    source = {"kind": "jsonl", "path": "a"}
    own = {"advantage": {"estimator": "rloo"}}
    data = {"sources": [{**source, "task": "a"}, {**source, "task": "b", "algorithm": own}]}
    assert list(_loss_problems(groups_config(loss={"kind": f"{__name__}:counted"}, data=data))) == []
    assert len(tried) == 1


def test_a_function_of_the_users_asks_for_columns_and_returns_metrics() -> None:
    logprobs, whole = random_micro_batch()
    loss, gradient = with_gradient({"kind": f"{__name__}:two_arguments"}, logprobs, whole)
    assert list(policy_loss_problems(groups_config(loss={"kind": f"{__name__}:two_arguments"}))) == []
    assert list(policy_loss_problems(groups_config(loss={"kind": f"{__name__}:all_columns"}))) == []
    torch.testing.assert_close(gradient, torch.where(whole.loss_mask, (-logprobs).exp(), 0.0))
    (surprise,) = loss.means.values()
    torch.testing.assert_close(surprise, torch.where(whole.loss_mask, -logprobs, 0.0).float())
    with_reference = groups_config(loss={"kind": f"{__name__}:of_the_reference", "kl_coef": 0.1})
    assert list(policy_loss_problems(with_reference)) == []
    scores = TokenLogprobs(logprobs, -logprobs)
    objective = PolicyObjective(LossConfig(kind=f"{__name__}:two_arguments"))
    assert torch.equal(objective(scores, whole).means["loss/surprise"], surprise)


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("no.such.module:f", {}, "there is no module no"),
        ("no_such_file.py:f", {}, "there is no file no_such_file.py"),
        (f"{__name__}:plian", {}, "has no function or class plian; did you mean plain?"),
        (f"{__name__}:not_a_function", {}, "is neither a function nor a class, but int"),
        (f"{__name__}:of_the_reference", {}, "asks for ref_logprobs, which is neither a column nor in params; columns"),
        (f"{__name__}:plain", {"scael": 1.0}, "params has scael, but plain takes no such argument"),
        (f"{__name__}:plain", {"advantages": 1.0}, "params has advantages, which is the name of a column"),
        (f"{__name__}:by_position", {}, "takes logprobs by position only"),
        (f"{__name__}:raises", {}, "does not work: KeyError: 'nothing'"),
        (f"{__name__}:a_sum", {}, "returned [] for the loss; return a number for each token, [5]"),
        (f"{__name__}:infinite", {}, "not finite"),
    ],
)
def test_what_is_no_loss_is_refused_before_the_run(name: str, params: dict[str, Any], sentence: str) -> None:
    (problem,) = policy_loss_problems(groups_config(loss={"kind": name, "params": params}))
    assert problem.startswith(f'loss.kind = "{name}"') and sentence in problem
