"""Adapters on one rank and on several: equal to PEFT's, to a model without them, and to themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
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
from spmdrl.model.frozen import reference_of
from spmdrl.model.load import load_model_config, load_policy
from spmdrl.model.lora import policy as lora_policy
from spmdrl.model.lora.peft import write_adapter
from spmdrl.model.lora.policy import adapter_problems, load_trained, random_values
from spmdrl.sft import main as fine_tune
from spmdrl.step.batch import build_batch
from spmdrl.step.export import export_adapter, export_hf
from spmdrl.tools import replay
from spmdrl.tools.export import export_checkpoint
from spmdrl.tools.parity_cases import GradientAsWeight
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main as train
from tests.helpers.adapters import NoTokenizer, token_mean_loss
from tests.helpers.configs import model_config, plan_for
from tests.helpers.matrix import VOCABULARY, by_reward, matrix, require_same
from tests.helpers.models import (
    needs_expert_plans,
    save_gpt_oss,
    save_llama,
    save_qwen3,
    save_qwen3_moe,
    save_qwen3_next,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.small_run import rows, sums_from_files, write_sft_config, write_small_run

RANK = 4
LORA = LoraConfig(rank=RANK, alpha=6.0)


# In the gate, rows of test_matrix.py have adapters of each model in each layout.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "lora"),
    [
        pytest.param((), {}, id="every layout"),
        pytest.param(("hsdp 2 x tp 2",), {"init": "pissa"}, id="from principal values"),
        pytest.param(("dp 2 x cp 2",), {"base": "nf4"}, id="on 4 bits"),
    ],
)
def test_layouts_of_adapters_give_what_one_rank_gives(
    tmp_path: Path, names: tuple[str, ...], lora: dict[str, Any]
) -> None:
    if "base" in lora:
        pytest.importorskip("bitsandbytes")
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY, num_hidden_layers=2)
    settings = dataclasses.replace(by_reward(path), lora=LORA.model_copy(update=lora))
    found = matrix(settings, lambda case: case.name in names if names else case.parallel.ep == 1)
    assert set(names) < found.keys()
    require_same(found)


@pytest.mark.slow
@needs_expert_plans
def test_layouts_of_adapted_experts_give_what_one_rank_gives(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, vocab_size=VOCABULARY, num_experts=8)
    require_same(matrix(dataclasses.replace(by_reward(path), lora=LORA), lambda _: True))


def _one_update(path: str, lora: LoraConfig, exports: Path) -> dict[str, Any]:
    """Log-probabilities before and after an update on a batch, gradients, and exports."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cfg = model_config(path)
        policy = load_trained(cfg, lora, meshes, temperature=1.0, seed=0)
        second = load_policy(cfg, meshes.model, temperature=1.0, role="reference")
        base = reference_of(policy, cfg, meshes, temperature=1.0)
        batch = build_batch(random_sequences(8), plan_for(8, 1), meshes, aggregation="token_mean")

        @torch.no_grad()
        def logprobs(model: Any) -> Tensor:
            return torch.cat([model(micro_batch).logprobs for micro_batch in batch.micro_batches])

        found: dict[str, Any] = {"reference": logprobs(second), "fresh": logprobs(policy)}
        policy.adapters.load(random_values(policy.adapters.trained, seed=1))
        found |= {"start": {name: x.clone() for name, x in policy.adapters.trained.items()}}
        found |= {"changed": logprobs(policy), "off": logprobs(base), "config": policy.adapters.config}
        optim = OptimConfig(name="spmdrl.tools.parity_cases:GradientAsWeight", lr=1.0, max_grad_norm=1e30)
        learner = Learner(policy, optim, SftObjective(), num_updates=1, dtype=torch.float32)
        assert isinstance(learner.optimizer, GradientAsWeight)
        export_adapter(policy, exports / "adapter", meshes)
        export_hf(policy, NoTokenizer(), exports / "hf", meshes, dtype=torch.float32)
        update(learner, batch.mini_batches, meshes, step=1)
        return found | {"gradients": {name: x.clone() for name, x in policy.adapters.trained.items()}}


