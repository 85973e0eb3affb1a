"""The tokens of turns, in the chat templates of twelve families: what is appended is what the template writes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from spmdrl.conversation import Action, Message, ToolCall
from spmdrl.data.tokenizer import Placeholder, encode_prompt, render
from spmdrl.data.turns import TurnEncoder, message_of, with_ids
from spmdrl.data.vision import NoImages
from spmdrl.types import UserError
from tests.helpers.chat_templates import FAMILIES, family_tokenizer, small_bpe, stops_of

PARIS: dict[str, Any] = {"city": "Paris"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a city up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
QUESTION: Message = {"role": "user", "content": "What is the weather?"}
CALL = message_of(Action(text="", tool_calls=(ToolCall(name="lookup", arguments=PARIS),)))
HERMES = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expectations of a family, with the tool of these tests."""

    answer: str = "It rains."  # a response as it is sampled, with its stop token
    call: str | None = None  # a response that calls the tool; None: no message of the role "tool" can follow
    called: Message | None = None  # that response as the template takes it; None: CALL
    tool: str  # how the template goes on after the call, with the result "mild"; or why it cannot
    user: str  # how it goes on after the answer, with the message "And now?"; or why it cannot
    two_calls: bool = True  # the template renders more than one call in a message
    exact_user: bool = True  # so does it when it renders the conversation anew


QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\nmild\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_USER = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def deepseek(text: str) -> str:
    """Control tokens between { and }, in DeepSeek's spelling."""
    return text.replace("{", "<\uff5c").replace("}", "\uff5c>").replace("_", "\u2581")


