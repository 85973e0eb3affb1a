"""Positions and hidden states of tokens with images among them, beside transformers' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from spmdrl.families import vision_family
from spmdrl.model.attention import packed_attention
from spmdrl.model.layers import set_classes
from spmdrl.model.policy import Policy, packed_positions, placeholder_rows, position_shift, token_positions
from spmdrl.model.recurrent import packed_layers
from spmdrl.model.rotary import lengths_of_tokens
from spmdrl.model.trunk import PlacedFeatures, Trunk, attention_of, model_class
from spmdrl.types import ImageSpan, Sequence
from tests.helpers.models import save_qwen3
from tests.helpers.sequences import random_sequences
from tests.helpers.vision_models import (
    IMAGE,
    Picture,
    inputs_of,
    mixed_sequences,
    picture,
    save_gemma3_vl,
    save_gemma4_vl,
    save_qwen2_5_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
)

WITH_GRIDS = [save_qwen2_5_vl, save_qwen3_vl, save_qwen3_vl_moe, save_qwen3_5_vl]


def trunk_of(path: str) -> Trunk:
    """The model at `path` with packed attention, in float32."""
    config = AutoModelForImageTextToText.from_pretrained(path).config if "vl" in path else None
    config = config or AutoModelForCausalLM.from_pretrained(path).config
    model = model_class(config).from_pretrained(path, attn_implementation=attention_of(config), dtype=torch.float32)
    set_classes(packed_layers(model))
    return Trunk(model.eval().requires_grad_(False))


def hidden_states(trunk: Trunk, sequences: list[Sequence], pictures: dict[str, Picture]) -> list[Tensor]:
    """The trunk's hidden states of sequences that are laid end to end, [n, D] for each."""
    seqlens = [len(sequence.token_ids) for sequence in sequences]
    starts = torch.tensor([0, *seqlens]).cumsum(0)
    spans = [
        image.moved(int(start)) for sequence, start in zip(sequences, starts, strict=False) for image in sequence.images
    ]
    placed = None
    if spans:
        shown = [pictures[span.digest] for span in spans]
        features = trunk.encode([one.pixels for one in shown], [one.grid for one in shown])
        placed = PlacedFeatures(placeholder_rows(spans), torch.cat(features))
    return list(
        trunk(
            torch.tensor([token for sequence in sequences for token in sequence.token_ids]),
            packed_positions(seqlens, spans, family=trunk.family),
            lengths=lengths_of_tokens(seqlens),
            images=placed,
            attend=packed_attention(starts.int(), seqlens, "sdpa", blocks=trunk.seen_whole(spans)),
            seqlens=seqlens,
        ).split(seqlens)
    )


@pytest.mark.parametrize("save", WITH_GRIDS)
def test_positions_are_those_of_transformers(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path / "vl")
    model = AutoModelForImageTextToText.from_pretrained(path)
    sequences, pictures = mixed_sequences(path)
    for sequence in sequences:
        inputs = inputs_of(path, sequence, pictures)
        family = vision_family(model.config)
        expected, delta = model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
        )
        found = token_positions(len(sequence.token_ids), sequence.images, family=family)
        assert torch.equal(found, expected[:, 0])
        assert position_shift(sequence.images, family=family) == int(delta)


def test_text_after_an_image_goes_on_after_its_longest_side(tmp_path: Path) -> None:
    family = vision_family(AutoModelForImageTextToText.from_pretrained(save_qwen2_5_vl(tmp_path)).config)
    image = ImageSpan(digest="0" * 32, start=1, num_tokens=6, grid=(1, 4, 6))
    found = token_positions(9, [image], family=family)
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert token_positions(3, [], family=None).tolist() == [0, 1, 2]


@pytest.mark.parametrize("save", [*WITH_GRIDS, save_gemma3_vl, save_gemma4_vl])
def test_packed_is_alone_is_transformers(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path / "vl")
    sequences, pictures = mixed_sequences(path)
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    trunk = trunk_of(path)
    packed = hidden_states(trunk, sequences, pictures)
    for sequence, found in zip(sequences, packed, strict=True):
        (alone,) = hidden_states(trunk, [sequence], pictures)
        with torch.no_grad():
            expected = plain.model(**inputs_of(path, sequence, pictures), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("save", WITH_GRIDS)
def test_a_placeholder_that_was_sampled_is_text(save: Callable[..., str], tmp_path: Path) -> None:
    """It has its own embedding and a text position, and changes nothing of other sequences."""
    path = save(tmp_path / "vl")
    sequences, pictures = mixed_sequences(path)
    trunk = trunk_of(path)
    before = hidden_states(trunk, sequences, pictures)
    changed = list(sequences)
    place = len(sequences[0].token_ids) - 2
    ids = [*sequences[0].token_ids]
    ids[place] = IMAGE
    changed[0] = dataclasses.replace(sequences[0], token_ids=tuple(ids))
    after = hidden_states(trunk, changed, pictures)
    assert not torch.equal(after[0][place], before[0][place])
    assert torch.equal(after[0][:place], before[0][:place])
    for old, new in zip(before[1:], after[1:], strict=True):
        assert torch.equal(old, new)
    # A model whose placeholder has another number, and this number's embedding, says the same about it.
    embedding = trunk._model.get_input_embeddings().weight
    embedding[VOID] = embedding[IMAGE]
    ids[place] = VOID
    twin = hidden_states(trunk, [dataclasses.replace(sequences[0], token_ids=tuple(ids))], pictures)[0]
    torch.testing.assert_close(after[0], twin, rtol=0, atol=1e-5)


VOID = 3  # a token that nothing else uses


def test_text_goes_through_the_trunk_unchanged(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "text")
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    sequences = random_sequences(3)
    for sequence, found in zip(sequences, hidden_states(trunk_of(path), sequences, {}), strict=True):
        with torch.no_grad():
            expected = plain.model(torch.tensor([sequence.token_ids]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_images_of_one_call_are_encoded_as_if_alone(tmp_path: Path) -> None:
    for save in (save_qwen2_5_vl, save_qwen3_vl, save_gemma3_vl, save_gemma4_vl):
        path = save(tmp_path / f"vl {save.__name__}")
        trunk, shown = trunk_of(path), [picture(path, number) for number in range(3)]
        together = trunk.encode([one.pixels for one in shown], [one.grid for one in shown])
        for one, found in zip(shown, together, strict=True):
            (alone,) = trunk.encode([one.pixels], [one.grid])
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


def test_a_model_that_would_pass_its_kernel_by_is_no_policy(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(save_qwen3(tmp_path), attn_implementation="sdpa")
    with pytest.raises(AssertionError, match='attention "sdpa"'):
        Policy(plain, kernel="sdpa", temperature=1.0, logits_chunk_tokens=64)
