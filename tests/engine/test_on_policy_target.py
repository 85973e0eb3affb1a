"""SGLang with `rl_on_policy_target = "fsdp"` and the trainer that follows it: the same bits from the same kernels.

Where there is no GPU both compute with stand-ins for SGLang's CUDA kernels. What is compared then is everything else:
the real engine's types, casts and order of operations, what a refit leaves in its weights, and the trainer's packing.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.engine.sglang import options as sglang_options
from spmdrl.model.exact import sglang_operators
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import Sequence
from tests.helpers import kernels_on_cpu, sglang_engine
from tests.helpers.engine_ranks import with_spares
from tests.helpers.exact import skip_where_inexact
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_requests, sequences_of
from tests.helpers.sglang_engine import Rank, answers, change, rank_with_engine, settings

TEMPERATURE = 0.7
TARGET = Path(sglang_engine.__file__).parent / "target_on_cpu"


def largest_mismatch(rank: Rank, sequences: list[Sequence]) -> float:
    """Over micro-batches of several sequences, and of one."""
    worst = 0.0
    for together in (sequences[:1], sequences[1:4], sequences[4:]):
        batch = lay_end_to_end(together, {})
        with torch.no_grad():
            logprobs = rank.policy(batch).logprobs
        worst = max(worst, float((logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max()))
    return worst


def sampled(rank: Rank) -> list[Sequence]:
    asked = random_requests(10, max_response_tokens=24, temperature=TEMPERATURE, stop_token_ids=frozenset({1}))
    return sequences_of(asked, answers(rank.engine, asked))


def mismatches(path: str) -> dict[str, Any]:
    """Of two versions of the weights, and of a trainer that does one thing otherwise; and what the import and the start
    of SGLang have changed, which no other rank of these tests imports itself."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TARGET), str(Path(__file__).parents[2])])
    spec = importlib.util.spec_from_file_location("target_on_cpu", TARGET / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    target = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(target)
    target.install()
    cfg = settings(path, 1, max_running=4)
    cfg = cfg.model_copy(
        update={"true_on_policy": True, "model": cfg.model.model_copy(update={"compute_dtype": "bfloat16"})}
    )
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        kernels_on_cpu.use(patch)
        patch.setattr(torch.nn.functional, "silu", kernels_on_cpu.silu)
        patch.setattr(sglang_options, "EXACT_BACKENDS", ("torch_native",))
        load = sglang_engine.load_trained
        patch.setattr(
            sglang_engine,
            "load_trained",
            lambda cfg, lora, meshes, **_: load(
                cfg, lora, meshes, temperature=TEMPERATURE, kernel="sglang_triton", seed=1
            ),
        )
        with rank_with_engine(cfg) as rank:
            found["changed"] = rank.changed()
            for version in (0, 1):
                change(rank.policy, 0.01 * version)
                rank.refit(version=version)
                sequences = sampled(rank)
                found[f"version {version}"] = largest_mismatch(rank, sequences)
            for name, attribute, broken in (
                ("embedding in bfloat16", "_Embedding.forward", torch.nn.Embedding.forward),
                ("head in float32", "_logprobs", _wide_logprobs),
            ):
                with pytest.MonkeyPatch.context() as other:
                    other.setattr(f"{sglang_operators.__name__}.{attribute}", broken)
                    found[name] = largest_mismatch(rank, sequences)
    return found


def _wide_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.float() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engine_and_trainer_round_at_the_same_places(tmp_path: Path) -> None:
    skip_where_inexact(tmp_path)
    (found,) = run_ranks(1, with_spares, mismatches, save_qwen3(tmp_path / "model"), timeout_s=280.0)
    assert found.pop("changed") == {"SIGQUIT"}
    assert found.pop("version 0") == 0.0 and found.pop("version 1") == 0.0
    assert all(value > 0 for value in found.values()), found
