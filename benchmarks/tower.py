"""Measure what a step's images cost a frozen tower, beside a tower that runs in every pass over every sequence.

    python benchmarks/tower.py [--prompts 8] [--group-size 8] [--repeats 5] [--threads 2]

A small random Qwen3-VL trains on groups of rollouts whose prompts show an image each. spmdrl looks at each distinct
image once a step and keeps the features on the host. The peer is transformers' own way: each forward pass takes pixels
with its sequences, here in the three passes of a step with a reference and several updates (old log-probabilities,
reference, update), without gradients. Both run on the same micro-batches and in turns. Prints one JSON object:
`spmdrl_s` and `peer_s` (a step each), `spmdrl_patches` and `peer_patches` that went through the tower, `features_mib`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import workload
from program import seconds
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from spmdrl.algo.packing import pack
from spmdrl.config import ModelConfig
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.families import VisionFamily, vision_family
from spmdrl.model.load import load_policy
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.step.images import Images
from spmdrl.types import ImageSpan, MicroBatch
from spmdrl.types import Sequence as Trajectory

PASSES = 3  # of a step: old log-probabilities, the reference's, the update
GRID = (1, 16, 16)  # patches of each image
RESPONSE_TOKENS = 100
MICRO_BATCH_TOKENS = 4096
IMAGE = 3  # the placeholder
TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "deepstack_visual_indexes": [1, 2]}

CONFIG = Qwen3VLConfig(
    text_config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [8, 4, 4]},
    },
    vision_config=TOWER | {"out_hidden_size": 128},
    image_token_id=IMAGE,
    video_token_id=4,
    vision_start_token_id=5,
    vision_end_token_id=6,
)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="each with an image of its own")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--repeats", type=int, default=5, help="pairs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        spmd_session(threads_per_rank=args.threads, deterministic=False) as world,
    ):
        Qwen3VLForConditionalGeneration(CONFIG).save_pretrained(folder)
        meshes = build_meshes(world)
        policy = load_policy(ModelConfig(path=folder), meshes.model, temperature=1.0)
        store = ImageStore(Path(folder, "images"), max_bytes=2**30)
        micro_batches = step_of(store, policy, prompts=args.prompts, group_size=args.group_size)
        images = Images(policy, store, meshes, dtype=torch.float32, max_patches=16384)
        found, metrics = images.encode(micro_batches)
        features = {id(one): one.nbytes for batch in found for one in batch.image_features or ()}
        result = {
            "spmdrl_s": [],
            "peer_s": [],
            "spmdrl_patches": int(metrics["images/patches"].value()),
            "peer_patches": PASSES * sum(math.prod(image.grid) for batch in micro_batches for image in batch.images),
            "features_mib": sum(features.values()) / 2**20,
            "load_average": load_average,
            "versions": workload.versions(["torch", "transformers"]),
        }
        for _ in range(args.repeats):
            result["spmdrl_s"].append(seconds(lambda: images.encode(micro_batches)))
            result["peer_s"].append(seconds(lambda: in_every_pass(policy, store, micro_batches)))
        result["ratio"] = statistics.median(result["spmdrl_s"]) / statistics.median(result["peer_s"])
        store.close()
    print(json.dumps(result))


def step_of(store: ImageStore, policy: Policy, *, prompts: int, group_size: int) -> list[MicroBatch]:
    """The micro-batches of a step; the images are in the store."""
    family = vision_family(policy.model.config)
    assert family is not None
    generator = torch.Generator().manual_seed(0)
    groups = [[rollout(store, family, generator)] * group_size for _ in range(prompts)]
    sequences = [sequence for group in groups for sequence in group]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    bins = pack(lengths, max_tokens=MICRO_BATCH_TOKENS, sequences_per_micro_batch=None)
    return [lay_end_to_end([sequences[place] for place in one], {}) for one in bins]


def rollout(store: ImageStore, family: VisionFamily, generator: torch.Generator) -> Trajectory:
    """A prompt that shows a random image, and a random response."""
    vision = CONFIG.vision_config
    pixels = torch.randn(math.prod(GRID), 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
    number = family.num_tokens(GRID)
    prompt = [10, 11, *[IMAGE] * number, 12, 13]
    response = torch.randint(20, 500, (RESPONSE_TOKENS,), generator=generator).tolist()
    return Trajectory(
        index=0,
        token_ids=(*prompt, *response),
        loss_mask=(False,) * len(prompt) + (True,) * len(response),
        rollout_logprobs=(0.0,) * (len(prompt) + len(response)),
        reward=0.0,
        images=(ImageSpan(digest=store.put(pixels, GRID), start=2, num_tokens=number, grid=GRID),),
    )


@torch.no_grad()
def in_every_pass(policy: Policy, store: ImageStore, micro_batches: Sequence[MicroBatch]) -> None:
    """Run the tower for every sequence of every pass."""
    for _ in range(PASSES):
        for micro_batch in micro_batches:
            pixels = [pixels_of(store, image) for image in micro_batch.images]
            policy.encode(pixels, [image.grid for image in micro_batch.images])


def pixels_of(store: ImageStore, image: ImageSpan) -> Tensor:
    """The pixels of an image, which is in the store."""
    pixels = store.get(image.digest)
    assert pixels is not None
    return pixels


if __name__ == "__main__":
    main()
