"""Pairs of answers: the forms in which rows have them, their losses, and that no pair is divided."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cohere2Config

from spmdrl.algo.preferences import preference_loss
from spmdrl.config import ModelConfig, PairsConfig, PreferenceFile, PreferencesConfig
from spmdrl.data.messages import compared
from spmdrl.data.sources import Exchange, FileSource, Row
from spmdrl.data.stream import TrainingPair
from spmdrl.data.tokenizer import ScoredText, encode_prompt
from spmdrl.data.vision import NO_IMAGES
from spmdrl.learn.pairs import PreferenceObjective, pair_objective
from spmdrl.model.policy import RewardModel, TokenLogprobs
from spmdrl.model.reward_model import reward_model_problems
from spmdrl.step.batch import lay_end_to_end
from spmdrl.step.tuning_data import ComparisonEncoder
from spmdrl.tools.tiny_model import character_tokenizer
from spmdrl.types import ImageSpan, Prompt, Sequence, UserError
from tests.helpers.configs import minimal_config
from tests.helpers.models import QWEN3

COHERE2 = Cohere2Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)

ASKED = [{"role": "user", "content": "2 + 2?"}]


def said(text: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def row_of(record: dict[str, Any], tmp_path: Path, **columns: Any) -> Row:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return FileSource(PreferenceFile(kind="jsonl", path=str(file), **columns), seed=0).row(0)


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("2 + 2?", "4", "5"),
        ("2 + 2?", said("4"), said("5")),
        ("2 + 2?", ASKED + said("4"), ASKED + said("5")),
        (ASKED, said("4"), said("5")),
        (ASKED, "4", "5"),
        (ASKED, ASKED + said("4"), ASKED + said("5")),
        (None, ASKED + said("4"), ASKED + said("5")),
    ],
)
def test_every_form_is_the_same_comparison(prompt: Any, chosen: Any, rejected: Any, tmp_path: Path) -> None:
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if prompt is None:
        del record["prompt"]
    row = row_of(record, tmp_path, prompt_column="prompt" if prompt is not None else "")
    assert row.question == "2 + 2?"
    assert row.exchanges == (Exchange((), "4"),) and row.rejected == (Exchange((), "5"),)


def test_texts_without_a_prompt_share_whole_words() -> None:
    found = compared(None, "Human: hi\n\nAssistant: there", "Human: hi\n\nAssistant: then")
    assert found == ("Human: hi\n\nAssistant:", (((), " there"),), (((), " then"),))


def test_an_answer_may_be_several_messages() -> None:
    """The prompt is the part that both conversations have, the assistant's messages in it included."""
    start = [*ASKED, *said("4"), {"role": "user", "content": "sure?"}]
    more = {"role": "user", "content": "why?"}
    found = compared(None, [*start, *said("yes"), more, *said("counted")], start + said("no"))
    assert found == (start, (((), "yes"), ((more,), "counted")), (((), "no"),))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 1: the chosen and the rejected answer are equal"),
        ({"prompt": "a", "chosen": said("b"), "rejected": said("b")}, "are equal"),
        ({"prompt": "a", "chosen": "b"}, 'has no column "rejected" .*; it has prompt, chosen'),
        ({"prompt": "a", "answer": "b", "rejected": "c"}, 'has no column "chosen" .*; it has prompt, answer, rejected'),
        ({"chosen": "a b", "rejected": "a c"}, 'no column "prompt" .* set prompt_column = "" if both answers begin'),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, "an answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": said("c")}, "must both be strings, or both be lists"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, "must both be strings"),
        ({"prompt": "x", "chosen": ASKED + said("4"), "rejected": ASKED + said("5")}, "do not begin with its prompt"),
        ({"prompt": ASKED, "chosen": ASKED, "rejected": ASKED + said("5")}, "do not differ first in an assistant's"),
        ({"prompt": ASKED, "chosen": said("4") + said("5"), "rejected": said("5")}, "follows another"),
        ({"prompt": ASKED, "chosen": said("4") + ASKED, "rejected": said("5")}, 'ends with a message of role "user"'),
        ({"prompt": "a", "chosen": "b\0", "rejected": "c"}, "NUL"),
        (
            {
                "prompt": ASKED,
                "chosen": [{"role": "assistant", "content": "", "tool_calls": [{}]}],
                "rejected": said("5"),
            },
            "has tool_calls",
        ),
        (
            {"prompt": ASKED, "chosen": [{"role": "assistant", "content": [{"type": "image"}]}], "rejected": said("5")},
            "an image after the prompt",
        ),
    ],
)
def test_rows_that_compare_nothing_are_refused(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        row_of(record, tmp_path)
    if "prompt" not in record:
        with pytest.raises(UserError, match="do not begin with the same prompt"):
            compared(None, "a b", "c d")


# Oracles: the losses of one pair by their formulas, from numbers of Python.


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def loss_of(pair: list[list[float]], reference: list[list[float]], cfg: PairsConfig) -> float:
    sums = [sum(own) - sum(other) for own, other in zip(pair, reference, strict=True)]
    if cfg.divides_by_length:
        sums = [value / len(own) for value, own in zip(sums, pair, strict=True)]
    h = sums[0] - sums[1]
    sft = -cfg.sft_coef * sum(pair[0]) / len(pair[0])
    if cfg.loss == "ipo":
        return (h - 1 / (2 * cfg.beta)) ** 2 + sft
    e = cfg.label_smoothing
    return -(1 - e) * log_sigmoid(cfg.beta * h) - e * log_sigmoid(-cfg.beta * h) + sft


CASES: list[dict[str, Any]] = [
    {},
    {"beta": 0.5, "label_smoothing": 0.2},
    {"length_normalized": True, "beta": 5.0},
    {"loss": "ipo"},
    {"loss": "ipo", "length_normalized": False, "sft_coef": 0.3},
    {"sft_coef": 0.2},
]


def settings(**changes: Any) -> PairsConfig:
    return PairsConfig(**({"pairs_per_step": 4, "max_response_tokens": 8} | changes))


def random_pairs() -> tuple[list[Sequence], list[list[list[float]]], list[list[list[float]]]]:
    """Three pairs with answers of different lengths, and log-probabilities of policy and reference."""
    generator = torch.Generator().manual_seed(0)
    sequences, policy, reference = [], [], []
    for index, lengths in enumerate([(3, 1), (2, 2), (1, 5)]):
        for part, length in enumerate(lengths):
            num_tokens = 2 + length
            sequences.append(
                Sequence(
                    index=index,
                    segment=part,
                    token_ids=(1,) * num_tokens,
                    loss_mask=(False,) * 2 + (True,) * length,
                    rollout_logprobs=(0.0,) * num_tokens,
                    reward=0.0,
                )
            )
        for into in (policy, reference):
            into.append([(-torch.rand(length, generator=generator)).tolist() for length in lengths])
    return sequences, policy, reference


def objective_of(
    cfg: PairsConfig, sequences: list[Sequence], columns: list[Tensor], *, multiple: int = 1
) -> tuple[Tensor, Tensor, Any]:
    """The loss of some of the pairs with a weight of 1/3 each, its gradient, and all that the objective returned."""
    batch = lay_end_to_end(sequences, dict.fromkeys(range(3), 1 / 3), multiple=multiple)
    filling = torch.full((len(batch.token_ids) - len(columns[0]),), -7.0)
    logprobs, reference = (torch.cat([column, filling]) for column in columns)
    batch = dataclasses.replace(batch, ref_logprobs=reference)
    logprobs.requires_grad_()
    objective = PreferenceObjective(cfg)(TokenLogprobs(logprobs, torch.zeros_like(logprobs)), batch)
    objective.loss_sum.backward()
    assert logprobs.grad is not None
    return objective.loss_sum.detach(), logprobs.grad[: len(columns[0])], objective


def on_tokens(values: list[list[list[float]]]) -> Tensor:
    return torch.tensor([x for pair in values for answer in pair for x in (0.0, 0.0, *answer)])


@pytest.mark.parametrize("changes", CASES)
def test_the_objective_is_the_formula_packed_or_alone(changes: dict[str, Any]) -> None:
    cfg = settings(**changes)
    sequences, policy, reference = random_pairs()
    expected = sum(map(lambda one, other: loss_of(one, other, cfg), policy, reference)) / 3
    columns = [on_tokens(policy), on_tokens(reference)]
    loss, gradient, objective = objective_of(cfg, sequences, columns, multiple=4)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    alone = [
        objective_of(cfg, sequences[2 * i : 2 * i + 2], [on_tokens([policy[i]]), on_tokens([reference[i]])])
        for i in range(3)
    ]
    assert torch.allclose(loss, sum(one for one, _, _ in alone), rtol=1e-6)  # type: ignore[arg-type]
    assert torch.allclose(gradient, torch.cat([of_one for _, of_one, _ in alone]), atol=1e-7)
    values, where = objective.elsewhere["pairs/loss"]
    assert int(where.sum()) == 3 and float(values[where].mean()) == pytest.approx(expected, rel=1e-6)
    # The gradient by differences, in float64.
    for place in (2, 5, 8):
        step = torch.zeros_like(columns[0], dtype=torch.float64)
        step[place] = 1e-5
        above, below = (
            objective_of(cfg, sequences, [columns[0].double() + sign * step, columns[1].double()])[0]
            for sign in (1, -1)
        )
        assert float(gradient[place]) == pytest.approx(float((above - below) / 2e-5), rel=1e-4, abs=1e-7)


def test_a_micro_batch_without_pairs_adds_nothing() -> None:
    batch = dataclasses.replace(lay_end_to_end([], {}, multiple=4), ref_logprobs=torch.zeros(4))
    logprobs = torch.zeros(4, requires_grad=True)
    objective = PreferenceObjective(settings())(TokenLogprobs(logprobs, torch.zeros(4)), batch)
    objective.loss_sum.backward()
    assert float(objective.loss_sum.detach()) == 0.0 and logprobs.grad is not None and not logprobs.grad.any()


def test_a_policy_that_is_the_reference_is_undecided() -> None:
    same = (torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -2.0]))
    tokens = (torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0]))
    found = preference_loss(same, same, tokens, kind="sigmoid", beta=0.1)
    assert found.per_pair.tolist() == pytest.approx([math.log(2)] * 2)
    assert [values.tolist() for values in found.rewards] == [[0.0, 0.0], [0.0, 0.0]]
    squared = preference_loss(same, same, tokens, kind="ipo", beta=0.1)
    assert squared.per_pair.tolist() == pytest.approx([25.0] * 2)


