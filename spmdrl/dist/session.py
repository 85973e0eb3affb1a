"""The session: joins the process group, selects this rank's device, and always leaves the group at the end."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmdrl.dist.launcher import require_launch_environment
from spmdrl.types import UserError

# Which device a rank computes on, by the launcher's variables and what CUDA shows.


def local_rank() -> int:
    """Return this process's index among its node's ranks, which is its device's too; needs no process group."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Return the number of ranks on this node; needs no process group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def default_device_type() -> str:
    """The kind of device that ranks on this machine compute on: "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_bytes() -> int | None:
    """Return the memory of this rank's CUDA device; None on a CPU."""
    return torch.cuda.get_device_properties(local_rank()).total_memory if torch.cuda.is_available() else None


def rank_device() -> torch.device:
    """Return this rank's CUDA device, the one with its index among the node's ranks, or the CPU where there is none.

    Raises UserError on every rank of a node that sees fewer devices than it has ranks, and where the node has devices
    that torch cannot use: such a run would otherwise continue on the CPU. Needs no process group.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", _index_of_device())
    if torch.version.cuda is not None and _device_files() and not _hides_devices():
        if (mask := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            raise UserError(
                f"this machine has NVIDIA devices ({', '.join(map(str, _device_files()))}), and CUDA_VISIBLE_DEVICES="
                f"{mask} names none that torch can use ({_what_cuda_says()}): unset it, name one that is there, or "
                'train on the CPU with CUDA_VISIBLE_DEVICES=""'
            )
        raise UserError(
            f"this machine has NVIDIA devices ({', '.join(map(str, _device_files()))}), but torch {torch.__version__}, "
            f"built for CUDA {torch.version.cuda}, can use none of them: {_what_cuda_says()}; install a driver that "
            'fits, or train on the CPU with the environment variable CUDA_VISIBLE_DEVICES=""'
        )
    return torch.device("cpu")


def _index_of_device() -> int:
    place, visible = local_rank(), torch.cuda.device_count()
    if (wanted := max(place + 1, num_local_ranks())) > visible:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
        raise UserError(
            f"{wanted} ranks were started on this machine, and each needs a CUDA device of its own, but this one sees "
            f"only {visible}{seen}: start as many ranks as there are devices, and let every rank see all of them; it "
            "takes the one with its own index"
        )
    return place


def _device_files() -> list[Path]:
    """The NVIDIA devices that this process may open; a container that was given none has no such files."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _hides_devices() -> bool:
    """True when the user has hidden every device from CUDA on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip() in ("", "-1")


def _what_cuda_says() -> str:
    """The first sentence of CUDA's reason, such as that the driver is too old."""
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split()).partition(". ")[0]
    return "it finds no device"


# glibc's variables, and the options of mallopt(3) that mean the same, with bytes.
_KEEP_FREED_MEMORY = (
    ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1),
    ("MALLOC_TOP_PAD_", -2, 64 * 2**20),
    ("MALLOC_MMAP_THRESHOLD_", -3, 2**31 - 1),
)
_ONEDNN_KERNELS = 64  # a step of a small model needs a few dozen
_MEETING_POLL_S = 0.005  # between two polls by the first rank of who has arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's place among the ranks of the run."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    patience: timedelta  # a rank that has waited this long for the others ends the run
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0


def launched_ranks() -> int:
    """Return the number of ranks that torchrun started, 1 outside torchrun; needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def are_restarted() -> bool:
    """True when torchrun has started these ranks again after a failure (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def shared_store() -> dist.Store:
    """Return the process group's key-value store, which all ranks reach without a collective."""
    return dist.PrefixStore("spmdrl", distributed_c10d._get_default_store())


@contextmanager
def outside_default_group() -> Iterator[None]:
    """Let this rank alone create a group, with processes that are not ranks of the run.

    torch makes a new NCCL group by splitting the run's communicator when that is bound to a device, and every rank of
    the run would have to take part in the split. For as long as this lasts, it knows of no such device.
    """
    default = distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def listening_store(interface: str, address: str) -> dist.TCPStore:
    """Open a store that other processes reach at `address` and its `port`. It listens on one interface, on all for "".

    torch by itself would listen on all interfaces, whatever the address, and a store has no access control.
    """
    listener = socket.create_server((interface, 0))
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=dist.default_pg_timeout,
        master_listen_fd=listener.detach(),
    )


