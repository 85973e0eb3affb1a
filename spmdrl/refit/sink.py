"""The interface of an engine that receives a refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from spmdrl.refit.bucket import Bucket

Naming = Literal["model", "checkpoint"]  # whose tensor names: the model's own, or those of its files


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """The adapters of one version of the policy, in one bucket of tensors with PEFT's names."""

    version: int
    config: Mapping[str, Any]  # PEFT's adapter_config.json
    bucket: Bucket
    flat: Tensor  # [bucket.num_bytes] uint8

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as views of `flat`."""
        return {entry.name: entry.view(self.flat) for entry in self.bucket.flat_entries}

    @property
    def scale(self) -> float:
        """The factor of B A."""
        from spmdrl.model.lora.adapters import LoraScaling  # an engine without adapters needs no more than this file

        about = self.config
        return LoraScaling(rank=about["r"], alpha=about["lora_alpha"], rslora=about.get("use_rslora", False)).scale


class WeightSink(Protocol):
    """The receiving side of a refit.

    Every rank that holds a part of the engine makes the same calls in the same order: `begin_update`; `wait` and `load`
    for each bucket; `wait` and `end_update`; and, when the refit is verified, `differing`.
    """

    version: int  # the step whose weights are loaded; -1 before the first refit
    naming: Naming  # whose tensor names it loads
    device: torch.device  # of the memory that it allocates

    @property
    def has_weights(self) -> bool:
        """True from the end of an update until the engine gives its weights back or is started again."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate memory [num_bytes] uint8 for buckets."""
        ...

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """Open a refit to `version`: the engine's weights are invalid until `end_update`.

        An engine that has weights keeps those that are in no bucket. Bucket i will be in buffers[i % len(buffers)]; all
        of them come from `allocate`.
        """
        ...

    def load(self, number: int) -> None:
        """Start to copy bucket `number`, which is in its buffer now; the buffer must stay as it is until `wait`."""
        ...

    def wait(self) -> None:
        """Return when the bucket last given to `load`, if any, has been copied."""
        ...

    def end_update(self) -> None:
        """Close the refit and drop every cache of the old weights. Raises when a parameter was not loaded."""
        ...

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """Digest what this rank's part of the engine must hold after the bucket is loaded, under the engine's names."""
        ...

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Return the names of weights whose digests differ from `expected`, or are missing in what was expected in this
        refit and those before.

        Ranks that do not lead the engine return an empty list.
        """
        ...

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        """Take the adapters of a version, for the requests that are taken from now on; those of earlier versions stay
        as long as running requests need them.

        The adapters' memory may be written to again afterwards. Returns the names of tensors that the engine does not
        hold as they were given; on ranks that do not lead the engine none.
        """
        ...
