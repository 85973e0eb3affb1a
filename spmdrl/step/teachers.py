"""The frozen models besides the policy in a step: what they make of the responses, before the updates and in them.

Each model takes its turn over the micro-batches in which it teaches something. For a divergence over the whole
vocabulary it leaves its hidden states there, on the host, and its head on the device until the updates have computed
both distributions, tile by tile. With `top_k` it leaves its most probable tokens, and no head is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.metrics import Mean, Metrics
from spmdrl.config import Config, DistillConfig, SftConfig
from spmdrl.config.distill import FEEDBACK, REFERENCE
from spmdrl.data.image_store import ImageStore
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learner import NO_FOLLOWERS
from spmdrl.model.divergence import TeacherHead
from spmdrl.model.frozen import Follower, FrozenModel
from spmdrl.model.policy import Policy, Teaching
from spmdrl.run import Run
from spmdrl.step.batch import Batch
from spmdrl.step.hints import NO_LESSONS, Label, Lessons, hinted, unhinted
from spmdrl.step.images import Images
from spmdrl.types import MicroBatch, TopTokens, TrainingDiverged

Look = Callable[[list[MicroBatch]], tuple[list[MicroBatch], Metrics]]

NO_LOOK: Mapping[str, Look] = MappingProxyType({})
_OWN = {"lagged": "the policy some steps ago", "average": "the moving average of the policy"}


class FrozenModels:
    """The frozen models besides a run's policy: the reference, and the teachers at their places in the settings."""

    def __init__(
        self,
        policy: Policy,
        frozen: Mapping[str, FrozenModel],
        distill: DistillConfig | None,
        label: Label = NO_LESSONS,
        followers: Mapping[str, Follower] = NO_FOLLOWERS,
        look: Mapping[str, Look] = NO_LOOK,
    ) -> None:
        """`frozen` are the models by name, as `config.frozen_models` names them; `label` says who teaches the responses
        to a prompt, and what that teacher sees. `followers` are those that follow the policy, for its learner. `look`
        shows images to the teachers with a tower of their own."""
        self._policy, self._distill, self.label, self.followers = policy, distill, label, followers
        self._look = [look.get(one.model) for one in distill.by_place] if distill else []
        self.reference = frozen.get(REFERENCE)
        self._teachers = {one.model: frozen[one.model] for one in distill.by_place} if distill else {}
        self._heads: dict[str, TeacherHead | float] = {}  # of the teachers, from their turns to the end of the updates

    @classmethod
    def of(cls, run: Run[Config] | Run[SftConfig], policy: Policy, store: ImageStore | None = None) -> FrozenModels:
        """Load the frozen models of a run, whose images are in `store`; every rank that trains must call this."""
        cfg = run.cfg
        sees_more = cfg.distill is not None and cfg.distill.hints
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.trust_remote_code) if sees_more else None
        frozen = run.load_frozen(policy)
        followers = {
            name: Follower.of(one, frozen[name].model) for name, one in cfg.frozen_models.items() if one.follows
        }
        options: dict[str, Any] = {"dtype": run.dtype, "max_patches": cfg.pack.max_patches_per_pass}
        look = {
            name: Images(frozen[name].model, store, run.meshes, **options).encode
            for name, one in cfg.frozen_models.items()
            if one.path not in (None, cfg.model.path) and frozen[name].model.trunk.family is not None
        }
        return cls(policy, frozen, cfg.distill, Lessons(cfg.distill, cfg.data, tokenizer), followers, look)

    @torch.no_grad()
    def teach(self, batch: Batch, meshes: Meshes) -> Batch:
        """Add `teacher_logprobs` or `teacher_outputs`; every rank that trains must call this.

        Raises TrainingDiverged on all of them when a number is not finite on any.
        """
        if self._distill is None:
            return batch
        micro_batches, found = batch.micro_batches, dict[int, list[Any]]()
        for name, teacher in self._teachers.items():
            with teacher.turn():
                for place, one in enumerate(self._distill.by_place):
                    if one.model == name:
                        found[place] = self._said(teacher, place, micro_batches, meshes)
                if self._distill.needs_heads:
                    self._heads[name] = teacher.head(self._policy.num_head_rows)
        by_micro_batch = [*zip(*(found[place] for place in sorted(found)), strict=True)]
        with raise_on_all_ranks(meshes.training):
            if not all(_is_finite(said) for part in by_micro_batch for said in part if said is not None):
                raise TrainingDiverged("what a teacher makes of responses is not finite; no weights were changed")
        return batch.with_micro_batches(
            replace(micro_batch, teacher_outputs=part)
            if self._distill.over_vocabulary
            else micro_batch.with_columns({"teacher_logprobs": _sum(micro_batch, part)})
            for part, micro_batch in zip(by_micro_batch, micro_batches, strict=True)
        )

    def _said(self, teacher: FrozenModel, place: int, micro_batches: list[MicroBatch], meshes: Meshes) -> list[Any]:
        """Return what the teacher at this place makes of each micro-batch, on the host; None of one in which it teaches
        nothing on any rank. Every rank that trains must call this."""
        assert self._distill is not None
        wanted = [micro_batch.taught_by(place) for micro_batch in micro_batches]
        # Its layers are gathered over ranks: all of them skip a pass, or none does.
        everywhere = zip(*gather_objects(meshes.training, [bool(one.any()) for one in wanted]), strict=True)
        needed = [*map(any, everywhere)]
        shown = iter(self._shown(place, [*compress(micro_batches, needed)]))
        said = [self._ask(teacher, place, next(shown)) if is_needed else None for is_needed in needed]
        if self._distill.over_vocabulary:
            return said
        return [
            torch.where(mine, one, 0.0) if isinstance(one, Tensor) else one
            for mine, one in zip(wanted, said, strict=True)
        ]

    def _shown(self, place: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with what the teacher at this place makes of their images; every rank that trains must
        call this."""
        look = self._look[place]
        if look is None:
            return micro_batches
        shown, _ = look([replace(one, image_features=None, pixels=None) for one in micro_batches])
        return shown

    def _ask(self, teacher: FrozenModel, place: int, micro_batch: MicroBatch) -> Tensor | TopTokens:
        """Return the teacher's hidden states [N, D], most probable tokens or log-probabilities [T], on the host."""
        assert self._distill is not None
        sees_more = self._distill.by_place[place].hint_column is not None
        seen = hinted(micro_batch) if sees_more else micro_batch
        if self._distill.top_k is not None:
            num_rows = self._policy.num_head_rows
            top = teacher.top_tokens(seen, place, k=self._distill.top_k, num_rows=num_rows)
            return top.to(torch.device("cpu"))
        if self._distill.over_vocabulary:
            return teacher.hidden(seen, place).cpu()
        said = teacher(seen).logprobs.cpu()
        return unhinted(said, micro_batch) if sees_more else said

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Surround updates: the policy takes divergences from the teachers, whose heads are freed afterwards."""
        if self._distill is None or not self._distill.over_vocabulary:
            yield
            return
        heads = [self._heads.get(one.model) for one in self._distill.by_place]
        try:
            with self._policy.learning_from(Teaching(self._distill.divergences, self._distill.jsd_beta, heads)):
                yield
        finally:
            self._heads.clear()


def _is_finite(said: Tensor | TopTokens) -> bool:
    return bool(torch.isfinite(said.logprobs if isinstance(said, TopTokens) else said).all())


def _sum(micro_batch: MicroBatch, parts: Iterable[Tensor | None]) -> Tensor:
    """Add what teachers say of tokens, [T] each and 0 for the tokens of others."""
    return sum((part for part in parts if part is not None), torch.zeros(len(micro_batch.token_ids)))


def penalty(micro_batch: MicroBatch) -> Tensor:
    """[T] float64: log p - log teacher of each sampled token times its weight, with p of the policy before the updates.

    It estimates KL(policy || teacher). 0 for tokens that are not distilled, and where there is no teacher."""
    return _weights(micro_batch) * _sampled_kl(micro_batch)


def sampled_metrics(micro_batch: MicroBatch) -> Metrics:
    """The mean of that estimate over the distilled tokens, in nats."""
    if micro_batch.teacher_logprobs is None:
        return {}
    distilled = _weights(micro_batch) != 0
    total = float(torch.where(distilled, _sampled_kl(micro_batch), 0.0).sum())
    return {"distill/sampled_kl_nats": Mean(total, float(distilled.sum()))}


def _weights(micro_batch: MicroBatch) -> Tensor:
    """[T] float64."""
    weights = micro_batch.distill_weights
    return torch.zeros(len(micro_batch.token_ids), dtype=torch.float64) if weights is None else weights.double()


def _sampled_kl(micro_batch: MicroBatch) -> Tensor:
    """[T] float64 nats."""
    old, teacher = micro_batch.old_logprobs, micro_batch.teacher_logprobs
    if old is None or teacher is None:
        return torch.zeros(len(micro_batch.token_ids), dtype=torch.float64)
    return kl_at_loss_tokens(old.double(), teacher.double(), micro_batch.loss_mask, estimator="k1")


def teacher_lines(cfg: Config | SftConfig) -> Iterator[str]:
    """Yield a line about each teacher of a run, for --dry-run."""
    for one in cfg.distill.by_place if cfg.distill else ():
        model = cfg.models[one.model]
        own = (
            "the policy without its adapters"
            if model.is_own_base
            else _OWN.get(model.weights or "", "the policy itself")
        )
        tasks = "all other data sources" if one.tasks is None else ", ".join(one.tasks)
        said = "what the environment said" if one.hint_column == FEEDBACK else f'the column "{one.hint_column}"'
        sees = "" if one.hint_column is None else f", which sees {said}"
        yield f"teacher {one.model} of {tasks}: {model.path or own}{sees}"
