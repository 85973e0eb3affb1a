"""The table about adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, PathText, Section, idle_settings, rule

QuantizedBase = Literal["nf4", "8bit"]  # bits in which the base's weights are kept
Alpha = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]  # float32 must bear what it multiplies
_FROM_DIRECTORY = ("rank", "alpha", "rslora", "targets", "init")


class LoraConfig(Section):
    rank: Count = 16
    """Rows of each adapter's A, and columns of its B: the rank of the change of a weight. See `docs/lora.md`."""
    alpha: Alpha = 32.0
    """The change of a weight is B A times `alpha / rank`."""
    rslora: bool = False
    """Divide `alpha` by the root of `rank` in place of `rank`, so that a higher rank does not learn more slowly."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all-linear"
    """The linear layers that get adapters, by the ends of their names, such as `["q_proj", "v_proj"]`; `"all-linear"`
    are all but the head."""
    init: Literal["default", "pissa", "olora"] = "default"
    """Where training begins: `default` at a random A and B = 0; `pissa` at the largest singular values of each weight,
    `olora` at its first columns made orthogonal, both minus themselves, so that the policy begins as its base."""
    path: PathText | None = None
    """Start from the adapters in this directory, which are in PEFT's format, of this or any other program's. It says
    what rank, alpha and targets are."""
    base: QuantizedBase | None = None
    """Keep the weights of the base's linear layers, but not of the head, in few bits: `nf4` in 4, `8bit` in 8, whole on
    every rank (QLoRA). Unset: as they compute. Needs the extra `quantized`."""
    merge: bool = False
    """Give the engine merged weights, W + B A, at every refit, for what it cannot adapt itself."""
    dropout: float = 0.0
    """Only 0: with dropout the ratio would not be 1 before the first update."""
    use_dora: bool = False
    """Only false: magnitudes of weights (DoRA) are not trained."""


@rule(LoraConfig)
def adapters_have_no_dropout(lora: LoraConfig) -> Iterator[str]:
    if lora.dropout != 0:
        yield (
            f"dropout = {lora.dropout:g} would make the trainer's log-probabilities differ from the engine's before "
            "the first update; set it to 0, or remove it"
        )


@rule(LoraConfig)
def adapters_have_no_magnitudes(lora: LoraConfig) -> Iterator[str]:
    if lora.use_dora:
        yield "use_dora = true trains magnitudes of weights, which is not supported; remove it, or raise rank"


@rule(LoraConfig)
def a_directory_says_what_adapters_are(lora: LoraConfig) -> Iterator[str]:
    if lora.path is not None:
        yield from idle_settings(lora, _FROM_DIRECTORY, f'path = "{lora.path}", whose adapter_config.json says it')
