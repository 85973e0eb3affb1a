"""Export the policy as a Hugging Face directory, in a dtype or in the format of the model that it was loaded from."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from spmdrl.config.strict import read_json
from spmdrl.dist.collectives import barrier
from spmdrl.dist.mesh import Meshes
from spmdrl.families import family_of
from spmdrl.memory.device import EXPORT_BUCKET_BYTES, EXPORT_FILE_BYTES
from spmdrl.model.few_bits import StoredFormat
from spmdrl.model.load import DTYPES
from spmdrl.model.lora.peft import write_adapter
from spmdrl.model.policy import PackedModel, RewardModel
from spmdrl.model.weight_files import stored_format, unused_parts, write_tensors
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.gather import Gatherer
from spmdrl.types import UserError

# By which a model makes pixels of images.
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def refuse_overwriting(model_path: str, destination: Path) -> None:
    """Raise UserError when an export would overwrite the model it was loaded from, or lie around or inside it."""
    source, target = Path(os.path.realpath(model_path)), Path(os.path.realpath(destination))
    is_of_a_step = source.parent == target.parent and source.name.startswith(f"{target.name}-")
    if source == target or is_of_a_step or source in target.parents or target in source.parents:
        raise UserError(
            f'model.path = "{model_path}" is where this run would export its own model ({destination}); '
            "set run.name or run.dir to another folder, or move the model"
        )


class ExportFormat(TypedDict):
    """In which dtype or format an export is written; see `export_hf`."""

    dtype: torch.dtype
    as_source: bool


def written_as(setting: str, sampled: torch.dtype) -> ExportFormat:
    """Return what `export.dtype` means in a run that samples with the dtype `sampled`."""
    return {"dtype": DTYPES.get(setting, sampled), "as_source": setting == "source"}


def export_hf(
    policy: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    destination: Path,
    meshes: Meshes,
    *,
    dtype: torch.dtype,
    as_source: bool = False,
    bucket_bytes: int = EXPORT_BUCKET_BYTES,
    file_bytes: int = EXPORT_FILE_BYTES,
) -> None:
    """Write config, tokenizer, processor and safetensors weights in `dtype`, adapters merged into their base; every
    rank that trains must call this. `as_source` writes each weight that the model's own files have in their format.

    The files are dealt out to the ranks that hold one copy of the model; none ever has all of it. The directory
    appears whole or not at all; one that was there before is replaced.
    """
    ranks = meshes.model.copy
    # The ranks of the first copy write, which begin the order of the ranks that train.
    writes = meshes.training.get_local_rank() < ranks.size()
    with _appearing_whole(destination, meshes) as unfinished:
        source = policy.model.name_or_path
        stored = stored_format(source) if as_source else StoredFormat({}, None)
        gatherer = Gatherer(
            policy,
            ranks,
            dtype=dtype,
            dtype_of=stored.widest,
            bucket_bytes=bucket_bytes,
            naming="checkpoint",
            merge=True,
        )
        files = list(_files(gatherer.buckets, file_bytes))
        unused = unused_parts(policy.model, source, stored if as_source else None)
        names = _file_names(len(files) + bool(unused))
        mine = range(ranks.get_local_rank(), len(files), ranks.size()) if writes else range(0)
        _write_weights(gatherer, stored, files, [unfinished / name for name in names[: len(files)]], mine)
        if meshes.training.get_local_rank() == 0:
            sizes: dict[str, dict[str, int]] = {name: {} for name in names}
            for name, buckets in zip(names, files, strict=False):
                for entry in itertools.chain.from_iterable(bucket.flat_entries for bucket in buckets):
                    sizes[name] |= stored.num_bytes(entry.name, entry.shape, entry.dtype)
            if unused:
                tensors = {name: weight[...] for name, weight in unused.items()}
                write_tensors(unfinished / names[-1], tensors, {"format": "pt"})
                sizes[names[-1]] = {name: tensor.nbytes for name, tensor in tensors.items()}
            _write_the_rest(policy, tokenizer, unfinished, None if as_source else dtype, sizes)


def export_adapter(policy: PackedModel, destination: Path, meshes: Meshes) -> None:
    """Write the policy's adapters, if it has any, as a PEFT directory; every rank that trains must call this."""
    if policy.adapters is None:
        return
    with _appearing_whole(destination, meshes) as unfinished:
        if meshes.training.get_local_rank() == 0:
            write_adapter(unfinished, policy.adapters.config, policy.adapters.tensors)


