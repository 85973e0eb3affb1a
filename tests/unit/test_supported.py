"""Models that cannot be trained are refused by name; the text models of larger ones can be taken out of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV4Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    Gemma3Config,
    Gemma3nConfig,
    Gemma3TextConfig,
    Gemma4Config,
    InternVLConfig,
    JambaConfig,
    LlamaConfig,
    MiniMaxConfig,
    Mistral3Config,
    NemotronConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3OmniMoeConfig,
    Qwen3VLConfig,
    RecurrentGemmaConfig,
    SmolVLMConfig,
    Zamba2Config,
)

from spmdrl.config import ParallelConfig
from spmdrl.config.model import LoraConfig
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.attention import IMPLEMENTATION, packed_attention
from spmdrl.model.exact.invariant import machine_problems, model_problems
from spmdrl.model.load import (
    critic_shapes,
    frozen_names,
    load_model_config,
    model_without_memory,
    parallel_model_problems,
    parameter_shapes,
    weights_of,
)
from spmdrl.model.lora.policy import adapter_problems, adapter_sizes, quantized_bytes
from spmdrl.model.param_groups import freeze_problems, rate_problems
from spmdrl.model.reward_model import reward_model_problems
from spmdrl.model.routes import balance_refusal, routes_refusal
from spmdrl.model.supported import refusal_of_model
from spmdrl.model.trunk import model_class
from spmdrl.model.weight_files import missing_weight_problems
from spmdrl.refit.refit import load_whole
from spmdrl.tools.text_model import main as save_text_model
from spmdrl.tools.tiny_model import character_tokenizer
from spmdrl.types import Request, UserError
from tests.helpers.configs import model_config
from tests.helpers.models import (
    GATED_DELTA_NET,
    SIZES,
    SLIDING,
    config_of,
    save_gemma3,
    save_gpt_oss,
    save_qwen3,
    save_qwen3_moe,
)
from tests.helpers.vision_models import save_qwen3_5_vl

LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def _capped(config: Qwen3VLConfig) -> Qwen3VLConfig:
    """The same, with a cap on logits in the part about text."""
    config.text_config.final_logit_softcapping = 30.0
    return config


CONFIGS: dict[str, tuple[PreTrainedConfig, str]] = {
    "SmolVLM": (SmolVLMConfig(), "smolvlm is a model of more than text.*has no text model for it|text_model"),
    "InternVL": (InternVLConfig(), "internvl is a model of more than text.*spmdrl.tools.text_model"),
    "Qwen3-Omni": (Qwen3OmniMoeConfig(), "qwen3_omni_moe hears sounds.*has no text model for it"),
    "Gemma 3n": (Gemma3nConfig(), "gemma3n hears sounds.*spmdrl.tools.text_model"),
    "Qwen3-VL with a cap": (_capped(Qwen3VLConfig()), "qwen3_vl with final_logit_softcapping = 30.0"),
    "Gemma 3 with a cap that it ignores": (
        Gemma3TextConfig(**LAYERS, attn_logit_softcapping=50.0),
        "gemma3_text with attn_logit_softcapping = 50.0",
    ),
    "DeepSeek V3.2": (DeepseekV32Config(**LAYERS), "layers of type .*, where an indexer chooses"),
    "DeepSeek V4": (DeepseekV4Config(**LAYERS), "layers of type .*, which see summaries of several tokens"),
    "Llama with Command R's setting": (LlamaConfig(**LAYERS, logit_scale=0.0625), "llama with logit_scale = 0.0625"),
    "Jamba": (JambaConfig(**LAYERS), "JambaForCausalLM has layers of type|JambaForCausalLM .* leak"),
    "Zamba2": (Zamba2Config(), "Zamba2ForCausalLM has layers that share their weights"),
    "RecurrentGemma": (RecurrentGemmaConfig(**LAYERS), "RecurrentGemmaForCausalLM .* leak"),
    "MiniMax": (MiniMaxConfig(**LAYERS), "MiniMaxForCausalLM .* leak"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unsupported_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, sentence = CONFIGS[name]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=sentence):
        load_model_config(model_config(str(tmp_path)))


def test_weights_of_few_bits_without_a_reader_are_refused_by_name(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match=r"its weights are quantized \(awq\), which is not read here"):
        load_model_config(model_config(path))


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Gemma3ForCausalLM lets tokens see those that come after them"):
        load_model_config(model_config(save_gemma3(tmp_path, use_bidirectional_attention=True)))


def test_sinks_are_refused_with_kernels_that_have_none(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path)
    load_model_config(model_config(path))
    with pytest.raises(UserError, match=r'sinks, which model\.attention = "flash_attn_3" does not support'):
        load_model_config(model_config(path, attention="flash_attn_3"))


def test_the_embedded_engine_refuses_layers_that_attend_twice() -> None:
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SIZES))
    device = torch.device("cpu")
    engine = TorchEngine(model.config, device=device, dtype=torch.float32, kernel="sdpa", max_running=1)
    load_whole(engine, weights_of(model), version=0)
    with pytest.raises(UserError, match=r"cannot sample from diffllama: .* attend more than once"):
        next(engine.generate([Request(prompt_ids=(3, 4), seed=0, max_response_tokens=2)]))


def test_attention_that_cannot_be_packed_is_refused_when_it_is_called() -> None:
    model = AutoModelForCausalLM.from_config(NemotronConfig(**SIZES), attn_implementation=IMPLEMENTATION)
    with pytest.raises(UserError, match="NemotronAttention does not pass its caller's arguments on"):
        model(torch.tensor([[3, 4]]), attend=packed_attention(torch.tensor([0, 2]), [2], "sdpa"), use_cache=False)


def gemma3() -> Gemma3Config:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=SIZES | SLIDING, vision_config=vision | {"image_size": 16, "patch_size": 4}, mm_tokens_per_image=4
    )


def qwen3_5() -> Qwen3_5Config:
    return Qwen3_5Config(text_config=SIZES | GATED_DELTA_NET, vision_config=VISION, tie_word_embeddings=False)


def gemma4() -> Gemma4Config:
    text = config_of("gemma4_text").to_dict()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
    }
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None)


def mistral_small_4() -> Mistral3Config:
    """A model whose text model transformers lists among models of images."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Mistral3Config(
        text_config=config_of("mistral4"),
        vision_config=PixtralVisionConfig(**vision, head_dim=16, image_size=16, patch_size=4),
        image_token_index=SIZES["vocab_size"] - 1,
    )