def _store_of_this_start(rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """Return torchrun's rendezvous store under a key prefix that is unique to this start of the ranks.

    After a restart (`--max-restarts`) the store still holds the addresses of dead ranks. So each rank announces itself
    with a new random word, and the first rank answers to that word with the prefix: a rank that acknowledges the
    answer is alive now.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, num_ranks, timeout=timeout))
    store.set_timeout(timeout)
    if rank > 0:
        word = uuid.uuid4().hex
        store.set(f"spmdrl/call/{rank}", word)
        start = store.get(f"spmdrl/answer/{word}").decode()
        store.set(f"spmdrl/heard/{start}/{rank}", "")
        return dist.PrefixStore(start, store)
    start, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    waited_for = set(range(1, num_ranks))
    while waited_for:
        for other in sorted(waited_for):
            word = store.get(f"spmdrl/call/{other}").decode()  # a dead rank's, until the new one announces itself
            store.set(f"spmdrl/answer/{word}", start)
        waited_for = {other for other in waited_for if not store.check([f"spmdrl/heard/{start}/{other}"])}
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(waited_for)} did not join within {timeout}")
        time.sleep(_MEETING_POLL_S if waited_for else 0)
    return dist.PrefixStore(start, store)


def _keep_gloo_single_threaded(num_threads: int) -> None:
    """Let gloo's own threads initialize OpenMP while it is set to one thread.

    Otherwise each of them starts a pool of `num_threads`; libgomp then sees more threads than cores and stops spinning,
    which slows every parallel region of the rank: steps of the small benchmark took almost twice as long.

    All ranks do this if any rank has more than one thread: nodes need not have the same number of cores.
    """
    most_threads = torch.tensor(num_threads)
    dist.all_reduce(most_threads, op=dist.ReduceOp.MAX)
    if most_threads == 1:
        return
    torch.set_num_threads(1)
    send = torch.zeros(2**20 // dist.get_world_size())
    receive = [torch.empty(send.numel() * dist.get_world_size()) for _ in range(8)]
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for _ in range(8):  # several at once, so that every thread gets work
        for work in [gather(output, send, async_op=True) for output in receive]:
            work.wait()
    torch.set_num_threads(num_threads)


def _bound_onednn() -> None:
    """Limit the kernels that oneDNN keeps, each compiled for one shape. Packed batches have many shapes: at its own
    limit, 1,024, it took 450 MiB after 500 of them, and 190 at this one. It reads the variables at its first product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_ONEDNN_KERNELS))


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, which needs as much. By itself it returns large pieces at once,
    and the kernel then clears every page again at its first use: a fifth of the time of a small model's update. What a
    phase must give back, `return_freed_memory` returns. Other C libraries have no `mallopt`, and variables win.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    for variable, option, value in _KEEP_FREED_MEMORY:
        if set_option is not None and variable not in os.environ:
            set_option(option, value)


def return_freed_memory() -> None:
    """Make glibc return freed memory to the system; does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms alone, if that is wanted; what was set before holds again at the end.

    cuBLAS is deterministic with a workspace of a fixed size. torch reads the variable at the first product on a device
    of the process, and never again; a run computes nothing on a device before it opens its session.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def spmd_session(*, threads_per_rank: int, deterministic: bool, patience_minutes: int = 30) -> Iterator[World]:
    """Join the run's process group (gloo for host tensors, NCCL for CUDA tensors), and leave it at the end.

    Outside torchrun the run has one rank. `threads_per_rank` 0 divides the cores among this node's ranks. Raises
    UserError when the variables of the launcher cannot belong to one launch.
    """
    require_launch_environment()
    device, num_local = rank_device(), num_local_ranks()
    num_threads = threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_local)
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _bound_onednn()
        _keep_freed_memory()
    patience = timedelta(minutes=patience_minutes)
    with (
        _collections_of_its_own(),
        _determinism(deterministic),
        _process_group(device, patience, num_threads=num_threads) as (rank, num_ranks),
    ):
        yield World(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=local_rank(),
            num_local_ranks=num_local,
            patience=patience,
            device=device,
        )


_SESSIONS = itertools.count()  # of this process


@contextmanager
def _collections_of_its_own() -> Iterator[None]:
    """Keep what exists before a process's first session, most of it libraries, out of Python's garbage collections.

    There are some hundred thousand such objects, and looking through all of them takes as long as a phase of a small
    model's step. What a session makes, its models above all, is collected as ever; so is what an earlier one has left.
    """
    # Where there are few objects, the process that forked this one has frozen the others. Counting those takes long.
    if next(_SESSIONS) > 0 or len(gc.get_objects()) < 100_000:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _process_group(device: torch.device, patience: timedelta, *, num_threads: int) -> Iterator[tuple[int, int]]:
    """Join the default process group as (rank, number of ranks), and leave it at the end."""
    rank, num_ranks, cuda = int(os.environ.get("RANK", "0")), launched_ranks(), device.type == "cuda"
    # Engines set this when they start, possibly on some ranks only; NCCL needs the same value on all ranks.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=_store_of_this_start(rank, num_ranks, patience) if "RANK" in os.environ else dist.HashStore(),
        rank=rank,
        world_size=num_ranks,
        timeout=patience,
        device_id=device if cuda else None,
    )
    if not cuda:
        _keep_gloo_single_threaded(num_threads)
    try:
        yield rank, num_ranks
        # Modules with FSDP hooks must be freed before the group: a gloo worker can abort at exit otherwise.
        gc.collect()
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()
