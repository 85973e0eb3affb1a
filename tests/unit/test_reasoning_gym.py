"""Answers to reasoning-gym are read and never run, whichever task they are for."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS, create_dataset

from spmdrl.workers import reasoning_gym as door

PACKAGE = Path(str(reasoning_gym.__file__)).parent
EVALUATES = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "parse_expr",
    "sympify",
    "parse_latex",
    "lambdify",
    "literal_eval",
}
# What the package evaluates of its own: items that it generates, and the data of an item. Not what a policy wrote.
OF_THE_ITEM = {
    ("algorithmic.number_sorting", "score_answer", "eval"),
    ("arithmetic.basic_arithmetic", "eval_floordiv", "eval"),
    ("arithmetic.bitwise_arithmetic", "generate_problem", "eval"),
    ("arithmetic.bitwise_arithmetic", "verify_solution", "eval"),
    ("arithmetic.gsm_symbolic.generators_00_49", "generate_example", "eval"),
    ("arithmetic.gsm_symbolic.generators_50_99", "generate_from_variables", "eval"),
    ("code.bf", "compile_bfit_code_to_bf", "compile"),
    ("code.codeio", "_generate_io_pair", "exec"),
    ("logic.propositional_logic", "parse_expr", "parse_expr"),
    ("logic.propositional_logic", "from_string", "parse_expr"),  # its own parser, which makes no call
}


def evaluations() -> Iterator[tuple[str, str, str]]:
    """Module, function and name of each call in the package that may run text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not module.startswith("code.contrib"):
            for function, name in calls(ast.parse(path.read_text(encoding="utf-8")), ""):
                yield module, function, name


def calls(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """The evaluating calls below a node, each with the innermost function that it is in."""
    match node:
        case ast.FunctionDef(name=function):
            pass
        case ast.Call(func=ast.Name(id=name)) if name in EVALUATES:
            yield function, name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if name in EVALUATES and owner != "re":
            yield function, name
    for child in ast.iter_child_nodes(node):
        yield from calls(child, function)


def test_every_place_where_the_package_evaluates_is_known() -> None:
    answered = {(name, "score_answer", "eval") for name in door.READS_LITERALS}
    answered |= {(name, "score_answer", "parse_expr") for name in door.READS_EXPRESSIONS}
    assert {*evaluations()} == answered | OF_THE_ITEM
    for name in (*door.READS_LITERALS, *door.READS_EXPRESSIONS):
        found = getattr(
            importlib.import_module(f"reasoning_gym.{name}"), (door.READS_LITERALS | door.READS_EXPRESSIONS)[name]
        )
        assert getattr(found, "parse_expr", found) in (ast.literal_eval, door.expression)


def test_the_propositions_of_the_package_are_parsed_by_itself() -> None:
    from reasoning_gym.logic import propositional_logic

    assert propositional_logic.parse_expr.__module__ == propositional_logic.__name__


def given(task: str, index: int, **params: Any) -> dict[str, Any]:
    return create_dataset(task, size=3, seed=5, **params)[index]


def rate(task: str, answer: str, entry: dict[str, Any]) -> float:
    return door.rate(
        f"<answer>{answer}</answer>",
        question=entry["question"],
        answer=entry["answer"],
        task=task,
        metadata={"metadata": entry["metadata"]},
    )


EVALUATING = {
    name.partition(".")[2]: "[]" if name in door.READS_LITERALS else "1"
    for name in (*door.READS_LITERALS, *door.READS_EXPRESSIONS)
}


def test_the_answers_of_the_tasks_themselves_still_win() -> None:
    assert {*EVALUATING} <= {*DATASETS}
    for task in EVALUATING:
        for index in range(3):
            entry = given(task, index)
            # An integral that is only written down again has not been solved.
            solved = "Integral" not in entry["answer"]
            assert rate(task, entry["answer"], entry) == float(solved), (task, entry["answer"])


def test_lists_of_answers_are_worth_what_they_were() -> None:
    matrix, letters, queens = (given(task, 0) for task in ("binary_matrix", "string_insertion", "n_queens"))
    rows = [[int(cell) for cell in row.split()] for row in matrix["answer"].splitlines()]
    assert rate("binary_matrix", str(rows), matrix) == 0.1
    assert rate("string_insertion", str(list(letters["answer"])), letters) == 0.1
    board = [row.split() for row in queens["metadata"]["valid_answers"][0].splitlines()]
    assert rate("n_queens", str(board), queens) == 0.5


RUNS = (
    "[open({0!r}, 'w')]",
    "open({0!r}, 'w')",
    "__import__('os').mkdir({0!r})",
    "(lambda: open({0!r}, 'w'))()",
    "[x for x in [open({0!r}, 'w')]]",
    "S('open({0!r}, chr(119))')",
    "sympify(open({0!r}, 'w'))",
    "x.__class__(open({0!r}, 'w'))",
    "f'{{open({0!r}, chr(119))}}'",
    "sin(open({0!r}, 'w'))",
    "1 if open({0!r}, 'w') else 2",
    "(_ for _ in ()).throw(KeyboardInterrupt('\\ud800'))",
    "exec(chr(112))",
)


@pytest.mark.parametrize("task", EVALUATING)
def test_no_answer_runs(task: str, tmp_path: Path) -> None:
    entry, place = given(task, 0), tmp_path / "made"
    wrong = rate(task, EVALUATING[task], entry)
    for text in RUNS:
        assert rate(task, text.format(str(place)), entry) <= wrong, text
    assert not place.exists()


def test_an_answer_cannot_name_the_right_one() -> None:
    for task in ("spiral_matrix", "string_insertion", "binary_matrix"):
        assert rate(task, "[oracle_answer]", given(task, 0)) == rate(task, "oracle_answer", given(task, 0)) == 0.0


def test_expressions_are_read_as_sympy_reads_them() -> None:
    text = "2*x**2/4 + exp(-x)*sin(3*x) - C"
    assert door.expression(text) == sympy.parse_expr(text)
    for text in (
        "x.y",
        "x[0]",
        "'x'",
        "f(x)",
        "sin(x, y)",
        "sin(x=1)",
        "x # y",
        "\uff58",
        "x if y else z",
        "True",
        "x; y",
        "",
    ):
        with pytest.raises((ValueError, SyntaxError)):
            door.expression(text)


def test_a_rating_that_is_none_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_scorer", lambda task, params: lambda answer, entry: 7.0)
    with pytest.raises(ValueError, match="the reasoning-gym task chain_sum rates the answer 7, and not 0 to 1"):
        door.rate("1", question="", answer="1", task="chain_sum", metadata={})
