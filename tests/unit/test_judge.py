"""Judges: what they are asked and say, every way in which they fail, and that answers are asked for once."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.config import Config, DataConfig, DebugConfig, RewardConfig
from spmdrl.config.rewards import JudgeReward
from spmdrl.data.tokenizer import decode, encode_text
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.preflight.checks import judge_problems
from spmdrl.rewards.client import RewardClient, item_of, known_reward
from spmdrl.rewards.judge import Cache, Judges, question_about, scores_in
from spmdrl.rollout.policy_judge import PolicyJudge
from spmdrl.types import Prompt, Request, Response, RewardOutcome, Rollout, UserError
from tests.helpers.judges import FAILURES, JudgeServer, judge_server, score_of
from tests.helpers.rewards import item
from tests.helpers.rollouts import byte_tokenizer, one_turn

PAGE = Path(__file__).parents[2] / "docs" / "judges.md"
LISTINGS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


def judge(server: JudgeServer, **settings: Any) -> JudgeReward:
    return JudgeReward.model_validate(server.term(**settings))


def judged(terms: dict[str, JudgeReward], *responses: str, folder: Path | None = None) -> list[float | str]:
    """Ask about responses, all at once; a score each, or why there is none."""
    with Judges(terms, folder) as judges:
        asked = [judges.submit(judges.score(item(response, "4", column=7), terms)) for response in responses]
        errors = [future.exception() for future in asked]
        return [
            str(error) if error else sum(future.result().values()) for future, error in zip(asked, errors, strict=True)
        ]


def test_a_question_has_its_fields_and_the_score_is_scaled(server: JudgeServer) -> None:
    term = judge(server, template="{prompt}|{response}|{answer}|{column}|{{}}", rubric=None, lowest=-10.0)
    question = question_about([item("no {prompt}", "4", column=7)], term)
    assert question == "prompt|no {prompt}|4|7|{}"
    assert question_about([item("", "4", column=["é", date(2026, 1, 2)])], term) == 'prompt||4|["é", "2026-01-02"]|{}'
    assert judged({"judge": term}, "no {prompt}") == [(score_of(question) + 10) / 20]


@pytest.mark.parametrize(
    ("answer", "settings", "score"),
    [
        ('{"score": 3}, no: {"score": 4.5}', {}, 4.5),
        ('```json\n{"a": {"score": 1}, "score": 2}\n```', {}, 2.0),
        ('{"right": true}', {"score_field": "right"}, 1.0),
        ("Score: 3/10. Score: 4/10", {"score_pattern": r"Score: (\d+)"}, 4.0),
    ],
)
def test_scores_are_read(server: JudgeServer, answer: str, settings: dict[str, Any], score: float) -> None:
    term = judge(server, lowest=-5.0, highest=5.0, **settings)
    assert scores_in(answer, term, 1) == [pytest.approx((score + 5.0) / 10.0)]


def test_every_failure_has_its_reason_and_the_others_their_scores(server: JudgeServer) -> None:
    patient, slow = judge(server, timeout_s=30.0, max_in_flight=40), ("silent", "trickle")
    good = [f"good {number}" for number in range(8)]
    kinds = [kind for kind in FAILURES if kind not in slow]
    found = judged({"judge": patient}, *(f"fails:{kind}." for kind in kinds), *good)
    late = judged({"judge": judge(server, timeout_s=0.6)}, *(f"fails:{kind}." for kind in slow))
    for kind, said in zip([*slow, *kinds], [*late, *found], strict=False):
        assert isinstance(said, str) and said.startswith("judge: ") and FAILURES[kind] in said, (kind, said)
    assert found[len(kinds) :] == [score_of(question_about([item(one, "4")], patient)) / 10 for one in good]


def test_a_busy_server_is_asked_again_and_never_more_than_it_may_have(server: JudgeServer) -> None:
    with judge_server() as busy:
        busy.busy_once = True
        term = judge(busy, max_in_flight=2)
        found = judged({"judge": term}, "a", "b", "c")
        assert all(isinstance(score, float) for score in found)
        assert set(busy.asked.values()) == {2} and busy.most_at_once <= 2


def test_answers_are_asked_for_once_also_after_a_kill_and_failures_again(server: JudgeServer, tmp_path: Path) -> None:
    with judge_server() as counted:
        terms = {"judge": judge(counted, max_retries=0)}
        first = judged(terms, "a", "a", "b", "fails:404.", folder=tmp_path)
        assert sorted(counted.asked.values()) == [1, 1, 1]
        with (tmp_path / "rank-0.jsonl").open("a") as file:
            file.write('{"key": "cut by a k')
        assert judged(terms, "a", "b", "fails:404.", folder=tmp_path) == first[1:]
        assert sorted(counted.asked.values()) == [1, 1, 2]
        assert isinstance(judged(terms, "c", folder=tmp_path)[0], float)
        assert judged({"judge": judge(counted, temperature=0.5)}, "a", folder=tmp_path) == first[:1]
        assert sorted(counted.asked.values()) == [1, 1, 2, 2], "another question, because it is asked otherwise"
        (tmp_path / "rank-1.jsonl").write_text("{}\n")
        with pytest.raises(UserError, match=r"rank-1\.jsonl, line 1, is no answer"):
            Judges(terms, tmp_path)


def test_a_reward_has_the_parts_of_its_processes_and_judges(server: JudgeServer) -> None:
    cfg = RewardConfig.model_validate({"terms": [server.term(weight=2.0), {"kind": "exact"}]})
    with RewardClient(cfg, None) as client:  # type: ignore[arg-type]
        outcome = client.check(prompt())
        question = question_about([item_of(prompt(), "4")], cfg.judges["judge"])
        part = score_of(question) / 10
        assert outcome == RewardOutcome(reward=2 * part + 1, parts={"exact": 1.0, "judge": part})
        with pytest.raises(UserError, match="answers 404"):
            client.check(prompt(answer="fails:404."))


def test_an_episode_that_failed_is_not_judged_and_says_why(server: JudgeServer) -> None:
    tokenizer, cfg = byte_tokenizer(), RewardConfig.model_validate({"terms": [server.term()]})
    token_ids = tuple(encode_text(tokenizer, "4"))
    said = Response(token_ids=token_ids, logprobs=(0.0,) * len(token_ids), finish_reason="stop", spans=())
    with RewardClient(cfg, tokenizer) as client:
        whole, broken = (client.submit(one_turn(prompt(), said, failure=why)) for why in (None, "the game broke"))
        assert whole[1].result().parts.keys() == {"judge"}
        assert broken[1].result() == RewardOutcome(reward=0.0, parts={}, failure="the game broke")


def test_a_judge_whose_gate_is_closed_is_not_asked(server: JudgeServer) -> None:
    server.asked.clear()
    cfg = RewardConfig.model_validate({"terms": [server.term(gate="exact"), {"kind": "exact"}]})
    with RewardClient(cfg, None) as client:  # type: ignore[arg-type]
        wrong = item_of(prompt(), "5")
        outcome = client._judged(wrong, client._pool.submit(wrong)).result()  # type: ignore[union-attr]
        assert outcome == RewardOutcome(reward=0.0, parts={"exact": 0.0}) and not server.asked


@pytest.mark.parametrize("listing", LISTINGS)
def test_the_listings_of_the_page_ask_and_read(server: JudgeServer, listing: str) -> None:
    table = tomllib.loads(listing)["reward"]
    (term,) = RewardConfig.model_validate(table).judges.values()
    items = [item("4", "4"), item("5", "4")][: 1 if term.group is None else 2]
    assert "4" in question_about(items, term)
    said = {None: 1, "scores": [1, 0], "ranking": [1, 2]}[term.group]
    highest = 1.0 if term.group == "ranking" else 1.0 / term.highest
    assert scores_in(f'so {{"{term.field}": {json.dumps(said)}}}', term, len(items))[0] == highest


@pytest.mark.parametrize(
    ("group", "answer", "found"),
    [
        ("scores", '{"scores": [1, 2.5, 10]}', [0.1, 0.25, 1.0]),
        ("ranking", 'first {"ranking": [2, 3, 1]}', [0.0, 1.0, 0.5]),
        ("scores", '{"scores": [1, 2]}', "the judge's scores are [1, 2], and no list of 3"),
        ("scores", '{"scores": 7}', "the judge's scores are 7, and no list of 3"),
        ("scores", '{"scores": [1, 2, "x"]}', "the judge's score is 'x', and no number"),
        ("scores", '{"scores": [1, 2, 11]}', "the judge's score is 11, not from 0 to 10"),
        ("ranking", '{"ranking": [1, 1, 2]}', "and not each of the numbers 1 to 3 once"),
        ("ranking", '{"ranking": [1, 2, {}]}', "and not each of the numbers 1 to 3 once"),
        ("ranking", "1, 2, 3", 'no JSON object with "ranking"'),
    ],
)
def test_what_is_said_of_a_group_is_read(
    server: JudgeServer, group: str, answer: str, found: list[float] | str
) -> None:
    term = judge(server, group=group)
    assert "Response 2:\nb\n" in question_about([item("a"), item("b"), item("c")], term)
    if isinstance(found, list):
        assert scores_in(answer, term, 3) == found
        assert group == "scores" or scores_in('{"ranking": [1]}', term, 1) == [0.5], "all others have failed"
    else:
        with pytest.raises(ValueError, match=re.escape(found)):
            scores_in(answer, term, 3)


def test_a_group_is_asked_about_once_and_fails_as_one(server: JudgeServer, tmp_path: Path) -> None:
    """Four groups are judged: one that is scored, one whose judgment fails, one with a response whose gate is closed,
    and one whose other rewards have failed."""
    texts = ["a", "b"], ["c", "fails:no_score."], ["right", "wrong"], ["d", "e"]
    tokenizer = byte_tokenizer()
    rollouts = [
        rollout_of(n, place, encode_text(tokenizer, text))
        for n, pair in enumerate(texts)
        for place, text in enumerate(pair)
    ]
    exact = {
        text: RewardOutcome(reward=1.0, parts={"exact": float(text != "wrong")}) for pair in texts for text in pair
    }
    exact["d"] = exact["e"] = RewardOutcome(reward=0.0, parts={}, failure="timeout")
    with judge_server() as counted:
        gated = counted.term(group="scores", gate="exact", max_retries=0)
        cfg = RewardConfig.model_validate({"terms": [{"kind": "exact"}, gated]})
        with RewardClient(cfg, tokenizer, judged=tmp_path) as client:
            known = [known_reward(rollout, exact[text]) for rollout, text in zip(rollouts, chain(*texts), strict=True)]
            outcomes = [outcome for _, outcome in client.collect(client.complete(known))]
        assert len(counted.asked) == 3
        (alone,) = (question for _, question in counted.asked if "Response 1:\nright" in question)
        assert "Response 2" not in alone
    scores = [outcome.parts.get("judge") for outcome in outcomes]
    assert None not in scores[:2] and scores[0] != scores[1] and scores[4] is not None
    assert scores[2:4] == [None, None] and scores[5:] == [None] * 3
    assert outcomes[0].reward == 1.0 + outcomes[0].parts["judge"]
    reasons = [outcome.failure for outcome in outcomes]
    assert reasons[2] == reasons[3] and 'judge: the judge\'s answer has no JSON object with "scores"' in str(reasons[2])
    assert reasons[6:] == ["timeout"] * 2 and reasons[:2] == reasons[4:6] == [None, None]


def rollout_of(prompt_id: int, sample_index: int, token_ids: tuple[int, ...]) -> Rollout:
    response = Response(token_ids=token_ids, logprobs=(), finish_reason="stop", spans=())
    return one_turn(prompt(prompt_id=prompt_id), response, sample_index=sample_index)


class Echo(RolloutEngine):
    """Answers with the score that follows from the question, and counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(torch.device("cpu"))
        self.version, self.asked, self._tokenizer = 0, list[Request](), tokenizer

    def load(self, number: int) -> None: ...

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        for place, request in enumerate(requests):
            assert request is not None
            self.asked.append(request)
            question = decode(self._tokenizer, request.prompt_ids)
            count = question.count("Response ")
            said = f'"scores": {each_of(question, count)}' if count else f'"score": {score_of(question)}'
            token_ids = encode_text(self._tokenizer, f"{{{said}}}")
            yield place, Response(token_ids=token_ids, logprobs=(), finish_reason="stop", spans=())


