"""Random sequences and requests."""

from __future__ import annotations

import random

from spmdrl.types import Request, Response, Sequence
from tests.helpers.models import VOCABULARY


def random_sequences(
    count: int, *, seed: int = 0, max_tokens: int = 40, vocabulary: int = VOCABULARY
) -> list[Sequence]:
    """Prompt and response of random lengths, with log-probabilities and rewards of a plausible size."""
    rng = random.Random(seed)
    sequences = []
    for index in range(count):
        prompt, response = rng.randint(1, 8), rng.randint(1, max_tokens - 8)
        sequences.append(
            Sequence(
                index=index,
                token_ids=tuple(rng.randrange(2, vocabulary) for _ in range(prompt + response)),
                loss_mask=(False,) * prompt + (True,) * response,
                rollout_logprobs=(0.0,) * prompt + tuple(-3 - rng.random() for _ in range(response)),
                reward=rng.uniform(-2, 2),
            )
        )
    return sequences


def random_requests(
    count: int, *, max_response_tokens: int, temperature: float, stop_token_ids: frozenset[int]
) -> list[Request]:
    """Requests with prompts of 1 to 20 tokens and limits of 1 to `max_response_tokens`."""
    rng = random.Random(0)
    return [
        Request(
            prompt_ids=tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 20))),
            seed=i,
            max_response_tokens=rng.randint(1, max_response_tokens),
            temperature=temperature,
            stop_token_ids=stop_token_ids,
        )
        for i in range(count)
    ]


def sequences_of(requests: list[Request], responses: list[Response]) -> list[Sequence]:
    """Convert an engine's answers to sequences, to be laid end to end."""
    return [
        Sequence(
            index=i,
            token_ids=request.prompt_ids + response.token_ids,
            loss_mask=(False,) * len(request.prompt_ids) + (True,) * len(response.token_ids),
            rollout_logprobs=(0.0,) * len(request.prompt_ids) + response.logprobs,
            reward=1.0,
        )
        for i, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]