def test_the_ranking_objective_is_the_likelihood_of_the_labels() -> None:
    sequences, *_ = random_pairs()
    scores, margins = [(0.3, -0.2), (-1.0, 0.5), (2.0, 2.0)], [0.5, 0.0, 1.0]
    columns = []
    for place, one in enumerate(sequences):
        end = (False,) * (len(one.token_ids) - 1) + (True,)
        margin = margins[one.index] if one.segment == 0 else 0.0
        sequences[place] = dataclasses.replace(one, loss_mask=end, reward=margin)
        columns += [0.0] * (len(end) - 1) + [scores[one.index][one.segment]]
    batch = lay_end_to_end(sequences, dict.fromkeys(range(3), 1 / 3))
    objective = pair_objective(
        PairsConfig(pairs_per_step=4, max_response_tokens=8, loss="bradley_terry", center_coef=0.01)
    )(torch.tensor(columns, requires_grad=True), batch)
    each = [-log_sigmoid(a - b - m) + 0.01 * (a + b) ** 2 for (a, b), m in zip(scores, margins, strict=True)]
    assert float(objective.loss_sum.detach()) == pytest.approx(sum(each) / 3, rel=1e-6)
    values, where = objective.elsewhere["pairs/accuracy"]
    assert values[where].tolist() == [1.0, 0.0, 0.5]


