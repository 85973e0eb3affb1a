"""Engines, policies and requests for `true_on_policy`; a test skips where the processor cannot keep its promise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.exact import invariant
from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.refit.refit import load_whole
from spmdrl.types import MicroBatch, Request, Response
from tests.helpers import levels
from tests.helpers.models import save_qwen3

TEMPERATURE = 0.8
Exchange = tuple[Request, Response]


def skip_where_inexact(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Skip, with the run's own sentence, where operators are not exact in `dtype`; fail where they have to be."""
    model = AutoModelForCausalLM.from_pretrained(save_qwen3(folder))
    for problem in invariant.machine_problems(model, dtype):
        (pytest.fail if dtype in levels.exact_dtypes() else pytest.skip)(problem)


def engine_for(model: PreTrainedModel, dtype: torch.dtype = torch.float32, max_running: int = 64) -> TorchEngine:
    engine = TorchEngine(
        model.config, device=torch.device("cpu"), dtype=dtype, kernel="invariant", max_running=max_running
    )
    load_whole(engine, {name: weight.to(dtype) for name, weight in model.named_parameters()}, version=0)
    return engine


def policy_for(model: PreTrainedModel, dtype: torch.dtype = torch.float32, *, chunk: int = 2048) -> Policy:
    own = copy.deepcopy(model)
    for parameter in own.parameters():  # and no buffer, as FSDP does: rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    replace_layers(own, operators_of("invariant"))
    return Policy(own, kernel="invariant", temperature=TEMPERATURE, logits_chunk_tokens=chunk)


def exchanges(engine: TorchEngine, asked: Sequence[Request]) -> list[Exchange]:
    responses = dict(engine.generate(asked))
    return [(request, responses[i]) for i, request in enumerate(asked)]


def packed(sequences: Sequence[Sequence[int]]) -> MicroBatch:
    tokens = torch.tensor([token for ids in sequences for token in ids])
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    zeros = torch.zeros(len(tokens))
    return MicroBatch(
        token_ids=tokens,
        positions=positions,
        cu_seqlens=torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32),
        loss_mask=positions != 0,
        loss_weights=zeros,
        rewards=zeros,
        baseline_rewards=zeros,
        rollout_logprobs=zeros,
    )


def whole(exchange: Exchange) -> tuple[int, ...]:
    request, response = exchange
    return request.prompt_ids + request.response_ids + response.token_ids


def largest_mismatch(policy: Policy, done: Sequence[Exchange], *, per_micro_batch: int = 1000) -> float:
    """The largest |log-probability of the policy - that of the engine| over all response tokens, nats."""
    largest = 0.0
    for start in range(0, len(done), per_micro_batch):
        together = done[start : start + per_micro_batch]
        with torch.no_grad():
            logprobs = policy(packed([whole(one) for one in together])).logprobs
        for scores, (_, response) in zip(logprobs.split([len(whole(one)) for one in together]), together, strict=True):
            engine = torch.tensor(response.logprobs)
            largest = max(largest, float((scores[-len(engine) :] - engine).abs().max()))
    return largest
