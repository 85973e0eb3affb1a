"""Where weights lie in buckets, and that digests see every change."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import pytest
import torch

from spmdrl.config import RefitConfig
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.refit.bucket import Bucket, Weight, bucket_of, plan_buckets
from spmdrl.refit.digest import ROW_WORDS, TABLE_ROWS, digest, digests


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


def slow_digest(data: bytes) -> str:
    """The formula of `digest`, word by word."""
    rows: dict[int, int] = {}
    columns: dict[int, int] = {}
    for place in range(0, len(data), 8):
        word = int.from_bytes(data[place : place + 8].ljust(8, b"\0"), "little", signed=True)
        row, column = divmod(place // 8, 2048)
        for sums, number in ((rows, row), (columns, row // 32 * 2048 + column)):
            sums[number] = sums.get(number, 0) + word
    found = []
    for sums in (rows, columns):
        signed = {number: (x + 2**63) % 2**64 - 2**63 for number, x in sums.items()}
        found.append(sum((2 * number + 1) * x for number, x in signed.items()))
        found.append(sum((2 * number + 1) * (x >> 32) for number, x in signed.items()))
    return "".join(f"{number % 2**64:016x}" for number in found)


def in_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 24, 2**14, 2**14 + 8, 2**19, 2**20 + 3 * 2**14 + 13])
def test_a_digest_is_the_sums_that_its_formula_says(num_bytes: int) -> None:
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    assert digest(data) == slow_digest(in_bytes(data))


def test_a_digest_does_not_depend_on_how_a_weight_is_given() -> None:
    whole = torch.randn(3, 2, 2**16)
    expected = digest(whole)
    shifted = torch.cat([torch.zeros(1), whole.view(-1)])[1:]  # its memory does not begin with a whole word
    odd = [whole.view(-1)[:5], whole.view(-1)[5 : 2**17 + 7], whole.view(-1)[2**17 + 7 :]]
    given = {"shifted": [shifted], "rows": [*whole], "odd": odd, "other dtype": [whole.view(torch.bfloat16)]}
    assert digests(given) == dict.fromkeys(given, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_sees_signs_exchanged(dtype: torch.dtype) -> None:
    """The highest bit of a word is the only one that a sum of whole words would miss."""
    words = 8 // dtype.itemsize
    tensor = torch.zeros(2**17 * words).to(dtype)
    for place, step in itertools.product(range(words), [words, 2048 * words, 32 * 2048 * words]):
        one, other = tensor.clone(), tensor.clone()
        one[place], one[place + step] = 1, 129
        other[place], other[place + step] = 129, 1
        assert digest(one) != digest(other)
        if dtype.is_floating_point:
            one[place], other[place + step], one[place + step], other[place] = 3, 3, -3, -3
            assert digest(one) != digest(other)


def test_the_kernel_for_devices_has_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("needs triton's interpreter; tests/gpu runs the kernel itself")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from spmdrl.refit import digest_triton

    torch.manual_seed(0)
    lengths = [[1], [2**16, 2048], [2048 * 3 + 17], [2**17, 2**16, 2**16 + 3], [2 * 2**16 + 9]]
    weights = [[torch.randint(-(2**63), 2**63 - 1, (n,)) for n in parts] for parts in lengths]
    monkeypatch.setattr(digest_triton, "_MAX_PROGRAMS", 2)  # so that a program has several tables
    found = digest_triton.sums(weights, row_words=ROW_WORDS, table_rows=TABLE_ROWS).tolist()
    expected = digests({f"{number}": parts for number, parts in enumerate(weights)})
    assert ["".join(f"{x % 2**64:016x}" for x in numbers) for numbers in found] == [*expected.values()]


@pytest.mark.parametrize(
    ("set_to", "transport", "device_gib", "chosen"),
    [
        (None, "auto", None, 2**27),
        (None, "shared_memory", 141, 2**27),
        (None, "auto", 141, 2**30),
        (None, "cuda_ipc", 79.3, 2**30),  # an 80 GB device has a little less
        (None, "auto", 47.5, 2**29),
        (None, "auto", 23.6, 2**28),
        (5000, "auto", 141, 5000),
        (5000, "shared_memory", None, 5000),
    ],
)
def test_a_bucket_is_as_large_as_its_place_allows(set_to, transport, device_gib, chosen) -> None:
    refit = RefitConfig(bucket_bytes=set_to, transport=transport)
    assert bucket_bytes(refit, device_bytes=device_gib and int(device_gib * 2**30)) == chosen
