"""Whole runs on pairs: the same on one rank, on several, in every layout, and after an interruption."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spmdrl.checkpoint.manifest import folder_of
from spmdrl.pairs import main
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main as train
from tests.helpers.models import needs_expert_plans, save_qwen3_moe
from tests.helpers.pair_runs import preferring, write_pairs_run
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    rows,
    sample_rows,
    steady_rows,
    without_curves,
    write_config,
)

ALONE = {"pack": {"max_tokens_per_micro_batch": None, "sequences_per_micro_batch": 2}}  # each pair by itself
LAYOUTS = [
    pytest.param(2, {}, id="fsdp"),
    pytest.param(1, ALONE, id="alone", marks=pytest.mark.slow),
    pytest.param(2, {"parallel": {"cp": 2}}, id="cp", marks=pytest.mark.slow),
    pytest.param(2, {"parallel": {"tp": 2}}, id="tp", marks=pytest.mark.slow),
    pytest.param(2, {"parallel": {"dp_replicate": 2}}, id="copies", marks=pytest.mark.slow),
    pytest.param(2, {"lora": {"rank": 4}}, id="adapters", marks=pytest.mark.slow),
    pytest.param(2, {"lora": {"rank": 4}, "parallel": {"tp": 2}}, id="adapters-tp", marks=pytest.mark.slow),
]


def curves(run: Path, *, last: int) -> dict[str, list[float]]:
    """The scalars that a run measured until a step, by name."""
    names = ("update/loss", "pairs/margin", "pairs/chosen_logprob_nats", "eval/loss", "eval/margin", "eval/accuracy")
    steps = [row for row in rows(run) if row["step"] <= last]
    return {name: [row[name] for row in steps if name in row] for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 12 steps on one rank, saved after 6."""
    folder = tmp_path_factory.mktemp("pairs")
    save_tiny_model(folder / "model", num_layers=1, spare_tokens=1)
    run = {"dir": str(folder), "num_steps": 12, "name": "whole"}
    write_pairs_run(folder, run=run, checkpoint={"every": 6}, optim={"lr": 2e-3})
    assert run_ranks(1, preferring, [f"{folder}/c.toml"])[0][0] == 0
    return folder


