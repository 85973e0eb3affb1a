"""Counts that follow from the configuration, each with its unit, computed in one place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spmdrl.config import Config, CorrectionConfig, LossConfig, ParallelConfig, TuningConfig, run_rules
from spmdrl.conversation import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arithmetic of a run; the same on every rank."""

    num_ranks: int  # all of them
    num_steps: int
    prompts_per_step: int  # over all ranks
    prompts_per_rank: int  # per step, of the ranks that sample
    rollouts_per_step: int  # over all ranks; fewer when a step does not find enough prompt groups
    updates_per_step: int  # optimizer steps per step
    num_updates: int  # optimizer steps of the whole run
    rollouts_per_mini_batch: int  # behind one optimizer step, over all ranks
    max_sequence_tokens: int  # prompt and response
    max_response_tokens: int
    max_tokens_per_micro_batch: int | None  # per rank that trains; None in static mode
    sequences_per_micro_batch: int | None  # per rank; None under a token budget
    max_eval_sequence_tokens: int  # prompt and response in an evaluation
    eval_prompts: int  # over all ranks
    eval_every: int  # steps; 0: only before the first and after the last
    checkpoint_every: int  # steps; 0: never
    export_every: int  # steps; 0: never, but perhaps at the end
    extra_groups: int = 0  # prompt groups that may be open beyond those a step still wants, over all ranks
    max_groups: int = 0  # prompt groups opened in a step at most, over all ranks
    sequences_together: int = 1  # of a rollout: 2 where they are a pair, which one micro-batch has
    cost_per_token: int = 1  # of a sequence, in whatever unit, when work is balanced
    cost_per_squared_token: int = 0
    shares_prefixes: bool = False  # whether tokens that sequences begin with alike are computed once
    ranks_per_share: int = 1  # neighbours that train on the same sequences
    engine_ranks: int = 0  # ranks, the last ones, that only hold engines; 0: every rank trains and holds one
    steps_ahead: int = 0  # steps that may be sampled before the update of an earlier one
    max_judged_tokens: int = 0  # a question to the policy about its own responses, and its answer

    @property
    def max_sampled_tokens(self) -> int:
        """The longest sequence of an engine."""
        return max(self.max_sequence_tokens, self.max_eval_sequence_tokens, self.max_judged_tokens)

    @property
    def training_ranks(self) -> int:
        """Ranks that hold a part of the policy."""
        return self.num_ranks - self.engine_ranks

    @property
    def num_shares(self) -> int:
        """Parts that a step's sequences are dealt into, each to neighbours that work on it together."""
        return self.training_ranks // self.ranks_per_share

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts in a prompt group; 1 where nothing is sampled, and a step has rows."""
        return self.rollouts_per_step // self.prompts_per_step

    @property
    def rollouts_per_engine_rank(self) -> int:
        """Rollouts of a step on each rank that samples, where each has an engine of its own."""
        return math.ceil(self.rollouts_per_step / (self.engine_ranks or self.num_ranks))

    def first_prompt(self, step: int, rank: int) -> int:
        """Place in the prompt stream of the first prompt this rank samples in this step."""
        return (step - 1) * self.prompts_per_step + rank * self.prompts_per_rank

    def first_rollout(self, rank: int) -> int:
        """Place in the step's global order of this rank's first rollout."""
        return rank * self.rollouts_per_step // self.num_ranks

    def saves_after(self, step: int) -> bool:
        """True when a checkpoint follows this step."""
        return self.checkpoint_every > 0 and (step % self.checkpoint_every == 0 or step == self.num_steps)

    def exports_after(self, step: int) -> bool:
        """True when the model is exported after this step."""
        return self.export_every > 0 and step % self.export_every == 0

    def evaluates_after(self, step: int) -> bool:
        """True when an evaluation follows this step; step 0 means before the first."""
        if not self.eval_prompts:
            return False
        return step in (0, self.num_steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plan.json and --dry-run show it."""
        return dataclasses.asdict(self)


