"""Losses of pairs of answers to one prompt, of which one is preferred: pure functions of sums over the answers."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

# Direct preferences compare a policy with a reference; a reward model gives each answer a score.

PreferenceKind = Literal["sigmoid", "ipo"]
Both = tuple[Tensor, Tensor]  # a value of each chosen answer and of each rejected one, [P] each


class PairLoss(NamedTuple):
    """The loss of each of P pairs."""

    per_pair: Tensor  # [P], with grad
    rewards: Both  # what the loss takes to be the answers' rewards


def preference_loss(
    policy: Both,
    reference: Both,
    num_tokens: Both,
    *,
    kind: PreferenceKind,
    beta: float,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    sft_coef: float = 0.0,
) -> PairLoss:
    """Return the loss of a policy whose answers have these log-probabilities, nats, summed over `num_tokens`.

    With h = log(pi(chosen) / ref(chosen)) - log(pi(rejected) / ref(rejected)), each log-ratio divided by the answer's
    tokens where `length_normalized`, and e = label_smoothing:

        sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)    DPO, arXiv:2305.18290, eq. 7; for e > 0
                                                                           Mitchell 2023, "A note on DPO with noisy
                                                                           preferences"
        ipo       (h - 1 / (2 beta))^2                                     arXiv:2310.12036, eq. 17, where beta is tau

    plus sft_coef times the chosen answer's mean cross-entropy, -log pi(chosen) / tokens (as arXiv:2404.19733 adds it).
    Rewards are beta times the log-ratios.
    """
    ratios = [own - other for own, other in zip(policy, reference, strict=True)]
    if length_normalized:
        ratios = [ratio / tokens for ratio, tokens in zip(ratios, num_tokens, strict=True)]
    chosen, rejected = ratios
    difference = chosen - rejected
    if kind == "ipo":
        per_pair = (difference - 1.0 / (2.0 * beta)).square()
    else:
        scaled = beta * difference
        per_pair = -(1.0 - label_smoothing) * F.logsigmoid(scaled)
        if label_smoothing:
            per_pair = per_pair - label_smoothing * F.logsigmoid(-scaled)
    if sft_coef:
        per_pair = per_pair - sft_coef * policy[0] / num_tokens[0]
    return PairLoss(per_pair, (beta * chosen, beta * rejected))


def bradley_terry_loss(scores: Both, margins: Tensor, *, center_coef: float = 0.0) -> PairLoss:
    """Return the loss of a reward model that gives chosen and rejected answers these scores.

        -log sigmoid(chosen - rejected - margin)  +  center_coef (chosen + rejected)^2

    The first term is the Bradley-Terry likelihood of the label (arXiv:2203.02155, eq. 1), with a margin of each pair
    as in arXiv:2307.09288, eq. 2. The second keeps scores around 0, which the first leaves open (arXiv:2312.09244).
    """
    chosen, rejected = scores
    per_pair = -F.logsigmoid(chosen - rejected - margins)
    if center_coef:
        per_pair = per_pair + center_coef * (chosen + rejected).square()
    return PairLoss(per_pair, scores)