@contextmanager
def _appearing_whole(destination: Path, meshes: Meshes) -> Iterator[Path]:
    """Give a directory to write into, which becomes `destination` once every rank has left the block."""
    is_first = meshes.training.get_local_rank() == 0
    unfinished = destination.with_name(destination.name + ".unfinished")
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier(meshes.training)
    yield unfinished
    barrier(meshes.training)
    if is_first:
        shutil.rmtree(destination, ignore_errors=True)
        unfinished.rename(destination)
    barrier(meshes.training)


def _files(buckets: Sequence[Bucket], file_bytes: int) -> Iterator[list[Bucket]]:
    """Group neighbouring buckets into files of at most `file_bytes`, or of one bucket."""
    file: list[Bucket] = []
    for bucket in buckets:
        if file and sum(other.num_bytes for other in file) + bucket.num_bytes > file_bytes:
            yield file
            file = []
        file.append(bucket)
    yield file


def _file_names(count: int) -> list[str]:
    """Name the weight files as transformers does."""
    if count == 1:
        return [SAFE_WEIGHTS_NAME]
    stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_weights(
    gatherer: Gatherer,
    stored: StoredFormat,
    files: Sequence[Sequence[Bucket]],
    paths: Sequence[Path],
    mine: range,
) -> None:
    """Gather every file's tensors with the other ranks and write those of `mine` in the format `stored`, while the next
    ones are gathered."""
    gathered = gatherer.whole_tensors()
    written: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="export") as writer:
        for number, (buckets, path) in enumerate(zip(files, paths, strict=True)):
            tensors: dict[str, Tensor] = {}
            for bucket in itertools.islice(gathered, len(buckets)):
                for name, whole in bucket if number in mine else ():
                    made = stored.encoded(name, whole)
                    tensors |= {part: tensor.to("cpu", copy=True) for part, tensor in made.items()}
            if tensors:
                if written:
                    written.result()
                written = writer.submit(write_tensors, path, tensors, {"format": "pt"})
        if written:
            written.result()


def _write_the_rest(
    policy: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    files: dict[str, dict[str, int]],
) -> None:
    """Write config, tokenizer, processor, the model's own code if it has any, and the index of tensors by file;
    `files` are the bytes of each tensor in them. Without a `dtype` the config says of them what the model's own says.
    """
    model = policy.model
    config = copy.deepcopy(model.config)
    if dtype is None:
        _describe_as_source(config, Path(model.name_or_path))
    else:
        config.dtype = dtype  # of the files, not of the master weights
    if family_of(config).of_sounds:  # their tower's weights are among the files
        config.audio_config = AutoConfig.from_pretrained(model.name_or_path).audio_config
    if isinstance(policy, RewardModel):
        # transformers reads the score at the last token that is not padding: the one that ends an answer must be none.
        # Without padding it takes one sequence at a time, and reads its last token.
        pads = tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
        config.pad_token_id = tokenizer.pad_token_id if pads else None
    config.save_pretrained(folder)
    if model.generation_config is not None and not isinstance(policy, RewardModel):
        model.generation_config.save_pretrained(folder)
    if model._auto_class is not None:
        custom_object_save(model, folder, config=config)
    tokenizer.save_pretrained(folder)
    for name in _PROCESSOR_FILES:
        source = Path(model.name_or_path, name)
        if source.is_file() and not (folder / name).exists():
            shutil.copyfile(source, folder / name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files.values())},
            "weight_map": {tensor: name for name, sizes in files.items() for tensor in sizes},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _describe_as_source(config: Any, source: Path) -> None:
    """Take what the config.json of the model that the weights came from says of their dtype and quantization."""
    said = read_json(source / "config.json", dict[str, Any])
    for part, of_part in ((config, said), (config.get_text_config(), said.get("text_config"))):
        if of_part is not None:
            dtype = of_part.get("dtype", of_part.get("torch_dtype"))
            part.dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else None
            if quantization := of_part.get("quantization_config"):
                part.quantization_config = quantization
