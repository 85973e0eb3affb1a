"""The embedded engine samples from prompts with images what a plain forward says about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from spmdrl.engine.torch import cache
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.load import weights_of
from spmdrl.model.trunk import Trunk
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request, Response, UserError
from spmdrl.types import Sequence as Tokens
from tests.helpers.adapters import merged, random_adapters
from tests.helpers.conversations import conversations, count_read
from tests.helpers.vision_models import (
    IMAGE,
    Picture,
    inputs_of,
    mixed_sequences,
    picture,
    save_gemma3_vl,
    save_gemma4_vl,
    save_qwen2_5_vl,
    save_qwen3_5_moe_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
    sequence_with,
)

GROUP_SIZE = 3
MODELS = [save_qwen3_vl, save_qwen3_5_vl, save_gemma4_vl]
RARE = [save_qwen2_5_vl, save_qwen3_vl_moe, save_gemma3_vl, save_qwen3_5_moe_vl]  # in `make test-long`
DECODED_PLAINLY = {save_qwen3_vl_moe, save_qwen3_5_vl, save_qwen3_5_moe_vl, save_gemma3_vl, save_gemma4_vl}


@dataclass(frozen=True)
class Looking:
    """A model that looks at images, and the images that exist for it."""

    path: str
    plain: Any
    prompts: list[Tokens]  # with 1, 0, 3, 0, 2 and 1 images
    pictures: dict[str, Picture]
    decodes_plainly: bool

    def engine(self, max_running: int = 32) -> TorchEngine:
        """An engine with the model's weights."""
        engine = TorchEngine(
            self.plain.config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernel="sdpa",
            max_running=max_running,
            images={digest: one.pixels for digest, one in self.pictures.items()},
        )
        load_whole(engine, weights_of(self.plain), version=7)
        return engine

    def requests(self, **changes: Any) -> list[Request]:
        """A group of requests for each prompt."""
        settings = {"max_response_tokens": 12, "temperature": 0.8} | changes
        return [
            request_of(prompt, seed=100 * i + j, **settings)
            for i, prompt in enumerate(self.prompts)
            for j in range(GROUP_SIZE)
        ]

    @torch.no_grad()
    def logprobs(self, request: Request, response: Response) -> Tensor:
        """Return the log-probabilities that transformers' own model gives to a response."""
        whole = replace(self.prompts[0], token_ids=request.prompt_ids + response.token_ids, images=request.images)
        logits = self.plain(**inputs_of(self.path, whole, self.pictures)).logits[0].float() / request.temperature
        first = len(request.prompt_ids)
        return logits.log_softmax(-1)[first - 1 : -1].gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]

    def check(self, asked: list[Request], responses: list[Response]) -> None:
        """Transformers' placeholders are those with the token's number, so it is not asked about ones that were
        sampled."""
        readable = [pair for pair in zip(asked, responses, strict=True) if IMAGE not in pair[1].token_ids]
        assert len(readable) > len(asked) / 2
        for request, response in readable:
            found = torch.tensor(response.logprobs)
            torch.testing.assert_close(found, self.logprobs(request, response), rtol=0, atol=1e-5)


def request_of(prompt: Tokens, *, seed: int, **settings: Any) -> Request:
    ids = tuple(token for token, chosen in zip(prompt.token_ids, prompt.loss_mask, strict=True) if not chosen)
    return Request(prompt_ids=ids, images=prompt.images, seed=seed, **settings)


def answers(engine: TorchEngine, asked: list[Request]) -> list[Response]:
    responses = dict(engine.generate(asked))
    return [responses[i] for i in range(len(asked))]


@pytest.fixture(scope="module", params=[*MODELS, *(pytest.param(save, marks=pytest.mark.slow) for save in RARE)])
def looking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Looking:
    return looking_at(request.param, tmp_path_factory.mktemp("model"))


def looking_at(save: Callable[..., str], folder: Path) -> Looking:
    path = save(folder)
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return Looking(path, plain.eval(), *mixed_sequences(path), save in DECODED_PLAINLY)


@pytest.mark.parametrize("max_running", [4, 64])
def test_logprobs_equal_those_of_a_full_forward(looking: Looking, max_running: int) -> None:
    """Groups with 0, 1, 2 and 3 images of different sizes, together and a few at a time."""
    asked = looking.requests()
    engine = looking.engine(max_running)
    assert (engine.runner.decoder is None) == looking.decodes_plainly
    looking.check(asked, answers(engine, asked))


