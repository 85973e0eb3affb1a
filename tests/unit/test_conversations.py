"""Rows that are conversations: which answers are imitated, as which tokens, and what learning by rewards refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.config import FileData
from spmdrl.data.conversations import asked, imitated
from spmdrl.data.sources import Exchange, FileSource, Row
from spmdrl.data.stream import TrainingPair
from spmdrl.data.vision import NO_IMAGES
from spmdrl.step.tuning_data import PairEncoder
from spmdrl.tools.tiny_model import character_tokenizer
from spmdrl.types import Prompt, UserError


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


TALK = [
    said("system", "be brief"),
    said("user", "a?"),
    said("assistant", "A"),
    said("user", "b?"),
    said("assistant", "B"),
]


def row(messages: list[dict[str, Any]], tmp_path: Path, **columns: str) -> Row:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"messages": messages, "reply": "R"}) + "\n")
    return FileSource(
        FileData(kind="jsonl", path=str(file), prompt_column="messages", answer_column="", **columns), seed=0
    ).row(0)


def test_the_last_answer_of_a_conversation_is_imitated(tmp_path: Path) -> None:
    last = imitated(row(TALK, tmp_path), turns="last")
    assert (last.prompt, last.response, last.later) == (TALK[:4], "B", ())
    assert last.question == "a?\nA\nb?"


def test_or_every_answer_is(tmp_path: Path) -> None:
    every = imitated(row(TALK, tmp_path), turns="all")
    assert (every.prompt, every.response) == (TALK[:2], "A")
    assert every.later == (Exchange((said("user", "b?"),), "B"),)
    assert every.question == "a?"  # so that a held-out question is recognized by what is asked first


def test_rewards_refuse_a_prompt_that_ends_with_an_answer(tmp_path: Path) -> None:
    ended = row(TALK, tmp_path)
    with pytest.raises(UserError, match=r"d\.jsonl line 1: the prompt ends with an assistant's message"):
        asked(ended)
    asked(row(TALK[:4], tmp_path))


def test_an_answer_before_the_response_of_a_column_is_refused(tmp_path: Path) -> None:
    answered = row(TALK, tmp_path, response_column="reply")
    with pytest.raises(UserError, match="ends with an assistant's message"):
        imitated(answered, turns="last")
    assert imitated(row(TALK[:4], tmp_path, response_column="reply"), turns="last").response == "R"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([said("assistant", "A")], "message 1 of the conversation is an assistant's, and nothing precedes it"),
        ([*TALK, said("assistant", "C")], "message 6 of the conversation is an assistant's, and nothing precedes it"),
        ([TALK[1], said("assistant", " \n")], "line 1: a response that is to be imitated is empty or white space"),
        ([*TALK[:4], said("assistant", "")], "is empty or white space"),
        ([TALK[1], said("assistant", "A", tool_calls=[{}])], "has tool_calls, whose text only the model's"),
    ],
)
def test_conversations_that_cannot_be_divided(messages: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        imitated(row(messages, tmp_path), turns="all")


def encoded(messages: list[dict[str, Any]], tmp_path: Path, *, turns: Any, max_tokens: int = 100) -> tuple[str, str]:
    """The whole text of a conversation as it is trained on, and the trained part of it."""
    tokenizer = character_tokenizer(chat=True)
    cfg = SimpleNamespace(
        table="sft",
        answers=SimpleNamespace(max_response_tokens=max_tokens),
        data=SimpleNamespace(chat_template="auto"),
    )
    stops = frozenset({tokenizer.eos_token_id})
    inputs = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=stops, images=NO_IMAGES)
    one = imitated(row(messages, tmp_path), turns=turns)
    text = tokenizer.apply_chat_template(one.prompt, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(
        prompt_id=7,
        token_ids=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
        text=text,
        answer=None,
        task="t",
        metadata={},
    )
    assert one.response is not None
    pair = TrainingPair(prompt, one.where, (Exchange((), one.response), *one.later))
    sequence = PairEncoder.of(cfg, inputs)(pair, 3)  # type: ignore[arg-type]
    trained = [token for token, on in zip(sequence.token_ids, sequence.loss_mask, strict=True) if on]
    return tokenizer.decode(list(sequence.token_ids)), tokenizer.decode(trained)


def test_the_tokens_of_all_turns_are_those_of_the_whole_conversation(tmp_path: Path) -> None:
    whole = character_tokenizer(chat=True).apply_chat_template(TALK, tokenize=False)
    assert encoded(TALK, tmp_path, turns="all") == (whole, "A<eos>B<eos>")
    assert encoded(TALK, tmp_path, turns="last") == (whole, "B<eos>")


def test_what_follows_the_prompt_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: what follows .* has \d+ tokens, more than sft\.max_response_tokens"):
        encoded(TALK, tmp_path, turns="all", max_tokens=3)
