"""Images in data become placeholders and pixels: the same from every form and on every rank; bad ones are named."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, Gemma3Processor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from spmdrl.config import DataConfig, FileData, HeldOutConfig
from spmdrl.data import vision
from spmdrl.data.conversations import imitated
from spmdrl.data.image_store import ImageStore
from spmdrl.data.images import MAX_IMAGE_BYTES, ImageFile, _say_unturned, decode, image_file, size_of
from spmdrl.data.stream import HeldOutPrompts, PromptStream, make_held_out, make_training_stream
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.vision import ImageReader
from spmdrl.families import vision_family
from spmdrl.step.tuning_data import PairEncoder
from spmdrl.types import Prompt, UserError
from tests.helpers.chat_templates import family_tokenizer
from tests.helpers.vision import as_file, photo, save_vision_files
from tests.helpers.vision_models import END, IMAGE, START, save_gemma3_vl, save_gemma4_vl, save_qwen2_5_vl

QWEN, GEMMA, GEMMA4 = "qwen", "gemma", "gemma4"
LIMIT = 2**20  # pixels of an image


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of vision models."""
    folder = tmp_path_factory.mktemp("models")
    for name, save in ((QWEN, save_qwen2_5_vl), (GEMMA, save_gemma3_vl), (GEMMA4, save_gemma4_vl)):
        save(folder / name)
        save_vision_files(folder / name)
    return {name: folder / name for name in (QWEN, GEMMA, GEMMA4)}