@pytest.mark.parametrize(
    ("save", "lora"),
    [
        (save_llama, {}),
        (save_llama, {"rslora": True, "targets": ["q_proj", "mlp.down_proj"]}),
        (save_qwen3_moe, {}),
        (save_qwen3_moe, {"targets": ["experts.gate_up_proj", "v_proj"]}),
        (save_gpt_oss, {"targets": ["experts.gate_up_proj", "experts.down_proj"]}),
        # PEFT takes the names of the shared expert's layers for those of the experts, so these have none here.
        (save_qwen3_next, {"targets": ["q_proj", "in_proj_qkvz", "out_proj", "experts.gate_up_proj"]}),
    ],
)
def test_adapters_are_those_of_peft(tmp_path: Path, save: Callable[[Path], str], lora: dict[str, Any]) -> None:
    path = save(tmp_path / "model")
    lora = LoraConfig(rank=RANK, alpha=6.0, **lora)
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
    loss = token_mean_loss(model, random_sequences(8))
    loss.backward()
    for name, gradient in found["gradients"].items():
        theirs = model.get_parameter(name.replace(".weight", ".default.weight")).grad
        torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=1e-6)

    # The merged export is the adapted model.
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(token_mean_loss(merged, random_sequences(8)), loss.detach(), rtol=0, atol=1e-6)
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


def _fine_tuned(config: Path, *launches: list[str]) -> list[tuple[int, str]]:
    """Exit code and errors of one launch after the other, each with its overrides."""
    ended = []
    for overrides in launches:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            ended.append((fine_tune([str(config), *overrides]), errors.getvalue()))
    return ended


def _exported(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lora.init=pissa", "lora.base=nf4"])
def test_a_resumed_run_has_its_start_and_its_base_again(tmp_path: Path, fine_tuning: Path, setting: str) -> None:
    """On two ranks from a checkpoint of one: the start is the checkpoint's, whatever this launch computes."""
    if "base" in setting:
        pytest.importorskip("bitsandbytes")

    def launch(name: str, num_steps: int, *overrides: str) -> list[str]:
        begins = [setting, "checkpoint.keep_every=1", "export.merged=false"]
        return [f"run.name={name}", f"run.num_steps={num_steps}", *begins, *overrides]

    stopped = launch("parts", 1, "export.at_end=false")
    (ended,) = run_ranks(1, _fine_tuned, fine_tuning, launch("whole", 3), stopped, launch("parts", 3))
    assert ended == [(0, "")] * 3
    one, other = _exported(tmp_path / "runs/whole"), _exported(tmp_path / "runs/parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    checkpoint = tmp_path / "runs/parts/checkpoints/step-00000001"
    on_two = launch("other", 3, f"resume.checkpoint={checkpoint}")
    assert run_ranks(2, _fine_tuned_with_other_signs, fine_tuning, on_two) == [[(0, "")]] * 2
    for name, tensor in _exported(tmp_path / "runs/other").items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=1e-5)


def _fine_tuned_with_other_signs(config: Path, *launches: list[str]) -> list[tuple[int, str]]:
    """Fine-tune where another library finds the singular vectors: all of them negated."""
    real = lora_policy._FACTORS["pissa"]
    lora_policy._FACTORS["pissa"] = lambda *about: tuple(-x for x in real(*about))
    return _fine_tuned(config, *launches)


@pytest.fixture
def fine_tuning(tmp_path: Path) -> Path:
    """The configuration of a small run."""
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1)
    return write_sft_config(
        tmp_path,
        lora={"rank": 8},
        sft={"sequences_per_step": 8, "max_response_tokens": 8},
        pack={"max_tokens_per_micro_batch": 64},
        checkpoint={"every": 1},
        report={"console": "plain", "tensorboard": False},
    )


@pytest.mark.slow  # tests/e2e/test_cut_runs.py cuts a run with everything on, adapters too
def test_a_resumed_run_has_the_adapters_of_one_that_was_not_stopped(tmp_path: Path, fine_tuning: Path) -> None:
    def launch(name: str, num_steps: int, *overrides: str) -> list[str]:
        return [f"run.name={name}", f"run.num_steps={num_steps}", "export.merged=false", *overrides]

    stopped = launch("parts", 1, "export.at_end=false", "checkpoint.keep_every=1")
    resumed = launch("parts", 3, "checkpoint.keep_every=1")
    (ended,) = run_ranks(1, _fine_tuned, fine_tuning, launch("whole", 3), stopped, resumed)
    assert ended == [(0, "")] * 3
    checkpoint = tmp_path / "runs/parts/checkpoints/step-00000001"
    weights = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < weights, "the base is not saved"
    one, other = _exported(tmp_path / "runs/whole"), _exported(tmp_path / "runs/parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "runs/parts/hf").exists()

    # A checkpoint's adapters are exported as the run exports them.
    exported = export_checkpoint(tmp_path / "runs/whole", adapter=True) / "adapter_model.safetensors"
    assert all(torch.equal(tensor, one[name]) for name, tensor in load_file(exported).items())

    # Adapters of as many numbers that began elsewhere, or on other layers.
    others = ['lora.init="olora"', 'resume.changed=["lora"]', "--dry-run"]
    ((code, error),) = _fine_tuned(fine_tuning, launch("parts", 4, *others))
    assert code == 2 and 'lora.init was "default" and is "olora", but its adapters cannot become' in error

    others = ['lora.targets=["o_proj"]', 'resume.changed=["lora"]', "--dry-run"]
    ((code, error),) = _fine_tuned(fine_tuning, launch("parts", 4, *others))
    assert code == 2 and 'lora.targets was "all-linear" and is ["o_proj"], but its adapters cannot become' in error

    # Two ranks go on from the same checkpoint, and then find another base in the same place.
    on_two = launch("other", 3, f"resume.checkpoint={checkpoint}")
    assert run_ranks(2, _fine_tuned, fine_tuning, on_two) == [[(0, "")]] * 2
    two = _exported(tmp_path / "runs/other")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5)
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1, seed=1)
    (((code, error),),) = run_ranks(1, _fine_tuned, fine_tuning, launch("parts", 4))
    assert code == 2 and "adapters of another base" in error, error


@pytest.mark.slow
def test_levers_of_memory_change_no_adapter(tmp_path: Path, fine_tuning: Path) -> None:
    none = "run.num_steps=2"
    levers = (none, "model.cpu_offload=true", "optim.state_on_host=true", "model.gradient_checkpointing=full")
    launches = [[f"run.name=r{i}", none, "export.merged=false", lever] for i, lever in enumerate(levers)]
    assert run_ranks(1, _fine_tuned, fine_tuning, *launches) == [[(0, "")] * len(levers)]
    first, *others = (_exported(tmp_path / f"runs/r{number}") for number in range(len(levers)))
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"targets": ["q_prj"]}, 'lora.targets names "q_prj", but Qwen3ForCausalLM has no such layer; its layers are'),
        (
            {"targets": ["lm_head"]},
            'lora.targets names "lm_head", but embedding and head, which share their weights, get no',
        ),
        ({"targets": ["mlp"]}, 'lora.targets names "mlp", which is no linear layer but a Qwen3MLP'),
        ({"rank": 4096}, "lora.rank = 4096 is a higher rank than any weight of lora.targets has; set it to "),
        (
            {"rank": 65, "init": "pissa"},
            'lora.init = "pissa" begins at lora.rank = 65 parts of each weight, and model.layers.0.self_attn.k_proj',
        ),
        ({"path": "nowhere"}, 'lora.path = "nowhere" is not a directory of adapters: it has no adapter_config.json'),
        ({"alpha": 1e308}, "lora.alpha = 1e+308: input should be less than or equal to 1000000"),
        ({"dropout": 0.1}, "lora: dropout = 0.1 would make"),
        ({"use_dora": True}, "lora: use_dora = true trains magnitudes"),
        ({"path": "x", "rank": 3}, 'lora: rank has no meaning for path = "x"'),
        ({"rnk": 3}, "lora.rnk: no such setting; did you mean lora.rank?"),
    ],
)
def test_settings_that_do_not_fit_are_told(
    tmp_path: Path, fine_tuning: Path, settings: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tomllib.loads(fine_tuning.read_text()) | {"lora": settings}
    fine_tuning.write_text(tomlkit.dumps(written))
    assert fine_tune([str(fine_tuning), "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def _saved(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "init_lora_weights": True} | changes
    write_adapter(folder, config, tensors)
    return str(folder)


def test_directories_that_hold_other_adapters_are_refused(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "model")
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{stem}.lora_A.weight": torch.zeros(2, 48), f"{stem}.lora_B.weight": torch.zeros(64, 2)}
    elsewhere = {name.replace("layers.0", "layers.9"): tensor for name, tensor in pair.items()}
    wider = pair | {f"{stem}.lora_A.weight": torch.zeros(2, 32)}
    for number, (tensors, changes, sentence) in enumerate(
        [
            (pair, {"peft_type": "LOHA"}, 'peft_type = "LOHA"'),
            (pair, {"r": 0}, "is of another form: r: input should be greater than or equal to 1"),
            (pair, {"lora_alpha": None}, "lora_alpha: input should be a valid number"),
            (pair, {"lora_alpha": 1e308}, "lora_alpha: input should be less than or equal to 1000000"),
            (pair, {"use_bdlora": {"target_modules_bd_a": []}}, "sets use_bdlora = {"),
            (pair, {"kasa_config": {"beta": 1}}, 'sets kasa_config = {"beta": 1}, which is not supported'),
            (pair, {"of_next_year": True}, "sets of_next_year = true, which is not supported"),
            (
                {name: tensor / 0 for name, tensor in pair.items()},
                {},
                "holds numbers that are not finite, the first in",
            ),
            (
                {name: tensor.double() + 1e300 for name, tensor in pair.items()},
                {},
                "holds numbers that are not finite, the first in",
            ),
            (
                {name: (tensor / 0).to(torch.float8_e4m3fn) for name, tensor in pair.items()},
                {},
                "holds numbers that are not finite, the first in",
            ),
            ({name: tensor.long() for name, tensor in pair.items()}, {}, "as int64, which is no floating-point number"),
            (pair, {"target_modules": ["o_proj"]}, "1 layers that its target_modules do not name; the first is model"),
            (pair, {"target_modules": 7}, "target_modules"),
            (pair, {"init_lora_weights": ["pissa"]}, "init_lora_weights"),
            (pair, {"init_lora_weights": "OLoRA"}, 'init_lora_weights = "OLoRA", with which PEFT changes the base'),
            (pair, {"use_dora": True}, "sets use_dora = true, which is not supported"),
            (pair, {"rank_pattern": {"q_proj": 4}}, 'sets rank_pattern = {"q_proj": 4}'),
            (pair, {"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa", with which PEFT changes the base'),
            (pair | {"extra": torch.zeros(1)}, {}, "no matrices of adapters; the first is extra"),
            ({f"{stem}.lora_A.weight": torch.zeros(2, 48)}, {}, "lacks 1 matrices"),
            (
                elsewhere,
                {},
                "another base than model.path: 2 of its matrices have no layer in this model; the first is",
            ),
            (wider, {}, "is [2, 32], and should be [2, 48] there"),
        ]
    ):
        folder = _saved(tmp_path / str(number), tensors, **changes)
        cfg = model_config(path)
        (found,) = adapter_problems(load_model_config(cfg), cfg, LoraConfig(path=folder))
        assert sentence in found and "lora.path" in found, found


def test_matrices_that_are_no_ordinary_file_are_refused(tmp_path: Path) -> None:
    cfg = model_config(save_qwen3(tmp_path / "model"))
    for name, make, sentence in (
        ("adapter_model.bin", Path.touch, "as adapter_model.bin, a pickle, which may run any code"),
        ("adapter_model.safetensors", os.mkfifo, "it is a pipe or a device"),
        ("adapter_model.safetensors", Path.mkdir, "Is a directory"),
        ("adapter_model.safetensors", Path.touch, "header too small"),
        ("other.safetensors", Path.touch, "No such file or directory"),
    ):
        folder = tmp_path / sentence
        _saved(folder, {})
        (folder / "adapter_model.safetensors").unlink()
        make(folder / name)
        (found,) = adapter_problems(load_model_config(cfg), cfg, LoraConfig(path=str(folder)))
        assert sentence in found and found.startswith("lora.path"), found


def _trained_and_replayed(config: Path) -> tuple[int, int, str]:
    """Exit codes of a run and of the replay of its second step, and what the latter printed; its adapters are exported
    once more."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = train([str(config)])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        replayed = replay.main([str(config.parent / "runs/run"), "--step", "2"])
    export_checkpoint(config.parent / "runs/run", to=config.parent / "again", adapter=True)
    return code, replayed, printed.getvalue()


@pytest.mark.slow
def test_an_engine_samples_with_merged_adapters_and_a_step_is_replayed(tmp_path: Path) -> None:
    config = write_small_run(
        tmp_path,
        model={"num_layers": 1, "spare_tokens": 1},
        run={"num_steps": 2},
        lora={"rank": 8, "merge": True},
        loss={"updates_per_step": 1, "kl_coef": 0.1},
        correction={"old": "trainer"},
        offload={"trainer": "all"},
        eval=None,
        checkpoint={"every": 1},
        debug={"assert_on_policy": True, "save_rollouts": "all"},
        report={"console": "plain", "tensorboard": False},
        **{key: tables for key, tables in sums_from_files(tmp_path).items() if key == "data"},
    )
    (code, replayed, words), *_ = run_ranks(2, _trained_and_replayed, config)
    assert (code, replayed) == (0, 0), words
    assert "the same" in words
    first, second = (row for row in rows(tmp_path / "runs/run") if "update/loss" in row)
    assert first["update/k3_ref_nats"] == 0.0, "the policy begins as its base"
    assert second["update/k3_ref_nats"] > 0.0
    again, ours = load_file(tmp_path / "again" / "adapter_model.safetensors"), _exported(tmp_path / "runs/run")
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)
    for row in (first, second):
        assert row["mismatch/max_abs_nats"] < 1e-5
