"""The tokens of turns: what stands in the sequence between one sampled response and the next.

Sampled tokens stay as they are. What a chat template writes between them and the next generation prompt is read
off a short conversation that it renders: a question, an answer, and the messages to add. An image in these is one
token, in whose place `vision.expanded` puts as many as the image needs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spmdrl.config.data import ChatTemplate
from spmdrl.config.strict import MAX_DEPTH, depth
from spmdrl.conversation import Action, Message, ToolCall, num_images
from spmdrl.data.tokenizer import (
    Messages,
    PlainText,
    TemplateRefusal,
    decode,
    encode_prompt,
    free_characters,
    render,
    texts_in,
    unescaped,
    uses_template,
    with_places,
)
from spmdrl.data.vision import NO_IMAGES, ImageIntake
from spmdrl.types import UserError

# From the tokens of a response to what it does: text, and calls of tools.
#
# `parse` reads one format without help: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Hermes,
# Qwen 2.5 and Qwen 3 write. `engine/sglang/tool_calls.py` has SGLang's parsers.


TurnParser = Callable[[str], Action]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_BEGIN}(.*?)({_END}|$)", re.DOTALL)


def parse(text: str) -> Action:
    """Read the calls in a response; the text around them stays.

    With a call that is not closed, or is not such JSON, nothing is called, and `text` is all of it.
    """
    calls = []
    for content, end in _CALL.findall(text):
        if not end:
            return Action(text=text, malformed=f"{_BEGIN} is not closed by {_END}")
        try:
            calls.append(call_of(json.loads(content)))
        except (ValueError, RecursionError) as error:
            return Action(text=text, malformed=f"{_BEGIN} does not hold a call: {error}")
    return Action(text=_CALL.sub("", text).strip() if calls else text, tool_calls=tuple(calls))


def call_of(value: Any) -> ToolCall:
    """Return a decoded JSON value as a call. Raises ValueError with the reason when it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('it must be an object with a "name", a string')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f'its "arguments" must be an object, not {type(arguments).__name__}')
    if depth(arguments) > MAX_DEPTH:  # what reads them again is recursive
        raise ValueError(f'its "arguments" are nested more than {MAX_DEPTH} deep')
    return ToolCall(name=value["name"], arguments=arguments)


def action_of(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], parser: TurnParser, *, stop_token_ids: frozenset[int]
) -> Action:
    """Return a response as an action.

    The parser reads the text with special tokens, because formats of calls are made of them, and without the stop token
    at the end; the action's text is without any.
    """
    ended = bool(token_ids) and token_ids[-1] in stop_token_ids
    without_end = list(token_ids[:-1] if ended else token_ids)
    read = tokenizer.decode(without_end, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    action = parser(read)
    if action.text == read:
        text = decode(tokenizer, without_end)
    else:
        special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
        text = re.sub("|".join(map(re.escape, reversed(special))) or "(?!)", "", action.text)
    return Action(text=text, tool_calls=action.tool_calls, malformed=action.malformed)


_MAX_OTHERS = 64  # sets of tools besides the environment's own
_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}
_OTHER_TEMPLATE = "put another chat_template.jinja into model.path"
_ELSE = f'set environment.history = "template", or {_OTHER_TEMPLATE}'


@dataclass(frozen=True, slots=True)
class _Tail:
    """The tokens that a template writes after an answer: the rest of its message, then the messages that follow."""

    token_ids: tuple[int, ...]
    stop: int  # place of the token that ends the answer
    begins_next: bool  # that token is the first of the next message: each kind of message has another