def plan_run(cfg: Config | TuningConfig, *, num_ranks: int) -> Plan:
    """Derive the plan of a run of either kind. Raises UserError with every count that does not work out."""
    if isinstance(cfg, TuningConfig):
        return make_tuning_plan(cfg, num_ranks=num_ranks)
    return make_plan(cfg, num_ranks=num_ranks)


def make_plan(cfg: Config, *, num_ranks: int) -> Plan:
    """Derive the plan of a reinforcement-learning run. Raises UserError with every count that does not work out."""
    _refuse(cfg, num_ranks)
    prompts, updates = cfg.rollout.prompts_per_step, cfg.loss.updates_per_step
    max_sequence = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    eval_response = (cfg.eval.max_response_tokens if cfg.eval else None) or cfg.rollout.max_response_tokens
    engine_ranks = cfg.rollout.num_ranks or 0
    ranks_per_share = cfg.parallel.cp * cfg.parallel.tp
    # 0.1 * 30 is a little above 3, and is meant to be 3.
    extra_groups = math.ceil(prompts * cfg.rollout.oversample_fraction - 1e-9) + prompts * cfg.steps_open
    rollouts = prompts * cfg.rollout.group_size
    return Plan(
        num_ranks=num_ranks,
        num_steps=cfg.run.num_steps,
        prompts_per_step=prompts,
        prompts_per_rank=prompts // (engine_ranks or num_ranks),
        rollouts_per_step=rollouts,
        updates_per_step=updates,
        num_updates=cfg.run.num_steps * updates,
        rollouts_per_mini_batch=rollouts // updates,
        max_sequence_tokens=max_sequence,
        max_response_tokens=cfg.rollout.max_response_tokens,
        max_tokens_per_micro_batch=cfg.pack.max_tokens_per_micro_batch,
        sequences_per_micro_batch=cfg.pack.sequences_per_micro_batch,
        max_eval_sequence_tokens=cfg.data.max_prompt_tokens + eval_response,
        eval_prompts=cfg.eval.num_prompts if cfg.eval else 0,
        eval_every=cfg.eval.every if cfg.eval else 0,
        checkpoint_every=cfg.checkpoint.every,
        export_every=cfg.export.every,
        extra_groups=extra_groups,
        max_groups=(
            int(prompts * cfg.rollout.max_draw_ratio + 1e-9) if cfg.rollout.dynamic_sampling else prompts + extra_groups
        ),
        shares_prefixes=cfg.pack.prefix_tree == "auto",
        ranks_per_share=ranks_per_share,
        engine_ranks=engine_ranks,
        steps_ahead=cfg.steps_ahead,
        max_judged_tokens=cfg.reward.max_judged_tokens,
    )


def make_tuning_plan(cfg: TuningConfig, *, num_ranks: int) -> Plan:
    """Derive the plan of a run that samples nothing: a step is one update on some rows."""
    _refuse(cfg, num_ranks)
    sequences, longest = cfg.rows_per_step, cfg.answers.max_response_tokens
    eval_every = cfg.held_out.every if cfg.held_out else "never"
    eval_prompts = cfg.held_out.num_prompts if cfg.held_out and eval_every != "never" else 0
    max_sequence = cfg.data.max_prompt_tokens + longest
    ranks_per_share = cfg.parallel.cp * cfg.parallel.tp
    return Plan(
        num_ranks=num_ranks,
        num_steps=cfg.run.num_steps,
        prompts_per_step=sequences,
        prompts_per_rank=sequences // num_ranks,
        rollouts_per_step=sequences,
        updates_per_step=1,
        num_updates=cfg.run.num_steps,
        rollouts_per_mini_batch=sequences,
        max_sequence_tokens=max_sequence,
        max_response_tokens=longest,
        sequences_together=cfg.sequences_per_row,
        max_tokens_per_micro_batch=cfg.pack.max_tokens_per_micro_batch,
        sequences_per_micro_batch=cfg.pack.sequences_per_micro_batch,
        max_eval_sequence_tokens=max_sequence if eval_prompts else 0,
        eval_prompts=eval_prompts,
        eval_every=0 if eval_every == "never" else eval_every,
        checkpoint_every=cfg.checkpoint.every,
        export_every=cfg.export.every,
        shares_prefixes=cfg.pack.prefix_tree == "auto",
        ranks_per_share=ranks_per_share,
    )


