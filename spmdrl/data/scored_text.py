"""Texts for reward models: a prompt and a response, by the tokenizer of the model that scores them."""

from __future__ import annotations

from string import Formatter

from transformers import PreTrainedTokenizerBase

from spmdrl.data.tokenizer import (
    TemplateRefusal,
    encode_prompt,
    encode_text,
    free_characters,
    plain_text_of,
    render,
    texts_in,
    unescaped,
)
from spmdrl.types import Prompt, UserError


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
