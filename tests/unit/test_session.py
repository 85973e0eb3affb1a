"""What a run opens to the network, and the groups that one of its ranks joins alone."""

from __future__ import annotations

import gc
import itertools
import sys
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmdrl.dist import session
from spmdrl.dist.launcher import Network, launch_problems
from spmdrl.dist.session import _store_of_this_start, listening_store, spmd_session
from spmdrl.engine.sglang import process
from spmdrl.train import main
from spmdrl.types import UserError


def listening_on(port: int) -> set[str]:
    """The addresses, as the kernel writes them, on which this machine listens at a port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def test_a_store_listens_where_it_was_told() -> None:
    store = listening_store("127.0.0.1", "127.0.0.1")
    assert listening_on(store.port) == {"0100007F"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert listening_on(listening_store("", "127.0.0.1").port) == {"00000000"}


def test_ranks_that_are_started_again_meet_each_other_and_not_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by torchrun --max-restarts, whose store lives on; the last rank of each start comes late."""
    server = listening_store("127.0.0.1", "127.0.0.1")
    for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(server.port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def address_of_last(rank: int, start: int) -> str:
        time.sleep(0.1 * (rank == 2))
        store = _store_of_this_start(rank, 3, timedelta(seconds=20))
        if rank == 2:
            store.set("address", f"of start {start}")
        return store.get("address").decode()

    for start in range(3):
        with ThreadPoolExecutor(3) as ranks:
            found = list(ranks.map(address_of_last, range(3), [start] * 3))
        assert found == [f"of start {start}"] * 3


def as_sglang_does(*, backend: str, store: dist.Store, world_size: int, rank: int, group_name: str) -> object:
    """Join a group of processes that need not be ranks of this run; what SGLang's `init_custom_process_group` does."""
    limit = timedelta(seconds=20)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], backend, store, group_name=group_name, timeout=limit
    )
    distributed_c10d._world.pg_group_ranks[group] = {0: 0}
    return group


def test_a_group_with_engines_splits_nothing_that_the_other_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL bound to a device, torch would split the run's communicator, on this rank alone."""
    asked = []
    monkeypatch.setattr(process, "import_sglang", lambda: None)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    for name in ("sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], "init_custom_process_group", as_sglang_does, raising=False)
    with spmd_session(threads_per_rank=1, deterministic=False):
        monkeypatch.setattr(distributed_c10d, "_get_split_source", asked.append)
        default, device = distributed_c10d._get_default_group(), torch.device("cuda", 0)
        default.bound_device_id = device
        group = process.update_group(dist.HashStore(), "weights", num_ranks=1, backend="gloo")
        assert default.bound_device_id == device and asked == []
        default.bound_device_id = None
        whole = torch.ones(1)
        dist.all_reduce(whole, group=group)
        assert whole == 1


def test_what_a_session_made_is_freed_before_it_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles of modules too, and what an earlier session has left. What was there before the first is out of it."""
    freed, left = [], dist.destroy_process_group
    monkeypatch.setattr(session, "_SESSIONS", itertools.count())
    gc.unfreeze()

    def run() -> weakref.ref[torch.nn.Module]:
        with spmd_session(threads_per_rank=1, deterministic=False):
            frozen.append(gc.get_freeze_count())
            made = torch.nn.Linear(1, 1)
            made.itself = [made]
            held = weakref.ref(made)
            del made
            monkeypatch.setattr(dist, "destroy_process_group", lambda: (freed.append(held() is None), left()))
            kept = torch.nn.Linear(1, 1)
            kept.itself = [kept]
        return weakref.ref(kept)

    frozen: list[int] = []
    try:
        of_first = run()
        assert gc.get_freeze_count() == 0
        run()
        gc.collect()
    finally:
        gc.freeze()
    assert freed == [True, True] and of_first() is None
    assert frozen[0] > 10_000 and frozen[1] == 0


def test_a_session_thaws_nothing_that_it_has_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SESSIONS", itertools.count())
    gc.freeze()
    before = gc.get_freeze_count()
    with spmd_session(threads_per_rank=1, deterministic=False):
        pass
    assert gc.get_freeze_count() > before - 100, "less the few that nobody has named since"


def test_a_program_collects_garbage_once_its_imports_are_over(capsys: pytest.CaptureFixture[str]) -> None:
    gc.disable()  # as `before_imports` does
    try:
        assert main(["none.toml"]) == 2 and gc.isenabled()
    finally:
        gc.enable()
    assert "none.toml" in capsys.readouterr().err


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


@pytest.mark.parametrize("environment", [{}, TORCHRUN, {"GLOO_SOCKET_IFNAME": "lo"}, {"NCCL_SOCKET_IFNAME": "^docker"}])
def test_the_environments_of_launchers_are_taken(environment: dict[str, str]) -> None:
    assert list(launch_problems(environment, Network(["lo", "eth0"]))) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": None}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"WORLD_SIZE": None}, "RANK=1 is set, but WORLD_SIZE is not"),
        (dict.fromkeys(TORCHRUN) | {"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but RANK is not"),
        ({"RANK": "5"}, "RANK=5 and WORLD_SIZE=2 contradict each other: RANK is below WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1 contradict each other"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=2 contradict each other"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' is not a whole number of 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of 1 or more"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a whole number of 1 or more"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x' is not a whole number"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc' is not a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0' is not a port"),
        ({"MASTER_PORT": None}, "MASTER_PORT, at which the ranks meet, is not"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR, at which the ranks meet, is not"),
        ({"MASTER_ADDR": "no such host"}, "MASTER_ADDR='no such host' names no host"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "GLOO_SOCKET_IFNAME=eth9 names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "ib,mlx"}, "NCCL_SOCKET_IFNAME=ib,mlx names no network interface"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused_before_any_rank_waits(
    changes: dict[str, str | None], sentence: str
) -> None:
    environment = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    (found,) = launch_problems(environment, Network(["lo", "eth0"]))
    assert sentence in found


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_every_rank_tells_of_a_stale_environment_and_waits_for_nobody(
    local_rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["absent.toml", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(
        "cannot start: the environment variable WORLD_SIZE=2 is set, but RANK is not"
    )
    with pytest.raises(UserError, match="RANK is not"), spmd_session(threads_per_rank=1, deterministic=False):
        pass
