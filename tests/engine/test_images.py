"""SGLang with images: it sees the pixels that the trainer sees, at the positions that the trainer gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from spmdrl.types import ImageSpan, Request, Response
from tests.helpers.adapters import change_adapters
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.sglang_delta_net import ARGUMENTS
from tests.helpers.sglang_engine import Rank, answers, change, rank_with_engine, settings
from tests.helpers.vision import save_vision_files
from tests.helpers.vision_models import (
    END,
    IMAGE,
    START,
    Picture,
    inputs_of,
    mixed_sequences,
    save_qwen2_5_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
    sequence_with,
    stored,
)
from tests.helpers.vision_models import Sequence as Tokens

TEMPERATURE = 0.8
MERGED = {"rank": 4, "alpha": 8.0, "merge": True}


def all_of_it(path: str, images: str, num_ranks: int, lora: dict[str, Any] | None) -> dict[str, Any]:
    """Ask one engine for all ranks about images, on one rank of them. With `lora` its adapters change, and no other
    weight."""
    sequences, pictures = mixed_sequences(path)
    # Of the pixels of the last sequence's image, as blank pages are: only the grid tells them apart.
    page = pictures[sequences[-1].images[0].digest]
    pictures["turned"] = replace(page, digest="turned", grid=(page.grid[0], page.grid[2], page.grid[1]))
    assert pictures["turned"].grid != page.grid
    index = sequences[-1].index
    sequences.append(sequence_with(path, pictures["turned"], index=index))
    sequences.append(sequence_with(path, page, pictures["turned"], index=index))
    sequences.append(sequence_with(path, pictures["turned"], page, index=index))
    (*sequences, turned, first, second), store = stored(sequences, pictures, Path(images))
    found: dict[str, Any] = {}
    change_weights = change_adapters if lora else change
    backend = ARGUMENTS if "qwen3_5" in Path(path, "config.json").read_text() else {}
    cfg = settings(path, num_ranks, lora=lora, tp_size=num_ranks, temperature=TEMPERATURE, sglang=backend)
    with rank_with_engine(cfg, images=store) as rank:
        sent = []
        for version in range(3):  # the tower, which is frozen, is in the first alone
            change_weights(rank.policy, 0.02)
            rank.refit(version=version)  # compares every weight by digest
            buckets = rank.refit._buckets()
            sent.append({entry.name for bucket in buckets for entry in bucket.flat_entries})
        found["sends"] = sorted(sent[-1])
        rank.engine.wake()
        plain = of_policy(path, rank)
        asked = [request_of(sequence) for sequence in sequences * 2]
        responses = answers(rank.engine, asked)
        if rank.engine.leads:
            found["differences"] = differences(path, plain, pictures, zip(asked, responses, strict=True))
        asked_turned = [request_of(sequence) for sequence in (turned, first, second)]
        answered = answers(rank.engine, asked_turned)
        if rank.engine.leads:
            found["turned"] = differences(path, plain, pictures, zip(asked_turned, answered, strict=True))
            shown = [image for sequence in sequences for image in sequence.images]
            turns = list(zip(asked, responses, strict=True))
            for name in ("second", "third"):  # turns, before which an environment has shown an image
                further = [later(*turn, shown[place % 3]) for place, turn in enumerate(turns)]
                turns = list(zip(further, answers(rank.engine, further), strict=True))
                found[name] = differences(path, plain, pictures, turns)
        found["sampled"] = sampled_placeholder(rank, asked[0])
        found["leads"] = rank.engine.leads
    return found


def differences(
    path: str, plain: Any, pictures: dict[str, Picture], turns: Iterable[tuple[Request, Response]]
) -> dict[int, float]:
    """The largest difference from transformers' own forward, by the number of images before a response."""
    found: dict[int, float] = {}
    for request, response in turns:
        number = len(request.images)
        if (worst := difference(path, plain, pictures, request, response)) is not None:
            found[number] = max(worst, found.get(number, 0.0))
    return found


def later(request: Request, response: Response, shown: ImageSpan) -> Request:
    """The request of the next turn: what was said, without placeholders that were sampled, and another image."""
    said = (*request.prompt_ids, *(token for token in response.token_ids if token != IMAGE), 9, START)
    image = replace(shown, start=len(said))
    return replace(
        request, prompt_ids=(*said, *[IMAGE] * image.num_tokens, END, 11), images=(*request.images, image), seed=1
    )


def request_of(sequence: Tokens) -> Request:
    ids = tuple(token for token, chosen in zip(sequence.token_ids, sequence.loss_mask, strict=True) if not chosen)
    return Request(prompt_ids=ids, images=sequence.images, seed=0, max_response_tokens=16, temperature=TEMPERATURE)


