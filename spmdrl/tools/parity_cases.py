"""Training on one batch in different layouts, which must give the same loss, gradients and weights.

`spmdrl.tools.parity` prints the comparison for a user's model; the tests run it on tiny ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.config import CorrectionConfig, LoraConfig, LossConfig, ModelConfig, OptimConfig, PackConfig, ParallelConfig
from spmdrl.config.plan import Plan, needs_old_logprobs, parallel_problems
from spmdrl.dist.collectives import sum_over
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World
from spmdrl.families import LogitScale
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import Objective, ObjectiveFunction, PolicyObjective, SftObjective
from spmdrl.learn.update import update
from spmdrl.model.frozen import FrozenModel, reference_of
from spmdrl.model.load import load_model_config, parallel_model_problems
from spmdrl.model.logprobs import HeadOptions, next_token_logprobs
from spmdrl.model.lora.policy import load_trained, random_values
from spmdrl.model.policy import Policy
from spmdrl.model.routes import FREE, Routers
from spmdrl.preflight.forecast import experts_per_token, with_costs
from spmdrl.refit.gather import Gatherer
from spmdrl.step.batch import Batch, build_batch
from spmdrl.step.correction import select_by_covariance
from spmdrl.step.logprobs import add_columns
from spmdrl.types import MicroBatch, Sequence, UserError

UPDATES = 3  # of SGD, and of AdamW
SGD = OptimConfig(name="sgd", lr=0.1)
ADAMW = OptimConfig(name="adamw", lr=1e-4, weight_decay=0.1)
# Where the true gradient of a weight is 0, rounding noise remains, which AdamW divides by its own size. Such a weight
# moves by up to lr per update in a random direction, so two layouts may differ by twice that. Such weights are few.
ADAMW_BOUND = 2 * ADAMW.lr * UPDATES
ADAMW_BOUND_OF_MOST = ADAMW.lr / 10  # root of the mean square over all weights

# Allowed difference of float32 sums in another order; each case gives the reason for its order. A tensor that is so
# ill-conditioned that rounding exceeds BOUND may differ by TIMES_ONE_BIT times what weights one bit apart change of it,
# and by MOST at most.
BOUND, TIMES_ONE_BIT, MOST = 1e-5, 4.0, 1e-3
# Fraction of the norm of all gradients: a parameter whose gradient is smaller has a true gradient of 0, and noise.
NEGLIGIBLE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforcement:
    """Training with a policy loss, as in `spmdrl.train`."""

    loss: LossConfig
    temperature: float

    @property
    def aggregation(self) -> str:
        return self.loss.aggregation

    @property
    def objective(self) -> ObjectiveFunction:
        return PolicyObjective(self.loss)

    @property
    def balances_experts(self) -> bool:
        return self.loss.expert_balance_coef > 0

    def reference(self, policy: Policy, model: ModelConfig, meshes: Meshes) -> FrozenModel | None:
        """Return the reference model, where the loss has one; every rank must call this."""
        return reference_of(policy, model, meshes, temperature=self.temperature) if self.loss.kl_coef else None

    def prepare(self, batch: Batch, policy: Policy, reference: FrozenModel | None, meshes: Meshes) -> Batch:
        """Add what the objective needs before the updates; every rank must call this."""
        forwards: dict[str, Callable[[MicroBatch], Tensor]] = {"advantages": lambda m: m.rewards.float()}
        if needs_old_logprobs(self.loss, CorrectionConfig(), num_updates=len(batch.mini_batches)):
            forwards["old_logprobs"] = lambda m: policy(m).logprobs
        if reference is not None:
            forwards["ref_logprobs"] = lambda m: reference(m).logprobs
        return select_by_covariance(add_columns(batch, forwards, meshes.training), [self.loss], meshes, seed=0)


class Imitation:
    """Supervised training on responses, as in `spmdrl.sft`."""

    temperature = 1.0
    aggregation = "token_mean"
    objective = SftObjective()
    balances_experts = False

    def reference(self, policy: Policy, model: ModelConfig, meshes: Meshes) -> None:
        """Do without a reference model."""

    def prepare(self, batch: Batch, policy: Policy, reference: FrozenModel | None, meshes: Meshes) -> Batch:
        """Return the batch as it is: it is complete."""
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that all cases share; a case may change some."""

    model: ModelConfig
    lora: LoraConfig | None = None
    pack: PackConfig
    learning: Reinforcement | Imitation
    replays_routes: bool = False  # tokens go to experts that were chosen at random


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout of the work."""

    name: str
    reason: str  # why a difference is allowed
    num_ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pack: dict[str, Any] = field(default_factory=dict)  # replaces [pack] of the settings
    model: dict[str, Any] = field(default_factory=dict)  # changes to [model] of the settings
    next_token_logprobs: Callable[..., tuple[Tensor, Tensor]] = next_token_logprobs
    is_moved: bool = False  # it begins with weights one bit apart


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The results of one case; tensors are whole, float32 and on the host."""

    loss: float  # mean of the SGD updates
    loss_size: float  # the same of the summed magnitudes of what tokens add to it, which may cancel
    gradients: dict[str, Tensor]
    after_sgd: dict[str, Tensor]
    after_adamw: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The differences between two results."""

    loss: float  # relative to the summed magnitudes of what tokens add to it
    gradient: float  # the largest of any parameter beside what is allowed, relative to its norm
    gradient_allowed: float
    worst: str  # the parameter with that gradient
    sgd: float  # of weights: the largest of any parameter, relative to its norm
    adamw: float  # the largest absolute difference of a weight
    adamw_of_most: float  # root of the mean square over all weights

    @property
    def is_within(self) -> bool:
        """True when the differences are no more than rounding."""
        is_exact = self.loss <= BOUND and self.gradient <= self.gradient_allowed and self.sgd <= BOUND
        return is_exact and self.adamw <= ADAMW_BOUND and self.adamw_of_most <= ADAMW_BOUND_OF_MOST


ONE_RANK = Case(name="1 rank", reason="the others are compared with it")
ONE_BIT = Case(name="weights one bit apart", reason="it shows what rounding alone does", is_moved=True)


def cases(settings: Settings) -> Iterator[Case]:
    """Yield layouts on 1, 2 and 4 ranks, and other divisions of the same work."""
    order = "gradients are summed over ranks, and micro-batches hold other sequences"
    chunks = "keys come in chunks, and gradients are summed over them"
    parts = "a layer's sums are sums of the ranks' partial sums"
    for name, num_ranks, reason, parallel in (
        ("dp 2", 2, order, {}),
        ("dp 4", 4, order, {}),
        ("hsdp 2 x 2", 4, order, {"dp_replicate": 2}),
        ("cp 2", 2, chunks, {"cp": 2}),
        ("cp 4", 4, chunks, {"cp": 4}),
        ("dp 2 x cp 2", 4, chunks, {"cp": 2}),
        ("cp 2 (ulysses)", 2, chunks, {"cp": 2, "cp_style": "ulysses"}),
        ("tp 2", 2, parts, {"tp": 2}),
        ("dp 2 x tp 2", 4, parts, {"tp": 2}),
        ("cp 2 x tp 2", 4, parts, {"cp": 2, "tp": 2}),
        ("hsdp 2 x tp 2", 4, parts, {"dp_replicate": 2, "tp": 2}),
        ("ep 2", 2, parts, {"ep": 2}),
        ("tp 2 x ep 2", 2, parts, {"tp": 2, "ep": 2}),
        ("dp 2 x tp 2 x ep 2", 4, parts, {"tp": 2, "ep": 2}),
        ("ep 4", 4, parts, {"ep": 4}),
    ):
        yield Case(name=name, num_ranks=num_ranks, reason=reason, parallel=ParallelConfig(**parallel))
    alone = {"sequences_per_micro_batch": 1}
    whole = {"sequences_per_micro_batch": 2**30}
    kernels = "kernels sum matrices of other shapes in another order"
    yield Case(name="one sequence at a time", reason=kernels, pack=alone)
    yield Case(name="one micro-batch", reason=kernels, pack=whole)
    yield Case(name="plain head", reason=kernels, next_token_logprobs=plain_logprobs)
    yield Case(name="head in small chunks", reason=kernels, model={"logits_chunk_tokens": 7})
    for level in ("none", "full", "selective"):
        if level != settings.model.gradient_checkpointing:
            yield Case(
                name=f"checkpointing: {level}",
                reason="none: the same operations run twice",
                model={"gradient_checkpointing": level, "checkpoint_every_layers": 1},
            )
    yield Case(
        name="cp 2, selective",
        reason=chunks,
        num_ranks=2,
        parallel=ParallelConfig(cp=2),
        model={"gradient_checkpointing": "selective", "checkpoint_every_layers": 1},
    )


def own_case(parallel: ParallelConfig) -> Case:
    """Return the configuration's own layout, on as few ranks as possible."""
    copy_ranks = math.lcm((parallel.dp_shard or 1) * parallel.cp * parallel.tp, parallel.ep)
    written = ", ".join(f"{name} = {value}" for name, value in parallel.model_dump(exclude_defaults=True).items())
    return Case(
        name=f"[parallel] {written}",
        reason="the configuration's own layout",
        num_ranks=parallel.dp_replicate * copy_ranks,
        parallel=parallel,
    )


