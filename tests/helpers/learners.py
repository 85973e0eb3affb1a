"""A learner of a tiny model: its start, its updates and its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.metrics import Metrics
from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.model.policy import Policy
from spmdrl.refit.gather import Gatherer
from spmdrl.step.batch import build_batch
from spmdrl.step.teachers import FrozenModels
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.sequences import random_sequences

COUNT = 8
NOBODY: Any = None  # in the place of a policy that no teacher needs
NO_FROZEN_MODELS = FrozenModels(NOBODY, {}, None)


def start_learner(path: str, meshes: Meshes) -> Learner:
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    optim = OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1)
    return Learner(policy, optim, PolicyObjective(loss_config()), num_updates=4, dtype=torch.float32)


def update_once(learner: Learner, meshes: Meshes, *, step: int) -> Metrics:
    share = COUNT // meshes.training.size()
    first = meshes.training.get_local_rank() * share
    mine = random_sequences(COUNT, seed=step)[first : first + share]
    batch = build_batch(mine, plan_for(COUNT, meshes.training.size()), meshes, aggregation="token_mean")
    return update(learner, completed(batch, meshes).mini_batches, meshes, step=step)


def full_state(learner: Learner) -> dict[str, Tensor]:
    """Every weight, and every tensor of the optimizer, in full."""
    state: dict[str, Tensor] = {}
    for name, parameter in learner.model.named_parameters():
        state[name] = parameter.full_tensor().detach().clone()
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return state


def full_weights(policy: Policy, meshes: Meshes) -> dict[str, Tensor]:
    """Every weight, as a refit gathers it: `full_tensor` of torch 2.11 does not know how packed experts are split."""
    gatherer = Gatherer(policy, meshes.model.copy, dtype=torch.float32, bucket_bytes=2**20, naming="model")
    return {name: tensor.clone() for bucket in gatherer.whole_tensors() for name, tensor in bucket}
