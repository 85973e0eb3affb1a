"""Stepping through blocks with the state on the host is stepping at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmdrl.config import OptimConfig
from spmdrl.learn.optim import make_optimizer, optimizer_problems
from spmdrl.model.offload import StateOnHost

SETTINGS: list[dict[str, Any]] = [
    {"name": "adamw", "weight_decay": 0.1},
    {"name": "sgd", "momentum": 0.9},
    {"name": "torch.optim:Adagrad"},  # has state before its first step
    {"name": "torch.optim:Adam", "params": {"amsgrad": True}},
    {"name": "torch.optim:Adafactor"},  # its state has other shapes than the weights
    {"name": "tests.unit.test_host_state:CountsInItsGroup"},
]


class CountsInItsGroup(torch.optim.SGD):
    """Keeps how often it stepped beside the settings, as some optimizers do, and steps by it."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=0.5)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = group["lr"] / group["count"]
        super().step(closure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 1))


def test_norms_and_biases_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name == "0.weight" else 1.0))


def learned(settings: dict[str, Any], *, on_host: bool, stop_after: int | None = None) -> tuple[list[Tensor], Any]:
    """Weights after four steps, and the optimizer; saved and restored into new ones in between if asked for."""
    cfg = OptimConfig(**({"lr": 0.1, "state_on_host": on_host} | settings))
    model, optimizer = network(), None
    for step in range(4):
        if optimizer is None or step == stop_after:
            weights, state = model.state_dict(), optimizer and optimizer.state_dict()
            model = network()
            model.load_state_dict(weights)
            optimizer = make_optimizer(model, cfg)
            optimizer.block_bytes = 200  # bytes; the largest weight alone has more
            if state:
                optimizer.load_state_dict(state)
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], optimizer


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["name"])
def test_blocks_are_bitwise_one_step(settings: dict[str, Any]) -> None:
    whole, optimizer = learned(settings, on_host=False)
    assert not isinstance(optimizer, StateOnHost)
    assert not all(torch.equal(one, other) for one, other in zip(whole, network().parameters(), strict=True))
    for stop_after in (None, 2):
        blocks, by_blocks = learned(settings, on_host=True, stop_after=stop_after)
        assert isinstance(by_blocks, StateOnHost)
        assert all(torch.equal(one, other) for one, other in zip(whole, blocks, strict=True))
        assert len(by_blocks.param_groups) == len(optimizer.param_groups)
        for one, other in zip(optimizer.param_groups, by_blocks.param_groups, strict=True):
            assert one.keys() == other.keys()
            assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


def test_no_block_brings_more_than_its_state() -> None:
    cfg = OptimConfig(lr=0.1, state_on_host=True)
    model = network()
    optimizer = make_optimizer(model, cfg)
    optimizer.block_bytes = 200
    seen: list[int] = []
    bring = optimizer._copy_to_device
    optimizer._copy_to_device = lambda group, block: (seen.append(len(block)), bring(group, block))
    for _ in range(2):
        model(torch.randn(5, 8)).sum().backward()
        optimizer.step()
        places = {value.untyped_storage().data_ptr() for state in optimizer.state.values() for value in state.values()}
        held = {block.untyped_storage().data_ptr() for block in optimizer._host._places.values()}
        assert places == held, "between steps, all state is in the host's buffers"
    # Weights have 512, 256 and 16 bytes, biases 64, 16 and 4: three blocks and one, twice.
    assert seen == [1, 1, 1, 3] * 2
    assert optimizer._host.num_bytes < 2**14


def test_cached_memory_is_returned_before_the_state_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(len(optimizer.state)))
    model = network()
    optimizer = made = make_optimizer(model, OptimConfig(lr=0.1))
    for _ in range(2):
        model(torch.randn(5, 8)).sum().backward()
        optimizer.step()
    assert calls == [0], "once, and before the first step"
    optimizer = make_optimizer(model, OptimConfig(lr=0.1))
    optimizer.load_state_dict(made.state_dict())
    optimizer.step()
    assert calls == [0], "state that was loaded is there"


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["name"])
def test_the_check_at_launch_takes_a_step_as_well(settings: dict[str, Any]) -> None:
    assert not list(optimizer_problems(OptimConfig(**({"lr": 0.1, "state_on_host": True} | settings))))
