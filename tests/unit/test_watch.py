"""spmdrl watch: what a terminal shows of a run that begins, goes on, falls silent, fails, ends and is resumed."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import ErrorReport, claim
from spmdrl.report.files import read_rows
from spmdrl.tools import runs
from spmdrl.tools.runs import SILENT_S, Snapshot, Watcher, watch_page
from tests.helpers.recorded import as_if_running, beat
from tests.helpers.terminal import Terminal

GIVEN_BACK = b"\x1b[?25h\x1b[?1049l"  # its cursor, and its own screen
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp\r\n[bold red]"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return as_if_running(tmp_path)


def shown(snapshot: Snapshot, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(watch_page(snapshot, width=width))
    return out.getvalue()


def add_row(run: Path, row: object) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_terminal_shows_the_run_as_it_goes_on_and_is_given_back(run: Path) -> None:
    with Terminal("spmdrl.tools.command", ["watch", str(run), "--every", "0.1"]) as terminal:
        page = terminal.wait_for(lambda text: "step 60/120" in text and "samples of step 60" in text)
        for words in ("running", "reward", "0.475", "entropy, nats", "▸ update", "rank 1  node-0  step 61, update"):
            assert words in page
        beat(run)
        add_row(run, {"step": 61, "reward/mean": 0.987, "time/step_s": 1.0, "time/update_s": 0.5})
        terminal.wait_for(lambda text: "step 61/120" in text and "0.987" in text)
        assert terminal.interrupt() == 0
        assert terminal.written.endswith(GIVEN_BACK)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "later")
    snapshot = watcher.read(now=time.time())
    assert (snapshot.has_started, snapshot.state) == (False, "not begun") and "not begun" in shown(snapshot)
    run = as_if_running(tmp_path)
    run.rename(tmp_path / "later")
    snapshot = watcher.read(now=time.time())
    assert (snapshot.state, snapshot.num_steps, len(snapshot.rows)) == ("running", 120, 61)


def test_it_shows_what_the_run_wrote(run: Path) -> None:
    snapshot = Watcher(run).read(now=time.time())
    progress = snapshot.progress()
    rows = read_rows(run / "metrics.jsonl")
    assert progress.step == 60 and progress.num_steps == 120
    assert progress.elapsed_s() == pytest.approx(sum(row.get("time/step_s", 0.0) for row in rows))
    history = {one.name: values for one, values in progress.history()}
    assert history["reward/mean"] == [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert progress.phase is not None and progress.phase[0] == "update"


def test_half_of_a_line_costs_nothing(run: Path) -> None:
    watcher = Watcher(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "reward/me')
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 61, "respo')
    snapshot = watcher.read(now=time.time())
    assert len(snapshot.rows) == 61 and snapshot.trouble == "" and snapshot.samples[-1]["step"] == 60


def test_a_long_prompt_is_shown_by_its_end(run: Path) -> None:
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "prompt": "a" * 60 + "b" * 30, "response": "c"}) + "\n")
    assert f"…{'a' * 29}{'b' * 30}  c" in shown(Watcher(run).read(now=time.time()))


def test_what_cannot_be_read_now_is_shown_as_it_was(run: Path) -> None:
    watcher = Watcher(run)
    before = watcher.read(now=time.time())
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step": 6\n{"step": 62}\n')
    torn = watcher.read(now=time.time())
    assert torn.rows == before.rows and "line 62 is not valid JSON" in torn.trouble and "line 62" in shown(torn, 300)
    (run / "metrics.jsonl").write_text(whole + '{"step": 61}\n')
    mended = watcher.read(now=time.time())
    assert mended.trouble == "" and len(mended.rows) == len(before.rows) + 1


def test_a_resumed_run_has_the_steps_that_it_has(run: Path) -> None:
    watcher = Watcher(run)
    watcher.read(now=time.time())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:31]))
    assert watcher.read(now=time.time()).progress().step == 30


def test_ranks_that_beat_are_alive_and_others_fall_silent(run: Path) -> None:
    watcher, now = Watcher(run), time.time()
    assert [rank.state for rank in watcher.read(now=now).ranks] == ["alive", "alive"]
    first, _ = read_statuses(FaultFiles(run))
    status = read_json(FaultFiles(run).status_of(0))
    assert status is not None
    FaultFiles(run).status_of(0).write_text(json.dumps(status | {"beat": first.beat + 1}))
    later = watcher.read(now=now + SILENT_S + 1)
    assert [rank.state for rank in later.ranks] == ["alive", "silent"]
    assert later.state == "ranks are silent" and "no beat for 0:16" in shown(later)


def test_a_run_that_died_yesterday_is_silent_at_once(run: Path) -> None:
    beat(run, at=time.time() - 86400)
    snapshot = Watcher(run).read(now=time.time())
    assert {rank.state for rank in snapshot.ranks} == {"silent"} and "no beat for 24:00:0" in shown(snapshot)


def test_the_end_of_a_run_is_told(run: Path) -> None:
    files = FaultFiles(run)
    for rank in (0, 1):
        status = read_json(files.status_of(rank))
        assert status is not None
        files.status_of(rank).write_text(json.dumps(status | {"ended": True}))
    assert Watcher(run).read(now=time.time()).state == "ended"
    report = ErrorReport(
        launch="recorded", kind="diverged", rank=0, num_ranks=2, host="node-0", pid=1, step=61, phase="update",
        message="step 61, update 61: the loss is nan; no weights were changed",
    )  # fmt: skip
    assert claim(files, report) == "first"
    page = shown(Watcher(run).read(now=time.time()))
    assert "ended: see below" in page and "training diverged: step 61, update 61: the loss is nan" in page


def test_findings_are_told(run: Path) -> None:
    add_row(run, {"step": 61, "reward/failed_count": 3.0})
    assert "rewards failed: reward/failed_count adds up to 3, in step 61 of 61" in shown(
        Watcher(run).read(now=time.time())
    )


def test_texts_of_the_policy_cannot_steer_the_terminal(run: Path) -> None:
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "prompt": HOSTILE, "response": HOSTILE, "reward": None}) + "\n")
        file.write(json.dumps({"step": HOSTILE, "prompt": "", "response": "", "reward": None}) + "\n")
    page = shown(Watcher(run).read(now=time.time()), 300)
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(page)
    assert r"\x1b[2J\x1b]0;owned\x07\u202egnp\r\n[bold red]" in page


def test_many_ranks_are_counted_and_those_that_stand_out_are_shown(run: Path) -> None:
    status = read_json(FaultFiles(run).status_of(0))
    assert status is not None
    for rank in range(64):
        FaultFiles(run).status_of(rank).write_text(json.dumps(status | {"rank": rank}))
    beat(run)
    watcher, now = Watcher(run), time.time()
    watcher.read(now=now)
    for rank in range(64):
        FaultFiles(run).status_of(rank).write_text(json.dumps(status | {"rank": rank, "beat": 12 + (rank != 37)}))
    page = shown(watcher.read(now=now + SILENT_S + 1))
    assert "63 alive, 1 silent" in page and "rank 37" in page and page.count("rank ") <= 10


def test_without_a_terminal_it_prints_one_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.watch([str(run)]) == 0
    assert "step 60/120" in capsys.readouterr().out
    assert runs.watch([str(tmp_path / "nothing"), "--once"]) == 2
    assert "holds no run; name a run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        runs.watch([str(run), "--every", "0"])
    assert refused.value.code == 2
