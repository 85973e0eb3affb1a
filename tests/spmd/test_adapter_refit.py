"""A refit of adapters: the base is loaded once, and the engine then samples what the trainer computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from spmdrl.config import Config, LoraConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.lora.policy import load_trained
from spmdrl.refit.refit import AdapterRefit, Refit, RefitMismatch, make_refit
from spmdrl.types import Request, Response
from tests.helpers.adapters import change_adapters
from tests.helpers.configs import minimal_config, model_config
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.ranks import run_ranks
from tests.helpers.sglang_engine import answers, prompts, trainer_logprobs

NUM_TOKENS = 12
MERGED = ["q_proj", "down_proj"]


def settings(path: str, **lora: Any) -> Config:
    return minimal_config(model={"path": path}, lora={"rank": 4} | lora)


def worst(policy: Any, meshes: Any, asked: list[Request], responses: list[Response]) -> float:
    """Largest difference between an engine's log-probabilities and the trainer's; every rank must call this."""
    mine = [r.prompt_ids + a.token_ids for r, a in zip(asked, responses, strict=True)]
    everyones = [ids for part in gather_objects(meshes.training, mine) for ids in part]
    forwards = dict(zip(everyones, trainer_logprobs(policy, everyones), strict=True))
    return max(
        float((torch.tensor(answer.logprobs) - forwards[ids][len(request.prompt_ids) - 1 :]).abs().max())
        for request, answer, ids in zip(asked, responses, mine, strict=True)
    )


def _versions(path: str, lora: LoraConfig) -> dict[str, Any]:
    """What three refits do, the engine giving its weights back before the third."""
    found: dict[str, Any] = {"differences": [], "bases": [], "samples": []}
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_trained(model_config(path), lora, meshes, temperature=1.0, seed=1)
        engine = TorchEngine(
            AutoConfig.from_pretrained(path),
            device=world.device,
            dtype=torch.float32,
            kernel="sdpa",
            max_running=8,
            release=("kv_cache", "weights"),
        )
        refit = make_refit(policy, engine, meshes, settings(path), dtype=torch.float32)
        assert isinstance(refit, AdapterRefit)
        base = refit._base

        def load_base(*, version: int) -> None:
            found["bases"].append(version)
            base(version=version)

        refit._base = load_base  # type: ignore[assignment]
        asked = [Request(prompt_ids=ids, seed=i, max_response_tokens=NUM_TOKENS) for i, ids in enumerate(prompts(6))]
        for version in range(4):
            if version:
                change_adapters(policy, 0.1 * version)
            if version == 3 and meshes.training.get_local_rank() == 0:
                engine.sleep()  # of one rank; all ranks send the base together
            refit(version=version)
            responses = answers(engine, asked)
            found["samples"].append([response.token_ids for response in responses])
            assert {span.version for response in responses for span in response.spans} == {version}
            found["differences"].append(worst(policy, meshes, asked, responses))
        assert policy.adapters is not None
        with policy.adapters.off():
            found["from_base"] = worst(policy, meshes, asked, responses)
        del policy, refit
    return found


@pytest.mark.parametrize(
    ("save", "lora"), [(save_qwen3, {}), (save_qwen3, {"init": "pissa", "rslora": True}), (save_qwen3_moe, {})]
)
def test_each_version_is_the_trainers(tmp_path: Path, save: Callable[[Path], str], lora: dict[str, Any]) -> None:
    for found in run_ranks(2, _versions, save(tmp_path), LoraConfig(rank=4, **lora)):
        assert max(found["differences"]) <= 1e-5
        assert found["bases"] == [0, 3]
        assert found["from_base"] > 1e-2, "the adapters are not applied"
        assert found["samples"][1] != found["samples"][2] != found["samples"][3]


@dataclass(frozen=True)
class Refitted:
    """What two kinds of refits did on one rank."""

    said: str  # of adapters, when one rank's engine holds something else
    sent: list[set[str]]  # the names of what each of two refits of merged weights sends
    apart: float  # how far engine and trainer are from each other after the second


def _refitted(path: str) -> Refitted:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        lora = LoraConfig(rank=4, targets=MERGED)
        policy = load_trained(model_config(path), lora, meshes, temperature=1.0, seed=1)
        engine = TorchEngine(
            AutoConfig.from_pretrained(path), device=world.device, dtype=torch.float32, kernel="sdpa", max_running=8
        )
        refit = make_refit(policy, engine, meshes, settings(path), dtype=torch.float32)
        if meshes.training.get_local_rank() == 1:
            engine.load_adapters = lambda adapters: ["q_proj.lora_A.weight"]  # type: ignore[method-assign]
        with pytest.raises(RefitMismatch) as raised:
            refit(version=0)
        merging = make_refit(policy, engine, meshes, settings(path, merge=True), dtype=torch.float32)
        assert isinstance(merging, Refit)
        sent = []
        for version in (1, 2):
            change_adapters(policy, 0.1)
            sent.append({entry.name for bucket in merging._buckets() for entry in bucket.flat_entries})
            merging(version=version)
        engine.wake()
        asked = [Request(prompt_ids=ids, seed=0, max_response_tokens=NUM_TOKENS) for ids in prompts(4)]
        apart = worst(policy, meshes, asked, answers(engine, asked))
        del policy, refit, merging
        return Refitted(str(raised.value), sent, apart)


def test_a_difference_on_one_rank_ends_the_refit_on_all_and_merged_weights_are_sent_without_the_rest(
    tmp_path: Path,
) -> None:
    for found in run_ranks(2, _refitted, save_qwen3(tmp_path)):
        assert found.said == (
            "after the refit to version 0 the engine does not hold the trainer's weights: q_proj.lora_A.weight differ"
        )
        whole, later = found.sent
        # Engines fuse a query's projection with two others.
        assert later == {name for name in whole if re.search(r"[qkv]_proj|down_proj", name)} < whole
        assert any("embed_tokens" in name for name in whole)
        assert found.apart < 1e-5
