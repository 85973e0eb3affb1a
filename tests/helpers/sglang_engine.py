"""Settings for SGLang, and one rank's policy, engine and refit."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.config.plan import make_plan
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.start import start_engine
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import reshard
from spmdrl.refit.refit import Refitting, make_refit
from spmdrl.rollout.episode import EMPTY_RESPONSE
from spmdrl.types import MicroBatch, Request, Response
from tests.helpers.launches import launch_of


def settings(
    path: str,
    num_ranks: int,
    *,
    refit: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    correction: dict[str, Any] | None = None,
    **rollout: Any,
) -> Config:
    """A run of the model in `path` with SGLang; buckets so small that there are many."""
    return Config.model_validate(
        {
            "run": {"name": "engine", "num_steps": 1},
            "model": {"path": path, "logits_chunk_tokens": 16},
            "lora": lora,
            "correction": correction or {},
            "data": {"max_prompt_tokens": 32, "sources": [{"kind": "reasoning_gym", "task": "chain_sum"}]},
            "rollout": {
                "engine": "sglang",
                "prompts_per_step": num_ranks,
                "group_size": 2,
                "max_response_tokens": 96,
                "max_running": 16,
            }
            | rollout,
            "refit": {"bucket_bytes": 2**14} | (refit or {}),
            "offload": {"engine": ["kv_cache", "weights"]},
            "reward": {"terms": [{"kind": "exact"}]},
            "optim": {"lr": 1e-3},
            "pack": {"sequences_per_micro_batch": 1},
        }
    )


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank holds."""

    world: World
    meshes: Meshes
    policy: Policy
    engine: RolloutEngine
    refit: Refitting
    before: dict[str, Any]  # `surroundings` before the engine was started

    def changed(self) -> set[str]:
        """What is not as it was before the engine was started."""
        return {name for name, value in surroundings().items() if value != self.before[name]}


def surroundings() -> dict[str, Any]:
    """What SGLang likes to change of the process that starts it."""
    root = logging.getLogger()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD)
    return {
        # SGLang's own variables mean nothing to others.
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
        **{number.name: signal.getsignal(number) for number in signals},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "event loop policy": type(asyncio.get_event_loop_policy()),
        "logging": (root.level, list(root.handlers), root.manager.disable),
        "main module": sys.modules["__main__"],
        "threads": torch.get_num_threads(),
    }


@contextmanager
def rank_with_engine(cfg: Config, *, images: ImageStore | None = None) -> Iterator[Rank]:
    """Join the run, start the engine, load the policy; all of it is ended again."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world, ranks_per_engine=cfg.rollout.tp_size)
        plan = make_plan(cfg, num_ranks=world.num_ranks)
        policy = load_trained(cfg.model, cfg.lora, meshes, temperature=cfg.rollout.temperature, seed=1)
        before = surroundings()
        run = launch_of(cfg, plan, world, meshes, Path(cfg.model.path), images=images)
        engine = start_engine(run)
        try:
            refit = make_refit(policy, engine, meshes, cfg, dtype=run.dtype)
            yield Rank(world, meshes, policy, engine, refit, before)
        finally:
            engine.close()
        del policy, refit


@torch.no_grad()
def change(policy: Policy, amount: float) -> None:
    """Change every weight that is trained, as an update would."""
    reshard(policy)
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            continue
        local = parameter.to_local()
        local.mul_(1 + amount).add_(amount * local.roll(1))


def prompts(count: int) -> list[tuple[int, ...]]:
    """Different prompts of different lengths."""
    return [tuple(2 + (7 * i + 3 * j) % 90 for j in range(1 + i % 9)) for i in range(count)]


def greedy(prompt: tuple[int, ...], num_tokens: int, *, after: tuple[int, ...] = ()) -> Request:
    """A request without chance or stop tokens, that may go on after what was sampled before."""
    return Request(prompt_ids=prompt, seed=0, max_response_tokens=num_tokens, temperature=0.0, response_ids=after)


def answers(engine: RolloutEngine, requests: list[Request]) -> list[Response]:
    """One response for each request, in order; none on a rank that does not lead."""
    found = dict(engine.generate(requests))
    assert sorted(found) == list(range(len(requests) if engine.leads else 0))
    return [found[i] for i in sorted(found)]


@torch.no_grad()
def trainer_logprobs(policy: Policy, sequences: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The trainer's log-probability of every token but the first; every rank must ask for as many sequences."""
    found = []
    for ids in sequences:
        length = len(ids)
        filler = torch.zeros(length)
        batch = MicroBatch(
            token_ids=torch.tensor(ids),
            positions=torch.arange(length),
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            loss_mask=torch.ones(length, dtype=torch.bool),
            loss_weights=filler,
            rollout_logprobs=filler,
            rewards=filler,
            baseline_rewards=filler,
        )
        found.append(policy(batch).logprobs[1:].cpu())
    return found


