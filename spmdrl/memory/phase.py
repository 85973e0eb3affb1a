"""The predicted memory of one phase, and all of a rank that it depends on besides the settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from types import MappingProxyType

from spmdrl.config.plan import Plan
from spmdrl.memory.activations import Decoder
from spmdrl.memory.device import ModelSize, TrainingMemory
from spmdrl.memory.images import Tower
from spmdrl.memory.overhead import Overhead, Parts


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of one phase at its peak."""

    name: str
    device: Parts
    host: Parts
    elsewhere: Parts = field(default_factory=dict)  # on the same device: of other processes, and besides tensors

    @classmethod
    def of(cls, name: str, device: Parts, host: Parts, elsewhere: Parts = MappingProxyType({})) -> PhaseMemory:
        """Make a phase from these parts, leaving out the empty ones."""
        return cls(name, *({part: size for part, size in parts.items() if size} for parts in (device, host, elsewhere)))

    @property
    def on_device(self) -> Parts:
        """Parts on the device, of all processes and of CUDA itself."""
        return dict(self.device) | dict(self.elsewhere)

    @property
    def process_bytes(self) -> int:
        """Bytes on the device, in tensors of this process."""
        return sum(self.device.values())

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, of all processes and of CUDA itself."""
        return sum(self.on_device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes on the host, of this process."""
        return sum(self.host.values())


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The weights of a model as they are in its files."""

    num_bytes: int  # of all that the files hold, scales included
    numbers: int  # that these encode
    largest_bytes: int  # of each number of the largest weight

    def share(self, numbers: int) -> int:
        """Return the bytes of this count of numbers in the files, on average."""
        return math.ceil(numbers * self.num_bytes / self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModelSize:
    """A model besides the policy that is loaded and never trained."""

    table: str  # its settings
    size: ModelSize
    decoder: Decoder  # of the whole model
    on_device: bool  # where its shards rest
    gathers_once: bool  # it is on the device as a whole while it computes
    teaches_vocabulary: bool  # its head is on the device until the updates end, and its hidden states wait on the host
    tower: Tower | None = None  # that reads images for it alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a run: all that its phases depend on, besides the settings."""

    run: Plan
    memory: TrainingMemory
    size: ModelSize
    decoder: Decoder  # of the whole model
    critic: tuple[ModelSize, Decoder] | None
    repeats_keys: bool  # whether the attention kernel needs keys and values repeated for each query head
    fuses_layers: bool  # whether layers compute by `model/fused.py` where that has them
    compute_bytes: int  # per element of the compute dtype
    tile_elements: int  # logits that the head computes together
    tile_columns: int  # the most entries of the vocabulary among them
    stored: StoredModel
    device_bytes: int
    overhead: Overhead  # of the device of a rank that trains
    engine_overhead: Overhead  # of the device of a rank that holds an engine
    on_gpu: bool  # else the device is the host
    tower: Tower | None = None  # for images
    has_frozen_tower: bool = False  # the trainer's encodes each image once a step
    frozen: tuple[FrozenModelSize, ...] = ()

    @property
    def frozen_tower(self) -> Tower | None:
        """The tower that encodes each image once a step."""
        return self.tower if self.has_frozen_tower else None

    @property
    def trained_tower(self) -> Tower | None:
        """The tower that encodes in every pass of its model, because it is trained."""
        return None if self.has_frozen_tower else self.tower

    def for_critic(self) -> Rank | None:
        """Describe this rank with the critic in place of the policy, as a model with one logit."""
        if self.critic is None:
            return None
        size, decoder = self.critic
        return dataclasses.replace(self, size=size, decoder=dataclasses.replace(decoder, vocabulary=1))

    def for_frozen(self) -> list[Rank]:
        """Describe this rank with each of the frozen models in place of the policy."""
        return [
            dataclasses.replace(
                self,
                size=one.size,
                decoder=one.decoder,
                tower=one.tower or self.tower,
                has_frozen_tower=self.has_frozen_tower or one.tower is not None,
            )
            for one in self.frozen
        ]

    @property
    def resident(self) -> list[ModelSize]:
        """The sizes of the frozen models that rest on the device."""
        return [one.size for one in self.frozen if one.on_device]

    @property
    def trained(self) -> list[ModelSize]:
        """The sizes of the models that are trained, each by itself or by its adapters."""
        return [self.size, *([self.critic[0]] if self.critic else [])]
