"""Rules about the algorithms of data sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spmdrl.config.base import problems, rule
from spmdrl.config.data import FileSettings, ReasoningGymData
from spmdrl.config.source_algorithm import OTHER_SOURCES, Algorithm, SourceAlgorithm, override_problems
from spmdrl.config.whole import Config, SftConfig
from spmdrl.types import NO_TEACHER

_Source = FileSettings | ReasoningGymData


def _tables(sources: Iterable[_Source], name: str = "data.sources") -> Iterator[tuple[str, str, SourceAlgorithm]]:
    """Yield the name, the source's task and the table of each algorithm among sources."""
    for place, source in enumerate(sources):
        if (own := getattr(source, "algorithm", None)) is not None:
            yield f"{name}.{place}.algorithm", source.task, own


@rule(Config)
def settings_of_sources_are_in_order(cfg: Config) -> Iterator[str]:
    run = Algorithm(cfg.advantage, cfg.loss, cfg.correction)
    for table, _, own in _tables(cfg.data.sources):
        yield from (f"{table}.{sentence}" for sentence in override_problems(own, run))


@rule(Config)
def a_task_has_one_algorithm(cfg: Config) -> Iterator[str]:
    of_task = {source.task: source.algorithm for source in reversed(cfg.data.sources)}
    for place, source in enumerate(cfg.data.sources):
        if source.algorithm != of_task[source.task]:
            yield (
                f"data.sources.{place}.algorithm is another than that of a source before it, and both have the task "
                f'"{source.task}", by which rollouts know their algorithm; give one a task of its own'
            )


@rule(Config)
def the_others_have_a_name_in_metrics(cfg: Config) -> Iterator[str]:
    for table, task, _ in _tables(cfg.data.sources):
        if task == OTHER_SOURCES:
            yield (
                f'{table}: metrics call the sources without an algorithm of their own "{OTHER_SOURCES}", and this one '
                "has that task; give it another"
            )


@rule(Config)
def held_out_sources_have_no_algorithm(cfg: Config) -> Iterator[str]:
    for table, _, _ in _tables(cfg.eval.sources if cfg.eval else (), "eval.sources"):
        yield f"{table} has no meaning: nothing is trained on held-out prompts; remove it"


@rule(SftConfig)
def recorded_sources_have_no_algorithm(cfg: SftConfig) -> Iterator[str]:
    for name, sources in (("data", cfg.data.sources), ("held_out", cfg.held_out.sources if cfg.held_out else ())):
        for table, _, _ in _tables(sources, f"{name}.sources"):
            yield f"{table} has no meaning: [sft] imitates the responses of all sources alike; remove it"


@rule(Config)
def what_is_sampled_or_valued_is_for_all(cfg: Config) -> Iterator[str]:
    run, *own = cfg.algorithms
    for table, task, _ in _tables(cfg.data.sources):
        (one,) = (one for one in own if one.name == task)
        estimator, setting = f'advantage.estimator = "{one.advantage.estimator}"', f"{table}.advantage"
        needs = {"values": "a critic, which learns from", "greedy_rewards": "a greedy response to"}
        for column, what in needs.items():
            has = [column in settings.formula.needs for settings in (run.advantage, one.advantage)]
            if any(has) and (not all(has) or run.advantage.settings != one.advantage.settings):
                whose = estimator if has[1] else f'advantage.estimator = "{run.advantage.estimator}"'
                yield (
                    f"{setting}: {whose} needs {what} all prompts, so that it cannot be the estimator of some sources "
                    "only, nor have other settings there; set one that does not in both, or the same in both"
                )


@rule(Config)
def one_coefficient_follows_the_entropy(cfg: Config) -> Iterator[str]:
    for table, _, own in _tables(cfg.data.sources):
        if "entropy_coef" in own.loss and cfg.loss.entropy_target_nats is not None:
            yield (
                f"{table}.loss.entropy_coef cannot differ between sources: with loss.entropy_target_nats it follows "
                "the entropy of all of them; remove one of the two"
            )


@rule(Config)
def sources_keep_the_rules_of_a_run(cfg: Config) -> Iterator[str]:
    tables = [*_tables(cfg.data.sources)]
    run, *own = cfg.algorithms
    if not tables or [*what_is_sampled_or_valued_is_for_all(cfg)]:
        return
    known = {*problems(_alone(cfg, run))}
    for table, task, _ in tables:
        (one,) = (one for one in own if one.name == task)
        yield from (f"{table}: {sentence}" for sentence in problems(_alone(cfg, one)) if sentence not in known)
        is_untaught = cfg.distill is not None and cfg.distill.teacher_of(task) == NO_TEACHER
        if one.advantage.estimator == "none" and is_untaught and not one.loss.environment_coef:
            yield (
                f'{table}: advantage.estimator = "none" leaves rewards untrained, and no teacher of [distill] teaches '
                f'the task "{task}"; name it in distill.teachers, or choose another estimator'
            )


def _alone(cfg: Config, algorithm: Algorithm) -> Config:
    """The run under one algorithm, without a table for a reference that only another one compares with."""
    under = cfg.under(algorithm)
    unused = cfg.frozen_models.keys() - under.frozen_models.keys()
    return under.model_copy(update={"models": {name: one for name, one in cfg.models.items() if name not in unused}})
