"""Whole runs as a user starts them: the files they leave, the model they export, and that stopping changes nothing."""

from __future__ import annotations

import json
import signal
import tomllib
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import tomlkit
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from spmdrl.checkpoint.manifest import newest_step
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.verdict import read_error
from spmdrl.report.files import read_rows
from spmdrl.rollout.files import read_parts
from spmdrl.tools import rescore
from spmdrl.tools.evaluate import main as evaluate
from spmdrl.tools.export import export_checkpoint
from spmdrl.tools.export import main as export
from spmdrl.train import main as train
from tests.helpers.cuts import cut, entering, nowhere
from tests.helpers.exports import cached_gsm8k, evaluate_export
from tests.helpers.judges import FAILURES, judge_server
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    steady_rows,
    sums_from_files,
    torchrun,
    without_curves,
    write_small_run,
)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of 4 steps on 2 ranks that never stopped."""
    torchrun(folder, 2, "report.eval_samples=3", "debug.save_rollouts=2")
    return folder / "runs/run"


def test_the_run_folder_is_complete(whole: Path) -> None:
    for name in ("config.toml", "plan.json", "versions.json", "samples.jsonl", "curves.png", "hf/config.json"):
        assert (whole / name).stat().st_size > 0, name
    assert list((whole / "tensorboard").glob("events*"))
    assert [row["step"] for row in rows(whole)] == [0, 1, 2, 3, 4]
    for row in rows(whole)[1:]:
        assert {
            "reward/mean",
            "rollout/response_tokens",
            "rollout/truncated_fraction",
            "update/loss",
            "update/grad_norm",
            "update/clip_fraction",
            "update/entropy_nats",
            "mismatch/mean_abs_nats",
            "mismatch/max_abs_nats",
            "batch/fill_fraction",
            "time/step_s",
            "time/rollout_s",
            "time/update_s",
            "time/refit_s",
            "speed/loss_tokens_per_s",
            "memory/peak_gib",
            "memory/update_peak_gib",
        } <= row.keys()
        assert 0 < row["mismatch/max_abs_nats"] < 1e-5  # small, and not zero without true_on_policy
        assert "refit/probe_max_abs_nats" not in row  # nothing can be stale: the mismatch above is the floor
        assert row["reward/failed_count"] == 0
    assert [row["step"] for row in rows(whole) if "eval/accuracy" in row] == [0, 2, 4]
    # Loading comes before the first step, and what is saved after a step is the next one's.
    measured = {
        name: [row["step"] for row in rows(whole) if f"memory/{name}_peak_gib" in row] for name in ("load", "save")
    }
    assert measured == {"load": [1], "save": [3]}


def test_answers_to_the_same_held_out_prompts_are_written_after_every_evaluation(whole: Path) -> None:
    answers = read_rows(whole / "eval_samples.jsonl")
    first, *others = [[row for row in answers if row["step"] == step] for step in (0, 2, 4)]
    assert len(answers) == 9 and len({row["prompt_id"] for row in first}) == 3
    for later in others:
        assert [(row["prompt_id"], row["prompt"]) for row in later] == [
            (row["prompt_id"], row["prompt"]) for row in first
        ]


def test_the_tokens_that_engine_and_trainer_disagree_about_most_are_written(whole: Path) -> None:
    worst = read_rows(whole / "worst_tokens.jsonl")
    for row in rows(whole)[1:]:
        first, *others = [token for token in worst if token["step"] == row["step"]]
        assert abs(first["mismatch_nats"]) == row["mismatch/max_abs_nats"] > 0
        assert 0 < len(others) < 10
        assert first["token"] and first["context"]
    assert json.loads((whole / "plan.json").read_text())["prompts_per_rank"] == 4


def test_the_policy_learns(whole: Path) -> None:
    rewards = [row["reward/mean"] for row in rows(whole)[1:]]
    assert rewards[-1] > rewards[0] + 0.05, rewards


def test_the_export_is_the_model_that_was_evaluated(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "hf")
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    assert len(tokenizer) == model.config.vocab_size
    exported = evaluate_export(whole)
    last = rows(whole)[-1]
    for name in ("eval/accuracy", "eval/reward", "eval/response_tokens"):
        assert exported[name] == pytest.approx(last[name], abs=1e-9)


def _export(run: Path, to: Path) -> None:
    export_checkpoint(run, to=to)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_is_exported_as_the_run_exports_itself(
    folder: Path, whole: Path, tmp_path: Path, num_ranks: int
) -> None:
    run_ranks(num_ranks, _export, whole, tmp_path / "hf")
    run, checkpoint = (load_file(path / "model.safetensors") for path in (whole / "hf", tmp_path / "hf"))
    assert run.keys() == checkpoint.keys() and all(torch.equal(run[name], checkpoint[name]) for name in run)
    for name in ("config.json", "tokenizer.json"):
        assert (whole / "hf" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_an_export_says_where_it_is_and_nothing_else(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers_logging.enable_progress_bar()
    assert export([str(whole), "--to", str(tmp_path / "hf")]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == (f"{tmp_path / 'hf'}\n", "")


def test_a_checkpoint_that_cannot_be_exported_is_told(
    whole: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(whole), "--step", "3"]) == 2
    assert "cannot export: --step 3: there is no such checkpoint; there are 2, 4" in capsys.readouterr().err
    assert export([str(whole), "--to", str(folder / "model")]) == 2
    assert "is where this run would export its own model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_stopped_is_bitwise_the_run_that_did_not(folder: Path, whole: Path) -> None:
    launch(folder, 2, "run.name=stopped", "run.num_steps=2", "export.every=1", "export.at_end=false")
    exported = folder / "runs/stopped"
    assert sorted(path.name for path in exported.glob("hf*")) == ["hf-00000001", "hf-00000002"]
    done = torchrun(folder, 2, "run.name=stopped")
    assert "3/4" in done.stdout and "2/4" not in done.stdout
    assert_same_weights(whole, folder / "runs/stopped")
    assert steady_rows(whole) == steady_rows(folder / "runs/stopped")


@pytest.mark.slow
def test_memory_that_moves_to_the_host_and_back_changes_nothing(folder: Path, whole: Path) -> None:
    settings = ["offload.trainer=all", 'offload.engine=["kv_cache", "weights"]', "report.memory=true"]
    done = torchrun(folder, 2, "run.name=offloaded", *settings)
    assert_same_weights(whole, folder / "runs/offloaded")
    assert "memory in step 4, GiB, on 2 ranks" in done.stdout
    written = [json.loads(line) for line in (folder / "runs/offloaded/memory.jsonl").read_text().splitlines()]
    assert {row["step"] for row in written} == {0, 1, 2, 3, 4}
    # Step 4 evaluates, which releases the engine's weights, and saves.
    step = [row["edge"] for row in written if row["step"] == 4]
    sampled, trained = ["engine awake", "engine asleep"], ["trainer awake", "trainer asleep"]
    assert step == [*sampled, *trained, "refitted", *sampled, *trained]
    assert all(len(row["host_gib"]) == 2 and min(row["host_gib"]) > 0.1 for row in written)


@pytest.mark.slow
def test_one_rank_samples_what_two_ranks_sample(folder: Path, whole: Path) -> None:
    launch(folder, 1, "run.name=alone", "run.num_steps=1", "report.samples_per_step=100")
    launch(folder, 2, "run.name=pair", "run.num_steps=1", "report.samples_per_step=100")
    alone, pair = (rows(folder / "runs" / name)[-1] for name in ("alone", "pair"))
    for name in ("reward/mean", "rollout/response_tokens", "eval/reward", "batch/loss_tokens"):
        assert alone[name] == pytest.approx(pair[name], rel=1e-12), name
    assert alone["update/grad_norm"] == pytest.approx(pair["update/grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_drawing_by_chance_trains_on_groups_that_differ(folder: Path) -> None:
    """Dynamic sampling, over-sampling and partial rollouts together, each group with a greedy response to compare with;
    stopped once while rollouts go on."""
    settings = (
        "run.name=drawn",
        "advantage.estimator=remax",
        "run.deterministic=false",
        "rollout.dynamic_sampling=true",
        "rollout.oversample_fraction=0.5",
        "rollout.partial=true",
        "rollout.max_response_tokens=64",  # so long that some are always unfinished when the step has enough
        "rollout.max_running=6",
        "checkpoint.every=1",
        "checkpoint.keep_last=4",
        "report.samples_per_step=100",
    )
    launch(folder, 2, *settings, "run.num_steps=2")
    launch(folder, 1, *settings, "run.num_steps=3")
    run = folder / "runs/drawn"
    steps = rows(run)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["rollout/kept_groups_fraction"] == 1.0
        assert row["reward/equal_groups_fraction"] == pytest.approx(
            row["rollout/equal_groups_count"] / (row["rollout/equal_groups_count"] + 8)
        )
        assert row["rollout/max_staleness_steps"] <= 1
        assert 0 <= row["rollout/greedy_reward_mean"] <= 64 / 6 + 0.1  # 64 digits
    states = [json.loads((run / f"checkpoints/step-{step:08d}/collector.json").read_text()) for step in range(1, 4)]
    assert any(state["carried"] for state in states)
    samples = [sample for sample in sample_rows(run) if "prompt_id" in sample]
    prompt_ids = [sample["prompt_id"] for sample in samples]
    assert all(sample["advantage"] == sample["reward"] - sample["greedy_reward"] for sample in samples)
    assert len(prompt_ids) == len(set(prompt_ids)), "a prompt was trained on twice"


def test_what_needs_scored_tokens_is_in_the_loop(folder: Path) -> None:
    """KL in the reward, returns token by token, chosen tokens, coefficients with a target, overlong responses."""
    overrides = {
        "run.name": "scored",
        "run.num_steps": 2,
        "advantage.estimator": "reinforce_plus_plus",
        "reward.kl_coef": 0.05,
        "reward.kl_target_nats": 0.001,
        "reward.kl_horizon": 64,
        "reward.overlong_tokens": 3,
        "loss.kl_coef": 0.0,
        "loss.kind": "clip_cov",
        "loss.cov_fraction": 0.05,
        "loss.cov_low": 0.1,
        "loss.entropy_coef": 0.01,
        "loss.entropy_target_nats": 2.0,
        "eval.num_prompts": 2,
        "export.at_end": "false",
    }
    launch(folder, 2, *(f"{name}={value}" for name, value in overrides.items()))
    _, first, second = rows(folder / "runs/scored")
    assert first["reward/k1_ref_nats"] == 0.0 and second["reward/k1_ref_nats"] > 0.001
    assert (first["update/kl_in_reward_coef"], first["update/entropy_coef"]) == (0.05, 0.01)
    # 32 of 64 rollouts, 20 % off at most; the entropy of a random model is above its target.
    assert second["update/kl_in_reward_coef"] == pytest.approx(0.05 * (1 - 0.2 * 0.5))
    assert second["update/entropy_coef"] == pytest.approx(0.01 - 0.005)
    assert first["update/clip_fraction"] > 0.02 and -1 <= first["reward/part_overlong"] < 0


def test_a_critic_learns_beside_the_policy(folder: Path) -> None:
    """PPO with one rollout a prompt, which no estimator of groups could learn from; all of it sleeps meanwhile."""
    overrides = {
        "run.name": "critic",
        "run.num_steps": 5,
        "advantage.estimator": "gae",
        "rollout.prompts_per_step": 32,
        "rollout.group_size": 1,
        "critic.lr": 2e-3,
        "critic.warmup_steps": 1,
        "loss.kl_coef": 0.0,
        "offload.trainer": "all",
        "eval.num_prompts": 2,
        "checkpoint.every": 0,
        "export.at_end": "false",
    }
    launch(folder, 2, *(f"{name}={value}" for name, value in overrides.items()))
    _, first, *others = rows(folder / "runs/critic")
    assert first["critic/value_mean"] == first["critic/explained_variance"] == 0.0
    assert first["critic/grad_norm"] > 0 and "update/loss" not in first and 0 < first["mismatch/max_abs_nats"] < 1e-5
    assert all("update/loss" in row and row["critic/explained_variance"] < 1 for row in others)
    rewards, values = ([row[name] for row in others] for name in ("reward/mean", "critic/value_mean"))
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert values[-1] > values[0] + 0.1, f"the critic does not follow the rewards: {values}"


def test_resume_never_refuses_a_folder_that_holds_a_run(folder: Path, whole: Path) -> None:
    from spmdrl.train import main

    assert main([str(folder / "c.toml"), "resume.checkpoint=never"]) == 2


LAYOUTS = {"context": "parallel.cp=2", "tensor": "parallel.tp=2", "copies": "parallel.dp_replicate=2"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_sample_and_learn_the_same(whole: Path, folder: Path, layout: str) -> None:
    launch(folder, 2, f"run.name={layout}", "run.num_steps=2", "checkpoint.every=0", LAYOUTS[layout])
    for one, other in zip(rows(whole)[:3], rows(folder / "runs" / layout), strict=True):
        for name in ("reward/mean", "rollout/response_tokens", "update/loss", "update/grad_norm", "batch/loss_tokens"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (layout, one["step"], name)


@pytest.mark.slow
def test_a_curriculum_takes_the_same_prompts_on_any_ranks_and_after_kills(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("curriculum")
    tables = sums_from_files(folder)
    tables["data"] |= {"curriculum": {"kind": "band", "low": 0.3, "high": 0.9, "explore": 0.2}}
    write_small_run(
        folder,
        model={"num_layers": 1},
        run={"num_steps": 16},  # passes over 90 rows, 8 in a step
        report={"samples_per_step": 100, "tensorboard": False},
        loss={"updates_per_step": 1, "kl_coef": 0.0},
        optim={"lr": 1e-4},  # so slow that a last bit changes no token
        eval=None,
        export={"at_end": False},
        reward={"terms": [{"kind": "function", "function": f"{folder}/reward.py:digits"}], "kl_coef": 0.0},
        checkpoint={"every": 2},
        data=tables["data"],
    )
    (folder / "reward.py").write_text(
        "def digits(*, prompt, response, answer, metadata):\n    return float(sum(map(str.isdigit, response)) > 1)\n"
    )
    launch(folder, 1, "run.name=alone")
    launch(folder, 2, "run.name=pair")
    for name, num_ranks, phase in (("killed-alone", 1, "rollout"), ("killed-pair", 2, "update"), ("moved", 2, "batch")):
        with pytest.raises(AssertionError, match="died without a word"):
            killed = partial(entering, 14, phase, signal.SIGKILL, num_ranks - 1)
            run_ranks(num_ranks, cut, [str(folder / "c.toml"), f"run.name={name}"], killed, timeout_s=200.0)
        launch(folder, 1 if name == "moved" else num_ranks, f"run.name={name}")
    for one, other in (("alone", "killed-alone"), ("pair", "killed-pair")):
        assert steady_rows(folder / "runs" / one) == steady_rows(folder / "runs" / other)
        assert sample_rows(folder / "runs" / one) == sample_rows(folder / "runs" / other)

    def prompts(name: str) -> list[list[int]]:
        samples = [row for row in sample_rows(folder / "runs" / name) if "prompt_id" in row]
        return [sorted({row["prompt_id"] for row in samples if row["step"] == step}) for step in range(1, 17)]

    expected = prompts("alone")
    assert prompts("pair") == prompts("moved") == expected
    assert expected[0] == list(range(8)) and expected[-1][-1] > 16 * 8 + 8, "nothing was passed over"
    last = rows(folder / "runs/alone")[-1]
    assert last["curriculum/measured_fraction"] == 1.0 and 0 < last["curriculum/left_fraction"] < 1


@pytest.mark.slow  # tests/e2e/test_cut_runs.py cuts a run with everything on, a judge too
def test_a_policy_that_judges_itself_goes_on_with_the_same_rewards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed when a step has been judged, by the policy and by a judge that sees whole groups with their greedy
    responses, it asks nothing again. That judge says the same once more of the groups that were saved."""
    policy = {"kind": "judge", "url": "policy", "max_question_tokens": 180, "max_answer_tokens": 20}
    alone = {"template": "{rubric} {response}", "rubric": "Rate", "score_pattern": "([0-9])", "highest": 9.0}
    tables = {"data": sums_from_files(tmp_path)["data"], "run": {"num_steps": 2}, "checkpoint": {"every": 1}}
    with judge_server() as server:
        terms = [server.term(group="scores"), {**policy, **alone, "temperature": 1.0}]
        tables |= {"reward": {"terms": terms}, "advantage": {"estimator": "remax"}, "debug": {"save_rollouts": "all"}}
        write_small_run(tmp_path, model={"num_layers": 2}, eval=None, **tables)
        settings = [str(tmp_path / "c.toml")]
        assert set(run_ranks(2, cut, [*settings, "run.name=whole"], nowhere)) == {0}
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(2, cut, [*settings, "run.name=killed"], partial(entering, 2, "reward", signal.SIGKILL, rank=1))
        before = _judged(tmp_path / "runs/killed")
        assert set(run_ranks(2, cut, [*settings, "run.name=killed"], nowhere)) == {0}
        runs = [tmp_path / "runs" / name for name in ("whole", "killed")]
        again = tomllib.loads((runs[0] / "config.toml").read_text()) | {"reward": {"terms": terms[:1]}}
        (tmp_path / "again.toml").write_text(tomlkit.dumps(again))
        items = tmp_path / "items.jsonl"
        given = [str(runs[0]), "--config", str(tmp_path / "again.toml"), "--items", str(items)]
        assert rescore.main(given) == 0, capfd.readouterr().err
    assert steady_rows(runs[0]) == steady_rows(runs[1]) and sample_rows(runs[0]) == sample_rows(runs[1])
    assert _judged(runs[1]) == before and sum(said.count("\n") for said in before.values()) > 50
    assert all(row["reward/mean"] > 0 and 0 < row["reward/failed_count"] < 32 for row in rows(runs[0]))
    rescored = [row for row in read_rows(items) if row["before"]["failure"] is None]
    assert len(rescored) > 16
    assert all(row["now"]["parts"]["judge"] == row["before"]["parts"]["judge"] for row in rescored)