class TurnEncoder:
    """Encodes the messages to the policy, for one tokenizer and one set of tools.

    Without a chat template messages are joined as their contents.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: ChatTemplate,
        tools: Sequence[dict[str, Any]],
        stop_token_ids: frozenset[int],
        images: ImageIntake = NO_IMAGES,
    ) -> None:
        """`images` knows the places of images in messages."""
        self._tokenizer, self._images = tokenizer, images
        self._chat_template = chat_template
        self._tools = list(tools)
        # Whose result a tool message is that does not say it; a message's "name" does.
        self._tool_name = self._tools[0]["function"]["name"] if len(self._tools) == 1 else "tool"
        self._stops = stop_token_ids
        self._has_template = uses_template(tokenizer, chat_template)
        self._plain = PlainText(tokenizer)
        self._surroundings = f"{tokenizer.chat_template}{json.dumps(self._tools, ensure_ascii=False)}"
        self._name = f"the chat template of {tokenizer.name_or_path}"
        self._ends: dict[str, tuple[int, ...]] = {}  # what follows an answer that stands last
        self._others: dict[str, TurnEncoder] = {}  # by their tools, as JSON

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> TurnEncoder:
        """Return an encoder for other tools, which an agent may bring along."""
        name = json.dumps(list(tools))
        if name not in self._others:
            if len(self._others) >= _MAX_OTHERS:  # the oldest is dropped
                del self._others[next(iter(self._others))]
            self._others[name] = TurnEncoder(
                self._tokenizer,
                chat_template=self._chat_template,
                tools=tools,
                stop_token_ids=self._stops,
                images=self._images,
            )
        return self._others[name]

    def first(self, messages: str | Messages) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and their text, with the tools and the generation prompt, as `encode_prompt`."""
        return encode_prompt(
            self._tokenizer, messages, system_prompt=None, chat_template=self._chat_template, tools=self._tools
        )

    def appended(self, messages: Sequence[Message], *, after: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens between a response, whose token ids are `after`, and the next response.

        A stop token at the response's end counts as the one with which the template ends an answer, whichever it is;
        only where the template begins the next message with it (GLM), another one stands next to it. After a response
        without a stop token, the template's comes first. Raises UserError when the template refuses the messages.
        """
        if not self._has_template:
            return self._joined(messages)
        tail = self._tail(messages)
        ended = bool(after) and after[-1] in self._stops
        if ended and tail.begins_next:
            ended = after[-1] == tail.token_ids[tail.stop]
        return tail.token_ids[tail.stop + 1 if ended else tail.stop :]

    def rendered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a whole conversation with the generation prompt.

        Raises UserError when the template refuses the conversation.
        """
        if not self._has_template:
            return self._joined(messages)
        mark = next(free_characters(self._surroundings, *texts_in(list(messages))))
        conversation = [self._plain.marked(message, mark) for message in messages]
        return self._encoded(unescaped(self._text(with_ids(conversation)), [mark]), conversation, mark)

    def problems(self, roles: Collection[str], *, history: Literal["append", "template"] = "append") -> Iterator[str]:
        """Yield a sentence for each reason why messages of these roles cannot follow a response.

        With "system" among the roles, prompts begin with a system message.
        """
        if not self._has_template:
            return
        system: Messages = [{"role": "system", "content": "system"}] if "system" in roles else []
        for role in sorted(set(roles) - {"system", "assistant"}):
            try:
                self._require_role(system, role)
                if history == "append":
                    self._require_unchanged(system, role)
                    self._require_end(role)
            except UserError as error:
                yield str(error)

    def _require_role(self, system: Messages, role: str) -> None:
        """Raise UserError unless a message of this role can follow an answer, and is shown."""
        content = next(free_characters(self._surroundings))
        message = {"role": role, "content": content}
        shown = self._text(_conversation([*system, _QUESTION], _ANSWER, message))
        if content not in unescaped(shown, [content]):
            raise UserError(
                f"{self._name} leaves out messages of the role {role!r}; {_OTHER_TEMPLATE}, or "
                "let the environment answer with messages of another role"
            )

    def _require_unchanged(self, system: Messages, role: str) -> None:
        """Raise UserError when a conversation does not begin with the earlier one, now or a round later."""
        message = {"role": role, "content": "next"}
        start = [*system, _QUESTION]
        for earlier in (start, _conversation(start, _ANSWER, message)):
            before = self._text(earlier, generation_prompt=False)
            if not self._text(_conversation(earlier, _ANSWER, message)).startswith(before):
                raise UserError(
                    f"{self._name} writes a conversation differently once a message of the role {role!r} follows, "
                    f"so tokens cannot be appended; {_ELSE}"
                )

    def _require_end(self, role: str) -> None:
        """Raise UserError unless the tail begins with the token that ends a response, and the message comes after."""
        message = {"role": role, "content": "next"}
        tail = self._tail([message])
        if role != "tool" and tail.stop > 0:
            text = self._tokenizer.decode(list(tail.token_ids[: tail.stop]))
            raise UserError(
                f"{self._name} writes {text!r} between an answer and the token that ends it, which the policy has "
                f"sampled by then; {_ELSE}"
            )

    def _tail(self, messages: Sequence[Message]) -> _Tail:
        """Render the messages after an answer, and find the token that ends the answer."""
        mark, place = itertools.islice(free_characters(self._surroundings, *texts_in(list(messages))), 2)
        added = [self._plain.marked(message, mark) for message in messages]
        answer = _calling({"role": "assistant", "content": place}, messages, name=self._tool_name, argument=place)
        try:
            return self._tail_of(answer, place, added, mark)
        except UserError:
            if len(answer.get("tool_calls", ())) < 2:
                raise
            # Some templates render one call at most; what follows it is the same.
            return self._tail_of(answer | {"tool_calls": answer["tool_calls"][:1]}, place, added, mark)

    def _tail_of(self, answer: Message, place: str, added: Messages, mark: str) -> _Tail:
        """Return what the template writes behind `place`, which stands at the end of the answer."""

        def behind(messages: Messages, *, generation_prompt: bool) -> tuple[int, ...]:
            text = self._text(with_ids([_QUESTION, answer, *messages]), generation_prompt=generation_prompt)
            _, found, rest = unescaped(text, [mark, place]).rpartition(place)
            if not found:
                raise UserError(f"{self._name} leaves out what an assistant has said; {_OTHER_TEMPLATE}")
            return self._encoded(rest, messages, mark)

        tail = behind(added, generation_prompt=True)
        last = json.dumps([answer, mark])
        if last not in self._ends:
            self._ends[last] = behind([], generation_prompt=False)
        return self._split(tail, self._ends[last])

    def _split(self, tail: tuple[int, ...], alone: tuple[int, ...]) -> _Tail:
        """Find the token that ends the answer in the tail, by the tail of an answer that stands last."""
        stop = next((place for place, token in enumerate(alone) if token in self._stops), None)
        at = len(alone) if stop is None else stop
        continues = tail[:at] == alone[:at] and len(tail) > at
        if continues and stop is None and tail[at] in self._stops:
            return _Tail(tail, at, begins_next=True)
        # The token may be another one where the conversation continues: gpt-oss has <|return|> and <|end|>.
        if continues and stop is not None and (tail[at] == alone[at] or tail[at] in self._plain.control_ids):
            return _Tail(tail, at, begins_next=False)
        if stop is not None:
            raise UserError(f"{self._name} ends an answer differently once a message follows; {_ELSE}")
        names = ", ".join(repr(self._tokenizer.decode([token])) for token in sorted(self._stops))
        raise UserError(
            f"{self._name} ends an answer with none of the tokens that end a response ({names}); put the one that it "
            "does end it with into rollout.stop_token_ids"
        )

    def _encoded(self, text: str, messages: Messages, mark: str) -> tuple[int, ...]:
        """Encode a rendered text with the images of these messages."""
        if any(map(num_images, messages)):
            text = with_places(text, messages, self._images.placeholder)
        return self._plain.encode(text, mark)

    def _joined(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Encode the contents alone, for a policy without a chat template."""
        if any(map(num_images, messages)):
            raise UserError("the messages have images, whose places only a chat template marks, and there is none")
        mark = next(free_characters(*texts_in(list(messages))))
        marked = [self._plain.marked(message, mark) for message in messages]
        return self._plain.encode("".join(str(message["content"]) for message in marked), mark)

    def _text(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        """Render a conversation, with the arguments of calls as objects or, if it must be, as JSON."""
        try:
            try:
                return self._render(messages, generation_prompt)
            except TemplateRefusal:
                if not any(message.get("tool_calls") for message in messages):
                    raise
                return self._render(_with_json_arguments(messages), generation_prompt)
        except TemplateRefusal as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"{self._name} refuses messages of the roles {roles}: {error}; {_OTHER_TEMPLATE}, or "
                "let the environment answer with messages of another role"
            ) from error

    def _render(self, messages: Messages, generation_prompt: bool) -> str:
        return render(self._tokenizer, messages, tools=self._tools, generation_prompt=generation_prompt)


def message_of(action: Action) -> Message:
    """Return an action as an assistant's message."""
    message: Message = {"role": "assistant", "content": action.text}
    if action.tool_calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in action.tool_calls]
    return message


def with_ids(messages: Sequence[Message]) -> Messages:
    """Return the messages with ids of calls, which some templates require, and with the names of what was called.

    The policy has seen no ids when it called, so they count the calls of the conversation; a message that has one keeps
    it.
    """
    numbers = itertools.count(1)
    waiting: list[Message] = []
    completed = []
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            waiting = [{"id": f"call{next(numbers):05}"} | call for call in message["tool_calls"]]
            message = message | {"tool_calls": list(waiting)}
        elif message["role"] == "tool" and waiting:
            call = waiting.pop(0)
            message = {"tool_call_id": call["id"], "name": call["function"]["name"]} | message
        completed.append(message)
    return completed


def _conversation(earlier: Messages, answer: Message, message: Message) -> Messages:
    """Return the conversation that continues with an answer and a message, a call's result if it is a tool's."""
    return with_ids([*earlier, _calling(answer, [message]), message])


def _calling(answer: Message, messages: Sequence[Message], *, name: str = "tool", argument: str = "value") -> Message:
    """Return an answer with the calls whose results the tool messages are."""
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        return answer
    return answer | {"tool_calls": [_call(m.get("name", name), {"argument": argument}) for m in results]}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _with_json_arguments(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as JSON, as OpenAI's messages have them."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [
        message | {"tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
