"""How SGLang is started on a device, and what is said of a machine on which it could not start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoConfig,
    BambaConfig,
    Cohere2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

from spmdrl.config import Config, RolloutConfig
from spmdrl.dist.session import World
from spmdrl.engine.sglang import libraries
from spmdrl.engine.sglang.adapters import adapter_arguments, adapter_problems
from spmdrl.engine.sglang.fewer_bits import fewer_bits_problems
from spmdrl.engine.sglang.libraries import attention_problem, kernel_problem
from spmdrl.engine.sglang.models import expert_problems, hybrid_problems, rotary_problems
from spmdrl.engine.sglang.options import (
    SGLangOptions,
    _device_problems,
    _family_problem,
    _graph_problems,
    _parallel_problems,
    sglang_options,
)
from spmdrl.engine.sglang.requests import RouteReader, image_problems, route_problems
from spmdrl.model.load import load_model_config
from spmdrl.preflight.inputs import _window_problems
from tests.helpers import fake_packages
from tests.helpers.config_file import GOOD, read
from tests.helpers.configs import minimal_config
from tests.helpers.few_bits import save_gpt_oss_in_mxfp4
from tests.helpers.models import GATED_DELTA_NET, SIZES, config_of, longrope, save_gpt_oss, save_qwen3, save_qwen3_moe
from tests.helpers.vision_models import save_qwen3_vl

PATH = {"LD_LIBRARY_PATH": "/cuda/lib:/before"}
BOTH = 'offload.engine=["kv_cache", "cuda_graph"]'
APART = ('rollout.placement="disaggregated"', "rollout.num_ranks=1")
# What sgl_kernel raises: a page, with the loader's own line in it.
PAGE = """
import ctypes
try:
    ctypes.CDLL({library!r})
