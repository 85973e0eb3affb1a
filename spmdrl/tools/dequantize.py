"""`python -m spmdrl.tools.dequantize SOURCE DIR`: writes a checkpoint in MXFP4 or FP8 with bfloat16 weights."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from spmdrl.config.strict import read_json
from spmdrl.faults.text import Parser, say
from spmdrl.model.weight_files import write_tensors
from spmdrl.tools.program import program
from spmdrl.types import UserError

# A weight of few bits lies beside its scales. It is made whole exactly as its format says, file by file and without a
# model: a directory of any size needs the memory of its largest file. All other files are copied.
#
#   MXFP4 (gpt-oss)   NAME_blocks [..., G, 16] uint8, two numbers a byte, and NAME_scales [..., G] uint8, exponents of 2
#                     plus 127. The 32 numbers of a block are inputs; NAME is [experts, inputs, outputs].
#   FP8 (DeepSeek)    NAME, a float8 matrix, and NAME_scale_inv, what each of its blocks is multiplied with, of the size
#                     that `weight_block_size` of config.json says; or one number for all of it.

_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_METHODS = ("mxfp4", "fp8")


def dequantize(source: Path, destination: Path) -> int:
    """Write the directory with bfloat16 weights, and return the number of weights that were of few bits.

    Raises UserError when the source is not in a format that is known here, and when it lacks scales.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source} is not a model directory: it has no config.json")
    config = read_json(source / "config.json", dict[str, Any])
    places = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    settings = next((part["quantization_config"] for part in places if "quantization_config" in part), None)
    if settings is None:
        raise UserError(f"{source} is not quantized: its config.json has no quantization_config")
    if (method := settings.get("quant_method")) not in _METHODS:
        raise UserError(f"{source} is quantized by {method}; {' and '.join(_METHODS)} can be read here")
    if destination.exists():
        raise UserError(f"{destination} exists; name a new directory")
    files = sorted(source.glob("*.safetensors"))
    scales = _scales_elsewhere(files)
    destination.mkdir(parents=True)
    number, weight_map = 0, dict[str, str]()
    for file in files:
        tensors = load_file(file)
        made = dict(_made(tensors, scales, settings.get("weight_block_size")))
        read = {*made, *scales, *(name + _BLOCKS for name in made)}
        whole = {name: tensor for name, tensor in tensors.items() if name not in read} | made
        number += len(made)
        weight_map |= dict.fromkeys(whole, file.name)
        write_tensors(destination / file.name, whole, {"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(file, destination / file.name)
    if (source / "model.safetensors.index.json").is_file():
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for part in places:
        part.pop("quantization_config", None)
    (destination / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    return number


def _scales_elsewhere(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """Read all scales, which are small and may be in another file than their weights."""
    scales = dict[str, Tensor]()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith((_SCALES, _INVERSE))]  # noqa: SIM118
            scales |= {name: tensors.get_tensor(name) for name in names}
    return scales


def _made(
    tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], block_size: Sequence[int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's weights of few bits by name, in bfloat16."""
    for name, tensor in tensors.items():
        if name.endswith(_BLOCKS):
            stem = name.removesuffix(_BLOCKS)
            yield stem, _of_mxfp4(tensor, _of(scales, stem + _SCALES))
        elif tensor.is_floating_point() and tensor.itemsize == 1 and name not in scales:
            yield name, _of_fp8(tensor, _of(scales, name + _INVERSE), block_size)


def _of(scales: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in scales:
        raise UserError(f"there are no scales {name} for a weight of few bits")
    return scales[name]


def _of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, outputs, G, 16] and [E, outputs, G] give [E, 32 G, outputs]."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # the lower half of a byte is the first
    numbers = values[pairs.int()] * torch.exp2(scales.float() - 127).bfloat16().unsqueeze(-1)
    return numbers.flatten(-2).transpose(1, 2).contiguous()


def _of_fp8(weight: Tensor, scale: Tensor, block_size: Sequence[int] | None) -> Tensor:
    """[..., outputs, inputs] and a number for each of their blocks, or for all, give [..., outputs, inputs]."""
    scale = scale.float()
    if scale.numel() > 1:
        if block_size is None:
            raise UserError("config.json has no weight_block_size for the scales of its weights")
        for dim, size in zip((-2, -1), block_size, strict=True):
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, weight.shape[dim])
    return (weight.float() * scale).bfloat16()


@program("cannot dequantize")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", type=Path, help="a directory whose weights are in MXFP4 or FP8")
    parser.add_argument("dir", type=Path, help="a new directory")
    arguments = parser.parse_args(argv)
    say(f"{arguments.dir}: {dequantize(arguments.source, arguments.dir):,} weights in bfloat16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
