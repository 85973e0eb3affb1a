"""Compile all Triton kernels for GPUs that need not be there, and print their assembly code as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from spmdrl.model import fused_triton as fused
from spmdrl.model import logits_tile_triton as tile
from spmdrl.refit import digest_triton as digest
from spmdrl.refit.digest import ROW_WORDS, TABLE_ROWS

# By argument, the same in every kernel; one that is not here is a 32-bit integer, or a constant.
POINTERS = {
    **dict.fromkeys(("logits", "x", "weight", "out", "grad", "grad_x", "gate", "up", "grad_gate", "grad_up"), "*bf16"),
    **dict.fromkeys(("after", "before", "log_normalizer", "entropy", "by_logprob", "by_entropy"), "*fp32"),
    **dict.fromkeys(("cos", "sin", "grad_weight"), "*fp32"),
    **dict.fromkeys(("targets", "described", "found"), "*i64"),
}
NUMBERS = {"temperature": "fp32", "softcap": "fp32", "eps": "fp32"}
ALIGNED = ("stride", "width")  # multiples of 16, as tiles on CUDA have them

Variant = tuple[str, Any, dict[str, Any], int]  # a name, the kernel, its constants, and the warps of a program


def of_head() -> Iterator[Variant]:
    """With a temperature, a soft cap and the optional argument, and without all three."""
    for name, kernel, optional in (("summary", tile._summary, "before"), ("gradient", tile._gradient, "by_entropy")):
        for is_given in (False, True):
            constants = {"IS_SCALED": is_given, "BLOCK": tile._BLOCK}
            constants |= {} if is_given else {optional: None, "softcap": None}
            yield f"{name} {is_given}", kernel, constants, tile._WARPS


def of_layers() -> Iterator[Variant]:
    """Heads of 128, of 80, which is no power of 2, and a single head, which Triton makes a constant of."""
    for kernel in (fused._rotate, fused._rotate_backward):
        for half, others in ((64, {}), (40, {}), (64, {"num_heads": 1})):
            for has_norm in (False, True):
                constants = {"HALF": half, "BLOCK": triton.next_power_of_2(half), "ROWS": fused._ROWS}
                constants |= {"HAS_NORM": has_norm} | others
                yield f"{kernel.__name__} {half} {has_norm} {others}", kernel, constants, 4
    for kernel in (fused._swiglu, fused._swiglu_backward):
        yield kernel.__name__, kernel, {"COLUMNS": fused._COLUMNS}, 4


def of_digests() -> Iterator[Variant]:
    """Yield the kernel of digests, with the arguments that a refit gives it."""
    constants = {"ROW": ROW_WORDS, "ROWS": TABLE_ROWS, "AT_ONCE": digest._ROWS_AT_ONCE}
    yield "digest", digest._add_tables, constants, digest._WARPS


def ptx(kernel: Any, constants: dict[str, Any], num_warps: int, *, capability: int) -> str:
    """The PTX of a kernel; it is assembled on the way."""
    names: Sequence[str] = kernel.arg_names
    types = {name: (POINTERS | NUMBERS).get(name, "i32") for name in names}
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
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    assert compiled.asm["cubin"], "the assembler has refused it"
    return compiled.asm["ptx"]


if __name__ == "__main__":
    found = {
        f"{name} {capability}": ptx(kernel, constants, num_warps, capability=capability)
        for name, kernel, constants, num_warps in (*of_head(), *of_layers(), *of_digests())
        for capability in map(int, sys.argv[1:])
    }
    print(json.dumps(found))
