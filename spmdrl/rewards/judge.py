"""Rewards by judges: a language model is asked about each response, or about all responses to a prompt.

    items -> question (template) -> answer (server, or its cached answer) -> scores (JSON field or pattern) -> parts

What judges say is cached by the content of the question, in a file of each rank in the run's folder: a resumed run, or
one that is judged again, has the same rewards. A failure is that of what was asked about, with its reason. Judges
behind an OpenAI-compatible address are asked here; `rollout/policy_judge.py` asks the policy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from spmdrl.config.rewards import JudgeReward
from spmdrl.config.strict import shown
from spmdrl.faults.text import of_error
from spmdrl.rewards.worker import RewardItem
from spmdrl.types import UserError

JudgeRequest = Mapping[str, Any]  # the body of a request

T = TypeVar("T")


class Judges:
    """The judges of a run's reward, by the names of their terms. Use it in a `with` statement, which ends them.

    Raises UserError when the client's package or a key is missing, or when the cache is damaged.
    """

    def __init__(self, terms: Mapping[str, JudgeReward], folder: Path | None = None) -> None:
        """`folder` is where their answers are cached; None: only in memory."""
        self._said = Cache(folder)
        self._judges = {name: Judge(term, self._said, open_client(name, term)) for name, term in terms.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine that asks them, in their thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def answers(self, name: str, questions: Sequence[str]) -> list[str | ValueError]:
        """Ask one of them these questions at once; an error, with a sentence, where there is no answer."""

        async def all_of_them() -> list[str | BaseException]:
            judge = self._judges[name]
            return await asyncio.gather(*(judge.answer(one) for one in questions), return_exceptions=True)

        return [
            _as_error(one) if isinstance(one, BaseException) else one for one in self.submit(all_of_them()).result()
        ]

    async def score(self, item: RewardItem, names: Iterable[str]) -> dict[str, float]:
        """Return the parts of a reward that these judges give, 0 to 1. Raises ValueError, with a sentence."""
        judges = [(name, self._judges[name]) for name in names]
        scores = await asyncio.gather(*(judge.score(item) for _, judge in judges), return_exceptions=True)
        found = {}
        for (name, _), score in zip(judges, scores, strict=True):
            if isinstance(score, BaseException):
                raise ValueError(f"{name}: {_as_error(score)}") from score
            found[name] = score
        return found

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.submit(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._said.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(
            *others, *(judge.client.close() for judge in self._judges.values()), return_exceptions=True
        )


class Judge:
    """One judge."""

    def __init__(self, term: JudgeReward, said: Cache, client: Any) -> None:
        self._term, self._said, self.client = term, said, client
        self._room = asyncio.Semaphore(term.max_in_flight)

    async def score(self, item: RewardItem) -> float:
        """Ask about a response; returns 0 for the lowest score to 1 for the highest.

        Raises ValueError, with a sentence, when there is no question, no answer, or no score in the answer."""
        (score,) = scores_in(await self.answer(question_about([item], self._term)), self._term, 1)
        return score

    async def answer(self, question: str) -> str:
        """Return what the judge says, now or before. Raises ValueError, with a sentence, when it says nothing."""
        term = self._term
        messages = [{"role": "user", "content": question}]
        if term.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": term.system_prompt})
        asked = {
            "model": term.model,
            "messages": messages,
            "temperature": term.temperature,
            "max_tokens": term.max_answer_tokens,
            **term.params,
        }
        return await self._said.of({"url": term.url, **asked}, lambda: self._ask(asked))

    async def _ask(self, question: JudgeRequest) -> str:
        """Return the server's answer. Raises ValueError, with a sentence, when there is none."""
        import openai

        term, number = self._term, 1 + self._term.max_retries
        async with self._room:
            try:
                async with asyncio.timeout(number * term.timeout_s):
                    create = self.client.chat.completions.with_raw_response.create
                    known = {name: question[name] for name in ("model", "messages")}
                    others = {name: value for name, value in question.items() if name not in known}
                    raw = await create(**known, extra_body=others)
                    return content_of(raw.http_response.text)
            except (TimeoutError, openai.APITimeoutError) as error:
                raise ValueError(f"no answer of the judge in {number} tries of {term.timeout_s:g} s") from error
            except openai.APIStatusError as error:
                raise ValueError(f"the judge's server answers {error.status_code}: {error.message}") from error
            except openai.APIConnectionError as error:
                cause = f": {of_error(error.__cause__)}" if error.__cause__ else ""
                raise ValueError(f"the judge's server at {term.url} does not answer{cause}") from error


class Cache:
    """The answers of judges, by the content of the questions: in memory, and a line each in this rank's file.

    Equal questions are asked once. Of two ranks that asked the same, each uses its own answer after a restart.
    """

    def __init__(self, folder: Path | None) -> None:
        """Raises UserError when a file is damaged."""
        self._known: dict[str, str] = {}
        self._asked: dict[str, asyncio.Future[str]] = {}
        self._path = None if folder is None else folder / f"rank-{os.environ.get('RANK', '0')}.jsonl"
        self._file: Any = None
        if folder is not None and self._path is not None:
            others = sorted(path for path in folder.glob("rank-*.jsonl") if path != self._path)
            for path in (*others, self._path):
                self._known |= _read(path)

    def key(self, question: JudgeRequest) -> str:
        """The name of a question: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def find(self, key: str) -> str | None:
        """Return the answer to the question of this name; None where it was not asked."""
        return self._known.get(key)

    def add(self, key: str, answer: str) -> None:
        self._write(key, answer)
        self._known[key] = answer

    async def of(self, question: JudgeRequest, ask: Callable[[], Awaitable[str]]) -> str:
        """Return the cached answer, or ask. Raises what `ask` raises: only answers are cached."""
        key = self.key(question)
        if key in self._known:
            return self._known[key]
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._asked_first(key, ask))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(self._asked[key])

    async def _asked_first(self, key: str, ask: Callable[[], Awaitable[str]]) -> str:
        answer = await ask()
        self.add(key, answer)
        return answer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, key: str, answer: str) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
            self._file.truncate(_whole_bytes(self._path))  # a line that a kill has cut
        self._file.write(json.dumps({"key": key, "answer": answer}).encode() + b"\n")
        self._file.flush()


def _whole_bytes(path: Path) -> int:
    """Count the bytes of a file's whole lines."""
    return path.read_bytes().rfind(b"\n") + 1


