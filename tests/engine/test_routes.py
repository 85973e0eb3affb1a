"""SGLang reports the experts that the trainer would choose, also after a cached prefix and for a later turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmdrl.config import CorrectionConfig
from spmdrl.model.routes import Routers
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import Sequence, Trajectory, Turn
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import save_qwen3_moe
from tests.helpers.sglang_engine import answers, greedy, prompts, rank_with_engine, settings

SAID = (3, 4, 5)  # after the first response


def agreement(path: str) -> tuple[int, int]:
    """Over two turns of each conversation: (experts of all tokens but the last, those that the trainer chooses too)."""
    cfg = settings(path, 1).model_copy(update={"correction": CorrectionConfig(router_replay="R3")})
    with rank_with_engine(cfg) as rank:
        rank.policy.routers = Routers(rank.policy.model)
        rank.refit(version=0)
        first = [replace(greedy(ids, 12), routes_from=0) for ids in prompts(8)]
        begun = answers(rank.engine, first)
        ends = [response.routes.end for response in begun if response.routes is not None]
        second = [
            replace(greedy(request.prompt_ids + response.token_ids + SAID, 12), routes_from=end)
            for request, response, end in zip(first, begun, ends, strict=True)
        ]
        turns = zip(first, begun, answers(rank.engine, second), strict=True)
        sequences = []
        for index, (request, one, other) in enumerate(turns):
            both = (Turn(context_ids=request.prompt_ids, response=one), Turn(context_ids=SAID, response=other))
            whole = Trajectory(turns=both)
            sequences.append(
                Sequence(
                    index=index,
                    token_ids=whole.token_ids,
                    loss_mask=whole.trained,
                    rollout_logprobs=whole.logprobs,
                    reward=0.0,
                    routes=whole.routes,
                )
            )
        micro_batch = lay_end_to_end(sequences, {})
        assert micro_batch.routes is not None
        with torch.no_grad():
            rank.policy(replace(micro_batch, routes=None))
        own, reported = rank.policy.own_routes(micro_batch), micro_batch.routes
        known = (reported >= 0).all(-1).all(-1)
        assert int(known.sum()) == sum(len(sequence.token_ids) - 1 for sequence in sequences)
        equal = own[known].sort(-1).values == reported[known].sort(-1).values
        return equal.numel(), int(equal.sum())


@pytest.mark.slow
def test_sglang_reports_the_routes_that_the_trainer_chooses(tmp_path: Path) -> None:
    ((num_chosen, num_equal),) = run_engine_ranks(1, agreement, save_qwen3_moe(tmp_path))
    assert num_chosen == num_equal > 900
