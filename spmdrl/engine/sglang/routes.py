"""The experts that SGLang reports for a request's tokens, as routes; see `model/routes.py`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.families import vision_family
from spmdrl.model.load import model_without_memory
from spmdrl.model.routes import expert_layers
from spmdrl.types import Request, Response, Routes


def route_problems(cfg: Config, model_config: Any) -> Iterator[str]:
    """Yield a sentence where SGLang's routes of a model were not tried."""
    if cfg.correction.router_replay != "R3":
        return
    instead = 'set router_replay to "R2", which needs several updates a step, or rollout.engine = "torch"'
    if vision_family(model_config) is not None:
        yield f'correction.router_replay = "R3" was not tried with images in SGLang; {instead}'
    elif not hasattr(model_config.get_text_config(), "num_experts_per_tok"):
        yield f'correction.router_replay = "R3": SGLang reports no routes of a {model_config.model_type}; {instead}'


@dataclass(frozen=True, slots=True)
class RouteReader:
    """The form in which SGLang reports experts: of all layers, also of those that have none."""

    num_layers: int
    expert_layers: tuple[int, ...]
    num_chosen: int

    @classmethod
    def of(cls, cfg: Config, model_config: Any) -> RouteReader | None:
        """Describe the answers about a model; None where the settings ask for no routes."""
        if cfg.correction.router_replay != "R3":
            return None
        text = model_config.get_text_config()
        layers = expert_layers(model_without_memory(model_config, cfg.model))
        return cls(text.num_hidden_layers, tuple(layers), text.num_experts_per_tok)

    def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields by which SGLang's request asks for routes."""
        if request.routes_from is None:
            return {}
        return {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}

    def read(self, about: Mapping[str, Any], request: Request, response: Response) -> Routes | None:
        """Return the routes in what SGLang says about a response; None where it was not asked or nothing was
        sampled."""
        if request.routes_from is None or not response.token_ids:
            return None
        experts = torch.frombuffer(bytearray(base64.b64decode(about["routed_experts"])), dtype=torch.int32)
        of_layers = experts.view(-1, self.num_layers, self.num_chosen)[:, list(self.expert_layers)]
        return Routes.of(request.routes_from, of_layers)