class Bench:
    """A model's prompts from rows in a folder, whose images are kept in a store."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.store = ImageStore(folder / "store", max_bytes=2**30)
        self.tokenizer = load_tokenizer(str(model))

    def source(self, rows: list[dict[str, Any]], name: str = "rows.jsonl", **changes: Any) -> FileData:
        (self.folder / name).write_text("".join(json.dumps({"answer": "a"} | row) + "\n" for row in rows))
        return FileData(**({"kind": "jsonl", "path": str(self.folder / name), "image_column": "images"} | changes))

    def reader(self, cfg: DataConfig) -> ImageReader:
        family = vision_family(AutoConfig.from_pretrained(self.model))
        assert family is not None
        return ImageReader(family, str(self.model), cfg, tokenizer=self.tokenizer, store=self.store)

    def stream(self, *sources: FileData, held_out: HeldOutConfig | None = None, **changes: Any) -> PromptStream:
        cfg = DataConfig(**({"sources": sources, "max_prompt_tokens": 200} | changes))
        return make_training_stream(cfg, held_out, seed=0, tokenizer=self.tokenizer, images=self.reader(cfg))

    def held_out(self, source: FileData, count: int) -> HeldOutPrompts:
        cfg = DataConfig(sources=(source,), max_prompt_tokens=200)
        table = HeldOutConfig(sources=(source,), num_prompts=count)
        return make_held_out(cfg, table, tokenizer=self.tokenizer, images=self.reader(cfg))

    def prompts(self, rows: list[dict[str, Any]], **changes: Any) -> list[Prompt]:
        """The prompts of rows, in the order of the rows."""
        rows = [row | {"row": number} for number, row in enumerate(rows)]
        of_data = {name: changes.pop(name) for name in list(changes) if name in DataConfig.model_fields}
        taken = self.stream(self.source(rows, **changes), **of_data).take(0, len(rows))
        return sorted(taken, key=lambda prompt: prompt.metadata["row"])

    def refusal(self, row: dict[str, Any], **changes: Any) -> str:
        """The sentence about a row."""
        with pytest.raises(UserError) as caught:
            self.prompts([row], **changes)
        assert str(caught.value).startswith("rows.jsonl line 1: ")
        return str(caught.value).removeprefix("rows.jsonl line 1: ")


@pytest.fixture
def qwen(models: dict[str, Path], tmp_path: Path) -> Bench:
    return Bench(models[QWEN], tmp_path)


@pytest.fixture(params=[QWEN, GEMMA, GEMMA4])
def bench(models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(models[request.param], tmp_path)


def same(prompt: Prompt) -> Prompt:
    """The prompt without its place in the data."""
    return dataclasses.replace(prompt, prompt_id=0, metadata={})


def as_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


# The forms in which data has images


def test_a_path_bytes_and_base64_of_one_image_are_one_prompt(bench: Bench) -> None:
    content = as_file(photo(40, 24))
    (bench.folder / "a.png").write_bytes(content)
    image, text = {"type": "image"}, {"type": "text", "text": "what is it? "}

    def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    rows: list[dict[str, Any]] = [
        {"prompt": "what is it? <image>", "images": "a.png"},
        {"prompt": "what is it? <image>", "images": ["a.png"]},
        {"prompt": "what is it? <image>", "images": str(bench.folder / "a.png")},
        {"prompt": "what is it? <image>", "images": {"path": "a.png", "bytes": None}},
        {"prompt": "what is it? <image>", "images": [as_uri(content)]},
        {"prompt": [{"role": "user", "content": "what is it? <image>"}], "images": "a.png"},
        {"prompt": asked(text, image), "images": ["a.png"]},
        {"prompt": asked(text, image | {"image": None, "text": None}), "images": ["a.png"]},
        {"prompt": asked(text, image | {"image": "a.png"}), "images": []},
        {"prompt": asked(text, image | {"image": as_uri(content)}), "images": None},
        {"prompt": asked(text, {"type": "image_url", "image_url": {"url": as_uri(content)}}), "images": []},
        {"prompt": asked(text, {"type": "image_url", "image_url": as_uri(content)}), "images": []},
    ]
    first, *others = map(same, bench.prompts(rows))
    assert len(first.images) == 1 and first.images[0].num_tokens > 1
    assert all(other == first for other in others)
    assert bench.store.get(first.images[0].digest) is not None


def test_a_parquet_file_of_images_as_data_sets_write_it(qwen: Bench) -> None:
    """Geometry problems: messages with places, and a column of structs; the columns of both are no metadata."""
    contents = [as_file(photo(16, 16, seed=seed)) for seed in range(3)]
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>" * len(own) + "find x"}],
            "images": [{"bytes": content, "path": None} for content in own],
            "answer": "4",
            "level": 2,
        }
        for own in (contents[:1], contents[1:])
    ]
    path = qwen.folder / "geo.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = qwen.stream(FileData(kind="parquet", path=str(path), image_column="images")).take(0, 2)
    assert sorted(len(prompt.images) for prompt in prompts) == [1, 2]
    assert all(prompt.metadata == {"level": 2} for prompt in prompts)
    for seed, content in enumerate(contents):
        (qwen.folder / f"{seed}.png").write_bytes(content)
    rows = [
        {"prompt": "<image>find x", "images": "0.png"},
        {"prompt": "<image><image>find x", "images": ["1.png", "2.png"]},
    ]
    assert {prompt.images for prompt in qwen.prompts(rows)} == {prompt.images for prompt in prompts}


def test_placeholders_stand_where_the_images_do(bench: Bench) -> None:
    sizes = [(40, 24), (20, 60), (9, 9)]
    for number, size in enumerate(sizes):
        photo(*size, seed=number).save(bench.folder / f"{number}.png")
    row = {"prompt": "a <image> b <image><image>", "images": ["0.png", "1.png", "2.png"]}
    (prompt,) = bench.prompts([row])
    places = [place for place, token in enumerate(prompt.token_ids) if token == IMAGE]
    assert [place for image in prompt.images for place in range(image.start, image.end)] == places
    around = [(prompt.token_ids[image.start - 1], prompt.token_ids[image.end]) for image in prompt.images]
    assert around == [(START, END)] * 3
    processor = AutoImageProcessor.from_pretrained(bench.model, backend="pil")
    for number, image in enumerate(prompt.images):
        made = processor(images=[PIL.Image.open(bench.folder / f"{number}.png")], return_tensors="pt")
        pixels = made["pixel_values"]
        if "image_position_ids" in made:  # without the patches that fill it
            pixels = pixels[0][(made["image_position_ids"][0] >= 0).all(-1)]
        assert torch.equal(bench.store.get(image.digest), pixels)  # to the last bit
        if "image_grid_thw" in made:
            assert list(image.grid) == made["image_grid_thw"][0].tolist()
    assert prompt.question == "a <image> b <image><image>"
    assert prompt.text.count("<image>") == 3 and "pad" not in prompt.text


def test_a_prompt_is_what_transformers_makes_of_it(models: dict[str, Path], tmp_path: Path) -> None:
    """Line feeds around an image of Gemma's become one token with those in the text."""
    tokenizer = family_tokenizer("Gemma 3")
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    for name, token in special.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    processor = Gemma3Processor(
        AutoImageProcessor.from_pretrained(models[GEMMA], backend="pil"), tokenizer, image_seq_length=4
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    family = dataclasses.replace(
        vision_family(AutoConfig.from_pretrained(models[GEMMA])),
        image_token_id=ids["image_token"],
        frame=(ids["boi_token"], ids["eoi_token"]),
    )
    photo(20, 20).save(tmp_path / "a.png")
    bench = Bench(models[GEMMA], tmp_path)
    source = bench.source([{"prompt": "look:\n<image>\n\n<image>and say", "images": ["a.png", "a.png"]}])
    cfg = DataConfig(sources=(source,), max_prompt_tokens=200)
    reader = ImageReader(family, str(models[GEMMA]), cfg, tokenizer=tokenizer, store=bench.store)
    (prompt,) = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer, images=reader).take(0, 1)
    text = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
    made = processor(text=text, images=[PIL.Image.open(tmp_path / "a.png")] * 2, add_special_tokens=False)
    assert list(prompt.token_ids) == made["input_ids"][0]


