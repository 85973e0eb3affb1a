"""One update on any number of ranks, and the comparison of the gradients it leaves in the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.step.batch import build_batch
from spmdrl.types import Sequence
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.sequences import random_sequences

SEQUENCES = 24
LOSS = {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.05, "entropy_coef": 0.01}


def dealt(sequences: list[Sequence], rank: int, num_ranks: int, deal: str) -> list[Sequence]:
    """Which sequences a rank sampled."""
    if deal == "in blocks":
        share = len(sequences) // num_ranks
        return sequences[rank * share : (rank + 1) * share]
    return [sequence for sequence in sequences if sequence.index % num_ranks == num_ranks - 1 - rank]


Trained = tuple[dict[str, Tensor], dict[str, float]]  # every weight after the updates of one step, the step's metrics


def _trained_with(
    world: World,
    path: str,
    *,
    optim: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    count: int = SEQUENCES,
    deal: str = "in blocks",
) -> Trained:
    meshes = build_meshes(world)
    settings = model_config(path, **(model or {}))
    losses = loss_config(**(LOSS if loss is None else loss))
    policy = load_policy(settings, meshes.model, temperature=0.8)
    reference = load_policy(settings, meshes.model, temperature=0.8, role="reference") if losses.kl_coef else None
    dtype = getattr(torch, settings.compute_dtype.replace("auto", "float32"))
    the_optim = OptimConfig(**({"max_grad_norm": 1e6} | (optim or {"name": "sgd", "lr": 1.0})))
    the_plan = plan_for(count, world.num_ranks, **(plan or {}))
    mine = dealt(random_sequences(count), world.rank, world.num_ranks, deal)
    batch = build_batch(mine, the_plan, meshes, aggregation=losses.aggregation)
    learner = Learner(policy, the_optim, PolicyObjective(losses), num_updates=the_plan.num_updates, dtype=dtype)
    mini_batches = completed(batch, meshes, policy, reference).mini_batches
    metrics = update(learner, mini_batches, meshes, step=1)
    weights = {name: parameter.full_tensor().detach() for name, parameter in policy.model.named_parameters()}
    return weights, {name: metric.value() for name, metric in metrics.items()}


def initial(path: str) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    return {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}


def assert_same_change(
    one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor], bound: float
) -> None:
    """SGD with rate 1 moves each weight by its gradient: compare each parameter's moves, relative to their size.

    Beside the bound, the moved weights may differ by the rounding of the weights themselves, one unit in 2^23.
    """
    assert max((one[name] - start[name]).norm() for name in start) > 1e-3, (
        "an update that changes nothing proves nothing"
    )
    for name in start:
        allowed = bound * (one[name] - start[name]).norm() + start[name].norm() * 2.0**-23
        difference = (one[name] - other[name]).norm()
        assert difference <= allowed, f"{name}: {difference:.2e} apart, allowed {allowed:.2e}"


def trained(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Trained]:
    """Train each case, a model's directory and changes to the step, from the start; run on each rank."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return {name: _trained_with(world, path, **options) for name, (path, options) in cases.items()}
