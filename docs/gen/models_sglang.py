"""Ask SGLang about a model of each type that is trained: `python -m docs.gen.models_sglang [NAME ...] [OPTION ...]`.

Writes docs/gen/models-sglang.json, from which docs/models.md takes its column "engine tested": the row of SGLang of
`spmdrl model`, with the commit and the versions that gave it; NAMEs are added to a record of the same. With `--device
cuda` that is docs/gen/models-sglang-cuda.json. SGLang finds its class by the type, so a type's first model with
released settings speaks for those that are not asked about. Every model is asked about in a process group of its own,
which ends with the answer or at its limit of time; what it wrote, where the answer is not yes, is in a log beside the
answers.

On a CPU it computes in float32, and engines start as those of the tests do, in processes that are forked from one which
has imported SGLang: two seconds each in the place of twenty. With `--device cuda` SGLang computes in float32 too, with
its own torch code in the place of kernels that take 16 bits alone, and with Triton's in full precision; a model with
gated delta nets, whose kernels take 16 bits alone, is asked about in bfloat16, with all of SGLang's kernels, and so, in
the end, is one that did not compute in float32. Remarks say which of the two it was.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.commit import ROOT, commit_id
from spmdrl import __version__
from spmdrl.dist.launcher import free_port
from spmdrl.engine.protocol import EngineDied
from spmdrl.families import FAMILIES, ModelFamily
from spmdrl.tools.model_source import released

RESULTS = Path("docs/gen/models.json")
RECORDS = {"cpu": Path("docs/gen/models-sglang.json"), "cuda": Path("docs/gen/models-sglang-cuda.json")}
# Those that only a device can answer for, or where the answer matters most, before the others.
_FIRST = (
    *("nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "gemma4_text", "gemma4", "ministral3", "phi", "phi3"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "gpt_oss", "qwen3_moe", "deepseek_v3", "deepseek_v2", "mixtral"),
    *("exaone4", "gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "gemma2", "glm4_moe_lite", "minimax_m2"),
    *("granitemoe", "ernie4_5_moe", "starcoder2", "cohere2", "longcat_flash", "mimo_v2_flash", "apertus"),
)
# Refusals that `--untried` leaves out, besides those of a type.
_UNTRIED = re.compile("layout in SGLang is not known here|no kernels on a CPU|SGLang knows only models in which")
_PACKAGES = ("sglang", "transformers", "torch")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|OutOfResources)\b.*", re.MULTILINE)  # the end of a traceback
_MISMATCH = "the engine does not hold"  # the trainer's weights
_MOST_CHARACTERS, _LAST_LINES = 200, 40
_POLL_S = 0.1
# Of SGLang on a device in float32: torch's code for its own operators, and no TF32 in Triton's products.
_IN_FLOAT32 = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "TRITON_F32_DEFAULT": "ieee",
    "NVIDIA_TF32_OVERRIDE": "0",
}

Answer = list[str]


@dataclass(frozen=True, slots=True)
class Asking:
    """How to ask about a model."""

    name: str
    folder: str  # where its process leaves the answer and what it wrote
    device: str = "cpu"
    dtype: str = "float32"
    untried: bool = False
    slot: int = 0  # among those that are asked about at once

    def file(self, kind: str) -> Path:
        """Return its own file of this kind."""
        return Path(self.folder, f"{self.name}-{self.dtype}.{kind}")


def names() -> list[str]:
    """Name the first trained model of each type."""
    first: dict[str, str] = {}
    for name, answers in json.loads(RESULTS.read_text(encoding="utf-8"))["models"].items():
        if answers.get("packed", ("",))[0] == "yes":
            first.setdefault(released()[name]["config"]["model_type"], name)
    return list(first.values())


def in_order(asked: Sequence[str]) -> list[str]:
    """Sort models by what their answers are worth on a device."""
    place = {kind: number for number, kind in enumerate(_FIRST)}
    return sorted(asked, key=lambda name: place.get(released()[name]["config"]["model_type"], len(place)))


# In the process of one model.


def ask(asking: Asking) -> None:
    """Leave SGLang's answer about a model in its file; run in a process of its own."""
    os.setsid()
    log = os.open(asking.file("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: f"{value}" for name, value in place.items()} | {"MASTER_PORT": f"{free_port()}"}
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if asking.device == "cpu":
            from tests.helpers.engine_ranks import with_spares

            found = with_spares(answer_of, asking)
        else:
            os.environ |= _IN_FLOAT32 if asking.dtype == "float32" else {}
            found = answer_of(asking)
    except BaseException as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        found = ["no", said, traceback.format_exc()]
    asking.file("json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a process that used FSDP2 may abort when it exits by itself


def answer_of(asking: Asking) -> Answer:
    """Give the answer and the remark of SGLang's row."""
    from spmdrl.engine.sglang import options, process
    from spmdrl.tools import model_rows
    from spmdrl.tools.model import answers, quiet
    from spmdrl.tools.model_source import source_of

    quiet(on_cpu=asking.device == "cpu")
    torch.set_num_threads(1)
    problems, ports = model_rows.SGLangEngine.problems, options._free_port

    def untried(*arguments: Any, **settings: Any) -> Iterator[str]:
        return (text for text in problems(*arguments, **settings) if not _UNTRIED.search(text))

    class Noted(EngineDied):
        def __init__(self, text: str) -> None:
            traceback.print_exc()
            super().__init__(text)

    with (
        tempfile.TemporaryDirectory(prefix="model-") as folder,
        patch.object(process, "EngineDied", Noted),
        patch.object(model_rows.SGLangEngine, "problems", untried) if asking.untried else nullcontext(),
        patch.object(options, "_family_problem", lambda *_: None) if asking.untried else nullcontext(),
        patch.object(options, "_free_port", lambda _: ports(asking.slot)),
        patch.object(options, "check_orphans", lambda: None),  # the others that are asked about
    ):
        question = (model_rows.SGLANG,)
        (verdict,) = answers(source_of(asking.name), Path(folder), question, dtype=asking.dtype)
        return [verdict.answer, verdict.remark.replace(f"{folder}/", "")]


# In the process that asks about all.


def answers_of(
    asked: Sequence[str], *, device: str = "cpu", at_once: int = 1, limit_s: float = 250.0, untried: bool = False
) -> Generator[tuple[str, Answer, str], None, None]:
    """Yield the name of each model, its answer, and what its processes wrote, as they come; the remark of a failure is
    what SGLang raised. On a device, those that fail to compute in float32 come again, at the end, in bfloat16."""
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        waiting = [Asking(name, folder, device, _dtype_of(name, device), untried) for name in reversed(asked)]
        again: list[Asking] = []
        running: dict[int, tuple[Any, Asking, float]] = {}  # by slot
        try:
            while waiting or running or again:
                if not waiting and again:
                    waiting, again = again[::-1], []
                while waiting and (free := sorted(set(range(at_once)) - running.keys())):
                    asking = replace(waiting.pop(), slot=free[0])
                    running[free[0]] = (_started(asking), asking, time.monotonic() + limit_s)
                time.sleep(_POLL_S)
                for slot, (process, asking, end) in list(running.items()):
                    if process.is_alive() and time.monotonic() < end:
                        continue
                    _end(process)
                    del running[slot]
                    answer, log, is_final = _found(asking, limit_s)
                    yield asking.name, answer, log
                    if device == "cuda" and asking.dtype == "float32" and not is_final:
                        again.append(replace(asking, dtype="bfloat16"))
        finally:
            for process, _, _ in running.values():
                _end(process)


def _dtype_of(name: str, device: str) -> str:
    """Return the dtype in which a model is asked about first."""
    has_delta_nets = FAMILIES.get(released()[name]["config"]["model_type"], ModelFamily()).delta_net is not None
    return "bfloat16" if device == "cuda" and has_delta_nets else "float32"


def _started(asking: Asking) -> Any:
    """Start the process of a model: on a CPU from a server that has imported SGLang."""
    server: Any = forkserver._forkserver
    if asking.device == "cpu":
        from tests.helpers import engine_ranks

        server = engine_ranks._SERVER
    else:
        server.set_forkserver_preload(["spmdrl.tools.model"])
    with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process = multiprocessing.get_context("forkserver").Process(target=ask, args=(asking,))
        process.start()
    return process


def _end(process: Any) -> None:
    """End a process and those that it has started."""
    for end in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has not made its group yet
            end()
    process.join()


def _found(asking: Asking, limit_s: float) -> tuple[Answer, str, bool]:
    """Return the answer, what was written, and False when SGLang failed before it computed anything."""
    log = asking.file("log").read_text(encoding="utf-8", errors="replace") if asking.file("log").exists() else ""
    if not asking.file("json").exists():
        return ["failed", f"no answer within {limit_s:g} s, or its process died"], log, False
    answer, remark, *trace = json.loads(asking.file("json").read_text(encoding="utf-8"))
    has_computed = " nats" in remark
    is_final = has_computed or (answer == "refused" and "did not start" not in remark)
    if not is_final:
        answer = "failed"  # which says nothing of what the model would compute
        if raised := _RAISED.findall(log):
            remark = f"SGLang: {raised[-1]}{f'; {remark}' if _MISMATCH in remark else ''}"
    if len(remark) > _MOST_CHARACTERS:
        remark = f"{remark[:_MOST_CHARACTERS]}..."
    return [answer, remark], "\n".join([log, *trace]), is_final


def main(argv: Sequence[str] | None = None) -> None:
    """Ask about these models, or about one of each type, and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="adds to a record; without any, a model of each type")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="models that are asked about at a time")
    parser.add_argument("--untried", action="store_true", help="also types that are refused")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the record; unset, that of the device in docs/gen")
    parser.add_argument("--note", default="", metavar="TEXT", help="what else a reader of the answers should know")
    parser.add_argument("--limit-s", type=float, default=250.0, metavar="S", help="of one model")
    parser.add_argument("--budget-s", type=float, default=1e9, metavar="S", help="of all; what runs then is ended")
    given = parser.parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no device here; leave it out")
    end = time.monotonic() + given.budget_s
    out: Path = given.out or RECORDS[given.device]
    source = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "CPU",
        "versions": {"spmdrl": __version__} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": commit_id(ROOT, ROOT / "bundle" / "commit.json"),
        "untried": given.untried,
    }
    adds = bool(given.names) and out.exists()
    earlier: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if adds else {}
    if adds and (other := [key for key in source if earlier.get(key, False) != source[key]]):
        parser.error(f"{out} has answers of another {', '.join(other)}; leave NAME out, or set another --out")
    found: dict[str, Any] = earlier.get("models", {})
    note = "; ".join(text for text in (earlier.get("note"), given.note) if text)
    head = {"date": f"{datetime.date.today()}"} | source | {"note": note}
    asked, seconds = given.names or names(), time.monotonic()
    if given.device == "cuda":
        asked = in_order(asked)
    logs = out.with_suffix(".log")
    logs.write_text("", encoding="utf-8")
    reached: set[str] = set()
    left = dict.fromkeys([*earlier.get("not reached", ()), *asked])

    def write() -> None:
        ordered = {name: found[name] for name in released() if name in found}
        results = head | {"not reached": [name for name in left if name not in found], "models": ordered}
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    limits = {"limit_s": given.limit_s, "at_once": given.at_once}
    asking = answers_of(asked, device=given.device, untried=given.untried, **limits)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, end - time.monotonic()))
    try:
        for name, answer, log in asking:
            found[name] = answer
            reached.add(name)
            print(f"{time.monotonic() - seconds:5.0f} s", name, *answer, flush=True)
            if answer[0] != "yes":
                with logs.open("a", encoding="utf-8") as file:
                    last = "\n".join(log.strip().splitlines()[-_LAST_LINES:])
                    file.write(f"==== {name}: {' '.join(answer)}\n{last}\n\n")
            write()
    except TimeoutError:
        print("ended early", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        asking.close()
        write()
    print(f"{len(reached)} models were asked about, {len(asked) - len(reached)} were not reached", flush=True)


def _stop(*_: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main(sys.argv[1:])
