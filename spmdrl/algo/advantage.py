"""Advantages: how much better a rollout, or a token of it, was than what could be expected."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.algo.sequences import discounted_sums, on_tokens, sequence_of_token, sequence_sums
from spmdrl.types import UserError

EPS = 1e-6  # added to a deviation before dividing by it; in the units of the reward


def grpo(rewards: Tensor, *, divide_by_std: bool) -> Tensor:
    """(R - mean) / (std + EPS) of rewards [P, G], P prompt groups of G rollouts; std is the unbiased one (G - 1).

    GRPO, DeepSeekMath arXiv:2402.03300; without `divide_by_std` R - mean, Dr.GRPO arXiv:2503.20783.

    Here and in all estimators that compare a group with itself: equal rewards have advantages of exactly 0, and a
    group's advantages are bitwise the same whatever other groups are in the tensor.
    """
    centred = centre(rewards)
    if not divide_by_std:
        return centred
    std = (_row_sums(centred.square()) / (rewards.shape[1] - 1)).sqrt()
    return centred / (std + EPS)


def normalized_terms(terms: Tensor, weights: Sequence[float]) -> Tensor:
    """Sum over the K terms of a reward of weight_k `grpo(R_k)`, for terms [K, P, G]; [P, G]. GDPO arXiv:2601.05242."""
    parts = [weight * grpo(term, divide_by_std=True) for term, weight in zip(terms, weights, strict=True)]
    return functools.reduce(torch.add, parts)


def rloo(rewards: Tensor) -> Tensor:
    """R minus the mean of the other G - 1, for rewards [P, G], arXiv:2402.14740: (R - mean) G / (G - 1)."""
    group_size = rewards.shape[1]
    return centre(rewards) * (group_size / (group_size - 1))


def centre(rewards: Tensor) -> Tensor:
    """R minus the mean of its group, for rewards [P, G]; REINFORCE++-baseline whitens it, arXiv:2501.03262."""
    shifted = _shifted(rewards)
    return shifted - _row_sums(shifted) / rewards.shape[1]


def max_rl(rewards: Tensor) -> Tensor:
    """(R - mean) / (mean + EPS) of rewards [P, G], which are 0 or more: MaxRL, arXiv:2602.02710.

    Of rewards of 0 and 1, the gradient is that of the logarithm of the share of right answers, to an order that grows
    with G. Raises UserError for a reward below 0, of which there is no share.
    """
    if (rewards < 0).any():
        raise UserError(
            f'advantage.estimator = "max_rl" divides by the mean reward of a group, and a reward is {rewards.min():g}; '
            'let rewards be 0 or more, or use "grpo"'
        )
    return centre(rewards) / (_row_sums(rewards) / rewards.shape[1] + EPS)


def no_advantage(rewards: Tensor) -> Tensor:
    """0 for each of the rewards [P, G], which are then measured and not trained on."""
    return torch.zeros_like(rewards)


def opo(rewards: Tensor, *, num_tokens: Tensor) -> Tensor:
    """R - sum(n R) / sum(n) over the group, for rewards [P, G] of rollouts with n = num_tokens [P, G] loss tokens.

    The baseline of least variance where a gradient's squared norm grows with the length, OPO arXiv:2505.23585. A group
    without any loss token is compared with its first reward.
    """
    shifted, weights = _shifted(rewards), num_tokens.to(rewards.dtype)
    return shifted - _row_sums(weights * shifted) / _row_sums(weights).clamp(min=1)


def pass_at_k(rewards: Tensor, *, k: int) -> Tensor:
    """Advantages of adding a rollout to the best of k, for rewards [P, G]; Pass@k Training arXiv:2508.10751.

    Over all subsets of k of the group's rollouts, each rewarded with its best: (mean over the subsets that hold this
    rollout - mean over all) / (std over all + EPS). For rewards of 0 and 1 this is the source's equations 14 and 15.
    With rewards in ascending order r_1 <= ... <= r_G, the best of C(j - 1, k - 1) subsets is r_j.
    """
    group_size = rewards.shape[1]
    if not 1 <= k <= group_size:
        raise ValueError(f"there are no subsets of {k} in a prompt group of {group_size}")
    ascending, order = _shifted(rewards).sort(dim=1, stable=True)
    places = range(group_size)
    # Numbers of subsets are divided as whole numbers: those of a large group are none of a tensor's.
    num_subsets, num_with_i = math.comb(group_size, k), math.comb(group_size - 1, k - 1)
    best = rewards.new_tensor([math.comb(j, k - 1) / num_subsets for j in places])
    mean = _row_sums(best * ascending)
    std = _row_sums(best * (ascending - mean).square()).sqrt()
    # Row i: how often the best of the subsets with i is j. It is i itself when the others all come before it.
    with_i = rewards.new_tensor(
        [
            [
                math.comb(i, k - 1) / num_with_i
                if j == i
                else math.comb(j - 1, k - 2) / num_with_i
                if j > i and k > 1
                else 0.0
                for j in places
            ]
            for i in places
        ]
    )
    expected = _row_sums(with_i[None] * ascending[:, None, :], dim=2).squeeze(2)
    return torch.empty_like(rewards).scatter(1, order, (expected - mean) / (std + EPS))


def gigpo(
    rewards: Tensor,
    *,
    turn_rewards: Tensor,
    turn_rollouts: Tensor,
    turn_states: Tensor,
    discount: float,
    step_weight: float,
    divide_by_std: bool,
) -> Tensor:
    """A_E + step_weight A_S of each turn, [N]: GiGPO, arXiv:2505.10978, equations 3, 6, 7 and 8.

    A_E is `grpo` of the rollouts' rewards [P, G]. A_S is the same of the turns' returns, within each set of turns that
    began in the same state of the same prompt group, whichever rollouts they belong to; a state that was met once has
    0. A turn's return is the sum over later turns k, itself included, of discount^(k - t) r_k, where r is turn_rewards
    [N], and a rollout's last turn has the rest of its reward too.

    turn_rollouts [N] int64 are places in the flat rewards, ascending, with the turns of each in order; turn_states [N]
    int64 are equal where states are.
    """
    num_rollouts = rewards.numel()
    counts = torch.bincount(turn_rollouts, minlength=num_rollouts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rest = rewards.flatten() - sequence_sums(turn_rewards, offsets)
    has_turns = counts > 0
    earned = turn_rewards.index_add(0, offsets[1:][has_turns] - 1, rest[has_turns])
    to_go = discounted_sums(earned, torch.ones_like(earned, dtype=torch.bool), offsets, decay=discount)
    groups = torch.stack([turn_rollouts // rewards.shape[1], turn_states], dim=1)
    of_steps = _within(groups, to_go, divide_by_std=divide_by_std)
    return grpo(rewards, divide_by_std=divide_by_std).flatten()[turn_rollouts] + step_weight * of_steps


def grpo_by_role(
    rewards: Tensor, *, turn_rewards: Tensor, turn_rollouts: Tensor, turn_roles: Tensor, divide_by_std: bool
) -> Tensor:
    """`grpo` of what each role has earned, compared with that role in the group's other rollouts, for each turn, [N].

    A role's reward in a rollout is the sum of turn_rewards [N] over its turns there, and the rest of the rollout's
    reward, of rewards [P, G], which all roles share. A role that only one rollout of the group has gets 0. The baseline
    of a role is that of SPIRAL, arXiv:2506.24119, over the group instead of a moving average.

    turn_rollouts [N] int64 are places in the flat rewards; turn_roles [N] int64 are equal where roles are.
    """
    no_teams = torch.zeros_like(turn_roles)
    columns = {"turn_rewards": turn_rewards, "turn_rollouts": turn_rollouts, "turn_roles": turn_roles}
    return hierarchical_grpo(rewards, **columns, turn_teams=no_teams, divide_by_std=divide_by_std)


def hierarchical_grpo(
    rewards: Tensor,
    *,
    turn_rewards: Tensor,
    turn_rollouts: Tensor,
    turn_roles: Tensor,
    turn_teams: Tensor,
    divide_by_std: bool,
) -> Tensor:
    """`grpo_by_role` in which the members of a team are compared with each other within their rollout, for each turn,
    [N]: attempts at what one rollout has set them, which those of another rollout could find easier. The only member of
    its team gets 0. After prime-rl's advantage of this name, for which a team are the solvers of a proposed problem.

    turn_teams [N] int64 follow from the roles: 0 for one that is compared over the group, else equal in a team.
    """
    rest = rewards.flatten().index_add(0, turn_rollouts, -turn_rewards)
    acting, of_turns = torch.stack([turn_rollouts, turn_roles, turn_teams], dim=1).unique(dim=0, return_inverse=True)
    rollouts, roles, teams = acting.unbind(1)
    earned = rest[rollouts].index_add(0, of_turns, turn_rewards)
    in_teams = teams != 0
    where, who = torch.where(in_teams, rollouts, rollouts // rewards.shape[1]), torch.where(in_teams, teams, roles)
    groups = torch.stack([in_teams.long(), where, who], dim=1)
    return _within(groups, earned, divide_by_std=divide_by_std)[of_turns]


def _within(groups: Tensor, values: Tensor, *, divide_by_std: bool) -> Tensor:
    """`grpo` of values [N] within sets of any size: those with the same row of groups, [N, k]. Alone: 0."""
    _, group, sizes = groups.unique(dim=0, return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    # As in `_shifted`: equal values must have exactly 0.
    shifted = values[order] - on_tokens(values[order][offsets[:-1]], offsets, len(values))
    centred = shifted - on_tokens(sequence_sums(shifted, offsets) / sizes, offsets, len(values))
    if divide_by_std:
        std = (sequence_sums(centred.square(), offsets) / (sizes - 1).clamp(min=1)).sqrt()
        centred = centred / (on_tokens(std, offsets, len(values)) + EPS)
    return torch.empty_like(values).scatter(0, order, centred)


def remax(rewards: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    """R - R_greedy, for rewards [P, G] and those of one greedy response a prompt, greedy_rewards [P]; ReMax
    arXiv:2310.10505.

    The baseline is not made of the group's rollouts, so a group of one has advantages too.
    """
    return rewards - greedy_rewards[:, None]


def returns(token_rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, discount: float) -> Tensor:
    """sum over later loss tokens j of discount^(j - t) r_j, itself included: [T], 0 outside loss_mask.

    token_rewards [T] are -kl_coef KL_t, plus the rollout's reward at a sequence's last loss token: REINFORCE++
    arXiv:2501.03262, which whitens the result over the global batch.
    """
    return discounted_sums(token_rewards, loss_mask, cu_seqlens, decay=discount)


def gae(
    token_rewards: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    values: Tensor,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """delta_t = r_t + discount V_t+1 - V_t, summed over later loss tokens j, itself included, with weights
    (discount gae_lambda)^(j - t): [T], 0 outside loss_mask. Generalized advantages, arXiv:1506.02438.

    V_t = values [T] is the critic's estimate before token t is chosen, and t + 1 the sequence's next loss token. After
    its last one V is 0, whatever ended the response: its reward is all there is, also where the limit cut it off.
    A_t + V_t is the return that the critic learns.
    """
    values = torch.where(loss_mask, values, 0.0)
    mine, sequence = values[loss_mask], sequence_of_token(cu_seqlens, len(values))[loss_mask]
    following = torch.where(sequence[1:] == sequence[:-1], mine[1:], 0.0)
    following = torch.cat([following, mine.new_zeros(min(1, len(mine)))])
    delta = token_rewards[loss_mask] + discount * following - mine
    laid_out = torch.zeros_like(values).masked_scatter(loss_mask, delta)
    return discounted_sums(laid_out, loss_mask, cu_seqlens, decay=discount * gae_lambda)


def moments(advantages: Tensor, weights: Tensor) -> Tensor:
    """[3] float64: sum, sum of squares and count of advantages [...], each counted weights [...] times.

    weights are the rollouts' loss tokens, or the loss mask. Being sums, moments are added up over ranks. Use float64
    advantages: in the variance that `whiten` makes of them, most digits cancel.
    """
    weights = weights.to(advantages.dtype)
    weighted = weights * advantages
    return torch.stack([weighted.sum(), (weighted * advantages).sum(), weights.sum()])


def whiten(advantages: Tensor, sums: Tensor) -> Tensor:
    """(A - mean) / (std + EPS), with the `moments` of the global batch's loss tokens; arXiv:2501.03262.

    mean = sum / count, and std = sqrt(sum of squares / count - mean^2) is the population's deviation (no count - 1).
    Without any loss token advantages stay as they are.
    """
    total, squares, count = sums.tolist()
    if not count:
        return advantages
    mean = total / count
    std = math.sqrt(max(0.0, squares / count - mean * mean))
    return (advantages - mean) / (std + EPS)


def _shifted(rewards: Tensor) -> Tensor:
    """Rewards [P, G] minus the first of their group, a shift that changes no group estimator.

    Without it the mean of equal rewards could round, and the rounding error divided by EPS would be an advantage.
    """
    group_size = rewards.shape[1]
    if group_size < 2:
        raise ValueError(
            f"a prompt group of {group_size} has nothing to compare its reward with; use 2 rollouts or more"
        )
    return rewards - rewards[:, :1]


def _row_sums(values: Tensor, dim: int = 1) -> Tensor:
    """Sums along `dim`, which stays, first to last: `Tensor.sum` rounds differently for another number of groups."""
    return functools.reduce(torch.add, values.unbind(dim)).unsqueeze(dim)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens: DAPO arXiv:2503.14476, equation 13."""
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))


def with_final_rewards(penalties: Tensor, rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Token rewards [T]: penalties [T] at loss tokens, plus each sequence's reward at its last; 0 elsewhere.

    rewards [T] are alike on all tokens of a sequence, whose S + 1 offsets are cu_seqlens.
    """
    after = discounted_sums(loss_mask.to(penalties.dtype), loss_mask, cu_seqlens, decay=1.0)  # loss tokens from here on
    return torch.where(loss_mask, penalties, 0.0) + torch.where(after == 1, rewards, 0.0)
