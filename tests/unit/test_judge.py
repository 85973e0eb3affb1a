"""Judges: what they are asked and say, every way in which they fail, and that answers are asked for once."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.config import RewardConfig
from spmdrl.config.rewards import JudgeReward
from spmdrl.preflight.reward_models import judge_problems
from spmdrl.rewards.client import RewardClient, item_of
from spmdrl.rewards.judge import Judges, question_about, score_in
from spmdrl.types import Prompt, RewardOutcome, UserError
from tests.helpers.judges import FAILURES, JudgeServer, judge_server, score_of
from tests.helpers.rewards import item

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
    question = question_about(item("no {prompt}", "4", column=7), term)
    assert question == "prompt|no {prompt}|4|7|{}"
    assert question_about(item("", "4", column=["é", date(2026, 1, 2)]), term) == 'prompt||4|["é", "2026-01-02"]|{}'
    assert judged({"judge": term}, "no {prompt}") == [(score_of(question) + 10) / 20]


@pytest.mark.parametrize(
    ("answer", "settings", "score"),
    [
        ('{"score": 3}, no: {"score": 4.5}', {}, 4.5),
        ('```json\n{"a": {"score": 1}, "score": 2}\n```', {}, 2.0),
        ('{"right": true}', {"score_field": "right"}, 1.0),
        ("Score: 3/10. Score: 7/10", {"score_pattern": r"Score: (\d+)"}, 7.0),
    ],
)
def test_scores_are_read(server: JudgeServer, answer: str, settings: dict[str, Any], score: float) -> None:
    assert score_in(answer, judge(server, **settings)) == score


def test_every_failure_has_its_reason_and_the_others_their_scores(server: JudgeServer) -> None:
    patient, slow = judge(server, timeout_s=30.0, max_in_flight=40), ("silent", "trickle")
    good = [f"good {number}" for number in range(8)]
    kinds = [kind for kind in FAILURES if kind not in slow]
    found = judged({"judge": patient}, *(f"fails:{kind}." for kind in kinds), *good)
    late = judged({"judge": judge(server, timeout_s=0.6)}, *(f"fails:{kind}." for kind in slow))
    for kind, said in zip([*slow, *kinds], [*late, *found], strict=False):
        assert isinstance(said, str) and said.startswith("judge: ") and FAILURES[kind] in said, (kind, said)
    assert found[len(kinds) :] == [score_of(question_about(item(one, "4"), patient)) / 10 for one in good]


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
        question = question_about(item_of(prompt(), "4"), cfg.judges["judge"])
        part = score_of(question) / 10
        assert outcome == RewardOutcome(reward=2 * part + 1, parts={"exact": 1.0, "judge": part})
        with pytest.raises(UserError, match="answers 404"):
            client.check(prompt(answer="fails:404."))


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
    assert "4" in question_about(item("4", "4"), term)
    assert score_in(f'so {{"{term.score_field}": 1}}', term) == 1.0


def test_closing_ends_what_is_asked(server: JudgeServer) -> None:
    async def never() -> None:
        await asyncio.sleep(1000.0)

    with Judges({"judge": judge(server)}) as judges:
        asked = judges.submit(never())
    assert asked.cancelled()


def prompt(answer: str = "4") -> Prompt:
    return Prompt(prompt_id=0, text="2 + 2", token_ids=(1,), answer=answer, task="sums", metadata={})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, "reward.terms.1: the judge's server at http://127.0.0.1:9/v1 does not"),
        ({"template": "{response} fails:words."}, "reward.terms.1: the judge's score is 'high'"),
        ({"template": "{response} {strange}"}, "reward.terms.1: its template has {strange}, which this prompt has not"),
        ({"api_key_variable": "NO_SUCH_KEY"}, 'reward.terms.1: api_key_variable = "NO_SUCH_KEY", and there is no such'),
    ],
)
def test_a_run_begins_with_a_first_question(server: JudgeServer, settings: dict[str, Any], reason: str) -> None:
    term = server.term(**({"rubric": None} if "template" in settings else {}), **settings)
    reward = RewardConfig.model_validate({"terms": [{"kind": "exact"}, term]})
    found: list[str] = []
    try:
        found += judge_problems(_config(reward), SimpleNamespace(take=lambda *_: [prompt()]))  # type: ignore[arg-type]
    except UserError as error:
        found.append(str(error))
    (sentence,) = found
    assert sentence.startswith(reason) and "\n" not in sentence


def _config(reward: RewardConfig) -> Any:
    from spmdrl.config import Config, DebugConfig

    return Config.model_construct(reward=reward, debug=DebugConfig())
