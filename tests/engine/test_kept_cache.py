"""SGLang goes on from keys and values of older weights, with the rest of their own responses and for some versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import Config
from spmdrl.types import Request, Response
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import save_qwen3
from tests.helpers.sglang_engine import (
    answers,
    change,
    greedy,
    prompts,
    rank_with_engine,
    settings,
    trainer_logprobs,
    worst_difference,
)

NUM_TOKENS = 80


def request_with(request: Request, seed: int) -> Request:
    return replace(request, seed=seed)


def interrupted_over_refits(path: str, kept: str) -> dict[str, Any]:
    """Cut eight responses, go on after one refit and after two more; ask the same prompts from their beginning too."""
    values = settings(path, 1).model_dump()
    rollout = values["rollout"] | {"partial": True, "max_staleness": 1, "cache_after_refit": kept}
    cfg = Config.model_validate(values | {"rollout": rollout, "offload": {"engine": []}})
    asked = [greedy(ids + (9,) * 8, NUM_TOKENS) for ids in prompts(8)]
    with rank_with_engine(cfg) as rank:

        def cut() -> list[Response]:
            found: dict[int, Response] = {}
            for index, answer in rank.engine.generate([greedy((5, 6, 7), 20), *asked]):
                found[index] = answer
                if index == 0:
                    rank.engine.abort()
            return [found[i + 1] for i in range(len(asked))]

        def rest(parts: list[Response]) -> list[Response]:
            cut_ones = [
                greedy(request.prompt_ids, NUM_TOKENS, after=part.token_ids)
                for request, part in zip(asked, parts, strict=True)
            ]
            return answers(rank.engine, [request_with(one, seed) for seed, one in enumerate(cut_ones)])

        found: dict[str, Any] = {}
        asked = [request_with(one, seed) for seed, one in enumerate(asked)]
        rank.refit(version=0)
        rank.engine.wake()
        parts = cut()
        rank.engine.sleep()
        change(rank.policy, 0.02)
        rank.refit(version=1)
        rank.engine.wake()
        fresh = answers(rank.engine, [request_with(one, 100 + one.seed) for one in asked])
        found["fresh"] = worst_difference(rank, asked, fresh)
        ends = rest(parts)
        wholes = [part.continued(end) for part, end in zip(parts, ends, strict=True)]
        ids = [request.prompt_ids + whole.token_ids for request, whole in zip(asked, wholes, strict=True)]
        forwards = trainer_logprobs(rank.policy, ids)
        found["mismatch"] = max(
            float(abs(forward[-len(end.token_ids) + i] - end.logprobs[i]))
            for forward, end in zip(forwards, ends, strict=True)
            for i in range(len(end.token_ids))
        )
        found["versions"] = {tuple(span.version for span in whole.spans) for whole in wholes}
        found["lengths"] = {len(whole.token_ids) for whole in wholes}
        read = [len(r.prompt_ids) + len(p.token_ids) for r, p in zip(asked, parts, strict=True)]
        found["uncached"] = max(n - end.num_cached for n, end in zip(read, ends, strict=True))
        for version in (2, 3):
            rank.refit(version=version)
        found["too old"] = max(end.num_cached for end in rest(parts))
        found["changed"] = rank.changed()
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kept_keys_serve_the_rest_of_their_responses_alone_and_not_for_ever(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    by_setting = {}
    for kept in ("keep", "recompute"):
        (found,) = run_engine_ranks(1, interrupted_over_refits, str(tmp_path), kept)
        assert found["versions"] == {(0, 1)} and found["lengths"] == {NUM_TOKENS}
        assert found["fresh"] < 1e-5, "what older weights have read must not serve requests of newer ones"
        assert found["too old"] <= 1
        by_setting[kept] = found
    assert by_setting["keep"]["uncached"] <= 2, "only the newest token is read"
    assert by_setting["recompute"]["uncached"] > 8
    assert by_setting["recompute"]["mismatch"] < 1e-5 < by_setting["keep"]["mismatch"]
