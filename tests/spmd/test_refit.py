"""After a refit the engine holds the trainer's weights bit for bit, and says so of nothing less."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.load import load_policy
from spmdrl.refit.refit import Refit, RefitMismatch, load_whole
from spmdrl.types import Request
from tests.helpers.configs import model_config
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.other_process import OtherProcess
from tests.helpers.ranks import run_ranks
from tests.helpers.refits import refit_differences


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_engine_weights_equal_trainer_weights(tmp_path: Path, num_ranks: int) -> None:
    paths = [save_qwen3(tmp_path / "qwen3"), save_llama(tmp_path / "llama")]
    cases = [(path, *sizes) for path in paths for sizes in ((torch.float32, 1024), (torch.bfloat16, 2**30))]
    for differences in run_ranks(num_ranks, refit_differences, *cases):
        assert differences == [[0.0, 0.0]] * len(cases)


def _calls_of_a_refit(path: str) -> tuple[list[str], list[str]]:
    """What was done in which order, of two refits; and the names that were sent in one."""
    calls: list[str] = []

    def noted(name: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            calls.append(name(*arguments))
            return call(*arguments)

        return wrapper

    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        config = AutoConfig.from_pretrained(path)
        engine = TorchEngine(config, device=world.device, dtype=torch.float32, kernel="sdpa", max_running=4)
        refit = Refit(policy, engine, meshes, RefitConfig(bucket_bytes=2**14), dtype=torch.float32)
        gatherer, places = refit._gatherer, [buffer.data_ptr() for buffer in refit._buffers]
        buckets = gatherer.buckets
        gatherer.fill = noted(  # type: ignore[method-assign]
            lambda bucket, flat: f"fill {buckets.index(bucket)} in {places.index(flat.data_ptr())}", gatherer.fill
        )
        engine.load = noted(lambda number: f"load {number}", engine.load)  # type: ignore[method-assign]
        engine.wait = noted(lambda: "wait", engine.wait)  # type: ignore[method-assign]
        refit(version=0)
        first = list(calls)
        refit(version=1)
        assert calls == first * 2
        return first, [entry.name for bucket in buckets for entry in bucket.flat_entries]


def test_a_bucket_is_gathered_while_the_engine_copies_the_one_before(tmp_path: Path) -> None:
    ((calls, names),) = run_ranks(1, _calls_of_a_refit, save_qwen3(tmp_path))
    num_buckets = calls.count("wait") - 1
    assert num_buckets > 2
    expected = [(f"fill {number} in {number % 2}", "wait", f"load {number}") for number in range(num_buckets)]
    assert calls == [call for of_bucket in expected for call in of_bucket] + ["wait"]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names, "tied weights are sent once"


def test_an_engine_without_all_its_weights_refuses(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path)
    engine = TorchEngine(
        AutoConfig.from_pretrained(path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernel="sdpa",
        max_running=4,
    )
    with pytest.raises(AssertionError, match="refit before sampling"):
        next(engine.generate([Request(prompt_ids=(3,), seed=0, max_response_tokens=1)]))
    weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    left_out = next(iter(weights))
    del weights[left_out]
    with pytest.raises(RuntimeError, match=left_out):
        load_whole(engine, weights, version=0)


def _corrupted(path: str) -> str:
    """Flip the lowest bit of one number on one rank between gathering and loading; what each rank says."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        engine = TorchEngine(
            AutoConfig.from_pretrained(path), device=world.device, dtype=torch.float32, kernel="sdpa", max_running=4
        )
        if world.rank == 1:
            load = engine.load

            def corrupt(number: int) -> None:
                if number == 1:
                    engine._buffers[1][40] ^= 1
                load(number)

            engine.load = corrupt  # type: ignore[method-assign]
        refit = Refit(policy, engine, meshes, RefitConfig(bucket_bytes=2**14, verify="every"), dtype=torch.float32)
        try:
            refit(version=3)
        except RefitMismatch as error:
            return str(error)
        return "nothing was noticed"


def test_one_flipped_bit_on_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _corrupted, save_qwen3(tmp_path))
    assert first == second
    assert "after the refit to version 3" in first and "model.layers.0" in first


def _opened(path: str, num_refits: int) -> tuple[list[str], int, list[int]]:
    """Refit another process through shared memory; what differs there, files that refits after the first left, and the
    versions that were compared."""
    engine = OtherProcess(torch.device("cpu"), transport="shared_memory")  # before the session has threads
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        refit = Refit(policy, engine, meshes, RefitConfig(bucket_bytes=2**14, verify=num_refits), dtype=torch.float32)
        compared, differing_there = list[int](), engine.differing

        def differing_noted(expected: dict[str, str]) -> list[str]:
            compared.append(engine.version)
            return differing_there(expected)

        engine.differing = differing_noted  # type: ignore[method-assign]
        refit(version=0)
        before = len(os.listdir("/dev/shm"))
        for version in range(1, num_refits + 1):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.to_local().mul_(1.01).add_(0.001)
            refit(version=version)
        growth = len(os.listdir("/dev/shm")) - before
        held = engine.weights()
        differing = [
            name
            for name, parameter in policy.model.named_parameters()
            if not torch.equal(held[name], parameter.full_tensor())
        ]
        engine.close()
        del policy, refit
        return differing, growth, compared


def test_another_process_opens_the_buckets_and_leaves_nothing(tmp_path: Path) -> None:
    for differing, growth, compared in run_ranks(2, _opened, save_qwen3(tmp_path), 10):
        assert differing == []
        assert compared == [0, 10], "the first and every tenth"
        assert growth <= 2  # of other programs
