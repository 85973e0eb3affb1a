"""Sequences that begin alike: prompts with several responses, turns that are rendered again, and loners."""

from __future__ import annotations

import random
from dataclasses import replace

from spmdrl.types import Sequence
from tests.helpers.sequences import random_sequences


def sequences_of_trees(count: int = 12, *, seed: int = 0, vocabulary: int = 97) -> list[Sequence]:
    """Random sequences, of which most begin with a prefix of another, some of them with all of it."""
    rng = random.Random(seed)
    made: list[Sequence] = []
    for sequence in random_sequences(count, seed=seed, vocabulary=vocabulary, max_tokens=40):
        if made and rng.random() < 0.8:
            other = rng.choice(made)
            length = rng.randint(len(other.token_ids) // 2, len(other.token_ids))
            prefix = other.token_ids[:length]
        else:
            prefix = tuple(rng.randrange(2, vocabulary) for _ in range(rng.randint(20, 40)))
        rest = len(sequence.token_ids)
        # What other sequences trained is trained here as well, as in a group whose responses begin alike.
        mask = tuple(rng.random() < 0.5 for _ in prefix[1:])
        made.append(
            replace(
                sequence,
                token_ids=prefix + sequence.token_ids,
                loss_mask=(False, *mask, *sequence.loss_mask),
                rollout_logprobs=(-2.0,) * len(prefix) + sequence.rollout_logprobs,
            )
        )
        assert len(made[-1].token_ids) == len(prefix) + rest
    return made