def test_texts_of_control_tokens_stay_texts(bench: Bench) -> None:
    photo(8, 8).save(bench.folder / "a.png")
    text = "<|image_pad|><|vision_start|> <|vision_end|><|vision_start|><|image_pad|><|vision_end|>"
    (prompt,) = bench.prompts([{"prompt": f"{text}<image>", "images": "a.png"}])
    assert prompt.token_ids.count(IMAGE) == sum(image.num_tokens for image in prompt.images)
    assert prompt.token_ids.count(START) == prompt.token_ids.count(END) == 1
    assert prompt.question == f"{text}<image>" and text in prompt.text


def test_without_a_column_a_place_is_text(bench: Bench) -> None:
    (prompt,) = bench.prompts([{"prompt": "what is <image> in html?"}], image_column=None)
    assert prompt.images == () and prompt.question == "what is <image> in html?"


def test_messages_of_text_parts_are_those_of_strings(bench: Bench) -> None:
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    rows = [{"prompt": [{"role": "user", "content": parts}]}, {"prompt": [{"role": "user", "content": "one, two"}]}]
    first, second = map(same, bench.prompts(rows, image_column=None))
    assert first == second


def test_a_system_prompt_stands_before_a_text_with_images(bench: Bench) -> None:
    photo(8, 8).save(bench.folder / "a.png")
    (prompt,) = bench.prompts([{"prompt": "<image>?", "images": "a.png"}], system_prompt="be brief")
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.text.startswith("<|system|>be brief<eos><|user|>")


# Sizes


@functools.cache
def readers(models: tuple[Path, ...]) -> list[ImageReader]:
    """Readers of each model, one with limits of its own."""
    made = []
    for model, limits in zip(
        (*models, models[0], models[0]), ({}, {}, {}, {"max_pixels": 256}, {"min_pixels": 500}), strict=True
    ):
        cfg = DataConfig(sources=(FileData(kind="jsonl", path="a"),), max_prompt_tokens=9, **limits)
        family = vision_family(AutoConfig.from_pretrained(model))
        assert family is not None
        made.append(ImageReader(family, str(model), cfg, tokenizer=load_tokenizer(str(model)), store=NoStore()))
    return made


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 90), st.integers(1, 90))
def test_lengths_by_headers_are_those_of_images(models: dict[str, Path], width: int, height: int) -> None:
    image = ImageFile(as_file(PIL.Image.new("RGB", (width, height))))
    for reader in readers(tuple(models.values())):
        span = reader.span(image)
        assert reader.num_tokens(image) == span.num_tokens == reader._family.num_tokens(span.grid)


def test_images_are_shrunk_and_enlarged_to_limits(models: dict[str, Path]) -> None:
    large, small = ImageFile(as_file(photo(90, 90))), ImageFile(as_file(photo(8, 8)))
    own, of_gemma, of_gemma4, shrinking, enlarging = readers(tuple(models.values()))
    assert [reader.num_tokens(large) for reader in (own, of_gemma, of_gemma4, shrinking)] == [9, 4, 64, 4]
    assert [reader.num_tokens(small) for reader in (own, of_gemma, of_gemma4, enlarging)] == [1, 4, 64, 9]


