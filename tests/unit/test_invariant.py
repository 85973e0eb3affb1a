"""What the engine samples and what the policy scores are the same bits, whatever is computed together."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3VLConfig

from spmdrl.engine.torch import runner
from spmdrl.engine.torch.sampling import sample_tokens
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.exact import invariant
from spmdrl.model.kernels import SequenceLayout, causal_attention
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import FAST_HEAD, Head, HeadOptions, logprobs_of_logits, next_token_logprobs
from spmdrl.model.policy import Policy
from spmdrl.model.rotary import changes_between
from spmdrl.model.sharding import checkpoint_layers, decoder_layers
from spmdrl.types import Request
from tests.helpers.config_file import GOOD, problems, read
from tests.helpers.conversations import conversations, count_read
from tests.helpers.exact import (
    TEMPERATURE,
    engine_for,
    exchanges,
    largest_mismatch,
    packed,
    policy_for,
    skip_where_inexact,
)
from tests.helpers.models import SIZES, VOCABULARY, longrope, save_llama, save_model, save_qwen3


@pytest.fixture(scope="module", autouse=True)
def exact_processor(tmp_path_factory: pytest.TempPathFactory) -> None:
    skip_where_inexact(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.dtype:
    """The dtype of a test that has one, where the processor is exact in it."""
    skip_where_inexact(tmp_path_factory.mktemp("exact"), request.param)
    return request.param


in_both_dtypes = pytest.mark.parametrize("dtype", invariant.DTYPES, ids=str, indirect=True)


def save_sliding_qwen2(path: Path, **changes: Any) -> str:
    """A Qwen2, which has biases, with a window of 6 tokens in its second layer."""
    sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return save_model(path, Qwen2Config(**(SIZES | sliding | changes)))


MODELS = {"qwen3": save_qwen3, "llama": save_llama, "qwen2": save_sliding_qwen2}


@pytest.fixture(scope="module", params=["qwen3", "qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = MODELS[request.param](tmp_path_factory.mktemp("model"), max_position_embeddings=512)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)


def requests(count: int, *, longest: int = 20) -> list[Request]:
    rng = random.Random(count)
    prompts = [tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 70))) for _ in range(count // 3 + 1)]
    return [
        Request(
            prompt_ids=prompts[i // 3],
            seed=i,
            max_response_tokens=1 + longest * i // count,
            temperature=TEMPERATURE,
            stop_token_ids=frozenset(),
        )
        for i in range(count)
    ]


@in_both_dtypes
def test_the_mismatch_is_exactly_zero(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Batches of 1 to 64 rows that begin and end at any time; packs of one sequence and of many."""
    policy = policy_for(model, dtype)
    for count, max_running in ((1, 1), (7, 4), (64, 64)):
        done = exchanges(engine_for(model, dtype, max_running), requests(count))
        for per_micro_batch in (1, 5, count):
            assert largest_mismatch(policy, done, per_micro_batch=per_micro_batch) == 0.0


@in_both_dtypes
def test_rotary_frequencies_by_length_are_exact_too(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save_llama(tmp_path, **longrope(50, num_factors=6))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)
    lengths = [(one, len(one.prompt_ids), len(one.prompt_ids) + one.max_response_tokens) for one in requests(64)]
    asked = [one for one, read, most in lengths if not changes_between(model.config, read, most)]
    assert {len(one.prompt_ids) > 50 for one in asked} == {False, True}
    done = exchanges(engine_for(model, dtype), asked)
    for per_micro_batch in (1, 5, len(done)):
        assert largest_mismatch(policy_for(model, dtype), done, per_micro_batch=per_micro_batch) == 0.0


def test_responses_of_1_to_256_tokens(model: PreTrainedModel) -> None:
    done = exchanges(engine_for(model), requests(8, longest=290))
    assert {len(response.token_ids) for _, response in done} > {1} and len(done[-1][1].token_ids) > 250
    assert largest_mismatch(policy_for(model), done) == 0.0


@pytest.mark.slow
@in_both_dtypes
def test_batches_of_1_to_64_with_responses_of_1_to_256_tokens(model: PreTrainedModel, dtype: torch.dtype) -> None:
    policy = policy_for(model, dtype)
    for count in (1, 2, 3, 8, 15, 17, 32, 33, 64):
        done = exchanges(engine_for(model, dtype, count), requests(count, longest=256))
        for per_micro_batch in (1, count):
            assert largest_mismatch(policy, done, per_micro_batch=per_micro_batch) == 0.0, (count, per_micro_batch)