def worst_difference(rank: Rank, asked: list[Request], responses: list[Response]) -> float:
    """Largest difference between the engine's log-probabilities and those of the trainer's forward.

    Ranks without an engine of their own run the same forwards on the leading rank's responses.
    """
    mine = [r.prompt_ids + a.token_ids for r, a in zip(asked, responses, strict=False)]
    everyones = [ids for part in gather_objects(rank.meshes.training, mine) for ids in part]
    forwards = dict(zip(everyones, trainer_logprobs(rank.policy, everyones), strict=True))
    worst = 0.0
    for request, answer, ids in zip(asked, responses, mine, strict=False):
        expected = forwards[ids][len(request.prompt_ids) - 1 :]
        worst = max(worst, float((torch.tensor(answer.logprobs) - expected).abs().max()))
    return worst


def interrupted(rank: Rank, whole: list[Response]) -> Iterator[tuple[str, int, bool]]:
    """Abort in the middle, go on from there; for each response how it was cut, the tokens before the cut, and whether
    it has the tokens that it should have by the `whole` ones, which were asked for as `greedy(ids, 80)`.

    The eight of these are followed by shorter ones, which end about when the abort comes: in each of the next passes
    one reaches its limit, and in some of them others their stop token.
    """
    if not rank.engine.leads:
        return
    asked = [(greedy(ids, 80), uncut.token_ids) for ids, uncut in zip(prompts(8), whole, strict=True)]
    short = greedy((5, 6, 7), 10)
    passes = range(short.max_response_tokens + 1, short.max_response_tokens + 17)
    ends = _ends_of(rank.policy.model.config)  # where SGLang stops as soon as there is a stop token
    for request, token_ids in asked.copy():
        for length in passes:
            if {token_ids[length - 1], *ends}.isdisjoint(token_ids[: length - 1]):
                stops = frozenset({token_ids[length - 1], *ends})
                asked.append((replace(request, stop_token_ids=stops), token_ids[:length]))
    request, token_ids = asked[0]
    asked += [(replace(request, max_response_tokens=length), token_ids[:length]) for length in passes]
    first: dict[int, Response] = {}
    for index, answer in rank.engine.generate([short, *(request for request, _ in asked)]):
        first[index] = answer
        if index == 0:
            rank.engine.abort()
    parts = [first.get(i + 1, EMPTY_RESPONSE) for i in range(len(asked))]  # those that were taken
    cut = [i for i, part in enumerate(parts) if part.finish_reason == "abort"]
    rests = answers(rank.engine, [replace(asked[i][0], response_ids=parts[i].token_ids) for i in cut])
    continued = parts.copy()
    for i, rest in zip(cut, rests, strict=True):
        continued[i] = parts[i].continued(rest)
    for (_, token_ids), part, end in zip(asked, parts, continued, strict=True):
        is_whole = end.token_ids == token_ids and len(end.logprobs) == len(token_ids)
        yield part.finish_reason, len(part.token_ids), is_whole


def _ends_of(config: Any) -> set[int]:
    """The tokens that end a response by the model's config."""
    ends = config.get_text_config().eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}
