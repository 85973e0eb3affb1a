"""The loader finds what the memory saver's library needs, in processes that are started as SGLang starts its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from spmdrl.engine.sglang import libraries
from spmdrl.engine.sglang.process import _launch_surroundings
from tests.helpers import fake_packages
from tests.helpers.fake_packages import RUNTIME

LOADER_FAILED = 127  # the exit code of a process that the loader ends


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime that this process has loaded, and a memory saver that needs it."""
    monkeypatch.delenv(libraries.PATH_VARIABLE, raising=False)
    made = fake_packages.make_runtime(tmp_path / "nvidia/cu99/lib")
    fake_packages.make_saver(tmp_path, made)
    fake_packages.install(monkeypatch, tmp_path)
    with fake_packages.loaded(made):
        yield made


def started_by_engine(environment: Mapping[str, str]) -> int | None:
    """The exit code of a process that does nothing, started where and how SGLang starts a scheduler."""
    from torch_memory_saver import configure_subprocess

    resource_tracker.ensure_running()  # else the first start makes it, under the same conditions
    with _launch_surroundings(environment, sockets=tempfile.gettempdir()):
        multiprocessing.set_start_method("spawn", force=True)
        with configure_subprocess():
            process = multiprocessing.Process(target=time.sleep, args=(0,))
            process.start()
        process.join()
        return process.exitcode


def test_a_scheduler_starts_only_where_the_loader_is_told_of_the_runtime(
    runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert started_by_engine({}) == LOADER_FAILED
    assert f"{RUNTIME}: cannot open shared object file" in capfd.readouterr().err
    assert started_by_engine(libraries.library_path()) == 0


def library(folder: Path, name: str) -> Path:
    """A file where a runtime would be."""
    folder.mkdir(parents=True)
    (folder / name).touch()
    return folder / name


def path_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *loaded: Path) -> list[str] | None:
    """The folders that are told when this process has loaded these files and imports from `folder`."""
    maps = folder / "maps"
    maps.write_text(
        "".join(f"7f0000-7f1000 r-xp 00000000 08:01 42   {path}\n" for path in loaded) + "7f2000 rw-p [heap]\n"
    )
    monkeypatch.setattr(libraries, "_MAPS", maps)
    monkeypatch.setattr(sys, "path", [str(folder)])
    found = libraries.library_path().get("LD_LIBRARY_PATH")
    return None if found is None else found.split(os.pathsep)


def test_the_folder_of_the_loaded_runtime_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library(tmp_path / "a folder", "libcudart.so.13")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert path_with(monkeypatch, tmp_path, loaded, loaded) == [str(loaded.parent)]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before:/other")
    assert path_with(monkeypatch, tmp_path, loaded) == [str(loaded.parent), "/before", "/other"]


def test_every_major_version_that_is_loaded_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold runtimes of two versions; which of them the saver needs is the saver's affair."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    wheel = library(tmp_path / "wheel", "libcudart.so.13")
    toolkit = library(tmp_path / "toolkit", "libcudart.so.12.9.79")
    # Programs ask for libcudart.so.12, and do not find it by its long name.
    assert path_with(monkeypatch, tmp_path, wheel, toolkit) == [str(wheel.parent)]
    (toolkit.parent / "libcudart.so.12").symlink_to(toolkit.name)
    assert path_with(monkeypatch, tmp_path, wheel, toolkit) == [str(wheel.parent), str(toolkit.parent)]


def test_wheels_are_searched_where_no_runtime_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert path_with(monkeypatch, tmp_path) is None
    first = library(tmp_path / "nvidia/cu13/lib", "libcudart.so.13")
    second = library(tmp_path / "nvidia/cuda_runtime/lib", "libcudart.so.12")
    assert path_with(monkeypatch, tmp_path) == [str(first.parent), str(second.parent)]
    loaded = library(tmp_path / "elsewhere", "libcudart.so.13")
    assert path_with(monkeypatch, tmp_path, loaded) == [str(loaded.parent)]


def test_a_start_that_fails_is_told_in_the_words_of_the_loader(runtime: Path) -> None:
    assert libraries.start_problem(libraries.library_path()) is None
    problem = libraries.start_problem({})
    assert problem is not None
    assert problem.endswith(
        f"error while loading shared libraries: {RUNTIME}: cannot open shared object file: No such file or directory"
    )


def test_a_saver_without_its_library_is_told(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "saver.so").unlink()
    assert "saver.so' from LD_PRELOAD cannot be preloaded" in str(libraries.start_problem(libraries.library_path()))
