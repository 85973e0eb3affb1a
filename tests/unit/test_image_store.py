"""The store of images: what goes in comes out, in any process, within its bounds; nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.data import image_store
from spmdrl.data.image_store import ImageStore, open_image_store
from spmdrl.types import UserError
from spmdrl.workers.folders import SharedFolder, sweep

GRID = (1, 4, 6)
IMAGE_BYTES = 24 * 96 * 4


def pixels(seed: int) -> Tensor:
    return torch.randn(24, 96, generator=torch.Generator().manual_seed(seed))


def names(store: ImageStore) -> list[str]:
    return [name for name in os.listdir(store.folder) if name != image_store._LOCK]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", max_bytes=2**30)


def test_pixels_come_back_to_the_last_bit(store: ImageStore) -> None:
    for made in (pixels(0), torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8).mT, torch.randn(4, 6).bfloat16()):
        digest = store.put(made, GRID)
        assert len(digest) == 32 and digest in store
        found = store.get(digest)
        assert found is not None and found.dtype == torch.float32
        assert torch.equal(found, made.float())
    assert store.get("0" * 32) is None and "0" * 32 not in store


def test_a_digest_is_of_pixels_shape_and_grid(store: ImageStore) -> None:
    image = torch.zeros(24, 96)
    digests = {store.put(*one) for one in ((image, GRID), (image, (1, 6, 4)), (image.view(96, 24), GRID))}
    assert len(digests) == 3
    assert store.put(image.clone(), GRID) in digests and len(names(store)) == 3


def test_what_is_changed_in_hand_is_not_changed_in_the_store(store: ImageStore) -> None:
    digest = store.put(pixels(0), GRID)
    found = store.get(digest)
    assert found is not None
    found.zero_()
    assert torch.equal(store.get(digest), pixels(0))


def test_images_that_were_not_used_the_longest_make_room(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store", max_bytes=4 * (IMAGE_BYTES + 100))
    digests = [store.put(pixels(seed), GRID) for seed in range(4)]
    in_hand = store.get(digests[1])
    for age, digest in enumerate(digests):
        os.utime(store.folder / digest, (age, age))
    assert store.get(digests[0]) is not None and digests[2] in store and store.put(pixels(3), GRID) == digests[3]
    store.put(pixels(4), GRID)
    assert [digest in store for digest in digests] == [True, False, True, True]
    assert torch.equal(in_hand, pixels(1))
    large = store.put(torch.zeros(1, 3, 99, 99), GRID)
    assert names(store) == [large], "an image that is larger than the store is there until the next"


def test_an_image_that_is_said_to_be_there_is_not_removed_as_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a process that looked at the ages of images just before."""
    mine, others = (ImageStore(tmp_path / "store", max_bytes=2 * (IMAGE_BYTES + 100)) for _ in range(2))
    old = mine.put(pixels(0), GRID)
    os.utime(mine.folder / old, (0, 0))
    mine.put(pixels(1), GRID)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(old in others))

    def look_and_be_slow(files: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        asking.start()
        asking.join(0.2)
        return sorted(files)

    monkeypatch.setattr(image_store, "sorted", look_and_be_slow, raising=False)
    mine.put(pixels(2), GRID)
    asking.join(60)
    assert answers == [(mine.folder / old).exists()] == [False]


def put_all(folder: Path, barrier: object, number: int) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    store = ImageStore(folder, max_bytes=12 * (IMAGE_BYTES + 100))
    for turn in range(6):
        for seed in range(20):
            made = pixels(seed)
            found = store.get(store.put(made, GRID))
            assert found is None or torch.equal(found, made), (number, turn, seed)
    barrier.wait()  # type: ignore[attr-defined]
    store.close()


def test_processes_put_the_same_images_at_once(tmp_path: Path) -> None:
    """Nobody sees half an image; the last one to leave removes the folder."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    folder = tmp_path / "store"
    processes = [context.Process(target=put_all, args=(folder, barrier, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert not folder.exists()


def test_the_folder_is_private_and_goes_with_its_last_user(tmp_path: Path) -> None:
    first, second = (ImageStore(tmp_path / "store", max_bytes=2**20) for _ in range(2))
    assert first.folder.stat().st_mode & 0o777 == 0o700
    digest = first.put(pixels(0), GRID)
    first.close()
    first.close()
    assert digest in second
    second.close()
    assert not (tmp_path / "store").exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    with pytest.raises(UserError, match=r"store cannot keep images: it belongs to another user, or is open to others"):
        ImageStore(tmp_path / "store", max_bytes=2**20)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "absent/store"):
        with pytest.raises(UserError, match="cannot keep images"):
            ImageStore(tmp_path / name, max_bytes=2**20)


def test_no_room_is_a_sentence(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_store.os, "rename", full)
    with pytest.raises(UserError, match=r"cannot take an image of 0.0 MiB: No space left on device; lower data.image"):
        store.put(pixels(0), GRID)
    assert names(store) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from spmdrl.data import image_store
image_store._SHARED_MEMORY = sys.argv[1]
store = image_store.open_image_store(Path(sys.argv[2]), max_gib=1.0)
print(store.folder, flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_runs_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a run that ends goes with it, that of one that is killed when the next one starts."""
    monkeypatch.setattr(image_store, "_SHARED_MEMORY", str(tmp_path))

    def started(run: str, end: str) -> Path:
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / run), end]
        return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120).stdout.strip())

    ended, killed = started("a", "ended"), started("b", "killed")
    assert ended.parent == killed.parent == tmp_path and not ended.exists() and killed.is_dir()
    mine = open_image_store(tmp_path / "c", max_gib=None)
    assert mine.max_bytes > 0 and mine.folder.is_dir() and not killed.exists()
    assert open_image_store(tmp_path / "c/../c", max_gib=2.0).folder == mine.folder, "ranks of a run share it"
    sweep(str(tmp_path), image_store._PREFIX)
    assert mine.folder.is_dir()


def test_a_folder_that_is_being_deleted_is_made_anew(tmp_path: Path) -> None:
    first = SharedFolder(str(tmp_path / "shared"))
    os.rmdir(tmp_path / "shared")  # as a sweep does that held it before
    second = SharedFolder(str(tmp_path / "shared"))
    first.close()
    assert (tmp_path / "shared").is_dir()
    second.close()
    assert not (tmp_path / "shared").exists()
