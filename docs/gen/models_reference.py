"""Write the table of released models into docs/models.md: `python -m docs.gen.models_reference [--run [NAME ...]]`.

The table is what docs/gen/models.json holds, which `--run` writes: the verdict of `spmdrl model` about each model whose
released settings are known, or about those that are named, and the versions that gave it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.tools.model_source import released

PAGE = Path("docs/models.md")
RESULTS = Path("docs/gen/models.json")
BEGIN, END = "<!-- released: begin -->\n", "<!-- released: end -->\n"
# A column of the table, and the questions that it answers.
COLUMNS = {
    "trained": ("trained", "packed", "one at a time", "two ranks (fsdp)"),
    "cp": ("cp 2, all_gather", "cp 2, ulysses"),
    "tp": ("tp 2",),
    "ep": ("ep 2",),
    "adapters": ("adapters",),
    "torch engine": ("torch engine",),
    "export": ("export and reload",),
}
# The types whose class in SGLang was compared with the trainer: tests/engine, and the table of families on the page.
WITH_SGLANG = (
    *("qwen3", "qwen2", "llama", "mistral", "gemma3_text", "qwen3_moe", "phi3", "granite", "cohere", "qwen3_next"),
    *("qwen3_5", "qwen3_vl", "qwen2_5_vl"),
)
Answers = Mapping[str, Sequence[str]]  # of a model: question -> (answer, remark)


def table(results: Mapping[str, Any]) -> str:
    """The part of the page between its marks."""
    models: Mapping[str, Answers] = results["models"]
    said = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    trained = sum(answers.get("packed", ("",))[0] == "yes" for answers in models.values())
    lines = [
        f"{len(models)} models with their released settings, of which {trained} are trained, by {said}. The answers are"
        " those of `spmdrl model NAME`; where a cell is empty, nothing was asked.",
        "",
        f"| model | `spmdrl model` | {' | '.join(COLUMNS)} | engine tested |",
        f"|---|---|{'---|' * len(COLUMNS)}---|",
    ]
    for name, answers in models.items():
        cells = [_cell(answers, questions) for questions in COLUMNS.values()]
        kind = released()[name]["config"]["model_type"]
        cells.append("" if cells[0] != "yes" else "torch and SGLang" if kind in WITH_SGLANG else "torch alone")
        lines.append(f"| {released()[name]['model']} | `{name}` | {' | '.join(cells)} |")
    lines += ["", "What is not *yes*, and why:", "", "| model | what | why |", "|---|---|---|"]
    lines += _reasons(models)
    return "\n".join(lines) + "\n"


def _cell(answers: Answers, questions: Sequence[str]) -> str:
    found = {answers[question][0] for question in questions if question in answers}
    return next((answer for answer in ("no", "refused", "yes") if answer in found), "")


def _reasons(models: Mapping[str, Answers]) -> Iterator[str]:
    """Yield a row for each answer, with all models that have it."""
    having: dict[tuple[str, str, str], list[str]] = {}
    for name, answers in models.items():
        for question, (answer, remark) in answers.items():
            if answer != "yes":
                having.setdefault((question, answer, remark), []).append(name)
    for (question, answer, remark), names in having.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {question}: {answer} | {remark.replace('|', '/')} |"


def page(text: str, results: Mapping[str, Any]) -> str:
    """The whole page, of which the part between the marks is new."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def run(names: Sequence[str]) -> None:
    """Ask about these models, or about all, and write the answers."""
    import torch
    import transformers

    from spmdrl import __version__
    from spmdrl.tools.model import answers, quiet
    from spmdrl.tools.model_rows import prepare
    from spmdrl.tools.model_source import source_of

    quiet()
    prepare("spmdrl.tools.model_rows")
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["models"] if names else {}
    for name in names or released():
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            verdicts = list(answers(source_of(name), Path(folder)))
        found[name] = {verdict.question: [verdict.answer, verdict.remark] for verdict in verdicts}
        ordered = {name: found[name] for name in released() if name in found}
        versions = {"spmdrl": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
        RESULTS.write_text(json.dumps({"versions": versions, "models": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--run" in sys.argv:
        run(sys.argv[sys.argv.index("--run") + 1 :])
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))), "utf-8")
