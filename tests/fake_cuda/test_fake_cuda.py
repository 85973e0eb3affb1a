"""The CUDA build of torch on stand-ins for CUDA's libraries: memory, launches, waits, handles, and the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fake_cuda.build import environment, missing

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


def run(folder: Path, program: str, *, memory_gib: float = 80) -> list[str]:
    """Run a program with stand-ins; returns the lines that it prints."""
    command, variables = [sys.executable, "-c", textwrap.dedent(program)], environment(folder, memory_gib=memory_gib)
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def counters(folder: Path) -> dict[str, int]:
    """The counters of all processes that have ended, by kind and name."""
    lines = [line for path in folder.iterdir() if path.name.isdigit() for line in path.read_text().splitlines()]
    return {name: int(count) for count, name in (line.split(" ", 1) for line in lines)}


def test_memory_is_torchs_own_account_and_ends_where_the_device_does(tmp_path: Path) -> None:
    program = """
        import torch
        kept = torch.empty(500 << 30, dtype=torch.uint8, device="cuda")
        sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        print(*(size >> 30 for size in sizes))
        try:
            torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory")
    """
    assert run(tmp_path, program, memory_gib=600) == ["500 500 99", "out of memory"]


def test_kernels_are_counted_and_a_wait_in_a_capture_is_refused(tmp_path: Path) -> None:
    program = """
        import torch
        one = torch.empty(64, 32, dtype=torch.bfloat16, device="cuda")
        one @ one.T
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                one.add_(1)
                torch.cuda.synchronize()
        except RuntimeError as error:
            print("refused")
    """
    assert run(tmp_path, program)[:1] == ["refused"]
    seen = counters(tmp_path)
    assert seen["kernel: product of bfloat16 to bfloat16, m=64 n=64 k=32, 1 times"] == 1
    assert seen["violation: cudaDeviceSynchronize while a graph is captured"] >= 1


def test_the_server_that_ranks_are_forked_from_has_not_begun_cuda(tmp_path: Path) -> None:
    """It may have counted devices here, where there is no NVML to ask."""
    program = """
        import torch
        import tests.helpers.preloaded
        print(torch.cuda.is_initialized())
    """
    assert run(tmp_path, program) == ["False"]


def test_a_handle_outlives_no_memory(tmp_path: Path) -> None:
    other = """
        import ctypes, sys
        handle, pointer = (ctypes.c_char * 64).from_buffer_copy(bytes.fromhex(sys.argv[1])), ctypes.c_void_p()
        class Handle(ctypes.Structure):
            _fields_ = [("text", ctypes.c_char * 64)]
        error = ctypes.CDLL("libcudart.so.13").cudaIpcOpenMemHandle(ctypes.byref(pointer), Handle(handle.raw), 1)
        print(error, pointer.value and ctypes.string_at(pointer.value, 5).decode())
    """
    program = f"""
        import ctypes, subprocess, sys, textwrap
        cuda = ctypes.CDLL("libcudart.so.13")
        pointer, handle = ctypes.c_void_p(), (ctypes.c_char * 64)()
        assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)) == 0
        cuda.cudaMemcpy(pointer, b"hello", ctypes.c_size_t(5), 4)
        assert cuda.cudaIpcGetMemHandle(handle, pointer) == 0
        for _ in range(2):
            subprocess.run([sys.executable, "-c", textwrap.dedent({other!r}), handle.raw.hex()], check=True)
            cuda.cudaFree(pointer)
    """
    assert run(tmp_path, program) == ["0 hello", "1 None"]


def test_a_sender_leaves_a_group_whose_other_processes_are_gone_without_waiting_for_them(tmp_path: Path) -> None:
    program = """
        import torch
        import torch.distributed as dist
        from spmdrl.engine.sglang.engine import SendingEngine
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
        engine = SendingEngine.__new__(SendingEngine)
        engine._group = dist.new_group([0])
        dist.all_reduce(torch.zeros(4, device="cuda"), group=engine._group)
        engine.close()
        dist.destroy_process_group()
    """
    run(tmp_path, program)
    seen = counters(tmp_path)
    ends = [seen.get(f"default: ncclComm{name}", 0) for name in ("Abort", "Finalize")]
    assert ends == [1, 1], "the run's own communicator waits for its ranks"


def test_the_planner_is_not_below_what_is_reserved_nor_far_above(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/memory_plan.py", "--shapes", "Qwen3-0.6B", "--ranks", "1", "64"]
    compiled = os.environ | {"TRITON_INTERPRET": "0"}  # as on a device: kernels launch, and do nothing
    subprocess.run([*command, "--recompute", "none", "--out", out], cwd=ROOT, env=compiled, check=True, timeout=250)
    sys.path.append(str(ROOT / "benchmarks"))
    from memory_plan import planned_bytes

    one, many = json.loads(out.read_text())["rows"]
    for row in (one, many):
        assert 1 <= planned_bytes(row) / row["reserved"] <= 1.05, row
