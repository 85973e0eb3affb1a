"""Engine and sharded trainer compute the same bits: the mismatch is 0.0, on any number of ranks and in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.config import ModelConfig, RefitConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch import runner
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.engine.torch.sampling import sample_tokens
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.verdict import EXIT_DIVERGED, EXIT_USER_ERROR, read_error
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.model.exact.invariant import SWITCHES
from spmdrl.model.kernels import Kernel
from spmdrl.model.layers import replace_layers
from spmdrl.model.load import compute_dtype, load_policy
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.refit.refit import Refit
from spmdrl.step.batch import lay_end_to_end
from spmdrl.tools.tiny_model import character_tokenizer
from spmdrl.train import main
from spmdrl.types import Request, Sequence
from tests.helpers import kernels_on_cpu, small_run
from tests.helpers.configs import model_config
from tests.helpers.exact import skip_where_inexact
from tests.helpers.models import save_gemma3, save_llama, save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_requests, random_sequences, sequences_of
from tests.helpers.small_run import without_curves, write_config

TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def exact_processor(tmp_path_factory: pytest.TempPathFactory) -> None:
    skip_where_inexact(tmp_path_factory.mktemp("exact"))


def _requests() -> list[Request]:
    return random_requests(12, max_response_tokens=40, temperature=TEMPERATURE, stop_token_ids=frozenset({5}))


def _scored(cases: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[float, list[torch.Tensor]]]:
    """For each (path, dtype, settings of the model) what `_scored_one` gives."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        return [_scored_one(model_config(path, compute_dtype=dtype, **more), meshes) for path, dtype, more in cases]


def _scored_one(settings: ModelConfig, meshes: Meshes) -> tuple[float, list[torch.Tensor]]:
    """(the largest mismatch over two versions of the weights, nats; each sequence's log-probabilities of the second).

    Every rank samples all sequences and scores them in micro-batches of its own, as in training.
    """
    dtype = compute_dtype(settings.compute_dtype, "cpu")
    policy = load_policy(settings, meshes.model, temperature=TEMPERATURE, kernel="invariant")
    model = AutoConfig.from_pretrained(settings.path)
    engine = TorchEngine(model, device=torch.device("cpu"), dtype=dtype, kernel="invariant", max_running=5)
    refit = Refit(policy, engine, meshes, RefitConfig(), dtype=dtype)
    worst, rows = 0.0, [torch.empty(0)] * len(_requests())
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().mul_(1.01).add_(0.001 * version)
        refit(version=version)
        for together in _shared_out(_sampled(engine), rank=meshes.world.get_rank()):
            batch = lay_end_to_end(together, {})
            scores = policy(batch)
            worst = max(worst, float((scores.logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max()))
            (scores.logprobs.sum() + scores.entropy.sum()).backward()
            parts = scores.logprobs.detach().split([len(sequence.token_ids) for sequence in together])
            for sequence, part in zip(together, parts, strict=True):
                rows[sequence.index] = part
    return worst, rows


def _sampled(engine: TorchEngine) -> list[Sequence]:
    asked = _requests()
    responses = dict(engine.generate(asked))
    return sequences_of(asked, [responses[i] for i in range(len(asked))])


def _shared_out(sequences: list[Sequence], *, rank: int) -> list[list[Sequence]]:
    """The sequences of three micro-batches, which differ between ranks: all must run as many forward passes."""
    order = sequences[rank:] + sequences[:rank]
    return [order[:1], order[1 : 4 + 2 * rank], order[4 + 2 * rank :]]


SETTINGS = {
    "float32": ({}, {"gradient_checkpointing": "selective", "reshard_after_forward": False}),
    "bfloat16": ({"gradient_checkpointing": "full", "logits_chunk_tokens": 5}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SETTINGS)
def test_one_and_two_ranks_score_what_they_sampled(tmp_path: Path, dtype: str) -> None:
    skip_where_inexact(tmp_path / "exact", getattr(torch, dtype))
    paths = save_qwen3(tmp_path / "qwen3"), save_llama(tmp_path / "llama")
    cases = [(path, dtype, settings) for path, settings in zip(paths, SETTINGS[dtype], strict=True)]
    (alone,) = run_ranks(1, _scored, cases)
    together = run_ranks(2, _scored, cases)
    for number, (worst, rows) in enumerate(alone):
        assert worst == 0.0
        for rank in together:
            assert rank[number][0] == 0.0
            assert all(torch.equal(row, other) for row, other in zip(rows, rank[number][1], strict=True))


def _scored_by_sglangs_kernels(path: str) -> list[torch.Tensor]:
    """One micro-batch's logprobs by a sharded policy and by a whole one; both follow SGLang's types and casts."""
    kernel: Kernel = "sglang_triton"
    with spmd_session(threads_per_rank=1, deterministic=False) as world, pytest.MonkeyPatch.context() as patch:
        kernels_on_cpu.use(patch)
        settings = model_config(path, compute_dtype="bfloat16", gradient_checkpointing="full")
        sharded = load_policy(settings, build_meshes(world).model, temperature=TEMPERATURE, kernel=kernel)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION, dtype=torch.bfloat16)
        replace_layers(model, operators_of(kernel))
        whole = Policy(model, kernel=kernel, temperature=TEMPERATURE, logits_chunk_tokens=7)
        batch = lay_end_to_end(random_sequences(4), {})
        scores = sharded(batch)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        assert all(x.grad.to_local().isfinite().all() for x in sharded.parameters())
        with torch.no_grad():
            return [scores.logprobs.detach(), whole(batch).logprobs]


def test_what_is_sharded_rounds_where_sglang_does(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path)
    (alone,), (one, other) = (run_ranks(count, _scored_by_sglangs_kernels, path) for count in (1, 2))
    for sharded, whole in (alone, one, other):
        assert torch.equal(sharded, whole) and torch.equal(sharded, alone[0])


def _write_config(tmp_path: Path, save: Any) -> Path:
    tokenizer = character_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save(tmp_path / "model", vocab_size=len(tokenizer), num_hidden_layers=2, **ends)
    tokenizer.save_pretrained(tmp_path / "model")
    problems = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3}
    template = "{metadata[expression]} ="
    source = {"kind": "reasoning_gym", "task": "chain_sum", "params": problems, "prompt_template": template}
    return write_config(
        tmp_path,
        true_on_policy=True,
        run={
            "name": "exact",
            "dir": str(tmp_path),
            "num_steps": 3,
            "seed": None,
            "deterministic": None,
            "threads_per_rank": None,
        },
        data={"sources": [source]},
        rollout={"max_response_tokens": 12, "max_running": 9, "temperature": 0.9},
        reward={"terms": [{"kind": "function", "function": f"{tmp_path}/reward.py:digits"}]},
        pack={"max_tokens_per_micro_batch": 128},
        eval=None,
        checkpoint=None,
        report={"tensorboard": False},
        export={"at_end": False},
        debug=None,
    )


