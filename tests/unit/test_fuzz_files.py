"""Files, settings and launch environments that nobody thought of: a UserError, or what was meant, and nothing else.

Everything runs in this process, through the functions that a run calls. `make test` tries the same few inputs each
time; `make test-long` tries many, different ones.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import hashlib
import io
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import PIL.Image
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from spmdrl.checkpoint.manifest import MANIFEST, NECESSARY, BrokenManifest, Manifest, write_json
from spmdrl.checkpoint.resume import collector_state, refuse_other_state
from spmdrl.config import Config, DataConfig, FileData, read_draft
from spmdrl.config.errors import all_keys
from spmdrl.config.plan import plan_problems
from spmdrl.config.strict import parse_json
from spmdrl.cpu import linear_layers
from spmdrl.cpu.linear_layers import LinearKernels, choose_kernels
from spmdrl.data.image_store import ImageStore
from spmdrl.data.images import ImageFile, decode, size_of
from spmdrl.data.stream import make_training_stream
from spmdrl.data.tokenizer import encode_prompt, stop_token_ids
from spmdrl.data.vision import ImageReader
from spmdrl.dist.launcher import Network, launch_problems
from spmdrl.families import VisionFamily
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.lock import FolderInUse, owned
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.model.weight_files import weight_file_problems
from spmdrl.report.comparison import compare, comparison_page
from spmdrl.report.files import cut_after
from spmdrl.report.findings import checkup, findings
from spmdrl.report.run_folder import RunFolder, read_run
from spmdrl.report.series import History
from spmdrl.rollout.files import read_part, write_part
from spmdrl.tools.runs import Watcher, watch_page
from spmdrl.tools.tiny_model import character_tokenizer
from spmdrl.types import RewardOutcome, UserError
from tests.helpers.config_file import GOOD
from tests.helpers.rollouts import RECORDING, byte_tokenizer, chat_prompt, tool_episode
from tests.helpers.vision import as_file, photo, save_processor, vision_tokenizer
from tests.helpers.vision_models import IMAGE

# The wrong kinds of values, and those at the edges of the right ones.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, -(2**63), 10**40, 0.0, -0.0, 1e308, 5e-324, "", "~", "\0", "a\nb"]),
    st.sampled_from([float("nan"), float("inf"), "\ud800", "x" * 5000, [], {}, [[]], {"a": {"b": [1]}}, "/proc/1/x"]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
)
NESTED = st.recursive(
    VALUES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
)
SLICES = st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=12))  # where, how much, by what


def damaged(content: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """Replace slices of a file."""
    for where, length, put in cuts:
        start = where % (len(content) + 1)
        content = content[:start] + put + content[start + length :]
    return content


def changed(value: Any, path: list[int], put: Any) -> Any:
    """Replace, remove or add one thing inside a value of JSON; the path says where."""
    if not path or not isinstance(value, dict | list) or not value:
        return put
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and path[0] % 3 == 0:
        del copy[key]
    elif len(path) == 1 and path[0] % 3 == 1 and isinstance(copy, dict):
        copy[f"{key} too"] = put
    else:
        copy[key] = changed(value[key], path[1:], put)
    return copy


PATHS = st.lists(st.integers(0, 30), max_size=5)


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


# The checks. Each raises for anything but a UserError with words.


@contextlib.contextmanager
def refusal() -> Iterator[None]:
    """Allow a UserError, whose words any log can hold, on lines of a bounded length."""
    try:
        yield
    except (UserError, BrokenManifest) as error:
        assert str(error).strip() and len(str(error)) < 20_000
        str(error).encode("utf-8")


def toml_file(cuts: list[tuple[int, int, bytes]], overrides: list[str]) -> None:
    with a_folder() as folder, refusal():
        (folder / "c.toml").write_bytes(damaged(GOOD.encode(), cuts))
        draft = read_draft(Config, str(folder / "c.toml"), overrides)
        draft.refuse(list(plan_problems(draft.config, 2)) if not draft._mistakes else ())


@cache
def keys() -> list[str]:
    return sorted(all_keys(Config))


def as_toml(value: Any) -> str:
    return "[1979-05-27, 1.5]" if value is None else json.dumps(value)


OVERRIDES = st.lists(
    st.one_of(
        st.builds(lambda key, value: f"{key}={as_toml(value)}", st.deferred(lambda: st.sampled_from(keys())), NESTED),
        st.builds(lambda key, text: f"{key}={text}", st.deferred(lambda: st.sampled_from(keys())), st.text(max_size=9)),
        st.text(max_size=20),
    ),
    max_size=3,
)


FAMILY = VisionFamily(
    model_type="qwen2_5_vl",
    tower=("visual",),
    image_token_id=IMAGE,
    merge=2,
    pixels=(96,),
    patch_values=96,
    has_grid_positions=True,
)
ROWS = [{"prompt": "1 + 1 =", "answer": "2", "level": 3}, {"prompt": [{"role": "user", "content": "a"}], "answer": 7}]


def open_stream(kind: str, path: Path, *, template: str | None = None) -> None:
    tokenizer = tokenizer_with(template)
    cfg = DataConfig(sources=(FileData(kind=kind, path=str(path)),), max_prompt_tokens=64)
    prompts = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer).take(0, 3)
    control = {token for token, name in tokenizer.added_tokens_decoder.items() if name.special}
    control -= {tokenizer.unk_token_id}  # of any character that it does not know
    for prompt in prompts:
        assert prompt.token_ids and (template or not control & set(prompt.token_ids))


@cache
def tokenizer_with(template: str | None) -> Any:
    tokenizer = character_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


def jsonl_file(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    content = "\n".join(json.dumps(row) for row in [changed(ROWS[0], path, put), *ROWS]).encode()
    with a_folder() as folder:
        (folder / "rows.jsonl").write_bytes(damaged(content, cuts))
        with refusal():
            open_stream("jsonl", folder / "rows.jsonl", template="{{ messages[0].content }}<|assistant|>")


CELLS = st.one_of(
    st.text(max_size=9),
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.binary(max_size=5),
    st.dates(),
    st.lists(st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=4)}), max_size=2),
)
COLUMNS = st.dictionaries(st.sampled_from(["prompt", "answer", "other"]), st.lists(CELLS, min_size=1, max_size=3))
DAYS = pyarrow.array([2**31 - 1], pyarrow.date32())  # of a year that Python does not know
NOT_TEXT = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(struct.pack("ii", 0, 2)), pyarrow.py_buffer(b"\xff\xfe")]
)


def parquet_file(columns: dict[str, list[Any]], special: int, cuts: list[tuple[int, int, bytes]]) -> None:
    arrays: dict[str, Any] = {"prompt": ["a"], "answer": ["b"]}
    for name, cells in columns.items():
        with contextlib.suppress(pyarrow.ArrowException, OverflowError, TypeError, ValueError):  # of several types
            arrays[name] = pyarrow.array(cells[:1])
    if special < 2:
        arrays["other" if special else "prompt"] = (NOT_TEXT, DAYS)[special]
    with a_folder() as folder:
        pyarrow.parquet.write_table(pyarrow.table(arrays), folder / "rows.parquet")
        (folder / "rows.parquet").write_bytes(damaged((folder / "rows.parquet").read_bytes(), cuts))
        with refusal():
            open_stream("parquet", folder / "rows.parquet")


def image_files() -> list[bytes]:
    """Small pictures in each format, with and without what only some of them have."""
    pictures = [photo(9, 7), photo(9, 7, mode="RGBA"), photo(9, 7, mode="L").convert("P")]
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    files = [as_file(picture) for picture in pictures]
    files += [as_file(pictures[0], kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    files += [as_file(pictures[2], "GIF"), as_file(pictures[0], "BMP"), as_file(pictures[0], "JPEG", progressive=True)]
    frames = {"save_all": True, "append_images": [photo(9, 7, seed=1)]}
    return [*files, *(as_file(pictures[0], kind, **frames) for kind in ("PNG", "GIF", "WEBP"))]


IMAGE_FILES = image_files()


def image_file(kind: int, cuts: list[tuple[int, int, bytes]]) -> None:
    image = ImageFile(damaged(IMAGE_FILES[kind], cuts))
    with refusal():
        picture = decode(image, max_pixels=10_000)
        assert picture.mode == "RGB" and 0 < picture.width * picture.height <= 10_000
        assert size_of(image, max_pixels=10_000) == (picture.height, picture.width)


IMAGE_TEXT = f"data:image/png;base64,{base64.b64encode(IMAGE_FILES[0]).decode()}"
IMAGE_PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": IMAGE_TEXT}},
]
IMAGE_ROWS = [
    {"prompt": "<image> and <image>", "images": [IMAGE_TEXT, {"path": "a.png", "bytes": None}], "answer": "b"},
    {"prompt": [{"role": "user", "content": IMAGE_PARTS}], "images": "a.png", "answer": "b"},
]


def image_row(number: int, path: list[int], put: Any) -> None:
    with a_folder() as folder:
        (folder / "rows.jsonl").write_text(json.dumps(changed(IMAGE_ROWS[number], path, put)))
        (folder / "a.png").write_bytes(IMAGE_FILES[1])
        source = FileData(kind="jsonl", path=str(folder / "rows.jsonl"), image_column="images")
        cfg = DataConfig(sources=(source,), max_prompt_tokens=100)
        tokenizer, store = vision_tokenizer(), ImageStore(folder / "store", max_bytes=2**20)
        save_processor(folder)
        reader = ImageReader(FAMILY, str(folder), cfg, tokenizer=tokenizer, store=store)
        with refusal():
            (prompt,) = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer, images=reader).take(0, 1)
            assert prompt.token_ids.count(IMAGE) == sum(image.num_tokens for image in prompt.images)
            assert all(image.digest in store for image in prompt.images)
        store.close()


FRAGMENTS = st.sampled_from(
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ messages | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 7 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10 ** 13 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ messages.pop() }}",
        "{{ undefined.attribute }}",
        "{% set x = x + 1 %}",
        "<|user|><eos>",
        "{{ '\\ud800' }}",
    ]
)


def chat_template(fragments: list[str], content: str) -> None:
    tokenizer = tokenizer_with("".join(fragments) or None)
    with refusal():
        token_ids, text = encode_prompt(
            tokenizer, [{"role": "user", "content": content}], system_prompt=None, chat_template="auto"
        )
        assert token_ids and isinstance(text, str)


MANIFEST_CONTENT = {
    "format": 1,
    "step": 3,
    "num_ranks": 2,
    "configuration": {"run": {"name": "a"}},
    "versions": {"torch": "2"},
    "metrics": {"eval/reward": 0.5},
    "files": {name: {"num_bytes": 3, "sha256": "0" * 64} for name in NECESSARY},
}
LEARNER = {
    "optimizer": '"adamw"',
    "has_state": True,
    "loss_scale": {"scale": 1.0, "dynamic": False, "growth_interval": 200, "good_updates": 0},
    "coefficients": {"kl_coef": 0.1},
}
COLLECTOR_CONTENT = {
    "cursor": 4,
    "sampling": {"temperature": 1.0},
    "carried": [{"prompt_id": 1, "prompt_ids": {"__column__": ["i", 0, 2]}}],
}


def checkpoint_files(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    with a_folder() as folder:
        checkpoint = folder / "step-00000003"
        checkpoint.mkdir()
        content = changed(MANIFEST_CONTENT, path, put)
        if isinstance(content, dict):
            content |= {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
        for name, value in {
            MANIFEST: content,
            "state.json": changed({"learners": {"policy": LEARNER}}, path, put),
            "collector.json": changed(COLLECTOR_CONTENT, path, put),
        }.items():
            write_json(checkpoint / name, value)
            (checkpoint / name).write_bytes(damaged((checkpoint / name).read_bytes(), cuts))
        (checkpoint / "collector.columns").write_bytes(bytes(12))
        with refusal():
            manifest = Manifest.read(checkpoint)
            assert manifest.files.keys() >= set(NECESSARY) and manifest.step >= 0
        with refusal():
            refuse_other_state(folder, {}, step=3)
        with refusal():
            state = collector_state(folder, step=3)
            assert state is not None and state["cursor"] >= 0


@cache
def recorded() -> dict[str, torch.Tensor]:
    with a_folder() as folder:
        tokenizer = byte_tokenizer()
        prompt = chat_prompt(tokenizer, "Is it warm?")
        rollout = tool_episode(tokenizer, prompt, query="weather", result="mild", answer="Yes.")
        outcome = RewardOutcome(reward=1.0, parts={"exact": 1.0}, failure=None)
        write_part(folder / "rank-0.safetensors", dataclasses.replace(RECORDING, outcomes=((rollout, outcome),)))
        return {name: tensor.clone() for name, tensor in load_file(folder / "rank-0.safetensors").items()}


def recording(
    names: list[int], path: list[int], put: Any, header: dict[str, str], cuts: list[tuple[int, int, bytes]]
) -> None:
    tensors = dict(recorded())
    for number in names:
        name = sorted(tensors)[number % len(tensors)]
        tensors[name] = (tensors[name] * 0 - 1, tensors[name][:0], tensors[name].float() * 1e9)[number % 3].contiguous()
    texts = (
        changed(parse_json(tensors["texts"].to(torch.uint8).numpy().tobytes() or b"{}"), path, put)
        if not names
        else put
    )
    tensors["texts"] = torch.frombuffer(bytearray(json.dumps(texts), "utf-8"), dtype=torch.uint8)
    with a_folder() as folder:
        file = folder / "rank-0.safetensors"
        good = {"form": "2", "step": "1", "num_ranks": "1", "config": "{}", "plan": "{}"}
        save_file(tensors, file, good | header)
        file.write_bytes(damaged(file.read_bytes(), cuts))
        with refusal():
            read_part(file)


MODEL_FILES = {
    "model.safetensors.index.json": {"weight_map": {"a.weight": "model.safetensors"}, "metadata": {}},
    "generation_config.json": {"eos_token_id": [1], "temperature": 0.5},
}


def model_files(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    with a_folder() as folder:
        save_file({"a.weight": torch.zeros(1)}, folder / "model.safetensors")
        for name, content in MODEL_FILES.items():
            (folder / name).write_bytes(damaged(json.dumps(changed(content, path, put)).encode(), cuts))
        for sentence in weight_file_problems(str(folder)):
            sentence.encode("utf-8")
        with refusal():
            tokenizer = tokenizer_with(None)
            assert all(0 <= token < len(tokenizer) for token in stop_token_ids(tokenizer, str(folder)))


def run_files(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    status = {"launch": "a", "rank": 0, "num_ranks": 1, "host": "h", "pid": 1, "step": 0, "phase": "p"}
    status |= {"phases_entered": 0, "moved_at": 0.5, "beat": 0, "ended": False}
    with a_folder() as folder:
        files = FaultFiles(folder)
        files.statuses.mkdir()
        for file, content in {
            files.status_of(0): status,
            files.error: {"kind": "error", "message": "m"},
            files.requeue: {"launch": "a", "step": 1, "num_steps": 2, "given_up": False, "reason": "r", "again": True},
            folder / "machine.json": {"processor": "p", "linear_kernels": None, "layers_in_c": True},
            folder / "metrics.jsonl": {"step": 1, "loss": 0.5},
        }.items():
            file.write_bytes(damaged(json.dumps(changed(content, path, put)).encode() + b"\n", cuts))
        for one in read_statuses(files):
            assert isinstance(one.place, str) and one.rank + one.step + one.moved_at is not None
        error, requeue = read_error(files), read_requeue(files)
        assert error is None or error.exit_code in (1, 2, 3, 4, 5)
        assert requeue is None or requeue.text()
        with refusal():
            RunFolder(folder).read_machine()
        with refusal():
            assert all(isinstance(row["step"], int) for row in cut_after(folder / "metrics.jsonl", 5))


ROW = {"step": 1, "reward/mean": 0.5, "update/loss": None, "time/step_s": 1.0, "time/rollout_s": 0.5}
SAMPLE = {"step": 1, "prompt": "1 + 1 =", "response": "2", "reward": 1.0, "advantage": 0.5, "finish_reason": "stop"}


def shown_files(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    """The files that `watch`, `doctor` and `compare` read, and the names of the launches."""
    with a_folder() as folder:
        (folder / "launches").mkdir()
        for name, content in {
            "metrics.jsonl": [ROW, ROW | {"step": 2}],
            "samples.jsonl": [SAMPLE, SAMPLE],
            "plan.json": [{"num_steps": 4}],
            "launches/1.json": [{"host": "h", "pid": 1, "since": "now", "ended": ""}],
        }.items():
            rows = [changed(content[0], path, put), *content[1:]]
            written = "".join(json.dumps(row) + "\n" for row in rows).encode()
            (folder / name).write_bytes(damaged(written, cuts))
        (folder / "config.toml").write_bytes(damaged(GOOD.encode(), cuts))
        with refusal():
            page = io.StringIO()
            Console(file=page, width=100).print(watch_page(Watcher(folder).read(now=5.0), width=100))
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", page.getvalue())
        with refusal():
            run = read_run(folder)
            assert all(map(str.isprintable, checkup(run, findings(History(run.rows)))))
            comparison_page(compare([run])).encode("utf-8")
        with refusal(), contextlib.suppress(FolderInUse), owned(folder, renew_s=0.001):
            pass


def remembered_kernels(path: list[int], put: Any, cuts: list[tuple[int, int, bytes]]) -> None:
    kernels = asdict(LinearKernels("mkl", "onednn", "mkl"))
    with a_folder() as folder, mock.patch.object(linear_layers, "measure", lambda shapes: kernels):
        choose_kernels([(1, 1)], folder)
        (file,) = folder.iterdir()
        content = json.loads(file.read_bytes())
        file.write_bytes(damaged(json.dumps(changed(content, path, put)).encode(), cuts))
        assert isinstance(choose_kernels([(1, 1)], folder), LinearKernels)


NUMBERS = st.one_of(
    st.sampled_from(["0", "1", "2", "-1", "", "abc", "1.5", "0x1", "9" * 30, " 1", "٣"]), st.text(max_size=5)
)
ENVIRONMENTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"],
            NUMBERS,
        ),
        "MASTER_ADDR": st.sampled_from(["127.0.0.1", "", "nowhere"]),
        "GLOO_SOCKET_IFNAME": st.sampled_from(["lo", "eth9", "lo,eth9", ""]),
        "NCCL_SOCKET_IFNAME": st.sampled_from(["^lo", "=lo", "eth", "l", "lo,eth9"]),
    },
)


class KnownNetwork(Network):
    def resolves(self, address: str) -> bool:
        return address != "nowhere"


def launch_environment(environment: dict[str, str]) -> None:
    problems = list(launch_problems(environment, KnownNetwork(["lo"])))
    if problems:
        assert all("\n" not in sentence or repr(sentence) for sentence in problems)
        return
    rank, num_ranks = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    local, num_local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    assert 0 <= local <= rank < num_ranks and local < num_local <= num_ranks
    assert ("RANK" in environment) == ("WORLD_SIZE" in environment)
    assert "RANK" not in environment or 1 <= int(environment["MASTER_PORT"]) <= 65535


@dataclass(frozen=True)
class Fuzz:
    """A check, the inputs it gets, and how many of them `make test` tries."""

    check: Callable[..., None]
    inputs: tuple[st.SearchStrategy[Any], ...]
    few: int


CONFIGURATION = ["toml", "launch"]
ROUND = 20  # inputs of each kind
GROWTH_BYTES = 64 * 2**20  # in two thirds of the time
CUTS = st.lists(SLICES, max_size=2)
ALL = {
    "toml": Fuzz(toml_file, (CUTS, OVERRIDES), 80),
    "jsonl": Fuzz(jsonl_file, (PATHS, NESTED, CUTS), 80),
    "parquet": Fuzz(parquet_file, (COLUMNS, st.integers(0, 4), CUTS), 60),
    "image": Fuzz(image_file, (st.integers(0, len(IMAGE_FILES) - 1), CUTS), 200),
    "row with images": Fuzz(image_row, (st.integers(0, 1), PATHS, NESTED), 80),
    "chat template": Fuzz(chat_template, (st.lists(FRAGMENTS, max_size=3), st.text(max_size=9)), 60),
    "checkpoint": Fuzz(checkpoint_files, (PATHS, NESTED, CUTS), 80),
    "recording": Fuzz(
        recording,
        (
            st.lists(st.integers(0, 60), max_size=2),
            PATHS,
            NESTED,
            st.dictionaries(st.sampled_from(["form", "step", "num_ranks", "config", "plan"]), st.text(max_size=4)),
            CUTS,
        ),
        80,
    ),
    "model": Fuzz(model_files, (PATHS, NESTED, CUTS), 80),
    "run": Fuzz(run_files, (PATHS, NESTED, CUTS), 80),
    "shown": Fuzz(shown_files, (PATHS, NESTED, CUTS), 40),
    "kernels": Fuzz(remembered_kernels, (PATHS, NESTED, CUTS), 40),
    "launch": Fuzz(launch_environment, (ENVIRONMENTS,), 300),
}


def tried(fuzz: Fuzz, count: int, *, the_same: bool, start: int | None = None) -> None:
    quiet = settings(
        max_examples=count,
        derandomize=the_same,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    check = given(*fuzz.inputs)(fuzz.check)
    quiet(check if start is None else seed(start)(check))()


@pytest.mark.parametrize("name", ALL)
def test_a_few_inputs(name: str) -> None:
    tried(ALL[name], ALL[name].few, the_same=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ALL)
def test_many_inputs(name: str) -> None:
    tried(ALL[name], 25 * ALL[name].few, the_same=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "names", [CONFIGURATION, sorted(ALL.keys() - {*CONFIGURATION})], ids=["configuration", "files"]
)
def test_minutes_of_inputs_let_nothing_grow(names: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """FUZZ_SECONDS is how long, FUZZ_SEED where it starts."""
    process, start = psutil.Process(), int(os.environ.get("FUZZ_SEED", time.time_ns() // 10**9))
    begun, seconds = time.monotonic(), float(os.environ.get("FUZZ_SECONDS", "60"))
    held: list[tuple[int, int]] = []  # bytes and descriptors after each round
    while time.monotonic() < begun + seconds:
        for name in names:
            tried(ALL[name], ROUND, the_same=False, start=start + len(held))
        gc.collect()
        held.append((process.memory_info().rss, process.num_fds()))
    capsys.readouterr()
    warm, last = held[len(held) // 3], held[-1]  # caches of libraries are full by then
    with capsys.disabled():
        print(
            f"\n{len(held) * ROUND * len(names)} inputs from seed {start}; {warm[0] >> 20} to {last[0] >> 20} MiB, "
            f"{warm[1]} to {last[1]} descriptors"
        )
    assert last[1] <= warm[1]
    assert last[0] < warm[0] + GROWTH_BYTES
