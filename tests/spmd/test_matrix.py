"""The parity matrix on tiny models: every layout gives what one rank gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.tools.parity_cases import Imitation, Settings, random_batch
from tests.helpers.configs import model_config
from tests.helpers.matrix import PACK, VOCABULARY, by_reward, matrix, require_same
from tests.helpers.models import (
    HAS_EXPERT_PLANS,
    needs_expert_plans,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
    save_qwen3_next,
)


def test_every_layout_of_a_dense_model_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY)
    of_experts = ("dp 2", "tp 2", "cp 2")  # with other layers, below
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep == 1 and case.name not in of_experts))


@needs_expert_plans
def test_every_layout_of_experts_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, vocab_size=VOCABULARY, num_experts=8)
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep > 1 or case.name in ("dp 2", "tp 2", "cp 2")))


@pytest.mark.parametrize("save", [save_qwen3_next, pytest.param(save_qwen3_5, marks=pytest.mark.slow)])
def test_gated_delta_nets_on_two_ranks_give_what_one_rank_gives(save: Callable[..., str], tmp_path: Path) -> None:
    """By cp, attention exchanges keys and recurrent layers exchange tokens for heads."""
    path = save(tmp_path, vocab_size=VOCABULARY, num_key_value_heads=4)
    require_same(matrix(by_reward(path), lambda case: case.name in ("cp 2", "cp 2 (ulysses)", "tp 2")))


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_qwen3_next, save_qwen3_5])
def test_every_layout_of_gated_delta_nets_gives_what_one_rank_gives(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path, vocab_size=VOCABULARY, num_key_value_heads=4, linear_num_key_heads=4, num_experts=8)
    has_experts = HAS_EXPERT_PLANS and save is save_qwen3_next
    require_same(matrix(by_reward(path), lambda case: case.parallel.ep == 1 or has_experts))


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