def test_a_margin_is_a_number_of_its_row(tmp_path: Path) -> None:
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}
    assert row_of(record, tmp_path, margin_column="margin").margin == 2.0
    for wrong in ("2", True, 1e300):
        with pytest.raises(UserError, match='line 1: "margin" must be a finite number'):
            row_of(record | {"margin": wrong}, tmp_path, margin_column="margin")


def test_a_head_of_one_label_needs_a_classifier_of_transformers() -> None:
    cfg = ModelConfig(path="somewhere")
    assert [*reward_model_problems(QWEN3, cfg)] == []
    assert "transformers has no such model" in next(reward_model_problems(COHERE2, cfg))


def asked(text: str, *, chat: bool = False) -> Prompt:
    messages = ({"role": "user", "content": text},) if chat else ()
    return Prompt(prompt_id=0, token_ids=(1,), text=text, answer=None, task="t", metadata={}, messages=messages)


def test_a_reward_model_reads_what_its_template_writes() -> None:
    plain, chat = character_tokenizer(), character_tokenizer(chat=True)
    end = plain.eos_token_id
    assert ScoredText(plain, "pairs")(asked("2+2="), "4") == (
        *plain("2+2=4", add_special_tokens=False)["input_ids"],
        end,
    )
    told = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    whole = chat.apply_chat_template(told, tokenize=True, return_dict=False)
    assert list(ScoredText(chat, "chat")(asked("2+2=", chat=True), "4")) == whole
    filled = ScoredText(plain, "Q: {prompt} A: {response}<eos>")(asked("2<eos>"), "4")
    assert plain.decode(list(filled)) == "Q: 2<eos> A: 4<eos>" and filled.count(end) == 1  # what was asked stays text
    with pytest.raises(UserError, match="images"):
        image = ImageSpan(digest="0" * 32, start=0, num_tokens=1, grid=(1, 1, 1))
        ScoredText(plain, "pairs")(dataclasses.replace(asked("2"), images=(image,)), "4")


