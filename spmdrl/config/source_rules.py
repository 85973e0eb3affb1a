"""Rules about the sources of data: their algorithms, their curriculum, and the models that teach about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spmdrl.config.algorithm import OTHER_SOURCES, Algorithm, SourceAlgorithm, override_problems
from spmdrl.config.base import is_set, problems, rule
from spmdrl.config.data import (
    CurriculumConfig,
    FileData,
    FileSettings,
    HeldOutPromptsConfig,
    ReasoningGymData,
    SetData,
)
from spmdrl.config.distill import FEEDBACK, REFERENCE
from spmdrl.config.model import FrozenModelConfig
from spmdrl.config.rules import is_per_sequence
from spmdrl.config.whole import Config, PreferencesConfig, SftConfig, TuningConfig
from spmdrl.conversation import NO_TEACHER

# Algorithms of their own.


_Source = FileSettings | ReasoningGymData | SetData


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


# Rules between `[data.curriculum]` and other tables: a curriculum has a signal, and something to choose from.


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


# Rules about the models besides the policy, and about learning from them.


@rule(Config, SftConfig)
def models_are_used(cfg: Config | SftConfig) -> Iterator[str]:
    known = ", ".join(f'"{name}"' for name in cfg.models) or "none"
    for one in cfg.distill.by_place if cfg.distill else ():
        if one.model and one.model not in cfg.models:
            yield f'[distill]: "{one.model}" is to teach, and [models.{one.model}] is missing; there are {known}'
    for name in cfg.models.keys() - cfg.frozen_models.keys():
        is_reference = name == REFERENCE and isinstance(cfg, Config)
        use = "neither loss.kl_coef nor reward.kl_coef is set" if is_reference else "[distill] does not name it"
        yield f"[models.{name}] has no use: {use}; remove it"


@rule(PreferencesConfig)
def pairs_are_compared_with_a_reference(cfg: PreferencesConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        if name != REFERENCE or not cfg.has_reference:
            alone = f"a run on pairs has [models.{REFERENCE}] alone"
            use = alone if cfg.has_reference else f'pairs.loss = "{cfg.pairs.loss}" compares with no reference'
            yield f"[models.{name}] has no use: {use}; remove it"
        elif model.weights is not None:
            yield (
                f'models.{name}.weights = "{model.weights}" moves with the policy, and pairs are compared with a '
                f"reference that does not; set models.{name}.path instead"
            )


@rule(Config, SftConfig, PreferencesConfig)
def models_have_one_origin(cfg: Config | TuningConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        origins = [setting for setting in ("path", "adapters", "weights") if is_set(model, setting)]
        if len(origins) != 1:
            named = ", ".join(f"models.{name}.{setting}" for setting in ("path", "adapters", "weights"))
            yield f"[models.{name}]: set one of {named}, and no other"
        elif model.is_own_base and cfg.lora is None:
            yield (
                f'models.{name}.adapters = "off" is the policy without the adapters of [lora], and there is no [lora]; '
                f"set models.{name}.path instead"
            )
        for setting in FrozenModelConfig.model_fields:
            if origins and not model.is_loaded and is_set(model, setting):
                yield f"models.{name}.{setting} has no meaning for the policy's own weights; remove it"


@rule(Config, SftConfig, PreferencesConfig)
def settings_belong_to_followers(cfg: Config | TuningConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        for setting, weights in (("every_steps", "lagged"), ("decay", "average")):
            if is_set(model, setting) and model.weights != weights:
                yield (f'models.{name}.{setting} has no meaning without weights = "{weights}"; set both or remove it')


@rule(Config, SftConfig, PreferencesConfig)
def followers_have_the_layout_of_the_policy(cfg: Config | TuningConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        if model.follows and model.layout(cfg.parallel) != cfg.parallel:
            yield (
                f'models.{name}.weights = "{model.weights}" copies the policy shard by shard, so that it has the '
                f"policy's layout; remove models.{name}.parallel, or change [parallel]"
            )


@rule(Config, SftConfig, PreferencesConfig)
def adapters_are_not_followed(cfg: Config | TuningConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        if model.follows and cfg.lora is not None:
            yield (
                f'models.{name}.weights = "{model.weights}" is a copy of all weights, and [lora] trains adapters '
                'beside them; set weights = "policy", or remove [lora]'
            )


@rule(Config, SftConfig)
def the_policy_learns_nothing_from_itself(cfg: Config | SftConfig) -> Iterator[str]:
    hinted = {one.model for one in cfg.distill.by_place if one.hint_column is not None} if cfg.distill else set()
    for name in cfg.models.keys() - hinted:
        if cfg.models[name].weights == "policy":
            yield f'models.{name}.weights = "policy" sees what the policy sees; set distill.hint_column'


@rule(Config, SftConfig)
def hints_take_the_place_of_prompts(cfg: Config | SftConfig) -> Iterator[str]:
    if cfg.distill is None or not cfg.distill.hints:
        return
    if cfg.parallel.cp > 1:
        yield (
            f"distill.hint_column gives teachers longer prompts, and parallel.cp = {cfg.parallel.cp} would cut them "
            "elsewhere than the policy's; set cp = 1"
        )
    has_environment = isinstance(cfg, Config) and cfg.environment is not None
    for column in sorted({one.hint_column for one in cfg.distill.by_place if one.hint_column is not None}):
        if has_environment and column != FEEDBACK:
            yield (
                f'distill.hint_column = "{column}" has no place in the turns of an [environment]; set "{FEEDBACK}", '
                "which is what the environment said last, or remove one of them"
            )
        if not has_environment and column == FEEDBACK:
            yield (
                f'distill.hint_column = "{FEEDBACK}" is what an [environment] says of an attempt, and there is none; '
                "set one, or name a column of the data that is called otherwise"
            )


@rule(Config, SftConfig)
def teachers_have_tasks_of_the_data(cfg: Config | SftConfig) -> Iterator[str]:
    known = sorted({source.task for source in cfg.data.sources})
    for place, one in enumerate(cfg.distill.teachers if cfg.distill else ()):
        for task in one.tasks or ():
            if task not in known:
                yield f'distill.teachers.{place}.tasks: no source of data.sources has the task "{task}", but {known}'


@rule(Config)
def sequence_losses_need_whole_divergences(cfg: Config) -> Iterator[str]:
    if is_per_sequence(cfg) and cfg.distill is not None and not cfg.distill.over_vocabulary:
        yield (
            f'loss.kind = "{cfg.loss.kind}" knows one advantage for all tokens of a response, but distill.divergence '
            '= "sampled_kl" gives each its own; set divergence = "reverse", or another kind'
        )


@rule(Config)
def distilled_groups_are_not_dropped(cfg: Config) -> Iterator[str]:
    if cfg.distill is not None and cfg.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling = true drops groups of equal rewards, of which a teacher of [distill] has as "
            "much to say as of others; remove one of them"
        )


@rule(SftConfig)
def recorded_tokens_are_not_sampled(cfg: SftConfig) -> Iterator[str]:
    if cfg.distill is not None and not cfg.distill.over_vocabulary:
        yield (
            'distill.divergence = "sampled_kl" compares tokens that the policy sampled, and the responses of [sft] are '
            'recorded; set it to "forward", "reverse" or "jsd"'
        )


@rule(SftConfig)
def some_loss_is_left(cfg: SftConfig) -> Iterator[str]:
    if cfg.sft.loss_coef == 0 and cfg.distill is None:
        yield "sft.loss_coef = 0 leaves nothing to learn without [distill]; raise it, or add [distill]"


@rule(Config)
def something_is_trained(cfg: Config) -> Iterator[str]:
    if cfg.advantage.estimator == "none" and cfg.distill is None and not cfg.loss.environment_coef:
        yield (
            'advantage.estimator = "none" leaves rewards untrained, and there is no [distill] to learn from; add '
            "[distill], or choose another estimator"
        )


@rule(Config)
def nothing_is_compared_without_rewards(cfg: Config) -> Iterator[str]:
    if cfg.reward.terms:
        return
    if cfg.advantage.estimator != "none":
        yield (
            f'reward.terms is empty, so that advantage.estimator = "{cfg.advantage.estimator}" has no rewards to '
            'compare; give terms, or set estimator = "none" and learn from [distill]'
        )
    if cfg.eval is not None and not all(isinstance(source, SetData) for source in cfg.eval.sources):
        yield "reward.terms is empty, so that [eval] could not tell right answers from wrong; give terms, or remove it"
