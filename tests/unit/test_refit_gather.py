"""Where a refit's buckets are filled: on one device, for an engine that opens memory of the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spmdrl.refit.bucket import bucket_of
from spmdrl.refit.gather import Gatherer


def test_adapters_are_merged_on_the_device_where_buckets_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors: torch refuses operations between a device and the host, and computes nothing."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("for the device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    with FakeTensorMode():
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(3, 4, device="cuda"), requires_grad=False)
        bucket = bucket_of([("weight", torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))])
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        merged: list[str] = []

        def change_of(name: str) -> Tensor:
            merged.append(name)
            return torch.empty(3, 4, device="cuda")

        gatherer = object.__new__(Gatherer)
        gatherer._policy = gatherer._model = layer  # type: ignore[assignment]
        gatherer._mesh = SimpleNamespace(device_type="cuda", size=lambda: 1)  # type: ignore[assignment]
        gatherer._owners, gatherer._quantized = {"weight": (layer, "weight")}, {}
        gatherer._change_of = change_of
        gatherer._quantizer = lambda *_: {}  # type: ignore[assignment, return-value]
        gatherer.fill(bucket, flat)
    assert merged == ["weight"] and waited == ["for the device"]
