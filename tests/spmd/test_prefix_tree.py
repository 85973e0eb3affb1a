"""Sequences that begin alike give the same gradients and weights as trees, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import LoraConfig, PackConfig, ParallelConfig
from spmdrl.dist.session import spmd_session
from spmdrl.tools.parity_cases import ONE_RANK, Case, CaseResult, Settings, train_case
from tests.helpers.matrix import VOCABULARY, by_reward, require_close
from tests.helpers.models import save_gpt_oss, save_qwen3, save_qwen3_moe, save_qwen3_next
from tests.helpers.ranks import run_ranks
from tests.helpers.trees import sequences_of_trees

FLAT, TREES = ({"max_tokens_per_micro_batch": 256, "prefix_tree": setting} for setting in ("off", "auto"))
MODELS: dict[str, Callable[[Path], str]] = {
    "dense": lambda path: save_qwen3(path, vocab_size=VOCABULARY, num_hidden_layers=2),
    "sinks": lambda path: save_gpt_oss(path, vocab_size=VOCABULARY, num_local_experts=8),
    "experts": lambda path: save_qwen3_moe(path, vocab_size=VOCABULARY, num_experts=8),
    "gated delta net": lambda path: save_qwen3_next(
        path, vocab_size=VOCABULARY, num_key_value_heads=4, linear_num_key_heads=4, num_experts=8
    ),
}
STYLES: list[dict[str, Any]] = [{"cp_style": "ulysses"}, {}]
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"cp": 2, "cp_style": "ulysses"}),
    (2, {"cp": 2}),
    (2, {"tp": 2}),
    (2, {"ep": 2}),
    (4, {"cp": 2, "cp_style": "ulysses", "tp": 2}),
    (4, {"cp": 4}),
    (4, {"dp_replicate": 2}),
]


def _outcomes(settings: Settings, cases: list[Case]) -> list[CaseResult | None]:
    batch = sequences_of_trees(12, vocabulary=VOCABULARY)
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [train_case(case, settings, batch, world) for case in cases]


def tree_case(num_ranks: int = 1, parallel: dict[str, Any] | None = None, **model: Any) -> Case:
    return Case(
        name=f"{num_ranks} {parallel} {model}",
        reason="attention is summed in parts",
        num_ranks=num_ranks,
        parallel=ParallelConfig(**(parallel or {})),
        pack=TREES,
        model=model,
    )


def require_same(settings: Settings, cases: list[Case]) -> None:
    one: CaseResult | None = None
    for num_ranks in sorted({1, *(case.num_ranks for case in cases)}):
        some = [case for case in cases if case.num_ranks == num_ranks]
        some = [ONE_RANK, *some] if num_ranks == 1 else some
        first, *_ = run_ranks(num_ranks, _outcomes, settings, some, timeout_s=240)
        if num_ranks == 1:
            one, *first = first
            some = some[1:]
        assert one is not None
        for case, result in zip(some, first, strict=True):
            assert result is not None
            require_close(case, result, one)


def settings_of(path: str, **changes: Any) -> Settings:
    known = by_reward(path)
    return Settings(**({"model": known.model, "pack": PackConfig(**FLAT), "learning": known.learning} | changes))


def test_trees_train_as_sequences_do(tmp_path: Path) -> None:
    require_same(settings_of(MODELS["dense"](tmp_path)), [tree_case(2, {"cp": 2, **style}) for style in STYLES])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_trees_train_as_sequences_do_in_every_layout(name: str, tmp_path: Path) -> None:
    layouts = [layout for layout in LAYOUTS if "ep" not in layout[1] or name != "dense"]
    layouts = [layout for layout in layouts if "tp" not in layout[1] or name in ("dense", "experts")]
    cases = [tree_case(), tree_case(gradient_checkpointing="selective"), *(tree_case(*layout) for layout in layouts)]
    require_same(settings_of(MODELS[name](tmp_path)), cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "gated delta net"])
def test_adapters_train_on_trees_as_on_sequences(name: str, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path)
    cases = [tree_case(), tree_case(2), *(tree_case(2, {"cp": 2, **style}) for style in STYLES)]
    require_same(settings_of(path, lora=LoraConfig(rank=4, alpha=6.0)), cases)