def test_a_sample_does_not_depend_on_its_company(looking: Looking) -> None:
    asked = looking.requests()
    together = answers(looking.engine(64), asked)
    assert len({response.token_ids for response in together}) > len(asked) / 2
    few_at_a_time = answers(looking.engine(4), asked)
    backwards = answers(looking.engine(64), asked[::-1])[::-1]
    alone = [answers(looking.engine(), [request])[0] for request in asked]
    for others in (few_at_a_time, backwards, alone):
        assert [response.token_ids for response in others] == [response.token_ids for response in together]


def test_equal_tokens_with_different_images_have_prefills_of_their_own(looking: Looking) -> None:
    first, other = equally_large(looking.path)
    mine = replace(looking, pictures={one.digest: one for one in (first, other)})
    prompt = sequence_with(looking.path, first)
    shown_other = replace(prompt, images=tuple(replace(image, digest=other.digest) for image in prompt.images))
    asked = [
        request_of(one, seed=seed, max_response_tokens=6, stop_token_ids=frozenset({IMAGE}))
        for one in (prompt, shown_other)
        for seed in range(GROUP_SIZE)
    ]
    assert len({request.prompt_ids for request in asked}) == 1
    responses = answers(mine.engine(), asked)
    mine.check(asked, responses)
    same_noise = zip(responses[:GROUP_SIZE], responses[GROUP_SIZE:], strict=True)
    assert all(one.logprobs[0] != two.logprobs[0] for one, two in same_noise)


def equally_large(path: str) -> tuple[Picture, Picture]:
    """Two images of the same size."""
    seen: dict[tuple[int, ...], Picture] = {}
    for number in range(100):
        found = picture(path, number)
        if found.grid in seen:
            return seen[found.grid], found
        seen[found.grid] = found
    raise AssertionError("there are fewer than 100 sizes")


