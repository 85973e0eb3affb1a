"""The embedded engine says what a plain forward says, whatever it samples together."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from spmdrl.cpu.dense_decoder import LAYERS
from spmdrl.engine.torch.cache import RowContents
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.engine.torch.sampling import RowSampling, _nucleus, sample_tokens
from spmdrl.engine.torch.scheduler import CachedPrefix, Prefix, PrefixCache
from spmdrl.model.attention import IMPLEMENTATION, packed_attention
from spmdrl.model.layer_kinds import recurrent_layers
from spmdrl.model.layers import set_classes
from spmdrl.model.recurrent import packed_layers
from spmdrl.preflight.forecast import decoder_of
from spmdrl.refit.refit import load_whole
from spmdrl.types import ImageSpan, Request, Response, Span
from tests.helpers.conversations import conversations, count_read
from tests.helpers.layers import layers_in_c
from tests.helpers.models import (
    VOCABULARY,
    save_gemma3,
    save_gpt_oss,
    save_llama,
    save_model,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
)


def save_qwen2(path: Path) -> str:
    """A Qwen2, whose products for attention have biases."""
    return save_model(
        path,
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
        ),
    )


def save_sliding(path: Path) -> str:
    """A Qwen3 with a window of 6 tokens in every other layer."""
    layer_types = ["full_attention", "sliding_attention"] * 2
    return save_qwen3(path, num_hidden_layers=4, use_sliding_window=True, sliding_window=6, layer_types=layer_types)


def save_hybrid(path: Path) -> str:
    """A Qwen3.5 with recurrent layers before and after one that attends."""
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    return save_qwen3_5(path, num_hidden_layers=3, layer_types=layer_types, initializer_range=0.05)


DENSE = [save_qwen3, save_llama, save_qwen2, save_sliding]


@pytest.fixture(
    scope="module",
    params=[
        *(save_qwen3, save_sliding, save_hybrid),
        # What they keep in the cache is what Qwen3 keeps.
        *(pytest.param(save, marks=pytest.mark.slow) for save in (save_llama, save_qwen2)),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return AutoModelForCausalLM.from_pretrained(request.param(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=DENSE)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return AutoModelForCausalLM.from_pretrained(request.param(tmp_path_factory.mktemp("model")))


def engine_for(model, max_running: int = 8, release: Sequence[str] = ("kv_cache",), **options: Any) -> TorchEngine:
    engine = TorchEngine(
        model.config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernel="sdpa",
        max_running=max_running,
        release=release,
        **options,
    )
    load_whole(engine, dict(model.named_parameters()), version=7)
    return engine


def requests(count: int, **changes) -> list[Request]:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 9))) for _ in range(count // 3 + 1)]
    return [
        Request(
            **{
                "prompt_ids": prompts[i // 3],
                "seed": 1000 + i,
                "max_response_tokens": rng.randint(1, 24),
                "stop_token_ids": frozenset({5, 6}),
            }
            | changes
        )
        for i in range(count)
    ]


def answers(engine: TorchEngine, asked: list[Request]) -> list[Response]:
    responses = dict(engine.generate(asked))
    assert sorted(responses) == list(range(len(asked)))
    return [responses[i] for i in range(len(asked))]


def plain_logprobs(model, request: Request, response: Response) -> torch.Tensor:
    ids = torch.tensor([request.prompt_ids + response.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / (request.temperature or 1.0)
    first = len(request.prompt_ids)
    return logits.log_softmax(-1)[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0]


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
def test_decoding_without_modules_is_the_forward_pass_of_the_model(dense, in_c: bool) -> None:
    """For responses of many lengths, on weights that a second refit has replaced."""
    asked = requests(30)
    fast, plain = engine_for(dense, 16), engine_for(dense, 16)
    assert fast.runner.decoder is not None
    plain.runner.decoder = None
    changed = {name: weight * 1.25 for name, weight in dense.named_parameters()}
    # With the larger weights each is up to 5e-6 away from what float64 computes, with or without modules.
    for tensors, tolerance in ((dict(dense.named_parameters()), 1e-6), (changed, 5e-6)):
        for engine in (fast, plain):
            load_whole(engine, tensors, version=8)
        with layers_in_c(in_c):
            found = answers(fast, asked)
        for one, other in zip(found, answers(plain, asked), strict=True):
            assert one.token_ids == other.token_ids
            logprobs = torch.tensor(one.logprobs), torch.tensor(other.logprobs)
            torch.testing.assert_close(*logprobs, rtol=1e-6, atol=tolerance)


def test_weights_side_by_side_take_no_more_memory(dense) -> None:
    engine = engine_for(dense)
    sizes = {weight.untyped_storage()._cdata: weight.untyped_storage().nbytes() for weight in engine.weights.values()}
    assert sum(sizes.values()) == sum(weight.nbytes for weight in dense.parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_what_decodes_without_modules_is_named_as_transformers_names_it(layer: str) -> None:
    module, _, name = layer.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert f"{found.__module__}.{found.__qualname__}" == layer


def test_other_families_decode_by_their_own_forward_pass(tmp_path: Path) -> None:
    gemma = AutoModelForCausalLM.from_pretrained(save_gemma3(tmp_path))
    engine, asked = engine_for(gemma), requests(6)
    assert engine.runner.decoder is None
    for request, response in zip(asked, answers(engine, asked), strict=True):
        expected = plain_logprobs(gemma, request, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_running", [3, 64])
def test_logprobs_equal_those_of_a_full_forward(model, max_running: int) -> None:
    asked = requests(20, temperature=0.8)
    for request, response in zip(asked, answers(engine_for(model, max_running), asked), strict=True):
        torch.testing.assert_close(
            torch.tensor(response.logprobs), plain_logprobs(model, request, response), rtol=0, atol=1e-5
        )
        assert response.spans == (Span(7, len(response.token_ids)),)


def test_a_sample_does_not_depend_on_its_company(model) -> None:
    asked = requests(20)
    together = answers(engine_for(model, 64), asked)
    assert len({response.token_ids for response in together}) > 10
    few_at_a_time = answers(engine_for(model, 3), asked)
    backwards = answers(engine_for(model, 64), asked[::-1])[::-1]
    alone = [answers(engine_for(model), [request])[0] for request in asked]
    for others in (few_at_a_time, backwards, alone):
        assert [response.token_ids for response in others] == [response.token_ids for response in together]


def test_a_long_response_does_not_depend_on_when_its_noise_was_made(model) -> None:
    """Longer than the noise that is made at once, beside others that end and begin."""
    long = Request(prompt_ids=(3, 4), seed=5, max_response_tokens=150)
    alone = answers(engine_for(model, 1), [long])[0]
    among_others = answers(engine_for(model, 3), [*requests(12), long, *requests(12)])[12]
    assert alone.token_ids == among_others.token_ids


def test_greedy_equals_transformers_generate(model) -> None:
    asked = requests(6, temperature=0.0, max_response_tokens=12, stop_token_ids=frozenset())
    for request, response in zip(asked, answers(engine_for(model), asked), strict=True):
        ids = torch.tensor([request.prompt_ids])
        generated = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
        assert response.token_ids == tuple(generated[0, ids.shape[1] :].tolist())


def test_a_response_ends_at_the_first_stop_token_or_at_its_limit(model) -> None:
    asked = requests(60)
    reasons = set()
    for request, response in zip(asked, answers(engine_for(model), asked), strict=True):
        reasons.add(response.finish_reason)
        *before, last = response.token_ids
        assert not request.stop_token_ids & set(before)
        assert len(response.logprobs) == len(response.token_ids) <= request.max_response_tokens
        if response.finish_reason == "stop":
            assert last in request.stop_token_ids
        else:
            assert len(response.token_ids) == request.max_response_tokens and last not in request.stop_token_ids
    assert reasons == {"stop", "length"}


def test_abort_returns_what_there_is(model) -> None:
    engine = engine_for(model, 4)
    asked = [
        Request(prompt_ids=(3, 4), seed=i, max_response_tokens=2 if i == 0 else 20, stop_token_ids=frozenset())
        for i in range(8)
    ]
    whole = answers(engine, asked)
    responses = {}
    for index, response in engine.generate(asked):
        responses[index] = response
        engine.abort()
    assert responses[0].finish_reason == "length"
    assert responses.keys() == {0, 1, 2, 3}, "a request that there was no room for was taken"
    for index in range(1, 4):
        partial = responses[index]
        assert partial.finish_reason == "abort"
        assert len(partial.token_ids) == 2
        assert partial.token_ids == whole[index].token_ids[:2]
    assert answers(engine, asked) == whole, "something of the rows that were aborted is left"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_that_was_interrupted_goes_on_to_the_same_tokens(model, temperature: float) -> None:
    engine = engine_for(model)
    asked = requests(9, temperature=temperature, max_response_tokens=70, stop_token_ids=frozenset())
    whole = answers(engine, asked)
    for cut in (1, 30, 69):
        rest = answers(engine, [replace(r, response_ids=w.token_ids[:cut]) for r, w in zip(asked, whole, strict=True)])
        for response, uncut in zip(rest, whole, strict=True):
            assert response.token_ids == uncut.token_ids[cut:]
            torch.testing.assert_close(
                torch.tensor(response.logprobs), torch.tensor(uncut.logprobs[cut:]), rtol=0, atol=1e-5
            )


def test_gradients_of_sequences_as_long_as_prompts_that_were_read_before(tmp_path: Path) -> None:
    """Places of tokens are kept from pass to pass, and the engine may be the first to need them."""
    seqlens = [2, 3, 5]
    path = save_hybrid(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)
    answers(engine_for(model), [Request(prompt_ids=(7,) * n, seed=n, max_response_tokens=2) for n in seqlens])
    set_classes(packed_layers(model))
    attend = packed_attention(torch.tensor([0, 2, 5, 10], dtype=torch.int32), seqlens, "sdpa")
    model(torch.full((1, 10), 7), use_cache=False, attend=attend, seqlens=seqlens).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_requests_are_asked_for_when_there_is_room(model) -> None:
    """A caller that has one request at a time gets the same responses; a longer one makes the cache grow."""
    engine = engine_for(model, 4)
    asked = [*requests(3, max_response_tokens=3), *requests(8)]
    together = answers(engine_for(model, 4), asked)
    responses: dict[int, Response] = {}

    def one_at_a_time():
        for number, request in enumerate(asked):
            while len(responses) < number - 1:
                yield None
            yield request

    for index, response in engine.generate(one_at_a_time()):
        responses[index] = response
    assert [responses[i].token_ids for i in range(len(asked))] == [r.token_ids for r in together]


def test_a_longer_request_after_a_short_one_and_a_sleep(model) -> None:
    engine = engine_for(model)
    short, long = requests(3, max_response_tokens=2), requests(3, max_response_tokens=30)
    answers(engine, short)
    engine.sleep()
    engine.wake()
    fresh = answers(engine_for(model), long)
    assert answers(engine, long) == fresh


def turns_of(
    engine: TorchEngine, *, count: int = 9, num_turns: int = 4, goes_on: bool = True
) -> list[tuple[Request, Response]]:
    """The turns of conversations in whose i-th a tool says 1 + 3 i tokens after every response."""
    words, after = random.Random(1), frozenset({"length"}) if goes_on else frozenset()
    said = [tuple(words.randrange(2, VOCABULARY) for _ in range(1 + 3 * i)) for i in range(count)]
    begins = requests(count, max_response_tokens=5, stop_token_ids=frozenset(), cache_on_finish=after)
    return conversations(engine, begins, said, num_turns=num_turns)


@pytest.mark.parametrize("max_running", [pytest.param(1, marks=pytest.mark.slow), 5, 16])
def test_a_request_that_goes_on_reads_only_what_is_new(
    model, max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = engine_for(model, max_running), engine_for(model, max_running)
    read, read_plainly = count_read(engine, monkeypatch), count_read(plain, monkeypatch)
    done, again = turns_of(engine), turns_of(plain, goes_on=False)
    for (request, response), (_, other) in zip(done, again, strict=True):
        assert response.token_ids == other.token_ids
        expected = plain_logprobs(model, request, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)
    assert sum(read_plainly) >= sum(len(prompt) for prompt in {request.prompt_ids for request, _ in done})
    if max_running == 16:  # room for every row: first prompts, tools, and the last token of each response before
        assert sum(read) == sum(map(len, {r.prompt_ids for r in requests(9)})) + 3 * sum(2 + 3 * i for i in range(9))
    elif max_running == 5:
        assert sum(read) < sum(read_plainly)


def test_branches_follow_the_same_row_one_after_the_other(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, 16)
    read = count_read(engine, monkeypatch)
    (first,) = requests(1, max_response_tokens=4, stop_token_ids=frozenset(), cache_on_finish=frozenset({"length"}))
    done: dict[int, Response] = {}

    def source() -> Iterator[Request | None]:
        yield first
        for branch in range(3):
            while len(done) <= branch:
                yield None
            yield replace(first, prompt_ids=first.prompt_ids + done[0].token_ids + (3 + branch,))

    for place, response in engine.generate(source()):
        done[place] = response
    assert sum(read) == len(first.prompt_ids) + 3 * 2, "the last token of the first response, and a branch's own"
    assert [done[place].num_cached for place in range(4)] == [0, *[len(first.prompt_ids) + 3] * 3]
    for branch in range(3):
        request = replace(first, prompt_ids=first.prompt_ids + done[0].token_ids + (3 + branch,))
        expected = plain_logprobs(model, request, done[1 + branch])
        torch.testing.assert_close(torch.tensor(done[1 + branch].logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("save", [save_gpt_oss, save_qwen3_moe, save_gemma3])
def test_other_families_read_only_what_is_new(
    save: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention sinks, experts, windows with other rotary embeddings."""
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path))
    engine = engine_for(model, 16)
    read = count_read(engine, monkeypatch)
    for request, response in turns_of(engine):
        expected = plain_logprobs(model, request, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)
    assert sum(read) == sum(map(len, {r.prompt_ids for r in requests(9)})) + 3 * sum(2 + 3 * i for i in range(9))


