"""Training under top-k and top-p: engine and trainer take a token's log-probability among the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.engine.torch.sampling import RowSampling, sample_tokens
from spmdrl.model.kernels import Kernel
from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy, TokenLogprobs
from spmdrl.refit.refit import load_whole
from spmdrl.rollout.codec import Codec
from spmdrl.step.batch import lay_end_to_end, to_sequences
from spmdrl.types import (
    Candidates,
    MicroBatch,
    Prompt,
    Request,
    Response,
    RewardedRollout,
    RewardOutcome,
    Sequence,
    Span,
    Trajectory,
    Turn,
    UserError,
)
from tests.helpers.models import save_qwen3
from tests.helpers.rollouts import one_turn
from tests.helpers.sequences import random_requests, sequences_of

ALONE: Any = SimpleNamespace(size=lambda: 1)  # the mesh of one rank
TEMPERATURE = 0.7
ASKED: tuple[dict[str, Any], ...] = (
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 3},
    {"top_p": 0.6},
    {"top_k": 1, "top_p": 0.1},
    {},
)


def slow_set(p: list[float], top_k: int | None = None, top_p: float = 1.0) -> set[int]:
    """The fewest of the `top_k` first tokens that have a share `top_p` of their probability."""
    best = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or len(p)]
    share, found = top_p * sum(p[token] for token in best), set[int]()
    for token in best:
        if sum(p[other] for other in found) < share:
            found.add(token)
    return found


def test_what_is_sampled_comes_from_the_slow_twins_sets() -> None:
    """Rows of all kinds beside each other: each has the set and the log-probability that it has alone."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 40, generator=draw)
    requests = [
        Request(prompt_ids=(), seed=i, max_response_tokens=1, temperature=TEMPERATURE, **ASKED[i % len(ASKED)])
        for i in range(len(logits))
    ]
    together = sample_tokens(logits, RowSampling.of(requests, [0] * 200, logits.device), 0)
    for row, (request, token, logprob, candidates) in enumerate(zip(requests, *together, strict=True)):
        p = (logits[row].double() / TEMPERATURE).softmax(-1)
        expected = slow_set(p.tolist(), request.top_k, request.top_p)
        assert int(token) in expected
        found = candidates[candidates >= 0].tolist()
        assert len(found) == len(set(found)) and set(found) == (expected if request.top_k else set())
        mass = p[sorted(expected)].sum() if request.top_k else 1.0
        torch.testing.assert_close(logprob.double(), (p[token] / mass).log(), rtol=0, atol=1e-5)
        alone = sample_tokens(logits[row, None], RowSampling.of([request], [0], logits.device), 0)
        assert int(alone[0]) == int(token) and torch.equal(alone[1][0], logprob)


def policy_of(path: str, kernel: Kernel) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="spmdrl").eval()
    replace_layers(model, operators_of(kernel))
    return Policy(model, kernel=kernel, temperature=TEMPERATURE, logits_chunk_tokens=7)


def engine_of(policy: Policy, kernel: Kernel) -> TorchEngine:
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_running": 5}
    engine = TorchEngine(policy.model.config, kernel=kernel, **settings)
    load_whole(engine, dict(policy.model.named_parameters()), version=0)
    return engine


def asked(count: int, **settings: Any) -> list[Request]:
    stops: frozenset[int] = frozenset()
    requests = random_requests(count, max_response_tokens=24, temperature=TEMPERATURE, stop_token_ids=stops)
    return [replace(request, **settings) for request in requests]


def answers(engine: TorchEngine, requests: list[Request]) -> list[Response]:
    responses = dict(engine.generate(requests))
    return [responses[place] for place in range(len(requests))]


def sequences_with_candidates(requests: list[Request], responses: list[Response]) -> list[Sequence]:
    turns = zip(requests, responses, strict=True)
    columns = [Trajectory(turns=(Turn(context_ids=r.prompt_ids, response=said),)).candidates for r, said in turns]
    return [replace(s, candidates=c) for s, c in zip(sequences_of(requests, responses), columns, strict=True)]


@pytest.mark.parametrize("kernel", ["invariant", "sdpa"])
def test_engine_and_trainer_say_the_same(tmp_path: Path, kernel: Kernel) -> None:
    """With exact kernels to the bit; rows without top-k beside them are not touched."""
    policy = policy_of(save_qwen3(tmp_path), kernel)
    requests = [*asked(9, top_k=6, top_p=0.9), *asked(3)]
    sequences = sequences_with_candidates(requests, answers(engine_of(policy, kernel), requests))
    micro_batch = lay_end_to_end(sequences, {}, multiple=7)
    with torch.no_grad():
        apart = (policy(micro_batch).logprobs - micro_batch.rollout_logprobs)[micro_batch.loss_mask].abs()
        whole = policy(replace(micro_batch, candidates=None)).logprobs
    assert apart.max() == 0 if kernel == "invariant" else apart.max() < 1e-5
    assert micro_batch.candidates is not None
    has_any = (micro_batch.candidates >= 0).any(-1)
    assert (whole - micro_batch.rollout_logprobs)[has_any].abs().max() > 0.05, "the whole vocabulary is something else"