def test_a_run_learns_what_is_preferred(whole: Path) -> None:
    found = curves(whole / "whole", last=12)
    assert found["update/loss"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert found["eval/accuracy"][0] == 0.5 and found["eval/accuracy"][-1] == 1.0
    assert found["eval/margin"][-1] > 0.0 == found["eval/margin"][0]


def test_a_resumed_run_is_one_that_never_stopped(whole: Path) -> None:
    saved, copied = (folder_of(whole / name / "checkpoints", 6) for name in ("whole", "twice"))
    shutil.copytree(saved, copied)
    assert run_ranks(1, preferring, [f"{whole}/c.toml", "run.name=twice"])[0][0] == 0
    assert_same_weights(whole / "whole", whole / "twice")
    assert steady_rows(whole / "twice")[-1] == steady_rows(whole / "whole")[-1]


@pytest.mark.parametrize(("num_ranks", "tables"), LAYOUTS)
def test_a_run_does_not_depend_on_how_it_is_divided(
    num_ranks: int, tables: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(whole / "model")
    expected, run = whole / "whole", {"dir": str(tmp_path), "num_steps": 2, "name": "divided"}
    of_adapters = {name: table for name, table in tables.items() if name == "lora"}
    if of_adapters:
        write_pairs_run(tmp_path, **of_adapters, run=run | {"name": "one"}, optim={"lr": 2e-3})
        assert run_ranks(1, preferring, [f"{tmp_path}/c.toml"])[0][0] == 0
        expected = tmp_path / "one"
    copies = 1 if tables else num_ranks  # another layout than the policy's, where that is sharded or has copies
    model = {"path": str(tmp_path / "model"), "reshard_after_forward": False, "parallel": {"dp_replicate": copies}}
    reference = {} if of_adapters else {"models": {"reference": model}}  # where the run begins
    write_pairs_run(tmp_path, **tables, **reference, run=run, optim={"lr": 2e-3})
    assert {code for code, _ in run_ranks(num_ranks, preferring, [f"{tmp_path}/c.toml"])} == {0}
    for name, values in curves(tmp_path / "divided", last=2).items():
        assert values == pytest.approx(curves(expected, last=2)[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@needs_expert_plans
@pytest.mark.parametrize("loss", ["sigmoid", "bradley_terry"])
def test_experts_on_several_ranks_change_nothing(loss: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1)  # its tokenizer
    vocabulary = len(AutoTokenizer.from_pretrained(tmp_path / "model"))
    save_qwen3_moe(tmp_path / "model", vocab_size=vocabulary, num_experts=4)
    found = []
    for name, num_ranks, ep in (("one", 1, 1), ("divided", 2, 2)):
        run = {"dir": str(tmp_path), "num_steps": 2, "name": name}
        config = write_pairs_run(tmp_path, run=run, pairs={"loss": loss}, parallel={"ep": ep}, optim={"lr": 2e-3})
        assert {code for code, _ in run_ranks(num_ranks, preferring, [str(config)])} == {0}
        found.append(curves(tmp_path / name, last=2))
    for name, values in found[1].items():
        assert values == pytest.approx(found[0][name], rel=1e-4, abs=1e-5), name


REWARD_MODEL = {"pairs": {"loss": "bradley_terry", "center_coef": 0.01}, "optim": {"lr": 2e-3}}


@pytest.fixture(scope="module")
def ranked(whole: Path) -> Path:
    """The folder of a reward model, trained for 4 steps on one rank."""
    write_pairs_run(whole, name="r.toml", run={"dir": str(whole), "num_steps": 4, "name": "ranked"}, **REWARD_MODEL)
    assert run_ranks(1, preferring, [f"{whole}/r.toml"])[0][0] == 0
    return whole / "ranked"


def test_an_exported_reward_model_is_a_classifier_of_transformers(ranked: Path) -> None:
    """It gives the held-out answers the scores that the run measured after its last step."""
    model = AutoModelForSequenceClassification.from_pretrained(ranked / "hf", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(ranked / "hf")
    pairs = [json.loads(line) for line in (ranked.parent / "held-out.jsonl").read_text().splitlines()]
    texts = [[pair["prompt"] + pair[side] + tokenizer.eos_token for pair in pairs] for side in ("chosen", "rejected")]
    with torch.no_grad():
        chosen, rejected = (
            model(**tokenizer(side, return_tensors="pt", padding=True, add_special_tokens=False)).logits.squeeze(-1)
            for side in texts
        )
    last = rows(ranked)[-1]
    assert last["eval/chosen_reward"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert last["eval/rejected_reward"] == pytest.approx(float(rejected.mean()), rel=1e-5)
    assert last["eval/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert last["eval/loss"] < rows(ranked)[0]["eval/loss"]


@pytest.mark.parametrize(("num_ranks", "tables"), [one for one in LAYOUTS if "lora" not in one.values[1]])
def test_a_reward_model_does_not_depend_on_how_it_is_divided(
    num_ranks: int, tables: dict[str, Any], ranked: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(ranked.parent / "model")
    run = {"dir": str(tmp_path), "num_steps": 2, "name": "divided"}
    write_pairs_run(tmp_path, run=run, **REWARD_MODEL, **tables)
    assert {code for code, _ in run_ranks(num_ranks, preferring, [f"{tmp_path}/c.toml"])} == {0}
    expected = curves(ranked, last=2)
    for name, values in curves(tmp_path / "divided", last=2).items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_training_goes_on_from_a_reward_model(ranked: Path) -> None:
    """Its head is read from its files, and not begun again."""
    argv = [f"{ranked.parent}/r.toml", "run.name=more", f"model.path={ranked}/hf", "run.num_steps=1"]
    assert run_ranks(1, preferring, argv)[0][0] == 0
    assert rows(ranked.parent / "more")[0]["eval/loss"] == pytest.approx(rows(ranked)[-1]["eval/loss"], rel=1e-6)


def write_rewarded_run(folder: Path, ranked: Path, *, term: Mapping[str, Any], **tables: Any) -> Path:
    """Write the configuration of a small run that is rewarded by the reward model, and a little by a function."""
    terms = [
        {"kind": "model", "path": f"{ranked}/hf", "template": "pairs", "weight": 2.0, **term},
        {"kind": "function", "function": f"{folder}/reward.py:digits"},
    ]
    run = {"dir": str(folder), "num_steps": 2} | tables.pop("run", {})
    shared = {"reward": {"terms": terms}, "eval": {"success_at": 0.5}, "report": {"tensorboard": False}}
    return write_config(folder, name="rl.toml", run=run, **(shared | tables))


def rewarded(argv: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return without_curves(train, argv)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "term"),
    [
        pytest.param(2, {}, {"reshard_after_forward": False, "rests_on": "device"}, id="fsdp"),
        pytest.param(2, {"cp": 2}, {}, id="cp", marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, {}, id="tp", marks=pytest.mark.slow),
        pytest.param(2, {}, {"parallel": {"dp_replicate": 2}}, id="copies", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_rewarded_by_what_transformers_scores(
    num_ranks: int, parallel: dict[str, int], term: dict[str, Any], ranked: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(ranked.parent / "model")
    config = write_rewarded_run(tmp_path, ranked, term=term, parallel=parallel)
    assert set(run_ranks(num_ranks, rewarded, [str(config)])) == {0}
    model = AutoModelForSequenceClassification.from_pretrained(ranked / "hf", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(ranked / "hf")
    responses = [
        sample | {"response": sample["response"].removesuffix("<eos>")} for sample in sample_rows(tmp_path / "run")
    ]
    samples = [sample for sample in responses if "<" not in sample["response"]]  # a special token is no text
    assert len(samples) > 4
    for sample in samples:
        text = sample["prompt"] + sample["response"].removesuffix("<eos>") + "<eos>"
        with torch.no_grad():
            score = float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits)
        assert sample["reward_parts"]["model"] == pytest.approx(score, rel=1e-4, abs=1e-5)
        assert sample["reward"] == pytest.approx(2 * score + sample["reward_parts"]["function"], rel=1e-4, abs=1e-5)
    evaluated = [row for row in rows(tmp_path / "run") if "eval/reward" in row]
    assert len(evaluated) == 2 and all(row["eval/reward"] != 0.0 for row in evaluated)


def test_a_recorded_score_is_not_added_twice_and_a_long_text_fails(ranked: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(ranked.parent / "model")
    long = "{prompt}" + " and so on" * 20 + "{response}"
    config = str(
        write_rewarded_run(tmp_path, ranked, term={"template": long}, pack={"max_tokens_per_micro_batch": 160})
    )
    overrides = ["run.num_steps=1", "debug.save_rollouts=all"]
    assert run_ranks(1, rewarded, [config, "run.name=failing", *overrides]) == [0]
    (failing,) = (row for row in rows(tmp_path / "failing") if row["step"] == 1 and "reward/failed_count" in row)
    assert failing["reward/failed_count"] == 32.0 and failing["reward/mean"] == 0.0
    config = str(write_rewarded_run(tmp_path, ranked, term={}, eval=None))
    assert run_ranks(1, rewarded, [config, "run.name=recorded", *overrides]) == [0]
    loading = ["run.name=loaded", "run.num_steps=1", f"debug.load_rollouts={tmp_path}/recorded/rollouts"]
    assert run_ranks(1, rewarded, [config, *loading]) == [0]
    recorded, loaded = (
        [row["reward/mean"] for row in rows(tmp_path / name) if "reward/mean" in row] for name in ("recorded", "loaded")
    )
    assert recorded == loaded != [0.0]


def test_reward_models_that_cannot_be_asked_are_refused(
    ranked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(ranked.parent / "model")
    config = str(write_rewarded_run(tmp_path, ranked, term={}))
    shutil.copytree(ranked / "hf", tmp_path / "two")
    tensors = load_file(tmp_path / "two/model.safetensors")
    save_file(tensors | {"score.weight": tensors["score.weight"].repeat(2, 1)}, tmp_path / "two/model.safetensors")
    term = f"reward.terms=[{{ kind = 'model', path = '{ranked}/hf', template = 'pairs' }}]"
    for overrides, words in {
        (term.replace("'pairs'", "'chat'"),): 'terms.0: template = "chat", but its tokenizer has no chat template',
        (term.replace("'pairs'", "'{prompt}'"),): "has no {response}, which the reward model would not see",
        (term.replace("'pairs'", "'{prompt}{response}{answer}'"),): "has {answer}; it can use {prompt} and {response}",
        (term.replace(f"{ranked}/hf", f"{tmp_path}/model"),): "is no reward model: its weights have no score.weight",
        (term.replace(f"{ranked}/hf", f"{tmp_path}/two"),): "has 2 labels, and the reward is the score of one of them",
        (term.replace(f"{ranked}/hf", "nowhere"),): 'reward.terms.0.path = "nowhere" does not exist',
        (term.replace("'pairs'", "'pairs', label = 1"),): "reward.terms.0.label = 1, but reward.terms.0.path",
        (term, "rollout.dynamic_sampling=true"): "chooses them by their rewards before",
        (term, "eval={ num_prompts = 1, sources = [{ kind = 'jsonl', path = 'x' }] }"): "set eval.success_at",
    }.items():
        assert train([config, "--dry-run", *overrides]) == 2, overrides
        assert words in capsys.readouterr().err, overrides
    labelled = term.replace(f"{ranked}/hf", f"{tmp_path}/two").replace("'pairs'", "'pairs', label = 1")
    assert train([config, "--dry-run", labelled]) == 0
    assert "the scores of reward models come on top" in capsys.readouterr().out


def test_what_cannot_be_trained_is_refused_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1)
    config = str(write_pairs_run(tmp_path, pairs={"pairs_per_step": 8, "max_response_tokens": 8}))
    for overrides, words in {
        ("pack.max_tokens_per_micro_batch=40",): "cannot hold a pair of 64 tokens (twice data.max_prompt_tokens",
        ("pack={ sequences_per_micro_batch = 3 }",): "divides a pair",
        (): "held-out.jsonl line 1: an answer has 12 tokens, more than pairs.max_response_tokens = 8",
        ("pairs.loss=simpo",): "pairs.loss",
        ("pairs.loss=bradley_terry", "lora={ rank = 4 }"): "trains a head of its own, and adapters have none",
    }.items():
        assert main([config, "--dry-run", *overrides]) == 2
        assert words in capsys.readouterr().err
    assert main([config, "--dry-run", "data.overlong=drop", "held_out.num_prompts=5"]) == 0
    assert "is preferred to ' no' (4 tokens)" in capsys.readouterr().out