def plan_problems(cfg: Config | TuningConfig, num_ranks: int) -> Iterator[str]:
    """Yield a sentence for each count that does not fit the number of ranks."""
    tuning = (_ranks_divide, _rows_divide_by_ranks)
    rl = (_ranks_divide, _prompts_divide_by_ranks, _prompts_divide_by_updates)
    return run_rules(tuning if isinstance(cfg, TuningConfig) else rl, cfg, num_ranks)


def _refuse(cfg: Config | TuningConfig, num_ranks: int) -> None:
    if sentences := list(plan_problems(cfg, num_ranks)):
        raise UserError("\n".join(dict.fromkeys(sentences)))


def _ranks_divide(cfg: Config | TuningConfig, num_ranks: int) -> Iterator[str]:
    engine_ranks = 0 if isinstance(cfg, TuningConfig) else cfg.rollout.num_ranks or 0
    if not engine_ranks or engine_ranks < num_ranks:
        yield from layout_problems(cfg, num_ranks - engine_ranks)
        return
    fewer = f"set it to {num_ranks - 1} or less, or " if num_ranks > 1 else ""
    yield (
        f"rollout.num_ranks = {engine_ranks} leaves none of the {num_ranks} ranks to train; {fewer}start "
        f"{engine_ranks + 1} ranks or more"
    )


def _prompts_divide_by_ranks(cfg: Config, num_ranks: int) -> Iterator[str]:
    engine_ranks = cfg.rollout.num_ranks or 0
    num_sampling = engine_ranks or num_ranks
    purpose = f"split over {num_sampling} ranks" + (" that hold engines" if engine_ranks else "")
    prompts, updates = cfg.rollout.prompts_per_step, cfg.loss.updates_per_step
    return _not_divisible("rollout.prompts_per_step", prompts, num_sampling, purpose, also_by=updates)


def _prompts_divide_by_updates(cfg: Config, num_ranks: int) -> Iterator[str]:
    prompts, updates = cfg.rollout.prompts_per_step, cfg.loss.updates_per_step
    num_sampling = cfg.rollout.num_ranks or num_ranks
    return _not_divisible(
        "rollout.prompts_per_step", prompts, updates, f"cut into {updates} updates", also_by=num_sampling
    )


def _rows_divide_by_ranks(cfg: TuningConfig, num_ranks: int) -> Iterator[str]:
    setting, purpose = f"{cfg.table}.{cfg.rows_setting}", f"split over {num_ranks} ranks"
    return _not_divisible(setting, cfg.rows_per_step, num_ranks, purpose, also_by=1)


def _not_divisible(name: str, value: int, by: int, purpose: str, *, also_by: int) -> Iterator[str]:
    if value % by:
        unit = math.lcm(by, also_by)  # the numbers offered satisfy both conditions
        below = value // unit * unit
        nearby = " or ".join(str(number) for number in (below, below + unit) if number)
        yield f"{name} = {value} cannot be {purpose}; set it to {nearby}"


def parallel_problems(parallel: ParallelConfig, num_training: int) -> Iterator[str]:
    """Yield a sentence for each setting of [parallel] that does not fit the number of ranks that train."""
    replicate, cp, tp, ep = parallel.dp_replicate, parallel.cp, parallel.tp, parallel.ep
    others = replicate * cp * tp
    product = f"parallel.dp_replicate x cp x tp = {replicate} x {cp} x {tp} = {others}"
    if parallel.dp_shard is None and num_training % others:
        yield f"{product} does not divide the {num_training} ranks that train; lower one of them, or start other ranks"
        return
    if parallel.dp_shard is not None and others * parallel.dp_shard != num_training:
        shard = parallel.dp_shard
        fitting = f"set dp_shard to {num_training // others}" if num_training % others == 0 else "change one of them"
        yield (
            f"parallel.dp_replicate x dp_shard x cp x tp = {replicate} x {shard} x {cp} x {tp} = {others * shard}, but "
            f"{num_training} ranks train; {fitting}, or start {others * shard} ranks that train"
        )
        return
    in_a_copy = num_training // replicate
    if in_a_copy % ep:
        yield (
            f"parallel.ep = {ep} does not divide the {in_a_copy} ranks that hold one copy of the policy "
            f"({num_training} that train / dp_replicate = {replicate}); set it to a divisor of {in_a_copy}"
        )


