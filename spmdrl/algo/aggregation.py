"""From per-token losses to one loss: the weight of a token, with the global denominator already inside."""

from __future__ import annotations

from collections.abc import Sequence


def token_weights(
    num_loss_tokens: Sequence[int],
    *,
    aggregation: str,
    global_loss_tokens: int,
    global_sequences: int,
    max_response_tokens: int,
) -> list[float]:
    """What each loss token of a sequence counts, for sequences of num_loss_tokens [S]; 0 for those without any.

    The sum of weight times per-token loss over all ranks is the global loss. The two totals are over the mini-batch
    on all ranks; global_sequences counts sequences with at least one loss token. With n the sequence's loss tokens:

    - "token_mean": 1 / global_loss_tokens, DAPO arXiv:2503.14476.
    - "sequence_mean_token_mean": 1 / (n global_sequences), GRPO arXiv:2402.03300.
    - "sequence_mean_token_sum": 1 / global_sequences.
    - "constant": 1 / (global_sequences max_response_tokens), Dr.GRPO arXiv:2503.20783.
    """

    def weight(n: int) -> float:
        match aggregation:
            case "token_mean":
                return 1.0 / global_loss_tokens
            case "sequence_mean_token_mean":
                return 1.0 / (n * global_sequences)
            case "sequence_mean_token_sum":
                return 1.0 / global_sequences
            case "constant":
                return 1.0 / (global_sequences * max_response_tokens)
        raise ValueError(f'unknown aggregation "{aggregation}"')

    return [weight(n) if n else 0.0 for n in num_loss_tokens]
