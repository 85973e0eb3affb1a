"""Rules about tokens of older or other weights, and about what decides which weights sample them."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.whole import Config


@rule(Config)
def engine_logprobs_need_fresh_tokens(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if cfg.correction.old == "rollout" and cfg.staleness > 0:
        why = "rollout.partial = true" if rollout.partial else f"rollout.max_staleness = {rollout.max_staleness}"
        yield (
            f'correction.old = "rollout" needs tokens that the weights before the update sampled, but with {why} '
            'older weights sample some of them; set correction.old = "trainer"'
        )


@rule(Config)
def older_tokens_need_a_correction(cfg: Config) -> Iterator[str]:
    if cfg.staleness > 1 and _corrects_nothing(cfg):
        yield (
            f"rollout.max_staleness = {cfg.staleness} trains on tokens that weights so many steps older "
            f"sampled, and nothing corrects for it; {_CORRECTIONS}; or lower max_staleness to 1"
        )


_CORRECTIONS = (
    'set correction.kind = "tis", "icepop" or "mis", correction.reject, correction.opsm_delta_nats, or loss.kind = '
    '"dppo_tv" or "dppo_kl"'
)


def _corrects_nothing(cfg: Config) -> bool:
    """Return True for a run that learns from rewards by a loss of ours, as if its own weights had sampled."""
    correction, loss = cfg.correction, cfg.loss
    corrects = correction.kind != "none" or correction.reject != "none" or correction.opsm_delta_nats is not None
    learns_from_rewards = loss.formula is not None and cfg.advantage.estimator != "none"
    return learns_from_rewards and not corrects and not loss.compares_with_engine


@rule(Config)
def fewer_bits_need_a_correction(cfg: Config) -> Iterator[str]:
    if not (fewer := cfg.rollout.fewer_bits):
        return
    if cfg.correction.old == "rollout":
        yield (
            f'correction.old = "rollout" takes what the engine says for what the trainer says, but with {fewer} it '
            'says something else; set correction.old = "trainer"'
        )
    elif _corrects_nothing(cfg):
        yield (
            f"{fewer} samples with other numbers than the trainer's, and nothing corrects for it; {_CORRECTIONS}; or "
            f"remove it"
        )


@rule(Config)
def quantized_engines_take_whole_weights(cfg: Config) -> Iterator[str]:
    if cfg.rollout.quantization is not None and cfg.lora is not None:
        yield (
            f'rollout.quantization = "{cfg.rollout.quantization}" sends whole weights in few bits, to which [lora] '
            "adds adapters that were not tried with it; remove one of them"
        )


@rule(Config)
def deterministic_runs_sample_one_version(cfg: Config) -> Iterator[str]:
    if cfg.run.deterministic and cfg.steps_ahead > 1:
        yield (
            f"rollout.max_staleness = {cfg.rollout.max_staleness} lets timing decide which weights sample a step, but "
            "run.deterministic = true; set partial = true, max_staleness = 0 or 1, or deterministic = false"
        )


@rule(Config)
def tokens_decide_about_refits_in_deterministic_runs(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.refit_after_tokens is not None and not (cfg.run.deterministic and rollout.refit_in_flight):
        yield (
            "rollout.refit_after_tokens decides when a refit in flight takes place where run.deterministic = true and "
            "rollout.refit_in_flight = true, and elsewhere the trainer does; set both, or remove it"
        )


@rule(Config)
def cache_survives_the_update(cfg: Config) -> Iterator[str]:
    if cfg.rollout.cache_after_refit != "keep":
        return
    if cfg.run.deterministic:
        yield (
            'rollout.cache_after_refit = "keep" continues from keys and values that a resumed run computes again, with '
            "other bits, but run.deterministic = true; remove cache_after_refit, or set deterministic = false"
        )
    if cfg.rollout.placement == "colocated" and "kv_cache" in cfg.offload.engine:
        yield (
            'offload.engine frees the cache from which rollout.cache_after_refit = "keep" continues; set it to [], or '
            "remove cache_after_refit"
        )


@rule(Config)
def schedules_are_of_free_runs(cfg: Config) -> Iterator[str]:
    if cfg.debug.follow_schedule is None:
        return
    if cfg.run.deterministic:
        yield (
            "debug.follow_schedule repeats a run that went by the real clock, but run.deterministic = true needs no "
            "schedule; remove follow_schedule, or set deterministic = false"
        )
    if not (cfg.steps_open or cfg.rollout.refit_in_flight) or cfg.environment is not None:
        yield (
            "debug.follow_schedule says when engines open prompts ahead and pause, which rollout.partial without "
            "oversample_fraction does, and without [environment], whose answers take their own time; remove it"
        )


@rule(Config)
def deterministic_runs_do_not_oversample(cfg: Config) -> Iterator[str]:
    if cfg.run.deterministic and cfg.rollout.oversample_fraction:
        yield (
            f"rollout.oversample_fraction = {cfg.rollout.oversample_fraction:g} trains on the prompt groups that are "
            "finished first, which depends on timing, but run.deterministic = true; set oversample_fraction = 0 (with "
            "partial = true steps then train on the oldest), or deterministic = false"
        )
