"""The emulated CUDA device finds the faults that are planted, and no others; steps keep to their launches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.model.kernels import varlen_takes_groups
from tests.emulated_cuda.build import library

FOLDER = Path(__file__).parents[1] / "emulated_cuda"
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

from launches import on_the_emulated_device  # noqa: E402

NOTHING = "NOT FOUND"  # in a program that is right
# What finds each fault; the second group runs on two ranks, and both have to find it.
ALONE = {
    "a_host_tensor_in_a_kernel": "cuda:0 and cpu!",
    "values_of_the_host_at_indices_of_the_device": "cuda:0 and cpu! (aten::_index_put_impl_)",
    "a_number_of_the_host_at_indices_of_the_host": NOTHING,
    "an_index_of_the_host": "cuda:0 and cpu! (aten::index_select)",
    "a_mask_of_the_host": "cuda:0 and cpu! (aten::masked_fill_",
    "a_number_of_the_host_beside_matrices": "cuda:0 and cpu! (aten::addmm",
    "a_result_for_the_host": "cuda:0 and cpu! (aten::sum",
    "tensors_of_two_devices": "cuda:0 and cuda:1!",
    "no_synchronize_before_a_host_read": "read before the copy had ended: [nan, nan, nan, nan]",
    "a_checkpoint_read_as_soon_as_it_is_copied": NOTHING,
    "a_pinned_source_reused_before_its_copy_ended": "pinned memory was changed before a copy from it had ended",
    "a_pinned_source_changed_between_a_copy_from_it_and_one_to_it": "pinned memory was changed before a copy from it",
    "no_synchronize_before_a_host_read_of_what_was_copied_from": "read before the copy had ended: [nan, nan, nan, nan]",
    "a_copy_to_pinned_memory_after_one_from_it": NOTHING,
    "the_last_of_two_copies_to_pinned_memory_stays": NOTHING,
    "no_event_between_two_streams": "an event or wait_stream is missing",
    "a_bucket_refilled_while_another_stream_reads_it": "an event or wait_stream is missing",
    "two_streams_on_columns_of_their_own": NOTHING,
    "two_streams_on_columns_that_overlap": "an event or wait_stream is missing",
    "a_stream_on_a_row_that_another_one_wrote_before_others": "an event or wait_stream is missing",
    "memory_freed_without_record_stream": "which was freed meanwhile: record_stream",
    "a_storage_resized_while_another_stream_writes_it": "resize on stream 0 reads memory that aten::mul.out on stream",
    "a_storage_resized_after_another_stream_has_written_it": NOTHING,
    "a_read_of_memory_that_was_freed": "freed memory reads [nan, nan, nan, nan]",
    "a_handle_that_outlives_its_memory": "invalid resource handle: its memory was freed",
    "a_write_that_another_process_may_see_too_early": "a process that has not waited for its own writes",
    "a_handle_to_what_is_not_written_yet": "a process that has not waited for its own writes",
    "a_handle_to_what_another_stream_writes": "a process that has not waited for its own writes",
    "a_handle_to_what_was_waited_for": NOTHING,
    "a_read_of_what_another_process_has_not_written_yet": "reads memory that another process may still write",
    "a_write_to_what_its_owner_has_not_read_yet": "writes memory that another process may still use",
    "a_read_of_what_another_process_has_written": NOTHING,
    "more_memory_than_there_is": "CUDA out of memory",
}
ON_TWO_RANKS = {
    "collectives_that_differ": "ranks disagree on collective 0 of this group: rank 0 calls broadcast",
    "shapes_that_differ": "rank 1 calls all_reduce(5 elements of Float",
    "splits_that_differ": "rank 0 sends 2 rows to rank 1, which expects 1",
    "a_result_used_before_its_work_was_waited_for": "an event or wait_stream is missing",
    "a_result_polled_for": NOTHING,
    "a_result_polled_for_once": "an event or wait_stream is missing",
    "a_copy_before_a_barrier": NOTHING,
    "a_copy_on_another_stream_than_a_barrier": "read before the copy had ended: [nan, nan, nan, nan]",
    "a_stream_beside_a_collective": "an event or wait_stream is missing",
    "a_stream_of_a_collective_that_is_waited_for": NOTHING,
    "a_host_tensor_in_a_collective": "device type cpu",
    "a_device_left_out_of_set_device": "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0",
}
# Not the cache of these tests, which is gone when they end.
CACHE = os.environ.get("EMULATED_CUDA_CACHE", str(Path.home() / ".cache/spmdrl-emulated-cuda"))
# Launches by phase, beside those of the head's tiles: for each layer, and for all that is there once. A change that
# needs fewer lowers them, and measures docs/gpu.md's table again.
REPEATED = 0 if varlen_takes_groups() else 2  # keys and values, for each query head
BUDGET = {
    "layers forward": (38 + REPEATED, 31),
    "loss": (0, 40),
    "layers backward": (59 + REPEATED, 40),
    "rest of an update": (0, 75),
    "refit": (0, 2),
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FOLDER / "startup"), str(FOLDER.parents[1])])
    usual = {"PYTHONPATH": path, "EMULATED_CUDA_DEVICES": "2", "EMULATED_CUDA_CACHE": CACHE}
    environment = os.environ | usual | variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.timeout(600)  # a compiler may be at work
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_planted_faults_are_found() -> None:
    done = run("-m", "tests.emulated_cuda.faults")
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"(-|\d) (\w+): (.*)", line):
            found[match[1], match[2]] = match[3]
    asked = {("-", name): message for name, message in ALONE.items()}
    asked |= {(rank, name): message for name, message in ON_TWO_RANKS.items() for rank in "01"}
    assert found.keys() == asked.keys()
    assert not {key: found[key] for key, message in asked.items() if message not in found[key]}


@pytest.mark.timeout(600)  # a compiler may be at work
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_cached_serves_every_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the one it was compiled in, so it may not look for torch's libraries there."""
    monkeypatch.setenv("EMULATED_CUDA_CACHE", CACHE)
    assert b"/torch/lib" not in Path(library()).read_bytes()


def test_without_a_compiler_there_is_a_sentence(tmp_path: Path) -> None:
    done = run("-c", "import torch", PATH=str(tmp_path), EMULATED_CUDA_CACHE=str(tmp_path), CXX="no-compiler")
    assert done.returncode == 1
    assert done.stderr == "the emulated CUDA device needs a C++ compiler: install g++, or name one in CXX\n"


@pytest.mark.timeout(600)  # a compiler may be at work
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_step_and_a_refit_launch_and_wait_no_more_than_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-0.6B's shapes, of one layer and of two; 2,048 tokens have a tile for each of the head's 19 slabs."""
    monkeypatch.setenv("EMULATED_CUDA_CACHE", CACHE)
    one, two = ({**row["phases"], "refit": row["refit"]} for row in on_the_emulated_device("0.6b", [1, 2], 2048))
    launches = {phase: (two[phase]["launches"] - one[phase]["launches"], one[phase]["launches"]) for phase in one}
    head = {phase: launches.pop(phase) for phase in ("head forward", "head backward")}
    found = {phase: (a_layer, of_one - a_layer) for phase, (a_layer, of_one) in launches.items()}
    assert found.keys() == BUDGET.keys()
    assert not {phase: numbers for phase, numbers in found.items() if any(map(int.__gt__, numbers, BUDGET[phase]))}
    assert head["head forward"][1] <= 2 * 19 + 7 and head["head backward"][1] <= 4 * 19 + 19 + 3
    waits = {phase: count["waits"] for phase, count in two.items() if count["waits"]}
    assert waits == {"rest of an update": 2}  # for the norm, and for the metrics
