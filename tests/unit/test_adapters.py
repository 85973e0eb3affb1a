"""Which weights get adapters, what they are called, and what the planner says of them; no process group."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig

from spmdrl.checkpoint.manifest import STATE
from spmdrl.checkpoint.resume import refuse_other_adapters
from spmdrl.config import LoraConfig, OptimConfig, ParallelConfig
from spmdrl.memory.device import training_memory
from spmdrl.model.load import model_without_memory
from spmdrl.model.lora import quantized
from spmdrl.model.lora.adapters import Identity, LoraScaling
from spmdrl.model.lora.policy import adapter_sizes
from spmdrl.model.lora.targets import ALL_LINEAR, short_names, target_problems, targets_of
from spmdrl.preflight.forecast import Model, predict
from spmdrl.types import UserError
from tests.helpers.configs import minimal_config, model_config
from tests.helpers.models import save_gpt_oss, save_qwen3, save_qwen3_moe, save_qwen3_next
from tests.helpers.vision_models import save_gemma3_vl, save_qwen3_vl_moe


def _model(path: str) -> Any:
    return model_without_memory(AutoConfig.from_pretrained(path), model_config(path))


@pytest.mark.parametrize("save", [save_qwen3, save_qwen3_moe, save_gpt_oss, save_qwen3_next])
def test_all_linear_layers_but_the_head_get_adapters(tmp_path: Path, save: Any) -> None:
    model = _model(save(tmp_path))
    targets = targets_of(model, ALL_LINEAR)
    weights = {target.weight for target in targets}
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    of_matrices = {
        name
        for name, weight in model.named_parameters()
        if id(weight) not in ends and ((weight.ndim == 3 and ".experts." in name) or name.endswith("_proj.weight"))
    }
    assert of_matrices <= weights
    assert len({target.module for target in targets}) == len(targets), "PEFT's names are names of one each"
    for target in targets:
        (rank, _), (_, same) = target.shapes(2)
        assert rank == same


@pytest.mark.parametrize("save", [save_gemma3_vl, save_qwen3_vl_moe])
def test_a_tower_gets_no_adapters(tmp_path: Path, save: Any) -> None:
    model = _model(save(tmp_path))
    for wanted in (ALL_LINEAR, ["q_proj", "fc1", "up_proj", "gate_up_proj"]):
        targets = targets_of(model, wanted)
        assert targets and all(".language_model." in target.weight for target in targets)
        layers, _ = short_names(model, targets)
        modules = [name for name, _ in model.named_modules()]
        named = {name for name in modules for layer in layers if name == layer or name.endswith(f".{layer}")}
        assert not any("vision" in name or "visual" in name for name in named)


def test_names_are_short_where_they_name_nothing_else(tmp_path: Path) -> None:
    model = _model(save_qwen3(tmp_path))
    assert short_names(model, targets_of(model, ["q_proj", "v_proj"])) == (["q_proj", "v_proj"], [])
    some = ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"]
    assert short_names(model, targets_of(model, some)) == (some, [])
    experts = _model(save_qwen3_moe(tmp_path / "experts"))
    both = ["experts.down_proj", "experts.gate_up_proj"]
    assert short_names(experts, targets_of(experts, both)) == ([], both)


def test_a_layer_of_another_kind_is_told(tmp_path: Path) -> None:
    model = _model(save_qwen3(tmp_path))
    found = list(target_problems(model, ["q_proj", "input_layernorm", "embed_tokens", "absent"]))
    assert [sentence.partition(",")[0] for sentence in found] == [
        f'lora.targets names "{name}"' for name in ("input_layernorm", "embed_tokens", "absent")
    ]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_rslora_divides_by_the_root_of_the_rank(rslora: bool, scale: float) -> None:
    assert LoraScaling(rank=4, alpha=8.0, rslora=rslora).scale == scale


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_planner_counts_adapters(tmp_path: Path, num_ranks: int) -> None:
    cfg = model_config(save_qwen3(tmp_path))
    config, lora = AutoConfig.from_pretrained(cfg.path), LoraConfig(rank=5)
    adapters = sum(adapter_sizes(config, cfg, lora).values())
    by_hand = 3 * 5 * sum(map(sum, [(48, 64), (48, 32), (48, 32), (64, 48), (48, 80), (48, 80), (80, 48)]))
    assert adapters == by_hand
    size = Model.read(config, cfg, lora=lora).size(ParallelConfig(), num_training=num_ranks)
    planned = training_memory(cfg, OptimConfig(lr=1.0), [size], compute_bytes=2)
    own = math.ceil(adapters / num_ranks)
    assert planned.weights == 2 * size.shard + 4 * adapters
    assert planned.gradients == 4 * adapters + 4 * own
    assert planned.optimizer == 8 * own
    assert planned.stays == 4 * adapters
    with_start = Model.read(config, cfg, lora=LoraConfig(rank=5, init="pissa")).size(
        ParallelConfig(), num_training=num_ranks
    )
    beside = training_memory(cfg, OptimConfig(lr=1.0), [with_start], compute_bytes=2)
    assert beside == replace(planned, weights=planned.weights + 4 * adapters, stays=8 * adapters)


def test_the_planner_counts_a_base_in_few_bits(tmp_path: Path) -> None:
    cfg = model_config(save_qwen3(tmp_path))
    config = AutoConfig.from_pretrained(cfg.path)
    linears = 3 * sum(map(math.prod, [(48, 64), (48, 32), (48, 32), (64, 48), (48, 80), (48, 80), (80, 48)]))

    def planned(**lora: Any) -> Any:
        size = Model.read(config, cfg, lora=LoraConfig(rank=5, **lora)).size(ParallelConfig(), num_training=2)
        return size, training_memory(cfg, OptimConfig(lr=1.0), [size], compute_bytes=2)

    (sharded, before), (size, after) = planned(), planned(base="nf4")
    assert size.whole == sharded.whole, "engines and exports get all of it"
    assert size.shard == sharded.shard - linears // 2
    in_bits = linears // 2 + 4 * linears // 64
    assert after.weights == before.weights - linears + in_bits
    assert after.gathered < before.gathered and size.largest_quantized == 48 * 80
    assert planned(base="8bit")[1].weights == after.weights + linears // 2


def test_a_base_that_cannot_be_kept_in_few_bits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, with_experts = _model(save_qwen3(tmp_path / "a")), _model(save_qwen3_moe(tmp_path / "b"))
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: name)
    assert list(quantized.quantization_problems(dense, "nf4")) == []
    (said,) = quantized.quantization_problems(with_experts, "nf4")
    assert said.startswith('lora.base = "nf4" keeps linear layers in few bits, and most of this model are experts')
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    (said,) = quantized.quantization_problems(dense, "8bit")
    assert said.startswith('lora.base = "8bit" needs bitsandbytes, which is not installed; install it with pip')


def test_the_planner_counts_the_experts_that_the_torch_engine_merges(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path)
    config = AutoConfig.from_pretrained(path)

    def engine_bytes(**lora: Any) -> int:
        cfg = minimal_config(model={"path": path}, lora=lora)
        model = Model.read(config, cfg.model, lora=cfg.lora)
        return predict(cfg, model, num_ranks=1, device_bytes=2**36, on_gpu=False).plan.engine_weights

    experts = sum(x.numel() for x in _model(path).parameters() if x.ndim == 3)
    assert experts and engine_bytes() - engine_bytes(merge=True) == 2 * 4 * experts
    assert engine_bytes(targets=["q_proj"]) == engine_bytes(merge=True)


def test_the_planner_counts_a_byte_for_weights_in_blocks(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path)
    config = AutoConfig.from_pretrained(path)

    def engine_bytes(**rollout: Any) -> int:
        cfg = minimal_config(model={"path": path}, rollout=rollout, correction={"kind": "tis"})
        model = Model.read(config, cfg.model, lora=cfg.lora)
        return predict(cfg, model, num_ranks=1, device_bytes=2**36, on_gpu=False).plan.engine_weights

    names = [(name, x.numel()) for name, x in _model(path).named_parameters() if "experts" in name or "_proj" in name]
    in_blocks = sum(count for _, count in names)
    saved = engine_bytes(engine="sglang") - engine_bytes(engine="sglang", quantization="fp8")
    assert in_blocks and saved == 3 * in_blocks - 4 * (in_blocks // 128**2)  # of float32
    assert engine_bytes(quantization="fp8") == engine_bytes(), "the torch engine has the numbers they stand for"


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    held = Identity(base="a", matrices="b", rank=8, alpha=16.0, rslora=False)
    learner = {"optimizer": "adamw", "has_state": True, "coefficients": {}} | {
        "loss_scale": {"scale": 1.0, "dynamic": False, "growth_interval": 1, "good_updates": 0}
    }

    def problem(saved: Identity | None, now: Identity | None) -> str:
        about = learner | {"adapters": None if saved is None else asdict(saved)}
        (tmp_path / STATE).write_text(json.dumps({"learners": {"policy": about}}))
        with pytest.raises(UserError) as raised:
            refuse_other_adapters(tmp_path, "policy", None if now is None else cast(Any, SimpleNamespace(identity=now)))
        return str(raised.value).removeprefix(f"{tmp_path} holds ")

    assert problem(None, held).startswith("no adapters, and this run trains some; remove [lora]")
    assert problem(held, None).startswith("adapters, and this run trains none; add [lora]")
    assert problem(held, replace(held, base="c")).startswith("adapters of another base")
    assert problem(held, replace(held, matrices="c")).startswith(
        "adapters of rank 8, alpha 16, rslora false, and those of this run are of other layers; set [lora] back"
    )
    assert "are of rank 8, alpha 32, rslora false; set" in problem(held, replace(held, alpha=32.0))
    assert "are of rank 8, alpha 16, rslora false, init pissa; set" in problem(held, replace(held, init="pissa"))


def test_experts_of_one_layer_are_named_in_full(tmp_path: Path) -> None:
    model = _model(save_qwen3_moe(tmp_path))
    some = ["model.layers.0.mlp.experts.gate_up_proj"]
    assert short_names(model, targets_of(model, some)) == ([], some)