def of_policy(path: str, rank: Rank) -> Any:
    """Transformers' own model with the weights of the policy, its adapters merged."""
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    weights = {name: parameter.full_tensor() for name, parameter in rank.policy.model.named_parameters()}
    for name, weight in weights.items():
        if (added := rank.policy.change_of(name)) is not None:
            weights[name] = weight + added
    plain.load_state_dict(weights, strict=False)
    return plain.eval()


@torch.no_grad()
def difference(
    path: str, plain: Any, pictures: dict[str, Picture], request: Request, response: Response
) -> float | None:
    """Largest difference of a response's log-probabilities from those of transformers' own forward.

    Transformers takes a token of images that was sampled for an image: the response is read up to there. None where
    that is its first token.
    """
    sampled = response.token_ids[: (*response.token_ids, IMAGE).index(IMAGE)]
    if not sampled:
        return None
    ids = request.prompt_ids + sampled
    whole = Tokens(index=0, token_ids=ids, loss_mask=(True,) * len(ids), rollout_logprobs=(0.0,) * len(ids), reward=0.0)
    logits = plain(**inputs_of(path, replace(whole, images=request.images), pictures)).logits[0] / TEMPERATURE
    of_response = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    expected = of_response.gather(-1, torch.tensor(sampled)[:, None])[:, 0]
    return float((torch.tensor(response.logprobs[: len(sampled)]) - expected).abs().max())


def sampled_placeholder(rank: Rank, request: Request) -> list[bool]:
    """Go on after tokens of images that the policy has sampled: whether the tokens are those of an engine that has
    gone on by itself."""
    greedy = replace(request, temperature=0.0, max_response_tokens=12)
    forced = replace(greedy, response_ids=(START, IMAGE, IMAGE, 9))
    (whole,) = answers(rank.engine, [forced]) or [None]
    if whole is None:
        return []
    first = replace(forced, response_ids=forced.response_ids + whole.token_ids[:3])
    (rest,) = answers(rank.engine, [first])
    return [whole.token_ids[3:] == rest.token_ids, len(whole.token_ids) == 8]


@pytest.mark.parametrize(
    ("save", "patch_size", "num_ranks", "lora"),
    [
        pytest.param(save_qwen3_vl, 4, 1, None, id="qwen3-vl"),
        pytest.param(partial(save_qwen2_5_vl, patch_size=14), 14, 1, None, id="qwen2.5-vl", marks=pytest.mark.slow),
        pytest.param(save_qwen3_5_vl, 4, 1, None, id="qwen3.5", marks=pytest.mark.slow),
        pytest.param(save_qwen3_vl, 4, 2, None, id="qwen3-vl-on-two-devices", marks=pytest.mark.slow),
        pytest.param(save_qwen3_vl, 4, 1, MERGED, id="merged-adapters", marks=pytest.mark.slow),
    ],
)
def test_images_are_seen_as_the_trainer_sees_them(
    tmp_path: Path, save: Callable[[Path], str], patch_size: int, num_ranks: int, lora: dict[str, Any] | None
) -> None:
    path = save(tmp_path / "model")
    save_vision_files(path, patch_size=patch_size)
    ranks = run_engine_ranks(num_ranks, all_of_it, path, str(tmp_path / "images"), num_ranks, lora)
    (leader,) = [rank for rank in ranks if rank["leads"]]
    assert leader["differences"].keys() >= {0, 1, 3}  # images of a prompt
    assert leader["second"].keys() >= {1, 2, 4} and leader["third"].keys() >= {2, 3, 5}
    for turn in ("differences", "second", "third"):
        assert max(leader[turn].values()) < 1e-5
    assert leader["turned"].keys() == {1, 2} and max(leader["turned"].values()) < 1e-5
    assert leader["sampled"] == [True, True]
    for rank in ranks:
        assert rank["sends"] and not any("visual" in name for name in rank["sends"])


def seen_by_a_trained_tower(path: str, images: str) -> list[float]:
    """Differences from transformers' own forward for one image, before and after a refit that changes the tower."""
    sequences, pictures = mixed_sequences(path)
    sequences, store = stored(sequences, pictures, Path(images))
    request = next(request_of(sequence) for sequence in sequences if sequence.images)
    cfg = settings(path, 1, temperature=TEMPERATURE)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"freeze": []})})
    found = []
    with rank_with_engine(cfg, images=store) as rank:
        for version in range(2):
            change(rank.policy, 0.05)
            rank.refit(version=version)
            rank.engine.wake()
            answered = zip([request], answers(rank.engine, [request]), strict=True)
            found += differences(path, of_policy(path, rank), pictures, answered).values()
    return found


@pytest.mark.slow
def test_an_image_is_looked_at_again_when_the_tower_has_changed(tmp_path: Path) -> None:
    path = save_qwen3_vl(tmp_path / "model")
    save_vision_files(path, patch_size=4)
    ((first, second),) = run_engine_ranks(1, seen_by_a_trained_tower, path, str(tmp_path / "images"))
    assert max(first, second) < 1e-5
