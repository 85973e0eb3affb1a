"""Evaluation: pass@k is brute force over subsets, intervals cover, and two models are compared prompt by prompt."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from spmdrl.algo.evaluation import interval_of_share, overlapping, paired_difference, pass_at_k, reported_ks, t_quantile
from spmdrl.algo.metrics import ShareBound
from spmdrl.tools.evaluate import main
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.exports import cached_gsm8k
from tests.helpers.small_run import write_config, write_sft_config


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response() -> None:
    for num_samples in range(1, 8):
        for num_right in range(num_samples + 1):
            right = [True] * num_right + [False] * (num_samples - num_right)
            for k in range(1, num_samples + 1):
                brute = fmean(map(any, itertools.combinations(right, k)))
                assert pass_at_k(num_right, num_samples, k) == pytest.approx(brute, abs=1e-12)
    with pytest.raises(ValueError, match="pass@3 needs 3 samples"):
        pass_at_k(1, 2, 3)
    assert [reported_ks(n) for n in (1, 2, 6, 8)] == [[], [2], [2, 4, 6], [2, 4, 8]]


def test_quantiles_are_those_of_students_t() -> None:
    known = {3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 200: 1.972}  # any table of the distribution
    assert {degrees: t_quantile(degrees) for degrees in known} == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize(
    "num_prompts, num_samples, mean, likeness", [(30, 8, 0.1, 1), (100, 4, 0.5, 1), (200, 1, 0.02, 2), (20, 4, 0.9, 1)]
)
def test_an_interval_covers_where_responses_to_a_prompt_are_alike(
    num_prompts: int, num_samples: int, mean: float, likeness: float
) -> None:
    """Nine times in ten at least, for prompts of very different difficulty; one from responses alone does not."""
    chance, covered, naive = random.Random(7), 0, 0
    for _ in range(500):
        of_prompts = [chance.betavariate(mean * likeness, (1 - mean) * likeness) for _ in range(num_prompts)]
        shares = [sum(chance.random() < p for _ in range(num_samples)) / num_samples for p in of_prompts]
        low, high = (bound.value() for bound in ShareBound.both(shares))
        covered += low <= mean <= high
        share, count = fmean(shares), num_prompts * num_samples
        naive += abs(share - mean) <= 1.96 * math.sqrt(share * (1 - share) / count)
    assert covered >= 450
    assert num_samples == 1 or naive < 450


def test_an_interval_stays_within_its_bounds_and_merges() -> None:
    assert interval_of_share(0, 0, 50) == pytest.approx((0.0, 0.0747), abs=1e-3)
    assert interval_of_share(0, 0, 42)[0] == 0.0 and interval_of_share(42, 42, 42)[1] == 1.0, "without rounding"
    assert interval_of_share(50, 50, 50) == pytest.approx((0.9253, 1.0), abs=1e-3)
    assert all(map(math.isnan, interval_of_share(1, 1, 1)))
    (low, high), (other_low, other_high) = ShareBound.both([0.0, 0.5]), ShareBound.both([1.0, 0.25])
    whole = ShareBound.both([0.0, 0.5, 1.0, 0.25])
    assert (low.merge(other_low), high.merge(other_high)) == whole


def test_the_same_prompts_are_compared_one_by_one() -> None:
    chance = random.Random(3)
    theirs = [chance.random() for _ in range(60)]
    ours = [value + 0.05 + 0.02 * chance.gauss(0, 1) for value in theirs]
    found = paired_difference(ours, theirs)
    assert found.low < 0.05 < found.high and found.high - found.low < 0.02 and found.p_value < 0.001
    nothing = paired_difference(theirs, theirs)
    assert (nothing.mean, nothing.p_value) == (0.0, 1.0)


def test_a_model_is_evaluated_on_a_file_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("one", 1), ("other", 2)):
        save_tiny_model(tmp_path / name, num_layers=1, hidden_size=32, seed=seed)
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in [*range(11), 9]]  # one is asked twice
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("score.py").write_text(
        "def even(response: str, **_) -> float:\n    return float(len(response.strip()) % 2 == 0)\n"
    )
    sampled = ["eval.samples_per_prompt=4", "eval.temperature=1.0", "rollout.max_response_tokens=4"]
    start = ["--data", "sums.jsonl", "--reward", "score.py:even", *sampled]

    def evaluated(*arguments: str) -> dict[str, float]:
        assert main([*arguments]) == 0
        return json.loads(capsys.readouterr().out)

    first = evaluated("one", *start, "--items", "one.jsonl")
    items = [json.loads(line) for line in Path("one.jsonl").read_text().splitlines()]
    assert len({item["key"] for item in items}) == len(items) == 11
    assert first["eval/accuracy"] == fmean(right for item in items for right in item["right"])
    for k in (2, 4):
        expected = fmean(pass_at_k(sum(item["right"]), 4, k) for item in items)
        assert first[f"eval/pass_at_{k}"] == pytest.approx(expected)
    assert first["eval/ci95_low"] < first["eval/accuracy"] < first["eval/ci95_high"]
    assert evaluated("one", *start) == first
    second = evaluated("other", *start, "--against", "one.jsonl")
    assert second["against/one.jsonl/mean"] == pytest.approx(second["eval/accuracy"] - first["eval/accuracy"])
    assert (
        evaluated("one", "--set", "sums.jsonl", "--reward", "score.py:even", *sampled) == {"set": "sums.jsonl"} | first
    )
    Path("few.jsonl").write_text(Path("one.jsonl").read_text().partition("\n")[0] + "\n")
    Path("bad.jsonl").write_text('{"key": "a"}\n')
    for wrong, said in {
        ("--against", "few.jsonl"): "--against few.jsonl is of other prompts: of 11 here and 1 there 1 are the same",
        ("--against", "bad.jsonl"): "bad.jsonl is of another form: 0.right: field required",
        ("--against", "none.jsonl"): "none.jsonl: No such file or directory",
        ("eval.samples_per_prompts=2",): "no such setting; did you mean eval.samples_per_prompt?",
    }.items():
        assert main(["one", *start, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["one", "--data", "sums.jsonl"]) == 2
    assert "--data and --reward belong together" in capsys.readouterr().err


def test_an_item_of_training_is_seen_whatever_is_around_it() -> None:
    long = "If a train leaves at noon and goes sixty miles in one hour how far does it go in three?"
    questions = ["What is 2 + 2?", "What is 3 + 3?", long, long.replace("noon", "dawn")]
    trained = ["what is 2 + 2", "Question: " + long.upper() + " Think.", "What is 3 + 3? And why?"]
    assert overlapping(questions, trained) == {0, 2, 3}, "13 words after the difference are shared"
    assert overlapping(questions, []) == set()


def test_sets_have_names_in_the_cache_and_count_what_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    rows = [{"question": f"How much is {n} + 1?", "answer": f"It is {n} + 1.\n#### {n + 1}"} for n in range(6)]
    snapshot = cached_gsm8k(tmp_path, monkeypatch, test=rows, train=rows[:2])
    short = ["rollout.max_response_tokens=4", "data.max_prompt_tokens=200"]
    run = write_config(
        tmp_path,
        data={"sources": [{"kind": "parquet", "path": f"{snapshot}/train-00000-of-00001.parquet",
                           "prompt_column": "question", "answer_after": "####"}]},
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    run.rename(tmp_path / "run/config.toml")

    def evaluated(*arguments: str) -> list[dict[str, Any]]:
        assert main(["model", *arguments, *short]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first, second = evaluated("--set", "gsm8k,reasoning_gym/chain_sum")
    assert (first["set"], second["set"]) == ("gsm8k", "reasoning_gym/chain_sum")
    assert 0 <= first["eval/accuracy"] <= 1 and "eval/seen_in_training_count" not in first
    (seen,) = evaluated("--set", "gsm8k", "--trained-on", "run", "--items", "items.jsonl")
    items = [json.loads(line) for line in Path("items.jsonl").read_text().splitlines()]
    assert {item["prompt"]: item["answer"] for item in items} == {f"How much is {n} + 1?": f"{n + 1}" for n in range(6)}
    assert seen["eval/seen_in_training_count"] == sum(item["seen_in_training"] for item in items) == 2
    source = {"kind": "parquet", "path": f"{snapshot}/train-00000-of-00001.parquet", "prompt_column": "question"}
    tuned = write_sft_config(
        tmp_path,
        data={"sources": [source | {"response_column": "answer"}]},
        sft={"sequences_per_step": 2, "max_response_tokens": 32},
    )
    (tmp_path / "tuned").mkdir()
    tuned.rename(tmp_path / "tuned/config.toml")
    (tmp_path / "tuned/hf").symlink_to(tmp_path / "model")
    assert main(["tuned", "--set", "gsm8k", *short]) == 0, "a fine-tuned model is a run's too"
    assert json.loads(capsys.readouterr().out)["eval/seen_in_training_count"] == 2
    assert main(["tuned"]) == 2
    assert "tuned is a run of sft, which has no rewards; give --data FILE --reward KIND" in capsys.readouterr().err
    (tmp_path / "run/hf").symlink_to(tmp_path / "model")
    assert main(["run", "--trained-on", "tuned", "model.path=model", "rollout.max_response_tokens=4"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/seen_in_training_count"] == 0
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self): return 'go'\n    def step(self, action): return None, 0.5, False\n"
    )
    game = {"source": {"kind": "class", "name": f"{tmp_path}/game.py:Game"}, "max_turns": 2, "max_turn_tokens": 3}
    terms = [{"kind": "environment"}]
    write_config(tmp_path, name="game.toml", environment=game, reward={"terms": terms}, model={"path": "other"})
    assert main(["model", "--set", "game.toml", "rollout.max_response_tokens=40"]) == 0
    played = json.loads(capsys.readouterr().out)
    assert (played["set"], played["eval/turns"], played["eval/end_length_fraction"]) == ("game.toml", 1.0, 1.0)
    for wrong, said in {
        ("--set", "gsm9k"): "--set gsm9k is no evaluation set; did you mean gsm8k? there are gsm8k, math500, aime24",
        ("--set", "math500"): "--set math500 (hf:HuggingFaceH4/MATH-500): it is not in the cache; add --download",
        ("--set", "gsm8k,math500", "--items", "x"): "give one set at a time",
        ("--set", "gsm8k", "--data", "x", "--reward", "math"): "--set and --data both say what is asked",
    }.items():
        assert main(["model", *wrong]) == 2
        assert said in capsys.readouterr().err