@pytest.mark.parametrize(("cut", "dtype"), [(1, torch.bfloat16), (13, torch.float32)], ids=str, indirect=["dtype"])
def test_a_response_that_goes_on_from_a_prefix(model: PreTrainedModel, cut: int, dtype: torch.dtype) -> None:
    """Keys of a prefix are computed by a prefill, and were by decode steps."""
    engine = engine_for(model, dtype)
    asked = [replace(request, max_response_tokens=30) for request in requests(6)]
    first = exchanges(engine, asked)
    rest = exchanges(engine, [replace(request, response_ids=done.token_ids[:cut]) for request, done in first])
    assert largest_mismatch(policy_for(model, dtype), rest) == 0.0
    for (_, uncut), (_, response) in zip(first, rest, strict=True):
        assert (response.token_ids, response.logprobs) == (uncut.token_ids[cut:], uncut.logprobs[cut:])


@in_both_dtypes
def test_turns_that_go_on_from_what_was_kept(
    model: PreTrainedModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reads only what is new, and the bits are those of turns that are read anew."""
    said = [tuple(range(2, 4 + 7 * i)) for i in range(7)]
    done, num_read = [], []
    for after in (frozenset({"length"}), frozenset()):
        engine = engine_for(model, dtype, 16)
        read = count_read(engine, monkeypatch)
        begins = [replace(request, cache_on_finish=after) for request in requests(7)]
        done.append(conversations(engine, begins, said, num_turns=3))
        num_read.append(sum(read))
    assert num_read[0] < num_read[1] / 2
    assert [response for _, response in done[0]] == [response for _, response in done[1]]
    assert largest_mismatch(policy_for(model, dtype), done[0]) == 0.0


def test_the_heads_chunks_do_not_matter(model: PreTrainedModel) -> None:
    done = exchanges(engine_for(model), requests(9))
    for chunk in (1, 17, 4096):
        assert largest_mismatch(policy_for(model, chunk=chunk), done) == 0.0


def test_threads_do_not_matter(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        done = exchanges(engine_for(model), requests(5, longest=6))
        torch.set_num_threads(1)
        assert largest_mismatch(policy_for(model), done) == 0.0
    finally:
        torch.set_num_threads(before)


def _by_number_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, summed in two halves from 32 rows on; on some processors `F.linear` itself always has one order."""
    if x[..., 0].numel() < 32:
        return F.linear(x, weight, bias)
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], weight[:, :half]) + F.linear(x[..., half:], weight[:, half:], bias)


def _silu_by_number_of_rows(x: torch.Tensor) -> torch.Tensor:
    """`F.silu`, rounded in another place from 32 rows on; without vector instructions it always is in the same."""
    return F.silu(x) if x[..., 0].numel() < 32 else x / (1 + torch.exp(-x))


PLAIN_OPERATORS = {
    "linear": (invariant, "linear", _by_number_of_rows),
    "silu": (invariant, "silu", _silu_by_number_of_rows),
    "attention": (runner, "attend_to_cache_in_tiles", runner.attend_to_cache),
    "log-probabilities": (runner, "sample_with_head_logprobs", lambda _, *sampling: sample_tokens(*sampling)),
}


