"""The images of a step: a frozen tower encodes each of them once, whatever number of sequences and passes show it.

A trained tower encodes them in every forward pass of its model, and gets their pixels with the micro-batches. In both
cases an image may lie on any node: ranks that have its pixels encode it, or send them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.metrics import Metrics, Total
from spmdrl.algo.packing import num_micro_batches, pack
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.dist.exchange import send_tensors
from spmdrl.dist.mesh import Meshes
from spmdrl.model.policy import PackedModel
from spmdrl.model.sharding import reshard
from spmdrl.rollout.env_context import restore_rollout
from spmdrl.run import Launch, SettingsT
from spmdrl.step.batch import Batch
from spmdrl.types import ImageSpan, MicroBatch, Prompt, Rollout, UserError


class Images:
    """Encodes the images of micro-batches; does nothing where there are none."""

    def __init__(
        self,
        model: PackedModel,
        store: ImageStore | None,
        meshes: Meshes,
        *,
        dtype: torch.dtype,
        max_patches: int,
        restore_prompt: Callable[[Prompt], object] = lambda _: None,
        restore_rollout: Callable[[Rollout], object] = lambda _: None,
    ) -> None:
        """`dtype` is that of features on the host, `max_patches` the most in one pass of the tower, unless one image
        has more. `restore_prompt` puts the images of a prompt into the store where they are missing, `restore_rollout`
        those that an environment has shown."""
        self._model, self.store, self._mesh = model, store, meshes.training
        self._dtype, self._max_patches = dtype, max_patches
        self._restore_prompt, self._restore_rollout = restore_prompt, restore_rollout
        towers = model.trunk.towers
        self._is_trained = any(weight.requires_grad for tower in towers for weight in tower.parameters())

    def restore(self, rollouts: Iterable[Rollout]) -> None:
        """Put those images of rollouts into the store that it lacks, such as those of rollouts that another run began;
        every rank that trains must call this with its own."""
        if self.store is None:
            return
        all_of_them = list(rollouts)
        prompts = {rollout.prompt.prompt_id: rollout.prompt for rollout in all_of_them}
        with raise_on_all_ranks(self._mesh):
            for prompt in prompts.values():
                self._restore_prompt(prompt)
            for rollout in all_of_them:
                self._restore_rollout(rollout)

    def encode_batch(self, batch: Batch, others: Sequence[MicroBatch] = ()) -> tuple[Batch, list[MicroBatch], Metrics]:
        """Call `encode` for the micro-batches of a batch, and for others; nothing stays gathered."""
        own = batch.micro_batches
        found, metrics = self.encode([*own, *others])
        reshard(self._model)  # what computes next needs the memory
        return batch.with_micro_batches(found[: len(own)]), found[len(own) :], metrics

    def encode(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], Metrics]:
        """Return the micro-batches with what the model needs of their images; every rank that trains must call this.

        That are features of a frozen tower, and pixels for one that is trained. Raises UserError on all ranks when no
        rank has the pixels of an image.
        """
        if self.store is None:
            return list(micro_batches), {}
        shown = {digest: image for one in micro_batches for digest, image in one.distinct_images.items()}
        wanted = gather_objects(self._mesh, shown)
        union = {digest: image for part in wanted for digest, image in part.items()}
        images = {digest: union[digest] for digest in sorted(union)}  # in the same order on every rank
        names = [set(part) for part in wanted]
        if self._is_trained:
            pixels = self._send(images, names)
            blank, _ = self._model.trunk.blank_image()
            of_each = [tuple(pixels[digest] for digest in one.distinct_images) or (blank,) for one in micro_batches]
            passes = 0
            found = [replace(one, pixels=part) for one, part in zip(micro_batches, of_each, strict=True)]
        else:
            features, passes = self._encode(images, names)
            found = [
                replace(one, image_features=tuple(features[digest] for digest in one.distinct_images))
                if one.images
                else one
                for one in micro_batches
            ]
        is_first = self._mesh.get_local_rank() == 0
        return found, {
            "images/distinct": Total(float(is_first * len(images))),
            "images/patches": Total(float(is_first * sum(map(_num_patches, images.values())))),
            "images/tower_passes": Total(float(passes)),
        }

    def _holders(self, images: dict[str, ImageSpan]) -> dict[str, list[int]]:
        """List the ranks that have each image's pixels. Raises UserError where that are none."""
        assert self.store is not None
        here = [digest in self.store for digest in images]
        everywhere = gather_objects(self._mesh, here)
        holders = {
            digest: [rank for rank, stored in enumerate(everywhere) if stored[place]]
            for place, digest in enumerate(images)
        }
        if lost := [digest for digest, ranks in holders.items() if not ranks]:
            raise UserError(
                f"the pixels of {len(lost)} of a step's {len(images)} images are on no node any more, the first are "
                f"those of {lost[0]}; raise data.image_store_gib, or lower rollout.prompts_per_step"
            )
        return holders

    def _encode(self, images: dict[str, ImageSpan], wanted: list[set[str]]) -> tuple[dict[str, Tensor], int]:
        """Return (features of the images that this rank wants, passes of the tower on it)."""
        holders = self._holders(images)
        encoded_by = _divide(images, holders, num_ranks=self._mesh.size())
        mine = [digest for digest, rank in encoded_by.items() if rank == self._mesh.get_local_rank()]
        found: dict[str, Tensor] = {}
        passes = self._passes(images, encoded_by)
        for digests in passes:
            found |= self._pass([images[digest] for digest in digests])
        assert found.keys() == set(mine)
        family, hidden = self._model.trunk.family, self._model.model.config.get_text_config().hidden_size
        assert family is not None
        sizes = {digest: torch.Size([image.num_tokens, family.num_levels, hidden]) for digest, image in images.items()}
        sent = send_tensors(found, sizes, dtype=self._dtype, sent_by=encoded_by, wanted=wanted, mesh=self._mesh)
        return sent, sum(map(bool, passes))

    def _passes(self, images: dict[str, ImageSpan], encoded_by: dict[str, int]) -> list[list[str]]:
        """Divide this rank's images into passes of about as many patches, as many as on every other rank."""
        limits: dict[str, Any] = {"max_tokens": self._max_patches, "sequences_per_micro_batch": None}
        shares = [
            [digest for digest, rank in encoded_by.items() if rank == other] for other in range(self._mesh.size())
        ]
        lengths = [[min(_num_patches(images[digest]), self._max_patches) for digest in share] for share in shares]
        number = max(num_micro_batches(of_share, **limits) for of_share in lengths) if images else 0
        mine = self._mesh.get_local_rank()
        return [[shares[mine][i] for i in one] for one in pack(lengths[mine], **limits, min_bins=number)][:number]

    @torch.no_grad()
    def _pass(self, images: Sequence[ImageSpan]) -> dict[str, Tensor]:
        """Encode images together; a rank without any encodes a blank one, in step with the others."""
        assert self.store is not None
        pixels = [self.store.get(image.digest) for image in images]
        grids = [image.grid for image in images]
        if not images:
            blank, grid = self._model.trunk.blank_image()
            pixels, grids = [blank], [grid]
        assert all(one is not None for one in pixels), "an image was removed while it was encoded"
        features = self._model.encode(pixels, grids)  # type: ignore[arg-type]
        return {image.digest: one.to("cpu", self._dtype) for image, one in zip(images, features, strict=False)}

    def _send(self, images: dict[str, ImageSpan], wanted: list[set[str]]) -> dict[str, Tensor]:
        """Return the pixels of the images that this rank wants, of its own node or from another."""
        assert self.store is not None
        sent_by = {digest: ranks[0] for digest, ranks in self._holders(images).items()}
        mine = [digest for digest, rank in sent_by.items() if rank == self._mesh.get_local_rank()]
        own = {digest: pixels for digest in mine if (pixels := self.store.get(digest)) is not None}
        blank, _ = self._model.trunk.blank_image()
        sizes = {
            digest: blank.shape if blank.ndim == 4 else torch.Size([_num_patches(image), blank.shape[1]])
            for digest, image in images.items()
        }
        return send_tensors(own, sizes, dtype=torch.float32, sent_by=sent_by, wanted=wanted, mesh=self._mesh)


def _num_patches(image: ImageSpan) -> int:
    return math.prod(image.grid)


def _divide(images: dict[str, ImageSpan], holders: dict[str, list[int]], *, num_ranks: int) -> dict[str, int]:
    """Choose the rank that encodes each image: of those that have it, the one with the fewest patches so far."""
    load = [0] * num_ranks
    chosen: dict[str, int] = {}
    for digest in sorted(images, key=lambda digest: (-_num_patches(images[digest]), digest)):
        rank = min(holders[digest], key=lambda rank: (load[rank], rank))
        load[rank] += _num_patches(images[digest])
        chosen[digest] = rank
    return {digest: chosen[digest] for digest in images}


def start_images(run: Launch[SettingsT], model: PackedModel) -> Images:
    """Make the encoder of the images of a run's steps."""
    return Images(
        model,
        run.inputs.images.store,
        run.meshes,
        dtype=run.dtype,
        max_patches=run.cfg.pack.max_patches_per_pass,
        restore_prompt=run.inputs.prompts.restore,
        restore_rollout=partial(restore_rollout, images=run.inputs.images),
    )
