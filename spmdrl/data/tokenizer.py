"""All use of the tokenizer: prompts to token ids, responses to text, and the tokens that end a response."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spmdrl.config.data import ChatTemplate
from spmdrl.config.strict import read_json, shown, utf8_problem
from spmdrl.conversation import IMAGE_PLACE, is_conversation, num_images
from spmdrl.data.plain_text import free_characters, plain_text_of, texts_in, unescaped
from spmdrl.types import UserError

Messages = list[dict[str, Any]]

RENDER_S = 10.0  # of one conversation, which takes a template some milliseconds
MAX_TEMPLATE_CHARACTERS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """An image's place in a rendered conversation, before it is as long as the image needs."""

    written: str  # by the chat template, for each image
    text: str  # in its stead, such that the tokenizer makes one `token_id` of it
    token_id: int


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory; nothing is downloaded."""
    if not Path(path).is_dir():
        raise UserError(f"model.path = {path}: no such directory")
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


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Sequence[dict[str, Any]],
    place: Placeholder | None,
) -> tuple[tuple[int, ...], str]:
    """Return the token ids of messages under the chat template, and their text."""
    plain, shown_tools = plain_text_of(tokenizer), json.dumps(list(tools), ensure_ascii=False)
    mark = next(free_characters(str(tokenizer.chat_template), shown_tools, *texts_in(messages)))
    text = unescaped(_prompt_text(tokenizer, [plain.marked(one, mark) for one in messages], tools), [mark])
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


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[dict[str, Any]]) -> str:
    try:
        return render(tokenizer, messages, tools=tools)
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
