"""Names on a hub: offline they come from the cache, and a download fills it once, from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spmdrl.preflight import hub as hub_module
from spmdrl.preflight.hub import damages, data_file, model_folder, with_training_file
from spmdrl.sft import main
from spmdrl.tools import fit, parity
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.types import UserError
from tests.helpers.small_run import write_sft_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL, DATA = "hf:someone/tiny@v1", "hf:someone/sums@v1:train.jsonl"


class Hub(ThreadingHTTPServer):
    """Two repositories at one commit, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    """The hub's answers as huggingface_hub needs them."""

    server: Hub

    def do_GET(self) -> None:
        """Answer about a repository, or with a file."""
        self.server.asked.append(self.path)
        place = self.path.lstrip("/").split("?")[0]
        kind, _, rest = place.partition("/")
        parts = rest.split("/")  # models/someone/tiny/revision/v1, or .../tree/COMMIT
        if kind == "api" and len(parts) == 5:
            name, files = parts[2], sorted((self.server.folder / parts[2]).iterdir())
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
            told = tree if parts[3] == "tree" else {"id": f"someone/{name}", "sha": COMMIT, "siblings": []}
            self.answer(json.dumps(told).encode(), {"Content-Type": "application/json"})
            return
        if "/resolve/" not in place:
            self.send_error(404)
            return
        name, _, file = place.removeprefix("datasets/").removeprefix("someone/").partition("/resolve/")
        content = (self.server.folder / name / file.partition("/")[2]).read_bytes()
        self.answer(content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, content: bytes, headers: dict[str, str]) -> None:
        """Send the content, or only its size."""
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    save_tiny_model(folder / "tiny", num_layers=1)
    (folder / "tiny" / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "tiny" / "modeling.py").write_text("raise SystemExit")
    (folder / "sums").mkdir()
    sums = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)]
    (folder / "sums" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    server = Hub(folder)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


LOCATE = """
import sys
from spmdrl.config import SftConfig, read_config
from spmdrl.preflight.hub import located
cfg, problems = located(read_config(SftConfig, "c.toml", sys.argv[1:]))
print("\\n".join(problems or [cfg.model.path, cfg.data.sources[0].path]))
"""


@pytest.mark.slow
def test_the_cache_is_filled_once_and_only_when_told_to(hub: Hub, tmp_path: Path) -> None:
    source = {"kind": "jsonl", "path": DATA}
    pairs = {"sequences_per_step": 1, "max_response_tokens": 8}
    write_sft_config(tmp_path, model={"path": MODEL}, data={"sources": [source]}, sft=pairs)
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    environment = {**os.environ, **environment, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}

    def located(*overrides: str) -> list[str]:
        command = [sys.executable, "-c", LOCATE, *overrides]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    words = "it is not in the cache; set run.download = true to fetch it once"
    assert located() == [f'model.path = "{MODEL}": {words}', f'data.sources.0.path = "{DATA}": {words}']
    assert not hub.asked

    model, data = map(Path, located("run.download=true"))
    assert model.name == COMMIT and data.parent.name == COMMIT  # so that a run writes down which one it used
    assert {file.name for file in model.iterdir()} == {
        file.name for file in (hub.folder / "tiny").iterdir() if file.suffix not in (".bin", ".py")
    }
    assert data.read_bytes() == (hub.folder / "sums" / "train.jsonl").read_bytes()

    hub.asked.clear()
    assert located() == [str(model), str(data)]
    assert not hub.asked

    os.truncate(model / "model.safetensors", 1000)
    (model / "config.json").write_bytes(b"")
    data.write_bytes(b"")
    assert [line.count(" is damaged: ") for line in located()] == [2, 1]
    assert located("run.download=true") == [str(model), str(data)]
    for file in model.iterdir():
        assert file.read_bytes() == (hub.folder / "tiny" / file.name).read_bytes()
    assert data.read_bytes() == (hub.folder / "sums" / "train.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", b"", "it is no safetensors"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}" + bytes(9), "its 19 bytes are not as many as its head says"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "it is no safetensors"),
        ("config.json", b"", "it is no json"),
        ("config.json", b'{"a', "it is no json"),
        ("tokenizer.json", b"\xff" * 9, "it is no json"),
        ("train.parquet", b"PAR1", ""),
        ("train.parquet", b"PAR1 and half", "it does not end as parquet does"),
        ("train.jsonl", b"", "it is empty"),
        ("merges.txt", b"", ""),
        ("config.json", None, "No such file or directory"),
    ],
)
def test_what_is_damaged_is_seen_by_its_form(name: str, content: bytes | None, why: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    assert damages(tmp_path) == {}
    file = tmp_path / name
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere") if content is None else file.write_bytes(content)
    assert damages(tmp_path) == ({file: why} if why else {})


def test_a_run_is_told_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sft_config(tmp_path, sft={"sequences_per_step": 1, "max_response_tokens": 8})
    assert main([str(tmp_path / "c.toml"), "model.path=hf:nobody/nothing", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        'cannot start: on the command line: model.path = "hf:nobody/nothing": it is not in the cache'
    )


@pytest.mark.parametrize("tool", [fit, parity])
def test_tools_read_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: Any) -> None:
    write_sft_config(tmp_path, sft={"sequences_per_step": 1, "max_response_tokens": 8})
    ranks = ["--ranks", "1", *(["--gpu-gib", "80"] if tool is fit else [])]
    assert tool.main([str(tmp_path / "c.toml"), "model.path=hf:nobody/nothing", *ranks]) == 2
    words = "it is not in the cache; set run.download = true to fetch it once"
    assert f'model.path = "hf:nobody/nothing": {words}' in capsys.readouterr().err


@pytest.mark.slow
def test_a_configuration_is_written_for_names_and_planned_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    environment = {**os.environ, **environment, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}

    def spmdrl(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "spmdrl.tools.command", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    init = ("init", "--model", MODEL, "--data", DATA.rpartition(":")[0], "--reward", "exact", "--gpus", "0")
    code, said = spmdrl(*init)
    assert code == 2 and f"--model {MODEL}: it is not in the cache; add --download to fetch it once" in said
    code, said = spmdrl(*init, "--download")
    assert code == 0, said
    tables = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert (tables["model"]["path"], tables["data"]["sources"][0]["path"]) == (MODEL, DATA)
    hub.asked.clear()
    code, said = spmdrl(*init, "--out", "again.toml")  # the file is found in the cache as well
    assert code == 0 and not hub.asked, said
    assert (tmp_path / "again.toml").read_text().count(f'path = "{DATA}"') == 1
    code, said = spmdrl("plan", "mine.toml", "--ranks", "2", "--gpu-gib", "80", "run.download=false")
    assert code == 0 and "million parameters" in said and not hub.asked, said


@pytest.mark.parametrize(
    "files, found",
    [
        (["README.md", "data/train.parquet", "data/test.parquet"], "data/train.parquet"),
        (["main/train.parquet", "main/test.parquet", "socratic/train.parquet"], "main/train.parquet"),
        (["rows.jsonl"], "rows.jsonl"),
        (["a/train.jsonl", "b/train.jsonl"], "name its file: hf:a/b:FILE; one of a/train.jsonl, b/train.jsonl"),
        (
            ["data/test.parquet"],
            "it has no file of the split train; name its file: hf:a/b:FILE; one of data/test.parquet",
        ),
        (["README.md"], "name its file: hf:a/b:FILE; none of jsonl or parquet is there"),
    ],
)
def test_the_file_of_training_data_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], found: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(hub_module, "_asked", lambda *_, **__: str(tmp_path))
    try:
        said = with_training_file("hf:a/b", False).removeprefix("hf:a/b:")
    except UserError as error:
        said = str(error)
    assert said == found


@pytest.mark.parametrize("name", ["hf:tiny", "hf:a/b/c", "hf:a/b@", "hf:a/b@v1:file"])
def test_names_of_another_form_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="has the form hf:ORGANISATION/NAME@REVISION"):
        model_folder(name, False)
    with pytest.raises(UserError, match="has the form hf:ORGANISATION/NAME@REVISION:FILE"):
        data_file(name.partition("@v1:")[0], False)