def slow_scores(policy: Policy, micro_batch: MicroBatch) -> TokenLogprobs:
    """All logits of each sequence at once; those that are no candidates are forbidden."""
    assert micro_batch.candidates is not None
    logprobs, entropy = [], []
    for start, end in itertools.pairwise(micro_batch.cu_seqlens.tolist()):
        tokens, candidates = micro_batch.token_ids[start:end], micro_batch.candidates[start:end]
        logits = policy.model(tokens[None], use_cache=False).logits[0, :-1].double() / TEMPERATURE
        allowed = torch.zeros(len(tokens), logits.shape[1] + 1, dtype=torch.bool)
        allowed.scatter_(1, candidates.long() % allowed.shape[1], True)  # -1: the last, which is cut off
        allowed = allowed[1:, :-1] | ~(candidates[1:] >= 0).any(-1, keepdim=True)
        log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        logprobs += [torch.zeros(1), log_p.gather(-1, tokens[1:, None])[:, 0]]
        entropy += [torch.zeros(1), -(log_p.exp() * log_p.masked_fill(~allowed, 0.0)).sum(-1)]
    of_predicted = (torch.where(micro_batch.predicted, torch.cat(x), 0.0) for x in (logprobs, entropy))
    return TokenLogprobs(*of_predicted)


def gradients_of(policy: Policy, scores: TokenLogprobs, weights: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    ((scores.logprobs + 0.3 * scores.entropy) * weights).sum().backward()
    return {name: x.grad.clone() for name, x in policy.model.named_parameters() if x.grad is not None}


def test_scores_and_gradients_are_the_slow_twins(tmp_path: Path) -> None:
    policy = policy_of(save_qwen3(tmp_path), "sdpa")
    requests = [*asked(4, top_k=6, top_p=0.9), *asked(2)]
    micro_batch = lay_end_to_end(
        sequences_with_candidates(requests, answers(engine_of(policy, "sdpa"), requests)), {}, multiple=7
    )
    weights = torch.randn(len(micro_batch.token_ids), generator=torch.Generator().manual_seed(1))
    found = policy(micro_batch)
    gradients = gradients_of(policy, found, weights)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    twin = SimpleNamespace(model=plain, zero_grad=plain.zero_grad)
    expected = slow_scores(twin, micro_batch)  # type: ignore[arg-type]
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=0, atol=2e-5)
    for name, gradient in gradients_of(twin, expected, weights).items():  # type: ignore[arg-type]
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-4)


def test_an_interrupted_response_goes_on_with_its_candidates(tmp_path: Path) -> None:
    policy = policy_of(save_qwen3(tmp_path), "invariant")
    (request,) = asked(1, top_k=4, top_p=0.9)
    (whole,) = answers(engine_of(policy, "invariant"), [replace(request, max_response_tokens=20)])
    (begun,) = answers(engine_of(policy, "invariant"), [replace(request, max_response_tokens=8)])
    rest = replace(request, max_response_tokens=20, response_ids=begun.token_ids)
    continued = begun.continued(*answers(engine_of(policy, "invariant"), [rest]))
    assert (continued.token_ids, continued.candidates) == (whole.token_ids, whole.candidates)
    codec = Codec[Response](Response)
    assert codec.load(codec.dump(continued)) == continued


def test_a_token_without_candidates_is_never_silent() -> None:
    prompt = Prompt(prompt_id=7, token_ids=(2, 3), text="", answer=None, task="", metadata={})
    response = Response(token_ids=(4, 5, 6), logprobs=(-1.0,) * 3, finish_reason="stop", spans=(Span(0, 3),))

    def sequences(candidates: Tensor | None, **changes: Any) -> list[Sequence]:
        said = replace(response, candidates=None if candidates is None else Candidates.of(2, candidates))
        rollout = one_turn(prompt, said, **changes)
        rewarded = RewardedRollout(index=0, rollout=rollout, outcome=RewardOutcome(reward=1.0, parts={}))
        return to_sequences([rewarded], ALONE, needs_candidates=True)

    (sequence,) = sequences(torch.tensor([[4, 9], [5, -1], [6, 7]]))
    assert sequence.candidates is not None
    assert sequence.candidates.tolist() == [[-1, -1], [-1, -1], [4, 9], [5, -1], [6, 7]]
    for missing, num_unknown in ((None, 3), (torch.tensor([[4, 9], [-1, -1], [6, 7]]), 1)):
        with pytest.raises(UserError, match=f"from which tokens {num_unknown} of the 3 tokens of sample 0 of prompt 7"):
            sequences(missing)
        assert sequences(missing, is_masked=True), "nothing of it is trained"