def layouts(cfg: Config | TuningConfig) -> dict[str, ParallelConfig]:
    """The layouts of the models besides the policy that have another than it, by their tables."""
    found = {table: one.layout(cfg.parallel) for table, one in cfg.beside.items()}
    return {table: layout for table, layout in found.items() if layout != cfg.parallel}


def layout_problems(cfg: Config | TuningConfig, num_training: int) -> Iterator[str]:
    """Yield a sentence for each setting of the policy's layout, and of those of models besides it, that does not fit
    the number of ranks that train."""
    if problems := list(parallel_problems(cfg.parallel, num_training)):
        yield from problems
        return
    cp, tp = cfg.parallel.cp, cfg.parallel.tp
    num_shares = num_training // (cp * tp)
    for table, layout in layouts(cfg).items():
        replicate, ep = layout.dp_replicate, layout.ep
        in_a_copy = num_training // replicate
        if num_shares % replicate:
            yield (
                f"{table}.parallel.dp_replicate = {replicate} does not divide the {num_shares} shares of a step "
                f"({num_training} ranks that train / parallel.cp x tp = {cp} x {tp}); set it to a divisor of "
                f"{num_shares}"
            )
        elif in_a_copy % ep:
            is_own = cfg.beside[table].parallel.ep is not None
            yield (
                f"{table + '.' if is_own else ''}parallel.ep = {ep} does not divide the {in_a_copy} ranks that hold "
                f"one copy of the model ({num_training} that train / dp_replicate = {replicate}); set "
                f"{table}.parallel.ep to 1 for a model without experts, else to a divisor of {in_a_copy}"
            )


def needs_global_stats(correction: CorrectionConfig) -> bool:
    """True when the correction needs sums over the whole global batch before the update."""
    return correction.batch_normalize or correction.reject != "none" or correction.veto_below is not None


def needs_old_logprobs(
    loss: LossConfig, correction: CorrectionConfig, *, num_updates: int, penalizes_divergence: bool = False
) -> bool:
    """True when a step takes a pass for the trainer's log-probabilities before its updates."""
    if correction.old == "rollout":
        return False
    return num_updates > 1 or needs_global_stats(correction) or penalizes_divergence or bool(loss.cov_selection)


def takes_old_pass(cfg: Config, *, num_updates: int) -> bool:
    """True when a step of a run takes that pass for any of its algorithms."""
    options: dict[str, Any] = {"num_updates": num_updates, "penalizes_divergence": cfg.penalizes_divergence}
    return any(needs_old_logprobs(one.loss, one.correction, **options) for one in cfg.algorithms)


def router_lines(cfg: Config, *, has_routes: bool) -> Iterator[str]:
    """Yield a line where `correction.router_replay` is unusual for how far the run's tokens are from the policy.

    `has_routes`: the policy is a mixture of experts whose routes can be replayed.
    """
    if cfg.staleness:
        usual, run = "R3", f"rollout.max_staleness = {cfg.staleness}"
    else:
        usual = "R2" if cfg.loss.updates_per_step > 1 else "none"
        run = f"loss.updates_per_step = {cfg.loss.updates_per_step} and tokens of the newest weights"
    if has_routes and cfg.correction.router_replay != usual:
        yield (
            f'correction.router_replay = "{cfg.correction.router_replay}", but with {run} a mixture of experts usually '
            f'takes "{usual}" (docs/agreement.md)'
        )