def test_each_image_is_looked_at_once(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """In however many prompts, rows and prefills it occurs."""
    asked = looking.requests()
    whole, grids = answers(looking.engine(4), asked), seen_grids(monkeypatch)
    assert answers(looking.engine(4), asked) == whole
    assert sorted(grids) == sorted(one.grid for one in looking.pictures.values())
    assert len({image.digest for request in asked for image in request.images}) == len(grids)


def seen_grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The grids of the images that a tower looks at from now on."""
    grids: list[tuple[int, int, int]] = []
    real = Trunk.encode

    def encode(self: Trunk, pixels: Any, of_pixels: Any) -> list[Tensor]:
        grids.extend(of_pixels)
        return real(self, pixels, of_pixels)

    monkeypatch.setattr(Trunk, "encode", encode)
    return grids


def test_features_that_found_no_room_are_computed_again(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = looking.requests()
    monkeypatch.setattr(cache, "CACHED_TOKENS", 1)
    grids = seen_grids(monkeypatch)
    engine = looking.engine(1)
    engine.runner.images._max_patches = 1
    looking.check(asked, answers(engine, asked))
    assert len(grids) == 1 + 2 + 1 + 1  # what the prompt before has shown is there
    assert len(engine.runner.images._cached) == 1
    engine.sleep()
    assert not engine.runner.images._cached


def test_pixels_may_be_removed_while_their_request_waits(looking: Looking) -> None:
    """A store that has room for the images of one prompt."""
    asked, store = looking.requests(), {}
    crowded = replace(looking, pictures={}).engine(8)
    crowded.runner.images._store = store

    def shown_one_by_one() -> Iterator[Request]:
        for request in asked:
            store.clear()
            store.update((image.digest, looking.pictures[image.digest].pixels) for image in request.images)
            yield request

    assert dict(crowded.generate(shown_one_by_one())) == dict(enumerate(answers(looking.engine(8), asked)))
    with pytest.raises(UserError, match=r"raise data\.image_store_gib"):
        answers(crowded, asked)


def test_new_weights_of_the_tower_are_seen(looking: Looking) -> None:
    asked = looking.requests(stop_token_ids=frozenset({IMAGE}))
    engine = looking.engine()
    before = answers(engine, asked)
    towers = [f"model.{name}." for name in Trunk(looking.plain).family.tower]
    weights = {
        name: weight * 1.5 if name.startswith(tuple(towers)) else weight
        for name, weight in looking.plain.named_parameters()
    }
    load_whole(engine, weights_of(looking.plain) | weights, version=8)
    for request, one, other in zip(asked, before, answers(engine, asked), strict=True):
        assert (one.logprobs[0] != other.logprobs[0]) == bool(request.images)


def test_adapters_of_the_language_half(looking: Looking) -> None:
    engine, asked = looking.engine(), looking.requests()
    before = answers(engine, asked)
    adapters = random_adapters(looking.plain, 8, targets=("o_proj",))
    assert engine.load_adapters(adapters) == []
    found = answers(engine, asked)
    assert all(one.logprobs[0] != other.logprobs[0] for one, other in zip(before, found, strict=True))
    replace(looking, plain=merged(looking.plain, adapters)).check(asked, found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_that_was_interrupted_goes_on_to_the_same_tokens(looking: Looking, temperature: float) -> None:
    engine = looking.engine()
    asked = looking.requests(temperature=temperature, max_response_tokens=20)
    whole = answers(engine, asked)
    for cut in (1, 7, 19):
        rest = answers(engine, [replace(r, response_ids=w.token_ids[:cut]) for r, w in zip(asked, whole, strict=True)])
        for response, uncut in zip(rest, whole, strict=True):
            assert response.token_ids == uncut.token_ids[cut:]
            found = torch.tensor(response.logprobs)
            torch.testing.assert_close(found, torch.tensor(uncut.logprobs[cut:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_running", [4, 64])
def test_a_conversation_about_images_goes_on(
    looking: Looking, max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text after images is read without them, at positions that follow from theirs."""
    engine = looking.engine(max_running)
    read = count_read(engine, monkeypatch)
    begins = looking.requests(max_response_tokens=6, cache_on_finish=frozenset({"length"}))
    said = [tuple(range(3, 5 + i)) for i in range(len(begins))]
    done = conversations(engine, begins, said, num_turns=3)
    checked = [turn for turn in done if turn[0].prompt_ids.count(IMAGE) == sum(i.num_tokens for i in turn[0].images)]
    looking.check(*map(list, zip(*checked, strict=True)))
    anew = sum(len(request.prompt_ids) for request, _ in done)
    assert sum(read) < anew / 2 if max_running == 64 else sum(read) < anew


def test_what_was_aborted_goes_on_to_the_same_tokens(looking: Looking) -> None:
    engine = looking.engine()
    asked = looking.requests(max_response_tokens=20)
    asked[4] = replace(asked[4], max_response_tokens=5)
    whole = answers(engine, asked)
    parts: dict[int, Response] = {}
    for index, response in engine.generate(asked):
        parts[index] = response
        engine.abort()
    assert {parts[index].finish_reason for index in range(len(asked)) if index != 4} == {"abort"}
    rest = answers(
        engine,
        [replace(request, response_ids=parts[index].token_ids) for index, request in enumerate(asked) if index != 4],
    )
    aborted = [parts[index] for index in range(len(asked)) if index != 4]
    for one, two, uncut in zip(aborted, rest, [*whole[:4], *whole[5:]], strict=True):
        assert 0 < len(one.token_ids) < 20
        assert one.token_ids + two.token_ids == uncut.token_ids


def test_a_placeholder_that_was_sampled_is_text(looking: Looking) -> None:
    """In a decode step and, where the response is continued, in a prefill: as a token that is no placeholder would be
    with the same embedding."""
    twin = 3  # a token that nothing else uses
    plain = AutoModelForImageTextToText.from_pretrained(looking.path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                weight[twin] = weight[IMAGE]
    mine = replace(looking, plain=plain.eval())
    engine = mine.engine()
    asked = mine.requests(max_response_tokens=30, temperature=3.0)  # tokens are about equally likely
    whole = answers(engine, asked)
    sampled = [(request, found) for request, found in zip(asked, whole, strict=True) if IMAGE in found.token_ids[:-1]]
    assert any(request.images for request, _ in sampled), "no response has a placeholder before its end"
    for request, response in sampled:
        as_text = replace(response, token_ids=tuple(twin if token == IMAGE else token for token in response.token_ids))
        expected = mine.logprobs(request, as_text)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)
        cut = response.token_ids.index(IMAGE) + 1
        (rest,) = answers(engine, [replace(request, response_ids=response.token_ids[:cut])])
        assert rest.token_ids == response.token_ids[cut:]
        torch.testing.assert_close(torch.tensor(rest.logprobs), expected[cut:], rtol=0, atol=1e-5)
