"""What each phase is predicted to hold, where the arithmetic can be done by hand, and the planner's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma3TextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from spmdrl.config import Config, ModelConfig, ParallelConfig, SftConfig, TuningConfig, read_run_config
from spmdrl.memory import phases
from spmdrl.memory.activations import ActivationSettings, Decoder, layer_activation_bytes
from spmdrl.memory.device import GIB, ModelSize, ShardLayout, gathered_weights, model_size
from spmdrl.memory.overhead import (
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    KERNEL_BYTES,
    NCCL_BYTES,
)
from spmdrl.memory.phase import PhaseMemory
from spmdrl.memory.phases import CUDA_PROCESS_BYTES, _hidden_bytes, micro_batch_tokens
from spmdrl.model.load import parameter_shapes, read_model_config
from spmdrl.preflight.forecast import Model, describe_rank, expert_names, predict, split_by_tp
from spmdrl.report.memory import Peak, predicted_peaks, prediction_table, with_host_so_far
from spmdrl.report.report import resource_metrics
from spmdrl.tools import fit as plan
from spmdrl.types import UserError
from tests.helpers.configs import minimal_config
from tests.helpers.few_bits import save_deepseek_in_fp8, save_gpt_oss_in_mxfp4, save_qwen3_in_bfloat16
from tests.helpers.models import GATED_DELTA_NET, QWEN3, SIZES, VOCABULARY
from tests.helpers.small_run import write_config, write_sft_config

EMBEDDING, ATTENTION, MLP, NORMS = 1000 * 64, 2 * 64 * 128 + 2 * 64 * 64, 3 * 64 * 256, 2 * 64 + 2 * 32
GEMMA3 = Gemma3TextConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
LAYER = ATTENTION + MLP + NORMS
WHOLE = EMBEDDING + 4 * LAYER + 64


def model_of(transformers_config: Any) -> Model:
    return Model.read(transformers_config, ModelConfig(path="m"))


def phases_of(cfg: Config | TuningConfig, *, num_ranks: int = 2, on_gpu: bool = True) -> dict[str, PhaseMemory]:
    prediction = predict(cfg, model_of(QWEN3), num_ranks=num_ranks, device_bytes=80 * GIB, on_gpu=on_gpu)
    return {phase.name: phase for phase in prediction.phases}


@pytest.mark.parametrize("keys", [64, 128], ids=["grouped heads", "keys for each query head"])
def test_every_part_of_every_phase(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmdrl.preflight.forecast.varlen_takes_groups", lambda: keys == 64)
    phases = phases_of(minimal_config())
    shard, bucket = WHOLE // 2, 2 * WHOLE  # no row is left over; a bucket would hold more than the model
    gathered = 2 * (EMBEDDING + 64 + 2 * LAYER)
    trainer = {"weights": 4 * shard, "optimizer": 8 * shard, "refit buckets": 2 * bucket + bucket + bucket // 2}
    host = {"process": CUDA_PROCESS_BYTES}
    tokens = 64
    # For each token: norms, inputs of the projections, norms of heads, attention, the MLP.
    layer = 2 * (2 * 64 + 4) + 2 * 2 * 64 + 2 * (128 + 64) + (2 * 2 * (128 + keys) + 4 * 4) + 3 * 2 * 256
    outside = 2 * 64 + 4 + 2 * 64 + 2 * 2 * 32  # the last norm, what the head reads, rotary tables
    # A model this small has its fullest moment in the last layer: gradients of the MLP and of hidden states.
    update = {
        "gradients": 4 * shard,
        "gathered": gathered,
        "activations": tokens * (4 * layer + outside),
        "one layer": tokens * 3 * 2 * (256 + 64),
        "whole gradients": 2 * EMBEDDING + (4 + 2) * LAYER,
    }
    rows, cache = 8, 2 * 4 * 2 * 32 * 16 * 2  # 8 rollouts for each engine; layers, key heads, their width, tokens
    sampling = 2 * WHOLE + rows * (cache + 1000 * (4 + 4 + 2))
    expected = {
        "load": ({"weights": 4 * shard}, host | {"files": 2 * shard, "weights on their way": 4 * shard}),
        "refit": ({"trainer": 12 * shard, "refit buckets": trainer["refit buckets"], "engine": 2 * WHOLE}, host),
        "rollout": ({"trainer": 12 * shard, "refit buckets": trainer["refit buckets"], "engine": sampling}, host),
        "forward-backward": (trainer | update | {"engine": 2 * WHOLE}, host),
        "optimizer": (trainer | {"gradients": 4 * shard, "engine": 2 * WHOLE}, host),
        "save": (trainer | {"engine": 2 * WHOLE}, host),
        "export": (
            trainer | {"gathered": bucket + bucket + bucket // 2, "engine": 2 * WHOLE},
            host | {"exported files": 2 * WHOLE},
        ),
    }
    assert {name: (phase.device, phase.host) for name, phase in phases.items()} == expected
    assert [name for name, phase in phases.items() if "unused blocks" in phase.elsewhere] == ["forward-backward"]


def test_models_that_compute_one_after_the_other_need_the_memory_of_one() -> None:
    several = {"updates_per_step": 2}
    alone, beside = (
        phases_of(minimal_config(loss=several | more))["logprobs"].device for more in ({}, {"kl_coef": 0.1})
    )
    assert alone["activations and logits"] == beside["activations and logits"] > 0


def test_the_cache_of_a_model_with_states() -> None:
    """Keys and values for every token of the layers that attend, and one state for each of the others."""
    hybrid = Qwen3_5TextConfig(**(SIZES | GATED_DELTA_NET | {"architectures": ["Qwen3_5ForCausalLM"]}))
    phases = predict(minimal_config(), model_of(hybrid), num_ranks=2, device_bytes=80 * GIB, on_gpu=True).phases
    engine = {phase.name: phase.device["engine"] for phase in phases if phase.name in ("refit", "rollout")}
    keys_values = 2 * 2 * 16 * 16 * 2  # of two key heads, their width, tokens
    states = (2 * 2 * 8 + 4 * 8) * 3 * 2 + 4 * 8 * 8 * 4  # inputs of the convolution, and one matrix for each head
    logits = VOCABULARY * (4 + 4 + 2)
    assert engine["rollout"] - engine["refit"] == 8 * (keys_values + states + logits)


def test_episodes_that_wait_may_take_as_much_of_the_cache_as_those_that_run() -> None:
    source = {"kind": "class", "name": "games:Game"}
    alone, asked = (phases_of(minimal_config(**more)) for more in ({}, {"environment": {"source": source}}))
    cache = 8 * 2 * 4 * 2 * 32 * 16 * 2  # as above
    assert asked["rollout"].device["engine"] - alone["rollout"].device["engine"] == cache


def test_the_cache_holds_a_question_to_the_policy_as_its_judge_that_is_longer_than_a_rollout() -> None:
    judge = {"kind": "judge", "url": "policy", "max_question_tokens": 50, "max_answer_tokens": 10}
    terms = {"terms": [{"kind": "exact"}, judge]}
    alone, asked = (phases_of(minimal_config(**more)) for more in ({}, {"reward": terms}))
    of_token = 2 * 4 * 2 * 32 * 2  # in every layer, as above
    assert asked["rollout"].device["engine"] - alone["rollout"].device["engine"] == 8 * (60 - 16) * of_token


def test_each_token_has_its_candidates_beside_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "logits_bytes", lambda *_, **__: 7)
    rank: Any = SimpleNamespace(**dict.fromkeys(("tile_elements", "tile_columns", "compute_bytes", "on_gpu"), 1))
    rank.decoder = SimpleNamespace(router_width=0)
    monkeypatch.setattr(phases, "micro_batch_tokens", lambda *_: 10)
    rank.run = None
    with_candidates = minimal_config()
    with_candidates = with_candidates.model_copy(
        update={"rollout": with_candidates.rollout.model_copy(update={"top_k": 5})}
    )
    # A number of 64 bits and six of 32.
    assert (phases._logits(minimal_config(), rank), phases._logits(with_candidates, rank)) == (7, 7 + 10 * 5 * 32)


def test_a_copy_for_a_checkpoint_has_the_model_that_follows_the_policy() -> None:
    follows = {"distill": {"teacher": "mine"}, "models": {"mine": {"weights": "lagged"}}}
    alone, beside = (phases_of(minimal_config(checkpoint={"every": 1}, **more)) for more in ({}, follows))
    copies = [one["save"].host["checkpoint copy"] for one in (alone, beside)]
    assert copies == [(4 + 8) * (WHOLE // 2), (4 + 8 + 4) * (WHOLE // 2)]


def test_what_teachers_leave_is_of_a_chunk_of_the_context() -> None:
    run = SimpleNamespace(rollouts_per_step=16, num_shares=2, max_response_tokens=8)
    teachers = [SimpleNamespace(teaches_vocabulary=wide > 10, decoder=SimpleNamespace(hidden=wide)) for wide in (4, 96)]
    rank: Any = SimpleNamespace(frozen=teachers, run=run, compute_bytes=2)
    for cp in (1, 4):
        cfg = minimal_config().model_copy(update={"parallel": ParallelConfig(cp=cp)})
        assert _hidden_bytes(cfg, rank) == 8 * 8 // cp * 96 * 2


def sft_config(**sections: dict[str, Any]) -> SftConfig:
    """As much work for the trainer as in `config`."""
    settings = minimal_config(**sections).model_dump(include={"run", "model", "data", "optim", "pack", "export"})
    return SftConfig.model_validate(settings | {"sft": {"sequences_per_step": 16, "max_response_tokens": 8}})


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"cpu_offload": True}, "export": {"at_end": False}},
        {"model": {"gradient_checkpointing": "full"}, "optim": {"state_on_host": True}},
    ],
    ids=str,
)
def test_fine_tuning_has_the_trainers_phases_with_nothing_beside_them(sections: dict[str, dict[str, Any]]) -> None:
    beside = {"refit buckets", "engine"}
    with_engine, alone = phases_of(minimal_config(**sections)), phases_of(sft_config(**sections))
    assert with_engine.keys() - alone.keys() == {"refit", "rollout"}
    for name, phase in alone.items():
        parts = {part: size for part, size in with_engine[name].device.items() if part not in beside}
        assert (parts, with_engine[name].host) == (phase.device, phase.host), name


@pytest.mark.parametrize("save", [save_qwen3_in_bfloat16, save_gpt_oss_in_mxfp4, save_deepseek_in_fp8])
def test_an_export_like_its_source_is_as_large_as_that(tmp_path: Path, save: Callable[[Path], str]) -> None:
    """By the dtypes in the heads of its files: config.json names one for all weights."""
    path = save(tmp_path)
    cfg = sft_config(model={"path": path}, export={"dtype": "source"})
    model = Model.read(read_model_config(cfg.model), cfg.model)
    phases = predict(cfg, model, num_ranks=1, device_bytes=80 * GIB, on_gpu=True).phases
    stored = load_file(tmp_path / "model.safetensors").values()
    (exported,) = [phase.host["exported files"] for phase in phases if phase.name == "export"]
    assert exported == sum(tensor.nbytes for tensor in stored)


def test_fine_tuning_that_cannot_fit_is_refused_to_the_byte() -> None:
    cfg, model = sft_config(), model_of(QWEN3)
    # float32 weights, gradients and two moments of half of the model; and what is whole, in bfloat16.
    cuda = CONTEXT_BYTES + KERNEL_BYTES + CUBLAS_BYTES + NCCL_BYTES
    needs = 4 * 4 * WHOLE // 2 + 2 * (EMBEDDING + 64 + 2 * LAYER) + cuda

    def problems(device_bytes: int) -> list[str]:
        return predict(cfg, model, num_ranks=2, device_bytes=device_bytes, on_gpu=True).problems

    assert not problems(needs)
    (problem,) = problems(needs - 1)
    assert problem.startswith("training takes ") and problem.endswith("use more ranks, or model.cpu_offload = true")


def describe(transformers_config: Any) -> Decoder:
    return describe_rank(
        minimal_config(), model_of(transformers_config), num_ranks=1, device_bytes=80 * GIB, on_gpu=True
    ).decoder


def test_layers_are_fused_on_a_gpu_unless_attention_is_sdpa() -> None:
    def fuses(*, on_gpu: bool = True, **model: Any) -> bool:
        cfg = minimal_config(model={"path": "m", **model})
        rank = describe_rank(cfg, model_of(QWEN3), num_ranks=1, device_bytes=GIB, on_gpu=on_gpu)
        return rank.fuses_layers

    assert fuses() and fuses(attention="flash_attn_3")
    assert not (fuses(attention="sdpa") or fuses(compute_dtype="float32") or fuses(on_gpu=False))
    assert describe(QWEN3).can_be_fused and not describe(GEMMA3).can_be_fused


def test_what_a_lever_moves_is_elsewhere() -> None:
    shard = 4 * WHOLE // 2
    usual = phases_of(minimal_config())["optimizer"]
    on_host = phases_of(minimal_config(optim={"state_on_host": True}))["optimizer"]
    assert "optimizer" not in on_host.device and on_host.host["optimizer"] == usual.device["optimizer"] == 2 * shard
    assert on_host.device["visiting state"] == 2 * shard  # this model is one block
    asleep = phases_of(minimal_config(offload={"trainer": "all"}))["rollout"]
    assert "trainer" not in asleep.device and asleep.host["sleeping trainer"] == 3 * shard
    refit = phases_of(minimal_config(offload={"trainer": "all"}))["refit"]
    assert refit.device["weight before its cast"] > 0 and "weight before its cast" not in asleep.device
    both = phases_of(minimal_config(offload={"trainer": "all"}, optim={"state_on_host": True}))["rollout"]
    assert both.host["sleeping trainer"] == shard and both.host["optimizer"] == 2 * shard
    offloaded = phases_of(minimal_config(model={"cpu_offload": True}))["forward-backward"]
    assert not {"weights", "optimizer", "gradients"} & offloaded.device.keys()
    assert offloaded.host["offloaded policy"] == 4 * shard
    assert phases_of(minimal_config(loss={"kl_coef": 0.1}))["logprobs"].host["frozen models"] == shard
    served = phases_of(minimal_config(rollout={"engine": "sglang"}))["rollout"]
    assert "engine" not in served.device and served.elsewhere["engine"] > 40 * GIB
    assert served.device_bytes == served.process_bytes + sum(served.elsewhere.values())


def test_layers_that_are_gathered_at_the_same_time() -> None:
    size = ModelSize(whole=0, shard=0, root=100, largest_layer=10, num_layers=4)

    def gathered(**model: Any) -> int:
        return gathered_weights(ModelConfig(path="m", **model), size)

    assert [gathered(), gathered(prefetch_layers=2), gathered(prefetch_layers=9)] == [120, 130, 140]
    assert gathered(reshard_after_forward=False) == 140


def test_a_chunk_of_the_context_and_a_part_of_the_layers_need_less() -> None:
    whole, chunk = minimal_config(), minimal_config(parallel={"cp": 2})
    runs = [describe_rank(c, model_of(QWEN3), num_ranks=2, device_bytes=GIB, on_gpu=True).run for c in (whole, chunk)]
    assert [micro_batch_tokens(c, run) for c, run in zip((whole, chunk), runs, strict=True)] == [64, 32]
    decoder = describe(QWEN3)
    kept = ActivationSettings(level="none", every_layers=1, compute_bytes=2, repeats_keys=False)
    half = decoder.split(2)
    # As in `test_every_part_of_every_phase`, with keys that are not repeated; hidden states and their norms stay whole.
    hidden = 2 * 6 * 64 + 2 * 2 * 64
    whole, split = (layer_activation_bytes(x, kept, level="none") for x in (decoder, half))
    assert whole == hidden + 6 * 192 + (2 * 2 * 192 + 4 * 4) + 4 * 2 * 256
    assert split == hidden + 6 * 96 + (2 * 2 * 96 + 4 * 2) + 4 * 2 * 128
    assert [layer_activation_bytes(x, kept, level="full") for x in (decoder, half)] == [2 * 64, 2 * 64]


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallelism_cuts_what_the_models_plan_says(tp: int) -> None:
    shapes, layers = parameter_shapes(QWEN3, ModelConfig(path="m"))
    cut = split_by_tp(QWEN3, set().union(*layers))
    assert {name.split(".")[-2] for name in cut} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    size = model_size(shapes, layers, layout=ShardLayout(copy_ranks=4, tp=tp, split_by_tp=cut))
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
    one, four = (model_size(shapes, layers, layout=ShardLayout(copy_ranks=4, ep=ep, experts=experts)) for ep in (1, 4))
    assert one.shard == four.shard and one.whole == four.whole
    assert one.largest_layer - four.largest_layer == of_experts // 2 * 3 // 4
    decoder = describe(moe)
    assert (decoder.mlp_width, decoder.experts_per_token) == (2 * 32, 2)


def phase(name: str, *, device_gib: int) -> PhaseMemory:
    return PhaseMemory(name, {"weights": GIB * device_gib}, {"process": GIB}, {"engine": 50 * GIB})


PHASES = [
    phase("load", device_gib=2),
    phase("rollout", device_gib=1),
    phase("forward-backward", device_gib=5),
    phase("optimizer", device_gib=4),
]


def test_predicted_beside_measured_on_a_device() -> None:
    predicted = predicted_peaks(PHASES, on_gpu=True)
    assert predicted == {"load": Peak(2 * GIB, GIB), "rollout": Peak(GIB, GIB), "update": Peak(5 * GIB, GIB)}
    with_cublas = replace(PHASES[1], elsewhere={"cuBLAS": GIB, "context": GIB})  # torch allocates it
    assert predicted_peaks([with_cublas], on_gpu=True) == {"rollout": Peak(2 * GIB, GIB)}
    peaks = {"rollout": Peak(GIB * 3 // 2, GIB // 2), "update": Peak(GIB * 19 // 4, GIB * 5 // 4)}
    scalars = {name: metric.value() for name, metric in resource_metrics(peaks).items()}
    assert (scalars["memory/peak_gib"], scalars["memory/host_peak_gib"]) == (4.75, 1.25)
    assert prediction_table({span: predicted[span] for span in peaks}, scalars).splitlines()[1:] == [
        "  phase    predicted  measured  host predicted  host measured",
        "  rollout       1.00      1.50            1.00           0.50",
        "  update        5.00      4.75            1.00           1.25",
    ]


def test_without_a_device_the_host_holds_both() -> None:
    predicted = predicted_peaks(PHASES, on_gpu=False)
    assert [peak.host_bytes // GIB for peak in predicted.values()] == [3, 2, 6]
    assert [peak.host_bytes // GIB for peak in with_host_so_far(predicted).values()] == [3, 3, 6]
    table = prediction_table({"rollout": predicted["rollout"]}, {"memory/rollout_peak_gib": 1.5})
    assert table.splitlines()[1:] == ["  phase    predicted  measured", "  rollout       2.00      1.50"]


@pytest.fixture
def toml(tmp_path: Path) -> str:
    """Settings for a model of which there is nothing but its config: 0.6 billion parameters."""
    large = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
    Qwen3Config(**large, **heads, tie_word_embeddings=True, dtype="bfloat16").save_pretrained(tmp_path / "model")
    tables: dict[str, Any] = {
        "run": {"name": "x", "num_steps": 1, "deterministic": None, "threads_per_rank": None},
        "data": {"max_prompt_tokens": 2000, "sources": [{"kind": "jsonl", "path": "a"}]},
        "optim": {"lr": 1e-3},
        "pack": {"max_tokens_per_micro_batch": 16000},
        "checkpoint": None,
    }
    write_sft_config(tmp_path, name="sft.toml", **tables, sft={"sequences_per_step": 64, "max_response_tokens": 2000})
    rollout = {"group_size": 8, "max_response_tokens": 2000}
    rewards = {"terms": [{"kind": "exact"}]}
    path = write_config(
        tmp_path, name="x.toml", **tables, rollout=rollout, reward=rewards, loss=None, eval=None, debug=None
    )
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
    assert all(row["gpu_bytes"] == sum(row["gpu"].values()) for row in answer["phases"])


def test_what_does_not_fit_is_told_with_what_does(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [toml, "--ranks", "2", "--gpu-gib", "28"]
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


def test_the_planner_reads_either_kind_of_run(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    sft = str(Path(toml).with_name("sft.toml"))
    for size, fits in (("80", True), ("8", False)):
        code, answer = planned(capsys, sft, "--ranks", "2", "--gpu-gib", size)
        assert (code == 0) == answer["fits"] == fits
    names = [row["phase"] for row in answer["phases"]]
    assert names == ["load", "forward-backward", "optimizer", "save", "export"]
    levers = answer["problems"][-1].removeprefix("it fits with ").split(" and ")
    assert not any(lever.startswith(("offload", "rollout")) for lever in levers)
    assert (
        planned(capsys, sft, "--ranks", "2", "--gpu-gib", "8", *(lever.replace(" = ", "=") for lever in levers))[0] == 0
    )


def test_the_planner_reads_the_critics_config_too(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [toml, "--ranks", "2", "--gpu-gib", "80", "advantage.estimator=gae"]
    code, answer = planned(capsys, *argv)
    by_name = {row["phase"]: row["gpu"] for row in answer["phases"]}
    assert code == 0 and by_name["critic"]["gradients"] == by_name["forward-backward"]["gradients"]
    assert plan.main([*argv, "critic.path=nowhere"]) == 2
    assert 'critic.path = "nowhere"' in capsys.readouterr().err


def test_the_planner_refuses_a_layout_that_a_teacher_does_not_support(
    toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(toml).parent / "model"
    teacher = [f'models.big={{ path = "{path}", parallel = {{ ep = 2 }} }}', 'distill.teacher="big"']
    assert plan.main([toml, "--ranks", "2", "--gpu-gib", "80", *teacher]) == 2
    assert "models.big.parallel.ep = 2, but " in capsys.readouterr().err


@pytest.mark.parametrize("overrides", [(), ("sft={ sequences_per_step = 8, max_response_tokens = 8 }",)])
def test_a_run_of_no_kind_or_of_both_is_refused(toml: str, overrides: tuple[str, ...]) -> None:
    if not overrides:
        write_sft_config(Path(toml).parent, name=Path(toml).name)
    with pytest.raises(UserError, match=r"has \[rollout\] and \[sft\]" if overrides else "has none of"):
        read_run_config(toml, overrides)
