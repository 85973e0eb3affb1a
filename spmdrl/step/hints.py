"""Prompts with hints: a teacher may see a hint or a demonstration from a column of the data, or an environment's
feedback to the attempt, and the policy does not.

The teacher reads another prompt before the same response. In the policy's micro-batch the prompt of each sequence is
replaced, and what the teacher says of the responses' tokens is moved back to their places. Feedback of an environment
is a message of its own before the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spmdrl.algo.prefix_tree import prefix_tree
from spmdrl.config import DistillConfig, PromptsConfig
from spmdrl.config.distill import FEEDBACK
from spmdrl.conversation import as_text
from spmdrl.data.tokenizer import encode_message, encode_prompt
from spmdrl.types import NO_HINT, NO_TEACHER, Hint, MicroBatch, Prompt, Rollout, UserError

# From a prompt, and what the environment returned, to the place of the teacher and the hint that the teacher sees.
Label = Callable[[Prompt, str | None], tuple[int, Hint]]


def feedback_of(rollout: Rollout) -> str | None:
    """Return the text of the observation after the last response; None where there is none."""
    last = rollout.turns[-1].observation
    text = "\n".join(as_text(message["content"]) for message in last.messages) if last is not None else ""
    return text if text.strip() else None


@dataclass(frozen=True, slots=True)
class Lessons:
    """Says of each prompt who teaches the responses to it, and what that teacher reads before them."""

    distill: DistillConfig | None = None
    data: PromptsConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # needed where a teacher sees hints

    def __call__(self, prompt: Prompt, feedback: str | None = None) -> tuple[int, Hint]:
        """Return the place of the prompt's teacher, or NO_TEACHER, and the hint that this sees.

        Nobody teaches an attempt after which the environment returned nothing or too much, where that is the hint.
        Raises UserError for a prompt without its hint, or with one that is too long.
        """
        place = NO_TEACHER if self.distill is None else self.distill.teacher_of(prompt.task)
        if self.distill is None or place == NO_TEACHER or (column := self.distill.by_place[place].hint_column) is None:
            return place, NO_HINT
        if column != FEEDBACK:
            return place, Hint(len(prompt.token_ids), self._hinted(prompt, column))
        hint = None if feedback is None else self._before(prompt, feedback)
        return (NO_TEACHER, NO_HINT) if hint is None else (place, hint)

    def _before(self, prompt: Prompt, feedback: str) -> Hint | None:
        """Return the feedback as the message before the conversation, which begins a text only once; None where it is
        too long."""
        assert self.distill is not None and self.data is not None and self.tokenizer is not None
        text = self.distill.hint_template.format(hint=feedback, question="")
        token_ids = encode_message(self.tokenizer, text, chat_template=self.data.chat_template)
        begins = token_ids[0] == prompt.token_ids[0] == self.tokenizer.bos_token_id
        return Hint(int(begins), token_ids) if len(token_ids) <= self.distill.max_hint_tokens else None

    def _hinted(self, prompt: Prompt, column: str) -> tuple[int, ...]:
        assert self.distill is not None and self.data is not None and self.tokenizer is not None
        hint = prompt.answer if column == "answer" else prompt.metadata.get(column)
        where = f"the prompt {prompt.text[-60:]!r}"
        if not isinstance(hint, str) or not hint.strip():
            raise UserError(
                f'{where} has no text in the hint_column "{column}", which its teacher is to see; name a column that '
                'has one in every row, or "answer" for the reference answer'
            )
        if prompt.messages:
            *before, last = prompt.messages
            content = self.distill.hint_template.format(hint=hint, question=as_text(last["content"]))
            token_ids, _ = encode_prompt(
                self.tokenizer, [*before, {**last, "content": content}], system_prompt=None, chat_template="auto"
            )
        else:
            text = self.distill.hint_template.format(hint=hint, question=prompt.text)
            token_ids, _ = encode_prompt(
                self.tokenizer, text, system_prompt=None, chat_template=self.data.chat_template
            )
        most = self.data.max_prompt_tokens + self.distill.max_hint_tokens
        if len(token_ids) > most:
            raise UserError(
                f"{where} has {len(token_ids)} tokens with its hint, more than data.max_prompt_tokens + "
                f"distill.max_hint_tokens = {most}; raise the latter, or shorten the hint"
            )
        return token_ids


NO_LESSONS = Lessons()


def hinted(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with the prompts that teachers see; everything about tokens of prompts is 0.

    It has no routes: those are the policy's, of other tokens."""
    parts = [*_parts(micro_batch)]
    seqlens = [len(prompt) + rest.stop - rest.start for prompt, rest, _ in parts]
    columns = {
        name: torch.cat([x for prompt, rest, _ in parts for x in (column.new_zeros(len(prompt)), column[rest])])
        for name, column in micro_batch.columns.items()
        if name not in ("cu_seqlens", "routes")
    }
    columns["token_ids"] = torch.cat(
        [x for prompt, rest, _ in parts for x in (torch.tensor(prompt, dtype=torch.int64), micro_batch.token_ids[rest])]
    )
    columns["positions"] = torch.cat([torch.arange(length) for length in seqlens])
    columns["cu_seqlens"] = torch.tensor([*itertools.accumulate(seqlens, initial=0)], dtype=torch.int32)
    shares_prefixes = micro_batch.tree is not None
    tree = prefix_tree([tuple(x.tolist()) for x in columns["token_ids"].split(seqlens)]) if shares_prefixes else None
    return replace(micro_batch, **columns, hints=(), turns=(), routes=None, tree=tree)  # type: ignore[arg-type]


def unhinted(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Move per-token values of `hinted(micro_batch)` to the micro-batch's own tokens, [T]; those of prompts are 0."""
    found, start = [], 0
    for prompt, rest, num_replaced in _parts(micro_batch):
        start += len(prompt)
        found += [values.new_zeros(num_replaced), values[start : start + rest.stop - rest.start]]
        start += rest.stop - rest.start
    return torch.cat(found)


def _parts(micro_batch: MicroBatch) -> Iterator[tuple[tuple[int, ...], slice, int]]:
    """Yield of each sequence the prompt that its teacher reads, the tokens after its own prompt, and that prompt's
    length; without a hint nothing is replaced."""
    ends = itertools.pairwise(micro_batch.cu_seqlens.tolist())
    for (num_replaced, token_ids), (start, end) in zip(micro_batch.hints, ends, strict=True):
        yield token_ids, slice(start + num_replaced, end), num_replaced
