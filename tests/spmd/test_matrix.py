"""The parity matrix on tiny models: every layout gives what one rank gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from spmdrl.config import PackConfig
from spmdrl.dist.session import spmd_session
from spmdrl.tools.parity_cases import (
    ONE_RANK,
    Case,
    CaseResult,
    Imitation,
    Reinforcement,
    Settings,
    cases,
    deviation,
    random_batch,
    train_case,
)
from spmdrl.types import Sequence
from tests.helpers.configs import loss_config, model_config
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.ranks import run_ranks

LOSS = {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.05, "entropy_coef": 0.01}
VOCABULARY = 96  # tp divides it
PACK = PackConfig(max_tokens_per_micro_batch=64)


def _outcomes(some: list[Case], settings: Settings, batch: list[Sequence]) -> list[CaseResult | None]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [train_case(case, settings, batch, world) for case in some]


def by_reward(path: str) -> Settings:
    learning = Reinforcement(loss=loss_config(**LOSS), temperature=0.8)
    return Settings(model=model_config(path), pack=PACK, learning=learning)


def matrix(settings: Settings, wanted: Callable[[Case], bool]) -> dict[str, tuple[Case, CaseResult]]:
    """The outcome of every wanted case by its name; all cases of as many ranks share their processes."""
    batch = random_batch(vocabulary=VOCABULARY, num_sequences=24, max_tokens=40)
    every = [ONE_RANK, *filter(wanted, cases(settings))]
    found = {}
    for num_ranks in sorted({case.num_ranks for case in every}):
        some = [case for case in every if case.num_ranks == num_ranks]
        first, *_ = run_ranks(num_ranks, _outcomes, some, settings, batch, timeout_s=240)
        found |= {case.name: (case, result) for case, result in zip(some, first, strict=True)}
    return found


def require_same(found: dict[str, tuple[Case, CaseResult]]) -> None:
    _, one = found["1 rank"]
    assert max(float(x.norm()) for x in one.gradients.values()) > 1e-2, "gradients of 0 prove nothing"
    for name, (case, result) in found.items():
        apart = deviation(result, one)
        assert apart.is_within, f"{name}: {apart}; allowed is that {case.reason}"


def test_every_layout_of_a_dense_model_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY)
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep == 1))


def test_every_layout_of_experts_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, vocab_size=VOCABULARY, num_experts=8)
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep > 1 or case.name in ("dp 2", "tp 2", "cp 2")))


def test_fine_tuning_in_other_layouts_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY, num_hidden_layers=2)
    settings = Settings(model=model_config(path), pack=PACK, learning=Imitation())
    found = matrix(settings, lambda case: case.name in ("dp 2", "cp 2", "tp 2", "plain head"))
    require_same(found)
    model = AutoModelForCausalLM.from_pretrained(path)
    batch = random_batch(vocabulary=VOCABULARY, num_sequences=24, max_tokens=40)
    losses, num_tokens = [], 0
    for sequence in batch:
        labels = [
            token if trained else -100 for token, trained in zip(sequence.token_ids, sequence.loss_mask, strict=True)
        ]
        count = sum(sequence.loss_mask)
        inputs = torch.tensor([sequence.token_ids])
        losses.append(count * model(input_ids=inputs, labels=torch.tensor([labels])).loss)
        num_tokens += count
    (torch.stack(losses).sum() / num_tokens).backward()
    for name, gradient in found["1 rank"][1].gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
