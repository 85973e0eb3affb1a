"""Rules between `[data.curriculum]` and other tables: a curriculum has a signal, and something to choose from."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.curriculum import CurriculumConfig
from spmdrl.config.data import FileData, HeldOutPromptsConfig, ReasoningGymData
from spmdrl.config.whole import Config, SftConfig


@rule(SftConfig)
def curricula_need_rewards(cfg: SftConfig) -> Iterator[str]:
    if cfg.data.curriculum is not None:
        yield (
            "data.curriculum chooses prompts by success rates, and fine-tuning samples nothing; remove it, or set "
            "data.sources.0.order_column for an order of rows"
        )


@rule(Config)
def curricula_have_a_signal(cfg: Config) -> Iterator[str]:
    curriculum = cfg.data.curriculum
    if curriculum is None:
        return
    name, size = f'data.curriculum.kind = "{curriculum.kind}"', cfg.rollout.group_size
    if cfg.reward.group_terms:
        place, term = next(iter(cfg.reward.group_terms.items()))
        yield (
            f'reward.terms.{place}.kind = "{term.kind}" scores when a step has its groups, so that no success rate is '
            "known by which data.curriculum could choose; remove one of them"
        )
    elif not any(term.weight > 0 for term in cfg.reward.terms):
        yield "data.curriculum chooses by success rates, and no reward.terms says what a success is; add a term"
    if cfg.debug.load_rollouts is not None:
        yield "data.curriculum chooses what is sampled, and debug.load_rollouts samples nothing; remove one of them"
    if cfg.rollout.oldest_first:
        yield (
            "data.curriculum passes over prompts, and rollout.partial = true without oversample_fraction trains on "
            "prompts in the order of the stream; set partial = false, or oversample_fraction"
        )
    if curriculum.needs_repeats and all(isinstance(source, ReasoningGymData) for source in cfg.data.sources):
        yield (
            f"{name} compares prompts with their last success rate, and prompts of reasoning-gym never come again; use "
            "gates between sources, or prompts from files"
        )
    if curriculum.kind == "learnability" and size == 1:
        yield f"{name} has no signal with rollout.group_size = 1, where p(1 - p) is always 0; raise group_size"
    yield from _empty_band(curriculum, size)


def _empty_band(curriculum: CurriculumConfig, size: int) -> Iterator[str]:
    """Yield a sentence when no number of right responses of a group gives a rate in the band."""
    if curriculum.kind == "band" and not any(
        curriculum.low <= right / size <= curriculum.high for right in range(size + 1)
    ):
        yield (
            f"data.curriculum: no success rate of rollout.group_size = {size} responses lies from low = "
            f"{curriculum.low:g} to high = {curriculum.high:g}; widen the band, or raise group_size"
        )


@rule(Config)
def gates_name_sources(cfg: Config) -> Iterator[str]:
    tasks = [source.task for source in cfg.data.sources]
    for place, gate in enumerate(cfg.data.curriculum.gates if cfg.data.curriculum else ()):
        for setting in ("opens", "after"):
            if (task := getattr(gate, setting)) not in tasks:
                yield (
                    f'data.curriculum.gates.{place}.{setting} = "{task}" is the task of no source of data.sources; '
                    f"there are {', '.join(dict.fromkeys(tasks))}"
                )


@rule(HeldOutPromptsConfig)
def held_out_rows_have_no_order(held_out: HeldOutPromptsConfig) -> Iterator[str]:
    for place, source in enumerate(held_out.sources):
        if isinstance(source, FileData) and source.order_column is not None:
            yield f"sources.{place}.order_column has no meaning for held-out prompts, which are drawn; remove it"
