"""Ask SGLang about a model of each type that is trained: `python -m docs.gen.models_sglang [NAME ...]`.

Writes docs/gen/models-sglang.json, from which docs/models.md takes its column "engine tested": the row of SGLang of
`spmdrl model`, in float32 on this machine's CPU, and the versions that gave it. SGLang finds its class by the type, so
a type's first model with released settings speaks for those that are not asked about. Engines start as those of the
tests do, in processes that are forked from one which has imported SGLang: two seconds each in the place of twenty.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from spmdrl.tools.model_source import released
from tests.helpers.engine_ranks import run_engine_ranks

RESULTS, SGLANG_RESULTS = Path("docs/gen/models.json"), Path("docs/gen/models-sglang.json")
_PACKAGES = ("spmdrl", "sglang", "transformers", "torch")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.MULTILINE)  # the last line of a traceback
_MOST_CHARACTERS = 200


def names() -> list[str]:
    """Name the first trained model of each type."""
    first: dict[str, str] = {}
    for name, answers in json.loads(RESULTS.read_text(encoding="utf-8"))["models"].items():
        if answers.get("packed", ("",))[0] == "yes":
            first.setdefault(released()[name]["config"]["model_type"], name)
    return list(first.values())


def answer_on_rank(name: str) -> tuple[str, str]:
    """Give the answer and the remark of SGLang's row."""
    from spmdrl.tools.model import answers, quiet
    from spmdrl.tools.model_rows import SGLANG
    from spmdrl.tools.model_source import source_of

    quiet()
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        (verdict,) = answers(source_of(name), Path(folder), (SGLANG,))
        return verdict.answer, verdict.remark.replace(f"{folder}/", "")


def answers_of(asked: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each model and its answer; where SGLang fails, the remark is what its processes raised."""
    with _errors() as log:
        for name in asked:
            before = log.seek(0, os.SEEK_END)
            try:
                ((found, remark),) = run_engine_ranks(1, answer_on_rank, name)
            except AssertionError as error:  # the rank's traceback
                found, remark = "no", f"{error}".strip().splitlines()[-1]
            log.seek(before)
            raised = _RAISED.findall(log.read().decode(errors="replace"))
            if found != "yes" and raised:
                remark = f"SGLang: {raised[-1]}"
            yield name, [found, remark if len(remark) <= _MOST_CHARACTERS else f"{remark[:_MOST_CHARACTERS]}..."]


@contextlib.contextmanager
def _errors() -> Iterator[IO[bytes]]:
    """Collect what this process and those that it starts write to their standard error."""
    own = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(own, 2)
            os.close(own)


def main(given: Sequence[str]) -> None:
    """Ask about these models, or about one of each type, and write the answers."""
    found: dict[str, Any] = json.loads(SGLANG_RESULTS.read_text(encoding="utf-8"))["models"] if given else {}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    for name, answer in answers_of(given or names()):
        found[name] = answer
        print(name, *answer, flush=True)
        ordered = {name: found[name] for name in released() if name in found}
        results = {"date": f"{datetime.date.today()}", "versions": versions, "models": ordered}
        SGLANG_RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
