"""Each distinct image of a step is looked at once, by a rank that has its pixels, and seen by all that show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.algo.metrics import scalars
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.load import load_policy
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.step.images import Images
from spmdrl.types import MicroBatch, UserError
from tests.helpers.configs import model_config
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import Picture, mixed_sequences, picture, save_gemma3_vl, save_qwen3_vl, stored

NUM_RANKS = 2


@dataclass(frozen=True)
class Looked:
    """The features that one rank gave its micro-batches, with one store and with a store for each rank."""

    features: list[tuple[Tensor, ...]]
    apart: list[tuple[Tensor, ...]]
    pixels: list[tuple[Tensor, ...]]
    digests: list[list[str]]
    metrics: dict[str, float]
    lost: str
    without_images: list[tuple[list[MicroBatch], dict[str, float]]]  # frozen and trained


def _looked(path: str, folder: str) -> Looked:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        sequences, pictures = mixed_sequences(path)
        sequences, _ = stored(sequences, pictures, Path(folder, f"together {world.rank}"))
        # As on two nodes: each has some of the images, and both have one of them.
        mine = ImageStore(Path(folder, f"apart {world.rank}"), max_bytes=2**24)
        for number in ((0, 1), (1, 2, 3))[world.rank]:
            shown = picture(path, number)
            mine.put(shown.pixels, shown.grid)
        together = ImageStore(Path(folder, f"together {world.rank}"), max_bytes=2**24)
        # A group of four for each sequence, dealt out to both ranks.
        batches = [lay_end_to_end([one, one], {}) for one in sequences] + [lay_end_to_end([], {})]
        policies = {
            freeze: load_policy(model_config(path, freeze=freeze), meshes.model, temperature=1.0)
            for freeze in (None, ())
        }
        found, metrics = _images(policies[None], together, meshes).encode(batches)
        apart, _ = _images(policies[None], mine, meshes).encode(batches)
        sent, _ = _images(policies[()], mine, meshes).encode(batches)
        empty = ImageStore(Path(folder, f"empty {world.rank}"), max_bytes=2**24)
        with pytest.raises(UserError) as lost:
            _images(policies[None], empty, meshes).encode(batches)
        of_text = []
        for policy in policies.values():
            seen, counts = _images(policy, empty, meshes).encode(batches[-1:])
            of_text.append((seen, scalars(merge_over(meshes.training, counts))))
        return Looked(
            [one.image_features or () for one in found],
            [one.image_features or () for one in apart],
            [one.pixels or () for one in sent],
            [list(one.distinct_images) for one in batches],
            scalars(merge_over(meshes.training, metrics)),
            str(lost.value),
            of_text,
        )


def _images(policy: Policy, store: ImageStore, meshes: Meshes) -> Images:
    return Images(policy, store, meshes, dtype=torch.float32, max_patches=16)


@pytest.mark.parametrize("save", [save_qwen3_vl, save_gemma3_vl])
def test_an_image_is_looked_at_once_wherever_it_lies(tmp_path: Path, save) -> None:
    path = save(tmp_path / "model")
    ranks = run_ranks(NUM_RANKS, _looked, path, str(tmp_path))
    patches = {number: picture(path, number).grid for number in range(4)}
    total = sum(rows * columns for _, rows, columns in patches.values())
    by_digest: dict[str, Tensor] = {}
    for looked in ranks:
        assert looked.metrics["images/distinct"] == 4 and looked.metrics["images/patches"] == total
        assert 2 <= looked.metrics["images/tower_passes"] <= 4
        assert "the pixels of 4 of a step's 4 images are on no node any more" in looked.lost
        assert len(looked.features) == 7 and looked.features[-1] == ()
        for found, apart, names in zip(looked.features, looked.apart, looked.digests, strict=True):
            assert len(found) == len(apart) == len(names)
            for name, one, other in zip(names, found, apart, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
                torch.testing.assert_close(one, by_digest.setdefault(name, one), rtol=0, atol=0)
        for (one,), counts in looked.without_images:
            assert one.image_features is None and not any(counts.values()), "a step of text alone"
    assert len(by_digest) == 4
    _require_pixels(ranks, [picture(path, number) for number in range(4)])


def _require_pixels(ranks: list[Looked], pictures: list[Picture]) -> None:
    """A tower that is trained gets the pixels themselves, and where there are none those of a blank image."""
    for looked in ranks:
        for pixels, names in zip(looked.pixels, looked.digests, strict=True):
            assert len(pixels) == max(1, len(names))
            for one in pixels if names else ():
                assert any(one.shape == shown.pixels.shape and torch.equal(one, shown.pixels) for shown in pictures)
            assert names or not pixels[0].any()


def test_micro_batches_share_the_features_of_an_image() -> None:
    """`to` moves the tensors of a batch that have an entry for each token, and nothing else."""
    feature = torch.zeros(2, 1, 4)
    batch = MicroBatch(
        token_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        loss_mask=torch.zeros(3, dtype=torch.bool),
        loss_weights=torch.zeros(3),
        rollout_logprobs=torch.zeros(3),
        rewards=torch.zeros(3, dtype=torch.float64),
        baseline_rewards=torch.zeros(3, dtype=torch.float64),
        image_features=(feature,),
    )
    moved = batch.to(torch.device("meta")).image_features
    assert moved is not None and moved[0] is feature
