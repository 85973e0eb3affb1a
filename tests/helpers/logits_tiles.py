"""Two implementations of `Tile`, compared on everything that is special about some logits; the memory of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import spmdrl.model.logprobs
from spmdrl.memory.activations import Decoder, logits_bytes
from spmdrl.model.divergence import Divergence, TeacherHead, next_token_divergence
from spmdrl.model.linear import adds_products, linear
from spmdrl.model.logits_tile import GradientTerms, Scale, Tile
from spmdrl.model.logprobs import Head, HeadOptions, next_token_logprobs
from tests.helpers.live import PeakWatch

# Of `Decoder`; the head's memory does not depend on them.
LAYER_WIDTHS = (
    *("num_layers", "query_width", "key_width", "query_heads", "head_width"),
    *("mlp_width", "experts_per_token", "norms"),
)
PEAK_TOKENS, PEAK_COLUMNS = 32, 256
PEAK_TILE_ELEMENTS = PEAK_TOKENS // 2 * PEAK_COLUMNS  # to be set while `peak_over_prediction` runs
ON_DEVICE = 1e-5  # of a row
SIZES = [(1, 1), (3, 7), (1, 4096), (2, 4097), (3, 9001)]


@dataclass(frozen=True, slots=True)
class Case:
    """Two neighbouring tiles and what is known of their tokens."""

    tiles: list[Tensor]  # [N, W] each
    targets: Tensor  # [N], counted from the first tile's first column; some lie in neither
    terms: GradientTerms


def case(num_tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    """Logits with a deviation of 3; every fourth is forbidden, and of one token all of the first tile."""
    draw = torch.Generator().manual_seed(0)
    tiles = [torch.randn(num_tokens, width, generator=draw).mul_(3) for _ in range(2)]
    for tile in tiles:
        tile[:, 1::4] = -torch.inf
    tiles[0][num_tokens // 2] = -torch.inf
    log_normalizer, *others = (torch.randn(num_tokens, generator=draw).to(device) for _ in range(4))
    terms = GradientTerms(log_normalizer + 10, *others)
    targets = torch.randint(-width, 3 * width, (num_tokens,), generator=draw)
    return Case([tile.to(device, dtype) for tile in tiles], targets.to(device), terms)


@contextmanager
def products_added(device_type: str) -> Iterator[None]:
    """Give this device the kernel of `add_product`, which torch has on CUDA alone; where there is one it stays."""
    library = torch.library.Library("aten", "IMPL")
    if not adds_products(device_type, torch.bfloat16):
        library.impl("addmm.dtype_out", _add_product, device_type.upper())
    try:
        yield
    finally:
        library._destroy()


def _add_product(
    total: Tensor, one: Tensor, other: Tensor, out_dtype: torch.dtype, *, beta: int = 1, alpha: int = 1, out: Tensor
) -> Tensor:
    assert alpha == 1 and out.dtype == out_dtype == torch.float32
    product = one.float() @ other.float()
    return out.copy_(product if beta == 0 else total + product)


def summary_by(tile: Tile, of: Case, scale: Scale) -> Tensor:
    """The summary of both tiles, one after the other."""
    first, second = of.tiles
    before = tile.summary(first.clone(), of.targets, 0, scale)
    return tile.summary(second.clone(), of.targets, first.shape[1], scale, before)


def gradient_by(tile: Tile, of: Case, scale: Scale, *, uses_entropy: bool) -> Tensor:
    """The gradient of the first tile."""
    terms = of.terms if uses_entropy else of.terms._replace(by_entropy=None)
    return tile.gradient(of.tiles[0].clone(), of.targets, 0, scale, terms)


def require_same(one: Tile, other: Tile, of: Case, temperature: float, softcap: float | None = None) -> None:
    """Both implementations agree: float32 to 1e-6, on a device to what `require_near` asks, half precision to its last
    bit."""
    scale = Scale(temperature, softcap)
    ours, theirs = (summary_by(tile, of, scale) for tile in (one, other))
    on_device = ours.is_cuda
    # The largest and the target's are chosen, not computed; but on CUDA torch multiplies by the temperature's inverse.
    if softcap is None and (temperature == 1.0 or not on_device):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[3], theirs[3])
    limit = ON_DEVICE if on_device else 1e-6
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    dtype = of.tiles[0].dtype
    for uses_entropy in (False, True):
        ours, theirs = (gradient_by(tile, of, scale, uses_entropy=uses_entropy) for tile in (one, other))
        assert ours.dtype == theirs.dtype == dtype
        if on_device and dtype == torch.float32:
            require_near(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=max(limit, torch.finfo(dtype).eps), atol=limit)


def require_near(ours: Tensor, theirs: Tensor) -> None:
    """Each token's row of gradients agrees as far as two ways of rounding do, which a device has.

    A logit over the temperature, or times its inverse, differs in its last bit, and its exponential by as much as the
    logit is large: with 2048 rows of 8192 thousands of elements are further apart than 1e-6 of themselves.
    """
    apart = (ours - theirs).norm(dim=1)
    assert (apart <= ON_DEVICE * theirs.norm(dim=1)).all(), f"{apart.max()} apart"


def peak_over_prediction(
    tile: Tile,
    dtype: torch.dtype,
    hidden_size: int,
    *,
    on_gpu: bool,
    kind: Divergence | None = None,
    softcap: float | None = None,
) -> float:
    """The head's memory at its peak, with the gradient of its weight, as a fraction of what is predicted; with `kind`,
    the divergence from a teacher of the same size is in the loss."""
    device_type = "cuda" if torch.cuda.is_available() and on_gpu else "cpu"
    tokens, chunk, vocabulary = PEAK_TOKENS, PEAK_TOKENS // 2, PEAK_COLUMNS * 4
    hidden, weight = (
        torch.randn(rows, hidden_size, device=device_type).to(dtype).requires_grad_() for rows in (tokens, vocabulary)
    )
    targets = torch.arange(tokens, device=device_type)
    inputs = (hidden, weight, None, targets, HeadOptions(Scale(0.7, softcap), chunk), Head(linear, tile=tile))
    teacher = TeacherHead(weight=torch.randn_like(weight), bias=None, scale=Scale())
    taught = {"teacher": teacher, "teacher_hidden": torch.randn_like(hidden), "kind": kind}
    with PeakWatch(interpreted=on_gpu and device_type == "cpu") as watch:
        if kind is None:
            outputs: tuple[torch.Tensor, ...] = next_token_logprobs(*inputs)
        else:
            outputs = next_token_divergence(*inputs, **taught)
        sum(output.sum() for output in outputs).backward()
    sizes = {"hidden_size": hidden_size, "vocabulary": vocabulary, "tokens": tokens, "chunk": chunk}
    predicted = predicted_bytes(device_type, dtype, on_gpu=on_gpu, has_teacher=kind is not None, **sizes)
    return watch.peak_bytes / (predicted + weight.nbytes)


def predicted_bytes(
    device_type: str,
    dtype: torch.dtype,
    *,
    hidden_size: int,
    vocabulary: int,
    tokens: int,
    chunk: int,
    on_gpu: bool,
    has_teacher: bool,
) -> int:
    """Return the planner's bytes of the head's memory at its peak, without the gradient of its weight."""
    widths = dict.fromkeys(LAYER_WIDTHS, 1)
    return logits_bytes(
        Decoder(hidden=hidden_size, vocabulary=vocabulary, has_head_norms=False, **widths),
        num_tokens=tokens,
        chunk_tokens=chunk,
        tile_elements=spmdrl.model.logprobs.TILE_ELEMENTS[device_type],
        tile_columns=spmdrl.model.logprobs.TILE_COLUMNS[device_type],
        compute_bytes=dtype.itemsize,
        on_gpu=on_gpu,
        has_teacher=has_teacher,
    )
