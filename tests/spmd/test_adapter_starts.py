"""Adapters that begin at a part of the weights: PEFT's start, the base's answers, and plain adapters in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import LoraConfig, OptimConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.model.frozen import reference_of
from spmdrl.model.load import load_model_config, load_policy
from spmdrl.model.lora.policy import adapter_problems, load_trained
from spmdrl.step.batch import build_batch
from spmdrl.step.export import export_adapter, export_hf
from tests.helpers.adapters import NoTokenizer, token_mean_loss
from tests.helpers.configs import model_config, plan_for
from tests.helpers.models import save_llama, save_qwen3_moe
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

RANK = 4


def _one_update(path: str, lora: LoraConfig, exports: Path) -> dict[str, Any]:
    """The start, log-probabilities before and after an update on a batch, the gradients, and exports after it."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cfg = model_config(path)
        policy = load_trained(cfg, lora, meshes, temperature=1.0, seed=0)
        second = load_policy(cfg, meshes.model, temperature=1.0, role="reference")
        base = reference_of(policy, cfg, meshes, temperature=1.0)
        mine = random_sequences(8)[world.rank :: world.num_ranks]
        batch = build_batch(mine, plan_for(8, world.num_ranks), meshes, aggregation="token_mean")

        @torch.no_grad()
        def logprobs(model: Any) -> Tensor:
            return torch.cat([model(micro_batch).logprobs for micro_batch in batch.micro_batches])

        adapters = policy.adapters
        start = {name: adapters._view(adapters.start, name).clone() for name in adapters.trained}
        found: dict[str, Any] = {"reference": logprobs(second), "fresh": logprobs(policy), "start": start}
        optim = OptimConfig(name="spmdrl.tools.parity_cases:GradientAsWeight", lr=1.0, max_grad_norm=1e30)
        learner = Learner(policy, optim, SftObjective(), num_updates=1, dtype=torch.float32)
        update(learner, batch.mini_batches, meshes, step=1)
        found |= {"gradients": {name: x.clone() for name, x in adapters.trained.items()}}
        policy.adapters.load({name: -0.1 * x for name, x in adapters.trained.items()})
        found |= {"off": logprobs(base), "changed": logprobs(policy), "config": adapters.config}
        found |= {"learned": {name: x.clone() for name, x in adapters.trained.items()}}
        export_adapter(policy, exports / "adapter", meshes)
        export_hf(policy, NoTokenizer(), exports / "hf", meshes, dtype=torch.float32)
        return found


@pytest.mark.parametrize(
    ("num_ranks", "lora"),
    [
        (1, {"init": "pissa"}),
        (2, {"init": "pissa", "rslora": True, "targets": ["q_proj", "mlp.down_proj"]}),
        (2, {"init": "olora"}),
    ],
)
def test_starts_are_those_of_peft_and_the_first_policy_is_the_base(
    tmp_path: Path, num_ranks: int, lora: dict[str, Any]
) -> None:
    path = save_llama(tmp_path / "model")
    cfg = LoraConfig(rank=RANK, alpha=6.0, **lora)
    found, *others = run_ranks(num_ranks, _one_update, path, cfg, tmp_path)

    # Before anything is learned, and switched off afterwards: the model without adapters, to the last bit.
    assert torch.equal(found["fresh"], found["reference"]) and torch.equal(found["off"], found["reference"])
    assert not torch.equal(found["changed"], found["reference"])
    for other in others:
        assert all(torch.equal(other["start"][name], x) for name, x in found["start"].items()), "ranks differ"

    # PEFT takes the same start from the weights, and has the same gradients there.
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        PeftConfig(
            r=RANK,
            lora_alpha=6.0,
            use_rslora=cfg.rslora,
            target_modules="all-linear" if cfg.targets == "all-linear" else list(cfg.targets),
            init_lora_weights=cfg.init,
        ),
    )
    token_mean_loss(theirs, random_sequences(8)).backward()
    assert len(found["start"]) == sum(".lora_" in name for name, _ in theirs.named_parameters())
    for name, gradient in found["gradients"].items():
        matrix = theirs.get_parameter(name.replace(".weight", ".default.weight"))
        start = found["start"][name]
        # Singular vectors have no sign: a row of A, or a column of B, may be negated.
        rows, columns = (start, matrix.detach()) if "lora_A" in name else (start.T, matrix.detach().T)
        signs = (rows * columns).sum(1).sign()
        signs = signs[:, None] if "lora_A" in name else signs
        torch.testing.assert_close(start, signs * matrix, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, signs * matrix.grad, rtol=1e-4, atol=1e-6)

    # Files have plain adapters of twice the rank, and PEFT computes the same with them; merged too.
    assert found["config"]["r"] == 2 * RANK and found["config"]["init_lora_weights"] is True
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    plain = read.merge_and_unload()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=0, atol=1e-6)

    # They add the product of the matrices that began as the start, less the start's own.
    base, scale = AutoModelForCausalLM.from_pretrained(path), 6.0 / (RANK**0.5 if cfg.rslora else RANK)
    for a, b in ((name, name.replace("lora_A", "lora_B")) for name in found["start"] if "lora_A" in name):
        (a0, b0), (da, db) = ([found[which][name] for name in (a, b)] for which in ("start", "learned"))
        layer = a.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        added = scale * ((b0 + db) @ (a0 + da) - b0 @ a0)
        changed, before = (model.get_submodule(layer).weight for model in (merged, base))
        torch.testing.assert_close(changed, before + added, rtol=0, atol=1e-6)
    if num_ranks == 1:
        (again,) = run_ranks(1, _logprobs, path, LoraConfig(path=str(tmp_path / "adapter")))
        torch.testing.assert_close(again, found["changed"], rtol=0, atol=1e-6)


def _logprobs(path: str, lora: LoraConfig) -> Tensor:
    with spmd_session(threads_per_rank=1, deterministic=True) as world, torch.no_grad():
        meshes = build_meshes(world)
        policy = load_trained(model_config(path), lora, meshes, temperature=1.0, seed=0)
        batch = build_batch(random_sequences(8), plan_for(8, 1), meshes, aggregation="token_mean")
        return torch.cat([policy(micro_batch).logprobs for micro_batch in batch.micro_batches])


def test_experts_have_no_such_start(tmp_path: Path) -> None:
    cfg = model_config(save_qwen3_moe(tmp_path))
    (found,) = adapter_problems(load_model_config(cfg), cfg, LoraConfig(init="pissa"))
    assert 'lora.init = "pissa" begins at parts of the weights of linear layers, and lora.targets includes' in found
    assert not list(adapter_problems(load_model_config(cfg), cfg, LoraConfig(init="pissa", targets=["q_proj"])))
