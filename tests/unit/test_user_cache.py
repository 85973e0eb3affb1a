"""The user's cache has all that outlives a run: nothing is left in the folder for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.model.machine import place_torchs_cache, users_cache


@pytest.mark.slow
def test_imports_leave_no_temporary_files_and_the_room_of_cpus_out(tmp_path: Path) -> None:
    places = {"TMPDIR": str(tmp_path / "temporary"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for place in places.values():
        os.mkdir(place)
    outside = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    imports = "import sys, spmdrl.train, spmdrl.engine.torch.engine, torch._dynamo.package"
    command = [sys.executable, "-c", f"{imports}; print('spmdrl.cpu' in sys.modules)"]
    assert subprocess.check_output(command, env=outside | places, text=True, timeout=120) == "False\n"
    assert os.listdir(tmp_path / "temporary") == []
    assert (tmp_path / "cache/spmdrl/torch").is_dir()


@pytest.mark.parametrize("there", [None, "file", "locked", "given"])
def test_a_cache_that_cannot_be_written_and_a_place_that_is_given_leave_torch_its_own(
    there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "given")
    if there != "given":
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if there == "file":
        (tmp_path / "cache").touch()
    if there == "locked":
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    place_torchs_cache()
    expected = {None: str(tmp_path / "cache/spmdrl/torch"), "given": "given"}.get(there)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == expected


def test_a_user_whom_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    assert users_cache() == Path("/.cache/spmdrl")
