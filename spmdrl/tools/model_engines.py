"""The engines as `spmdrl model` asks them: how far what they report of their own tokens is from eager code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.config.plan import make_plan
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World
from spmdrl.engine.protocol import EngineDied, RolloutEngine
from spmdrl.engine.sglang.engine import SGLangEngine
from spmdrl.engine.sglang.options import sglang_options
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.load import load_model_config, persistent_buffers
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.rotary import changes_after
from spmdrl.refit.refit import load_whole, make_refit
from spmdrl.tools.model_scores import TEMPERATURE, eager_logprobs, eager_model
from spmdrl.types import Request, UserError
from spmdrl.types import Sequence as Tokens

_PROMPT_TOKENS, _RESPONSE_TOKENS = 50, 20


def of_torch_engine(path: str, batch: Sequence[Tokens]) -> float:
    """Return the worst difference of the torch engine, with its cache. Raises UserError where it is refused."""
    model = eager_model(path)
    engine = TorchEngine(model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=3)
    load_whole(engine, dict(model.named_parameters()) | persistent_buffers(model), version=0)
    return _worst(engine, model, batch)


def of_sglang(path: str, batch: Sequence[Tokens], world: World) -> float:
    """Return the worst difference of SGLang, after a refit of all weights. Raises UserError where it is refused."""
    cfg = Config.model_validate(
        {
            "run": {"name": "model", "num_steps": 1},
            "model": {"path": path, "compute_dtype": "float32"},
            "data": {"max_prompt_tokens": _PROMPT_TOKENS, "sources": [{"kind": "jsonl", "path": "data.jsonl"}]},
            "rollout": {
                **{"engine": "sglang", "prompts_per_step": len(batch), "group_size": 2, "temperature": TEMPERATURE},
                **{"max_response_tokens": _RESPONSE_TOKENS, "max_running": 2 * len(batch)},
            },
            "reward": {"terms": [{"kind": "exact"}]},
            "optim": {"lr": 1e-6},
            "pack": {"sequences_per_micro_batch": 1},
            "offload": {"engine": ["kv_cache", "weights"]},
        }
    )
    config, meshes = load_model_config(cfg.model), build_meshes(world)
    if problems := list(SGLangEngine.problems(cfg, config, _ends(config), num_ranks=1, device_type="cpu")):
        raise UserError("; ".join(problems))
    options = sglang_options(cfg, make_plan(cfg, num_ranks=1), world, config)
    policy = load_trained(cfg.model, None, meshes, temperature=TEMPERATURE, seed=0)
    try:
        engine = SGLangEngine(options, meshes.engine, model_config=config, transport="shared_memory")
    except EngineDied as error:
        raise UserError(str(error)) from error
    try:
        make_refit(policy, engine, meshes, cfg, dtype=torch.float32)(version=0)
        engine.wake()
        return _worst(engine, eager_model(path), batch)
    finally:
        engine.close()


def _ends(config: Any) -> frozenset[int]:
    """Return the tokens that end a response of a tiny model."""
    ends = config.get_text_config().eos_token_id
    return frozenset() if ends is None else frozenset({ends})


def _worst(engine: RolloutEngine, model: Any, batch: Sequence[Tokens]) -> float:
    """Sample after the beginnings of these sequences, and compare the log-probabilities of what was sampled."""
    longest = min(_PROMPT_TOKENS, (changes_after(model.config) or 10**9) - _RESPONSE_TOKENS)
    prompts = [sequence.token_ids[:longest] for sequence in batch]
    settings: dict[str, Any] = {"max_response_tokens": _RESPONSE_TOKENS, "stop_token_ids": _ends(model.config)}
    asked = [
        Request(prompt_ids=ids, seed=seed, temperature=TEMPERATURE, **settings) for seed, ids in enumerate(prompts)
    ]
    worst = 0.0
    for index, response in engine.generate(asked):
        before, sampled = len(prompts[index]), len(response.token_ids)
        whole = Tokens(
            index=index,
            token_ids=prompts[index] + response.token_ids,
            loss_mask=(False,) * before + (True,) * sampled,
            rollout_logprobs=(0.0,) * before + response.logprobs,
            reward=0.0,
        )
        with torch.no_grad():
            apart = eager_logprobs(model, whole) - torch.tensor(whole.rollout_logprobs)
        worst = max(worst, float(apart.abs().max()))
    return worst
