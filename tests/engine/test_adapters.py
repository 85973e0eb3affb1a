"""The real SGLang with adapters: base and versions in one batch, each as the trainer computes it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from spmdrl.engine.sglang import adapters as sglang_adapters
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.model.lora.quantized import QuantizedLinear
from spmdrl.refit.refit import AdapterRefit, RefitMismatch
from spmdrl.types import Request
from tests.helpers.adapters import change_adapters
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.models import save_qwen3
from tests.helpers.sglang_adapters import loaded, requests, three_versions, versions_of, worst
from tests.helpers.sglang_engine import Rank, answers, rank_with_engine, settings


def mismatch(rank: Rank) -> str:
    """The message about a tensor that arrives otherwise; the engine survives."""
    real = sglang_adapters.digest

    def then_changed(memory: torch.Tensor) -> str:
        found = real(memory)
        memory[3] ^= 1  # after the digest, and before it is sent
        return found

    sglang_adapters.digest = then_changed
    try:
        rank.refit(version=17)
    except RefitMismatch as error:
        return str(error)
    finally:
        sglang_adapters.digest = real
    return ""


def all_of_it(path: str, tp_size: int) -> dict[str, Any]:
    """Tensors in host memory are shared as on a CUDA machine, which replaces what torch reduces them with."""
    found: dict[str, Any] = {}
    share = sglang_process.share_tensors
    cfg = settings(path, tp_size, tp_size=tp_size, lora={"rank": 4, "alpha": 8.0}, sglang={"max_loras_per_batch": 4})
    cfg = cfg.model_copy(update={"offload": cfg.offload.model_copy(update={"engine": ("kv_cache", "weights")})})
    with patch.object(sglang_process, "share_tensors", lambda _: share("cuda")), rank_with_engine(cfg) as rank:
        engine, refit = rank.engine, rank.refit
        assert isinstance(refit, AdapterRefit)
        bases: list[int] = []
        base = refit._base

        def load_base(*, version: int) -> None:
            bases.append(version)
            base(version=version)

        refit._base = load_base  # type: ignore[assignment]
        refit(version=0)
        responses = answers(engine, requests())
        found["fresh"] = worst(rank, responses)
        for version in (1, 2):
            change_adapters(rank.policy, 0.03)
            engine.sleep()
            refit(version=version)
            engine.wake()
            responses = answers(engine, requests())
            assert versions_of(responses) <= {version}
            found[f"version {version}"] = worst(rank, responses)
        with rank.policy.adapters.off():  # type: ignore[union-attr]
            found["from_base"] = worst(rank, responses)
        found["loaded"] = loaded(rank)
        if tp_size == 1:
            found["together"], found["held"] = three_versions(rank)
            found["cached"] = cached(rank)
        found["bases"] = list(bases)

        def aborted() -> Iterator[Request]:
            yield from requests(6)
            engine.abort()
            yield requests(7)[6]

        dict(engine.generate(aborted()))
        change_adapters(rank.policy, 0.03)
        refit(version=6)
        found["after an abort"] = worst(rank, answers(engine, requests()))
        found["loaded after an abort"] = loaded(rank)
        segments = len(os.listdir("/dev/shm"))
        for version in range(7, 12):
            refit(version=version)
        found["mismatch"] = mismatch(rank)
        found["segments"] = len(os.listdir("/dev/shm")) - segments
        if tp_size == 1:
            return found

        if (process := engine._process) is not None:  # type: ignore[attr-defined]
            os.kill(process.process_ids[0], 9)
            while not process.is_dead():
                pass
        change_adapters(rank.policy, 0.03)
        refit(version=18)  # into a dead engine: the caller asks afterwards
        engine.revive()
        refit(version=18)
        found["restarted"] = worst(rank, answers(engine, requests()))
        found["loaded after a restart"] = loaded(rank)
        found["bases after a restart"] = bases[len(found["bases"]) :]
        return found


def cached(rank: Rank) -> list[int]:
    """Tokens of one prompt that came from the prefix cache: the second time, and after a refit of adapters."""
    process = rank.engine._process  # type: ignore[attr-defined]
    prompt, counts = tuple(range(2, 30)), []
    for version in (4, 4, 5):
        if version == 5:
            change_adapters(rank.policy, 0.03)
            rank.refit(version=5)
        answer = process.result(
            process.start(process.generate(prompt, {"max_new_tokens": 2}, f"cached-{len(counts)}", f"policy-{version}"))
        )
        counts.append(answer["meta_info"]["cached_tokens"])
    return counts


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sglang_samples_what_the_trainer_computes(tmp_path: Path, tp_size: int) -> None:
    results = run_engine_ranks(tp_size, all_of_it, save_qwen3(tmp_path), tp_size)
    for found in results:
        for name in ("fresh", "version 1", "version 2", "after an abort"):
            assert found[name] <= 1e-5, name
        assert found["bases"] == [0], "the base goes into an engine once"
        assert "after the refit to version 17 the engine does not hold the trainer's weights" in found["mismatch"]
        assert found["mismatch"].endswith("layers.0.self_attn.q_proj.lora_A.weight differ")
    lead = results[0]
    assert lead["from_base"] > 1e-2, "the adapters are not applied"
    assert lead["loaded"] == {"policy-2"}
    assert lead["loaded after an abort"] == {"policy-6"}
    assert lead["segments"] <= 1, "memory is used again"
    if tp_size == 1:
        assert max(lead["together"][number][number].max() for number in range(3)) <= 1e-5
        assert lead["held"] == [{"policy-2"}, {"policy-2", "policy-3"}, {"policy-2", "policy-3", "policy-4"}]
        assert lead["cached"][1] > 20 and lead["cached"][2] == 0, "keys of another version are not read"
    else:
        assert lead["loaded after a restart"] == {"policy-18"}
        for found in results:
            assert found["restarted"] <= 1e-5
            assert found["bases after a restart"] == [18]


def on_a_quantized_base(path: str, base: str, merge: bool) -> dict[str, float]:
    """The difference of each version, the last after SGLang has given up its base, and that from the base alone."""
    found: dict[str, float] = {}
    lora = {"rank": 4, "alpha": 8.0, "base": base, "merge": merge}
    with rank_with_engine(settings(path, 1, lora=lora, refit={"verify": "every"})) as rank:
        assert any(isinstance(layer, QuantizedLinear) for layer in rank.policy.modules())
        rank.refit(version=0)
        found["fresh"] = worst(rank, answers(rank.engine, requests()))
        for version in (1, 2):
            change_adapters(rank.policy, 0.03)
            rank.engine.sleep()
            rank.refit(version=version)
            rank.engine.wake()
            responses = answers(rank.engine, requests())
            assert versions_of(responses) == {version}
            found[f"version {version}"] = worst(rank, responses)
        with rank.policy.adapters.off():  # type: ignore[union-attr]
            found["from_base"] = worst(rank, responses)
        assert loaded(rank) == (set() if merge else {"policy-2"})
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("base", "merge"), [("nf4", False), ("8bit", True)])
def test_sglang_samples_from_the_weights_that_a_quantized_base_stands_for(
    tmp_path: Path, base: str, merge: bool
) -> None:
    (found,) = run_engine_ranks(1, on_a_quantized_base, save_qwen3(tmp_path), base, merge)
    for name in ("fresh", "version 1", "version 2"):
        assert found[name] <= 1e-5, name
    assert found["from_base"] > 1e-2, "the adapters are not applied"