def each_of(question: str, count: int) -> list[int]:
    """The scores of a group that follow from the question about it, as `JudgeServer` gives them."""
    return [(score_of(question) + 3 * place) % 11 for place in range(count)]


def test_judges_of_groups_and_the_policy_judge_together() -> None:
    """A group that one of them fails is not shown to the next."""
    tokenizer, texts = byte_tokenizer(), (["a", "b"], ["c", "fails:no_score."])
    rollouts = [
        rollout_of(n, place, encode_text(tokenizer, text))
        for n, pair in enumerate(texts)
        for place, text in enumerate(pair)
    ]
    policy = {"kind": "judge", "url": "policy", "max_question_tokens": 200}
    whole, alone = {"group": "scores", "template": "All: {responses}"}, {"template": "One: {response}", "weight": 0.5}
    with judge_server() as counted:
        terms = [counted.term(group="scores", max_retries=0), policy | whole, policy | alone]
        reward = RewardConfig.model_validate({"terms": terms})
        cfg = _config(reward, data=DataConfig.model_construct(), run=SimpleNamespace(seed=3))
        engine = Echo(tokenizer)
        with RewardClient(reward, tokenizer) as client:
            judge = PolicyJudge(engine, tokenizer, frozenset({7}), cfg, None, partial(decode, tokenizer))
            pending = client.complete([client.submit(rollout) for rollout in rollouts], judge)
            outcomes = [outcome for _, outcome in client.collect(pending)]
    items = [item_of(prompt(), text) for text in texts[0]]
    first, second, third = reward.judges.values()
    server, group = (each_of(question_about(items, term), 2) for term in (first, second))
    for place, outcome in enumerate(outcomes[:2]):
        one = score_of(question_about([items[place]], third))
        parts = {"judge": server[place] / 10, "judge_2": group[place] / 10, "judge_3": one / 10}
        assert outcome.parts == parts and outcome.failure is None
        assert outcome.reward == parts["judge"] + parts["judge_2"] + 0.5 * parts["judge_3"]
    assert {outcome.failure for outcome in outcomes[2:]} == {
        "judge: the judge's answer has no JSON object with \"scores\": it ends 'Good.'"
    }
    assert len(engine.asked) == 3


