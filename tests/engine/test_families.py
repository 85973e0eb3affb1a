"""SGLang with each family of models: it says what the trainer says, from every start of a request.

What a layer keeps of a request, its state or its keys and values, can begin empty, in a slot that another request has
used, or where a cached prefix or an aborted response ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.adapters import change_adapters
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import (
    LONG_FACTORS,
    longrope,
    save_gemma3,
    save_llama,
    save_mistral,
    save_other,
    save_phi3,
    save_qwen2,
    save_qwen3_5,
    save_qwen3_5_moe,
    save_qwen3_moe,
    save_qwen3_next,
)
from tests.helpers.sglang_delta_net import ARGUMENTS
from tests.helpers.sglang_engine import (
    answers,
    change,
    greedy,
    interrupted,
    prompts,
    rank_with_engine,
    settings,
    trainer_logprobs,
    worst_difference,
)

# Other than what SGLang takes where it does not know where to look.
ROTARY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
MERGED = {"rank": 4, "alpha": 8.0, "merge": True}
# Long factors for all lengths, as docs/models.md shows.
LONG_ONLY = {
    "original_max_position_embeddings": 256,
    "rope_parameters": longrope(256, num_factors=6)["rope_parameters"]
    | {"short_factor": LONG_FACTORS[::8], "long_factor": LONG_FACTORS[::8]}
    | dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), 1.19),
}
# Logits that are scaled, and layers whose cut over two devices one device would not show.
OF_TWO = ("granite", "cohere", "glm4_moe", "ministral3")
# SGLang takes the size of heads from the width, and on a CPU pads the experts of all tokens before it joins them.
LIKE_RELEASED = {"head_dim": 8, "moe_intermediate_size": 64}
MIXTURES = ("mixtral", "ernie4_5_moe", "qwen2_moe")
LONGER_THAN_A_CHUNK = 80  # tokens of a response, where the delta rule reads prompts 64 at a time


def save_with_yarn(path: Path, **_: Any) -> str:
    """A random Qwen3-Next with YaRN, of which config.json has the older names: SGLang starts with these alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    others = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    file = Path(save_qwen3_next(path, rope_parameters=yarn | others), "config.json")
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | others | {"rope_scaling": yarn}))
    return str(path)


def all_of_it(path: str, num_ranks: int, lora: dict[str, Any] | None, sglang: dict[str, Any]) -> dict[str, Any]:
    """Ask one engine for all ranks, on one rank of them. With `lora` its adapters change, and no other weight."""
    found: dict[str, Any] = {"differences": []}
    change_weights = change_adapters if lora else change
    cfg = settings(path, num_ranks, lora=lora, tp_size=num_ranks, max_running=10, sglang=sglang)
    with rank_with_engine(cfg) as rank:
        asked = [greedy(ids, 24) for ids in prompts(14)]
        (before,) = trainer_logprobs(rank.policy, [tuple(range(2, 40))])
        for version in range(3):  # the second and third repeat the copies of the first
            change_weights(rank.policy, 0.02)
            rank.refit(version=version)  # compares every weight by digest
        (after,) = trainer_logprobs(rank.policy, [tuple(range(2, 40))])
        found["change"] = float((before - after).abs().max())
        rank.engine.wake()
        found["differences"].append(worst_difference(rank, asked, answers(rank.engine, asked)))
        whole = answers(rank.engine, [greedy(ids, LONGER_THAN_A_CHUNK) for ids in prompts(8)])
        found["cuts"] = list(interrupted(rank, whole))
        again = [greedy(ids + answer.token_ids, 8) for ids, answer in zip(prompts(8), whole, strict=False)]
        found["differences"].append(worst_difference(rank, again, answers(rank.engine, again)))
        found["leads"] = rank.engine.leads
    return found


@pytest.mark.parametrize(
    ("save", "num_ranks", "lora"),
    [
        pytest.param(save_qwen3_next, 1, None, marks=pytest.mark.slow),
        pytest.param(save_qwen3_5, 1, None, marks=pytest.mark.slow),
        pytest.param(save_qwen3_5_moe, 1, None, marks=pytest.mark.slow),
        pytest.param(save_with_yarn, 1, None, marks=pytest.mark.slow),
        pytest.param(save_qwen3_next, 2, None, marks=pytest.mark.slow),
        pytest.param(save_qwen3_5, 2, None, marks=pytest.mark.slow),
        pytest.param(save_qwen3_next, 2, MERGED, marks=pytest.mark.slow),
        pytest.param(save_qwen3_5, 1, MERGED, marks=pytest.mark.slow),
    ],
)
def test_models_with_a_state_say_what_the_trainer_says(
    tmp_path: Path, save: Callable[..., str], num_ranks: int, lora: dict[str, Any] | None
) -> None:
    check(all_of(save(tmp_path, rope_parameters=ROTARY), num_ranks, lora, ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [
        *(save_llama, save_qwen2, save_mistral, save_gemma3, save_qwen3_moe),
        pytest.param(partial(save_phi3, limit=128), id="save_phi3"),
        pytest.param(partial(save_phi3, limit=256, **LONG_ONLY), id="save_phi3 with long factors alone"),
        *(pytest.param(partial(save_other, name), id=name) for name in OF_TWO),
        *(pytest.param(partial(save_other, name, **LIKE_RELEASED), id=name) for name in MIXTURES),
    ],
)
def test_models_without_say_so_too(tmp_path: Path, save: Callable[..., str]) -> None:
    check(all_of(save(tmp_path), 2, None, {}))


def all_of(path: str, num_ranks: int, lora: dict[str, Any] | None, sglang: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask one engine for these ranks; returns what each of them has found."""
    return run_engine_ranks(num_ranks, all_of_it, path, num_ranks, lora, sglang)


def check(ranks: list[dict[str, Any]]) -> None:
    """Compare what the ranks of one engine have found."""
    for rank in ranks:
        assert rank["change"] > 0.01  # the weights that were refitted are not those that were there
        assert max(rank["differences"]) < 1e-5
    (cuts,) = [rank["cuts"] for rank in ranks if rank["leads"]]
    assert not [(reason, length) for reason, length, same in cuts if not same]
    assert any(reason == "abort" and length > 0 for reason, length, _ in cuts)