def test_requests_that_wait_together_are_read_together(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating ones that begin and ones that go on: two prefills, with no decode step between."""
    engine = engine_for(model, 32)
    calls: list[str] = []
    for name in ("_prefill", "_extend", "_decode"):
        method = getattr(engine.runner, name)
        monkeypatch.setattr(
            engine.runner, name, lambda *a, _name=name, _do=method, **k: calls.append(_name) or _do(*a, **k)
        )
    first = requests(4, max_response_tokens=2, stop_token_ids=frozenset(), cache_on_finish=frozenset({"length"}))
    long = Request(prompt_ids=(9, 8), seed=5, max_response_tokens=40)
    done: dict[int, Response] = {}

    def source() -> Iterator[Request | None]:
        yield from (*first, long)
        while len(done) < len(first):
            yield None
        for place, request in enumerate(first):
            yield replace(request, prompt_ids=request.prompt_ids + done[place].token_ids + (3,))
            yield replace(request, prompt_ids=(5, 6, 7, place))

    for place, response in engine.generate(source()):
        done[place] = response
    assert "".join({"_prefill": "P", "_extend": "E", "_decode": "."}[call] for call in calls).startswith("P.EP.")


def test_nothing_is_kept_when_sampling_begins_anew(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that resumes there repeats it to the bit."""
    engine = engine_for(model)
    first = turns_of(engine, num_turns=1)
    goes_on = [replace(r, prompt_ids=r.prompt_ids + answer.token_ids + (3,)) for r, answer in first]
    read = count_read(engine, monkeypatch)
    assert answers(engine, goes_on) == answers(engine_for(model), goes_on)
    assert sum(read) == sum(len(request.prompt_ids) for request in goes_on)


def test_a_cached_prefix_serves_what_begins_with_it_alone() -> None:
    def prefix(*token_ids: int, version: int = 1, images: tuple[ImageSpan, ...] = ()) -> Prefix:
        return Prefix(version, token_ids, images)

    image = ImageSpan(digest="a", start=1, num_tokens=1, grid=(1, 2, 2))
    short = prefix(2, 3, 4)
    assert short.begins(prefix(2, 3, 4, 5))
    for other in (prefix(2, 3, 4), prefix(2, 3), prefix(2, 9, 4, 5), prefix(2, 3, 4, 5, version=2)):
        assert not short.begins(other)
    assert not short.begins(prefix(2, 3, 4, 5, images=(image,)))

    def row_of(*token_ids: int, version: int = 1) -> CachedPrefix:
        keys, values = torch.empty(2, 1, len(token_ids), 2)
        states = {0: (torch.empty(1, 2), torch.empty(1, 3))}  # 20 bytes
        return CachedPrefix(prefix(*token_ids, version=version), RowContents({1: (keys, values)}, states), version)

    rows = [row_of(*range(2, end)) for end in (4, 6, 8, 5)]
    assert [row.contents.num_bytes for row in rows] == [20 + 16 * n for n in (2, 4, 6, 3)]
    cache = PrefixCache(max_bytes=4 * 20 + 16 * (2 + 4 + 6 + 3) - 1)
    assert not cache.make_room(4 * 20 + 16 * 15)
    for row in rows:
        assert cache.make_room(row.contents.num_bytes)
        cache.store(row)
    asked = prefix(*range(2, 8))
    assert cache.find(asked) is rows[1], "the first had to go, the third is longer"
    assert cache.find(asked) is rows[1], "a branch finds it again"
    assert cache.make_room(20 + 16 * 3) and cache.find(asked) is rows[3], "what was followed goes first"
    assert cache.find(prefix(*range(2, 20), version=2)) is None
    assert cache.find(prefix(*range(2, 20))) is None, "what older weights have read is kept"

    aging, old = PrefixCache(max_bytes=1000, max_age=2), row_of(2, 3, version=1)
    aging.store(old)
    assert aging.find(prefix(2, 3, 4, version=2)) is None, "a request of its own is served by older weights"
    assert aging.find(prefix(2, 3, 4, version=3), continues=True) is old
    assert aging.find(prefix(2, 3, 4, version=0), continues=True) is None, "newer weights have read it"
    aging.store(replace(old, prefix=prefix(2, 3, version=3)))  # it went on, and was aborted again
    assert aging.find(prefix(2, 3, 4, version=4), continues=True) is None, "a row is older than it may be"


class PauseAfter:
    """A clock that lets an engine pause after so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def advance(self) -> bool:
        self._left -= 1
        return self._left == 0


@pytest.mark.parametrize("max_cache_age", [0, 1])
def test_what_goes_on_after_a_refit_reads_again_or_continues_from_its_row(
    model, monkeypatch: pytest.MonkeyPatch, max_cache_age: int
) -> None:
    """By the same weights it is the response that was never aborted; by others the two ways differ."""
    asked = requests(6, max_response_tokens=20, stop_token_ids=frozenset())
    whole = answers(engine_for(model), asked)
    same = dict(model.named_parameters())
    for tensors in (same, {name: weight * 1.05 for name, weight in same.items()}):
        engine = engine_for(model, release=(), max_cache_age=max_cache_age)
        engine.clock = PauseAfter(7)
        first = answers(engine, asked)
        assert [len(response.token_ids) for response in first] == [7] * 6
        engine.clock = None
        load_whole(engine, tensors, version=8)
        read = count_read(engine, monkeypatch)
        rest = answers(engine, [replace(r, response_ids=a.token_ids) for r, a in zip(asked, first, strict=True)])
        assert sum(read) == (6 if max_cache_age else sum(len(r.prompt_ids) + 7 for r in asked))
        joined = [one.continued(other) for one, other in zip(first, rest, strict=True)]
        assert all(response.spans == (Span(7, 7), Span(8, 13)) for response in joined)
        if tensors is same:
            for response, expected in zip(joined, whole, strict=True):
                assert response.token_ids == expected.token_ids
                torch.testing.assert_close(
                    *map(torch.tensor, (response.logprobs, expected.logprobs)), rtol=0, atol=1e-5
                )
        else:  # the first token after the refit, whose prefix both have in common
            load_whole(anew := engine_for(model), tensors, version=8)
            fresh = answers(anew, [replace(r, response_ids=a.token_ids) for r, a in zip(asked, first, strict=True)])
            apart = max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(rest, fresh, strict=True))
            assert apart > 1e-3 if max_cache_age else apart == 0.0


def test_the_planner_counts_what_the_cache_holds(model) -> None:
    engine = engine_for(model, 4)
    asked = [Request(prompt_ids=(3, 4), seed=i, max_response_tokens=6 if i else 1) for i in range(4)]
    next(engine.generate(asked))  # leaves three rows of at most eight tokens in use, in a cache for four
    decoder = decoder_of(model.config, {name: tuple(weight.shape) for name, weight in model.named_parameters()})
    cache = engine.runner.cache
    assert cache is not None
    keys_values = sum(cells.nbytes for of_layer in cache._keys_values._of_layers.values() for cells in of_layer)
    assert keys_values == 4 * 8 * decoder.key_value_width * 4
    layers = cache._states._of_layers
    assert [*layers] == recurrent_layers(model.config)
    for elements, number in ((decoder.conv_elements, 0), (decoder.state_elements, 1)):
        assert sum(cells[number].nbytes for cells in layers.values()) == 3 * elements * 4


def frequencies(
    logits: list[float], *, temperature: float = 1.0, top_p: float = 1.0, count: int = 40_000
) -> torch.Tensor:
    asked = [
        Request(prompt_ids=(), seed=seed, max_response_tokens=1, temperature=temperature, top_p=top_p)
        for seed in range(count)
    ]
    sampling = RowSampling.of(asked, [0] * count, torch.device("cpu"))
    tokens, _, _ = sample_tokens(torch.tensor(logits).expand(count, -1), sampling, 0)
    return torch.bincount(tokens, minlength=len(logits)) / count


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = [1.0, -2.0, 0.5, -torch.inf, 2.0]
    expected = (torch.tensor(logits) / 0.7).softmax(-1)
    torch.testing.assert_close(frequencies(logits, temperature=0.7), expected, rtol=0, atol=0.01)
    assert frequencies(logits)[3] == 0


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seen = frequencies(p.log().tolist(), top_p=0.75)
    torch.testing.assert_close(seen, torch.tensor([0.625, 0.375, 0.0, 0.0]), rtol=0, atol=0.01)
    asked = [Request(prompt_ids=(), seed=0, max_response_tokens=1, top_p=top_p) for top_p in (0.5, 0.75)]
    left, _ = _nucleus(torch.tensor([[0.25, 0.5, 0.25]] * 2), RowSampling.of(asked, [0, 0], torch.device("cpu")))
    assert left.count_nonzero(dim=1).tolist() == [1, 2] and left[0, 1] == 0.5, "a set of exactly top_p is sufficient"


def test_greedy_takes_the_best() -> None:
    assert frequencies([0.1, 0.3, 0.2], temperature=0.0).tolist() == [0.0, 1.0, 0.0]


def test_a_sleeping_engine_keeps_only_what_it_was_not_told_to_release(model) -> None:
    engine = engine_for(model, release=("kv_cache", "weights"))
    asked = requests(6)
    before = answers(engine, asked)
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        assert engine.runner.cache is None
        assert {weight.untyped_storage().nbytes() for weight in engine.weights.values()} == {0}
        engine.wake()
        with pytest.raises(AssertionError, match="refit before sampling"):
            next(engine.generate(asked))
        load_whole(engine, dict(model.named_parameters()), version=7)
        assert answers(engine, asked) == before
    keeps_all = engine_for(model, release=())
    answers(keeps_all, asked)
    keeps_all.sleep()
    assert keeps_all.runner.cache is not None
    assert answers(keeps_all, asked) == before