def test_the_policy_is_asked_once_by_each_of_its_versions(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    table = {"kind": "judge", "url": "policy", "template": "Is it right? {response}", "max_question_tokens": 30}
    reward = RewardConfig.model_validate({"terms": [table]})
    (term,), cfg = (
        reward.judges.values(),
        _config(reward, data=DataConfig.model_construct(), run=SimpleNamespace(seed=3)),
    )
    assert reward.max_judged_tokens == 30 + 1024
    questions = ["a", "b", "a", "c" * 31]

    def ask(engine: Echo) -> list[str | ValueError]:
        said = Cache(tmp_path)
        progress: list[int] = []
        before = len(engine.asked)

        def read(token_ids: tuple[int, ...]) -> str:
            progress.append(1)
            return decode(tokenizer, token_ids)

        judge = PolicyJudge(engine, tokenizer, frozenset({7}), cfg, said, read)
        found = judge(term, questions)
        said.close()
        assert len(progress) == len(engine.asked) - before, "each answer is progress"
        return found

    engine = Echo(tokenizer)
    first = ask(engine)
    assert str(first[3]) == "the question has 31 tokens, beyond max_question_tokens = 30" and first[0] == first[2]
    assert first[:2] == [f'{{"score": {score_of(question)}}}' for question in questions[:2]]
    assert len(engine.asked) == 2 and len({request.seed for request in engine.asked}) == 2
    assert {(request.max_response_tokens, request.temperature) for request in engine.asked} == {(1024, 0.0)}
    assert ask(engine)[:3] == first[:3] and len(engine.asked) == 2, "a run that goes on asks nothing twice"
    engine.version = 1
    assert ask(engine)[:3] == first[:3] and len(engine.asked) == 4, "other weights may say something else"
    cfg = _config(reward, data=cfg.data, run=cfg.run, optim=SimpleNamespace(lr=1.0))
    assert ask(engine)[:3] == first[:3] and len(engine.asked) == 6, "so may a version 1 of other settings"
    assert engine.asked[4:] == engine.asked[2:4]


def test_closing_ends_what_is_asked(server: JudgeServer) -> None:
    async def never() -> None:
        await asyncio.sleep(1000.0)

    with Judges({"judge": judge(server)}) as judges:
        asked = judges.submit(never())
    assert asked.cancelled()


def prompt(answer: str = "4", prompt_id: int = 0) -> Prompt:
    return Prompt(prompt_id=prompt_id, text="2 + 2", token_ids=(1,), answer=answer, task="sums", metadata={})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, "reward.terms.1: the judge's server at http://127.0.0.1:9/v1 does not"),
        ({"template": "{response} fails:words."}, "reward.terms.1: the judge's score is 'high'"),
        ({"template": "{response} {strange}"}, "reward.terms.1: its template has {strange}, which this prompt has not"),
        ({"group": "ranking", "template": "{responses} fails:no_score."}, "reward.terms.1: the judge's answer has no"),
        ({"api_key_variable": "NO_SUCH_KEY"}, 'reward.terms.1: api_key_variable = "NO_SUCH_KEY", and there is no such'),
    ],
)
def test_a_run_begins_with_a_first_question(server: JudgeServer, settings: dict[str, Any], reason: str) -> None:
    term = server.term(**({"rubric": None} if "template" in settings else {}), **settings)
    reward = RewardConfig.model_validate({"terms": [{"kind": "exact"}, term]})
    found: list[str] = []
    try:
        first = SimpleNamespace(take=lambda *_: [prompt()])
        found += judge_problems(_config(reward), None, first)  # type: ignore[arg-type]
    except UserError as error:
        found.append(str(error))
    (sentence,) = found
    assert sentence.startswith(reason) and "\n" not in sentence


def _config(reward: RewardConfig, **tables: Any) -> Any:
    return Config.model_construct(reward=reward, debug=DebugConfig(), **tables)
