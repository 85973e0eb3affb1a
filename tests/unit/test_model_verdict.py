"""`spmdrl model`: the tiny model has every setting of the real one, and planted faults are found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen3Config
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import spmdrl.tools.model_rows as rows
import spmdrl.tools.model_scores as scores
from docs.gen import models_sglang
from docs.gen.models_reference import (
    IN_TESTS,
    ON_A_DEVICE,
    PAGE,
    RESULTS,
    SGLANG_RESULTS,
    _engines,
    page,
    table,
    type_of,
)
from docs.gen.models_sglang import _dtype_of, answers_of
from spmdrl.dist.session import spmd_session
from spmdrl.engine.sglang.options import _family_problem
from spmdrl.families import LogitScale
from spmdrl.model import policy, recurrent
from spmdrl.model.supported import refusal_of_config
from spmdrl.tools.model import answers, main, memory_line
from spmdrl.tools.model_shrink import OF_SOUNDS, SIZES, TOKENS_OF_IMAGES, TOWER, save_processor, save_tiny, shrunk
from spmdrl.tools.model_source import released, source_of
from spmdrl.types import UserError
from tests.helpers.configs import minimal_config

MAY_CHANGE = {name for names in SIZES.values() for name in names.split()}
STORED_ONLY = {"dtype", "transformers_version", "architectures"}


@pytest.mark.parametrize("name", released())
def test_the_tiny_model_differs_in_sizes_alone(name: str) -> None:
    config = source_of(name).config
    assert released()[name]["source"]
    if refusal_of_config(config):
        return
    of_real, of_tiny = config.to_dict(), shrunk(config).to_dict()
    real, tiny = config.get_text_config().to_dict(), shrunk(config).get_text_config().to_dict()
    number, layers = config.get_text_config().num_hidden_layers, shrunk(config).get_text_config().num_hidden_layers
    for setting, value in real.items():
        if setting in MAY_CHANGE | STORED_ONLY or setting in ("qk_head_dim", "per_layer_config"):
            continue
        of_each_layer = isinstance(value, list) and len(value) == number
        assert tiny[setting] == (value[:layers] if of_each_layer else value), setting
    kinds = real.get("layer_types") or []
    assert set(kinds) == set(tiny.get("layer_types") or [])  # at least one of each kind
    if kv_heads := real.get("num_key_value_heads"):
        assert real["num_attention_heads"] / kv_heads == tiny["num_attention_heads"] / tiny["num_key_value_heads"]
    if "text_config" in of_real:  # and a tower
        changed = {setting for setting in of_real if of_real[setting] != of_tiny[setting]} - STORED_ONLY
        towers = {"vision_config": {*TOWER, "out_hidden_size"}, "audio_config": {*OF_SOUNDS}}
        assert changed <= {"text_config", "mm_tokens_per_image", *TOKENS_OF_IMAGES, *towers}
        for part, may_change in towers.items():
            tower, small = of_real.get(part) or {}, of_tiny.get(part) or {}
            assert {setting for setting in tower if tower[setting] != small[setting]} - STORED_ONLY <= may_change


def without_logit_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        @staticmethod
        def of(_: Any) -> LogitScale:
            return LogitScale()

    monkeypatch.setattr(policy, "LogitScale", Nothing)


def with_later_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = policy.PackedModel._positions
    monkeypatch.setattr(
        policy.PackedModel, "_positions", lambda *a: (found := counted(*a)) + (found >= 64).to(found.dtype)
    )


def with_leaking_state(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = recurrent._GatedDeltaNet._mix

    def leaking(self: Any, per_token: Any, weights: Any, seqlens: list[int], states: Any) -> Any:
        return mix(self, per_token, weights, [sum(seqlens)], states)

    monkeypatch.setattr(recurrent._GatedDeltaNet, "_mix", leaking)


def with_renormalized_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*arguments: Any, **options: Any) -> Any:
            found = load(*arguments, **options)
            for module in found.modules():
                if hasattr(module, "norm_topk_prob"):
                    module.norm_topk_prob = True
            return found

        return loaded

    monkeypatch.setattr(rows, "load_policy", changed(rows.load_policy))
    monkeypatch.setattr(scores, "load_trained", changed(scores.load_trained))


@pytest.mark.parametrize(
    ("name", "plant", "where", "likely"),
    [
        ("nanochat-d32", without_logit_scale, "first in head", "final_logit_softcapping = 15"),
        pytest.param(
            *("granite-3.3-2b", without_logit_scale, "first in head", "logits_scaling = 8"), marks=pytest.mark.slow
        ),
        ("llama-3.2-1b", with_later_positions, "layer 0: self_attn, token 64 of sequence 0", "positions from 64 on"),
        pytest.param(
            "qwen3-next-80b-a3b",
            with_leaking_state,
            "layer 0: linear_attn, token 0 of sequence 1",
            "a state that leaks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("qwen1.5-moe-a2.7b", with_renormalized_experts, "layer 0: mlp, token 0", "norm_topk_prob = False"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_faults_are_found_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    where: str,
    likely: str,
) -> None:
    source = source_of(name)
    save_tiny(shrunk(source.config), tmp_path / "tiny")
    plant(monkeypatch)
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        answer, remark = rows.ROWS["packed"](rows.Subject(source, tmp_path / "tiny"), world)
    assert answer == "no"
    assert where in remark
    assert likely in remark


def recorded(name: str) -> dict[str, str]:
    """The answers about a model on the page."""
    return {question: answer for question, (answer, _) in json.loads(RESULTS.read_text())["models"][name].items()}


def test_the_page_shows_what_was_recorded() -> None:
    text, results = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())
    assert page(text) == text, "run `make docs`"
    assert results["models"].keys() <= released().keys()
    assert sum(recorded(name).get("packed") == "yes" for name in results["models"]) >= 40
    assert "no" not in {answer for name in results["models"] for answer in recorded(name).values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss-20b", "moonlight-16b-a3b", "granite-3.3-2b", "longcat-flash"])
def test_one_rank_answers_as_recorded(tmp_path: Path, name: str) -> None:
    source = source_of(name)
    questions = ("weights as published", "packed", "adapters", "torch engine", "export and reload")
    save_tiny(shrunk(source.config), tmp_path / "tiny")
    subject = rows.Subject(source, tmp_path / "tiny")
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        found = {question: rows.ROWS[question](subject, world)[0] for question in questions}
    assert found == {question: recorded(name)[question] for question in questions}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-0.6b", "granite-3.3-2b", "qwen3-30b-a3b", "apertus-8b"])
def test_all_answers_are_as_recorded(tmp_path: Path, name: str) -> None:
    assert {verdict.question: verdict.answer for verdict in answers(source_of(name), tmp_path)} == recorded(name)


def test_sglang_is_refused_for_no_type_that_it_was_compared_on() -> None:
    cfg = minimal_config()
    for name, (answer, _) in json.loads(SGLANG_RESULTS.read_text())["models"].items():
        problem = _family_problem(cfg, source_of(name).config, "cpu")
        assert problem is None if answer == "yes" or type_of(name) in IN_TESTS else True, name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_answers_as_recorded() -> None:
    names = ["qwen3-0.6b", "granite-3.3-2b", "mixtral-8x7b", "gpt-oss-20b", "lfm2-350m", "ministral-3-8b", "phi-2"]
    names += ["phi-3-mini-4k", "qwen3-vl-2b", "granite-3.1-1b-a400m", "ernie-4.5-21b-a3b"]
    written = json.loads(SGLANG_RESULTS.read_text())["models"]
    found = {name: answer[0] for name, answer, _ in answers_of(names, at_once=2)}
    assert found == {name: written[name][0] for name in names}
    ((_, (answer, remark), _),) = answers_of(["apertus-8b"], untried=True)
    assert answer == "no" and " nats" in remark  # it is known to differ, and is asked about all the same


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_a_record_of_sglangs_answers_fits_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models_sglang, "commit_id", lambda *_: "a" * 40)
    monkeypatch.setattr(models_sglang, "answers_of", lambda asked, **_: ((name, ["yes", ""], "") for name in asked))
    monkeypatch.setattr(models_sglang, "signal", MagicMock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    ON_A_DEVICE.parent.mkdir(parents=True)

    def record(*arguments: str) -> dict[str, Any]:
        models_sglang.main([*arguments, "--device", "cuda"])
        found: dict[str, Any] = json.loads(ON_A_DEVICE.read_text())
        return found

    first = record("qwen3-0.6b")
    assert (first["note"], first["not reached"], [*first["models"]]) == ("", [], ["qwen3-0.6b"])
    assert [*record("olmo-1b", "--note", "alone")["models"]] == ["qwen3-0.6b", "olmo-1b"]
    of_sglang = {"date": "", "versions": {}, "models": {}}
    for written, note in ((first, "."), (json.loads(ON_A_DEVICE.read_text()), ": alone.")):
        text = table({"versions": {}, "models": {}}, of_sglang, written)
        assert f"{note} 0 models were not reached" in text and f"put at commit {'a' * 12}." in text
    monkeypatch.setattr(models_sglang, "commit_id", lambda *_: "b" * 40)
    with pytest.raises(SystemExit):
        record("olmo-1b", "--untried")
    assert f"{ON_A_DEVICE} has answers of another commit, untried; leave NAME out" in capsys.readouterr().err
    monkeypatch.setattr(models_sglang, "names", lambda: ["phi-2"])
    assert [*record()["models"]] == ["phi-2"]


def test_the_table_says_what_a_device_has_shown_of_a_type() -> None:
    """A model with experts is not one without, and an answer in bfloat16 says too little."""
    asked = {name: ["refused", ""] for name in ("granite-4.0-h-350m", "granite-4.0-h-tiny", "lfm2-350m")}
    seen = {"granite-4.0-h-350m": ["yes", "2e-06 nats"], "lfm2-350m": ["yes", "1e-01 nats in bfloat16"]}
    said = {name: _engines(name, asked, seen) for name in asked}
    assert said == dict.fromkeys(asked, "torch alone") | {"granite-4.0-h-350m": "torch, and SGLang on a GPU"}
    assert _engines("granite-4.0-h-350m", asked, {"granite-4.0-h-350m": ["no", ""]}) == "torch alone"


def test_sglang_is_asked_on_a_device_with_kernels_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str) -> dict[str, Any]:
        return rows._of_device(source_of(name).config, "cuda")

    assert of("qwen3-vl-2b")["sglang"]["mm_attention_backend"] == "triton_attn"
    assert "mm_attention_backend" not in of("qwen3-0.6b")["sglang"]
    for spec, is_off in ((None, True), (MagicMock(), False)):
        monkeypatch.setattr(rows, "find_spec", {"flashinfer": spec}.get)
        assert ("disable_flashinfer_autotune" in of("nemotron-3-nano")["sglang"]) == is_off
    assert (of("lfm2-350m")["attention_backend"], of("qwen3-0.6b")["attention_backend"]) == ("torch_native", "triton")
    assert _dtype_of("qwen3-next-80b-a3b", "cuda") == _dtype_of("qwen3.5-35b-a3b", "cuda") == "bfloat16"
    assert _dtype_of("qwen3-next-80b-a3b", "cpu") == _dtype_of("qwen3-0.6b", "cuda") == "float32"


def test_a_tiny_model_with_images_has_all_that_its_processor_reads(tmp_path: Path) -> None:
    config = shrunk(source_of("gemma-4-26b-a4b").config)
    config.save_pretrained(tmp_path)
    save_processor(config, tmp_path)
    assert AutoFeatureExtractor.from_pretrained(tmp_path).model_input_names
    assert AutoImageProcessor.from_pretrained(tmp_path, backend="pil").patch_size == config.vision_config.patch_size
    assert AutoTokenizer.from_pretrained(tmp_path).image_token == "<|image_token|>"


def test_weights_of_few_bits_and_real_sizes_are_named() -> None:
    world: Any = None
    answer, remark = rows.ROWS["weights as published"](rows.Subject(source_of("gpt-oss-20b"), Path()), world)
    assert answer == "yes" and "mxfp4" in remark
    assert "predicted for 1 x 80 GiB" in memory_line(source_of("qwen3-0.6b").config)
    assert "x 80 GiB" in memory_line(source_of("hunyuan-a13b").config)  # some of its sizes are lists


SIZES_OF_LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "does not say num_hidden_layers, num_attention_heads, vocab_size"),
        ({"hidden_size": 64}, "does not say model_type"),
        ({"model_type": "renamed", "architectures": ["DeepseekV3ForCausalLM"]}, 'model_type = "deepseek_v3"'),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "trust_remote_code"),
        ({"model_type": "next_year", "transformers_version": "6.1.0"}, "written by 6.1.0"),
        (SIZES_OF_LLAMA | {"model_type": "llama", "num_attention_heads": 5}, "does not take it"),
    ],
)
def test_what_no_model_can_be_built_of_is_said(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=re.escape(said)):
        source_of(str(tmp_path))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [({"quant_method": "awq"}, "awq"), ({"bits": 4}, "unknown"), ([4], "unknown"), (None, "")],
)
def test_weights_without_a_reader_are_refused(tmp_path: Path, quantization: Any, said: str) -> None:
    settings = SIZES_OF_LLAMA | {"model_type": "llama", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    world: Any = None
    subject = rows.Subject(source_of(str(tmp_path)), Path())
    answer, remark = rows.ROWS["weights as published"](subject, world)
    assert (answer, said in remark) == ("refused" if said else "yes", True)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES_OF_LLAMA | {"model_type": "llama"}))
    vocabulary = {f"<{number}>": number for number in range(100)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    assert main([str(tmp_path)]) == 2
    assert "token ids up to 99, and the embedding has 99 rows" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2


def test_a_text_is_no_list_of_layers() -> None:
    """A model of four layers has `silu` for its activation, which has four letters."""
    assert shrunk(Qwen3Config(num_hidden_layers=4)).hidden_act == "silu"