def random_batch(*, vocabulary: int, num_sequences: int, max_tokens: int, seed: int = 0) -> list[Sequence]:
    """Make prompts and responses of random lengths and tokens, with plausible logprobs and rewards."""
    rng = random.Random(seed)
    batch = []
    for index in range(num_sequences):
        prompt, response = rng.randint(1, max_tokens // 4), rng.randint(1, max_tokens * 3 // 4)
        batch.append(
            Sequence(
                index=index,
                token_ids=tuple(rng.randrange(vocabulary) for _ in range(prompt + response)),
                loss_mask=(False,) * prompt + (True,) * response,
                rollout_logprobs=(0.0,) * prompt + tuple(-3 - rng.random() for _ in range(response)),
                reward=rng.uniform(-2, 2),
            )
        )
    return batch


def with_random_routes(batch: list[Sequence], routers: Routers, *, num_chosen: int) -> list[Sequence]:
    """Add routes to the sequences, as an engine reports them: none of a sequence's last token."""
    draw = torch.Generator().manual_seed(0)
    routed = []
    for sequence in batch:
        scores = torch.rand(len(sequence.token_ids), routers.num_layers, routers.num_experts, generator=draw)
        routes = scores.topk(num_chosen).indices.short()
        routes[-1] = FREE
        routed.append(replace(sequence, routes=routes))
    return routed


def train_case(case: Case, settings: Settings, batch: list[Sequence], world: World) -> CaseResult | None:
    """Train on the batch in the case's layout; every rank must call this, and only the first gets the result.

    Raises UserError, on every rank, when the model does not support the layout.
    """
    model = settings.model.model_copy(update={**case.model, "compute_dtype": "float32"})
    model_config = load_model_config(model)
    problems = [
        *parallel_problems(case.parallel, world.num_ranks),
        *parallel_model_problems(model_config, model, case.parallel),
    ]
    if problems:
        raise UserError("\n".join(problems))
    meshes = build_meshes(world, case.parallel)
    pack = PackConfig(balance=settings.pack.balance, **case.pack) if case.pack else settings.pack
    learning = settings.learning
    policy = load_trained(model, settings.lora, meshes, temperature=learning.temperature, seed=0)
    policy.next_token_logprobs = case.next_token_logprobs
    if case.is_moved:
        move_to_neighbours(_local(parameter) for parameter in policy.parameters())
    if settings.replays_routes or learning.balances_experts:
        policy.routers = Routers(policy.model)
    if learning.balances_experts and policy.routers is not None:
        policy.routers.watch_scores()
    if settings.replays_routes and policy.routers is not None:
        num_chosen = experts_per_token(model_config.get_text_config())
        batch = with_random_routes(batch, policy.routers, num_chosen=num_chosen)
    reference = learning.reference(policy, model, meshes)
    moving = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    start = [_local(parameter).to("cpu", copy=True) for parameter in moving]

    def trained(optim: OptimConfig, num_updates: int) -> tuple[float, float, dict[str, Tensor]]:
        with torch.no_grad():
            for parameter, values in zip(moving, start, strict=True):
                _local(parameter).copy_(values)
        if policy.adapters is not None:  # with B = 0, as they begin, A would have no gradient
            policy.adapters.load(random_values(policy.adapters.trained, seed=0))
        plan = plan_of(batch, pack, meshes, num_updates=num_updates)
        plan = with_costs(plan, pack, model, model_config)
        mine = batch[world.rank :: world.num_ranks]  # as if this rank had sampled them
        batch_of_case = build_batch(mine, plan, meshes, aggregation=learning.aggregation)
        objective = Sized(learning.objective)
        learner = Learner(policy, optim, objective, num_updates=num_updates, dtype=torch.float32)
        mini_batches = learning.prepare(batch_of_case, policy, reference, meshes).mini_batches
        metrics = update(learner, mini_batches, meshes, step=1)
        # Ranks of a share have the same tokens.
        size = sum_over(meshes.training, torch.tensor(objective.size, device=world.device)) / meshes.ranks_per_share
        loss = metrics["update/loss"].value() if metrics else 0.0
        return loss, float(size) / num_updates, whole_weights(policy, meshes)

    _, _, gradients = trained(OptimConfig(name=f"{__name__}:GradientAsWeight", lr=1.0, max_grad_norm=1e30), 1)
    loss, size, after_sgd = trained(SGD, UPDATES)  # several updates: in the first one the ratio is always 1
    _, _, after_adamw = trained(ADAMW, UPDATES)
    return CaseResult(loss, size, gradients, after_sgd, after_adamw) if world.rank == 0 else None


class Sized:
    """An objective that also adds up the magnitudes of what tokens add to its loss, of this rank's micro-batches."""

    def __init__(self, objective: ObjectiveFunction) -> None:
        self._objective = objective
        self.size = 0.0

    def __call__(self, outputs: Any, micro_batch: MicroBatch) -> Objective:
        weights = micro_batch.loss_weights.detach().requires_grad_()
        result = self._objective(outputs, micro_batch.with_columns({"loss_weights": weights}))
        # The loss is linear in the weights, so that its slope is what a token's loss was before it was weighed.
        (per_token,) = torch.autograd.grad(result.loss_sum, weights, retain_graph=True)
        self.size += float((per_token * weights.detach()).abs().sum(dtype=torch.float64))
        return result


@torch.no_grad()
def move_to_neighbours(weights: Iterable[Tensor]) -> None:
    """Replace each number of float32 by one of the two next to it, always the same one for the same sizes."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        if weight.dtype != torch.float32:  # a frozen base in fewer bits, whose neighbours are far away
            continue
        side = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.copy_(weight.nextafter(weight + side))


def deviation(one: CaseResult, other: CaseResult, one_bit: CaseResult | None = None) -> Deviation:
    """Measure how far `one` is from `other`; without `one_bit`, the result of `ONE_BIT`, `BOUND` is allowed."""
    rounding = differences((one_bit or other).gradients, other.gradients)
    allowed = {name: max(BOUND, min(TIMES_ONE_BIT * size, MOST)) for name, size in rounding.items()}
    found = differences(one.gradients, other.gradients)
    worst = max(found, key=lambda name: found[name] / allowed[name])
    apart = [one.after_adamw[name] - x for name, x in other.after_adamw.items()]
    return Deviation(
        loss=abs(one.loss - other.loss) / max(other.loss_size, 1e-3),
        gradient=found[worst],
        gradient_allowed=allowed[worst],
        worst=worst,
        sgd=max(differences(one.after_sgd, other.after_sgd).values()),
        adamw=max(float(x.abs().max()) for x in apart),
        adamw_of_most=(sum(float(x.square().sum()) for x in apart) / sum(x.numel() for x in apart)) ** 0.5,
    )


def whole_weights(policy: Policy, meshes: Meshes) -> dict[str, Tensor]:
    """Gather every trained weight on the host of a copy's first rank; every rank must call this."""
    if policy.adapters is not None:
        return {name: tensor.cpu().clone() for name, tensor in policy.adapters.trained.items()}
    gatherer = Gatherer(policy, meshes.model.copy, dtype=torch.float32, bucket_bytes=2**28, naming="model")
    weights: dict[str, Tensor] = {}
    for bucket in gatherer.whole_tensors():
        if meshes.model.copy.get_local_rank() == 0:
            weights |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    return weights


def plain_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """`next_token_logprobs` of one rank in plain torch: all logits at once, differentiated by autograd."""
    temperature, softcap = options.scale
    log_p = (LogitScale(softcap=softcap)(F.linear(hidden, weight, bias).float()) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class GradientAsWeight(torch.optim.Optimizer):
    """Replaces every weight by its gradient, so that gradients can be gathered like weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mine = _local(parameter)
                mine.copy_(_local(parameter.grad)) if parameter.grad is not None else mine.zero_()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Return by name how far a tensor is from the other, relative to the other's norm; inf where that is no number."""
    norms = {name: float(x.norm()) for name, x in other.items()}
    floor = NEGLIGIBLE * sum(norm**2 for norm in norms.values()) ** 0.5
    apart = {name: float((one[name] - x).norm()) / max(norms[name], floor) for name, x in other.items()}
    return {name: math.inf if math.isnan(size) else size for name, size in apart.items()}


def plan_of(batch: list[Sequence], pack: PackConfig, meshes: Meshes, *, num_updates: int) -> Plan:
    """Make the plan of one step on this batch with `num_updates` updates."""
    longest = max(len(sequence.token_ids) for sequence in batch)
    return Plan(
        num_ranks=meshes.world.size(),
        num_steps=1,
        prompts_per_step=len(batch),
        prompts_per_rank=0,
        rollouts_per_step=len(batch),
        updates_per_step=num_updates,
        num_updates=num_updates,
        rollouts_per_mini_batch=len(batch) // num_updates,
        max_sequence_tokens=longest,
        max_response_tokens=longest,
        max_tokens_per_micro_batch=pack.max_tokens_per_micro_batch,
        sequences_per_micro_batch=pack.sequences_per_micro_batch,
        max_eval_sequence_tokens=0,
        eval_prompts=0,
        eval_every=0,
        checkpoint_every=0,
        export_every=0,
        shares_prefixes=pack.prefix_tree == "auto",
        ranks_per_share=meshes.ranks_per_share,
    )