def _read(path: Path) -> dict[str, str]:
    """Read the answers of a file, of which a last line that is not whole was being written. Raises UserError."""
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_bytes()[: _whole_bytes(path)].splitlines(), start=1):
        try:
            match json.loads(line):
                case {"key": str(key), "answer": str(answer)}:
                    found[key] = answer
                    continue
        except ValueError:
            pass
        raise UserError(f"{shown(path)}, line {number}, is no answer of a judge; remove the file, to ask again")
    return found


def open_client(name: str, term: JudgeReward) -> Any:
    """Open the client of a judge's server. Raises UserError when its package or its key is missing."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise UserError(
            f'{name}: kind = "judge" needs the package openai, which cannot be imported ({error}); install it: '
            'pip install "spmdrl[judge]"'
        ) from error
    variable = term.api_key_variable
    key = "none" if variable is None else os.environ.get(variable)
    if not key:
        raise UserError(f'{name}: api_key_variable = "{variable}", and there is no such environment variable; set it')
    return AsyncOpenAI(base_url=term.url, api_key=key, max_retries=term.max_retries, timeout=term.timeout_s)


def question_about(items: Sequence[RewardItem], term: JudgeReward) -> str:
    """Fill a judge's template in for a response, or for those of a group. Raises ValueError, with a sentence, when it
    has an unknown field."""
    item = items[0]
    values = {name: value if isinstance(value, str) else _as_text(value) for name, value in item.metadata.items()}
    values |= {"lowest": f"{term.lowest:g}", "highest": f"{term.highest:g}", "prompt": item.prompt}
    values |= {"rubric": term.rubric} if term.rubric is not None else {}
    values |= {"answer": item.answer} if item.answer is not None else {}
    if term.group is None:
        values["response"] = item.response
    else:
        numbered = (f"Response {number}:\n{one.response}" for number, one in enumerate(items, start=1))
        values |= {"responses": "\n\n".join(numbered), "count": f"{len(items)}"}
    if missing := sorted(term.fields - values.keys()):
        known = ", ".join(f"{{{name}}}" for name in sorted(values))
        raise ValueError(f"its template has {{{missing[0]}}}, which this prompt has not; it has {known}")
    return term.question.format_map(values)


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # such as a date of a parquet file


def content_of(body: str) -> str:
    """Return what an answer of the server says. Raises ValueError, with a sentence, when it is none."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the server's answer is no JSON: {body[:80]!r}") from error
    match answer:
        case {"choices": [{"message": {"content": str(content)}}, *_]}:
            return content
    raise ValueError(f"the server's answer has no choices with a message: {body[:80]!r}")


def scores_in(answer: str, term: JudgeReward, count: int) -> list[float]:
    """Return the scores that a judge's answer names last of as many responses, 0 for the lowest to 1 for the highest.

    Raises ValueError, with a sentence, when it does not name them."""
    said = _said_in(answer, term)
    if term.group is None:
        return [_scaled(said, term)]
    if not isinstance(said, list) or len(said) != count:
        raise ValueError(f"the judge's {term.field} are {_shown(said)}, and no list of {count}, one for each response")
    if term.group == "scores":
        return [_scaled(one, term) for one in said]
    if sorted(map(_number, said)) != [*range(1, count + 1)]:
        raise ValueError(f"the judge's ranking is {_shown(said)}, and not each of the numbers 1 to {count} once")
    if count == 1:
        return [0.5]  # the best and the worst
    place = {int(_number(one)): place for place, one in enumerate(said)}
    return [1.0 - place[number] / (count - 1) for number in range(1, count + 1)]


def _said_in(answer: str, term: JudgeReward) -> Any:
    if term.score_pattern is not None:
        found: list[Any] = [match[1] for match in re.finditer(term.score_pattern, answer)]
        what = f"nothing like {term.score_pattern}"
    else:
        found = [one[term.field] for one in _objects(answer) if term.field in one]
        what = f'no JSON object with "{term.field}"'
    if not found:
        raise ValueError(f"the judge's answer has {what}: it ends {answer[-80:]!r}")
    return found[-1]


def _scaled(said: Any, term: JudgeReward) -> float:
    score = _number(said)
    if not math.isfinite(score):
        raise ValueError(f"the judge's score is {_shown(said)}, and no number")
    if not term.lowest <= score <= term.highest:
        raise ValueError(f"the judge's score is {score:g}, not from {term.lowest:g} to {term.highest:g}")
    return (score - term.lowest) / (term.highest - term.lowest)


def _number(said: Any) -> float:
    try:
        return float(said)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _shown(said: Any) -> str:
    return repr(said)[:80]


def _as_error(error: BaseException) -> ValueError:
    return error if isinstance(error, ValueError) else ValueError(of_error(error))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects of a text, in order."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
            yield found
        except (ValueError, RecursionError):
            place += 1