EXPECTED = {
    "Qwen2.5": Expected(answer="It rains.<|im_end|>", call=HERMES + "<|im_end|>", tool=QWEN_TOOL, user=QWEN_USER),
    "Qwen3": Expected(answer="It rains.<|im_end|>", call=HERMES + "<|im_end|>", tool=QWEN_TOOL, user=QWEN_USER),
    "Qwen3.5": Expected(
        answer="Hm.\n</think>\n\nIt rains.<|im_end|>",
        call="Hm.\n</think>\n\n<tool_call>\n<function=lookup>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>",
        called=CALL | {"content": "<think>\nHm.\n</think>\n\n"},
        tool=QWEN_TOOL + "<think>\n",
        user=QWEN_USER + "<think>\n",
        exact_user=False,
    ),
    "Llama 3.1": Expected(
        answer="It rains.<|eot_id|>",
        call='{"name": "lookup", "parameters": {"city": "Paris"}}<|eot_id|>',
        tool='<|start_header_id|>ipython<|end_header_id|>\n\n"mild"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        user="<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        two_calls=False,
    ),
    "Mistral Nemo": Expected(
        answer="It rains.</s>",
        call='[TOOL_CALLS][{"name": "lookup", "arguments": {"city": "Paris"}, "id": "call00001"}]</s>',
        tool='[TOOL_RESULTS]{"content": mild, "call_id": "call00001"}[/TOOL_RESULTS]',
        user="writes a conversation differently once a message of the role 'user' follows",
    ),
    "Gemma 3": Expected(
        answer="It rains.<end_of_turn>",
        tool="refuses messages of the roles user, assistant, tool: Conversation roles must alternate",
        user="\n<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gpt-oss": Expected(
        answer="<|channel|>final<|message|>It rains.<|return|>",
        call=' to=functions.lookup<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        tool='<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>"mild"<|end|><|start|>assistant',
        user="<|start|>user<|message|>And now?<|end|><|start|>assistant",
        exact_user=False,  # it writes <|end|> where <|return|> was sampled
    ),
    "GLM 4.5": Expected(
        answer="\n<think></think>\nIt rains.<|user|>",
        call="\n<think></think>\n<tool_call>lookup\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
        "<|observation|>",
        tool="\n<tool_response>\nmild\n</tool_response><|assistant|>",
        user="\nAnd now?<|assistant|>",
    ),
    "DeepSeek R1": Expected(
        answer=f"Hm.\n</think>\n\nIt rains.{EOS}",
        tool="writes a conversation differently once a message of the role 'tool' follows",
        user=deepseek("{User}And now?{Assistant}<think>\n"),
        exact_user=False,
    ),
    "DeepSeek V3.1": Expected(
        answer=f"It rains.{EOS}",
        call=deepseek("{tool_calls_begin}{tool_call_begin}lookup{tool_sep}")
        + json.dumps(PARIS)
        + deepseek("{tool_call_end}{tool_calls_end}{end_of_sentence}"),
        tool=deepseek("{tool_output_begin}mild{tool_output_end}"),
        user=deepseek("{User}And now?{Assistant}<think></think>"),
    ),
    "SmolLM 3": Expected(
        answer="It rains.<|im_end|>",
        call=HERMES + "<|im_end|>",
        called={"role": "assistant", "content": HERMES},  # it shows no calls but those in the text
        tool="\n<|im_start|>user\nmild<|im_end|>\n<|im_start|>assistant\n",
        user=QWEN_USER,
    ),
    "Phi 4": Expected(
        answer="It rains.<|im_end|>",
        tool="leaves out messages of the role 'tool'",
        user="<|im_start|>user<|im_sep|>And now?<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "OLMo 3": Expected(
        answer="It rains.<|im_end|>",
        call='<function_calls>lookup(city="Paris")</function_calls><|im_end|>',
        tool="\n<|im_start|>environment\nmild<|im_end|>\n<|im_start|>assistant\n",
        user=QWEN_USER,
    ),
}
assert set(EXPECTED) == set(FAMILIES)
APPENDABLE = [
    (name, role)
    for name, expected in EXPECTED.items()
    for role in ("tool", "user")
    if (expected.call if role == "tool" else name != "Mistral Nemo")
]


def encoder(name: str, tools: list[dict[str, Any]] = TOOLS) -> TurnEncoder:
    return TurnEncoder(family_tokenizer(name), chat_template="auto", tools=tools, stop_token_ids=stops_of(name))


def encoded(name: str, text: str) -> tuple[int, ...]:
    return tuple(family_tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def sampled(name: str, role: str) -> tuple[int, ...]:
    """The response that a message of the role follows."""
    return encoded(name, EXPECTED[name].answer if role == "user" else EXPECTED[name].call or "")


def result(content: str, role: str = "tool") -> Message:
    return {"role": role, "content": content}


def canonical(name: str, said: Message, *others: Message) -> tuple[int, ...]:
    """The tokens of a whole conversation as the template renders it, encoded at once."""
    numbered = said
    if said.get("tool_calls"):
        numbered = said | {
            "tool_calls": [call | {"id": f"call0000{n}"} for n, call in enumerate(said["tool_calls"], 1)]
        }
    results = itertools.count(1)
    messages = [m | {"tool_call_id": f"call0000{next(results)}"} if m["role"] == "tool" else m for m in others]
    return encoded(name, render(family_tokenizer(name), [QUESTION, numbered, *messages], tools=TOOLS))


@pytest.mark.parametrize(("name", "role"), [(name, role) for name in FAMILIES for role in ("tool", "user")])
def test_every_template_is_appendable_or_refused_by_name(name: str, role: Literal["tool", "user"]) -> None:
    expected, turns = EXPECTED[name], encoder(name)
    outcome = expected.tool if role == "tool" else expected.user
    problems = list(turns.problems([role]))
    if (name, role) not in APPENDABLE:
        assert len(problems) == 1 and f"the chat template of {name} {outcome}" in problems[0]
        assert "chat_template.jinja" in problems[0]
        return
    assert problems == []
    message = result("mild") if role == "tool" else result("And now?", "user")
    appended = turns.appended([message], after=sampled(name, role))
    assert appended == encoded(name, FAMILIES[name].stops[0] + outcome)[1:]


@pytest.mark.parametrize(("name", "role"), APPENDABLE)
def test_prompt_response_and_what_is_appended_are_the_whole_conversation(name: str, role: str) -> None:
    expected, turns = EXPECTED[name], encoder(name)
    response, message = sampled(name, role), result("mild in the evening\n\n", role)
    said = (expected.called or CALL) if role == "tool" else result("It rains.", "assistant")
    prompt, _ = turns.first([QUESTION])
    whole = canonical(name, said, message)
    appended = turns.appended([message], after=response)
    if role == "tool" or expected.exact_user:
        assert prompt + response + appended == whole == turns.rendered([QUESTION, said, message])
    assert whole[-len(appended) :] == appended


@pytest.mark.parametrize("name", [name for name, role in APPENDABLE if role == "tool" and name != "Mistral Nemo"])
def test_a_second_round_is_appended_as_the_first(name: str) -> None:
    turns, said, response = encoder(name), EXPECTED[name].called or CALL, sampled(name, "tool")
    token_ids, _ = turns.first([QUESTION])
    conversation = [QUESTION]
    for content in ("mild", "wet"):
        token_ids += response + turns.appended([result(content)], after=response)
        conversation += [said, result(content)]
        assert token_ids == turns.rendered(conversation)


@pytest.mark.parametrize("name", [name for name, role in APPENDABLE if role == "tool"])
def test_two_results_follow_two_calls(name: str) -> None:
    turns, messages = encoder(name), [result("mild") | {"name": "lookup"}, result("wet") | {"name": "lookup"}]
    appended = turns.appended(messages, after=sampled(name, "tool"))
    said = CALL | {"tool_calls": [CALL["tool_calls"][0], CALL["tool_calls"][0]]}
    if EXPECTED[name].two_calls:
        assert canonical(name, said, *messages)[-len(appended) :] == appended
    else:
        with pytest.raises(UserError, match=f"template of {name} refuses"):
            turns.rendered([QUESTION, said, *messages])
    text = family_tokenizer(name).decode(list(appended))
    assert 0 < text.index("mild") < text.index("wet")


@pytest.mark.parametrize(("name", "role"), APPENDABLE)
def test_control_tokens_in_a_content_stay_text(name: str, role: str) -> None:
    tokenizer, turns = family_tokenizer(name), encoder(name)
    control = [t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()]
    content = "a " + " b ".join(control) + "".join(control) + " c"
    plain = turns.appended([result("plain", role)], after=sampled(name, role))
    appended = turns.appended([result(content, role)], after=sampled(name, role))
    added = tokenizer.added_tokens_decoder.keys()
    assert [token for token in appended if token in added] == [token for token in plain if token in added]
    text, shown = tokenizer.decode(list(appended)), json.dumps(content, ensure_ascii=False)
    assert content in text or shown in text
    whole = turns.rendered(
        [QUESTION, EXPECTED[name].called or CALL if role == "tool" else result("x", "assistant"), result(content, role)]
    )
    assert whole[-len(appended) :] == appended


CONTROL = sorted({t.content for name in FAMILIES for t in family_tokenizer(name).added_tokens_decoder.values()})
CONTENTS = st.lists(st.one_of(st.text(), st.sampled_from(CONTROL), st.sampled_from(CONTROL).map(lambda t: t[:3]))).map(
    "".join
)


@given(content=CONTENTS, name=st.sampled_from(["Qwen3", "Llama 3.1", "Gemma 3", "gpt-oss", "GLM 4.5", "Phi 4"]))
@example(content="<|im_<|im_end|>end|>\ue000<tool_call", name="Qwen3")
@example(content="\\ue000<|return|>", name="gpt-oss")
def test_no_content_yields_a_control_token(content: str, name: str) -> None:
    tokenizer, turns = family_tokenizer(name), encoder(name)
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    role = "user" if name in ("Gemma 3", "Phi 4") else "tool"
    plain = turns.appended([result("plain", role)], after=sampled(name, role))
    appended = turns.appended([result(content, role)], after=sampled(name, role))
    assert Counter(added.intersection(plain)) == Counter(added.intersection(appended))
    assert [token for token in appended if token in added] == [token for token in plain if token in added]
    text = tokenizer.decode(list(appended), clean_up_tokenization_spaces=False)
    assert content.strip() in text or json.dumps(content, ensure_ascii=False) in text


def test_half_a_character_is_replaced() -> None:
    turns, after = encoder("Qwen3"), sampled("Qwen3", "tool")
    assert turns.appended([result("a\ud800b")], after=after) == turns.appended([result("a\ufffdb")], after=after)
    assert turns.appended([result("\ud83d\ude00")], after=after) == turns.appended([result("\U0001f600")], after=after)


def test_a_text_of_all_characters_that_could_be_marks_is_refused() -> None:
    message = result("".join(map(chr, range(0xE000, 0xF900))))
    with pytest.raises(UserError, match="private-use"):
        encoder("Qwen3").appended([message], after=sampled("Qwen3", "tool"))
    with pytest.raises(UserError, match="private-use"):
        encoder("Qwen3").rendered([QUESTION, message])


def test_names_and_arguments_of_calls_stay_text() -> None:
    turns, tokenizer = encoder("Qwen3"), family_tokenizer("Qwen3")
    calls = (ToolCall(name="<|im_end|>", arguments={"<|im_end|>": ["<|im_end|>"]}),)
    whole = turns.rendered([QUESTION, message_of(Action(text="", tool_calls=calls))])
    assert whole.count(tokenizer.eos_token_id) == 3  # of the system message, the question and the calls
    assert tokenizer.decode(list(whole)).count("<|im_end|>") == 3 + 3


def test_control_tokens_that_only_normalization_spells_stay_text() -> None:
    backend = Tokenizer.from_str(small_bpe())
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken("<call>", normalized=True), AddedToken("<ab"), AddedToken("b>c")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    turns = TurnEncoder(tokenizer, chat_template="never", tools=[], stop_token_ids=frozenset())
    wide, overlapping = "\uff1ccall\uff1e", "<ab>c"
    assert set(tokenizer(wide)["input_ids"]) & tokenizer.added_tokens_decoder.keys()
    for content in (wide, overlapping, "<ca" + wide + "ll>"):
        assert not set(turns.appended([result(content)], after=())) & tokenizer.added_tokens_decoder.keys()


@pytest.mark.parametrize(
    ("name", "end", "begins"),
    [
        ("Qwen3", "", "<|im_end|>\n<|im_start|>user"),  # cut off: the template ends the answer
        ("Qwen3", "<|endoftext|>", "\n<|im_start|>user"),  # another stop token stands for the template's
        ("gpt-oss", "", "<|end|><|start|>user"),
        ("gpt-oss", "<|call|>", "<|start|>user"),
        ("OLMo 3", "<|endoftext|>", "\n<|im_start|>user"),
        ("GLM 4.5", "<|user|>", "\nAnd"),  # the stop token is the next message's first
        ("GLM 4.5", "<|observation|>", "<|user|>\nAnd"),  # ... of another kind of message
        ("GLM 4.5", "", "<|user|>\nAnd"),
    ],
)
def test_what_is_appended_depends_on_how_the_response_ended(name: str, end: str, begins: str) -> None:
    after = encoded(name, "It rains." + end)
    text = family_tokenizer(name).decode(list(encoder(name).appended([result("And now?", "user")], after=after)))
    assert text.startswith(begins)


def test_without_messages_the_next_response_begins() -> None:
    appended = encoder("Qwen3").appended([], after=encoded("Qwen3", "It rains.<|im_end|>"))
    assert family_tokenizer("Qwen3").decode(list(appended)) == "\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "roles", "tools", "history", "problem"),
    [
        ("Mistral Nemo", {"user"}, [], "append", None),
        ("Mistral Nemo", {"system", "user"}, [], "append", "writes a conversation differently"),
        ("Mistral Nemo", {"system", "tool"}, TOOLS, "append", "writes a conversation differently"),
        ("Mistral Nemo", {"system", "user", "tool"}, TOOLS, "template", None),
        ("DeepSeek R1", {"tool"}, TOOLS, "template", None),
        ("Gemma 3", {"system", "user"}, [], "append", None),
        ("Gemma 3", {"tool"}, [], "template", "refuses messages"),
        ("Phi 4", {"tool"}, [], "template", "leaves out messages"),
    ],
)
def test_problems_depend_on_system_prompts_tools_and_history(
    name: str, roles: set[str], tools: list[dict[str, Any]], history: Literal["append", "template"], problem: str | None
) -> None:
    found = list(encoder(name, tools).problems(roles, history=history))
    assert all(problem and problem in sentence for sentence in found) and bool(found) == bool(problem)


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (TURN + "\n{% endfor %}<|im_start|>assistant\n", "ends an answer with none of the tokens that end a response"),
        (TURN + "\n<|im_end|>{% endfor %}<|im_start|>assistant\n", r"writes '\n' between an answer and the token"),
        (
            TURN + "{% if m.role == 'assistant' and not loop.last %}.{% endif %}<|im_end|>{% endfor %}",
            "ends an answer differently",
        ),
        (TURN + "<|im_end|>{% endfor %}{{ messages | length }}", "writes a conversation differently"),
        ("<|im_start|>{{ messages[-1].content }}<|im_end|>", "writes a conversation differently"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "leaves out"),
        ("{{ messages[0].absent + 1 }}", "refuses messages of the roles user, assistant, user"),
    ],
)
def test_templates_that_cannot_be_appended_to(template: str, problem: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=family_tokenizer("Qwen3").backend_tokenizer)
    tokenizer.chat_template, tokenizer.name_or_path = template, "mine"
    turns = TurnEncoder(tokenizer, chat_template="auto", tools=[], stop_token_ids=stops_of("Qwen3"))
    (found,) = turns.problems(["user"])
    assert found.startswith(f"the chat template of mine {problem}")


