"""From per-token losses to one loss: the weight of a token, with the global denominator already inside."""

from __future__ import annotations

from collections.abc import Sequence

from spmdrl.algo.formula import Formula


def token_weights(
    num_loss_tokens: Sequence[int],
    *,
    aggregation: str,
    global_loss_tokens: int,
    global_rollouts: int,
    max_response_tokens: int,
) -> list[float]:
    """Weights of the loss tokens of rollouts that have num_loss_tokens [n] each; 0 for those without any.

    The sum of weight times per-token loss over all ranks is the global loss. The two totals are over the mini-batch
    on all ranks; global_rollouts counts rollouts with at least one loss token.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f'unknown aggregation "{aggregation}"')
    divisor = AGGREGATIONS[aggregation].function
    totals = (global_loss_tokens, global_rollouts, max_response_tokens)
    return [1.0 / divisor(n, *totals) if n else 0.0 for n in num_loss_tokens]


# Each function: (n, global_loss_tokens N, global_rollouts S, max_response_tokens L) to what a token's loss is divided
# by, n being the loss tokens of its rollout.
AGGREGATIONS: dict[str, Formula] = {
    "token_mean": Formula(
        function=lambda n, tokens, rollouts, longest: tokens,
        text="1 / N",
        source="DAPO, arXiv:2503.14476",
        when="The default. Every token counts the same, and long responses more.",
    ),
    "sequence_mean_token_mean": Formula(
        function=lambda n, tokens, rollouts, longest: n * rollouts,
        text="1 / (n S)",
        source="GRPO, arXiv:2402.03300",
        when="Every rollout counts the same; a token of a long one less.",
    ),
    "sequence_mean_token_sum": Formula(
        function=lambda n, tokens, rollouts, longest: rollouts,
        text="1 / S",
        source="the policy gradient itself",
        when="Rollouts are summed over their tokens, then averaged.",
    ),
    "constant": Formula(
        function=lambda n, tokens, rollouts, longest: rollouts * longest,
        text="1 / (S L)",
        source="Dr.GRPO, arXiv:2503.20783",
        when="As before, with a scale that does not depend on the lengths sampled.",
    ),
}
