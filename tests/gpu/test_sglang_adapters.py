"""The real SGLang with adapters on a CUDA device: versions in one batch, sleep, a whole run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spmdrl.refit.refit import AdapterRefit
from tests.helpers.adapters import change_adapters
from tests.helpers.device_sizes import needs_kernels
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.ranks import run_ranks
from tests.helpers.sglang_adapters import differences, loaded, requests, three_versions
from tests.helpers.sglang_engine import answers, rank_with_engine, settings
from tests.helpers.sglang_runs import BACKENDS, LITTLE, require_learnt, ten_steps
from tests.helpers.small_run import model_and_sums, write_config

pytestmark = [pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"), needs_kernels]

VERSIONS = pytest.mark.claim(
    "Adapters",
    "SGLang computes adapters of several versions in one batch (`csgmv`; `triton` with experts), compares them by "
    "digest, and keeps the base while it sleeps.",
)
AMOUNT = 0.1  # by which adapters change, so that kernels round far less than versions differ
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
# SGLang's rotation for Qwen3-MoE writes keys into the cache, which it can for heads of 64 and more.
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 64}


def versions(path: str, modules: list[str] | None, backend: dict[str, Any]) -> dict[str, Any]:
    """Mean differences from the trainer's log-probabilities: after each of two sleeps, without adapters, and of three
    versions in one batch; and the versions with which the base was sent."""
    lora = {"rank": 8, "alpha": 16.0} | ({"targets": modules} if modules else {})
    sglang = backend.get("sglang", {}) | {"max_loras_per_batch": 4}
    cfg = settings(path, 1, lora=lora, **backend | {"sglang": sglang})
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"compute_dtype": "bfloat16"})})
    found: dict[str, Any] = {"slept": []}
    with rank_with_engine(cfg) as rank:
        assert isinstance(rank.refit, AdapterRefit)
        bases, base = [], rank.refit._base
        rank.refit._base = lambda *, version: (bases.append(version), base(version=version))  # type: ignore
        rank.refit(version=0)
        for version in (1, 2):
            change_adapters(rank.policy, AMOUNT)
            rank.engine.sleep()
            rank.refit(version=version)
            rank.engine.wake()
            responses = answers(rank.engine, requests())
            found["slept"].append(float(differences(rank, responses).mean()))
        with rank.policy.adapters.off():  # type: ignore[union-attr]
            found["from the base"] = float(differences(rank, responses).mean())
        assert loaded(rank) == {"policy-2"}
        together, found["loaded"] = three_versions(rank, amount=AMOUNT)
        found["together"] = [[float(difference.mean()) for difference in row] for row in together]
        found["bases"] = bases
    return found


@VERSIONS
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("save", "modules"),
    [
        pytest.param(save_qwen3, None, id="csgmv"),
        pytest.param(save_qwen3_moe, ["q_proj", "k_proj", "v_proj", "o_proj"], id="triton-with-experts"),
    ],
)
def test_versions_in_one_batch_are_each_the_trainers(
    tmp_path: Path, save: Callable[..., str], modules: list[str] | None
) -> None:
    path = save(tmp_path, **SIZES | (EXPERTS if save is save_qwen3_moe else {}))
    (found,) = run_ranks(1, versions, path, modules, BACKENDS | LITTLE, timeout_s=540.0)
    require_versions(found)


def require_versions(found: dict[str, Any]) -> None:
    """Each version's answers are a fifth as far from its own adapters as from others, or nearer."""
    own = max([*found["slept"], *(found["together"][number][number] for number in range(3))])
    others = [found["together"][one][other] for one in range(3) for other in range(3) if one != other]
    assert own < 0.2 * min([found["from the base"], *others])
    assert found["bases"] == [0], "the base goes into an engine once"
    assert found["loaded"] == [{"policy-2"}, {"policy-2", "policy-3"}, {"policy-2", "policy-3", "policy-4"}]


@VERSIONS
@pytest.mark.timeout(600)
def test_a_short_run_with_adapters_learns(tmp_path: Path) -> None:
    write_config(tmp_path, **model_and_sums(save_qwen3, tmp_path, **SIZES))
    require_learnt(ten_steps(tmp_path, 1, "lora.rank=8", 'offload.engine=["kv_cache", "weights"]'))