def test_a_dry_run_lists_every_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(_write_config(tmp_path, save_qwen3))
    for setting in ("true", "false"):
        assert main([config, "--dry-run", "--ranks", "2", f"true_on_policy={setting}"]) == 0
        said = capsys.readouterr().out
        assert [f"- true_on_policy: {switch}" in said for switch in SWITCHES] == [setting == "true"] * len(SWITCHES)


def test_an_engine_that_is_exact_on_other_devices_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(_write_config(tmp_path, save_qwen3))
    assert main([config, "--dry-run", "rollout.engine=sglang"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert 'has no exact kernels for rollout.engine = "sglang" on a CPU; set rollout.engine = "torch"' in said


def test_a_model_that_nobody_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_write_config(tmp_path, save_gemma3)), "--dry-run"]) == EXIT_USER_ERROR
    assert "true_on_policy = true is proven for llama, qwen2, qwen3, not for gemma3_text" in capsys.readouterr().err


def test_every_step_of_a_run_has_a_mismatch_of_exactly_zero(tmp_path: Path) -> None:
    """Two updates a step and a KL term: old and reference log-probabilities have passes of their own."""
    config = _write_config(tmp_path, save_qwen3)
    assert run_ranks(2, without_curves, main, [str(config), "refit.probe_prompts=2"]) == [0, 0]
    assert run_ranks(
        2, without_curves, main, [str(config), "true_on_policy=false", "run.name=plain", "run.num_steps=1"]
    ) == [0, 0]
    among = ("rollout.top_k=5", "rollout.top_p=0.9", "refit.probe_prompts=2", "run.name=among")
    assert run_ranks(2, without_curves, main, [str(config), *among]) == [0, 0]
    rows = {name: small_run.rows(tmp_path / name) for name in ("exact", "plain", "among")}
    for name in ("exact", "among"):
        assert [row["mismatch/max_abs_nats"] for row in rows[name]] == [0.0, 0.0, 0.0]
        assert [row["refit/probe_max_abs_nats"] for row in rows[name]] == [0.0, 0.0, 0.0]
    assert all(0 < row["mismatch/max_abs_nats"] < 1e-4 for row in rows["plain"])
    assert len({row["update/grad_norm"] for row in rows["exact"]}) == 3  # weights did change


def _with_another_decode(argv: list[str]) -> int:
    with mock.patch.object(runner, "_decoding_of", lambda _: (runner.attend_to_cache, sample_tokens)):
        return main(argv)


def test_a_run_that_does_not_keep_the_promise_ends_before_weights_change(tmp_path: Path) -> None:
    config = _write_config(tmp_path, save_qwen3)
    assert run_ranks(1, _with_another_decode, [str(config), "loss.kl_coef=0.0"]) == [EXIT_DIVERGED]
    report = read_error(FaultFiles(tmp_path / "exact"))
    assert report is not None and report.step == 1
    assert "and true_on_policy = true promises 0; no weights were changed" in report.message


@pytest.mark.slow
def test_with_the_engine_in_the_trainers_place_later_updates_may_move(tmp_path: Path) -> None:
    """What they are compared with then is the engine, from which the first one moved them."""
    config = _write_config(tmp_path, save_qwen3)
    argv = [str(config), "loss.kl_coef=0.0", 'correction.old="rollout"', "run.num_steps=1"]
    assert run_ranks(1, without_curves, main, argv) == [0]
    assert run_ranks(1, _with_another_decode, [*argv, "run.name=broken"]) == [EXIT_DIVERGED]
