"""The rollouts of a step or an evaluation that are shown: a few groups, spread over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from spmdrl.algo.metrics import Mean, Metrics, Total, Values
from spmdrl.config import ReportConfig
from spmdrl.conversation import Observation
from spmdrl.dist.collectives import gather_objects
from spmdrl.report.samples import rollout_row, sample_rows
from spmdrl.types import EpisodeEnd, RewardedRollout, RewardOutcome, Rollout, Turn

# Metrics of episodes, which are rollouts that had an environment.


ENDS: tuple[str, ...] = tuple(end for end in get_args(EpisodeEnd) if end != "abort")


def episode_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Metrics of the episodes among this rank's rollouts; none where no rollout had an environment."""
    episodes = [rollout for rollout in rollouts if _had_environment(rollout)]
    if not episodes:
        return {}
    turns = [_turns(rollout) for rollout in episodes]
    actions = [turn.action for of_episode in turns for turn in of_episode if turn.action is not None]
    observations = [rollout.observations for rollout in episodes]
    errors = sum(observation.tool_errors for of_episode in observations for observation in of_episode)
    later = [turn for rollout in episodes for one in rollout.trajectories for turn in one.turns[1:]]
    rewritten = [turn for rollout in episodes for turn in rollout.turns if turn.replaced_tokens]
    metrics: Metrics = {
        "episode/turns": Values(tuple(float(len(of_episode)) for of_episode in turns)),
        "episode/trajectories": Mean.of(float(len(rollout.trajectories)) for rollout in episodes),
        "episode/context_tokens": Mean.of(float(len(turn.context_ids)) for turn in later),
        "episode/tool_calls": Mean(float(sum(len(action.tool_calls) for action in actions)), float(len(episodes))),
        "episode/tool_errors_count": Total(float(errors)),
        "episode/malformed_calls_count": Total(float(sum(action.malformed is not None for action in actions))),
        "episode/failed_count": Total(float(sum(map(_has_failed, episodes)))),
        "episode/masked_fraction": Mean.of(float(rollout.is_masked) for rollout in episodes),
        "episode/compactions": Mean(float(len(rewritten)), float(len(episodes))),
    }
    if rewritten:
        metrics["episode/compacted_from_tokens"] = Mean.of(float(turn.replaced_tokens) for turn in rewritten)
        metrics["episode/compacted_to_tokens"] = Mean.of(float(len(turn.context_ids)) for turn in rewritten)
    return metrics | _end_fractions(episodes, "episode") | _environments_own(observations, "environment/")


def cached_fraction(rollouts: Iterable[Rollout]) -> Mean:
    """The share of the tokens before responses that engines had in their caches, or read once for a whole group."""
    cached = read = 0
    for trajectory in (trajectory for rollout in rollouts for trajectory in rollout.trajectories):
        for turn, start in zip(trajectory.turns, trajectory.starts, strict=False):
            cached += turn.response.num_cached
            read += start + len(turn.context_ids)
    return Mean(float(cached), float(read))


def held_out_episode_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Metrics of the episodes of an evaluation; none where no rollout had an environment."""
    episodes = [rollout for rollout in rollouts if _had_environment(rollout)]
    if not episodes:
        return {}
    metrics: Metrics = {
        "eval/turns": Mean.of(float(len(_turns(rollout))) for rollout in episodes),
        "eval/failed_count": Total(float(sum(map(_has_failed, episodes)))),
    }
    own = _environments_own([rollout.observations for rollout in episodes], "eval/environment_")
    return metrics | _end_fractions(episodes, "eval") | own


def _end_fractions(episodes: Sequence[Rollout], area: str) -> Metrics:
    # Of every end, also of one that this rank has not seen: its episodes count among those of all ranks.
    return {f"{area}/end_{end}_fraction": Mean.of(float(rollout.end == end) for rollout in episodes) for end in ENDS}


def _environments_own(observations: Iterable[Sequence[Observation]], prefix: str) -> Metrics:
    """The means over episodes of what environments measured: of each number the last that an episode reported."""
    reported: dict[str, list[float]] = {}
    for of_episode in observations:
        last = {name: value for observation in of_episode for name, value in observation.metrics.items()}
        for name, value in last.items():
            reported.setdefault(name, []).append(value)
    return {f"{prefix}{name}": Mean.of(values) for name, values in sorted(reported.items())}


def _had_environment(rollout: Rollout) -> bool:
    return rollout.initial_observation is not None or rollout.failure is not None


def _has_failed(rollout: Rollout) -> bool:
    """True where the environment has; a summary that is of no use is the policy's own."""
    return rollout.failure is not None and rollout.end != "summary"


def _turns(rollout: Rollout) -> list[Turn]:
    """The turns in which the policy sampled something for its environment."""
    return [turn for turn in rollout.turns if turn.response.token_ids and not turn.is_summary]


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
        rollout_row(rollout, outcome, tokenizer)
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
