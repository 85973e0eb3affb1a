"""Log-probability and entropy of each next token, without ever holding [T, V].

The shift by one between hidden states and the tokens they predict happens here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.model.linear import linear, outer


def predicting_rows(positions: Tensor) -> Tensor:
    """Rows of the hidden states that predict a token of their own sequence, and so those tokens' places minus one.

    positions is [T], restarting at 0 in every sequence; the result is [N] int64: row i predicts token i + 1.
    """
    return torch.nonzero(positions[1:] != 0).flatten()


def next_token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    rows: Tensor,
    *,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [T], entropy [T]), float32 nats; entry t is about token t.

    hidden is [T, D], weight [V, D]; rows is [N], the hidden states whose next token is to be scored; entries of other
    tokens are 0. Logits are divided by `temperature` in float32. At most [chunk, V] logits exist at a time, in the
    forward and in the backward pass (where they are computed again).
    """
    logprobs, entropy = _ChunkedHead.apply(hidden[rows], weight, bias, token_ids[rows + 1], temperature, chunk)
    zeros = logprobs.new_zeros(token_ids.shape[0])
    return zeros.index_copy(0, rows + 1, logprobs), zeros.index_copy(0, rows + 1, entropy)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    return linear(hidden, weight, bias).float().div_(temperature)


class _ChunkedHead(torch.autograd.Function):
    """Scores of [N, D] hidden states, chunk by chunk.

    With p = softmax(z): d logp_target / dz = onehot - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        logprobs = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        log_normalizer, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - normalizer
            log_p = logits.sub_(normalizer[:, None])
            # 0 log 0 is 0: a forbidden token has log p = -inf and must not turn the sum into nan.
            entropy[part] = -(log_p.exp() * log_p.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
            log_normalizer[part] = normalizer
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in backward
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[part], weight, bias, ctx.temperature).sub_(log_normalizer[part, None])
            p = log_p.exp()
            per_row = torch.zeros_like(log_normalizer[part, None])
            if grad_entropy is not None:
                per_row = per_row - grad_entropy[part, None] * (log_p + entropy[part, None])
            if grad_logprobs is not None:
                per_row = per_row - grad_logprobs[part, None]
            grad_logits = p.mul_(per_row)
            if grad_logprobs is not None:
                grad_logits.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = linear(grad_logits, weight.T.contiguous())
            grad_weight += outer(grad_logits, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None