class NoStore(ImageStore):
    """A store that keeps nothing."""

    def __init__(self) -> None:
        pass

    def put(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> str:
        return ""

    def __contains__(self, digest: str) -> bool:
        return True


def test_a_photo_whose_exif_is_garbage_is_not_turned_and_there_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _say_unturned.cache_clear()
    for _ in range(2):
        stored = ImageFile(as_file(photo(8, 4), exif=b"Exif\0\0no TIFF at all"))
        assert decode(stored, max_pixels=99).size == (8, 4) and size_of(stored, max_pixels=99) == (4, 8)
    assert capsys.readouterr().err.count("there are images whose EXIF cannot be read; they are not turned") == 1


def test_a_photo_is_turned_as_its_exif_says(qwen: Bench) -> None:
    upright = photo(48, 16)
    backwards = {  # the turn that undoes each
        2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
        3: PIL.Image.Transpose.ROTATE_180,
        4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
        5: PIL.Image.Transpose.TRANSPOSE,
        6: PIL.Image.Transpose.ROTATE_90,
        7: PIL.Image.Transpose.TRANSVERSE,
        8: PIL.Image.Transpose.ROTATE_270,
    }
    for orientation, turn in backwards.items():
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        stored = ImageFile(as_file(upright.transpose(turn), exif=exif))
        assert size_of(stored, max_pixels=LIMIT) == (16, 48)
        assert decode(stored, max_pixels=LIMIT).tobytes() == upright.tobytes()


def test_every_mode_becomes_rgb_and_what_is_transparent_white() -> None:
    clear = PIL.Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 128))
    palette = PIL.Image.new("P", (2, 1), 0)
    palette.putpalette([9, 9, 9, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    shades = {
        as_file(clear): [(255, 255, 255), (127, 127, 255)],
        as_file(PIL.Image.new("LA", (2, 1), (7, 0))): [(255, 255, 255)] * 2,
        as_file(palette, transparency=0): [(255, 255, 255), (0, 255, 0)],
        as_file(PIL.Image.new("L", (2, 1), 9)): [(9, 9, 9)] * 2,
        as_file(PIL.Image.new("1", (2, 1), 1)): [(255, 255, 255)] * 2,
        as_file(PIL.Image.fromarray(numpy.array([[0x12FF, 0xFF00]], dtype=numpy.uint16))): [(18,) * 3, (255,) * 3],
    }
    for content, colours in shades.items():
        picture = decode(ImageFile(content), max_pixels=LIMIT)
        assert [picture.getpixel((column, 0)) for column in range(2)] == colours


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "PNG"])
def test_every_format_that_is_named_is_read(kind: str) -> None:
    made = decode(ImageFile(as_file(PIL.Image.new("RGB", (5, 3), "white"), kind)), max_pixels=LIMIT)
    assert made.size == (5, 3) and made.mode == "RGB" and made.getpixel((1, 1)) == (255, 255, 255)


