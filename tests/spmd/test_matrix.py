"""The parity matrix on tiny models: every layout gives what one rank gives.

`make test` trains few rows, which have every pair of settings; `make test-long` trains every layout of each model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import LoraConfig, ParallelConfig
from spmdrl.tools.parity_cases import (
    ONE_BIT,
    ONE_RANK,
    Case,
    CaseResult,
    Imitation,
    Settings,
    plain_logprobs,
    random_batch,
)
from tests.helpers.adapters import token_mean_loss
from tests.helpers.configs import model_config
from tests.helpers.matrix import PACK, VOCABULARY, Trial, by_reward, matrix, outcomes, require_close, require_same
from tests.helpers.models import (
    HAS_EXPERT_PLANS,
    longrope,
    needs_expert_plans,
    save_other,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
    save_qwen3_next,
)
from tests.helpers.pairwise import Row, all_rows, covering, pairs_of

SEQUENCES = 6
MODELS: dict[str, Callable[[Path], str]] = {
    # Some sequences are longer than 20 tokens, and have other rotary frequencies than the rest of their pack.
    "dense": lambda path: save_qwen3(path, vocab_size=VOCABULARY, num_hidden_layers=2, **longrope(20, num_factors=8)),
    "experts": lambda path: save_qwen3_moe(path, vocab_size=VOCABULARY, num_experts=8),
    # By cp, attention exchanges keys and recurrent layers exchange tokens for heads. Its routes are replayed.
    "gated delta net": lambda path: save_qwen3_next(
        path, vocab_size=VOCABULARY, num_key_value_heads=4, linear_num_key_heads=4, num_experts=8
    ),
}
LORA = LoraConfig(rank=4, alpha=6.0)
LEARNING = ("reward", "imitation", "adapters")
PACKS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "one sequence": {"sequences_per_micro_batch": 1},
    "all sequences": {"sequences_per_micro_batch": 2**30},
}
FACTORS = {
    "model": tuple(MODELS),
    "learning": LEARNING,
    "dp_shard": (1, 2),
    "dp_replicate": (1, 2),
    "cp": (1, 2),
    "cp_style": ("all_gather", "ulysses"),
    "tp": (1, 2),
    "ep": (1, 2, 4),
    "pack": tuple(PACKS),
    "head": ("usual", "plain", "in small chunks"),
    "checkpointing": ("none", "full", "selective"),
}


def num_ranks_of(row: Row) -> int:
    return row["dp_shard"] * row["dp_replicate"] * row["cp"] * row["tp"]


def is_possible(row: Row) -> bool:
    ranks = num_ranks_of(row)
    splits = row["ep"] == 1 or (HAS_EXPERT_PLANS and row["model"] != "dense")
    one_style = row["cp"] > 1 or row["cp_style"] == "all_gather"
    whole_head = row["head"] != "plain" or row["tp"] == 1
    return ranks <= 4 and ranks // row["dp_replicate"] % row["ep"] == 0 and splits and one_style and whole_head


POSSIBLE = all_rows(FACTORS, is_possible)
ROWS = covering(POSSIBLE, cost=num_ranks_of)


def test_the_rows_have_every_pair_of_settings() -> None:
    assert pairs_of(ROWS) == pairs_of(POSSIBLE)
    assert ({("model", "experts"), ("ep", 4)} in map(set, pairs_of(ROWS))) == HAS_EXPERT_PLANS
    assert len(ROWS) < 25 < len(POSSIBLE)


def name_of(row: Row) -> str:
    return " ".join(f"{name}={value}" if isinstance(value, int) else str(value) for name, value in row.items())


def case_of(row: Row) -> Case:
    split = {name: row[name] for name in ("dp_shard", "dp_replicate", "cp", "cp_style", "tp", "ep")}
    chunks = {"logits_chunk_tokens": 7} if row["head"] == "in small chunks" else {}
    head = {"next_token_logprobs": plain_logprobs} if row["head"] == "plain" else {}
    return Case(
        name=name_of(row),
        reason="sums are taken in another order",
        num_ranks=num_ranks_of(row),
        parallel=ParallelConfig(**split),
        pack=PACKS[row["pack"]],
        model={"gradient_checkpointing": row["checkpointing"]} | chunks,
        **head,
    )


Get = Callable[[Row], CaseResult]


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Settings]:
    paths = {name: save(tmp_path_factory.mktemp("model")) for name, save in MODELS.items()}

    def settings(row: Row) -> Settings:
        path = paths[row["model"]]
        replays = row["model"] == "gated delta net"
        if row["learning"] == "imitation":
            return Settings(model=model_config(path), pack=PACK, learning=Imitation(), replays_routes=replays)
        lora = LORA if row["learning"] == "adapters" else None
        balance = {} if row["model"] == "dense" else {"expert_balance_coef": 0.1}
        return dataclasses.replace(by_reward(path, balance), lora=lora, replays_routes=replays)

    return settings


@pytest.fixture(scope="module")
def alone(settings_of: Callable[[Row], Settings]) -> Get:
    """Train every model in every way on one rank without anything special, all in one start."""
    rows = all_rows({name: FACTORS[name] for name in ("model", "learning")}, lambda _: True)

    @cache
    def results() -> list[CaseResult]:
        return outcomes([Trial(settings_of(row)) for row in rows], num_sequences=SEQUENCES)

    return lambda row: results()[rows.index({name: row[name] for name in ("model", "learning")})]


@pytest.fixture(scope="module")
def trained(settings_of: Callable[[Row], Settings]) -> Get:
    """Train the rows of as many ranks in one start, when the first of them is asked for."""

    @cache
    def results(num_ranks: int) -> dict[str, CaseResult]:
        rows = [row for row in ROWS if num_ranks_of(row) == num_ranks]
        trials = [Trial(settings_of(row), case_of(row)) for row in rows]
        return dict(zip(map(name_of, rows), outcomes(trials, num_sequences=SEQUENCES), strict=True))

    return lambda row: results(num_ranks_of(row))[name_of(row)]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row_gives_what_one_rank_gives(row: Row, trained: Get, alone: Get) -> None:
    require_close(case_of(row), trained(row), alone(row))


def require_transformers(path: str, num_sequences: int, gradients: dict[str, Tensor]) -> None:
    """Require the gradients of the loss of fine-tuning that transformers' own forward pass gives."""
    model = AutoModelForCausalLM.from_pretrained(path)
    token_mean_loss(model, random_batch(vocabulary=VOCABULARY, num_sequences=num_sequences, max_tokens=40)).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_imitation_on_one_rank_is_that_of_transformers(alone: Get, settings_of: Callable[[Row], Settings]) -> None:
    row = {"model": "dense", "learning": "imitation"}
    require_transformers(settings_of(row).model.path, SEQUENCES, alone(row).gradients)


