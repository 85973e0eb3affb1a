"""An optimizer whose state is in host memory and visits the device for a block of parameters at a time.

Between blocks and between steps nothing of the state is on the device: a step holds the state of one block there. The
host's memory is pinned where the device is a GPU, and is the same from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdrl.memory.device import STATE_BLOCK_BYTES
from spmdrl.model.host_memory import HostBuffers


class StateOnHost(torch.optim.Optimizer):
    """Put before an optimizer class among the bases of another: see `with_state_on_host`."""

    block_bytes = STATE_BLOCK_BYTES  # of the parameters whose state is on the device together; one may be larger

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parameters = self._parameters()
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._host = HostBuffers(pinned=any(parameter.is_cuda for parameter in parameters))
        for group in self.param_groups:  # some optimizers begin with a state
            self._put_away(group, group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of the optimizer on each block of parameters in turn."""
        assert closure is None, "the gradients are there before the step"
        groups = self.param_groups
        try:
            for group in groups:
                settings = _settings(group)
                for block in _blocks(group["params"], self.block_bytes):
                    # A copy: what a step counts in its group is counted once, not once a block.
                    alone = settings | {"params": block}
                    self.param_groups = [alone]
                    self._bring(alone, block)
                    super().step()
                    self._put_away(alone, block)
                    group.update(_settings(alone))
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings and state as `state_dict` has them, the state on the host; torch's own would load the device."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])
        for group in self.param_groups:
            self._put_away(group, group["params"])

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _travellers(
        self, group: dict[str, Any], block: Sequence[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """(parameter, key, value) of all state that a step on `block` wants beside the parameters.

        Step counts stay on the host unless the kernel reads them on the device, which is torch's own rule as well.
        """
        counts_travel = group.get("fused") or group.get("capturable")
        for parameter in block:
            for key, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (key != "step" or counts_travel):
                    yield parameter, key, value

    def _bring(self, group: dict[str, Any], block: Sequence[nn.Parameter]) -> None:
        """Copy the state of `block` to where its parameters are."""
        for parameter, key, value in self._travellers(group, block):
            local = _local(value)
            there = torch.empty_like(local, device=_local(parameter).device, pin_memory=False)
            self.state[parameter][key] = _with_local(value, there.copy_(local, non_blocking=True))

    @torch.no_grad()
    def _put_away(self, group: dict[str, Any], block: Sequence[nn.Parameter]) -> None:
        """Move the state of `block` to its place on the host, and wait until it is there."""
        values = {(p, key): value for p, key, value in self._travellers(group, block)}
        names = {(p, key): f"{self._numbers[p]}.{key}" for p, key in values}
        places = self._host.take({names[place]: _local(value).nbytes for place, value in values.items()})
        for (parameter, key), value in values.items():
            local = _local(value)
            home = places[names[parameter, key]].view(local.dtype).view(local.shape)
            self.state[parameter][key] = _with_local(value, home.copy_(local, non_blocking=True))
        if any(_local(value).is_cuda for value in values.values()):
            torch.cuda.synchronize()


def with_state_on_host(kind: Callable[..., torch.optim.Optimizer]) -> type[StateOnHost]:
    """The same optimizer, its state on the host."""
    assert isinstance(kind, type)
    return type(f"{kind.__name__}WithStateOnHost", (StateOnHost, kind), {})


def _blocks(parameters: Sequence[nn.Parameter], max_bytes: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, cut where another one would make a block larger than `max_bytes`."""
    block: list[nn.Parameter] = []
    block_bytes = 0
    for parameter in parameters:
        size = _local(parameter).nbytes
        if block and block_bytes + size > max_bytes:
            yield block
            block, block_bytes = [], 0
        block.append(parameter)
        block_bytes += size
    if block:
        yield block


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; not `to_local()`, which autograd would remember."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """The tensor that is `local` on this rank. Not from_local, which would move it to the mesh's device."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
