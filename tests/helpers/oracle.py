"""Slow twins of the formulas in `spmdrl.algo`: Python floats, loops and the textbook definition of everything."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any


def mix(*values: int) -> int:
    """SplitMix64's finaliser, one 64-bit word at a time, absorbing one value per round; the upper 63 bits."""
    word = int("243F6A8885A308D3", 16)
    for value in values:
        word = word ^ (value * 11400714819323198485 % 2**64)
        for shift, factor in ((30, 13787848793156543929), (27, 10723151780598845931), (31, 1)):
            word = (word ^ (word // 2**shift)) * factor % 2**64
    return word // 2


def uniform(seed: int, position: int) -> float:
    """The 24 upper bits of the 63, as a fraction."""
    return (mix(seed, position) // 2**39) / 2**24


def group_advantages(
    group: Sequence[float], estimator: str, *, lengths: Sequence[int], greedy: float | None = None, **settings: Any
) -> list[float]:
    """One prompt group, one rollout at a time; `greedy` is the reward of its greedy response."""
    if estimator == "pass_at_k":
        return pass_at_k(group, **settings)
    row = []
    for i, reward in enumerate(group):
        others = [other for j, other in enumerate(group) if j != i]
        if estimator == "rloo":
            row.append(reward - statistics.fmean(others))
        elif estimator == "grpo" and settings["divide_by_std"]:
            row.append((reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
        elif estimator == "max_rl":
            row.append((reward - statistics.fmean(group)) / (statistics.fmean(group) + 1e-6))
        elif estimator == "opo":
            row.append(reward - statistics.fmean(group, weights=lengths))
        elif estimator == "remax":
            assert greedy is not None
            row.append(reward - greedy)
        else:
            row.append(reward - statistics.fmean(group))
    return row


def pass_at_k(group: Sequence[float], k: int) -> list[float]:
    """Every subset of k written out, and rewarded with the best in it."""
    subsets = list(itertools.combinations(range(len(group)), k))
    best = {subset: max(group[i] for i in subset) for subset in subsets}
    mean, deviation = statistics.fmean(best.values()), statistics.pstdev(best.values())
    return [
        (statistics.fmean(best[subset] for subset in subsets if i in subset) - mean) / (deviation + 1e-6)
        for i in range(len(group))
    ]


def binary_pass_at_k(num_right: int, num_wrong: int, k: int) -> tuple[float, float]:
    """(advantage of the right, of the wrong) by the closed form of arXiv:2508.10751 for rewards of 1 and 0."""
    group = num_right + num_wrong
    passed = 1 - math.comb(num_wrong, k) / math.comb(group, k)
    deviation = math.sqrt(passed * (1 - passed)) + 1e-6
    fails_with_me = math.comb(num_wrong - 1, k - 1) / math.comb(group - 1, k - 1)
    return (1 - passed) / deviation, (1 - passed - fails_with_me) / deviation


def returns(token_rewards: Sequence[float], discount: float) -> list[float]:
    """What is still to come of one sequence, at each of its loss tokens."""
    return [
        sum(discount ** (later - now) * token_rewards[later] for later in range(now, len(token_rewards)))
        for now in range(len(token_rewards))
    ]


def gigpo(
    rewards: Sequence[float],
    turns: Sequence[Sequence[tuple[int, float]]],
    *,
    discount: float,
    step_weight: float,
    divide_by_std: bool,
) -> list[list[float]]:
    """One prompt group: for each of its rollouts, whose turns are (state, reward), the advantage of each turn."""
    to_go = []
    for reward, of_rollout in zip(rewards, turns, strict=True):
        earned = [r for _, r in of_rollout]
        to_go.append(returns([*earned[:-1], reward - sum(earned[:-1])], discount) if earned else [])

    def compared(value: float, others: list[float]) -> float:
        centred = value - statistics.fmean(others)
        if len(others) == 1:
            return 0.0
        return centred / (statistics.stdev(others) + 1e-6) if divide_by_std else centred

    return [
        [
            compared(rewards[i], list(rewards))
            + step_weight
            * compared(
                to_go[i][t],
                [to_go[j][k] for j, other in enumerate(turns) for k, (s, _) in enumerate(other) if s == state],
            )
            for t, (state, _) in enumerate(of_rollout)
        ]
        for i, of_rollout in enumerate(turns)
    ]


def by_role(
    rewards: Sequence[float], turns: Sequence[Sequence[tuple[str, float]]], *, in_teams: bool, divide_by_std: bool
) -> list[list[float]]:
    """One prompt group: for each of its rollouts, whose turns are (role, reward), the advantage of each turn.

    `in_teams` compares the roles TEAM/NAME of one rollout with each other."""
    earned = [
        {role: reward - sum(r for other, r in of_rollout if other != role) for role, _ in of_rollout}
        for reward, of_rollout in zip(rewards, turns, strict=True)
    ]

    def advantage(rollout: int, role: str) -> float:
        team, slash, _ = role.rpartition("/")
        if in_teams and slash:
            peers = [x for other, x in earned[rollout].items() if other.rpartition("/")[:2] == (team, slash)]
        else:
            peers = [of_rollout[role] for of_rollout in earned if role in of_rollout]
        centred = earned[rollout][role] - statistics.fmean(peers)
        deviation = statistics.stdev(peers) + 1e-6 if divide_by_std and len(peers) > 1 else 1.0
        return centred / deviation

    return [[advantage(i, role) for role, _ in of_rollout] for i, of_rollout in enumerate(turns)]


def gae(token_rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    """Advantages of one sequence's loss tokens, as the weighted mean of n-step advantages over all n."""
    length, advantages = len(token_rewards), []
    for now in range(length):
        n_step = []
        for n in range(1, length - now + 1):
            ahead = sum(discount**i * token_rewards[now + i] for i in range(n))
            after = discount**n * values[now + n] if now + n < length else 0.0
            n_step.append(ahead + after - values[now])
        weights = [(1 - decay) * decay**i for i in range(len(n_step) - 1)] + [decay ** (len(n_step) - 1)]
        advantages.append(sum(weight * advantage for weight, advantage in zip(weights, n_step, strict=True)))
    return advantages


def value_loss(value: float, old: float, target: float, clip: float) -> float:
    """A critic's loss at one token."""
    near = min(max(value, old - clip), old + clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def chosen(priorities: Sequence[float], count: int) -> list[bool]:
    """The `count` first when all are sorted; -inf is never among them."""
    first = sorted(range(len(priorities)), key=lambda i: -priorities[i])[:count]
    return [i in first and priorities[i] > -math.inf for i in range(len(priorities))]


def sequence_losses(
    kind: str,
    logprobs: Sequence[float],
    old_logprobs: Sequence[float],
    advantages: Sequence[float],
    *,
    chosen: Sequence[bool],
    held: Sequence[float] | None = None,
    **settings: Any,
) -> list[float]:
    """The loss of each loss token of one sequence; `held` are the log-probabilities that have no gradient."""
    held = logprobs if held is None else held
    low, high = settings.get("clip_low", 0.0), settings.get("clip_high", 0.0)
    losses = []
    for i, (now, old, advantage) in enumerate(zip(logprobs, old_logprobs, advantages, strict=True)):
        ratio = math.exp(now - old)
        match kind:
            case "ppo" | "clip_cov":
                dual_clip = settings.get("dual_clip")
                loss, _ = policy_loss(now, old, advantage, True, clip_low=low, clip_high=high, dual_clip=dual_clip)
                loss = 0.0 if kind == "clip_cov" and chosen[i] else loss
            case "gspo":
                ratio = math.exp(statistics.fmean(n - o for n, o in zip(logprobs, old_logprobs, strict=True)))
                bounded = min(max(ratio, 1 - low), 1 + high)
                loss = max(-ratio * advantage, -bounded * advantage)
            case "cispo":
                weight = min(max(math.exp(held[i] - old), 1 - low), 1 + high)
                loss = -weight * advantage * now
            case "gmpo":
                product = 1.0
                for n, o in zip(logprobs, old_logprobs, strict=True):
                    single = math.exp(n - o)
                    product *= min(single, math.exp(high)) if advantage > 0 else max(single, math.exp(-low))
                loss = -advantage * product ** (1 / len(logprobs))
            case "sapo":
                tau = settings["tau_positive"] if advantage > 0 else settings["tau_negative"]
                loss = -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
            case "dppo_tv" | "dppo_kl":
                p, q = math.exp(held[i]), math.exp(old)
                if kind == "dppo_tv":
                    distance = abs(p - q)
                elif p < 1:
                    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                else:
                    distance = math.inf
                has_left = distance > settings["divergence_threshold"] and (p - q) * advantage > 0
                loss = 0.0 if has_left else -ratio * advantage
            case "kl_cov":
                loss = -ratio * advantage + (settings["cov_kl_coef"] * abs(now - old) if chosen[i] else 0.0)
        losses.append(loss)
    return losses


def whiten(advantages: Sequence[float], loss_tokens: Sequence[int], eps: float) -> list[float]:
    """Lay every advantage out on its loss tokens, then standardise with the mean and deviation of that list."""
    laid_out = [advantage for advantage, n in zip(advantages, loss_tokens, strict=True) for _ in range(n)]
    mean, deviation = statistics.fmean(laid_out), statistics.pstdev(laid_out)
    return [(advantage - mean) / (deviation + eps) for advantage in advantages]


def kl(logprob: float, ref_logprob: float, estimator: str) -> float:
    """One token's KL(policy || reference)."""
    log_r = ref_logprob - logprob
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[estimator]


def policy_loss(
    logprob: float,
    old_logprob: float | None,
    advantage: float,
    trained: bool,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[float, bool]:
    """(loss, whether a clip decided it) of one token."""
    if not trained:
        return 0.0, False
    ratio = 1.0 if old_logprob is None else math.exp(logprob - old_logprob)
    loss, clipped = -ratio * advantage, False
    if advantage > 0 and ratio > 1 + clip_high:
        loss, clipped = -(1 + clip_high) * advantage, True
    if advantage < 0 and ratio < 1 - clip_low:
        loss, clipped = -(1 - clip_low) * advantage, True
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        loss, clipped = -dual_clip * advantage, True
    return loss, clipped


def slope(function: Callable[[float], float], at: float, width: float = 1e-6) -> float:
    """Derivative by central differences."""
    return (function(at + width) - function(at - width)) / (2 * width)


def global_loss(losses: Sequence[Sequence[float]], aggregation: str, max_response_tokens: int) -> float:
    """One number from the losses of each sequence's loss tokens, over the whole mini-batch."""
    trained = [sequence for sequence in losses if len(sequence) > 0]
    if not trained:
        return 0.0
    match aggregation:
        case "token_mean":
            return statistics.fmean(loss for sequence in trained for loss in sequence)
        case "sequence_mean_token_mean":
            return statistics.fmean(statistics.fmean(sequence) for sequence in trained)
        case "sequence_mean_token_sum":
            return statistics.fmean(sum(sequence) for sequence in trained)
        case "constant":
            return statistics.fmean(sum(sequence) / max_response_tokens for sequence in trained)
    raise AssertionError(aggregation)


def lr_fractions(
    *, schedule: str, num_steps: int, warmup_steps: int, decay_steps: int, min_lr_fraction: float
) -> list[float]:
    """The fraction at every step of a run: a rise of warmup_steps, a plateau, and a fall to one step past the end."""
    rise = [i / warmup_steps for i in range(1, warmup_steps + 1)]
    rest = num_steps - warmup_steps
    if schedule == "constant" or (schedule == "wsd" and decay_steps == 0):
        return rise + [1.0] * rest
    # Without a warm-up the first step is the peak that the fall starts from.
    falling = min(rest if warmup_steps else rest - 1, decay_steps if schedule == "wsd" else num_steps)
    shape = (lambda x: (1 + math.cos(math.pi * x)) / 2) if schedule == "cosine" else (lambda x: 1 - x)
    fall = [shape(i / (falling + 1)) for i in range(1, falling + 1)]
    return rise + [1.0] * (rest - falling) + [min_lr_fraction + (1 - min_lr_fraction) * height for height in fall]


def best_largest_bin(costs: Sequence[int], num_bins: int) -> int:
    """The smallest possible cost of the largest bin, by trying everything."""
    return min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == b) for b in range(num_bins))
        for places in itertools.product(range(num_bins), repeat=len(costs))
    )


def fewest_bins(lengths: Sequence[int], cap: int, room: tuple[int, ...] = ()) -> int:
    """How many bins of `cap` are needed at least, by trying every place for every length."""
    if not lengths:
        return len(room)
    first, rest = lengths[0], lengths[1:]
    rooms = [(*room, cap - first)]
    rooms += [(*room[:i], left - first, *room[i + 1 :]) for i, left in enumerate(room) if first <= left]
    return min(fewest_bins(rest, cap, after) for after in rooms)


def largest_contiguous_bin(costs: Sequence[int], num_bins: int) -> int:
    """Cost of the largest bin when each bin takes what comes next until it has its share of the total."""
    share, bins, taken = sum(costs) / num_bins, [0], 0
    for cost in costs:
        if taken >= share * len(bins) and len(bins) < num_bins:
            bins.append(0)
        bins[-1] += cost
        taken += cost
    return max(bins)


def differenced(costs: Sequence[int], num_bins: int) -> list[int]:
    """The cost of each bin, ascending, by largest differencing with all bins of all partial solutions written out.

    Of equal spreads, joined solutions come before sequences that are still alone, and the oldest of them first.
    """
    alone = [[cost] + [0] * (num_bins - 1) for cost in sorted(costs, reverse=True)]
    joined: list[list[int]] = []
    while len(alone) + len(joined) > 1:
        pair = []
        for _ in range(2):
            widest = max([*joined, *alone], key=lambda bins: max(bins) - min(bins))  # the first of equals
            source = joined if any(bins is widest for bins in joined) else alone
            source[:] = [bins for bins in source if bins is not widest]
            pair.append(widest)
        joined.append([a + b for a, b in zip(sorted(pair[0]), sorted(pair[1], reverse=True), strict=True)])
    return sorted([*joined, *alone][0]) if costs else [0] * num_bins


def first_fit_decreasing_bins(lengths: Sequence[int], cap: int) -> int:
    """How many bins are opened by looking at them one by one."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((place for place, left in enumerate(room) if length <= left), len(room))
        if place == len(room):
            room.append(cap)
        room[place] -= length
    return len(room)


def forward_flops(length: int, *, matmul_parameters: int, num_layers: int, num_heads: int, head_dim: int) -> int:
    """A multiplication and an addition for every parameter and token, and for every pair, head and dimension, twice."""
    flops = 0
    for query in range(length):
        flops += 2 * matmul_parameters
        for _layer, _head, _key in itertools.product(range(num_layers), range(num_heads), range(query + 1)):
            flops += 2 * head_dim  # the score
            flops += 2 * head_dim  # its share of the weighted sum
    return flops


def correction_weights(mismatches: Sequence[float], *, level: str, mode: str, low: float, high: float) -> list[float]:
    """What each loss token of one sequence weighs, from the ratios of probabilities themselves."""
    ratios = [math.exp(mismatch) for mismatch in mismatches]
    if level != "token" and ratios:
        whole = math.prod(ratios)
        ratios = [whole if level == "sequence" else whole ** (1 / len(ratios))] * len(ratios)
    bounded = []
    for ratio in ratios:
        match mode:
            case "truncate":
                bounded.append(high if ratio > high else ratio)
            case "clip":
                bounded.append(low if ratio < low else high if ratio > high else ratio)
            case "mask":
                bounded.append(ratio if low <= ratio <= high else 0.0)
            case "none":
                bounded.append(1.0)
    return bounded


Token = tuple[float, float, float, float]  # logprob, old_logprob, rollout_logprob, advantage


def corrected_loss(
    sequences: Sequence[Sequence[Token]],
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
    batch_normalize: bool,
    reject: str,
    reject_low: float,
    reject_high: float,
    veto_below: float | None,
    opsm_delta_nats: float | None,
    aggregation: str,
    max_response_tokens: int,
    clip: float,
) -> float:
    """The policy loss of a global batch from the loss tokens of its sequences: first what is left out, then what the
    rest weighs, then what weighs nothing, then the aggregation over what was not left out."""
    left: list[list[tuple[Token, float]]] = []
    for sequence in sequences:
        mismatches = [old - rollout for _, old, rollout, _ in sequence]
        weights = correction_weights(mismatches, level=level, mode=mode, low=low, high=high)
        keep = [True] * len(sequence)
        if reject != "none":
            bounds = {"low": reject_low, "high": reject_high}
            keep = [w > 0 for w in correction_weights(mismatches, level=reject, mode="mask", **bounds)]
        if veto_below is not None and any(math.exp(mismatch) < veto_below for mismatch in mismatches):
            keep = [False] * len(sequence)
        left.append([pair for pair, kept in zip(zip(sequence, weights, strict=True), keep, strict=True) if kept])
    mean = 1.0
    if batch_normalize:
        counted = [w for pairs in left for _, w in pairs] if level == "token" else [p[0][1] for p in left if p]
        mean = statistics.fmean(counted) if counted and sum(counted) else 1.0
    losses = []
    for sequence, pairs in zip(sequences, left, strict=True):
        drop = False
        if opsm_delta_nats is not None and sequence:
            distance = statistics.fmean(rollout - now for now, _, rollout, _ in sequence)
            drop = sum(advantage for *_, advantage in sequence) < 0 and distance > opsm_delta_nats
        losses.append(
            [
                0.0 if drop else weight / mean * policy_loss(
                    now, old, advantage, True, clip_low=clip, clip_high=clip, dual_clip=None
                )[0]
                for (now, old, _, advantage), weight in pairs
            ]
        )  # fmt: skip
    return global_loss(losses, aggregation, max_response_tokens)


def effective_fraction(weights: Sequence[float]) -> float:
    """Kish's: one over the mean square of the weights that have been scaled to a mean of one."""
    mean = statistics.fmean(weights)
    return 1 / statistics.fmean((weight / mean) ** 2 for weight in weights)
