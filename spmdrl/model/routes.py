"""Routes: the experts that each layer chooses for tokens, recorded in one forward pass and replayed in another.

A router scores the experts, and `torch.topk` takes the best k. Here that one call is watched: it may have to take
others than the best, and the router weighs these by its own scores of them, through which gradients reach it.

Routes belong to layers and to the tokens of a forward pass, not to an order of calls. They stay until the next forward
pass, so that a layer which is computed again for the backward pass takes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmdrl.algo.sequences import expert_imbalance

FREE = -1  # in the place of an expert: there is no record, and the router chooses by itself


class Routers:
    """The routers of a model's layers, in their order."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the routers of a model whose layers are final; it may be sharded before or after."""
        self._biases = [_bias_of(router) for router, _ in _routers(model)]
        self._choices = [_watched(router, num_experts) for router, num_experts in _routers(model)]
        assert self._choices, "the model has no experts"
        self.watches_scores = False

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return len(self._choices)

    @property
    def num_experts(self) -> int:
        """Experts among which each layer chooses."""
        return self._choices[0].num_experts

    def replay(self, routes: Tensor | None) -> None:
        """Have the next forward pass take the routes [T, L, k] of its T tokens, and compute again with them; None: its
        own. Where an expert is FREE, the router chooses."""
        for layer, choice in enumerate(self._choices):
            choice.given = None if routes is None else routes[:, layer]
            choice.taken = choice.differing = None
            choice.watch_scores(wanted=self.watches_scores)

    @property
    def taken(self) -> Tensor:
        """The routes of the last forward pass, [T, L, k] int16."""
        return torch.stack([_there(choice.taken) for choice in self._choices], dim=1)

    def watch_scores(self) -> None:
        """Have forward passes leave what routers say of all experts, for `imbalance`."""
        self.watches_scores = True

    def sequence_loads(self, rows: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
        """Count the tokens of each of S sequences that each expert had in the last forward pass among these rows [N],
        of the sequences [N] int64: [S, L, E] float32."""
        loads = torch.zeros(num_sequences, self.num_layers, self.num_experts, device=rows.device)
        layers = torch.arange(self.num_layers, device=rows.device)[:, None]
        taken = self.taken[rows].long()  # [N, L, k]
        places = (sequences[:, None, None], layers.expand_as(taken), taken)
        return loads.index_put_(places, torch.ones((), device=rows.device), accumulate=True)

    def imbalance(self, rows: Tensor, sequences: Tensor, loads: Tensor) -> Tensor:
        """Return `expert_imbalance` of each of these rows, for loads [S, L, E]: [N] float32, the mean over layers.

        Scores are then dropped, which would otherwise stay on the device until the next forward pass.
        """
        by_layer = zip(self._choices, loads.unbind(1), strict=True)
        found = [expert_imbalance(one.shares(rows), sequences, load) for one, load in by_layer]
        for choice in self._choices:
            choice.watch_scores(wanted=False)
        return torch.stack(found).mean(0)

    def loads(self, rows: Tensor) -> Tensor | None:
        """Count the tokens that each expert had in the last forward pass among these rows [N]: [L, E] float32; None
        where a layer chose in another way."""
        if any(choice.taken is None for choice in self._choices):
            return None
        taken = self.taken[rows].long().movedim(1, 0).flatten(1)  # [L, N k]
        loads = torch.zeros(self.num_layers, self.num_experts, device=taken.device)
        return loads.scatter_add_(1, taken, torch.ones_like(taken, dtype=loads.dtype))

    @torch.no_grad()
    def balance(self, loads: Tensor, *, rate: float) -> None:
        """Raise the biases of experts with fewer tokens than the mean of their layer by `rate`, and lower those with
        more, for loads [L, E]: the balance without a loss of arXiv:2408.15664."""
        for bias, of_layer in zip(self._biases, loads, strict=True):
            assert bias is not None, "a router has no bias to move"
            bias.add_((rate * (of_layer.mean() - of_layer).sign()).to(bias))

    @property
    def disagreement(self) -> Tensor:
        """[T] float32: the share of experts that the last forward pass had to take and its routers would not have
        taken, over all layers; negative where a layer was FREE."""
        return torch.stack([_there(choice.differing) for choice in self._choices]).mean(0)


def _there(values: Tensor | None) -> Tensor:
    assert values is not None, "a layer of experts was not part of the forward pass"
    return values


class _Choice(TorchFunctionMode):
    """The choice of a layer's experts: the call of `torch.topk` over the scores [T, E] of all of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.given: Tensor | None = None  # [T, k]
        self.taken: Tensor | None = None  # [T, k] int16
        self.differing: Tensor | None = None  # [T] float32
        self.watch_scores(wanted=False)

    def watch_scores(self, *, wanted: bool) -> None:
        """Forget the scores of the forward pass before, and note those of the next one or not."""
        self._notes = wanted
        self.logits: Tensor | None = None  # [T, E]
        self.gates: Tensor | None = None  # [T, E]: their sigmoids, where the router takes them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._notes:
            self._note(func, result)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        return self._chosen(scores, result) if _are_of_all(scores, self.num_experts) else result

    def _note(self, func: Any, result: Any) -> None:
        """Note the scores of the forward pass, not those of a layer that is computed again."""
        if func in _LINEAR and self.logits is None and _are_of_all(result, self.num_experts):
            self.logits = result
        elif func in _SIGMOID and self.gates is None and _are_of_all(result, self.num_experts):
            self.gates = result

    def shares(self, rows: Tensor) -> Tensor:
        """Return what the router gives each expert at these rows, [N, E] float32; the sum of a row is 1."""
        if self.gates is None:
            return _there(self.logits)[rows].float().softmax(-1)
        gates = self.gates[rows].float()
        return gates / gates.sum(-1, keepdim=True)

    def _chosen(self, scores: Tensor, best: Any) -> Any:
        """Return values and indices [T, k] of the experts to take, where `best` are those of the highest scores."""
        if self.given is None:
            self.taken = best.indices.to(torch.int16)
            return best
        given, own = self.given.to(scores.device, torch.int64), best.indices
        assert given.shape == own.shape, f"routes {list(given.shape)} are not of these tokens, {list(own.shape)}"
        is_free = given < 0
        indices = torch.where(is_free, own, given)
        differs = (indices[:, :, None] != own[:, None, :]).all(-1)
        self.taken = indices.to(torch.int16)
        self.differing = differs.float().mean(-1).masked_fill(is_free.any(-1), -torch.inf)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


_LINEAR = (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SIGMOID = (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid)


def _are_of_all(scores: Tensor, num_experts: int) -> bool:
    return scores.ndim == 2 and scores.shape[1] == num_experts  # not those of groups of experts


def _watched(router: nn.Module, num_experts: int) -> _Choice:
    compute: Callable[..., Any] = router.forward
    choice = _Choice(num_experts)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with choice:
            return compute(*args, **kwargs)

    router.forward = forward
    return choice


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the module in which each layer chooses among its experts, and their number."""
    for name, module in model.named_modules():
        weights = [weight for weight in module._parameters.values() if weight is not None and weight.ndim == 3]
        if not (hasattr(module, "num_experts") and weights):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        children = dict(parent.named_children())
        router = children.get("gate", children.get("router", parent))
        yield parent if isinstance(router, nn.Linear) else router, len(weights[0])


def _bias_of(router: nn.Module) -> Tensor | None:
    """Return what a router adds to scores only to choose by them, [E]; None where it has no such buffer."""
    return next((x for name, x in router.named_buffers() if name.endswith("e_score_correction_bias")), None)


def balance_refusal(model: nn.Module) -> str | None:
    """Return why biases cannot balance the loads of a model's experts, to follow its name; None where they can."""
    refusal = routes_refusal(model)
    if refusal is None and any(_bias_of(router) is None for router, _ in _routers(model)):
        return "has routers that choose without biases, or train them"
    return refusal


def expert_layers(model: nn.Module) -> list[int]:
    """Number the decoder layers that have experts, as `Routers` orders them."""
    named = (name for name, module in model.named_modules() if any(module is router for router, _ in _routers(model)))
    return [int(name.partition("layers.")[2].partition(".")[0]) for name in named]


def routes_refusal(model: nn.Module) -> str | None:
    """Return why a model, which may have no memory, has no routes, to follow its name; None where it has some."""
    routers = [router for router, _ in _routers(model)]
    if not routers:
        return "has no experts"
    # Its code is read, not run: without memory most of them do not run to the end.
    if any("topk(" not in inspect.getsource(type(router)) for router in routers):
        return "has a router that does not take the experts of the highest scores"
    return None
