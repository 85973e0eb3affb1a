"""What each phase is predicted to hold, where the arithmetic can be done by hand, and the planner's answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from spmdrl.activations import Decoder, Kept, kept_bytes, kept_per_layer
from spmdrl.config import Config, ModelConfig
from spmdrl.memory import CONTEXT_BYTES, GIB, Layout, ModelSize, gathered_weights, model_size
from spmdrl.model.load import parameter_shapes
from spmdrl.model.sizes import cut_by_tp, expert_names
from spmdrl.phase_memory import CUDA_PROCESS_BYTES, PhaseMemory, micro_batch_tokens, phase_memory
from spmdrl.predict import Model, describe_rank
from spmdrl.report.memory import prediction_table
from spmdrl.tools import plan
from tests.unit.test_memory import config

QWEN3 = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
    dtype="bfloat16",
)
EMBEDDING, ATTENTION, MLP, NORMS = 1000 * 64, 2 * 64 * 128 + 2 * 64 * 64, 3 * 64 * 256, 2 * 64 + 2 * 32
LAYER = ATTENTION + MLP + NORMS
WHOLE = EMBEDDING + 4 * LAYER + 64


def model_of(transformers_config: Any) -> Model:
    return Model.read(transformers_config, ModelConfig(path="m"))


def phases_of(cfg: Config, *, num_ranks: int = 2, on_gpu: bool = True) -> dict[str, PhaseMemory]:
    rank = describe_rank(cfg, model_of(QWEN3), num_ranks=num_ranks, device_bytes=80 * GIB, on_gpu=on_gpu)
    return {phase.name: phase for phase in phase_memory(cfg, rank)}


def test_every_part_of_every_phase() -> None:
    phases = phases_of(config())
    shard, bucket = WHOLE // 2, 2 * WHOLE  # no row is left over; a bucket would hold more than the model
    gathered = 2 * (EMBEDDING + 64 + 2 * LAYER)
    trainer = {"weights": 4 * shard, "optimizer": 8 * shard, "refit buckets": 2 * bucket + bucket + bucket // 2}
    host = {"process": CUDA_PROCESS_BYTES}
    tokens = 64
    kept = Kept(level="none", every_layers=1, compute_bytes=2, repeats_keys=True)
    # A model this small has its fullest moment at the head.
    update = {
        "gradients": 4 * shard,
        "gathered": gathered,
        "activations": kept_bytes(describe(QWEN3), kept, num_tokens=tokens),
        "logits": 4 * (4 * tokens * 1000 + tokens * 64),
        "whole gradients": 2 * EMBEDDING,
    }
    rows, cache = 8, 2 * 4 * 2 * 32 * 16 * 2  # 8 rollouts for each engine; layers, key heads, their width, tokens
    sampling = 2 * WHOLE + rows * (cache + 1000 * (4 + 4 + 2))
    expected = {
        "load": ({"weights": 4 * shard}, host | {"files": 2 * shard, "weights on their way": 4 * shard}),
        "refit": ({"trainer": 12 * shard, "refit buckets": trainer["refit buckets"], "engine": 2 * WHOLE}, host),
        "rollout": ({"trainer": 12 * shard, "refit buckets": trainer["refit buckets"], "engine": sampling}, host),
        "forward-backward": (trainer | update | {"engine": 2 * WHOLE}, host),
        "optimizer": (trainer | {"gradients": 4 * shard, "engine": 2 * WHOLE}, host),
        "save": (
            trainer | {"gathered": trainer["refit buckets"] * 2 // 3 + 1, "engine": 2 * WHOLE},
            host | {"exported files": 2 * WHOLE},
        ),
    }
    assert {name: (phase.device, phase.host) for name, phase in phases.items()} == expected


def describe(transformers_config: Any) -> Decoder:
    return describe_rank(
        config(), model_of(transformers_config), num_ranks=1, device_bytes=80 * GIB, on_gpu=True
    ).decoder


def test_what_a_lever_moves_is_elsewhere() -> None:
    shard = 4 * WHOLE // 2
    usual = phases_of(config())["optimizer"]
    on_host = phases_of(config(optim={"state_on_host": True}))["optimizer"]
    assert "optimizer" not in on_host.device and on_host.host["optimizer"] == usual.device["optimizer"] == 2 * shard
    assert on_host.device["visiting state"] == 2 * shard  # this model is one block
    asleep = phases_of(config(offload={"trainer": "all"}))["rollout"]
    assert "trainer" not in asleep.device and asleep.host["sleeping trainer"] == 3 * shard
    both = phases_of(config(offload={"trainer": "all"}, optim={"state_on_host": True}))["rollout"]
    assert both.host["sleeping trainer"] == shard and both.host["optimizer"] == 2 * shard
    offloaded = phases_of(config(model={"cpu_offload": True}))["forward-backward"]
    assert not {"weights", "optimizer", "gradients"} & offloaded.device.keys()
    assert offloaded.host["offloaded policy"] == 4 * shard
    assert phases_of(config(loss={"kl_coef": 0.1}))["logprobs"].host["reference"] == shard
    served = phases_of(config(rollout={"engine": "sglang"}))["rollout"]
    assert "engine" not in served.device and served.elsewhere["engine"] > 40 * GIB
    assert served.device_bytes == served.process_bytes + served.elsewhere["engine"]


def test_layers_that_are_gathered_at_the_same_time() -> None:
    size = ModelSize(whole=0, shard=0, root=100, largest_layer=10, num_layers=4)

    def gathered(**model: Any) -> int:
        return gathered_weights(ModelConfig(path="m", **model), size)

    assert [gathered(), gathered(prefetch_layers=2), gathered(prefetch_layers=9)] == [120, 130, 140]
    assert gathered(reshard_after_forward=False) == 140
    frozen = ModelConfig(path="m", reshard_after_forward=False)
    assert gathered_weights(frozen, size, trainable=False) == 120


def test_a_chunk_of_the_context_and_a_part_of_the_layers_need_less() -> None:
    whole, chunk = config(), config(parallel={"cp": 2})
    runs = [describe_rank(c, model_of(QWEN3), num_ranks=2, device_bytes=GIB, on_gpu=True).run for c in (whole, chunk)]
    assert [micro_batch_tokens(c, run) for c, run in zip((whole, chunk), runs, strict=True)] == [64, 32]
    decoder = describe(QWEN3)
    kept = Kept(level="none", every_layers=1, compute_bytes=2, repeats_keys=False)
    half = decoder.cut(2)
    assert kept_per_layer(decoder, kept, level="none") > kept_per_layer(half, kept, level="none")
    assert kept_per_layer(decoder, kept, level="full") == kept_per_layer(half, kept, level="full") == 2 * 64


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallelism_cuts_what_the_models_plan_says(tp: int) -> None:
    shapes, layers = parameter_shapes(QWEN3, ModelConfig(path="m"))
    cut = cut_by_tp(QWEN3, set().union(*layers))
    assert {name.split(".")[-2] for name in cut} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    size = model_size(shapes, layers, layout=Layout(copy_ranks=4, tp=tp, cut_by_tp=cut))
    assert size.largest_layer == (ATTENTION + MLP) // tp + NORMS
    whole = WHOLE - 4 * (ATTENTION + MLP)
    assert size.shard == (ATTENTION + MLP) + whole * tp // 4


def test_expert_parallelism_deals_experts() -> None:
    moe = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    )
    shapes, layers = parameter_shapes(moe, ModelConfig(path="m"))
    experts = expert_names(shapes)
    of_experts = 2 * 8 * 3 * 64 * 32
    one, four = (model_size(shapes, layers, layout=Layout(copy_ranks=4, ep=ep, experts=experts)) for ep in (1, 4))
    assert one.shard == four.shard and one.whole == four.whole
    assert one.largest_layer - four.largest_layer == of_experts // 2 * 3 // 4
    decoder = describe(moe)
    assert (decoder.mlp_width, decoder.experts_per_token) == (2 * 32, 2)


def test_predicted_beside_measured() -> None:
    phases = [
        PhaseMemory(name, {"weights": GIB * device}, {"process": GIB}, {"engine": 50 * GIB})
        for name, device in (("load", 2), ("refit", 1), ("rollout", 1), ("forward-backward", 5), ("optimizer", 4))
    ]
    scalars = {"memory/rollout_peak_gib": 1.5, "memory/logprobs_peak_gib": 1, "memory/update_peak_gib": 4.75}
    assert prediction_table(1, phases, scalars, on_gpu=True).splitlines() == [
        "peaks in step 1, GiB: torch's allocations on the fullest device",
        "  phase    predicted  measured",
        "  rollout       1.00      1.50",
        "  update        5.00      4.75",
    ]
    # Without a device the host holds both, and its peak never falls.
    assert prediction_table(2, phases, scalars, on_gpu=False).splitlines()[2:] == [
        "  rollout       3.00      1.50",
        "  update        6.00      4.75",
    ]


BASICS = """
[run]
name = "x"
num_steps = 1
[model]
path = "{path}"
[data]
max_prompt_tokens = 2000
[[data.sources]]
kind = "jsonl"
path = "a"
[rollout]
prompts_per_step = 8
group_size = 8
max_response_tokens = 2000
[reward]
terms = [{{ kind = "exact" }}]
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 16000
"""


@pytest.fixture
def toml(tmp_path: Path) -> str:
    """Settings for a model of which there is nothing but its config: 0.6 billion parameters."""
    large = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
    Qwen3Config(**large, **heads, tie_word_embeddings=True, dtype="bfloat16").save_pretrained(tmp_path / "model")
    path = tmp_path / "x.toml"
    path.write_text(BASICS.format(path=tmp_path / "model"), encoding="utf-8")
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = plan.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_planner_needs_a_config_alone(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([toml, "--ranks", "2", "--gpu-gib", "80"]) == 0
    shown = capsys.readouterr().out
    assert "0.60 billion parameters" in shown and "forward-backward" in shown
    code, answer = planned(capsys, toml, "--ranks", "2", "--gpu-gib", "80")
    assert code == 0 and answer["fits"] and not answer["problems"]
    assert all(row["gpu_bytes"] == sum(row["gpu"].values()) + CONTEXT_BYTES for row in answer["phases"])


def test_what_does_not_fit_is_told_with_what_does(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [toml, "--ranks", "2", "--gpu-gib", "36"]
    code, answer = planned(capsys, *argv)
    assert code == 2 and not answer["fits"]
    assert answer["problems"][0].startswith("forward-backward takes ") and "activations" in answer["problems"][0]
    remedies = [problem.removeprefix("it fits with ") for problem in answer["problems"] if "it fits with" in problem]
    assert remedies[0] == 'model.gradient_checkpointing = "selective"'
    for remedy in remedies[:2]:
        assert planned(capsys, *argv, remedy.replace(" = ", "="))[0] == 0
    assert AutoConfig.from_pretrained(Path(toml).parent / "model").num_hidden_layers == 28


def test_several_levers_are_named_where_one_is_not_enough(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [toml, "--ranks", "2", "--gpu-gib", "16"]
    _, answer = planned(capsys, *argv)
    levers = answer["problems"][-1].removeprefix("it fits with ").split(" and ")
    assert len(levers) > 1
    assert planned(capsys, *argv, *(lever.replace(" = ", "=") for lever in levers))[0] == 0
    code, answer = planned(capsys, toml, "--ranks", "2", "--gpu-gib", "3")
    assert code == 2 and "use more ranks" in answer["problems"][-1]


def test_the_planner_refuses_what_a_run_would(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([toml, "--ranks", "3", "--gpu-gib", "80"]) == 2
    assert "cannot be split over 3 ranks" in capsys.readouterr().err