@pytest.mark.parametrize("config", [gemma3, qwen3_5, gemma4, mistral_small_4])
def test_the_text_model_of_a_larger_one_says_the_same(tmp_path: Path, config: Callable[[], PreTrainedConfig]) -> None:
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config())
    whole.save_pretrained(tmp_path / "whole")
    character_tokenizer().save_pretrained(tmp_path / "whole")
    assert save_text_model([str(tmp_path / "whole"), str(tmp_path / "text")]) == 0
    kind = model_class(load_model_config(model_config(str(tmp_path / "text"))))
    text = kind.from_pretrained(tmp_path / "text")
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(text(ids).logits, whole.eval()(ids).logits, rtol=0, atol=1e-6)
    assert save_text_model([str(tmp_path / "text"), str(tmp_path / "again")]) == 2


@pytest.mark.parametrize("save", [save_qwen3, save_qwen3_moe, save_qwen3_5_vl])
def test_what_is_asked_about_a_model_without_memory_leaves_it_as_it_was(
    tmp_path: Path, save: Callable[[Path], str]
) -> None:
    """It is built once for equal configs, so that nobody may change it."""
    path = save(tmp_path)
    cfg = model_config(path)
    config, again, lora = load_model_config(cfg), load_model_config(cfg), LoraConfig()
    model = model_without_memory(config, cfg)

    def state() -> tuple[Any, ...]:
        parameters = {name: (one.shape, one.requires_grad) for name, one in model.named_parameters()}
        attributes = {name: sorted(vars(one)) for name, one in model.named_modules()}  # a forward of its own, too
        hooks = {name: (*one._forward_hooks, *one._forward_pre_hooks) for name, one in model.named_modules()}
        return str(model), model.config.to_dict(), parameters, attributes, hooks

    before = state()
    shapes = parameter_shapes(config, cfg)[0]
    assert critic_shapes(config, cfg)[0].keys() <= shapes.keys()
    assert not [*parallel_model_problems(config, cfg, ParallelConfig())]
    assert not [*missing_weight_problems(path, model, shapes)]
    asked = (
        adapter_problems(config, cfg, lora),
        reward_model_problems(config, cfg),
        freeze_problems(model, cfg.freeze),
        rate_problems(model, ["*"], cfg.freeze),
        () if [*model_problems(config)] else machine_problems(model, torch.float32),
        (balance_refusal(model), routes_refusal(model), refusal_of_model(model, "sdpa")),
        (frozen_names(config, cfg), adapter_sizes(config, cfg, lora), quantized_bytes(config, cfg, "8bit")),
    )
    for sentences in asked:
        list(sentences)
    assert model_without_memory(again, cfg) is model and state() == before
    again.get_text_config().num_hidden_layers = 1
    assert model_without_memory(again, cfg) is not model
    config.of_its_own = {1, 2}  # as a directory's own code may have it; JSON has no sets
    other = model_without_memory(config, cfg)
    assert other is not model and str(other) == str(model)
