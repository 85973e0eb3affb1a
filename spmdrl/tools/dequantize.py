"""`python -m spmdrl.tools.dequantize SOURCE DIR`: writes a checkpoint in MXFP4 or FP8 with bfloat16 weights.

Runs read such checkpoints as they are; this is for programs that do not.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdrl.config.strict import read_json
from spmdrl.faults.text import Parser, say
from spmdrl.model.few_bits import as_numbers, file_name, quantization_of, quantization_refusal
from spmdrl.model.weight_files import heads_of, write_tensors
from spmdrl.tools.program import program
from spmdrl.types import UserError


def dequantize(source: Path, destination: Path) -> int:
    """Write the directory with bfloat16 weights, and return the number of weights that were of few bits.

    It takes a file at a time, and the memory of the largest. All other files are copied. Raises UserError when the
    source is not in a format that is known here, and when it lacks scales.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source} is not a model directory: it has no config.json")
    quantization = quantization_of(source)
    if quantization is None:
        raise UserError(f"{source} is not quantized: its config.json has no quantization_config")
    if refusal := quantization_refusal(quantization):
        raise UserError(f"{source}: {refusal}")
    if destination.exists():
        raise UserError(f"{destination} exists; name a new directory")
    heads = {file.name: heads_of(file) for file in sorted(source.glob("*.safetensors"))}
    stored = {name: weight for of_file in heads.values() for name, weight in of_file.items()}
    weights = as_numbers(stored, quantization)
    destination.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for file, of_file in heads.items():
        names = [name for name in weights if file_name(name, stored) in of_file]
        weight_map |= dict.fromkeys(names, file)
        write_tensors(destination / file, {name: weights[name][...] for name in names}, {"format": "pt"})
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, destination / path.name)
    if (source / "model.safetensors.index.json").is_file():
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = read_json(source / "config.json", dict[str, Any])
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
    (destination / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    return sum(weights[name] is not stored.get(name) for name in weights)


@program("cannot dequantize")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and return its exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", type=Path, help="a directory whose weights are in MXFP4 or FP8")
    parser.add_argument("dir", type=Path, help="a new directory")
    arguments = parser.parse_args(argv)
    say(f"{arguments.dir}: {dequantize(arguments.source, arguments.dir):,} weights in bfloat16")


if __name__ == "__main__":
    sys.exit(main())
