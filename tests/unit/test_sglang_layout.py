"""The devices of an engine together hold every weight of a checkpoint, fused and padded as SGLang keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteMoeConfig,
    Lfm2Config,
    Ministral3Config,
    MixtralConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

from spmdrl.engine.sglang import engine as sglang_engine
from spmdrl.engine.sglang.layout import TpShard, padded_adapters, sharded_weights
from spmdrl.engine.sglang.models import _settings_by_other_names
from spmdrl.families import family_of
from tests.helpers.models import GATED_DELTA_NET, SIZES

HEADS, KEY_HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY, EXPERTS = 8, 4, 4, 12, 40, 97, 3
MODEL = Qwen3Config(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)


def checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KEY_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KEY_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
        f"{layer}.self_attn.k_proj.bias": (KEY_HEADS * HEAD_DIM,),
        f"{layer}.self_attn.v_proj.bias": (KEY_HEADS * HEAD_DIM,),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}.mlp.down_proj.bias": (HIDDEN,),
        f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes[f"{layer}.mlp.experts.{expert}.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.experts.{expert}.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def held(size: int, device_type: str = "cuda") -> list[dict[str, torch.Tensor]]:
    weights = checkpoint()
    shares = [TpShard.of(MODEL, rank=rank, size=size, device_type=device_type) for rank in range(size)]
    return [sharded_weights(weights, share) for share in shares]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_all_devices_make_the_whole(size: int) -> None:
    weights, devices = checkpoint(), held(size)
    layer = "model.layers.0"
    replicas = max(1, size // KEY_HEADS)  # devices that hold the same key heads
    q, k, v = (weights[f"{layer}.self_attn.{n}_proj.weight"] for n in "qkv")
    fused = [d[f"{layer}.self_attn.qkv_proj.weight"] for d in devices]
    sizes = [q.shape[0] // size] + [k.shape[0] * replicas // size] * 2
    parts = [part.split(sizes) for part in fused]
    assert torch.equal(torch.cat([part[0] for part in parts]), q)
    assert torch.equal(torch.cat([part[1] for part in parts[::replicas]]), k)
    assert torch.equal(torch.cat([part[2] for part in parts[::replicas]]), v)
    assert all(torch.equal(parts[i][1], parts[i - i % replicas][1]) for i in range(size))
    gate_up = [d[f"{layer}.mlp.gate_up_proj.weight"].chunk(2) for d in devices]
    for number, name in enumerate(("gate", "up")):
        assert torch.equal(torch.cat([part[number] for part in gate_up]), weights[f"{layer}.mlp.{name}_proj.weight"])
    for name in (f"{layer}.self_attn.o_proj.weight", f"{layer}.mlp.down_proj.weight"):
        assert torch.equal(torch.cat([d[name] for d in devices], dim=1), weights[name])
    for name in ("model.norm.weight", f"{layer}.mlp.gate.weight", f"{layer}.mlp.down_proj.bias"):
        assert all(torch.equal(d[name], weights[name]) for d in devices)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = torch.cat([d[name] for d in devices])
        assert whole.shape[0] % 64 == 0
        assert torch.equal(whole[:VOCABULARY], weights[name]) and not whole[VOCABULARY:].any()
    for expert in range(EXPERTS):
        down = torch.cat([d[f"{layer}.mlp.experts.w2_weight"][expert] for d in devices], dim=1)
        assert torch.equal(down, weights[f"{layer}.mlp.experts.{expert}.down_proj.weight"])
        both = [d[f"{layer}.mlp.experts.w13_weight"][expert].chunk(2) for d in devices]
        for number, name in enumerate(("gate", "up")):
            whole = torch.cat([part[number] for part in both])
            assert torch.equal(whole, weights[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"])


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_weights_that_a_checkpoint_has_fused_are_cut_like_others(device_type: str) -> None:
    """Phi-3's. The config of these sizes has heads of 4."""
    weights, model = checkpoint(), Qwen3Config(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=4)
    for prefix, parts, name in (
        ("model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        ("model.layers.0.mlp", ("gate_proj", "up_proj"), "gate_up_proj"),
    ):
        weights[f"{prefix}.{name}.weight"] = torch.cat([weights.pop(f"{prefix}.{part}.weight") for part in parts])
    for rank, expected in enumerate(held(2, device_type)):
        found = sharded_weights(weights, TpShard.of(model, rank=rank, size=2, device_type=device_type))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_on_a_cpu_the_inner_size_is_padded_with_zeros() -> None:
    weights, devices = checkpoint(), held(2, "cpu")
    down = torch.cat([d["model.layers.0.mlp.down_proj.weight"] for d in devices], dim=1)
    assert down.shape[1] == 64
    assert torch.equal(down[:, :INNER], weights["model.layers.0.mlp.down_proj.weight"]) and not down[:, INNER:].any()


def test_every_device_has_the_whole_embedding_of_gemma_3() -> None:
    name, weights = "model.embed_tokens.weight", checkpoint()
    for rank in range(2):
        share = TpShard.of(Gemma3TextConfig(**SIZES), rank=rank, size=2, device_type="cuda")
        assert torch.equal(sharded_weights({name: weights[name]}, share)[name], weights[name])


def test_adapters_are_padded_as_the_weights_that_they_change() -> None:
    """On a CPU, whose inner sizes are padded: the change that SGLang computes is that of the whole weight, padded."""

    share = TpShard.of(MODEL, rank=0, size=1, device_type="cpu")
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    weights = {name: checkpoint()[f"model.layers.0.{name}.weight"] for name in names}
    adapters = {
        f"base_model.model.model.layers.0.{name}.lora_{side}.weight": torch.randn(shape)
        for name, weight in weights.items()
        for side, shape in (("A", (2, weight.shape[1])), ("B", (weight.shape[0], 2)))
    }
    padded = padded_adapters(adapters, share)
    for name in names:
        stem = f"base_model.model.model.layers.0.{name}.lora_"
        whole = adapters[f"{stem}B.weight"] @ adapters[f"{stem}A.weight"]
        (expected,) = sharded_weights({f"{name}.weight": whole}, share).values()
        torch.testing.assert_close(padded[f"{stem}B.weight"] @ padded[f"{stem}A.weight"], expected)
        assert (expected.shape != whole.shape) == name.startswith("mlp")


@pytest.mark.parametrize("size", [1, 2])
def test_gated_delta_nets_are_cut_by_heads(size: int) -> None:
    """Queries, keys and values lie end to end in one weight, and a device holds its heads of each."""
    model = Qwen3_5TextConfig(**(SIZES | GATED_DELTA_NET))
    keys, values, hidden, value_heads = 2 * 8, 4 * 8, model.hidden_size, 4
    layer = "model.layers.0.linear_attn"
    shapes = {
        "in_proj_qkv.weight": (2 * keys + values, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (value_heads, hidden),
        "in_proj_a.weight": (value_heads, hidden),
        "conv1d.weight": (2 * keys + values, 1, 4),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (8,),
        "out_proj.weight": (hidden, values),
    }
    torch.manual_seed(0)
    weights = {f"{layer}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    attention = {"model.layers.1.self_attn.o_proj.weight": torch.randn(hidden, 64)}
    devices = [
        sharded_weights(weights | attention, TpShard.of(model, rank=rank, size=size, device_type="cuda"))
        for rank in range(size)
    ]
    whole = {name.removeprefix(f"{layer}."): weight for name, weight in weights.items()}
    rows = [keys // size] * 2 + [values // size] * 2
    for fused, names in (("in_proj_qkvz.weight", ("in_proj_qkv.weight", "in_proj_z.weight")), ("conv1d.weight", ())):
        parts = [device[f"{layer}.{fused}"].split(rows[: 4 if names else 3]) for device in devices]
        joined = torch.cat([torch.cat(parts_of_devices) for parts_of_devices in zip(*parts, strict=True)])
        assert torch.equal(joined, torch.cat([whole[name] for name in names or (fused,)]))
    both = [device[f"{layer}.in_proj_ba.weight"].chunk(2) for device in devices]
    for number, name in enumerate(("in_proj_b.weight", "in_proj_a.weight")):
        assert torch.equal(torch.cat([part[number] for part in both]), whole[name])
    for name in ("A_log", "dt_bias"):
        assert torch.equal(torch.cat([device[f"{layer}.{name}"] for device in devices]), whole[name].to(torch.float32))
    assert devices[0][f"{layer}.A_log"].dtype == torch.float32
    columns = torch.cat([device[f"{layer}.out_proj.weight"] for device in devices], dim=1)
    assert torch.equal(columns, whole["out_proj.weight"])
    assert all(torch.equal(device[f"{layer}.norm.weight"], whole["norm.weight"]) for device in devices)
    assert all("model.layers.1.o_proj.weight" in device for device in devices)


def test_the_gated_norms_of_qwen3_next_have_the_dtype_of_its_config() -> None:
    name = "model.layers.0.linear_attn.norm.weight"
    for dtype, expected in (("float32", torch.float32), ("bfloat16", torch.bfloat16), (None, torch.bfloat16)):
        share = TpShard.of(Qwen3NextConfig(dtype=dtype), rank=0, size=1, device_type="cuda")
        assert sharded_weights({name: torch.ones(8).bfloat16()}, share)[name].dtype == expected


def test_towers_are_cut_by_heads_and_have_sglangs_names() -> None:
    model = Qwen3VLConfig()
    hidden, inner = 8, 12
    shapes = {
        "blocks.0.attn.qkv.weight": (3 * hidden, hidden),
        "blocks.0.attn.qkv.bias": (3 * hidden,),
        "blocks.0.attn.proj.weight": (hidden, hidden),
        "blocks.0.attn.proj.bias": (hidden,),
        "blocks.0.mlp.linear_fc1.weight": (inner, hidden),
        "blocks.0.mlp.linear_fc2.weight": (hidden, inner),
        "merger.linear_fc1.weight": (hidden, hidden),
        "merger.linear_fc2.weight": (hidden, hidden),
        "patch_embed.proj.weight": (hidden, 3, 2, 4, 4),
    }
    torch.manual_seed(0)
    weights = {f"model.visual.{name}": torch.randn(shape) for name, shape in shapes.items()}
    first, second = (
        sharded_weights(weights, TpShard.of(model, rank=rank, size=2, device_type="cuda")) for rank in range(2)
    )
    for kind in ("weight", "bias"):
        name = f"visual.blocks.0.attn.qkv_proj.{kind}"
        joined = [torch.cat(halves) for halves in zip(first[name].chunk(3), second[name].chunk(3), strict=True)]
        assert torch.equal(torch.cat(joined), weights[f"model.visual.blocks.0.attn.qkv.{kind}"])
    for name, dim in {"attn.proj": 1, "mlp.linear_fc1": 0, "mlp.linear_fc2": 1}.items():
        halves = [device[f"visual.blocks.0.{name}.weight"] for device in (first, second)]
        assert torch.equal(torch.cat(halves, dim), weights[f"model.visual.blocks.0.{name}.weight"])
    for name, dim in {"linear_fc1": 0, "linear_fc2": 1}.items():
        halves = [device[f"visual.merger.{name}.weight"] for device in (first, second)]
        assert torch.equal(torch.cat(halves, dim), weights[f"model.visual.merger.{name}.weight"])
    for name in ("blocks.0.attn.proj.bias", "patch_embed.proj.weight"):
        assert torch.equal(first[f"visual.{name}"], weights[f"model.visual.{name}"])


def loaded(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of an engine on one device after these of a checkpoint."""
    return sharded_weights(weights, TpShard.of(model, rank=0, size=1, device_type="cuda"))


def test_other_names_of_experts_and_of_latent_attention_are_sglangs() -> None:
    first, second, third, latent = (torch.randn(4, 4) for _ in range(4))
    of_expert = {
        f"a.experts.0.w{number}.weight": x for number, x in zip((1, 2, 3), (first, second, third), strict=True)
    }
    found = loaded(MixtralConfig(), of_expert)
    assert found.keys() == {"a.experts.w13_weight", "a.experts.w2_weight"}
    assert torch.equal(found["a.experts.w13_weight"], torch.cat([first, third])[None])
    assert torch.equal(found["a.experts.w2_weight"], second[None])
    attention = {"a.self_attn.q_a_proj.weight": first, "a.self_attn.kv_a_proj_with_mqa.weight": latent}
    found = loaded(DeepseekV3Config(), attention | {"a.self_attn.q_proj.weight": second})
    assert torch.equal(found["a.self_attn.fused_qkv_a_proj_with_mqa.weight"], torch.cat([first, latent]))
    assert torch.equal(found["a.self_attn.q_proj.weight"], second)  # there are no keys and values beside it
    alone = {"a.self_attn.q_proj.weight": first, "a.self_attn.kv_a_proj_with_mqa.weight": latent}
    assert loaded(DeepseekV3Config(q_lora_rank=None), alone).keys() == alone.keys()


def test_recurrent_layers_of_other_families_are_loaded_as_sglang_computes_them() -> None:
    decay, kernel, embedding = torch.randn(4), torch.randn(4, 1, 3), torch.randn(64, 4)
    found = loaded(
        NemotronHConfig(), {"backbone.layers.0.mixer.A_log": decay, "backbone.layers.0.x.up_proj.weight": decay}
    )
    assert found.keys() == {"model.layers.0.mixer.A", "model.layers.0.x.up_proj.weight"}  # MLPs without gates
    assert torch.equal(found["model.layers.0.mixer.A"], -decay.exp())
    found = loaded(Lfm2Config(), {"model.layers.0.conv.conv.weight": kernel, "model.embed_tokens.weight": embedding})
    assert torch.equal(found["model.layers.0.conv.conv_weight"], kernel)
    assert torch.equal(found["lm_head.weight"], embedding)
    untied = loaded(Lfm2Config(tie_word_embeddings=False), {"model.embed_tokens.weight": embedding})
    assert untied.keys() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("model", "name", "in_sglang"),
    [
        (Ernie4_5_MoeConfig(), "a.mlp.moe_statics.e_score_correction_bias", "a.mlp.gate.e_score_correction_bias"),
        (GraniteMoeConfig(), "a.block_sparse_moe.input_linear.weight", "a.block_sparse_moe.experts.w13_weight"),
        (GraniteMoeConfig(), "a.block_sparse_moe.output_linear.weight", "a.block_sparse_moe.experts.w2_weight"),
        (GraniteMoeConfig(), "a.block_sparse_moe.router.layer.weight", "a.block_sparse_moe.gate.weight"),
        (NemotronHConfig(), "backbone.embeddings.weight", "model.embed_tokens.weight"),
        (NemotronHConfig(), "backbone.norm_f.weight", "model.norm_f.weight"),
        (FalconH1Config(), "model.layers.0.self_attn.o_proj.weight", "model.layers.0.o_proj.weight"),
        (Qwen3VLConfig(), "model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_weight_with_another_name_in_sglang_is_whole(model: Any, name: str, in_sglang: str) -> None:
    weight = torch.randn(3, 64, 4)
    found = loaded(model, {name: weight})
    assert found.keys() == {in_sglang} and torch.equal(found[in_sglang], weight)


def test_weights_that_sglang_computes_nothing_with_may_be_empty_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes Falcon-H1's norms of queries and keys, which the model does not have."""
    answers = {"a.q_norm.weight": 0, "a.k_norm.weight": 0, "b.q_norm.weight": 7, "c.weight": 0}
    monkeypatch.setattr(sglang_engine, "host_barrier", lambda _: None)
    monkeypatch.setattr(sglang_engine, "gather_objects", lambda _, mine: [mine])
    engine = sglang_engine.SGLangEngine.__new__(sglang_engine.SGLangEngine)
    engine._mesh, engine._expected, engine._process = None, {}, SimpleNamespace(is_dead=lambda: False)
    engine._digest_requests = SimpleNamespace(take_answers=lambda: answers)
    for config, differing in ((FalconH1Config(), ["b.q_norm.weight", "c.weight"]), (Qwen3Config(), sorted(answers))):
        engine._unused = family_of(config).sglang.has_unused
        assert engine.differing({}) == differing


def test_settings_have_the_names_by_which_sglang_reads_them() -> None:
    scaled = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    by_place = Ministral3Config(rope_parameters=scaled | {"llama_4_scaling_beta": 0.1})
    assert _settings_by_other_names(by_place) == {"original_max_position_embeddings": 64}
    assert _settings_by_other_names(NemotronHConfig(n_groups=4)) == {"mamba_n_groups": 4}
    assert _settings_by_other_names(Gemma2Config(hidden_activation="gelu")) == {"hidden_act": "gelu"}
    assert _settings_by_other_names(BambaConfig()) == _settings_by_other_names(Qwen3Config()) == {}
