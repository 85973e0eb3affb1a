"""What a run opens to the network."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from spmdrl.dist.session import listening_store


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
