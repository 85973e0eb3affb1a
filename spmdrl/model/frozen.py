"""The models besides the policy that are never trained: the reference it is compared with, and teachers.

Each has weights of its own, which rest as shards and are gathered while it computes, layer by layer or once in its
turn, or it is the policy's own base, with the adapters off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.config import ModelConfig
from spmdrl.config.distill import REFERENCE, OtherModelConfig
from spmdrl.dist.mesh import Meshes
from spmdrl.model.divergence import TeacherHead
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import load_policy, role_of
from spmdrl.model.policy import PackedModel, Policy, TokenLogprobs
from spmdrl.model.sharding import turn_of
from spmdrl.model.tensor_parallel import local_part
from spmdrl.types import MicroBatch, TopTokens


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that says what it makes of tokens, at a temperature of its own; every rank that trains calls it."""

    model: Policy
    temperature: float
    is_own_base: bool = False  # `model` is the policy itself, whose adapters are off while it computes
    is_policy: bool = False  # `model` is the policy itself, as it is before a step's updates
    gathers_once: bool = False  # in its turn, and not in each pass

    @property
    def has_own_weights(self) -> bool:
        """False when `model` is the policy itself."""
        return not (self.is_own_base or self.is_policy)

    def turn(self) -> AbstractContextManager[None]:
        """Surround its passes of a step, of which each weight is gathered in the first and freed after the last where
        it `gathers_once`. Turns of two models must not overlap, so that one is on the device at a time."""
        return turn_of(self.model, gathers_once=self.gathers_once) if self.has_own_weights else nullcontext()

    def __call__(self, micro_batch: MicroBatch) -> TokenLogprobs:
        """Compute logprobs and entropy of the `predicted` tokens."""
        with self._alone():
            return self.model(replace(micro_batch, routes=None))

    def hidden(self, micro_batch: MicroBatch, place: int) -> Tensor:
        """Compute the hidden states [N, D] from which this rank's chunk predicts the N tokens that the model teaches as
        the teacher at this place, in the compute dtype."""
        with self._alone():
            return self.model.hidden(replace(micro_batch, routes=None), place)

    def top_tokens(self, micro_batch: MicroBatch, place: int, *, k: int, num_rows: int) -> TopTokens:
        """Find the k tokens that the model finds most probable in the place of each of these N."""
        with self._alone():
            return self.model.top_tokens(replace(micro_batch, routes=None), place, k=k, num_rows=num_rows)

    def head(self, num_rows: int) -> TeacherHead | float:
        """Copy the first `num_rows` of this rank's rows of the head to its device; of the policy's own base, which has
        the policy's head, return the temperature."""
        with self._alone():
            return self.temperature if self.is_own_base else self.model.copied_head(num_rows)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.has_own_weights:
            yield
            return
        assert self.model.adapters is not None or self.is_policy, "a policy without adapters is no base"
        off = self.model.adapters.off() if self.model.adapters is not None and self.is_own_base else nullcontext()
        with off, self.model.at_temperature(self.temperature):
            yield


def load_frozen(
    policy: Policy,
    cfg: ModelConfig,
    models: Mapping[str, OtherModelConfig],
    meshes: Meshes,
    *,
    temperatures: Mapping[str, float],
    kernel: Kernel | None = None,
) -> dict[str, FrozenModel]:
    """Load these models besides the policy, by name, with the settings of `cfg` and the layouts of `meshes`.

    `kernel` is the policy's, with which a model from the policy's own directory computes too. Raises UserError like
    `load_policy`.
    """

    def load(name: str, model: OtherModelConfig) -> FrozenModel:
        temperature = temperatures[name]
        if not model.is_loaded:
            return FrozenModel(policy, temperature, is_own_base=model.is_own_base, is_policy=not model.is_own_base)
        settings = settings_of(model, cfg)
        own_kernel = kernel if settings.path == cfg.path else None
        own_meshes, role = meshes.of(f"models.{name}"), role_of(model)
        loaded = load_policy(settings, own_meshes, temperature=temperature, kernel=own_kernel, role=role)
        return FrozenModel(loaded, temperature, gathers_once=not model.reshard_after_forward)

    return {name: load(name, model) for name, model in models.items()}


def reference_of(policy: Policy, cfg: ModelConfig, meshes: Meshes, *, temperature: float) -> FrozenModel:
    """Load the model that training begins with besides the policy, or take the policy's own base where it has one."""
    began = OtherModelConfig(path=cfg.path) if policy.adapters is None else OtherModelConfig(adapters="off")
    return load_frozen(policy, cfg, {REFERENCE: began}, meshes, temperatures={REFERENCE: temperature})[REFERENCE]


def settings_of(model: OtherModelConfig, cfg: ModelConfig) -> ModelConfig:
    """Return `[model]` for a model with weights of its own: the same settings, all of it frozen."""
    return cfg.model_copy(update={"path": model.path or cfg.path, "freeze": None})


@dataclass(frozen=True, slots=True)
class Follower:
    """A frozen copy of the policy that follows it: lagged, or a moving average of its weights."""

    model: Policy
    every_steps: int = 1
    decay: float = 0.0  # of the average; 0 for a copy

    @classmethod
    def of(cls, cfg: OtherModelConfig, model: Policy) -> Follower:
        """Make a follower of its settings."""
        if cfg.weights == "lagged":
            return cls(model, every_steps=cfg.every_steps or 10)
        return cls(model, decay=cfg.decay or 0.99)

    @torch.no_grad()
    def follow(self, policy: PackedModel, step: int) -> None:
        """Follow the weights of the policy after a step: shard by shard, where those of this model rest."""
        if step % self.every_steps:
            return
        pairs = zip(self.model.named_parameters(), policy.named_parameters(), strict=True)
        for (name, own), (other_name, other) in pairs:
            assert name == other_name, f"{name} would follow {other_name}"
            mine, its = map(local_part, (own, other))
            mine.lerp_(its.to(mine.device, mine.dtype), 1.0 - self.decay)