except OSError as error:
    raise ImportError(f'''
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Error details from previous import attempts:
- ImportError: {{error}}
- ModuleNotFoundError: No module named 'common_ops'
''')
"""


def config(folder: Path, *overrides: str) -> Config:
    return read(folder, GOOD, "rollout.engine=sglang", *overrides)


def started(cfg: Config, device: str, model_config: PreTrainedConfig | None = None) -> SGLangOptions:
    plan: Any = SimpleNamespace(max_sampled_tokens=100)
    world = World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        patience=timedelta(minutes=1),
        device=torch.device(device, 0),
    )
    return sglang_options(cfg, plan, world, model_config or Qwen3Config())


def test_the_loader_is_told_of_the_runtime_where_the_memory_saver_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "library_path", lambda: PATH)
    colocated, apart = config(tmp_path), config(tmp_path, *APART)
    assert started(colocated, "cuda").environment.items() >= PATH.items()
    assert started(colocated, "cuda").arguments["enable_memory_saver"]
    for options in (started(apart, "cuda"), started(colocated, "cpu")):
        assert "LD_LIBRARY_PATH" not in options.environment
        assert not options.arguments["enable_memory_saver"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_have_cuda_graphs_only_where_the_user_asks_for_them(tmp_path: Path, device: str) -> None:
    assert started(config(tmp_path), device).arguments["disable_prefill_cuda_graph"] is True
    asked = config(tmp_path, *APART, "rollout.sglang.disable_prefill_cuda_graph=false")
    assert started(asked, device).arguments["disable_prefill_cuda_graph"] is False


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((), None),
        ((BOTH,), None),
        (("rollout.sglang.disable_prefill_cuda_graph=false",), "breakable"),
        (("rollout.sglang.disable_prefill_cuda_graph=false", BOTH), "breakable"),
        (("rollout.sglang.cuda_graph_backend_prefill=breakable",), "breakable"),
        (("rollout.sglang.cuda_graph_backend_prefill=full",), 'add "cuda_graph" to offload.engine'),
        (("rollout.sglang.cuda_graph_backend_prefill=full", BOTH), None),
        (("rollout.sglang.cuda_graph_config={prefill={backend='full'}}",), 'add "cuda_graph" to offload.engine'),
        (("rollout.sglang.cuda_graph_config={prefill={backend='full'}}", BOTH), None),
        (("rollout.sglang.cuda_graph_config={decode={max_bs=8}}",), None),
        (("rollout.sglang.disable_prefill_cuda_graph=false", *APART), None),
    ],
)
def test_graphs_of_prompts_may_not_keep_memory_that_the_trainer_needs(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str | None
) -> None:
    said = list(_graph_problems(config(tmp_path, *overrides)))
    assert len(said) == (sentence is not None)
    assert sentence is None or sentence in said[0]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that are found before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sgl_kernel", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_kernels_for_another_torch_are_told_with_what_to_install(packages: Path) -> None:
    library = packages / "common_ops.abi3.so"
    code = "int at_headeronly_Tag(void); int ops(void) { return at_headeronly_Tag(); }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=code, text=True, check=True)
    page = PAGE.format(library=str(library))
    fake_packages.make_package(packages, "sglang-kernel", version="0.4.10", module="sgl_kernel", code=page)
    assert kernel_problem("2.11.0+cu130") == (
        "sglang-kernel 0.4.10 cannot be loaded with torch 2.11.0+cu130 "
        f"(ImportError: {library}: undefined symbol: at_headeronly_Tag); "
        "install sglang-kernel==0.4.5, which is built for torch 2.11, or run: make setup-sglang, "
        "or pip install 'spmdrl[sglang]'"
    )
    for torch_version in ("2.14.1", "2.12.0"):  # theirs; and one that no release is built for
        assert str(kernel_problem(torch_version)).endswith(
            "undefined symbol: at_headeronly_Tag); run: make setup-sglang, or pip install 'spmdrl[sglang]'"
        )


def test_kernels_that_sglang_would_refuse_are_told(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.make_package(packages, "sglang-kernel", version="0.4.6.post1", module="sgl_kernel")
    assert "0.4.6.post1 is installed, and SGLang starts with 0.4.9 or newer" in str(kernel_problem("2.13.0"))
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    assert kernel_problem("2.13.0") is None


def test_kernels_that_work_are_not_mentioned(packages: Path) -> None:
    fake_packages.make_package(packages, "sglang-kernel", version="0.4.10", module="sgl_kernel")
    assert kernel_problem("2.14.1") is None


def test_kernels_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert kernel_problem("2.14.1") == (
        "sglang-kernel, its kernels for CUDA, is not installed; run: make setup-sglang, or pip install 'spmdrl[sglang]'"
    )


def test_attention_without_its_kernels_is_told_before_the_start(packages: Path) -> None:
    """The bundle for machines without network leaves FlashAttention 3 out."""
    fake_packages.make_package(packages, "sglang-kernel", version="0.4.5", module="sgl_kernel")
    hopper, ampere = (9, 0), (8, 0)
    unset = attention_problem(None, hopper)
    assert unset is not None and unset.startswith("rollout.attention_backend is not set, and SGLang's own choice")
    assert 'rollout.attention_backend = "fa3", but' in str(attention_problem("fa3", ampere))
    assert attention_problem(None, ampere) is None
    assert attention_problem("triton", hopper) is None
    (packages / "sgl_kernel" / "flash_ops.py").touch()
    assert attention_problem("fa3", hopper) is attention_problem(None, hopper) is None


@pytest.mark.parametrize(("save", "is_told"), [(save_qwen3, False), (save_qwen3_vl, True)])
def test_the_kernels_of_a_tower_are_looked_for_too(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], str], is_told: bool
) -> None:
    fake_packages.make_package(packages, "sglang-kernel", version="0.4.5", module="sgl_kernel")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(libraries, "start_problem", lambda _: None)
    path = save(tmp_path / "model")
    given = (f"model.path={path}", "rollout.attention_backend=triton")
    told = list(_device_problems(config(tmp_path, *given), AutoConfig.from_pretrained(path)))
    assert len(told) == is_told
    assert all(
        said.startswith("rollout.sglang.mm_attention_backend is not set") and said.endswith('set it to "triton_attn"')
        for said in told
    )
    chosen = config(tmp_path, *given, "rollout.sglang.mm_attention_backend=triton_attn")
    assert list(_device_problems(chosen, AutoConfig.from_pretrained(path))) == []


LORA = ("lora.rank=4",)


def adapted(folder: Path, *overrides: str) -> Config:
    return config(folder, f"model.path={save_qwen3(folder / 'model')}", *LORA, *overrides)


def test_an_engine_with_adapters_takes_those_of_every_version_that_may_run(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(steps_ahead=2)
    asked = adapter_arguments(adapted(tmp_path), plan, device_type="cpu")
    assert asked == {
        "enable_lora": True,
        "lora_backend": "torch_native",
        "lora_strict_loading": True,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "max_lora_rank": 4,
        "max_loras_per_batch": 3,
        "enable_weights_cpu_backup": False,
    }
    on_device = adapter_arguments(adapted(tmp_path, 'offload.engine=["kv_cache", "weights"]'), plan, device_type="cuda")
    assert on_device["lora_backend"] == "csgmv"
    assert on_device["enable_weights_cpu_backup"], "refits of adapters do not bring the base back"
    assert adapter_arguments(adapted(tmp_path, "lora.merge=true"), plan, device_type="cpu") == {}


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ('["q_proj"]', "SGLang adapts q_proj together with v_proj of the same layer; name v_proj in lora.targets too"),
        ('["k_proj"]', "SGLang adapts k_proj together with q_proj and v_proj of the same layer; name q_proj and"),
        ('["up_proj"]', "SGLang adapts up_proj together with gate_proj"),
        ('["v_proj", "layers.0.self_attn.q_proj"]', "SGLang adapts v_proj together with q_proj of the same layer"),
        ('["q_proj", "v_proj", "gate_proj"]', None),
        ('"all-linear"', None),
    ],
)
def test_targets_that_sglang_cannot_adapt_are_named(tmp_path: Path, targets: str, sentence: str | None) -> None:
    cfg = adapted(tmp_path, f"lora.targets={targets}")
    said = list(adapter_problems(cfg, load_model_config(cfg.model), device_type="cpu"))
    assert (said == []) if sentence is None else (len(said) == 1 and said[0].startswith(sentence))
    merged = adapted(tmp_path, f"lora.targets={targets}", "lora.merge=true")
    assert not list(adapter_problems(merged, load_model_config(merged.model), device_type="cpu"))


def test_kernels_for_models_with_experts_whatever_their_config_calls_them(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(steps_ahead=0)
    for save in (save_qwen3_moe, save_gpt_oss):
        path = save(tmp_path / save.__name__)
        cfg = config(tmp_path, f"model.path={path}", *LORA, 'lora.targets=["q_proj", "v_proj"]')
        assert adapter_arguments(cfg, plan, device_type="cuda")["lora_backend"] == "triton"


def test_exact_kernels_are_not_for_adapters(tmp_path: Path) -> None:
    cfg = adapted(tmp_path).model_copy(update={"true_on_policy": True})
    (said,) = adapter_problems(cfg, load_model_config(cfg.model), device_type="cuda")
    assert "true_on_policy = true has no exact kernels for adapters" in said


def test_sglang_takes_adapters_of_experts_as_merged_weights(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"])

    def problems(*overrides: str) -> list[str]:
        cfg = config(tmp_path, f"model.path={path}", *LORA, *overrides)
        return list(adapter_problems(cfg, load_model_config(cfg.model), device_type="cpu"))

    (said,) = problems()
    assert "takes no adapters of experts" in said and "lora.merge = true" in said
    assert said.endswith("q_proj, k_proj, v_proj, o_proj")
    assert problems("lora.merge=true") == []
    assert problems('lora.targets=["q_proj", "v_proj"]') == []


def test_routes_are_asked_for_where_they_are_replayed(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[0])
    model = f"model.path={path}"
    plain, replaying = (config(tmp_path, model, f"correction.router_replay={kind}") for kind in ("none", "R3"))
    moe, images = load_model_config(plain.model), Qwen3_5Config()
    without, options = started(plain, "cuda", moe), started(replaying, "cuda", moe)
    assert without.routes is None and not without.arguments["enable_return_routed_experts"]
    assert options.arguments["enable_return_routed_experts"]
    assert options.routes == RouteReader(num_layers=2, expert_layers=(1,), num_chosen=2)
    assert list(route_problems(replaying, moe)) == list(route_problems(plain, images)) == []
    (said,) = route_problems(replaying, images)
    assert 'router_replay = "R3" was not tried with images' in said
    (said,) = route_problems(replaying, config_of("olmo2"))
    assert "SGLang reports no routes of the type olmo2" in said


def hybrid(**changes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**(SIZES | GATED_DELTA_NET | changes))


@pytest.mark.parametrize(("compute", "dtype"), [("auto", "bfloat16"), ("float32", "float32")])
def test_the_state_of_a_convolution_keeps_its_inputs_as_they_are(tmp_path: Path, compute: str, dtype: str) -> None:
    cfg = config(tmp_path, f'model.compute_dtype="{compute}"')
    options = started(cfg, "cuda", hybrid())
    assert options.environment["SGLANG_MAMBA_CONV_DTYPE"] == options.arguments["dtype"] == dtype
    assert options.arguments["mamba_ssm_dtype"] == "float32"
    plain = started(cfg, "cuda")
    assert "SGLANG_MAMBA_CONV_DTYPE" not in plain.environment and "mamba_ssm_dtype" not in plain.arguments


def test_a_hybrid_config_is_told_by_the_names_that_sglang_knows(tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    model = hybrid(rope_parameters=rotary, num_hidden_layers=6, layer_types=[*GATED_DELTA_NET["layer_types"]] * 3)
    mine = "rollout.sglang.json_model_override_args='{\"rope_theta\": 7.0}'"
    for overrides, theta in (((), 500.0), ((mine,), 7.0)):
        told = json.loads(started(config(tmp_path, *overrides), "cuda", model).arguments["json_model_override_args"])
        assert (told["full_attention_interval"], told["rope_theta"], told["partial_rotary_factor"]) == (2, theta, 0.5)
        assert told["rope_parameters"] == rotary


def test_weights_of_few_bits_are_whole_for_sglang(tmp_path: Path) -> None:
    cfg = config(tmp_path, f"model.path={save_gpt_oss_in_mxfp4(tmp_path / 'model')}")
    arguments = started(cfg, "cuda", load_model_config(cfg.model)).arguments
    assert json.loads(arguments["json_model_override_args"]) == {"quantization_config": None}


FP8 = ("rollout.quantization=fp8", "correction.kind=tis")


@pytest.mark.parametrize(("capability", "kernels"), [((9, 0), set()), ((10, 0), {"triton"})])
def test_sglang_makes_layers_in_blocks_whose_weights_stay_as_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernels: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    arguments = started(config(tmp_path, *FP8, "rollout.kv_cache_dtype=fp8_e4m3"), "cuda").arguments
    (about,) = json.loads(arguments["json_model_override_args"]).values()
    assert about == {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert (arguments["quantization"], arguments["kv_cache_dtype"]) == ("fp8", "fp8_e4m3")
    chosen = {arguments.get(name) for name in ("fp8_gemm_runner_backend", "moe_runner_backend")}
    assert chosen - {None} == kernels
    assert "quantization" not in started(config(tmp_path), "cuda").arguments


IN_BLOCKS = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}


@pytest.mark.parametrize(
    ("model", "capability", "overrides", "sentences"),
    [
        (Qwen3Config(**IN_BLOCKS), (8, 9), (), []),
        (
            Qwen3Config(**IN_BLOCKS),
            (8, 0),
            (),
            ["of compute capability 8.9 or more, for SGLang's products"],
        ),
        (
            Qwen3Config(**IN_BLOCKS),
            (9, 0),
            ("model.compute_dtype=float32",),
            ["which SGLang does not mix; set"],
        ),
        (
            Qwen3Config(**IN_BLOCKS | {"intermediate_size": 640}),
            (9, 0),
            ("rollout.tp_size=2",),
            ["blocks of 128 x 128, which do not divide intermediate_size / 2 ranks = 320, and SGLang pads nothing"],
        ),
        (
            Qwen3Config(**IN_BLOCKS | {"head_dim": 24, "hidden_size": 96}),
            (9, 0),
            (),
            [
                "do not divide hidden_size = 96",
                "num_attention_heads x head_dim = 96",
                "num_key_value_heads x head_dim =",
            ],
        ),
        (hybrid(), (9, 0), (), ["with recurrent layers or a tower; remove it"]),
        (Qwen3Config(**IN_BLOCKS), (9, 0), APART, ["are not of the integers in its memory"]),
    ],
)
def test_models_that_blocks_do_not_divide_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: PreTrainedConfig,
    capability: tuple[int, int],
    overrides: tuple[str, ...],
    sentences: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = list(fewer_bits_problems(config(tmp_path, *FP8, *overrides), model, device_type="cuda"))
    assert len(found) == len(sentences) and all(map(str.__contains__, found, sentences)), found


def test_sglang_needs_a_device_for_fewer_bits(tmp_path: Path) -> None:
    cfg = config(tmp_path, *FP8, "rollout.kv_cache_dtype=fp8_e5m2")
    cache, weights = fewer_bits_problems(cfg, Qwen3Config(**IN_BLOCKS), device_type="cpu")
    assert 'kv_cache_dtype = "fp8_e5m2" needs a CUDA device' in cache and 'set rollout.engine = "torch"' in weights


@pytest.mark.parametrize(
    ("model", "overrides", "sentences"),
    [
        (hybrid(), (), []),
        (Qwen3Config(), (), []),
        (hybrid(), ("rollout.tp_size=2",), []),
        (hybrid(), ("rollout.tp_size=4",), ["does not divide the 2 key heads of the model's gated delta nets"]),
        (hybrid(layer_types=["full_attention", "linear_attention"]), (), ["in which every n-th layer is one of full"]),
        (hybrid(layer_types=["linear_attention"] * 2), (), ["in which every n-th layer is one of full"]),
        (hybrid(), LORA, ["set lora.merge = true"]),
        (hybrid(), (*LORA, "lora.merge=true"), []),
        (Lfm2Config(), (), []),
        (
            GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba", "attention"]),
            LORA,
            ["adapters of granitemoehybrid were not"],
        ),
    ],
)
def test_hybrids_that_sglang_does_not_know_are_told(
    tmp_path: Path, model: PreTrainedConfig, overrides: tuple[str, ...], sentences: list[str]
) -> None:
    said = list(hybrid_problems(config(tmp_path, *overrides), model, device_type="cuda"))
    assert len(said) == len(sentences)
    assert all(sentence in problem for sentence, problem in zip(sentences, said, strict=True))


@pytest.mark.parametrize("model", [Qwen3NextConfig(mlp_only_layers=[1]), Qwen3MoeConfig(decoder_sparse_step=2)])
def test_layers_without_experts_beside_those_with_them_are_refused(model: PreTrainedConfig) -> None:
    (sentence,) = expert_problems("model", model)
    assert "has layers without experts beside layers with them" in sentence
    assert not [*expert_problems("model", Qwen3MoeConfig()), *expert_problems("model", Qwen3Config())]


def test_hybrids_need_a_device_for_sglang(tmp_path: Path) -> None:
    (sentence,) = hybrid_problems(config(tmp_path), hybrid(), device_type="cpu")
    assert "has gated delta nets, for which SGLang has no kernels on a CPU" in sentence
    assert not list(hybrid_problems(config(tmp_path), Qwen3Config(), device_type="cpu"))


def test_rotary_settings_that_sglang_checks_too_early_are_refused_under_their_newer_name(tmp_path: Path) -> None:
    def problems(rope: dict[str, Any], *, older: bool) -> list[str]:
        others = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
        Qwen3NextConfig(rope_parameters=rope | others).save_pretrained(tmp_path / "model")
        file = tmp_path / "model/config.json"
        written = json.loads(file.read_text())
        if older:
            del written["rope_parameters"]
            file.write_text(json.dumps(written | others | {"rope_scaling": rope}))
        model = AutoConfig.from_pretrained(file.parent)
        assert model.rope_parameters == rope | others  # transformers reads both alike
        return list(hybrid_problems(config(tmp_path, f"model.path={file.parent}"), model, device_type="cuda"))

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    (sentence,) = problems(yarn, older=False)
    assert 'has rope_parameters of the type "yarn" in its config.json' in sentence and "as rope_scaling" in sentence
    assert not problems(yarn, older=True)
    assert not problems({"rope_type": "linear", "factor": 2.0}, older=False)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Qwen3VLConfig(), None),
        (Qwen2_5_VLConfig(), None),
        (Qwen3Config(), None),
        (Gemma3Config(), "with gemma3: its layout in SGLang is not known here"),
        (Qwen2_5_VLConfig(vision_config={"patch_size": 4}), "reads patches of 1176 numbers, and this model's have 96"),
    ],
)
def test_images_that_sglang_could_not_look_at_are_told(
    tmp_path: Path, model: PreTrainedConfig, sentence: str | None
) -> None:
    said = list(image_problems(config(tmp_path), model))
    assert (said == []) if sentence is None else (len(said) == 1 and sentence in said[0])


def test_rotary_embeddings_that_sglang_computes_otherwise_are_refused() -> None:
    def problems(rope: dict[str, Any]) -> list[str]:
        return list(rotary_problems("m", LlamaConfig(**SIZES | {"rope_parameters": rope})))

    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (sentence,) = problems(dynamic)
    assert 'write "default" into its config.json, which is the same up to there' in sentence
    assert not problems(dynamic | {"alpha": 1000.0})  # HunYuan's, which SGLang computes as transformers does
    (long,) = longrope(64, num_factors=8).values()
    assert not problems(long)
    (sentence,) = problems(long | {"attention_factor": 1.25})
    assert "scales by 1.25 and SGLang by 1.1547," in sentence
    assert not problems(long | {"attention_factor": 1.25, "short_mscale": 1.25, "long_mscale": 1.25})


def test_windows_that_sglang_computes_otherwise_are_refused_beyond_them() -> None:
    def sentences(engine: str, longest: int, kind: type[PreTrainedConfig] = Phi3Config, **settings: Any) -> list[str]:
        plan: Any = SimpleNamespace(max_sequence_tokens=longest, max_eval_sequence_tokens=0)
        policy: Any = SimpleNamespace(config=kind(**settings))
        cfg = Config.model_construct(rollout=RolloutConfig.model_construct(engine=engine))
        return list(_window_problems(cfg, plan, policy))

    (sentence,) = sentences("sglang", 2048, sliding_window=2047)
    assert "phi3: SGLang computes other windows than its 2047 tokens" in sentence and "may have 2048" in sentence
    assert not sentences("sglang", 2047, sliding_window=2047) + sentences("sglang", 2048)
    assert not sentences("torch", 2048, sliding_window=2047)
    assert sentences("sglang", 4097, MistralConfig, sliding_window=4096)  # and of every type that is not known to
    assert not sentences("sglang", 4097, MistralConfig, sliding_window=None)
    assert sentences("sglang", 4097, Cohere2Config, sliding_window=4096)
    assert not sentences("sglang", 4097, Cohere2Config, sliding_window=4096, layer_types=["full_attention"] * 40)
    assert not sentences("sglang", 4097, Gemma3TextConfig, sliding_window=512)


def test_short_convolutions_are_not_attended_to_by_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses it where the first layer may have no attention. What stands in for FlashAttention 3 is another."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(libraries, "start_problem", lambda _: None)
    (refused,) = _device_problems(config(tmp_path, "rollout.attention_backend=triton"), Lfm2Config())
    assert "SGLang does not take it for lfm2" in refused and '"torch_native"' in refused
    (missing,) = _device_problems(config(tmp_path), Lfm2Config())
    assert missing.endswith('set it to "torch_native"')
    assert not list(_device_problems(config(tmp_path, "rollout.attention_backend=torch_native"), Lfm2Config()))
    assert not list(_device_problems(config(tmp_path, "rollout.attention_backend=triton"), Qwen3Config()))


NOT_TRIED = "was not tried with SGLang"


@pytest.mark.parametrize(
    ("model", "said_on_cpu", "said_on_device"),
    [
        (Qwen3Config(), None, None),
        (ApertusConfig(), "keeps the parameters of activations in bfloat16", "in bfloat16"),
        (DeepseekV3Config(), "computes no attention on a CPU", NOT_TRIED),
        (Gemma2Config(), "computes no soft caps of attention on a CPU", NOT_TRIED),
        (BambaConfig(), "computes no layers of Mamba 2 on a CPU", NOT_TRIED),
        (FalconH1Config(), "computes no layers of Mamba 2 on a CPU", None),  # seen on a GPU
        (Lfm2Config(), "computes no short convolutions on a CPU", None),
        (Exaone4Config(), "changes log-probabilities by 5e-03 nats on a GPU", "changes log-probabilities"),
        (OPTConfig(), NOT_TRIED, NOT_TRIED),  # and every other type without a row
    ],
)
def test_models_that_sglang_does_not_compute_are_refused_before_the_start(
    model: PreTrainedConfig, said_on_cpu: str | None, said_on_device: str | None
) -> None:
    for device, said in (("cpu", said_on_cpu), ("cuda", said_on_device)):
        problem = _family_problem(minimal_config(), model, device)
        assert problem is None if said is None else said in str(problem)
        tried = _family_problem(minimal_config(rollout={"engine": "sglang", "allow_untested": True}), model, device)
        assert tried == (None if said == NOT_TRIED else problem)


def test_weights_that_are_cut_in_a_way_not_known_here_are_refused_on_several_devices() -> None:
    def sentences(tp_size: int, model: PreTrainedConfig, **more: bool) -> list[str]:
        rollout = minimal_config(rollout={"engine": "sglang", "tp_size": tp_size, **more}).rollout
        return list(_parallel_problems(rollout, model, num_ranks=4, device_type="cpu"))

    (sentence,) = sentences(2, GraniteMoeConfig())
    assert "rollout.tp_size = 2 with granitemoe: how SGLang cuts its weights is not known here; set it to 1" in sentence
    assert not sentences(2, GraniteMoeConfig(), allow_untested=True)
    assert not sentences(1, GraniteMoeConfig()) + sentences(2, Qwen3Config())
