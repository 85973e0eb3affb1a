"""Every policy loss, and a micro-batch to compute it on."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.formula import POLICY_LOSSES
from spmdrl.algo.losses import PolicyLoss
from spmdrl.config import LossConfig
from spmdrl.learn.objective import policy_loss_function
from spmdrl.types import MicroBatch

LENGTHS = [1, 6, 3, 20, 1, 9, 2]
MASKED = (2, 4)  # sequences without any loss token
CASES: list[dict[str, Any]] = [
    *({"kind": name, "updates_per_step": 2} for name in POLICY_LOSSES),
    {"kind": "ppo", "dual_clip": 1.5},
    {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    {"kind": "gmpo", "clip_low": 0.1, "clip_high": 0.3},
    {"kind": "sapo", "tau_positive": 3.0, "tau_negative": 0.5},
]


def random_micro_batch(drift: float = 0.5) -> tuple[Tensor, MicroBatch]:
    """(logprobs [T] float64, the rest); advantages are alike within a sequence."""
    draw = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    mask = torch.rand(num_tokens, generator=draw) < 0.7
    mask[0] = True
    for sequence in MASKED:
        mask[cu_seqlens[sequence] : cu_seqlens[sequence + 1]] = False
    old = -torch.rand(num_tokens, generator=draw, dtype=torch.float64) * 3
    advantages = torch.randn(len(LENGTHS), generator=draw, dtype=torch.float64)
    cov_selected = torch.rand(num_tokens, generator=draw) < 0.3
    return old + drift * torch.randn(num_tokens, generator=draw, dtype=torch.float64), MicroBatch(
        token_ids=torch.arange(num_tokens),
        positions=torch.cat([torch.arange(n) for n in LENGTHS]),
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        loss_weights=torch.ones(num_tokens),
        rewards=advantages.repeat_interleave(torch.tensor(LENGTHS)),
        baseline_rewards=torch.zeros(num_tokens),
        advantages=advantages.repeat_interleave(torch.tensor(LENGTHS)),
        rollout_logprobs=old,
        old_logprobs=old,
        cov_selected=cov_selected,
    )


def with_gradient(case: dict[str, Any], logprobs: Tensor, micro_batch: MicroBatch) -> tuple[PolicyLoss, Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    loss = policy_loss_function(LossConfig(**case))(logprobs, -logprobs.detach(), micro_batch)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    return loss, gradient
