"""The rollouts of a step or an evaluation that are shown: a few groups, spread over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from spmdrl.config import ReportConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.report.samples import answer_row, sample_rows
from spmdrl.types import RewardedRollout, RewardOutcome, Rollout


def gather_samples(
    rewarded: Sequence[RewardedRollout],
    advantages: Mapping[int, float],
    tokenizer: PreTrainedTokenizerBase,
    cfg: ReportConfig,
    mesh: DeviceMesh,
) -> list[dict[str, Any]]:
    """Return rows of one rollout of each chosen group, or of all its rollouts: the same on every rank.

    Every rank of the mesh must call this. Only chosen rows travel: their bytes do not grow with the number of ranks.
    """
    groups: dict[int, list[RewardedRollout]] = {}
    for item in rewarded:
        groups.setdefault(item.rollout.prompt.prompt_id, []).append(item)
    places = chosen(gather_objects(mesh, len(groups)), cfg.samples_per_step)[mesh.get_local_rank()]
    own = list(groups.values())
    shown = [item for place in places for item in (own[place] if cfg.whole_groups else own[place][:1])]
    return [row for rows in gather_objects(mesh, sample_rows(shown, advantages, tokenizer)) for row in rows]


def gather_answers(
    outcomes: Iterable[tuple[Rollout, RewardOutcome]],
    tokenizer: PreTrainedTokenizerBase,
    cfg: ReportConfig,
    mesh: DeviceMesh,
    *,
    num_prompts: int,
) -> list[dict[str, Any]]:
    """Return rows of the answers to the chosen ones of `num_prompts` held-out prompts, in their order: the same on
    every rank, for any number of ranks. Every rank of the mesh must call this."""
    (shown,) = chosen([num_prompts], cfg.eval_samples)
    rows = [
        answer_row(rollout, outcome, tokenizer)
        for rollout, outcome in outcomes
        if rollout.prompt.prompt_id in shown and (cfg.whole_groups or rollout.sample_index == 0)
    ]
    gathered = [row for rows in gather_objects(mesh, rows) for row in rows]
    return sorted(gathered, key=lambda row: (row["prompt_id"], row["sample_index"]))


def chosen(counts: Sequence[int], limit: int) -> list[list[int]]:
    """Choose at most `limit` things, at equal distances, of those that ranks have `counts` of; returns the places of
    the chosen ones among each rank's own."""
    total = sum(counts)
    picked = [number * total // min(limit, total) for number in range(min(limit, total))]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [
        [place - start for place in picked if start <= place < start + count]
        for start, count in zip(starts, counts, strict=True)
    ]
