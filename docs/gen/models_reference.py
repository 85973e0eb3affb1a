"""Write the table of released models into docs/models.md: `python -m docs.gen.models_reference [--run [NAME ...]]`.

The table is what docs/gen/models.json holds, which `--run` writes: the verdict of `spmdrl model` about each model whose
released settings are known, or about those that are named, and the versions that gave it. SGLang's answers are those of
docs/gen/models-sglang.json, which `docs.gen.models_sglang` writes, and for a GPU of docs/gen/models-sglang-cuda.json.
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
RESULTS, SGLANG_RESULTS = Path("docs/gen/models.json"), Path("docs/gen/models-sglang.json")
ON_A_DEVICE = Path("docs/gen/models-sglang-cuda.json")  # a record, with its commit, of what was asked on a GPU
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
# Types on which tests/engine compares SGLang on a CPU, with kernels that SGLang lacks there.
IN_TESTS = ("qwen3_next", "qwen3_5")
_ANSWERS = ("yes", "no", "failed", "refused")
Answers = Mapping[str, Sequence[str]]  # of a model: question -> (answer, remark)


def type_of(name: str) -> str:
    """Return the `model_type` of a released model, by which SGLang finds its class."""
    kind: str = released()[name]["config"]["model_type"]
    return kind


def of_sglang_about(name: str, asked: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return SGLang's answer and remark about a model, or about the first of its type that it was asked about."""
    return asked[name if name in asked else next(other for other in asked if type_of(other) == type_of(name))]


def _engines(name: str, asked: Mapping[str, Sequence[str]], on_a_device: Mapping[str, Sequence[str]]) -> str:
    answer, remark = of_sglang_about(name, asked)
    if answer == "yes":
        return "torch, and SGLang up to its window" if "its window" in remark else "torch and SGLang"
    if type_of(name) in IN_TESTS:
        return "torch, and SGLang in tests/engine"
    seen = {_class_of(other) for other, (said, how) in on_a_device.items() if said == "yes" and "bfloat16" not in how}
    return "torch, and SGLang on a GPU" if _class_of(name) in seen else "torch alone"


def _class_of(name: str) -> tuple[str, bool]:
    """The type of a released model, and whether it has experts, which some types have in part of their models."""
    return type_of(name), bool(released()[name]["config"].get("num_local_experts"))


def table(results: Mapping[str, Any], of_sglang: Mapping[str, Any], on_a_device: Mapping[str, Any]) -> str:
    """The part of the page between its marks."""
    models: Mapping[str, Answers] = results["models"]
    asked: Mapping[str, Sequence[str]] = of_sglang["models"]
    said, said_of_sglang = map(_versions, (results, of_sglang))
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
        cells.append(_engines(name, asked, on_a_device["models"]) if cells[0] == "yes" else "")
        lines.append(f"| {released()[name]['model']} | `{name}` | {' | '.join(cells)} |")
    lines += ["", "What is not *yes*, and why:", "", "| model | what | why |", "|---|---|---|"]
    lines += _reasons(models)
    lines += [
        "",
        f"SGLang was asked about {len(asked)} models on {of_sglang['date']}, by {said_of_sglang}: {_counts(asked)}.",
        "What is not *yes*, and why; *failed* is SGLang that did not start or stopped, and says nothing of the model:",
        "",
        "| model | type | SGLang | why |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | `{type_of(name)}` | {answer} | {_in_cell(remark)} |"
        for name, (answer, remark) in asked.items()
        if answer != "yes"
    ]
    return "\n".join([*lines, *_of_a_device(on_a_device)]) + "\n"


def _counts(asked: Mapping[str, Sequence[str]]) -> str:
    answers = [answer for answer, _ in asked.values()]
    return ", ".join(f"{answers.count(one)} {one}" for one in _ANSWERS if one in answers)


def _of_a_device(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about what was asked on a GPU: a row for each answer, with all models that have it."""
    asked: Mapping[str, Sequence[str]] = results["models"]
    yield ""
    note = f": {results['note']}" if results["note"] else ""
    yield (
        f"On an {results['device']}, SGLang was asked on {results['date']} by {_versions(results)}{note}. "
        f"{len(results['not reached'])} models were not reached. These are answers to the question as it was put at "
        f"commit {results['commit'][:12]}."
    )
    yield from ("", "| models | SGLang on a GPU | |", "|---|---|---|")
    having: dict[tuple[str, str], list[str]] = {}
    for name, (answer, remark) in asked.items():
        having.setdefault((answer, remark), []).append(name)
    for (answer, remark), names in sorted(having.items(), key=lambda row: _ANSWERS.index(row[0][0])):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {answer} | {_in_cell(remark)} |"


def _versions(results: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


def _in_cell(remark: str) -> str:
    return remark.replace("|", "/")


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
        yield f"| {', '.join(f'`{name}`' for name in names)} | {question}: {answer} | {_in_cell(remark)} |"


def page(text: str) -> str:
    """The whole page, of which the part between the marks is new."""
    read = [json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS, SGLANG_RESULTS, ON_A_DEVICE)]
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(*read)}\n{END}{after}"


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
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), "utf-8")