@pytest.mark.slow
def test_every_layout_of_a_dense_model_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY)
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep == 1))


@pytest.mark.slow
def test_training_under_top_k_gives_what_one_rank_gives(tmp_path: Path) -> None:
    """Where the vocabulary and the tokens of a micro-batch are split, and where they are cut into other pieces."""
    settings = by_reward(save_qwen3(tmp_path, vocab_size=VOCABULARY))
    wanted = ("dp 2", "tp 2", "cp 2", "one micro-batch")
    found = matrix(settings, lambda case: case.name in wanted, num_candidates=6)
    assert {*wanted} <= found.keys()
    require_same(found)
    (plain,) = outcomes([Trial(settings)], num_sequences=24)
    assert plain.loss != found[ONE_RANK.name][1].loss


@pytest.mark.slow
@needs_expert_plans
def test_every_layout_of_experts_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, vocab_size=VOCABULARY, num_experts=8)
    settings = by_reward(path, {"expert_balance_coef": 0.1})
    require_same(matrix(settings, lambda case: case.parallel.ep > 1 or case.name in ("dp 2", "tp 2", "cp 2")))


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_qwen3_next, save_qwen3_5])
def test_gated_delta_nets_with_few_heads_give_what_one_rank_gives(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path, vocab_size=VOCABULARY, num_key_value_heads=4)
    require_same(matrix(by_reward(path), lambda case: case.name in ("cp 2", "cp 2 (ulysses)", "tp 2")))


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_qwen3_next, save_qwen3_5])
def test_every_layout_of_gated_delta_nets_gives_what_one_rank_gives(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path, vocab_size=VOCABULARY, num_key_value_heads=4, linear_num_key_heads=4, num_experts=8)
    has_experts = HAS_EXPERT_PLANS and save is save_qwen3_next
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep == 1 or has_experts))


# Other families, and the layouts that they have. Where logits are made small, so are gradients.
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "deepseek_v2": (("tp 2",), {}),
    "glm4_moe_lite": (("tp 2", "dp 2 x tp 2"), {}),
    "minicpm3": (("tp 2",), {}),
    "deepseek_v3": (("cp 2", "cp 2 (ulysses)", "tp 2", "ep 2"), {"n_routed_experts": 8}),
    "gemma4_text": (("cp 2", "cp 2 (ulysses)"), {"seed": 3}),  # of others some gradients are sums of nearly nothing
    "gemma4_text with experts": (
        ("cp 2", "tp 2"),
        {"seed": 4, "num_global_key_value_heads": 2, "num_experts": 4},
    ),
    "gemma2": (("cp 2", "cp 2 (ulysses)", "tp 2"), {}),
    "falcon_h1": (("cp 2", "cp 2 (ulysses)"), {"lm_head_multiplier": 4.0}),
    # Ranks have parts of a group's heads.
    "granitemoehybrid": (("cp 2", "cp 4"), {"mamba_n_groups": 1, "logits_scaling": 0.25}),
    "lfm2_moe": (("cp 2", "cp 2 (ulysses)", "ep 2"), {"num_experts": 8}),
    "nemotron_h": (("cp 2", "cp 2, selective"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("family", LAYOUTS)
def test_another_family_gives_in_its_layouts_what_one_rank_gives(
    tmp_path: Path, family: str, lora: LoraConfig | None
) -> None:
    names, sizes = LAYOUTS[family]
    path = save_other(family, tmp_path, vocab_size=VOCABULARY, **sizes)
    found = matrix(dataclasses.replace(by_reward(path), lora=lora), lambda case: case.name in names)
    assert found.keys() == {ONE_RANK.name, ONE_BIT.name, *names}
    require_same(found)


@pytest.mark.slow
def test_fine_tuning_in_other_layouts_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY, num_hidden_layers=2)
    settings = Settings(model=model_config(path), pack=PACK, learning=Imitation())
    require_same(matrix(settings, lambda case: case.name in ("dp 2", "cp 2", "tp 2", "plain head")))