@pytest.mark.slow
def test_a_judge_that_fails_in_every_way_fails_these_rollouts_and_no_others(tmp_path: Path) -> None:
    """All are counted, and beyond `max_failed_fraction` the run ends before it has changed a weight."""
    how = [kind for kind in FAILURES for _ in range(3)]
    records = [{"prompt": f"{place} =", "answer": "1", "how": kind} for place, kind in enumerate([""] * 45 + how)]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    kinds = {record["prompt"]: record["how"] for record in records}
    with judge_server() as server:
        term = server.term(template="{rubric} {prompt} {response} fails:{how}.", timeout_s=0.6)
        tables = {"data": {"sources": [{"kind": "jsonl", "path": f"{path}"}]}, "reward": {"terms": [term]}}
        tables |= {"debug": {"save_rollouts": "all"}, "loss": {"updates_per_step": 1}}
        write_small_run(tmp_path, model={"num_layers": 1}, eval=None, **tables)
        # With that seed the first question, which a run asks before it starts, is one that is answered.
        argv = [str(tmp_path / "c.toml"), "rollout.group_size=2", "rollout.prompts_per_step=16", "run.seed=5"]
        assert run_ranks(1, cut, [*argv, "run.name=all"], nowhere) == [0]
        assert run_ranks(1, cut, [*argv, "run.name=few", "reward.max_failed_fraction=0.1"], nowhere) != [0]
    seen = set()
    for row in rows(tmp_path / "runs/all"):
        parts = read_parts(tmp_path / "runs/all/rollouts", row["step"])
        outcomes = [one for part in parts for one in part.outcomes]
        assert len(outcomes) == 32
        for rollout, outcome in outcomes:
            kind = kinds[rollout.prompt.text]
            seen |= {kind}
            assert (outcome.failure is None) == (not kind), outcome
            assert outcome.failure is None or FAILURES[kind] in outcome.failure
        assert row["reward/failed_count"] == sum(outcome.failure is not None for _, outcome in outcomes)
    assert seen == {"", *FAILURES}
    error = read_error(FaultFiles(tmp_path / "runs/few"))
    assert error is not None and "of 32 rewards failed, and reward.max_failed_fraction = 0.1" in error.message
    assert rows(tmp_path / "runs/few") == [] and not newest_step(tmp_path / "runs/few/checkpoints")


