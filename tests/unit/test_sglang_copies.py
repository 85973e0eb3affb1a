"""What a loader did once is repeated without it: the model's memory is as the loader itself would leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from spmdrl.engine.sglang.loader import CopyPlan
from spmdrl.refit.bucket import Bucket, bucket_of

Named = Iterable[tuple[str, Tensor]]


def tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(4, 6),
        "k": torch.randn(2, 6),
        "o": torch.randn(6, 4),
        "embed": torch.randn(5, 6),
        "scale": torch.randn(6).bfloat16(),
        "skipped": torch.randn(3),
    }


class Model(nn.Module):
    """Fuses q and k, holds one half of o's columns, pads and ties embed, and has scale in float32."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"qk": (6, 6), "o": (6, 2), "embed": (8, 6), "head": (8, 6), "scale": (6,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, float("nan")), requires_grad=False))
        self.asked: list[str] = []

    def load_weights(self, named_tensors: Named) -> None:
        for name, tensor in named_tensors:
            self.asked.append(name)
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        if name in ("q", "k"):
            first = 0 if name == "q" else 4
            self.qk.data.narrow(0, first, len(tensor)).copy_(tensor)
        elif name == "o":
            self.o.data.copy_(tensor.chunk(2, dim=1)[1])
        elif name == "embed":
            for parameter in (self.embed, self.head):
                parameter[: len(tensor)].data.copy_(tensor)
                parameter[len(tensor) :].data.fill_(0)
        elif name == "scale":
            self.scale.data.copy_(tensor)


class Computes(Model):
    """Holds the exponential of k."""

    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor.exp() if name == "k" else tensor)


class Reads(Model):
    """Normalizes what it holds."""

    def load_weights(self, named_tensors: Named) -> None:
        super().load_weights(named_tensors)
        self.scale.data.copy_(self.scale / self.scale.norm())


class Derives(Model):
    """Keeps one more than its scale, as Gemma's norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.full((6,), float("nan")), persistent=False)

    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor)
        if name == "scale":
            self.more.copy_(self.scale.data).add_(1.0)


class Accumulates(Derives):
    """Adds to what it kept before."""

    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor)
        if name == "q":
            self.more.add_(1.0)


class WritesOver(Model):
    """Clears the fused weight before it is loaded."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "q":
            self.qk.data.zero_()
        super().load(name, tensor)


class Counts(Model):
    """Writes what is not in the bucket."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "scale":
            tensor = torch.full_like(self.scale, len(self.asked))
        super().load(name, tensor)


def filled(seed: int) -> tuple[Bucket, Tensor]:
    named = tensors(seed)
    bucket = bucket_of(list(named.items()))
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    for entry in bucket.flat_entries:
        entry.view(flat).copy_(named[entry.name])
    return bucket, flat


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(
    ("kind", "loaded"),
    [
        (Model, {"skipped"}),
        (Computes, {"k", "skipped"}),
        (Reads, set(tensors(0))),
        (Derives, {"skipped"}),
        (Accumulates, set(tensors(0))),
        (WritesOver, set(tensors(0))),
        (Counts, set(tensors(0))),
    ],
)
def test_copies_equal_the_loader(kind: Callable[[], Model], loaded: set[str]) -> None:
    model, expected = kind(), kind()
    bucket, flat = filled(0)
    copies = CopyPlan.record(model, bucket.flat_entries, flat)
    for seed in (1, 2):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(float("nan"))  # what a released memory may hold, padding included
        bucket, flat = filled(seed)  # in other memory
        model.asked.clear()
        copies.repeat(model, flat)
        assert set(model.asked) == loaded
        expected.asked.clear()
        expected.load_weights([(entry.name, entry.view(flat)) for entry in bucket.flat_entries])
        assert held(model).keys() == held(expected).keys()
        for name, tensor in held(model).items():
            torch.testing.assert_close(tensor, held(expected)[name], rtol=0, atol=0)


def test_the_first_bucket_is_loaded_while_it_is_watched() -> None:
    model, expected = Model(), Model()
    bucket, flat = filled(0)
    CopyPlan.record(model, bucket.flat_entries, flat)
    expected.load_weights([(entry.name, entry.view(flat)) for entry in bucket.flat_entries])
    for name, tensor in held(model).items():
        assert torch.equal(tensor, held(expected)[name])


def replaced(model: Model) -> None:
    model.qk = nn.Parameter(model.qk.clone(), requires_grad=False)


def moved(model: Model) -> None:
    model.embed.data = model.embed.data.clone()


def turned(model: Model) -> None:
    model.qk.data = model.qk.data.t()


def removed(model: Model) -> None:
    del model.scale


@pytest.mark.parametrize("change", [replaced, moved, turned, removed])
def test_copies_into_memory_that_the_model_no_longer_has_are_not_valid(change: Callable[[Model], None]) -> None:
    model = Model()
    bucket, flat = filled(0)
    copies = CopyPlan.record(model, bucket.flat_entries, flat)
    assert copies.are_valid()
    change(model)
    assert not copies.are_valid()
