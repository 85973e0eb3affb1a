"""The episodes of a step as one HTML page that needs nothing else: no server, no network.

The page's program puts the data into it as text only, and `pages.py` lets no other program run: nothing that a policy
or an environment writes can.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spmdrl.conversation import Message, Observation
from spmdrl.report.files import finite
from spmdrl.report.pages import assembled
from spmdrl.types import Response, RewardOutcome, Rollout, Trajectory, Turn

# Tokens as text to be shown: one piece of the text for each token, and who wrote it.


Writer = Literal["prompt", "environment", "policy"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's answer to some of a character's bytes
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so tokens too


class TokenTexts:
    """The texts of a tokenizer's tokens; single tokens are cached."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # texts of single tokens

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Cut the text of the tokens into a piece for each of them. A character that several tokens share is in the
        first one's piece; the others' are empty."""
        pieces: list[str] = []
        while len(pieces) < len(token_ids):
            start = len(pieces)
            for end in range(start + 1, min(start + _LONGEST_CHARACTER, len(token_ids)) + 1):
                text = self._text(token_ids[start:end])
                if _UNFINISHED not in text:
                    break
            else:  # bytes that are no character
                end, text = start + 1, self._text(token_ids[start : start + 1])
            pieces += [text, *[""] * (end - start - 1)]
        return pieces

    def _text(self, token_ids: Sequence[int]) -> str:
        first = token_ids[0]
        if len(token_ids) > 1:
            return self._decoded(token_ids)
        if first not in self._known:
            self._known[first] = self._decoded(token_ids)
        return self._known[first]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        first = tokenizer.convert_ids_to_tokens(token_ids[0])
        # SentencePiece decodes the first token of a text without the space that it begins with.
        return f" {text}" if isinstance(first, str) and first.startswith("▁") and not text.startswith(" ") else text


def writers_of_context(pieces: Sequence[str], said: Iterable[tuple[str, Writer]]) -> list[Writer]:
    """Tell of each token that the policy read whether the environment wrote it.

    `said` are the texts in it, in order, and who wrote them. All else is the chat template's, which counts as the
    prompt. So does a text that the template has changed, because it is not found.
    """
    spans = list(_spans("".join(pieces), said))
    writers: list[Writer] = []
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if not piece:  # of the character before it
            writers.append(writers[-1] if writers else "prompt")
        else:
            by_environment = any(start < end and begin < stop for start, stop in spans)
            writers.append("environment" if by_environment else "prompt")
        begin = end
    return writers


def _spans(text: str, said: Iterable[tuple[str, Writer]]) -> Iterator[tuple[int, int]]:
    """Yield where each text of the environment begins and ends, as far as it is there after the one before."""
    begin = 0
    for words, writer in said:
        for form in (words, words.strip()):  # many templates strip
            place = text.find(form, begin) if form else -1
            if place >= 0:
                begin = place + len(form)
                if writer == "environment":
                    yield place, begin
                break


WrittenTexts = Sequence[tuple[str, Writer]]  # texts in the order of a conversation, and who wrote them

_DIGITS = 6  # of a log-probability in nats, after the point


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """A rollout to show."""

    rollout: Rollout
    outcome: RewardOutcome
    # Of each trajectory: the trainer's log-probability minus the engine's for each of its n tokens, in nats, nan where
    # there is none; None where the run recorded none.
    mismatch: Sequence[Sequence[float] | None]


class _Vocabulary:
    """Tokens as the page's data have them. Each text is written once, and tokens refer to it by its place."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._place_of: dict[str, int] = {}

    @property
    def strings(self) -> list[str]:
        """The texts, in their places."""
        return list(self._place_of)

    def tokens(self, token_ids: Sequence[int], pieces: Sequence[str]) -> dict[str, Any]:
        """Describe tokens, whose texts are the pieces."""
        return {
            "ids": list(token_ids),
            "pieces": [self._place_of.setdefault(piece, len(self._place_of)) for piece in pieces],
            "special": [place for place, token in enumerate(token_ids) if token in self._special],
        }


def episodes_page(
    episodes: Iterable[ShownEpisode], tokenizer: PreTrainedTokenizerBase, *, run: str, step: int, shows_mismatch: bool
) -> str:
    """Write the page. `shows_mismatch` is False when the run saved no log-probabilities of the trainer."""
    vocabulary = _Vocabulary(tokenizer)
    groups: dict[int, dict[str, Any]] = {}
    for episode in sorted(episodes, key=lambda one: (one.rollout.prompt.prompt_id, one.rollout.sample_index)):
        prompt = episode.rollout.prompt
        group = groups.setdefault(
            prompt.prompt_id,
            {
                "prompt_id": prompt.prompt_id,
                "task": prompt.task,
                "prompt": prompt.question or prompt.text,  # in short: the last message, where there are messages
                "answer": prompt.answer,
                "rollouts": [],
            },
        )
        group["rollouts"].append(_rollout(episode, vocabulary))
    data = {
        "run": run,
        "step": step,
        "shows_mismatch": shows_mismatch,
        "groups": list(groups.values()),
        "strings": vocabulary.strings,
    }
    return assembled("episodes", title=f"{run}, step {step}", data=finite(data))


