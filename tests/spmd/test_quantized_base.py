"""Adapters on a base in few bits: all is as on a base that has the weights that those bits stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.config import LoraConfig, OptimConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.model.frozen import reference_of
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.lora.quantized import QuantizedLinear, bytes_of
from spmdrl.refit.refit import make_refit
from spmdrl.step.batch import build_batch
from spmdrl.step.export import export_hf
from spmdrl.types import Request
from tests.helpers.adapters import NoTokenizer, change_adapters
from tests.helpers.configs import minimal_config, model_config, plan_for
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.sglang_engine import answers, prompts, trainer_logprobs

pytest.importorskip("bitsandbytes")


def _one_update(path: str, lora: LoraConfig, folder: Path, **model: Any) -> dict[str, Any]:
    """Log-probabilities of a batch with fresh and changed adapters, gradients, and what an engine holds and says."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cfg = model_config(path, **model)
        policy = load_trained(cfg, lora, meshes, temperature=1.0, seed=0)
        base = reference_of(policy, cfg, meshes, temperature=1.0)
        mine = random_sequences(8)[world.rank :: world.num_ranks]
        batch = build_batch(mine, plan_for(8, world.num_ranks), meshes, aggregation="token_mean")

        @torch.no_grad()
        def logprobs(model: Any) -> Tensor:
            return torch.cat([model(micro_batch).logprobs for micro_batch in batch.micro_batches])

        found: dict[str, Any] = {"fresh": logprobs(policy)}
        stored = [layer.stored for layer in policy.modules() if isinstance(layer, QuantizedLinear)]
        found |= {"stored": [[numbers.clone(), state.absmax.clone()] for numbers, state in stored]}
        change_adapters(policy, 0.05)
        found |= {"changed": logprobs(policy), "off": logprobs(base)}
        adapters = {name: x.clone() for name, x in policy.adapters.trained.items()}
        optim = OptimConfig(name="spmdrl.tools.parity_cases:GradientAsWeight", lr=1.0, max_grad_norm=1e30)
        learner = Learner(policy, optim, SftObjective(), num_updates=1, dtype=torch.float32)
        update(learner, batch.mini_batches, meshes, step=1)
        found |= {"gradients": {name: x.clone() for name, x in policy.adapters.trained.items()}}
        policy.adapters.load({name: torch.zeros_like(x) for name, x in adapters.items()})
        export_hf(policy, NoTokenizer(), folder, meshes, dtype=torch.float32)
        policy.adapters.load(adapters)
        return found | {"mismatch": _mismatch(policy, meshes, path)}


def _mismatch(policy: Any, meshes: Any, path: str) -> float:
    """Refit an engine and sample: the largest difference from the trainer's log-probabilities."""
    engine = TorchEngine(
        AutoConfig.from_pretrained(path), device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=8
    )
    settings = minimal_config(model={"path": path}, lora={"rank": 4}, refit={"verify": "every"})
    make_refit(policy, engine, meshes, settings, dtype=torch.float32)(version=1)
    asked = [Request(prompt_ids=ids, seed=i, max_response_tokens=8) for i, ids in enumerate(prompts(4))]
    responses = answers(engine, asked)
    mine = [(r.prompt_ids + a.token_ids, len(r.prompt_ids), a.logprobs) for r, a in zip(asked, responses, strict=True)]
    everyones = [one for part in gather_objects(meshes.training, mine) for one in part]
    forwards = trainer_logprobs(policy, [ids for ids, _, _ in everyones])
    return max(
        float((torch.tensor(logprobs) - forward[length - 1 :]).abs().max())
        for (_, length, logprobs), forward in zip(everyones, forwards, strict=True)
    )


@pytest.mark.parametrize(("save", "base"), [(save_llama, "nf4"), (save_qwen3, "8bit")])
def test_it_computes_with_the_weights_that_its_bits_stand_for(tmp_path: Path, save: Any, base: str) -> None:
    path = save(tmp_path / "model")
    lora = LoraConfig(rank=4, alpha=6.0)
    quantized = lora.model_copy(update={"base": base})
    (found,) = run_ranks(1, _one_update, path, quantized, tmp_path / "whole")
    assert torch.equal(found["off"], found["fresh"]), "adapters that are off are not there"
    assert not torch.equal(found["changed"], found["fresh"])
    assert found["mismatch"] <= 1e-5

    # With no change, a merged export has the weights themselves. As a base of its own it computes the same bits.
    AutoConfig.from_pretrained(path).save_pretrained(tmp_path / "whole")
    (plain,) = run_ranks(1, _one_update, str(tmp_path / "whole"), lora, tmp_path / "again")
    assert not plain["stored"] and found["stored"]
    for name in ("fresh", "changed", "off"):
        assert torch.equal(found[name], plain[name]), name
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-7)

    # It is not the model itself, but near it, and as small as the planner says.
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (path, tmp_path / "whole"))
    layers = [name for name, layer in before.model.named_modules() if isinstance(layer, torch.nn.Linear)]
    assert len(layers) == len(found["stored"])
    for name, pair in zip(layers, found["stored"], strict=True):
        old, new = (model.model.get_submodule(name).weight.detach() for model in (before, after))
        error = float((old - new).norm() / old.norm())
        assert 1e-4 < error < (0.15 if base == "nf4" else 0.02), name
        assert sum(x.nbytes for x in pair) == bytes_of(old.numel(), quantized.base)
    for name, weight in before.named_parameters():
        if name.removeprefix("model.").removesuffix(".weight") not in layers:
            assert torch.equal(weight, after.get_parameter(name)), f"{name} is not a linear layer's"

    # Two ranks keep the same bits, and sum the same gradients.
    for rank in run_ranks(2, _one_update, path, quantized, tmp_path / "on two"):
        for one, two in zip(rank["stored"], found["stored"], strict=True):
            assert all(map(torch.equal, one, two))
        assert rank["mismatch"] <= 1e-5
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
