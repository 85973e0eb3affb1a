"""The optional room for a CPU: without it everything works, by torch's own kernels, and no program imports it early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.cpu_room import cpu_room
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request
from tests.helpers.layers import layers_in_c
from tests.helpers.models import save_qwen3
from tests.helpers.policies import policy_of, tokens


@contextmanager
def hidden_room() -> Iterator[None]:
    room = sys.modules["spmdrl.cpu"]
    sys.modules["spmdrl.cpu"] = None  # type: ignore[assignment]  # as if it were not installed
    cpu_room.cache_clear()
    try:
        assert cpu_room() is None
        yield
    finally:
        sys.modules["spmdrl.cpu"] = room
        cpu_room.cache_clear()


def scores() -> list[torch.Tensor]:
    """Log-probabilities of sequences of several lengths, and all gradients of their sum."""
    policy, batch = policy_of("none", hidden_size=32, intermediate_size=48, head_dim=8), tokens(150, 40, 33, 17)
    logprobs = policy(batch).logprobs
    logprobs.sum().backward()
    return [logprobs.detach(), *(parameter.grad for parameter in policy.parameters() if parameter.grad is not None)]


def test_a_policy_computes_the_same_without_the_room() -> None:
    with layers_in_c():
        expected = scores()
    with hidden_room():
        torch.testing.assert_close(scores(), expected, rtol=1e-4, atol=1e-5)


def test_an_engine_samples_the_same_without_the_room(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_qwen3(tmp_path))
    asked = [
        Request(prompt_ids=tuple(range(3, 3 + length)), max_response_tokens=9, temperature=1.0, top_p=1.0, seed=length)
        for length in (4, 9)
    ]

    def answers() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        engine = TorchEngine(
            model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=2
        )
        load_whole(engine, dict(model.named_parameters()), version=0)
        assert (engine.runner.decoder is None) == (cpu_room() is None)
        found = dict(engine.generate(asked))
        return [(found[i].token_ids, found[i].logprobs) for i in range(len(asked))]

    with layers_in_c():
        expected = answers()
    with hidden_room():
        for (token_ids, logprobs), (known_ids, known) in zip(answers(), expected, strict=True):
            assert token_ids == known_ids
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(known), rtol=1e-4, atol=1e-5)
