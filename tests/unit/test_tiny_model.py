"""The tiny model's tokenizer: characters, and the words and chats of the demos."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from spmdrl.conversation import Action, ToolCall
from spmdrl.data.turns import TurnEncoder, parse
from spmdrl.tools.tiny_model import IMAGE_TOKENS, character_tokenizer, save_tiny_model

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "table": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "qx7"}}</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(words=["1", "12", "higher", "lookup"], chat=True).save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_words_are_one_token_each_and_the_longest_counts(chat: PreTrainedTokenizerBase) -> None:
    assert tokens(chat, "12 1 higher high") == ["12", " ", "1", " ", "higher", " ", "h", "i", "g", "h"]
    assert chat.decode(chat.encode(CALL)) == CALL
    assert len(chat.encode(CALL)) == 13  # 6 of them are the characters of key and qx7


def test_a_chat_leaves_the_tokens_of_characters_as_they_are(chat: PreTrainedTokenizerBase) -> None:
    assert chat.encode("What is 2 + 3?") == character_tokenizer().encode("What is 2 + 3?")


def test_the_template_can_be_appended_to_and_shows_tools(chat: PreTrainedTokenizerBase) -> None:
    stops = frozenset([chat.eos_token_id])
    encoder = TurnEncoder(chat, chat_template="auto", tools=[TOOL], stop_token_ids=stops)
    assert not list(encoder.problems({"system", "user", "tool"}))
    question = {"role": "user", "content": "qx7?"}
    first, text = encoder.first([question])
    assert text == "<|system|>lookup(key, table)<eos><|user|>qx7?<eos><|assistant|>"
    response = (*chat.encode(CALL), chat.eos_token_id)
    result = {"role": "tool", "content": "higher"}
    added = encoder.appended([result], after=response)
    assert chat.decode(list(added)) == "<|tool|>higher<eos><|assistant|>"
    assert len(added) == 4  # the words of the vocabulary are tokens in what the environment says too
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "qx7"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (*first, *response, *added) == encoder.rendered([question, answer, result])


def test_its_calls_are_what_parsers_read(chat: PreTrainedTokenizerBase) -> None:
    assert parse(chat.decode(chat.encode(CALL))) == Action(
        text="", tool_calls=(ToolCall(name="lookup", arguments={"key": "qx7"}),)
    )


def test_a_model_with_a_tower_has_its_processor_and_places_for_images(tmp_path: Path) -> None:
    count = save_tiny_model(tmp_path, hidden_size=32, num_layers=1, words=["where"], vision=True)
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.num_parameters() == count and len(tokenizer) == model.config.text_config.vocab_size
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[2])
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "where?"}]}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|><|vision_start|><|image_pad|><|vision_end|>where?<eos><|assistant|>"
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "where?"}], tokenize=False)
    assert plain == "<|user|>where?<eos>"
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert [processor.get_number_of_image_patches(*size) for size in ((32, 32), (32, 48))] == [16, 24]
