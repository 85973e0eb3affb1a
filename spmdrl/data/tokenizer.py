"""All use of the tokenizer: prompts to token ids, responses to text, and the tokens that end a response."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spmdrl.config.data import ChatTemplate
from spmdrl.config.strict import read_json, shown, utf8_problem
from spmdrl.conversation import IMAGE_PLACE, Message, is_conversation, num_images
from spmdrl.types import Prompt, UserError

# Text that stays text: what others wrote never becomes a control token of the model.
#
# A tokenizer gives a control token such as `<|im_end|>` wherever its text stands. Before a conversation is rendered,
# a mark is put inside every such text in the messages' contents, where no template trims it; after rendering, the
# text is encoded in pieces that end at the marks, so that no piece holds the whole text of a control token.


_FIELDS = ("role", "content", "type", "name")  # which nearly every message has; no control token is spelt so
_PRIVATE_USE = range(0xE000, 0xF900)  # characters that mean nothing, and that templates neither trim nor change


def free_characters(*taken: str) -> Iterator[str]:
    """Yield private-use characters that occur in none of the texts, nor as JSON's `\\\\uXXXX`.

    Raises UserError when there are no more.
    """
    text = "".join(taken)
    for number in _PRIVATE_USE:
        if chr(number) not in text and f"\\u{number:04x}" not in text:
            yield chr(number)
    raise UserError("the text has all of Unicode's private-use characters, one of which must be left to mark places")


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings in a message or in a part of one, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in(list(value) + list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(part)


def unescaped(text: str, marks: Iterable[str]) -> str:
    """Return the text with marks in place of their `\\\\uXXXX`, as which some templates write them in JSON."""
    for mark in marks:
        text = text.replace(f"\\u{ord(mark):04x}", mark)
    return text


class PlainText:
    """Encodes rendered conversations in which marks keep the texts of control tokens apart.

    Control tokens are the tokenizer's added tokens, without those of white space or of one character, which represent
    ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        control = {number: token for number, token in added.items() if len(token.content.strip()) > 1}
        self.control_ids = frozenset(control)
        special = {number: token for number, token in control.items() if token.special}
        # Others stand in a text only as they are spelt.
        self._any_normalized = any(token.normalized for token in control.values())
        self._special_ids = frozenset(special)
        self._any = _one_of(token.content for token in control.values())
        self._special = _one_of(token.content for token in special.values())
        # Some tokenizers put a space before a text; not behind an added token.
        whole = [token.content for token in special.values() if not (token.rstrip or token.single_word)]
        self._anchor = whole[0] if whole else ""

    def marked(self, message: Message, mark: str) -> Message:
        """Return the message with marks inside the texts of control tokens.

        In an assistant's message only those of special tokens: the policy's other added tokens, such as `<think>`, are
        decoded to text, and templates look for them.
        """
        own = message.get("role") == "assistant"
        pattern, ids = (self._special, self._special_ids) if own else (self._any, self.control_ids)
        return _changed(message, lambda text: self._broken(text, mark, pattern, ids))

    def _broken(self, text: str, mark: str, pattern: re.Pattern[str], ids: frozenset[int]) -> str:
        valid = _whole(text)
        if not self._any_normalized and not pattern.search(valid):
            return valid
        broken = pattern.sub(lambda found: found[0][:1] + mark + found[0][1:], valid)
        # What is left are control texts that overlap, or that only the tokenizer's normalization makes.
        pieces = [mark.join(piece) if ids & set(self._encoded(piece)) else piece for piece in broken.split(mark)]
        return mark.join(pieces)

    def special_text_in(self, text: str) -> str | None:
        """Return the first text of a special token in a text; None if there is none."""
        found = self._special.search(text)
        return found[0] if found else None

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Encode a text in which the texts of control tokens are control tokens."""
        return tuple(self._encoded(_whole(text)))

    def encode(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode a rendered text in pieces that end at the marks."""
        first, *others = text.split(mark)
        token_ids = list(self._encoded(first))
        for piece in others:
            token_ids += self._encoded(self._anchor + piece)[1 if self._anchor else 0 :]
        return tuple(token_ids)

    def _encoded(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no Exception
                raise
            raise UserError(
                f"the tokenizer cannot encode a text of {len(text)} characters: {' '.join(str(error).split())}; give "
                "tokenizer.json another pattern, or remove the text"
            ) from error


def plain_text_of(tokenizer: PreTrainedTokenizerBase) -> PlainText:
    """Return a tokenizer's encoder of plain text, made once for the tokens that it has."""
    return _made(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _made(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> PlainText:
    return PlainText(tokenizer)


def _whole(text: str) -> str:
    """Return the text with a replacement character for half of one, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with every string in it changed, names of fields included, but for roles and types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key if key in _FIELDS else change(key): part if key in ("role", "type") else _changed(part, change)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return value


Messages = list[dict[str, Any]]

RENDER_S = 10.0  # of one conversation, which takes a template some milliseconds
MAX_TEMPLATE_CHARACTERS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """An image's place in a rendered conversation, before it is as long as the image needs."""

    written: str  # by the chat template, for each image
    text: str  # in its stead, such that the tokenizer makes one `token_id` of it
    token_id: int


def require_model(path: str) -> None:
    """Raise UserError where a directory of a model cannot be, and say what to set instead."""
    if not Path(path).exists():
        is_hubs = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
        or_this = f', or to "hf:{path}", from the hub\'s cache or with run.download = true' if is_hubs else ""
        raise UserError(f'model.path = "{path}" does not exist; set it to a directory{or_this}')
    if Path(path, "hf", "config.json").is_file() and not Path(path, "config.json").is_file():
        raise UserError(f'model.path = "{path}" is the folder of a run; set it to the model there, "{path}/hf"')
    if Path(path, "adapter_config.json").is_file() and not Path(path, "config.json").is_file():
        raise UserError(
            f'model.path = "{path}" holds adapters and no model; set lora.path to it, and model.path to their base'
        )


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory; nothing is downloaded."""
    require_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises many types for bad files; a panic in Rust is no Exception
        reason = " ".join(str(error).split())
        raise UserError(f"model.path = {path}: its tokenizer cannot be loaded: {reason}") from error
    # Without tokenizer files transformers builds an empty tokenizer from the model type in config.json.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"model.path = {path} has no tokenizer; copy the tokenizer files of the model into it")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(f"model.path = {path}: model_max_length of its tokenizer_config.json is no number")
    if (template := _processor_template(path)) is not None:
        tokenizer.chat_template = template
    return tokenizer


class _ProcessorTemplate(BaseModel):
    """The chat template of a model that reads images, in the file of its processor, which tokenizers do not read."""

    model_config = ConfigDict(strict=True)
    chat_template: str


def _processor_template(model_dir: str) -> str | None:
    file = Path(model_dir, "chat_template.json")
    if not file.is_file() or Path(model_dir, "chat_template.jinja").is_file():
        return None
    return read_json(file, _ProcessorTemplate).chat_template


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    *,
    system_prompt: str | None,
    chat_template: ChatTemplate,
    tools: Sequence[dict[str, Any]] = (),
    place: Placeholder | None = None,
) -> tuple[tuple[int, ...], str]:
    """Return a prompt's token ids and their text, such that the response follows directly.

    Only a chat template adds special tokens, and shows the schemas of tools; a raw prompt gets neither. The texts of
    control tokens in a prompt stay text, unless it is rendered already. A prompt with images, each of which becomes one
    token, needs their `place`.
    """
    reason = (
        "the tokenizer has no chat template" if chat_template == "auto" else f'data.chat_template = "{chat_template}"'
    )
    if uses_template(tokenizer, chat_template):
        token_ids, text = _templated(tokenizer, chat_messages(prompt, system_prompt), tools, place)
    elif place is not None:
        raise UserError(f"the prompt has images, whose places only a chat template marks, but {reason}")
    elif not isinstance(prompt, str):
        raise UserError(f"the prompt is a list of chat messages, but {reason}; use string prompts")
    elif system_prompt is not None:
        raise UserError(f"data.system_prompt is set, but {reason}; write it into the prompts")
    elif chat_template == "rendered":
        token_ids, text = plain_text_of(tokenizer).encode_rendered(prompt), prompt
    else:
        token_ids, text = encode_text(tokenizer, prompt), prompt
    if not token_ids:
        raise UserError("the prompt is empty after tokenization")
    return token_ids, text


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Encode a raw prompt, or a response to imitate: special tokens that it spells stay text."""
    plain, mark = plain_text_of(tokenizer), next(free_characters(text))
    marked = plain.marked({"role": "assistant", "content": text}, mark)["content"]
    return plain.encode(marked, mark)


def encode_message(tokenizer: PreTrainedTokenizerBase, text: str, *, chat_template: ChatTemplate) -> tuple[int, ...]:
    """Return the tokens of a user's message with which a conversation begins; without a template, those of the text."""
    if not uses_template(tokenizer, chat_template):
        return encode_text(tokenizer, text)
    return _templated(tokenizer, [{"role": "user", "content": text.strip()}], (), None, generation_prompt=False)[0]


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Sequence[dict[str, Any]],
    place: Placeholder | None,
    *,
    generation_prompt: bool = True,
) -> tuple[tuple[int, ...], str]:
    """Return the token ids of messages under the chat template, and their text."""
    plain, shown_tools = plain_text_of(tokenizer), json.dumps(list(tools), ensure_ascii=False)
    mark = next(free_characters(str(tokenizer.chat_template), shown_tools, *texts_in(messages)))
    marked = [plain.marked(one, mark) for one in messages]
    text = unescaped(_prompt_text(tokenizer, marked, tools, generation_prompt), [mark])
    if place is None:
        return plain.encode(text, mark), text.replace(mark, "")
    token_ids = plain.encode(with_places(text, messages, place), mark)
    return token_ids, text.replace(place.written, IMAGE_PLACE).replace(mark, "")


def with_places(text: str, messages: Messages, place: Placeholder) -> str:
    """Return a rendered conversation in which the tokenizer makes one placeholder of each image of the messages.

    Raises UserError when the template has not written a place for each.
    """
    wanted, found = sum(map(num_images, messages)), text.count(place.written)
    if found != wanted:
        raise UserError(
            f"the messages have {wanted} images, and the tokenizer's chat template writes {place.written} {found} "
            "times; put the template of the model's processor into model.path, as chat_template.jinja"
        )
    return text.replace(place.written, place.text)


def raw_control_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, chat_template: ChatTemplate
) -> str | None:
    """Return the first text of a special token in a raw prompt, where it stays text; None if there is none."""
    if not isinstance(prompt, str) or chat_template == "rendered" or uses_template(tokenizer, chat_template):
        return None
    return plain_text_of(tokenizer).special_text_in(prompt)


def uses_template(tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate) -> bool:
    """Return True when conversations go through the tokenizer's chat template."""
    return chat_template == "auto" and bool(tokenizer.chat_template)


def chat_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """Return a prompt as the messages that a chat template takes. Raises UserError for messages and a system prompt."""
    if is_conversation(prompt):
        if system_prompt is not None:
            raise UserError(
                "data.system_prompt is put before prompts that are strings, but this one is a list of chat messages; "
                "write the system message into the list"
            )
        return prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": prompt}]


class TemplateRefusal(Exception):
    """A chat template cannot render a conversation; the message is the template's own."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    tools: Sequence[dict[str, Any]] = (),
    generation_prompt: bool = True,
) -> str:
    """Render a conversation with the tokenizer's chat template. Raises TemplateRefusal.

    The generation prompt is what precedes the next response.
    """
    try:
        with _at_most(RENDER_S):
            text = tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=generation_prompt, tokenize=False
            )
    except Exception as error:  # templates are programs, and may raise anything
        raise TemplateRefusal(" ".join(str(error).split())[:300] or type(error).__name__) from error
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARACTERS:
        found = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise TemplateRefusal(f"it gives {found} instead of a text of at most {MAX_TEMPLATE_CHARACTERS} characters")
    if problem := utf8_problem(text):
        raise TemplateRefusal(f"its text {problem}")
    return text


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer. Elsewhere than in the main thread, where no signal arrives, the
    run's watchdog ends what never ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[dict[str, Any]], generation_prompt: bool
) -> str:
    try:
        return render(tokenizer, messages, tools=tools, generation_prompt=generation_prompt)
    except TemplateRefusal as error:
        raise UserError(f"the tokenizer's chat template refuses the prompt: {error}") from error


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode tokens to text without special tokens, as rewards read it."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _Generation(BaseModel):
    """The part of a generation config that is read."""

    model_config = ConfigDict(strict=True)
    eos_token_id: int | list[int] | None = None


def listed_end_tokens(model_dir: str) -> frozenset[int]:
    """Return the token ids that generation_config.json lists as ends; none without that file. Raises UserError."""
    path = Path(model_dir) / "generation_config.json"
    if not path.exists():
        return frozenset()
    listed = read_json(path, _Generation).eos_token_id
    return frozenset(listed if isinstance(listed, list) else () if listed is None else (listed,))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: str) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's EOS token and those of generation_config.json."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    stops, largest = listed_end_tokens(model_dir).union(own), max(tokenizer.get_vocab().values(), default=-1)
    if strange := sorted(stop for stop in stops if not 0 <= stop <= largest):
        raise UserError(
            f"generation_config.json in {shown(model_dir)} ends responses with the token {strange[0]}, but the "
            f"tokenizer has ids 0 to {largest}; correct it, or remove the file"
        )
    if not stops:
        raise UserError(
            f"neither the tokenizer nor generation_config.json in {shown(model_dir)} names an end-of-sequence token; "
            "set rollout.stop_token_ids"
        )
    return stops


# Texts for reward models: a prompt and a response, by the tokenizer of the model that scores them.


class ScoredText:
    """Turns prompts and responses into the token ids that a reward model scores.

    The texts of control tokens in them stay text; only templates write control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        """`template` is that of `ModelReward`. Raises UserError when the tokenizer has none, or no end."""
        self._tokenizer, self._template = tokenizer, template
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                'template = "chat", but its tokenizer has no chat template; set it to "pairs", or to a text with '
                "{prompt} and {response}"
            )
        if template == "pairs" and tokenizer.eos_token_id is None:
            raise UserError('template = "pairs", but its tokenizer has no end-of-sequence token; set another template')

    def __call__(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        """Return the token ids. Raises UserError for a prompt with images, or one that the template refuses."""
        if prompt.images:
            raise UserError("the prompt shows images, which a reward model does not see")
        if self._template == "chat":
            return self._conversation(prompt, response)
        if self._template == "pairs":
            assert self._tokenizer.eos_token_id is not None
            written = list(prompt.messages) or prompt.text
            token_ids, _ = encode_prompt(self._tokenizer, written, system_prompt=None, chat_template="auto")
            return (*token_ids, *encode_text(self._tokenizer, response), self._tokenizer.eos_token_id)
        return self._filled({"prompt": prompt.question, "response": response})

    def _conversation(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        asked = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        messages = [*asked, {"role": "assistant", "content": response}]
        plain = plain_text_of(self._tokenizer)
        mark = next(free_characters(str(self._tokenizer.chat_template), *texts_in(messages)))
        marked = [plain.marked(message, mark) for message in messages]
        try:
            text = render(self._tokenizer, marked, generation_prompt=False)
        except TemplateRefusal as error:
            raise UserError(f"the chat template of the reward model refuses the conversation: {error}") from error
        return plain.encode(unescaped(text, [mark]), mark)

    def _filled(self, values: dict[str, str]) -> tuple[int, ...]:
        plain, mark = plain_text_of(self._tokenizer), next(free_characters(self._template, *values.values()))
        marked = {
            name: plain.marked({"role": "user", "content": value}, mark)["content"] for name, value in values.items()
        }
        try:
            text = Formatter().vformat(self._template, (), marked)
        except (LookupError, ValueError, AttributeError) as error:
            raise UserError(f"template = {self._template!r} cannot be filled: {error}") from error
        return plain.encode(text, mark)