def test_a_file_is_scanned_without_decoding(qwen: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        photo(30, 30, seed=number).save(qwen.folder / f"{number}.png")
    rows = [{"prompt": "<image>", "images": f"{number}.png"} for number in range(4)]
    decoded: list[ImageFile] = []

    def counted(image: ImageFile, *, max_pixels: int) -> PIL.Image.Image:
        decoded.append(image)
        return decode(image, max_pixels=max_pixels)

    monkeypatch.setattr(vision, "decode", counted)
    stream = qwen.stream(qwen.source(rows))
    assert decoded == []
    stream.take(0, 2)
    assert len(decoded) == 2


# Bad rows


def test_overlong_prompts_are_never_cut(qwen: Bench) -> None:
    photo(24, 24).save(qwen.folder / "a.png")  # 9 tokens of 64 pixels
    row = {"prompt": "<image>", "images": "a.png"}
    assert len(qwen.prompts([row])[0].token_ids) == 14
    sentence = qwen.refusal(row, max_prompt_tokens=13)
    assert sentence.startswith("the prompt has 14 tokens with its 1 images, more than data.max_prompt_tokens = 13")
    kept = qwen.stream(qwen.source([row, {"prompt": "hi", "images": None}]), max_prompt_tokens=13, overlong="drop")
    assert kept.dropped == {"overlong_rows": 1} and kept.take(0, 1)[0].question == "hi"


def huge_png() -> bytes:
    """The first bytes of a picture of 60,000 x 60,000 pixels, which is nothing else."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    )


NO_PIXELS = b"GIF89a" + struct.pack("<HHBBB", 0, 5, 0, 0, 0) + b",\0\0\0\0\0\0\0\0\0\2\2\x4c\1\0;"
BAD_FILES = {
    "cut.png": (as_file(photo(30, 30))[:900], "is damaged: "),
    "empty.png": (b"", "cut.png is empty"),
    "text.png": (b"hello", "text.png is damaged, has no pixels, or is none of PNG, JPEG, WEBP, GIF, BMP"),
    "huge.png": (huge_png(), "huge.png has more pixels than any picture"),
    "large.png": (
        as_file(PIL.Image.new("1", (3000, 400))),
        "has 3000 x 400 pixels, more than data.max_image_pixels = 1048576",
    ),
    "none.gif": (NO_PIXELS, "none.gif is damaged, has no pixels"),
    "moving.gif": (
        as_file(photo(4, 4), "GIF", save_all=True, append_images=[photo(4, 4, seed=1)]),
        "moving.gif is an animation (GIF); take one frame of it",
    ),
    "moving.png": (
        as_file(photo(4, 4), save_all=True, append_images=[photo(4, 4, seed=1)]),
        "moving.png is an animation (PNG)",
    ),
    "thin.png": (as_file(PIL.Image.new("1", (2000, 2))), "thin.png of 2000 x 2 pixels does not suit the model"),
    "icon.ico": (as_file(photo(16, 16), "ICO"), "icon.ico is damaged, has no pixels, or is none of"),
    "picture.tiff": (as_file(photo(16, 16), "TIFF"), "picture.tiff is damaged, has no pixels, or is none of"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_with_their_row(qwen: Bench, name: str) -> None:
    content, words = BAD_FILES[name]
    (qwen.folder / name).write_bytes(content)
    for image in (name, as_uri(content)) if content else (name,):
        sentence = qwen.refusal({"prompt": "<image>", "images": image}, max_image_pixels=LIMIT)
        assert words.removeprefix("cut.png ").removeprefix(f"{name} ") in sentence
        assert "the image" in sentence and len(sentence) < 400


def test_a_file_of_too_many_bytes_is_not_read(qwen: Bench) -> None:
    with (qwen.folder / "a.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)  # a hole
    assert "has more than 64 MiB" in qwen.refusal({"prompt": "<image>", "images": "a.png"})


def of_user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


IMAGE_PART = {"type": "image"}
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "<image>", "images": "absent.png"}, "absent.png: No such file or directory"),
    ({"prompt": "<image>", "images": "."}, "Is a directory"),
    ({"prompt": "<image>", "images": "../outside.png"}, "lies outside of"),
    ({"prompt": "<image>", "images": "/etc/passwd"}, "set image_root to a folder that holds all of them"),
    ({"prompt": "<image>", "images": "link.png"}, "link.png lies outside of"),
    ({"prompt": "<image>", "images": "a\0.png"}, "is not a path"),
    ({"prompt": "<image>", "images": "https://example.com/a.png"}, "nothing is fetched over a network"),
    ({"prompt": "<image>", "images": "s3://bucket/a.png"}, "nothing is fetched over a network"),
    ({"prompt": "<image>", "images": "file:///etc/passwd"}, "nothing is fetched over a network"),
    ({"prompt": "<image>", "images": "data:image/png;base64,####"}, "is not valid base64"),
    ({"prompt": "<image>", "images": "data:text/plain,hello"}, 'begins with "data:image/...;base64,"'),
    ({"prompt": "<image>", "images": 7}, "an image must be a path, base64"),
    ({"prompt": "<image>", "images": [None]}, "an image must be a path, base64"),
    ({"prompt": "<image>", "images": ""}, "an image must be a path, base64"),
    ({"prompt": "<image>", "images": {"url": "a.png"}}, "an image must be a path, base64"),
    ({"prompt": "<image>"}, 'no column "images" (image_column); it has answer, prompt, row'),
    ({"prompt": "<image>", "images": []}, "the prompt has 1 places for images"),
    ({"prompt": "what?", "images": "a.png"}, "has 0 places for images (<image>, or parts of the type image), and its"),
    ({"prompt": "<image>", "images": ["a.png", "a.png"]}, "has 1 places for images"),
    ({"prompt": of_user(IMAGE_PART, IMAGE_PART), "images": "a.png"}, "has 2 places for images"),
    ({"prompt": of_user({"type": "video", "video": "a.mp4"}), "images": []}, "a part of the type 'video': of media"),
    ({"prompt": of_user({"type": "input_audio"}), "images": []}, "a part of the type 'input_audio': of media"),
    ({"prompt": of_user({"type": "text"}), "images": []}, "the parts of a message must be"),
    ({"prompt": of_user("text"), "images": []}, "the parts of a message must be"),
    ({"prompt": of_user(), "images": "a.png"}, "has 0 places"),
    (
        {"prompt": [{"role": "assistant", "content": "<image>"}, *of_user()], "images": "a.png"},
        "an assistant's message has an image",
    ),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_bad_rows_are_named(qwen: Bench, row: dict[str, Any], words: str) -> None:
    photo(8, 8).save(qwen.folder / "a.png")
    photo(8, 8).save(qwen.folder.parent / "outside.png")
    (qwen.folder / "link.png").symlink_to("../outside.png")
    assert words in qwen.refusal(row)


def test_a_part_without_an_image_needs_a_column(qwen: Bench) -> None:
    sentence = qwen.refusal({"prompt": of_user(IMAGE_PART)}, image_column=None)
    assert sentence == "a part of the type image has no image; set image_column to the column that has it"


def test_an_image_root_holds_all_images(qwen: Bench) -> None:
    (qwen.folder / "deep/er").mkdir(parents=True)
    photo(8, 8).save(qwen.folder / "a.png")
    row = {"prompt": "<image>", "images": "../a.png"}
    root = str(qwen.folder / "deep")
    assert "lies outside" in qwen.refusal(row, image_root=root)
    rooted = qwen.prompts([row | {"images": "deep/er/../../a.png"}], image_root=str(qwen.folder / "deep/.."))
    assert rooted[0].images == qwen.prompts([row | {"images": "a.png"}])[0].images


def test_images_of_a_hub_are_blobs_of_their_repository_and_nothing_else(qwen: Bench) -> None:
    hub = qwen.folder / "hub"
    repository, other = hub / "datasets--org--shapes", hub / "datasets--org--other"
    snapshot = repository / "snapshots/0a1b"
    for folder in (snapshot / "images", repository / "blobs/deep", other / "blobs", other / "snapshots/0a1b"):
        folder.mkdir(parents=True)
    for place in (repository / "blobs/ab", repository / "blobs/deep/ab", other / "blobs/ab", hub / "secret"):
        photo(8, 8).save(place, "png")
    (repository / "blobs/cd").symlink_to("../../secret")
    (repository / "stolen").symlink_to("../datasets--org--other/blobs")
    links = {
        "images/a.png": "../../../blobs/ab",
        "b.png": str(repository / "blobs/ab"),
        "twice.png": "images/a.png",  # through another link
        "deep.png": "../../blobs/deep/ab",
        "chain.png": "../../blobs/cd",
        "theirs.png": "../../../datasets--org--other/blobs/ab",
        "moved.png": "../../stolen/ab",
        "up.png": "../../blobs/../../secret",
        "secret.png": "../../../secret",
        "gone.png": "../../blobs/ef",
        "folder.png": "../../blobs/deep",
        "blobs": "../../blobs",
    }
    for name, target in links.items():
        (snapshot / name).symlink_to(target)

    def refused(path: str, root: Path = snapshot) -> bool:
        try:
            found = image_file(path, root).content
        except UserError as error:
            assert "lies outside of" in str(error)
            return True
        assert found == repository / "blobs/ab"
        return False

    allowed = ("images/a.png", "b.png", "images/../b.png", "./images/a.png")
    assert not any(map(refused, allowed)) and not refused("a.png", snapshot / "images")
    assert all(refused(name) for name in links.keys() - {*allowed})
    for path in ("blobs/ab", "../../blobs/ab", "images/../../../blobs/ab", str(repository / "blobs/ab"), ".."):
        assert refused(path), path
    assert refused("../b.png", snapshot / "images")  # in the snapshot, and not in the root
    copy = hub / "copy/snapshots/0a1b"  # laid out as the cache is, under another name
    copy.mkdir(parents=True)
    (hub / "copy/blobs").mkdir()
    photo(8, 8).save(hub / "copy/blobs/ab", "png")
    (copy / "a.png").symlink_to("../../blobs/ab")
    assert refused("a.png", copy)


def test_a_template_without_places_for_images_is_refused(qwen: Bench) -> None:
    photo(8, 8).save(qwen.folder / "a.png")
    qwen.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    row = {"prompt": "<image>", "images": "a.png"}
    words = "the messages have 1 images, and the tokenizer's chat template writes <|image_pad|> 0 times"
    assert words in qwen.refusal(row)
    for template in ("never", "rendered"):
        assert "has images, whose places only a chat template marks" in qwen.refusal(row, chat_template=template)


def test_a_template_of_the_processor_is_the_tokenizers(models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((models[QWEN] / name).read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'the processor says' }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ 'the processor says' }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(UserError, match=r"chat_template.json is of another form"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("the tokenizer's own")
    assert load_tokenizer(str(tmp_path)).chat_template == "the tokenizer's own"


def test_processors_that_do_not_suit(models: dict[str, Path], tmp_path: Path) -> None:
    photo(8, 8).save(tmp_path / "a.png")
    row = {"prompt": "<image>", "images": "a.png"}
    gemma = Bench(models[GEMMA], tmp_path)
    assert "chooses the size of images by itself; remove them" in gemma.refusal(row, max_pixels=64)
    qwen = Bench(models[QWEN], tmp_path)
    assert "images would have at least 700 and at most 576 pixels" in qwen.refusal(row, min_pixels=700)
    photo(40, 40).save(tmp_path / "large.png")
    for changes, words in (
        ({"merge_size": 4}, "its processor merges 4 x 4 patches, and the model 2; it belongs to another model"),
        ({"patch_size": 8}, "its processor makes (384,), and the model takes (96,); it belongs to another model"),
    ):
        other = Bench(models[QWEN], tmp_path)
        other.model = tmp_path / f"{changes}"
        shutil.copytree(models[QWEN], other.model)
        save_vision_files(other.model, **changes)
        assert words in other.refusal(row | {"images": "large.png"})
    for file in models[QWEN].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    bare = Bench(models[QWEN], tmp_path)
    bare.model = tmp_path
    whole = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for changed, words in (
        ({"patch_size": 0}, "its processor cannot take the image"),
        ({"patch_size": "a"}, "its processor cannot take the image"),
        ({"image_mean": "a"}, "mean must have 3 elements"),
        ({"image_std": [0, 0, 0]}, "that are not finite; copy the right one's files"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(whole | changed))
        assert words in bare.refusal(row)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Nothing"}')
    assert "its processor cannot be loaded" in bare.refusal(row)
    (tmp_path / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json, by which images become pixels" in bare.refusal(row)
    cfg, image = DataConfig(sources=(gemma.source([row]),), max_prompt_tokens=9), ImageFile(tmp_path / "a.png")
    assert gemma.reader(cfg).num_tokens(image) == 4
    (tmp_path / "config.json").write_bytes((models[GEMMA] / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"has no preprocessor_config.json"):  # though its images are equally large
        bare.reader(cfg).num_tokens(image)


def test_a_model_of_text_has_no_images(qwen: Bench) -> None:
    photo(8, 8).save(qwen.folder / "a.png")
    cfg = DataConfig(sources=(qwen.source([{"prompt": "<image>", "images": "a.png"}]),), max_prompt_tokens=99)
    with pytest.raises(UserError, match=r"rows.jsonl line 1: there are images, and the model reads text only"):
        make_training_stream(cfg, None, seed=0, tokenizer=qwen.tokenizer)


# Held-out prompts, pairs, and images that are put again


def test_questions_about_other_images_are_others(qwen: Bench) -> None:
    for number in range(3):
        photo(8, 8, seed=number).save(qwen.folder / f"{number}.png")
    rows = [{"prompt": "what is this? <image>", "images": f"{number % 3}.png"} for number in range(6)]
    source = qwen.source(rows)
    held_out = qwen.held_out(source, 2)
    digests = {prompt.images[0].digest for prompt in held_out}
    assert len(digests) == 2
    stream = qwen.stream(source, held_out=HeldOutConfig(sources=(source,), num_prompts=2))
    assert stream.dropped == {"held_out_rows": 4}
    assert not digests & {prompt.images[0].digest for prompt in stream.take(0, 6)}
    with pytest.raises(UserError, match="only 3 distinct questions"):
        qwen.held_out(source, 4)


def emptied(store: ImageStore) -> None:
    for file in store.folder.glob("[!.]*"):
        file.unlink()


def test_images_are_put_again(bench: Bench) -> None:
    for number in range(4):
        photo(16, 16, seed=number).save(bench.folder / f"{number}.png")
    source = bench.source([{"prompt": "<image>", "images": f"{number}.png"} for number in range(4)])
    stream = bench.stream(source)
    for prompts, restore in ((stream.take(0, 8), stream.restore), (held := bench.held_out(source, 4), held.restore)):
        prompt = prompts[1]
        before = bench.store.get(prompt.images[0].digest)
        emptied(bench.store)
        assert before is not None and bench.store.get(prompt.images[0].digest) is None
        for _ in range(2):
            restore(prompt)
            assert torch.equal(bench.store.get(prompt.images[0].digest), before)
            assert len(list(bench.store.folder.glob("[!.]*"))) == 1
        for other in prompts:
            restore(other)
    emptied(bench.store)
    for number in range(4):
        photo(16, 16, seed=9).save(bench.folder / f"{number}.png")
    with pytest.raises(UserError, match=r"the images of prompt 1 \(.*\) are not those that it had before"):
        held.restore(prompt)


def test_every_rank_has_the_same_prompts(bench: Bench, tmp_path: Path) -> None:
    """Digests are of pixels: another process, with a store of its own, finds the same."""
    photo(20, 30).save(tmp_path / "a.png")
    row = {"prompt": "<image>", "images": "a.png"}
    (tmp_path / "other").mkdir()
    other = Bench(bench.model, tmp_path / "other")
    (tmp_path / "other/a.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert bench.prompts([row]) == other.prompts([row])


def test_pairs_have_the_images_of_their_prompts(qwen: Bench) -> None:
    photo(16, 16).save(qwen.folder / "a.png")
    asked, answered = {"role": "user", "content": "<image> what?"}, {"role": "assistant", "content": "a tree"}
    rows: list[dict[str, Any]] = [{"prompt": [asked, answered, asked, answered], "images": ["a.png"] * 2}]

    def pairs(rows: list[dict[str, Any]], turns: Any) -> list[Any]:
        cfg = DataConfig(sources=(qwen.source(rows),), max_prompt_tokens=200)
        form = functools.partial(imitated, turns=turns)
        images = qwen.reader(cfg)
        return make_training_stream(cfg, None, seed=0, tokenizer=qwen.tokenizer, images=images, form=form).pairs(0, 1)

    (pair,) = pairs(rows, "last")
    assert len(pair.prompt.images) == 2 and pair.exchanges[0].response == "a tree"
    (pair,) = pairs(rows, "all")
    (shown,) = pair.prompt.images
    assert [image.digest for image in pair.images] == [shown.digest] and pair.images[0].start == 0
    rows = [{"prompt": [asked, answered, asked | {"content": "sure?"}, answered], "images": ["a.png"]}]
    (pair,) = pairs(rows, "all")
    assert len(pair.prompt.images) == 1 and [exchange.response for exchange in pair.exchanges] == ["a tree"] * 2


def test_the_tokens_of_all_turns_are_those_that_the_processor_makes_of_the_conversation(bench: Bench) -> None:
    """Only the answers are imitated, and nothing of an image."""
    for number in range(3):
        photo(16 + 8 * number, 24, seed=number).save(bench.folder / f"{number}.png")
    asked = [{"role": "user", "content": content} for content in ("<image>a?", "and<image><image>?", "no?")]
    talk = [message for one in asked for message in (one, {"role": "assistant", "content": "yes"})]
    row = {"prompt": talk, "images": ["0.png", "1.png", "2.png"]}
    cfg = DataConfig(sources=(bench.source([row]),), max_prompt_tokens=200)
    images, tokenizer = bench.reader(cfg), bench.tokenizer
    form = functools.partial(imitated, turns="all")
    (pair,) = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer, images=images, form=form).pairs(0, 1)
    assert len(pair.prompt.images) == 1 and len(pair.images) == 2
    answers = SimpleNamespace(max_response_tokens=200)
    settings = SimpleNamespace(table="sft", answers=answers, data=SimpleNamespace(chat_template="auto"))
    stops = frozenset({tokenizer.eos_token_id})
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=stops, images=images)
    sequence = PairEncoder.of(settings, inputs)(pair, 0)  # type: ignore[arg-type]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    place = images.placeholder
    kept = [image.num_tokens for image in sequence.images]
    pieces = whole.split("<image>")
    expected: list[int] = []
    for piece, number in zip(pieces, [*kept, 0], strict=True):
        expected += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if number:
            written = "<|vision_start|><|image_pad|><|vision_end|>" if bench.model.name == QWEN else place.text
            ids = tokenizer(written, add_special_tokens=False)["input_ids"]
            at = ids.index(IMAGE)
            expected += [*ids[:at], *[IMAGE] * number, *ids[at + 1 :]]
    assert list(sequence.token_ids) == expected
    places = [place for place, token in enumerate(sequence.token_ids) if token == IMAGE]
    assert [place for image in sequence.images for place in range(image.start, image.end)] == places
    trained = [token for token, on in zip(sequence.token_ids, sequence.loss_mask, strict=True) if on]
    assert tokenizer.decode(trained) == "yes<eos>" * 3
    assert [image.digest for image in sequence.images] == [
        images.span(ImageFile((bench.folder / f"{number}.png").resolve())).digest for number in range(3)
    ]


@pytest.mark.parametrize(("name", "words"), [("gone.png", "gone.png"), ("text.png", "text.png is damaged")])
def test_bad_images_behind_answers_are_named_before_the_start(qwen: Bench, name: str, words: str) -> None:
    photo(8, 8).save(qwen.folder / "a.png")
    (qwen.folder / "text.png").write_bytes(b"hello")
    turn, answer = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}
    cfg = DataConfig(
        sources=(qwen.source([{"prompt": [turn, answer] * 2, "images": ["a.png", name]}]),), max_prompt_tokens=99
    )
    with pytest.raises(UserError, match=f"rows.jsonl line 1: .*{words}"):
        make_training_stream(
            cfg,
            None,
            seed=0,
            tokenizer=qwen.tokenizer,
            images=qwen.reader(cfg),
            form=functools.partial(imitated, turns="all"),
        )
