"""Where weights lie in buckets, and that digests see every change."""

from __future__ import annotations

import pytest
import torch

from spmdrl.refit.bucket import Bucket, Weight, bucket_of, plan_buckets
from spmdrl.refit.digest import digest


def weight(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Weight:
    size = torch.Size(shape)
    return Weight(name, size, dtype, (), ((name, size),))


def names(buckets: tuple[Bucket, ...]) -> list[list[str]]:
    return [[w.name for w in bucket.weights] for bucket in buckets]


def layer(number: int) -> list[Weight]:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [weight(f"layers.{number}.{part}.weight", 8, 4) for part in parts]


@pytest.mark.parametrize("bucket_bytes", [1, 128, 300, 512, 10_000])
def test_no_bucket_is_too_large_and_fused_weights_are_not_parted(bucket_bytes: int) -> None:
    weights = layer(0) + layer(1)
    buckets = plan_buckets(weights, bucket_bytes=bucket_bytes)
    assert sorted(n for bucket in names(buckets) for n in bucket) == sorted(w.name for w in weights)
    place = {name: number for number, bucket in enumerate(names(buckets)) for name in bucket}
    for number in (0, 1):
        for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            assert len({place[f"layers.{number}.{part}.weight"] for part in fused}) == 1
    for bucket in buckets:
        assert bucket.num_bytes <= max(bucket_bytes, 3 * 128)


def test_types_share_a_bucket_and_every_tensor_is_where_it_should_be() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.randn(2, 3),
        "d": torch.tensor(7, dtype=torch.int64),
        "e": torch.randn(1, dtype=torch.float64),
    }
    bucket = bucket_of(list(tensors.items()))
    assert bucket.num_bytes == sum(x.nbytes for x in tensors.values())
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    for entry in bucket.flat_entries:
        entry.view(flat).copy_(tensors[entry.name])
    for entry in bucket.flat_entries:
        assert torch.equal(entry.view(flat), tensors[entry.name])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_digest_sees_every_flipped_bit_and_every_exchange(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 7).mul(50).to(dtype)
    whole = digest(tensor)
    assert whole == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert digest(changed) != whole, (byte, bit)
    assert digest(tensor.flip(0)) != whole
    assert digest(torch.zeros(3)) != digest(torch.tensor([0.0, -0.0, 0.0]))
