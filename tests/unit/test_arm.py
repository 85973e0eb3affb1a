"""On ARM, functions in C compute what they compute here, and system calls have the numbers that the sandbox refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from spmdrl.cpu import kernels_c
from spmdrl.cpu.kernels_c import attend_short
from spmdrl.model.attention_layer import SeenKeys
from spmdrl.workers import sandbox
from tests.helpers.fused_cases import CASES, gradients, inputs_of
from tests.helpers.layers import layers_in_c
from tests.helpers.on_arm import COMPILER, MISSING, Call, recorded, run_on_arm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {' and no '.join(MISSING)}"),
]

FUNCTIONS = {
    *("attend", "attend_to_cache", "attend_newest", "attend_backward"),
    *("rms_norm", "rms_norm_backward", "rotate", "rotate_backward", "swiglu", "swiglu_backward"),
}


# The second has SVE, which vectors of a fixed length are split for.
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.5-a+sve2+bf16"])
def test_functions_in_c_are_the_same_but_for_rounding(processor: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 40, 17])
    seen = SeenKeys(lengths=lengths, shortest=1, longest=40, window=6)
    keys, values = torch.randn(2, 6, 3, 64, 24)
    with layers_in_c(), recorded() as recorder:
        for case in CASES:
            gradients(case.fused, [x.float() for x in inputs_of(case, torch.float64)])
        for heads, kv_heads, width in ((4, 2, 32), (8, 1, 16), (3, 3, 20)):
            q, k, v = (torch.randn(38, n, width, requires_grad=True) for n in (heads, kv_heads, kv_heads))
            attend_short(q, k, v, [1, 17, 20], 0.3).sin().sum().backward()
        kernels_c.attend_to_cache(torch.randn(4, 6, 24), keys[:4, :, :40], values[:4, :, :40], seen, 0.2)
        cos, sin = torch.randn(2, 4, 24)
        norms = torch.randn(24), torch.randn(24)
        kernels_c.attend_newest(torch.randn(4, 12, 24), norms, cos, sin, 1e-6, keys, values, seen, 0.2)
        kernels_c.attend_to_rows(torch.randn(24, 6, 24), keys, values, 2, [3, 20, 1], [37, 0, 5], 0.2)
    by_file = [[call for call in recorder.calls if call.source == source] for source in ("attention", "fused")]
    calls = [call for of_file in by_file for call in of_file]
    # By function and place: a call may leave a result as it was, where memory is used again that has just this result.
    results = {
        (_function_of(call), len(call.before), place)
        for call in calls
        for place, (before, here) in enumerate(zip(call.before, call.after, strict=True))
        if before.view(torch.uint8).ne(here.view(torch.uint8)).any()
    }
    assert {function for function, _, _ in results} == FUNCTIONS
    found_there = [found for of_file in by_file for found in run_on_arm(of_file, processor, tmp_path)]
    for call, found in zip(calls, found_there, strict=True):
        for place, (here, there) in enumerate(zip(call.after, found, strict=True)):
            if (_function_of(call), len(call.before), place) not in results:  # what was only read
                assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))
                continue
            # As far as twice what either may be from float64 (`test_compiled.py`).
            assert (there - here).norm() <= 4e-6 * here.norm().clamp(min=1), call.text


def _function_of(call: Call) -> str:
    return call.text.split("(")[0].removeprefix("failed |= ")


def test_system_calls_have_the_numbers_of_the_kernels_headers(tmp_path: Path) -> None:
    calls = {f"__NR_{name}": numbers["aarch64"] for name, numbers in sandbox._REFUSED.items()} | {
        "AUDIT_ARCH_AARCH64": sandbox._ARCHITECTURES["aarch64"],
        "__NR_clone": sandbox._CLONE["aarch64"],
        "__NR_clone3": sandbox._CLONE3,
        "__NR_socketpair": sandbox._SOCKETPAIR["aarch64"],
        "__NR_ioctl": sandbox._IOCTL["aarch64"],
        **sandbox._REQUESTS,
        "__NR_landlock_create_ruleset": sandbox._CREATE_RULESET,
        "__NR_landlock_add_rule": sandbox._ADD_RULE,
        "__NR_landlock_restrict_self": sandbox._RESTRICT_SELF,
        "__NR_mount_setattr": sandbox._SYS_MOUNT_SETATTR,
    }
    checks = "".join(f'_Static_assert({name} == {number}u, "{name}");\n' for name, number in calls.items())
    source = tmp_path / "numbers.c"
    headers = ("asm/unistd.h", "asm/termbits.h", "asm/ioctls.h", "linux/audit.h")
    source.write_text("".join(f"#include <{header}>\n" for header in headers) + checks)
    done = subprocess.run([COMPILER, "-fsyntax-only", source], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
