"""The policy loss that `loss.kind` names: one of `algo.policy_losses`, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.loss import PolicyLoss
from spmdrl.config import Config, LossConfig
from spmdrl.types import MicroBatch, TurnSpan, UserError
from spmdrl.user_code import argument_problems, call, load, with_metrics

# The loss of logprobs [T] and entropy [T], both with grad, and the other columns of their micro-batch.
PolicyLossFunction = Callable[[Tensor, Tensor, MicroBatch], PolicyLoss]

# The columns that a function of the user's can ask for; ref_logprobs where a reference model is loaded.
COLUMNS = (
    "logprobs",
    "entropy",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "advantages",
    "rewards",
    "loss_mask",
    "cu_seqlens",
    "positions",
    "token_ids",
)


def policy_loss_function(cfg: LossConfig) -> PolicyLossFunction:
    """The loss with its settings. Raises ValueError when it cannot be loaded."""
    if cfg.formula is None:
        return partial(_users_loss, load(cfg.kind), cfg)
    return partial(_known_loss, cfg.formula.function, cfg.settings)


def _known_loss(
    function: Callable[..., PolicyLoss],
    settings: dict[str, Any],
    logprobs: Tensor,
    entropy: Tensor,
    micro_batch: MicroBatch,
) -> PolicyLoss:
    # Without old_logprobs the policy is the one that sampled, and the function makes every ratio exactly 1.
    columns = {"logprobs": logprobs, "old_logprobs": None, **micro_batch.columns}
    return call(function, columns, settings)


def _users_loss(
    function: Callable[..., Any], cfg: LossConfig, logprobs: Tensor, entropy: Tensor, micro_batch: MicroBatch
) -> PolicyLoss:
    """Call a function of the user's, which sees 0 outside loss_mask and whose values there are not used."""
    mask = micro_batch.loss_mask
    whole = {"old_logprobs": logprobs.detach(), **micro_batch.columns, "logprobs": logprobs, "entropy": entropy}
    columns = {
        name: torch.where(mask, whole[name], 0.0) if whole[name].is_floating_point() else whole[name]
        for name in COLUMNS
        if name in whole
    }
    per_token, means = with_metrics(call(function, columns, cfg.params))
    for name, values in {"the loss": per_token, **means}.items():
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f'loss.kind = "{cfg.kind}" returned {found} for {name}; return a number for each token, '
                f"{list(mask.shape)}"
            )
    ratio = (columns["logprobs"] - columns["old_logprobs"]).detach().exp()
    means = {name: values.detach().float() for name, values in means.items()}
    return PolicyLoss(torch.where(mask, per_token, 0.0), torch.zeros_like(mask), ratio, means)


def policy_loss_problems(cfg: Config) -> Iterator[str]:
    """Try a loss of the user's on five tokens, and yield a sentence for what is wrong with it."""
    if not cfg.loss.is_users:
        return
    setting = f'loss.kind = "{cfg.loss.kind}"'
    try:
        function = load(cfg.loss.kind)
    except ValueError as error:
        yield f"{setting}: {error}"
        return
    columns = [name for name in COLUMNS if name != "ref_logprobs" or cfg.has_reference]
    if sentences := list(argument_problems(function, columns, cfg.loss.params)):
        yield from (f"{setting}: {sentence}" for sentence in sentences)
        return
    logprobs, entropy = torch.full((2, 5), -1.0, requires_grad=True)
    try:
        loss = _users_loss(function, cfg.loss, logprobs, -entropy, example_micro_batch(cfg)).per_token
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    except UserError as error:
        yield str(error)
    except Exception as error:  # the function is the user's: calling it can raise anything
        yield f"{setting} does not work: {type(error).__name__}: {error}"
    else:
        if not (loss.isfinite().all() and gradient.isfinite().all()):
            yield f"{setting} gives a loss or a gradient that is not finite on an easy example"


def example_micro_batch(cfg: Config) -> MicroBatch:
    """Five tokens of two sequences, to try functions of the user's on."""
    values = torch.linspace(-1.0, 1.0, 5)
    return MicroBatch(
        token_ids=torch.arange(5),
        positions=torch.tensor([0, 1, 0, 1, 2]),
        cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, False, True, True]),
        loss_weights=torch.ones(5),
        rollout_logprobs=values - 2.0,
        rewards=values.double(),
        baseline_rewards=values.double(),
        advantages=values,
        old_logprobs=values - 2.0,
        ref_logprobs=values - 2.0 if cfg.has_reference else None,
        sequence_index=(0, 1),
        sequence_part=(0, 0),
        turns=((TurnSpan(number=0, start=1, end=2),), (TurnSpan(number=0, start=1, end=3),)),
        earned=(0.0, 0.0),
    )