def _rollout(episode: ShownEpisode, vocabulary: _Vocabulary) -> dict[str, Any]:
    rollout, outcome = episode.rollout, episode.outcome
    trajectories = zip(rollout.trajectories, episode.mismatch, strict=True)
    # A later trajectory begins with the conversation so far.
    said = [*_by("prompt", rollout.prompt.messages), *_said(rollout.initial_observation)]
    shown = []
    for trajectory, mismatch in trajectories:
        shown.append(_trajectory(trajectory, mismatch, said, vocabulary))
        for turn in trajectory.turns:
            said += [(turn.action.text, "policy")] if turn.action else []
            said += _said(turn.observation)
    return {
        "sample_index": rollout.sample_index,
        "seed": str(rollout.seed),  # 63 bits are more than a number of JavaScript holds
        "end": rollout.end,
        "reward": outcome.reward,
        "reward_parts": outcome.parts,
        "reward_failure": outcome.failure,
        "environment_failure": rollout.failure,
        "is_trained": not (rollout.is_masked or rollout.is_baseline),
        "is_baseline": rollout.is_baseline,
        "num_sampled": rollout.num_sampled,
        "trajectories": shown,
    }


def _trajectory(
    trajectory: Trajectory, mismatch: Sequence[float] | None, said: WrittenTexts, vocabulary: _Vocabulary
) -> list[dict[str, Any]]:
    """Describe the turns of a trajectory, given the messages before it."""
    turns, starts = [], trajectory.starts
    for turn, start, end in zip(trajectory.turns, starts, starts[1:], strict=False):
        of_response = mismatch[start + len(turn.context_ids) : end] if mismatch is not None else ()
        turns.append(
            {
                "context": _context(turn, start, said, vocabulary),
                "response": _response(turn.response, of_response, vocabulary),
                **_turn(turn),
            }
        )
        said = _said(turn.observation)
    return turns


def _turn(turn: Turn) -> dict[str, Any]:
    action, observation = turn.action, turn.observation
    return {
        "finish_reason": turn.response.finish_reason,
        "tool_calls": [
            {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            for call in (action.tool_calls if action else ())
        ],
        "malformed": action.malformed if action else None,
        "observation": observation
        and {
            "reward": observation.reward,
            "done": observation.done,
            "metrics": dict(observation.metrics),
            "tool_errors": observation.tool_errors,
        },
    }


def _context(turn: Turn, start: int, said: WrittenTexts, vocabulary: _Vocabulary) -> dict[str, Any]:
    """Describe what the policy read, from token `start` of the trajectory on, with one placeholder for each image."""
    hidden = {place - start for image in turn.images for place in range(image.start + 1, image.end)}
    names = {image.start - start: image.name for image in turn.images}
    all_pieces = vocabulary.texts.pieces(turn.context_ids)
    shown = [place for place in range(len(all_pieces)) if place not in hidden]
    token_ids = [turn.context_ids[place] for place in shown]
    pieces = [names.get(place, all_pieces[place]) for place in shown]
    writers = writers_of_context(pieces, said)
    return {**vocabulary.tokens(token_ids, pieces), "writers": "".join(writer[0] for writer in writers)}


def _said(observation: Observation | None) -> list[tuple[str, Writer]]:
    return _by("environment", observation.messages) if observation else []


def _by(writer: Writer, messages: Iterable[Message]) -> list[tuple[str, Writer]]:
    return [(text, writer) for text in _texts(messages)]


def _texts(messages: Iterable[Message]) -> list[str]:
    """The texts in the messages, whose contents are texts or lists of parts."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content or ())]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _response(response: Response, mismatch: Sequence[float], vocabulary: _Vocabulary) -> dict[str, Any]:
    return {
        **vocabulary.tokens(response.token_ids, vocabulary.texts.pieces(response.token_ids)),
        "logprobs": [round(logprob, _DIGITS) for logprob in response.logprobs],
        "mismatch": [round(nats, _DIGITS + 3) for nats in mismatch],
        "spans": [[span.version, span.num_tokens] for span in response.spans],
    }
