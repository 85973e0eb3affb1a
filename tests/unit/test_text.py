"""Whatever text comes from outside, it is shown as plain text, and numbers from outside are ones that can be summed."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy
import pytest

from spmdrl.envs.protocol import EnvironmentFailure
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import Heartbeat
from spmdrl.faults.text import (
    MAX_LINE_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    OUTPUT,
    Parser,
    lines,
    one_line,
    printable,
    say,
    tolerates_lost_output,
)
from spmdrl.faults.verdict import ErrorReport
from spmdrl.faults.watch import Watch
from spmdrl.report.console import PlainLines, Progress, open_display
from spmdrl.report.files import StepRowsFile, read_rows, read_scalars
from spmdrl.tools import command
from spmdrl.tools.program import ToolConsole, ignored_interrupts, program
from spmdrl.types import UserError
from spmdrl.workers.channel import MAX_SIZE, bounded

EVERYTHING = "".join(map(chr, range(sys.maxunicode + 1)))
HOSTILE = "\x1b[2J\x9b31m\u202ereward\r\0\ud800\nstep 99/1  reward 1e6\u2028"


def test_plain_text_is_left_as_it_is() -> None:
    for text in ("", "a reason", "数学 ½ é", "x" * MAX_LINE_CHARACTERS):
        assert one_line(text) == lines(text) == printable(text) == text
    assert lines("a\nb\n") == "a\nb\n"
    assert one_line("a\nb") == "a\\nb"


def test_every_character_there_is_becomes_printable() -> None:
    for start in range(0, len(EVERYTHING), MAX_TEXT_CHARACTERS):
        part = EVERYTHING[start : start + MAX_TEXT_CHARACTERS]
        assert one_line(part).isprintable() and len(one_line(part)) <= MAX_LINE_CHARACTERS
        assert printable(part).replace("\n", "").isprintable()
        assert len(lines(part)) <= MAX_TEXT_CHARACTERS
        printable(part).encode()


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    shown = one_line("ValueError: " + "x" * 10**6 + " in column 5")
    assert shown.startswith("ValueError: x") and shown.endswith(" in column 5") and " [...] " in shown
    assert lines("x" * 10**6 + "ValueError").endswith("ValueError")


def test_failures_of_environments_are_plain_from_their_birth() -> None:
    failure = EnvironmentFailure(kind="error", reason=HOSTILE, traceback=HOSTILE)
    assert failure.reason == one_line(HOSTILE) and failure.traceback == lines(HOSTILE)
    assert failure.reason.isprintable()


def test_the_log_takes_what_the_console_takes(tmp_path: Path) -> None:
    stream = io.StringIO()
    PlainLines(Progress(num_steps=1, start_step=0), stream).message(HOSTILE)
    heartbeat = Heartbeat(FaultFiles(tmp_path), launch="l", rank=0, num_ranks=1)
    heartbeat.note(HOSTILE)
    heartbeat.log.close()
    for shown in (stream.getvalue(), FaultFiles(tmp_path).log_of(0).read_text(encoding="utf-8")):
        assert shown.replace("\n", "").isprintable()
        assert "\\x1b[2J\\x9b31m\\u202ereward\\r\\x00\\ud800\n" in shown


def test_the_report_of_a_failure_is_plain() -> None:
    for kind, traceback in (("user", ""), ("error", HOSTILE), ("error", "")):
        report = ErrorReport(
            launch="l", kind=kind, rank=0, num_ranks=1, host="h", pid=1, step=1, phase="p", message=HOSTILE,
            traceback=traceback, hints=[HOSTILE],
        )  # fmt: skip
        assert report.text().replace("\n", "").isprintable()


def test_an_output_that_takes_no_more_is_one_sentence_once(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        with pytest.raises(OSError, match=OUTPUT):
            say(HOSTILE, full)
        say("nobody reads this", full)
    with open("/dev/full", "w", encoding="utf-8") as full:
        display = PlainLines(Progress(num_steps=1, start_step=0), full)
        display.message("the first line")
        display.message("the second")
    say(HOSTILE)
    printed = capsys.readouterr()
    assert printed.err == "nothing more is printed (No space left on device); the run continues: see metrics.jsonl\n"
    assert printed.out.replace("\n", "").isprintable()


@program("cannot show")
def printing(argv: Sequence[str] | None = None) -> None:
    say("a line")


def test_a_tool_whose_output_takes_no_more_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for name, code, sentence in (
        ("/dev/full", 2, "cannot show: the output: No space left on device\n"),
        (writer, 0, ""),  # who read it has seen enough
    ):
        with monkeypatch.context() as patch, open(name, "w", encoding="utf-8") as stream:
            patch.setattr(sys, "stdout", stream)
            assert printing([]) == code
        assert capsys.readouterr().err == sentence


def test_ctrl_c_ends_a_tool_without_words(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    assert program("cannot wait")(interrupted)([]) == 130
    monkeypatch.setattr(command.importlib, "import_module", interrupted)  # it comes while torch is imported
    assert command.main(["evaluate", "run"]) == 130
    with ignored_interrupts():  # a process that starts here never hears of it, as its forks do not
        child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
    assert child.wait() == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr() == ("", "")


@program("cannot watch")
def watched(argv: Sequence[str] | None = None) -> None:
    ToolConsole().print("a line")


@tolerates_lost_output
def plain(argv: Sequence[str] | None = None) -> int:
    say("a line")
    return 1


@pytest.mark.parametrize("main", [Parser(prog="x").parse_args, plain, watched])
def test_whatever_prints_ends_alike_where_nothing_takes_it(
    main: Callable[[Sequence[str]], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for name, code in (("/dev/full", 2), (writer, 0)):
        with monkeypatch.context() as patch, open(name, "w", encoding="utf-8") as stream:
            patch.setattr(sys, "stdout", stream)
            try:
                ended = main(["--help"])
            except SystemExit as error:
                ended = error.code
            assert ended == code
        said = capsys.readouterr().err
        assert said.endswith(": No space left on device\n") and said.count("\n") == 1 if code else not said


def test_where_standard_error_is_gone_nothing_is_lost_but_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        say("the last words", sys.stderr)


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_run_goes_on_when_its_terminal_is_closed(
    mode: Literal["live", "plain"], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        display = open_display(mode, Progress(num_steps=2, start_step=0), title="run")
        os.close(ours)
        for step in (1, 2):
            display.end_step(step, {"reward/mean": 0.5})
            display.message("a line")
        sys.stderr.write("from a library")
        display.close()


def test_a_stop_file_may_hold_anything(tmp_path: Path) -> None:
    watch = Watch(FaultFiles(tmp_path), launch="l", rank=0, num_ranks=1)
    FaultFiles(tmp_path).stop.write_bytes(b"\xff\x1b[2J\nplease")
    watch._read_files()
    request = watch.stop_request()
    assert request is not None and request.reason == "\\xff\\x1b[2J\\nplease"


def test_the_names_of_an_evaluation_are_one_line_each() -> None:
    stream = io.StringIO()
    scalars = {f"eval/accuracy_{HOSTILE}": 1.0, "eval/accuracy_sums": 0.5}
    PlainLines(Progress(num_steps=1, start_step=0), stream).end_eval(1, scalars)
    assert stream.getvalue().count("\n") == 1 and "sums" in stream.getvalue()


def test_rows_hold_any_text_and_files_only_plain_text(tmp_path: Path) -> None:
    row = {"step": 1, "response": EVERYTHING[:3000] + HOSTILE, "\x1b[2J": 1}
    file = StepRowsFile(tmp_path / "rows", start_step=-1)
    file.write(1, [row])
    assert (tmp_path / "rows").read_text(encoding="utf-8").replace("\n", "").isprintable()
    assert read_rows(tmp_path / "rows") == [row] == [json.loads((tmp_path / "rows").read_bytes())]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, 1e39, -1e308, math.nextafter(MAX_SIZE, math.inf)]
)
def test_numbers_out_of_bounds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="the reward is "):
        bounded("the reward", value)


def test_sums_of_squares_within_bounds_are_finite_in_float32() -> None:
    assert bounded("the reward", -MAX_SIZE) == -MAX_SIZE
    square = numpy.float32(bounded("the reward", MAX_SIZE)) ** 2
    assert numpy.isfinite(square * numpy.float32(1e14))


@pytest.mark.parametrize("row", [{"step": 10**40}, {"step": -1}, {"step": 1, "update/loss": 10**400}])
def test_numbers_that_no_run_writes_are_refused_where_rows_are_read(row: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_scalars(tmp_path / "metrics.jsonl")
