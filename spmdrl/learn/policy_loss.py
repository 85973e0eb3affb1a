"""The policy loss that `loss.kind` names: one of `algo.policy_losses`, or a function of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.loss import PolicyLoss
from spmdrl.config import LossConfig
from spmdrl.types import MicroBatch, UserError

PolicyLossFunction = Callable[[Tensor, MicroBatch], PolicyLoss]  # of logprobs [T], which carry grad


def policy_loss_function(cfg: LossConfig) -> PolicyLossFunction:
    """The loss with its settings. Raises UserError when it cannot be found."""
    if cfg.formula is None:
        return partial(_users_loss, _import(cfg.kind), cfg.kind, cfg.settings)
    return partial(_known_loss, partial(cfg.formula.function, **cfg.settings), cfg.formula.needs)


def _known_loss(
    function: Callable[..., PolicyLoss], needs: tuple[str, ...], logprobs: Tensor, micro_batch: MicroBatch
) -> PolicyLoss:
    return function(
        logprobs,
        micro_batch.old_logprobs,
        micro_batch.advantages,
        micro_batch.loss_mask,
        **{name: getattr(micro_batch, name) for name in needs},
    )


def _users_loss(
    function: Callable[..., Any], name: str, params: dict[str, Any], logprobs: Tensor, micro_batch: MicroBatch
) -> PolicyLoss:
    """What the function sees is 0 outside loss_mask, and what it says there is not used."""
    mask, old = micro_batch.loss_mask, micro_batch.old_logprobs
    assert micro_batch.advantages is not None
    columns = {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach() if old is None else old,
        "advantages": micro_batch.advantages,
    }
    masked = {column: torch.where(mask, values, 0.0) for column, values in columns.items()}
    per_token = function(**masked, loss_mask=mask, cu_seqlens=micro_batch.cu_seqlens, **params)
    if not isinstance(per_token, Tensor) or per_token.shape != mask.shape:
        found = list(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
        raise UserError(f'loss.kind = "{name}" returned {found}; return the loss of each token, {list(mask.shape)}')
    ratio = (masked["logprobs"] - masked["old_logprobs"]).detach().exp()
    return PolicyLoss(torch.where(mask, per_token, 0.0), torch.zeros_like(mask), ratio)


def check_policy_loss(cfg: LossConfig) -> None:
    """Try a loss of the user's on a few tokens. Raises UserError when it cannot be found or does not work."""
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    values = torch.linspace(-1.0, 1.0, 5)
    micro_batch = MicroBatch(
        token_ids=torch.arange(5),
        positions=torch.tensor([0, 1, 0, 1, 2]),
        cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, False, True, True]),
        loss_weights=torch.ones(5),
        rewards=values.double(),
        baseline_rewards=values.double(),
        advantages=values,
        rollout_logprobs=values - 2.0,
        old_logprobs=values - 2.0,
        chosen=values > 0,
    )
    loss = policy_loss_function(cfg)
    try:
        per_token = loss(logprobs, micro_batch).per_token
        (gradient,) = torch.autograd.grad(per_token.sum(), logprobs)
    except UserError:
        raise
    except Exception as error:  # the function is the user's: calling it can raise anything
        raise UserError(f'loss.kind = "{cfg.kind}" does not work: {type(error).__name__}: {error}') from error
    if not (per_token.isfinite().all() and gradient.isfinite().all()):
        raise UserError(f'loss.kind = "{cfg.kind}" gives a loss or a gradient that is not finite on an easy example')


def _import(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's: importing it can raise anything
        raise UserError(f'loss.kind = "{name}" cannot be imported: {type(error).__name__}: {error}') from error
    if not callable(found):
        raise UserError(f'loss.kind = "{name}" is not a function')
    return found
