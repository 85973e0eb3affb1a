"""Rules about the models beside the policy, and about learning from them."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import is_set, rule
from spmdrl.config.distill import REFERENCE
from spmdrl.config.rules import is_per_sequence
from spmdrl.config.whole import Config, SftConfig


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


@rule(Config, SftConfig)
def models_have_one_origin(cfg: Config | SftConfig) -> Iterator[str]:
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
        elif not model.is_loaded and is_set(model, "rests_on"):
            yield f"models.{name}.rests_on has no meaning for the policy's own weights; remove it"


@rule(Config, SftConfig)
def settings_belong_to_followers(cfg: Config | SftConfig) -> Iterator[str]:
    for name, model in cfg.models.items():
        for setting, weights in (("every_steps", "lagged"), ("decay", "average")):
            if is_set(model, setting) and model.weights != weights:
                yield (f'models.{name}.{setting} has no meaning without weights = "{weights}"; set both or remove it')


@rule(Config, SftConfig)
def adapters_are_not_followed(cfg: Config | SftConfig) -> Iterator[str]:
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
    if isinstance(cfg, Config) and cfg.environment is not None:
        yield "distill.hint_column has no place in the turns of an [environment]; remove one of them"


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
    if cfg.eval is not None:
        yield "reward.terms is empty, so that [eval] could not tell right answers from wrong; give terms, or remove it"
