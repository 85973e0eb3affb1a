"""Several versions of adapters in one SGLang engine, against the trainer's adapters of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spmdrl.dist.collectives import gather_objects
from spmdrl.types import Request, Response
from tests.helpers.adapters import change_adapters
from tests.helpers.sglang_engine import Rank, prompts, trainer_logprobs

NUM_TOKENS = 24
CAPACITY = 12  # requests of each version


def requests(count: int = CAPACITY) -> list[Request]:
    return [Request(prompt_ids=ids, seed=i, max_response_tokens=NUM_TOKENS) for i, ids in enumerate(prompts(count))]


def differences(rank: Rank, responses: list[Response], asked: list[Request] | None = None) -> Tensor:
    """How far the engine's log-probabilities are from those of the trainer's adapters, token by token; every rank must
    call this."""
    mine = [(r.prompt_ids, a) for r, a in zip(asked or requests(), responses, strict=False)]
    everyones = [
        prompt + answer.token_ids for part in gather_objects(rank.meshes.training, mine) for prompt, answer in part
    ]
    forwards = dict(zip(everyones, trainer_logprobs(rank.policy, everyones), strict=True))
    found = [torch.tensor(a.logprobs) - forwards[prompt + a.token_ids][len(prompt) - 1 :] for prompt, a in mine]
    return torch.cat([torch.zeros(1), *found]).abs()


def worst(rank: Rank, responses: list[Response], asked: list[Request] | None = None) -> float:
    """Largest of the `differences`, 0 on a rank without responses."""
    return float(differences(rank, responses, asked).max())


def versions_of(responses: list[Response]) -> set[int]:
    return {span.version for response in responses for span in response.spans}


def loaded(rank: Rank) -> set[str]:
    """The names of the adapters that SGLang itself knows."""
    process = rank.engine._process  # type: ignore[attr-defined]
    if process is not None:
        rank.engine._adapters.settle(process)  # type: ignore[attr-defined]
    return set(process._manager.lora_registry.get_all_adapters()) if process is not None else set()


def adapters_of(rank: Rank) -> dict[str, Tensor]:
    """A copy of the trainer's adapters."""
    return {name: x.clone() for name, x in rank.policy.adapters.tensors.items()}  # type: ignore[union-attr]


def three_versions(rank: Rank, *, amount: float = 0.03) -> tuple[list[list[Tensor]], list[set[str]]]:
    """Sample with versions 2, 3 and 4 in one `generate`; the differences of each one's answers from the trainer's
    adapters of each, by the latter first, and what was loaded."""
    snapshots, held = [adapters_of(rank)], [loaded(rank)]

    def asking() -> Iterator[Request | None]:
        for version in (2, 3, 4):
            if version > 2:
                change_adapters(rank.policy, amount)
                rank.refit(version=version)
                snapshots.append(adapters_of(rank))
                held.append(loaded(rank))
            # Long enough that they run beside those of the next version.
            yield from (
                Request(prompt_ids=ids, seed=i, max_response_tokens=90) for i, ids in enumerate(prompts(CAPACITY)[:4])
            )

    found = dict(rank.engine.generate(asking()))
    answers = [[found[4 * number + i] for i in range(4)] for number in range(3)]
    assert [versions_of(responses) for responses in answers] == [{2}, {3}, {4}]
    found_by_version = []
    for snapshot in snapshots:
        rank.policy.adapters.load(snapshot)  # type: ignore[union-attr]
        found_by_version.append([differences(rank, responses) for responses in answers])
    return found_by_version, held