def test_a_pair_is_scored_as_it_was_trained() -> None:
    """The template "pairs" writes the tokens on which `spmdrl.pairs` has trained."""
    for tokenizer, chat in ((character_tokenizer(), False), (character_tokenizer(chat=True), True)):
        token_ids, _ = encode_prompt(tokenizer, "2+2=", system_prompt=None, chat_template="auto")
        prompt = dataclasses.replace(asked("2+2=", chat=chat), token_ids=token_ids)
        cfg = SimpleNamespace(
            table="pairs",
            answers=SimpleNamespace(max_response_tokens=9),
            data=SimpleNamespace(chat_template="auto"),
            pairs=SimpleNamespace(trains_reward_model=True),
        )
        inputs = SimpleNamespace(
            tokenizer=tokenizer, stop_token_ids=frozenset({tokenizer.eos_token_id}), images=NO_IMAGES
        )
        pair = TrainingPair(prompt, "line 1", (Exchange((), "4"),), rejected=(Exchange((), "5"),), margin=1.5)
        chosen, rejected = ComparisonEncoder(cfg, inputs)(pair, 0)  # type: ignore[arg-type]
        read = ScoredText(tokenizer, "pairs")
        assert chosen.token_ids == read(prompt, "4") and rejected.token_ids == read(prompt, "5")
        assert sum(chosen.loss_mask) == chosen.loss_mask[-1] == 1 and chosen.reward == 1.5


@pytest.mark.parametrize(
    ("models", "loss", "words"),
    [
        ({"big": {"path": "m"}}, "ipo", r"a run on pairs has \[models\.reference\] alone"),
        ({"reference": {"weights": "lagged"}}, "ipo", r"moves with the policy.*set models\.reference\.path"),
        ({"reference": {"path": "m"}}, "bradley_terry", "compares with no reference"),
    ],
)
def test_pairs_have_one_reference_that_stays(models: dict[str, Any], loss: str, words: str) -> None:
    whole = minimal_config().model_dump(include={"run", "model", "optim", "pack"}, exclude_none=True)
    data = {"sources": [{"kind": "jsonl", "path": "a"}], "max_prompt_tokens": 8}
    pairs = {"pairs_per_step": 4, "max_response_tokens": 8, "loss": loss}
    with pytest.raises(ValueError, match=words):
        PreferencesConfig.model_validate(whole | {"data": data, "pairs": pairs, "models": models})


def test_smoothing_belongs_to_sigmoid() -> None:
    with pytest.raises(ValueError, match="label_smoothing has no meaning"):
        settings(loss="ipo", label_smoothing=0.1)
    for changes in ({"loss": "bradley_terry", "beta": 0.2}, {"center_coef": 0.1}):
        with pytest.raises(ValueError, match="has no meaning for loss"):
            settings(**changes)


def test_the_score_is_that_of_the_label_where_a_head_has_several() -> None:
    hidden, lines = torch.arange(6.0).view(3, 2), torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    model: Any = SimpleNamespace(
        label=1,
        model=SimpleNamespace(score=lambda rows: rows @ lines.T),
        _hidden_at=lambda micro_batch, tokens: (hidden, None, tokens),
        _per_token=lambda values, tokens, micro_batch: values,
    )
    micro_batch: Any = SimpleNamespace(loss_mask=torch.ones(3, dtype=torch.bool))
    assert RewardModel.forward(model, micro_batch).tolist() == [-1.0, 1.0, 3.0]
