"""The losses equal their slow twins in value and gradient, wherever they are cut, whatever lies outside the mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spmdrl.algo.losses import PolicyLoss, mismatch, ppo, sft_loss, weighted_sum
from tests.helpers import oracle

CLIPS = [
    {"clip_low": low, "clip_high": high, "dual_clip": dual}
    for low, high in ((0.2, 0.2), (0.2, 0.28), (0.5, 0.0))
    for dual in (None, 1.5, 3.0)
]


@dataclass(frozen=True)
class Tokens:
    logprobs: Tensor  # [T] float64
    old_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor

    def __getitem__(self, part: slice) -> Tokens:
        old = None if self.old_logprobs is None else self.old_logprobs[part]
        return Tokens(self.logprobs[part], old, self.advantages[part], self.loss_mask[part])


def random_tokens(num_tokens: int, seed: int = 0, drift: float = 0.8) -> Tokens:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(num_tokens, generator=draw, dtype=torch.float64) * 3
    return Tokens(
        logprobs=old + drift * torch.randn(num_tokens, generator=draw, dtype=torch.float64),
        old_logprobs=old,
        advantages=torch.randn(num_tokens, generator=draw, dtype=torch.float64),
        loss_mask=torch.rand(num_tokens, generator=draw) < 0.7,
    )


def policy_loss(tokens: Tokens, **clips: float | None) -> PolicyLoss:
    return ppo(tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.loss_mask, **clips)


def with_grad(tokens: Tokens) -> Tokens:
    return replace(tokens, logprobs=tokens.logprobs.clone().requires_grad_())


@pytest.mark.parametrize("clips", CLIPS, ids=str)
def test_equal_to_the_oracle_with_its_gradient(clips: dict[str, float | None]) -> None:
    tokens = with_grad(random_tokens(300))
    fast = policy_loss(tokens, **clips)
    fast.per_token.sum().backward()
    columns = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.loss_mask)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    losses, clipped = zip(*(oracle.policy_loss(*row, **clips) for row in rows), strict=True)
    slopes = [oracle.slope(lambda x, row=row: oracle.policy_loss(x, *row[1:], **clips)[0], row[0]) for row in rows]
    torch.testing.assert_close(fast.per_token.detach(), torch.tensor(losses, dtype=torch.float64))
    assert fast.clipped.tolist() == list(clipped)
    assert any(clipped) and not all(clipped)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert torch.equal(tokens.logprobs.grad == 0, fast.clipped | ~tokens.loss_mask)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped"),
    [
        (1.0, 2.0, None, -2.0, False),
        (1.5, 2.0, None, -2.56, True),  # up and good: bound by 1 + 0.28
        (0.5, 2.0, None, -1.0, False),  # down and good: free
        (1.5, -2.0, None, 3.0, False),  # up and bad: free
        (0.5, -2.0, None, 1.6, True),  # down and bad: bound by 1 - 0.2
        (9.0, -2.0, None, 18.0, False),
        (9.0, -2.0, 3.0, 6.0, True),  # bound by 3
        (9.0, 2.0, 3.0, -2.56, True),  # the dual clip is for negative advantages only
    ],
)
def test_worked_examples(ratio: float, advantage: float, dual_clip: float | None, loss: float, clipped: bool) -> None:
    row = Tokens(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), torch.tensor([True]))
    result = policy_loss(row, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    assert float(result.per_token) == pytest.approx(loss)
    assert bool(result.clipped) is clipped
    assert float(result.ratio) == pytest.approx(ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_every_ratio_is_exactly_one(dtype: torch.dtype) -> None:
    tokens = replace(random_tokens(500), old_logprobs=None)
    logprobs = tokens.logprobs.to(dtype).requires_grad_()
    tokens = replace(tokens, logprobs=logprobs, advantages=tokens.advantages.to(dtype))
    result = policy_loss(tokens, clip_low=0.0, clip_high=0.0, dual_clip=1.5)
    result.per_token.sum().backward()
    expected = torch.where(tokens.loss_mask, -tokens.advantages, 0.0)
    assert torch.equal(result.ratio, torch.ones(500, dtype=dtype))
    assert not result.clipped.any()
    assert torch.equal(result.per_token, expected)
    assert torch.equal(logprobs.grad, expected)  # the policy gradient, -A for each nat


def test_on_policy_equals_old_logprobs_that_are_equal() -> None:
    tokens = with_grad(random_tokens(100))
    implicit = with_grad(replace(tokens, old_logprobs=None, logprobs=tokens.logprobs.detach()))
    explicit = replace(tokens, old_logprobs=tokens.logprobs.detach())
    losses = [policy_loss(t, clip_low=0.2, clip_high=0.2, dual_clip=None).per_token for t in (implicit, explicit)]
    for loss in losses:
        loss.sum().backward()
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(implicit.logprobs.grad, explicit.logprobs.grad)


@pytest.mark.parametrize("cut", [0, 1, 11, 63, 64])
@pytest.mark.parametrize("clips", CLIPS[:2], ids=str)
def test_loss_sum_does_not_depend_on_where_it_is_cut(cut: int, clips: dict[str, float | None]) -> None:
    tokens = random_tokens(64)
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1))

    def loss(part: slice) -> Tensor:
        return weighted_sum(policy_loss(tokens[part], **clips).per_token, weights[part])

    torch.testing.assert_close(loss(slice(0, cut)) + loss(slice(cut, 64)), loss(slice(0, 64)))


def test_each_token_stands_alone() -> None:
    tokens = random_tokens(50)
    whole = policy_loss(tokens, **CLIPS[1])
    singles = [policy_loss(tokens[i : i + 1], **CLIPS[1]) for i in range(50)]
    for name in ("per_token", "clipped", "ratio"):
        assert torch.equal(torch.cat([getattr(single, name) for single in singles]), getattr(whole, name))


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("clips", CLIPS[:2], ids=str)
def test_what_lies_outside_the_mask_is_never_seen(column: str, garbage: float, clips: dict[str, float | None]) -> None:
    clean = random_tokens(40)
    dirty = replace(clean, **{column: torch.where(clean.loss_mask, getattr(clean, column), garbage)})
    clean, dirty = with_grad(clean), with_grad(dirty)
    losses = [policy_loss(tokens, **clips) for tokens in (clean, dirty)]
    for loss in losses:
        loss.per_token.sum().backward()
    for name in ("per_token", "clipped", "ratio"):
        assert torch.equal(getattr(losses[0], name), getattr(losses[1], name))
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)
    assert (losses[0].per_token[~clean.loss_mask] == 0).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_an_infinite_ratio_at_a_loss_token_is_not_hidden(advantage: float, dual_clip: float | None) -> None:
    tokens = Tokens(torch.tensor([200.0]), torch.tensor([0.0]), torch.tensor([advantage]), torch.tensor([True]))
    tokens = with_grad(tokens)
    policy_loss(tokens, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip).per_token.sum().backward()
    assert not tokens.logprobs.grad.isfinite().any()


def test_ratio_carries_no_grad_and_loss_does() -> None:
    result = policy_loss(with_grad(random_tokens(5)), **CLIPS[0])
    assert result.per_token.requires_grad and not result.ratio.requires_grad


def test_sft_loss_is_the_mean_cross_entropy_of_the_responses() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 11, generator=draw, requires_grad=True)
    targets = torch.randint(0, 11, (30,), generator=draw)
    mask = torch.rand(30, generator=draw) < 0.6
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ours = weighted_sum(sft_loss(logprobs, mask), mask / mask.sum())
    torchs = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, torchs)))


@pytest.mark.parametrize("garbage", [-math.inf, math.nan])
def test_sft_loss_does_not_see_prompts(garbage: float) -> None:
    mask = torch.tensor([False, True, True, False])
    logprobs = torch.tensor([garbage, -0.5, -2.0, garbage], requires_grad=True)
    loss = sft_loss(logprobs, mask)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.5, 2.0, 0.0]
    assert logprobs.grad.tolist() == [0.0, -1.0, -1.0, 0.0]


def test_weighted_sum_is_float32() -> None:
    per_token = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)
    weights = torch.tensor([0.1, 0.01, 0.001])
    total = weighted_sum(per_token, weights)
    assert total.dtype == torch.float32 and total.shape == ()
    assert float(total) == pytest.approx(0.124, rel=1e-6)


def test_mismatch_equals_the_oracle() -> None:
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(200, generator=draw, dtype=torch.float64) * 5
    rollout = old + 0.3 * torch.randn(200, generator=draw, dtype=torch.float64)
    mask = torch.rand(200, generator=draw) < 0.5
    drift = mismatch(old, torch.where(mask, rollout, -math.inf), mask)
    rows = list(zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True))
    for name, slow in (
        ("mismatch", [o - b if m else 0.0 for o, b, m in rows]),
        # KL(engine || trainer): the engine sampled, so it stands where the policy stands in KL(policy || reference).
        ("k1", [oracle.kl(b, o, "k1") if m else 0.0 for o, b, m in rows]),
        ("k3", [oracle.kl(b, o, "k3") if m else 0.0 for o, b, m in rows]),
    ):
        torch.testing.assert_close(
            getattr(drift, name), torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


def test_no_mismatch_is_exactly_zero() -> None:
    logprobs = -torch.rand(100, generator=torch.Generator().manual_seed(0)) * 9
    drift = mismatch(logprobs, logprobs.clone(), torch.ones(100, dtype=torch.bool))
    for value in (drift.mismatch, drift.k1, drift.k3):
        assert (value == 0).all()