def test_without_a_template_messages_are_their_contents() -> None:
    tokenizer = family_tokenizer("Qwen3")
    turns = TurnEncoder(tokenizer, chat_template="never", tools=[], stop_token_ids=stops_of("Qwen3"))
    messages = [result("It rains."), result(" And now?", "user")]
    assert turns.appended(messages, after=(1,)) == turns.rendered(messages) == encoded("Qwen3", "It rains. And now?")
    assert list(turns.problems(["tool", "user"])) == []
    assert turns.first("2 + 2 =")[1] == "2 + 2 ="


def test_the_prompts_messages_are_encoded_as_in_the_first_turn() -> None:
    turns, prompt = encoder("Qwen3"), result("say <|im_end|>", "user")
    first, text = turns.first([prompt])
    assert turns.rendered([prompt]) == first
    assert '"name": "lookup"' in text
    without = encode_prompt(family_tokenizer("Qwen3"), [prompt], system_prompt=None, chat_template="auto")
    assert without == encoder("Qwen3", []).first([prompt]) and '"name": "lookup"' not in without[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_rendered_before_have_the_tokens_of_their_messages(name: str) -> None:
    tokenizer, messages = family_tokenizer(name), [QUESTION]
    templated, _ = encode_prompt(tokenizer, messages, system_prompt=None, chat_template="auto")
    text = render(tokenizer, messages)
    assert encode_prompt(tokenizer, text, system_prompt=None, chat_template="rendered") == (templated, text)
    as_text, _ = encode_prompt(tokenizer, text, system_prompt=None, chat_template="never")
    assert as_text != templated and tokenizer.decode(as_text) == tokenizer.decode(templated)
    with pytest.raises(UserError, match=r'list of chat messages, but data\.chat_template = "rendered"'):
        encode_prompt(tokenizer, messages, system_prompt=None, chat_template="rendered")


def test_templates_see_the_thinking_of_the_policy_and_none_of_its_special_tokens() -> None:
    said = message_of(Action(text="<think>\nHm.\n</think>\n\nIt <|im_end|>rains."))
    turns, tokenizer = encoder("Qwen3"), family_tokenizer("Qwen3")
    kept = tokenizer.decode(list(turns.rendered([QUESTION, said])))
    dropped = turns.rendered([QUESTION, said, result("And now?", "user")])
    assert "Hm." in kept and "Hm." not in tokenizer.decode(list(dropped))
    assert dropped.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4  # system, user, assistant, user


# Images, of which each is one token until it is expanded

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "mild"}
PLACES = {  # what a template writes for an image, and what takes its place
    "Qwen3.5": ("<|image_pad|>", "<|image_pad|>"),
    "Gemma 3": ("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
}


@dataclass(frozen=True, slots=True)
class Seen(NoImages):
    """The places of a family's images."""

    family: str = ""

    @property
    def placeholder(self) -> Placeholder:
        written, text = PLACES[self.family]
        token_id = family_tokenizer(self.family).convert_tokens_to_ids(
            "<|image_pad|>" if self.family == "Qwen3.5" else "<image_soft_token>"
        )
        return Placeholder(written=written, text=text, token_id=token_id)


def seeing(name: str) -> TurnEncoder:
    images = Seen("", None, name)
    return TurnEncoder(
        family_tokenizer(name), chat_template="auto", tools=TOOLS, stop_token_ids=stops_of(name), images=images
    )


@pytest.mark.parametrize(("name", "role"), [("Qwen3.5", "tool"), ("Qwen3.5", "user"), ("Gemma 3", "user")])
@pytest.mark.parametrize("parts", [[IMAGE], [TEXT, IMAGE], [IMAGE, TEXT, IMAGE]], ids=len)
def test_what_is_appended_with_images_is_the_rest_of_the_conversation(
    name: str, role: str, parts: list[dict[str, Any]]
) -> None:
    turns, response, message = seeing(name), sampled(name, role), {"role": role, "content": parts}
    said = (EXPECTED[name].called or CALL) if role == "tool" else result("It rains.", "assistant")
    appended = turns.appended([message], after=response)
    whole = turns.rendered([QUESTION, said, message])
    numbered = with_ids([QUESTION, said, message])
    written, text = PLACES[name]
    assert whole == encoded(name, render(family_tokenizer(name), numbered, tools=TOOLS).replace(written, text))
    assert whole[-len(appended) :] == appended
    token_id = Seen("", None, name).placeholder.token_id
    assert appended.count(token_id) == parts.count(IMAGE)
    if role == "tool" or EXPECTED[name].exact_user:
        assert turns.first([QUESTION])[0] + response + appended == whole


@pytest.mark.parametrize("name", PLACES)
def test_texts_of_places_stay_texts(name: str) -> None:
    turns, seen = seeing(name), Seen("", None, name).placeholder
    text = {"type": "text", "text": f"{seen.written}{seen.text}<|vision_start|><end_of_image>"}
    answer = result(f"I see {seen.written}{seen.text}", "assistant")
    appended = turns.appended([{"role": "user", "content": [text, IMAGE, text]}], after=sampled(name, "user"))
    rendered = turns.rendered([QUESTION, answer, {"role": "user", "content": [text, IMAGE, text]}])
    for token_ids in (appended, rendered):
        assert token_ids.count(seen.token_id) == 1
        assert token_ids.count(family_tokenizer(name).convert_tokens_to_ids("<|vision_start|>")) <= 1


def test_images_that_nobody_can_place_are_refused() -> None:
    message = {"role": "user", "content": [IMAGE]}
    plain = TurnEncoder(family_tokenizer("Qwen3.5"), chat_template="never", tools=[], stop_token_ids=frozenset({1}))
    with pytest.raises(UserError, match="whose places only a chat template marks"):
        plain.appended([message], after=())
    with pytest.raises(UserError, match="there are images, and the model reads text only"):
        encoder("Qwen3.5").appended([message], after=sampled("Qwen3.5", "user"))