def _judged(run: Path) -> dict[str, str]:
    """Return the policy's judgments of its own responses, by rank."""
    return {path.name: path.read_text() for path in (run / "judged/policy").iterdir()}


def test_saved_rollouts_have_their_rewards_again_and_another_reward_differs_where_it_is_said(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    items = tmp_path / "items.jsonl"
    assert rescore.main([str(whole), "--items", str(items)]) == 0
    said = capfd.readouterr().out
    assert "64 rollouts of steps 3 to 4: 0 failed before, 0 now" in said and "correlation 1.000" in said
    assert all(row["before"] == row["now"] for row in read_rows(items))
    assert rescore.main([str(whole), "--step", "4", "--step", "4", "--show", "1", "reward.terms=[{kind='exact'}]"]) == 0
    said = capfd.readouterr().out
    assert "32 rollouts of steps 4 to 4" in said and "apart only before" in said and said.count("response: ") == 1
    assert rescore.main([str(whole), "--step", "1"]) == 2 and "holds no rollouts of step 1" in capfd.readouterr().err
    assert rescore.main([str(whole), "run.seed=4"]) == 2 and "is another one now" in capfd.readouterr().err


def _train_with(cache: str, argv: list[str]) -> int:
    huggingface_hub.constants.HF_HUB_CACHE = cache
    return without_curves(train, argv)


@pytest.mark.slow
def test_a_set_within_a_run_is_that_of_the_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rewards of the run that are others, and sampled: the same metrics, to the last response."""
    monkeypatch.chdir(tmp_path)
    items = [{"question": f"{n} + 1 =", "answer": f"#### {n % 10}"} for n in range(20)]
    snapshot = cached_gsm8k(tmp_path, monkeypatch, test=[*items, items[3]])
    sampling = {"temperature": 1.0, "samples_per_prompt": 4, "max_response_tokens": 2}
    both = ["gsm8k", "reasoning_gym/chain_sum"]
    sets = {"sources": [{"kind": "set", "name": name} for name in both], "num_prompts": None, "success_at": 5.0}
    write_small_run(
        tmp_path,
        model={"num_layers": 1, "hidden_size": 32},
        run={"num_steps": 2},
        data={"max_prompt_tokens": 200},
        eval=sets | sampling,
        debug=None,
    )
    for names in (both, both[:1]):
        sources = json.dumps([{"kind": "set", "name": name} for name in names]).replace('":', '" =')
        run = tmp_path / f"runs/of-{len(names)}"
        argv = [f"{tmp_path}/c.toml", f"run.name={run.name}", f"eval.sources={sources}"]
        num_ranks = len(names)  # which changes no answer
        assert run_ranks(num_ranks, _train_with, str(tmp_path / "cache"), argv) == [0] * num_ranks
        last = {name: value for name, value in rows(run)[-1].items() if name.startswith("eval/")}
        capsys.readouterr()
        assert evaluate_export(run) == pytest.approx(last, abs=1e-9), "config.toml names the same sets"
    assert 0 < last["eval/accuracy"] < 1 and last["eval/accuracy_gsm8k"] == last["eval/accuracy"]
    kept = tomllib.loads((run / "config.toml").read_text())["eval"]
    assert (kept["num_prompts"], kept["sources"][0]["path"]) == (20, f"{snapshot}/test-00000-of-00001.parquet")
    given = [f"eval.{name}={value}" for name, value in sampling.items()]
    assert evaluate([str(run), "--set", "gsm8k", "run.seed=3", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    del found["set"], found["eval/seen_in_training_count"]
    assert found == pytest.approx(last, abs=1e-9)
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items[:3]))
    of_file = []
    for model in (str(run), f"{run}/hf"):
        assert evaluate([model, "--data", "own.jsonl", "--reward", "exact", "rollout.max_response_tokens=2"]) == 0
        of_file.append(json.loads(capsys.readouterr().out))
    assert of_file[0].pop("eval/seen_in_training_count") == 0 and of_file[0] == of_file[1], "a run is its model"
    for wrong, said in {
        'eval.sources=[{kind="set",name="maths500"}]': "is no evaluation set; did you mean math500? there are gsm8k, ",
        'eval.sources=[{kind="set",name="math500"}]': 'eval.sources.0.name = "math500": it is not in the cache; set '
        "run.download = true to fetch it once",
        'eval.sources=[{kind="jsonl",path="none.jsonl"}]': "num_prompts is not set, and only sources of kind",
    }.items():
        assert train([f"{tmp_path}/c.toml", "--dry-run", wrong]) == 2
        assert said in capsys.readouterr().err
