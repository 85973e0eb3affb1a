"""Adapters on one rank and on several: equal to PEFT's, to a model without them, and to themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import LoraConfig, OptimConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.model.adapted import load_trained, random_values, reference_of
from spmdrl.model.load import load_reference
from spmdrl.step.batch import build_batch
from spmdrl.step.export import export_adapter, export_hf
from spmdrl.tools.parity_cases import GradientAsWeight
from spmdrl.types import Sequence
from tests.helpers.configs import model_config, plan_for
from tests.helpers.matrix import VOCABULARY, by_reward, matrix, require_same
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

RANK = 4
LORA = LoraConfig(rank=RANK, alpha=6.0)


def test_every_layout_of_adapters_gives_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY)
    settings = dataclasses.replace(by_reward(path), lora=LORA)
    require_same(matrix(settings, lambda case: case.parallel.ep == 1))


def _one_update(path: str, lora: LoraConfig, exports: Path) -> dict[str, Any]:
    """Log-probabilities before and after an update on a batch, gradients, and exports."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cfg = model_config(path)
        policy = load_trained(cfg, lora, meshes, temperature=1.0, seed=0)
        second = load_reference(cfg, meshes.model, temperature=1.0)
        base = reference_of(policy, cfg, meshes, temperature=1.0)
        batch = build_batch(random_sequences(8), plan_for(8, 1), meshes, aggregation="token_mean")

        @torch.no_grad()
        def logprobs(model: Any) -> Tensor:
            return torch.cat([model(micro_batch).logprobs for micro_batch in batch.micro_batches])

        found: dict[str, Any] = {"reference": logprobs(second), "fresh": logprobs(policy)}
        policy.adapters.load(random_values(policy.adapters.tensors, seed=1))
        found |= {"start": {name: x.clone() for name, x in policy.adapters.tensors.items()}}
        found |= {"changed": logprobs(policy), "off": logprobs(base), "config": policy.adapters.config}
        optim = OptimConfig(name="spmdrl.tools.parity_cases:GradientAsWeight", lr=1.0, max_grad_norm=1e30)
        learner = Learner.start(policy, optim, SftObjective(), num_updates=1, dtype=torch.float32)
        assert isinstance(learner.optimizer, GradientAsWeight)
        export_adapter(policy, exports / "adapter", meshes)
        tokenizer = _NoTokenizer()
        export_hf(policy, tokenizer, exports / "hf", meshes, dtype=torch.float32)
        update(learner, batch.mini_batches, meshes, step=1)
        return found | {"gradients": {name: x.clone() for name, x in policy.adapters.tensors.items()}}


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def _token_mean_loss(model: Any, sequences: list[Sequence]) -> Tensor:
    losses, num_tokens = [], 0
    for sequence in sequences:
        pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
        labels = torch.tensor([[token if trained else -100 for token, trained in pairs]])
        count = sum(sequence.loss_mask)
        losses.append(count * model(input_ids=torch.tensor([sequence.token_ids]), labels=labels).loss)
        num_tokens += count
    return torch.stack(losses).sum() / num_tokens


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_are_those_of_peft(tmp_path: Path, rslora: bool) -> None:
    path = save_llama(tmp_path / "model")
    lora = LoraConfig(rank=RANK, alpha=6.0, rslora=rslora)
    (found,) = run_ranks(1, _one_update, path, lora, tmp_path)

    # Before anything is learned, and switched off afterwards: the model without adapters, to the last bit.
    assert torch.equal(found["fresh"], found["reference"]) and torch.equal(found["off"], found["reference"])
    assert not torch.equal(found["changed"], found["reference"])

    # PEFT reads what was written, computes the same loss and the same gradients.
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter", is_trainable=True
    )
    held = get_peft_model_state_dict(model)
    assert held.keys() == found["start"].keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in found["start"].items())
    loss = _token_mean_loss(model, random_sequences(8))
    loss.backward()
    for name, gradient in found["gradients"].items():
        theirs = model.get_parameter(name.replace(".weight", ".default.weight")).grad
        torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=1e-6)

    # The merged export is the adapted model.
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(_token_mean_loss(merged, random_sequences(8)), loss.detach(), rtol=0, atol=1e-6)
    theirs = model.merge_and_unload()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=0, atol=1e-6)


def _loaded(path: str, lora: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        adapters = load_trained(model_config(path), lora, build_meshes(world), temperature=1.0, seed=0).adapters
        return {name: x.clone() for name, x in adapters.tensors.items()}, adapters.config


def test_adapters_of_peft_are_read(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "model")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        PeftConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    (found, config), _ = run_ranks(2, _loaded, path, LoraConfig(path=str(tmp_path / "theirs")))
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert (config["r"], config["lora_alpha"]) == (3, 5)
    assert config["target_modules"] == ["down_proj", "q_proj"]