@pytest.mark.parametrize("operator", PLAIN_OPERATORS)
def test_one_plain_operator_is_seen(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the plain operators in an otherwise invariant model the mismatch leaves zero."""
    path = save_qwen3(tmp_path, intermediate_size=39, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)
    asked = requests(7)
    assert largest_mismatch(policy_for(model), exchanges(engine_for(model), asked)) == 0.0
    monkeypatch.setattr(*PLAIN_OPERATORS[operator])
    mismatch = largest_mismatch(policy_for(model), exchanges(engine_for(model), asked))
    assert 0 < mismatch < 1e-4


def test_the_invariant_operators_are_the_plain_ones_but_for_rounding() -> None:
    torch.manual_seed(0)
    for rows in (1, 16, 83):
        x, bias = torch.randn(1, rows, 40, requires_grad=True), torch.randn(24, requires_grad=True)
        weight, slope = torch.randn(24, 40, requires_grad=True), torch.randn(1, rows, 24)
        results = []
        for linear, silu in ((invariant.linear, invariant.silu), (F.linear, F.silu)):
            y = silu(linear(x, weight, bias))
            results.append([y, *torch.autograd.grad((y * slope).sum(), [x, weight, bias])])
        for exact, plain in zip(*results, strict=True):
            torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_attention_is_the_plain_one_but_for_rounding(heads: tuple[int, int], window: int | None) -> None:
    torch.manual_seed(0)
    seqlens = [1, 150, 129, 31, 32, 33, 7]
    cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32)
    inputs = [torch.randn(sum(seqlens), count, 12, requires_grad=True) for count in (heads[0], heads[1], heads[1])]
    slope = torch.randn(sum(seqlens), heads[0], 12)
    results = []
    for kernel in ("invariant", "sdpa"):
        attend = causal_attention(SequenceLayout(seqlens, cu_seqlens), kernel)
        out = attend(*inputs, AttentionLayer(index=0, scale=0.3, window=window))
        results.append([out, *torch.autograd.grad((out * slope).sum(), inputs)])
    for exact, plain in zip(*results, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5)


def test_a_vocabulary_of_several_slabs_is_scored_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven slabs are merged in their order, for any number of tokens; the scores are those of all at once."""
    monkeypatch.setattr(invariant, "COLUMNS", 16)
    head = Head(invariant.linear, columns=16)
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(70, 24), torch.randn(VOCABULARY, 24), torch.randint(VOCABULARY, (70,))

    def scores(head: Head, chunk: int) -> torch.Tensor:
        return next_token_logprobs(hidden, weight, None, targets, HeadOptions(Scale(TEMPERATURE), chunk), head=head)[0]

    logits = invariant.linear(hidden, weight) / TEMPERATURE
    for chunk in (1, 9, 70):
        assert torch.equal(scores(head, chunk), logprobs_of_logits(logits, targets, head)[0])
    for rows in (slice(0, 1), slice(5, 24), slice(69, 70)):
        assert torch.equal(logprobs_of_logits(logits[rows], targets[rows], head)[0], scores(head, 70)[rows])
    torch.testing.assert_close(scores(head, 70), scores(FAST_HEAD, 70))


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_recomputing_changes_neither_scores_nor_gradients(tmp_path: Path, recomputed: str) -> None:
    path = save_qwen3(tmp_path, num_hidden_layers=2)
    results = []
    for checkpointed in (False, True):
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION).eval()
        policy = policy_for(model)
        if checkpointed:
            checkpoint_layers(policy.model, decoder_layers(policy.model), recomputed=recomputed, every_layers=1)
        scores = policy(packed([[5, 6, 7, 8] * 3, [9, 10] * 20]))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        results.append([scores.logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    for once, twice in zip(*results, strict=True):
        assert torch.equal(once, twice)


def test_the_gradient_is_that_of_the_plain_policy(model: PreTrainedModel) -> None:
    plain = Policy(copy.deepcopy(model), kernel="sdpa", temperature=TEMPERATURE, logits_chunk_tokens=2048)
    gradients = []
    for policy in (policy_for(model), plain):
        policy(packed([[5, 6, 7, 8] * 9, [9, 10] * 20, [11]])).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for exact, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)


def test_this_machine_keeps_the_promise_and_a_broken_operator_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(invariant.machine_problems(model, torch.float32)) == []
    monkeypatch.setattr(invariant, "linear", _by_number_of_rows)
    assert any("depends on how many tokens" in problem for problem in invariant.machine_problems(model, torch.float32))


def test_without_products_in_bfloat16_float32_is_named(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    (problem,) = invariant.machine_problems(model, torch.bfloat16)
    assert problem.endswith('set model.compute_dtype = "float32", or true_on_policy = false')


def test_models_that_nobody_compared_are_refused(model: PreTrainedModel) -> None:
    assert list(invariant.model_problems(model.config)) == []
    other = copy.deepcopy(model.config)
    other.model_type = "gemma3_text"
    assert "not for gemma3_text" in next(invariant.model_problems(other))
    assert "not for qwen3_vl;" in next(invariant.model_problems(Qwen3VLConfig()))
    other = copy.deepcopy(model.config)
    other.hidden_act = "gelu"
    assert "uses gelu" in next(invariant.model_problems(other))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["parallel.tp=2"], "parallel.tp = 2 sums in another order"),
        (["parallel.cp=2"], "parallel.cp = 2 sums in another order"),
        (["parallel.ep=4"], "parallel.ep = 4 sums in another order"),
        (["model.attention=sdpa"], 'model.attention = "sdpa" is not exact'),
        (["model.compute_dtype=float16"], 'model.compute_dtype = "float16" has no exact kernels'),
        (["rollout.oversample_fraction=0.5", "rollout.partial=true"], "rollout.max_staleness = 1 trains on tokens"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, settings: list[str], sentence: str) -> None:
    (problem,) = problems(tmp_path, GOOD, "true_on_policy=true", *settings)
    assert "true_on_policy = true, but " in problem and sentence in problem
    read(tmp_path, GOOD, *settings)


def test_everything_that_cannot_be_kept_is_said_at_once(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD, "true_on_policy=true", "parallel.tp=2", "model.attention=sdpa")
    assert "parallel.tp" in problem and "model.attention" in problem
    read(tmp_path, GOOD, "true_on_policy=true", "rollout.oversample_fraction=0.5", "rollout.partial=true",
         "rollout.max_staleness=0")  # fmt: skip
