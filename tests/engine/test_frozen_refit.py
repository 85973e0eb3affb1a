"""Refits of SGLang without the frozen part of a model: it keeps that, and is told everything again when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmdrl.model.policy import Policy
from spmdrl.model.sharding import reshard
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import save_qwen3
from tests.helpers.sglang_engine import answers, greedy, prompts, rank_with_engine, settings
from tests.helpers.sglang_engine import trainer_logprobs as logprobs_of

FREEZE = ("layers.0.*", "embed_tokens.weight", "layers.1.self_attn.v_proj.weight")


@torch.no_grad()
def change_trained(policy: Policy) -> None:
    """Change every weight that is trained, as an update would."""
    reshard(policy)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.to_local().mul_(1.01).add_(0.001)


def _refitted(path: str) -> tuple[list[int], list[float]]:
    """The buckets that each of four refits sends, and how far engine and trainer are apart after each."""
    cfg = settings(path, 1, refit={"verify": "every"})
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"freeze": FREEZE})})
    with rank_with_engine(cfg) as rank:
        counts, distances = [], []
        begin = rank.engine.begin_update

        def counted(buckets, buffers, *, version):  # type: ignore[no-untyped-def]
            counts.append(len(buckets))
            begin(buckets, buffers, version=version)

        rank.engine.begin_update = counted  # type: ignore[method-assign]
        for version in range(4):
            rank.refit(version=version)
            rank.engine.wake()
            asked = [greedy(ids, 8) for ids in prompts(3)]
            told = answers(rank.engine, asked)
            expected = logprobs_of(rank.policy, [r.prompt_ids + a.token_ids for r, a in zip(asked, told, strict=True)])
            distances.append(
                max(
                    float((torch.tensor(answer.logprobs) - x[len(request.prompt_ids) - 1 :]).abs().max())
                    for request, answer, x in zip(asked, told, expected, strict=True)
                )
            )
            change_trained(rank.policy)
            if version == 2:
                rank.engine.sleep()  # and give the weights back
        return counts, distances


@pytest.mark.slow
def test_sglang_keeps_what_is_frozen(tmp_path: Path) -> None:
    ((counts, distances),) = run_engine_ranks(1, _refitted, save_qwen3(tmp_path))
    everything, without, again, after_sleep = counts
    assert without == again < everything == after_sleep
    assert max(distances) < 1e-5
