"""What a run opens to the network."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from spmdrl.dist.session import _store_of_this_start, listening_store


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
