"""The policy as a Hugging Face directory, with the weights the engine sampled with."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.dist.collectives import barrier
from spmdrl.dist.mesh import Meshes
from spmdrl.memory import EXPORT_BUCKET_BYTES
from spmdrl.model.policy import Policy
from spmdrl.refit.gather import Gatherer
from spmdrl.types import UserError


def refuse_overwriting(model_path: str, destination: Path) -> None:
    """Raise UserError when an export would land on the model it was loaded from, or around or inside it."""
    source, target = Path(model_path).resolve(), destination.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise UserError(
            f'model.path = "{model_path}" is where this run would export its own model ({destination}); '
            "set run.name or run.dir to another folder, or move the model"
        )


def export_hf(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    destination: Path,
    meshes: Meshes,
    *,
    dtype: torch.dtype,
    bucket_bytes: int = EXPORT_BUCKET_BYTES,
) -> None:
    """Write config, tokenizer and safetensors weights in `dtype`; the first rank writes, all must call this.

    The directory appears whole or not at all; one that was there before is replaced.
    """
    writes = meshes.training.get_local_rank() == 0
    # The model's own names: saving turns them into a checkpoint's.
    gatherer = Gatherer(policy, meshes.model.copy, dtype=dtype, bucket_bytes=bucket_bytes, naming="model")
    weights: dict[str, torch.Tensor] = {}
    for bucket in gatherer.whole_tensors():
        if writes:
            weights |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    if writes:
        unfinished = destination.with_name(destination.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        policy.model.save_pretrained(unfinished, state_dict=weights)
        config = copy.deepcopy(policy.model.config)
        config.dtype = dtype  # of the files, not of the master weights
        config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(destination, ignore_errors=True)
        unfinished.rename(destination)
    barrier(meshes.training)
