"""Compile Triton's kernels of the head for a GPU that need not be there, and print their assembly code as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from spmdrl.model import logits_tile_triton as tile

SHARED = {"logits": "*bf16", "stride": "i32", "width": "i32", "places": "*i64", "temperature": "fp32"}
OTHERS = {"after": "*fp32", "num_tokens": "i32", "log_normalizer": "*fp32", "entropy": "*fp32", "by_logprob": "*fp32"}
ALIGNED = ("stride", "width")  # multiples of 16, as tiles on CUDA have them


def ptx(kernel: Any, optional: str, *, capability: int, is_given: bool) -> str:
    """The PTX of a kernel with a temperature and its optional argument, or without both; assembled on the way."""
    types = SHARED | OTHERS | {optional: "*fp32"}
    constants = {"IS_SCALED": is_given, "BLOCK": tile._BLOCK} | ({} if is_given else {optional: None})
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name not in constants and (types[name].startswith("*") or name in ALIGNED)
        },
    )
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": tile._WARPS})
    assert compiled.asm["cubin"], "the assembler has refused it"
    return compiled.asm["ptx"]


if __name__ == "__main__":
    kernels = {"summary": (tile._summary, "before"), "gradient": (tile._gradient, "by_entropy")}
    found = {
        f"{name} {capability} {is_given}": ptx(*kernel, capability=capability, is_given=is_given)
        for name, kernel in kernels.items()
        for capability in map(int, sys.argv[1:])
        for is_given in (False, True)
    }
    print(json.dumps(found))
