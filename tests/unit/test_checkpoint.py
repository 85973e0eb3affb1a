"""What is kept, what a manifest notices, which changes of the configuration matter, and what is never unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.gen.config_reference import settings
from spmdrl.checkpoint.manifest import (
    GLANCE_BYTES,
    HARMLESS,
    MANIFEST,
    NECESSARY,
    BrokenManifest,
    Digest,
    Manifest,
    changes,
    compare,
    folder_of,
    glance,
    harmless,
    newest_step,
    problems_of,
    remove,
    resolved,
    saved_steps,
    superseded,
    with_columns,
    without_columns,
    write_json,
)
from spmdrl.checkpoint.resume import preview_resume_point, unfinished
from spmdrl.checkpoint.storage import Reader
from spmdrl.config import Config, SftConfig
from spmdrl.config.model import FrozenModelConfig
from spmdrl.types import UserError
from tests.helpers.configs import minimal_config
from tests.helpers.files import flip_bit

STEPS: dict[int, float | None] = {2: 0.1, 4: 0.9, 6: None, 8: 0.9, 10: 0.5}


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({"keep_last": 1}, [2, 6, 8]),  # 4 is the first of the best
        ({"keep_last": 5}, []),
        ({"keep_last": 2, "keep_every": 6}, [2]),
        ({"keep_last": 1, "keep_every": 2}, []),
    ],
)
def test_what_is_kept(rules: dict[str, int], gone: list[int]) -> None:
    assert superseded(STEPS, **rules) == gone
    assert superseded({0: None} | STEPS, **rules) == [0, *gone]
    unmeasured = dict.fromkeys(STEPS)
    assert superseded(unmeasured, keep_last=2) == [2, 4, 6]


def a_checkpoint(folder: Path, step: int = 3) -> Path:
    """A checkpoint of the files that all have, and two more."""
    checkpoint = folder_of(folder, step)
    checkpoint.mkdir(parents=True)
    files = {name: write_json(checkpoint / name, [name] * 50) for name in ("a.json", "b.json", *NECESSARY)}
    Manifest(
        step=step, num_ranks=2, configuration={"x": 0.1}, versions={}, metrics={"eval/reward": 1 / 3}, files=files
    ).write(checkpoint)
    return checkpoint


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = Manifest.read(a_checkpoint(tmp_path))
    assert (manifest.configuration, manifest.metrics) == ({"x": 0.1}, {"eval/reward": 1 / 3})
    assert list(manifest.problems(folder_of(tmp_path, 3), manifest.files, compare)) == []


def test_every_flipped_bit_and_every_missing_byte_is_noticed(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path)
    file, manifest = checkpoint / "a.json", Manifest.read(checkpoint)
    content = file.read_bytes()

    def problems() -> list[str]:
        return list(manifest.problems(checkpoint, manifest.files, compare))

    for place in (0, len(content) // 2, len(content) - 1):
        flip_bit(file, place)
        assert problems() == ["a.json was changed after it was written"]
        file.write_bytes(content)
    file.write_bytes(content[:-1])
    assert problems() == [f"a.json is truncated: it has {len(content) - 1} of {len(content)} bytes"]
    file.unlink()
    assert problems() == ["a.json is missing"]


def test_a_glance_sees_names_sizes_and_small_files(tmp_path: Path) -> None:
    """Of a large file not the content: who only asks where a run would begin does not wait for terabytes."""
    path, content = tmp_path / "large", bytearray(GLANCE_BYTES + 1)
    path.write_bytes(content)
    written = Digest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    flip_bit(path, 5)
    assert (glance(path, written), compare(path, written)) == (
        None,
        "was changed after it was written",
    )
    for size, problem in ((-1, "is truncated"), (1, "is too long")):
        os.truncate(path, len(content) + size)
        assert problem in (glance(path, written) or "") and glance(path, written) == compare(path, written)
    small = write_json(tmp_path / "small", [1])
    flip_bit(tmp_path / "small", 1)
    assert glance(tmp_path / "small", small) == compare(tmp_path / "small", small) is not None


def test_of_many_problems_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    """A checkpoint of thousands of ranks has thousands of files."""
    checkpoint = folder_of(tmp_path, 3)
    checkpoint.mkdir()
    names = [*NECESSARY, *(f"{number:03}" for number in range(300))]
    files = {name: Digest(num_bytes=1, sha256="") for name in names}
    Manifest(step=3, num_ranks=300, configuration={}, versions={}, metrics={}, files=files).write(checkpoint)
    with pytest.raises(UserError) as caught:
        preview_resume_point(minimal_config(), tmp_path)
    first, advice = str(caught.value).splitlines()
    named = ", ".join(f"{name} is missing" for name in sorted(names)[:5])
    assert first == f"{checkpoint}: {named}, and {len(names) - 5} more"
    assert advice.startswith("no checkpoint can be loaded")


def test_a_manifest_checks_itself(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path)
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    for damaged in (content[:-9], b"", b"[]", content.replace(b"0.1", b"0.2")):
        path.write_bytes(damaged)
        with pytest.raises(BrokenManifest, match=MANIFEST):
            Manifest.read(checkpoint)
    path.unlink()
    with pytest.raises(BrokenManifest, match=r"manifest\.json is missing"):
        Manifest.read(checkpoint)


def test_only_what_has_its_last_name_counts(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        a_checkpoint(tmp_path, step)
    folder_of(tmp_path, 11).with_suffix(".unfinished").mkdir()
    (tmp_path / "step-notes").mkdir()
    (note,) = unfinished(tmp_path, 10)
    assert "step-00000011.unfinished; resuming from step 10" in note
    assert (saved_steps(tmp_path), newest_step(tmp_path)) == ([1, 2, 10], 10)
    remove(folder_of(tmp_path, 10))
    assert saved_steps(tmp_path) == [1, 2]


def test_what_has_the_name_of_a_checkpoint_counts_and_can_go(tmp_path: Path) -> None:
    """A checkpoint on storage that is not mounted is not none, and what is behind a link stays."""
    elsewhere = a_checkpoint(tmp_path / "elsewhere", 1)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    folder_of(folder, 1).symlink_to(elsewhere)
    folder_of(folder, 2).symlink_to("not-mounted")
    folder_of(folder, 3).touch()
    assert saved_steps(folder) == [1, 2, 3]
    assert problems_of(folder_of(folder, 1), compare) == []
    assert problems_of(folder_of(folder, 2), glance) == ["manifest.json is missing"]
    for step in (1, 2, 3):
        remove(folder_of(folder, step))
    assert not list(folder.iterdir()) and (elsewhere / MANIFEST).exists()


def test_columns_of_numbers_come_back_as_they_were_at_a_few_bytes_each() -> None:
    tokens, logprobs = list(range(1000)), torch.rand(1000).log().tolist()
    aside = [[0.1] * 20, [2**40] * 20, [True] * 20, [1, 2.0] * 10, [float("nan")] * 20, ["a"] * 20, [7] * 3, [], None]
    value = {"carried": [{"token_ids": tuple(tokens), "logprobs": logprobs, "deep": {"aside": aside}}], "cursor": 3}
    columns = bytearray()
    small = json.loads(json.dumps(without_columns(value, columns)))
    assert len(columns) == 8 * 1000 and len(json.dumps(small)) < 3000
    assert str(with_columns(small, bytes(columns))) == str(json.loads(json.dumps(value)))
    with pytest.raises(ValueError, match="no column at"):
        with_columns(small, bytes(columns[:-4]))


def test_changes_are_told_apart(tmp_path: Path) -> None:
    before = resolved(minimal_config())
    now = minimal_config(optim={"lr": 0.002}, run={"num_steps": 9}, parallel={"dp_shard": 2}, loss={"clip_low": 0.1})
    found = changes(before, now)
    assert [change.name for change in found] == ["loss.clip_low", "optim.lr", "parallel.dp_shard", "run.num_steps"]
    assert found[1].sentence == "optim.lr was 0.001 and is 0.002"
    assert found[0].sentence == "loss.clip_low was not set and is 0.1"
    assert [change.name for change in found if not change.is_in(harmless(now))] == ["loss.clip_low", "optim.lr"]
    assert all(change.is_in(("loss", "optim.lr", "parallel", "run")) for change in found)
    assert changes(resolved(now), now) == []


def test_the_number_of_steps_matters_to_a_schedule_that_ends_with_them() -> None:
    assert "run.num_steps" in harmless(minimal_config())
    assert "run.num_steps" not in harmless(minimal_config(optim={"schedule": "cosine"}))


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default() -> None:
    older = resolved(minimal_config())
    del older["optim"]["eps"], older["loss"]
    assert changes(older, minimal_config()) == []
    assert [change.name for change in changes(older, minimal_config(optim={"eps": 1e-6}))] == ["optim.eps"]


def test_a_run_resumes_wherever_its_reward_models_lie() -> None:
    def scored(path: str, **more: Any) -> Config:
        return minimal_config(reward={"terms": [{"kind": "exact"}, {"kind": "model", "path": path, **more}]})

    before = resolved(scored("r"))
    for name in FrozenModelConfig.model_fields:  # as an older version wrote it
        del before["reward"]["terms"][1][name]
    moved = scored("r", rests_on="device", parallel={"ep": 2})
    assert changes(before, scored("r")) == changes(before, moved) == changes(resolved(moved), scored("r")) == []
    assert [change.name for change in changes(before, scored("another"))] == ["reward.terms"]
    taught = minimal_config(models={"t": {"path": "t", "rests_on": "device"}}, distill={"teacher": "t"})
    (found,) = changes(resolved(minimal_config(models={"t": {"path": "t"}}, distill={"teacher": "t"})), taught)
    assert found.name == "models.t.rests_on" and found.is_in(harmless(taught))


def test_every_harmless_setting_exists() -> None:
    known = [name for kind in (Config, SftConfig) for name, _ in settings(kind)]
    for name in HARMLESS:
        assert any(setting == name or setting.startswith(f"{name}.") for setting in known), name


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("the checkpoint ran this",))


def test_the_table_of_tensors_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        Reader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps([torch.float32, torch.Size([1]), torch.nn.Linear]))
    with pytest.raises(pickle.UnpicklingError, match=r"torch\.nn"):
        Reader(tmp_path).read_metadata()
    assert capsys.readouterr().out == ""


def test_digests_are_of_the_whole_file(tmp_path: Path) -> None:
    assert write_json(tmp_path / "x", {}) == Digest(
        num_bytes=2, sha256="44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )
