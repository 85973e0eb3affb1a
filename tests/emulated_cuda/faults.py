"""Planted faults, in one program on two ranks: each has to be found. It prints a line for each, and its message.

Run by tests/unit/test_emulated_cuda.py: `python -m tests.emulated_cuda.faults` with the folder `startup` on PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CUDA = torch.device("cuda")
OPENER = """
import pickle, sys, torch
storages = []  # as long as they are here, nothing waits for what uses them
while True:
    try:
        program, handle = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    problem = None
    try:
        if handle:
            storages.append(torch.UntypedStorage._new_shared_cuda(*handle))
            x = torch.empty(0, device="cuda").set_(storages[-1])
        exec(program)
    except RuntimeError as error:
        problem = str(error)
    pickle.dump(problem, sys.stdout.buffer)
    sys.stdout.flush()
"""
READ = "x.tolist()"
FAULTS: list[Callable[[], None]] = []


def fault(function: Callable[[], None]) -> Callable[[], None]:
    FAULTS.append(function)
    return function


def legal(function: Callable[[], None]) -> Callable[[], None]:
    """A program that is right, in which nothing may be found."""
    FAULTS.append(function)
    return function


def values(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=CUDA).view(shape)


@functools.cache
def opener() -> subprocess.Popen[bytes]:
    """The process that opens handles. It ends with this one."""
    return subprocess.Popen([sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def open_and(program: str, arguments: tuple[Any, ...] = ()) -> None:
    """Run a program in another process, in which x is the memory of a handle, if there is one; raise what it raises."""
    process = opener()
    assert process.stdin and process.stdout
    pickle.dump((program, arguments), process.stdin)
    process.stdin.flush()
    if problem := pickle.load(process.stdout):
        raise RuntimeError(problem)


@fault
def a_host_tensor_in_a_kernel() -> None:
    values(3) + torch.ones(3)


@fault
def values_of_the_host_at_indices_of_the_device() -> None:
    values(4)[torch.tensor([0, 1], device=CUDA)] = torch.tensor([7.0, 8.0])


@legal
def a_number_of_the_host_at_indices_of_the_host() -> None:
    x = values(4)
    x[torch.tensor([0, 1])] = torch.tensor(7.0)
    assert x.tolist() == [7.0, 7.0, 3.0, 4.0], x


@fault
def an_index_of_the_host() -> None:
    torch.index_select(values(4), 0, torch.tensor(1))


@fault
def a_mask_of_the_host() -> None:
    values(4).masked_fill(torch.tensor(True), 0.0)


@fault
def a_number_of_the_host_beside_matrices() -> None:
    torch.addmm(torch.tensor(1.0), values(2, 2), values(2, 2))


@fault
def a_result_for_the_host() -> None:
    torch.sum(values(4), dim=0, out=torch.empty(()))


@fault
def tensors_of_two_devices() -> None:
    values(3) + values(3).to("cuda:1")


@fault
def no_synchronize_before_a_host_read() -> None:
    there = torch.empty(4, pin_memory=True)
    there.copy_(values(4), non_blocking=True)
    seen = there.tolist()
    torch.cuda.synchronize()
    assert seen == there.tolist(), f"read before the copy had ended: {seen}"


@legal
def a_checkpoint_read_as_soon_as_it_is_copied() -> None:
    from spmdrl.checkpoint.storage import copy_to_host  # only here: ranks need not wait for the package
    from spmdrl.model.offload import HostBuffers

    copied = copy_to_host({"weight": values(4) * 3}, HostBuffers(pinned=True))
    assert copied["weight"].tolist() == [3.0, 6.0, 9.0, 12.0], f"read before the copy had ended: {copied}"


@fault
def a_pinned_source_reused_before_its_copy_ended() -> None:
    source = torch.ones(4, pin_memory=True)
    there = source.to(CUDA, non_blocking=True)
    source.zero_()
    there.sum().item()


@fault
def a_pinned_source_changed_between_a_copy_from_it_and_one_to_it() -> None:
    home = torch.ones(4, pin_memory=True)
    there = home.to(CUDA, non_blocking=True)
    home.zero_()
    home.copy_(there, non_blocking=True)


@fault
def no_synchronize_before_a_host_read_of_what_was_copied_from() -> None:
    seen, home = _moved_there_and_back()
    torch.cuda.synchronize()
    assert seen == home.tolist(), f"read before the copy had ended: {seen}"


@legal
def a_copy_to_pinned_memory_after_one_from_it() -> None:
    _, home = _moved_there_and_back()
    torch.cuda.synchronize()
    assert home.tolist() == [2.0] * 4, home


def _moved_there_and_back() -> tuple[list[float], torch.Tensor]:
    """Pinned memory as the host reads it at once, and that memory: its values plus 1 are on their way to it."""
    home = torch.ones(4, pin_memory=True)
    home.copy_(home.to(CUDA, non_blocking=True).add_(1), non_blocking=True)
    return home.tolist(), home


@legal
def the_last_of_two_copies_to_pinned_memory_stays() -> None:
    home, first = torch.empty(4, pin_memory=True), torch.cuda.Stream()
    with torch.cuda.stream(first):
        home.copy_(values(4), non_blocking=True)
    torch.cuda.current_stream().wait_stream(first)
    home.copy_(values(4).neg(), non_blocking=True)
    torch.cuda.synchronize()
    assert home.tolist() == [-1.0, -2.0, -3.0, -4.0], home


@fault
def no_event_between_two_streams() -> None:
    x = values(4)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


@fault
def a_bucket_refilled_while_another_stream_reads_it() -> None:
    bucket, side = values(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bucket.clone()
    bucket.zero_()


@legal
def two_streams_on_columns_of_their_own() -> None:
    x, side = values(4, 6), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:, 2:4].mul_(2)
        x[::2, 5].mul_(2)
    x[:, :2].mul_(3)
    x[1::2, 4:].mul_(3)
    x.T[4, ::2].mul_(3)
    torch.cuda.synchronize()
    assert x[:2].tolist() == [[3, 6, 6, 8, 15, 12], [21, 24, 18, 20, 33, 36]], x


@fault
def two_streams_on_columns_that_overlap() -> None:
    x, side = values(4, 6), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:, 2:].mul_(2)
    x[:, :3].mul_(3)


@fault
def a_stream_on_a_row_that_another_one_wrote_before_others() -> None:
    x, side = values(4, 6), torch.cuda.Stream()
    x[::2].mul_(2)
    with torch.cuda.stream(side):
        x[1].mul_(2)


@fault
def memory_freed_without_record_stream() -> None:
    x, side = values(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.clone()
    del x
    values(4)


@fault
def a_storage_resized_while_another_stream_writes_it() -> None:
    x = values(1024)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul_(2)
    x.untyped_storage().resize_(8192)


@legal
def a_storage_resized_after_another_stream_has_written_it() -> None:
    x, side = values(1024), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(side)
    x.untyped_storage().resize_(8192)
    assert x[:2].tolist() == [2.0, 4.0], x[:2]


@fault
def a_read_of_memory_that_was_freed() -> None:
    x = values(4)
    address = x.data_ptr()
    del x
    seen = list((ctypes.c_float * 4).from_address(address))
    assert seen == [1.0, 2.0, 3.0, 4.0], f"freed memory reads {seen}"


@fault
def a_handle_that_outlives_its_memory() -> None:
    x = values(4)
    torch.cuda.synchronize()
    arguments = x.untyped_storage()._share_cuda_()
    torch.UntypedStorage._release_ipc_counter_cuda(arguments[4], arguments[5])
    del x
    open_and("", arguments)


@fault
def a_write_that_another_process_may_see_too_early() -> None:
    x = values(4)
    torch.cuda.synchronize()
    arguments = x.untyped_storage()._share_cuda_()
    x.add_(1)
    open_and(READ, arguments)


@fault
def a_handle_to_what_is_not_written_yet() -> None:
    open_and(READ, values(4).mul_(2).untyped_storage()._share_cuda_())


@fault
def a_handle_to_what_another_stream_writes() -> None:
    x, side = values(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().synchronize()
    open_and(READ, x.untyped_storage()._share_cuda_())


@legal
def a_handle_to_what_was_waited_for() -> None:
    x, side = values(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.mul_(2)
    side.synchronize()
    open_and(READ, x.untyped_storage()._share_cuda_())


@fault
def a_read_of_what_another_process_has_not_written_yet() -> None:
    x = values(4)
    torch.cuda.synchronize()
    open_and("x.zero_()", x.untyped_storage()._share_cuda_())
    x.tolist()


@fault
def a_write_to_what_its_owner_has_not_read_yet() -> None:
    x = values(4)
    torch.cuda.synchronize()
    x.clone()
    open_and("x.zero_()", x.untyped_storage()._share_cuda_())


@legal
def a_read_of_what_another_process_has_written() -> None:
    x = values(4)
    torch.cuda.synchronize()
    open_and("x.add_(1); torch.cuda.synchronize()", x.untyped_storage()._share_cuda_())
    assert x.tolist() == [2.0, 3.0, 4.0, 5.0], x


@fault
def more_memory_than_there_is() -> None:
    torch.empty(2**40, dtype=torch.uint8, device=CUDA)


def of_ranks(rank: int) -> None:
    """Faults that take two ranks, each of which has to find them."""
    torch.cuda.set_device(rank)

    def collectives_that_differ() -> None:
        dist.all_reduce(values(4)) if rank else dist.broadcast(values(4), 0)

    def shapes_that_differ() -> None:
        dist.all_reduce(values(4 + rank))

    def splits_that_differ() -> None:
        dist.all_to_all_single(values(3), values(3), [1, 2], [1, 2])

    def a_result_used_before_its_work_was_waited_for() -> None:
        x = values(4)
        dist.all_reduce(x, async_op=True)
        x.add_(1)

    def a_host_tensor_in_a_collective() -> None:
        dist.all_reduce(torch.ones(4))

    def a_device_left_out_of_set_device() -> None:
        torch.cuda.set_device(0)
        dist.all_reduce(values(4))

    def a_stream_beside_a_collective() -> None:
        x = values(4)
        dist.all_reduce(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            dist.all_reduce(x)
        assert torch.cuda.current_stream() == torch.cuda.default_stream(rank), torch.cuda.current_stream()
        torch.cuda.default_stream().synchronize()
        x.add_(1)  # the side stream may still write it

    def a_stream_of_a_collective_that_is_waited_for() -> None:
        x, side = values(4), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(x)
        torch.cuda.current_stream().wait_stream(side)
        assert x.add_(1).tolist() == [3.0, 5.0, 7.0, 9.0], x

    def a_result_polled_for() -> None:
        x = values(4)
        work = dist.all_reduce(x, async_op=True)
        for _ in range(100):
            if work.is_completed():
                break
        assert x.tolist() == [2.0, 4.0, 6.0, 8.0], x

    def a_result_polled_for_once() -> None:
        x = values(4)
        dist.all_reduce(x, async_op=True).is_completed()
        x.tolist()

    def a_copy_before_a_barrier() -> None:
        there = torch.empty(4, pin_memory=True)
        there.copy_(values(4), non_blocking=True)
        dist.barrier()
        assert there.tolist() == [1.0, 2.0, 3.0, 4.0], there

    def a_copy_on_another_stream_than_a_barrier() -> None:
        there, side = torch.empty(4, pin_memory=True), torch.cuda.Stream()
        with torch.cuda.stream(side):
            there.copy_(values(4), non_blocking=True)
        dist.barrier()
        assert there.tolist() == [1.0, 2.0, 3.0, 4.0], f"read before the copy had ended: {there.tolist()}"

    for function in (
        collectives_that_differ,
        shapes_that_differ,
        splits_that_differ,
        a_result_used_before_its_work_was_waited_for,
        a_result_polled_for,
        a_result_polled_for_once,
        a_copy_before_a_barrier,
        a_copy_on_another_stream_than_a_barrier,
        a_stream_beside_a_collective,
        a_stream_of_a_collective_that_is_waited_for,
        a_host_tensor_in_a_collective,
        a_device_left_out_of_set_device,
    ):
        report(function)


def report(function: Callable[[], None]) -> None:
    """Print the fault's name and what found it, or that nothing did."""
    try:
        function()
        torch.cuda.synchronize()
        found = "NOT FOUND"
    except (RuntimeError, AssertionError, torch.cuda.OutOfMemoryError) as error:
        found = " ".join(str(error).split())
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    os.write(1, f"{os.environ.get('RANK', '-')} {function.__name__}: {found}\n".encode())  # at once: two ranks print


def main() -> None:
    """Run as both ranks: the first starts the second."""
    if "RANK" not in os.environ:
        for function in FAULTS:
            report(function)
        path = Path(os.environ["EMULATED_CUDA_LEDGER"] + ".store")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name], env=os.environ | {"RANK": str(rank), "STORE": str(path)}
            )
            for rank in range(2)
        ]
        try:
            sys.exit(max(rank.wait(timeout=120) for rank in ranks))
        finally:
            path.unlink(missing_ok=True)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["STORE"], 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    of_ranks(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
