"""Ratings of reasoning-gym: each task of that package checks answers to its own items.

Some of its tasks evaluate the answer, as Python or as sympy does, which evaluates Python too. An answer is written by
the policy, so here those tasks read it instead: a literal, or an expression of numbers, names and known functions. What
is neither is no answer. `tests/unit/test_reasoning_gym.py` finds every place where the package evaluates anything.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer
from sympy.parsing.sympy_parser import parse_expr

# The names by which modules of reasoning-gym evaluate answers.
READS_LITERALS = {
    "algorithmic.binary_matrix": "eval",
    "algorithmic.spiral_matrix": "eval",
    "algorithmic.string_insertion": "eval",
    "games.n_queens": "eval",
}
READS_EXPRESSIONS = {
    "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
    "algebra.simple_integration": "sympy",
    "games.countdown": "parse_expr",
    "games.puzzle24": "parse_expr",
}
# Of one argument, all of them.
_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "erf", "erfi"),
    *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "acoth", "Si", "Ci", "Ei", "li"),
    *("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign"),
}

_scorers: dict[tuple[str, str], Callable[..., float]] = {}


def rate(text: str, *, question: str, answer: str | None, task: str, metadata: dict[str, Any]) -> float:
    """Return the task's own rating, 0 to 1, of what is in the last <answer> tags, or of the whole text.

    Raises ValueError for a rating outside of that, and for another task than those of the package.
    """
    if task not in DATASETS:
        raise ValueError(f"{task!r} is no task of reasoning-gym; this reward is for data of kind reasoning_gym")
    tagged = extract_answer(text)
    # An item from a file may have columns `question` and `metadata`, which replace these defaults.
    entry = {"question": question, "answer": answer, "metadata": {}, **metadata}
    scorer = _scorer(task, metadata.get("params", {}))
    rating = float(scorer(answer=text.strip() if tagged is None else tagged, entry=entry))
    if not 0.0 <= rating <= 1.0:
        raise ValueError(f"the reasoning-gym task {task} rates the answer {rating:g}, and not 0 to 1")
    return rating


def _scorer(task: str, params: dict[str, Any]) -> Callable[..., float]:
    # Some tasks need the data set's parameters to check an answer, but the package's get_score_answer_fn uses the
    # defaults. Creating a data set can take long, so each is created once.
    key = (task, repr(sorted(params.items())))
    if key not in _scorers:
        _scorers[key] = create_dataset(task, **params).score_answer
    return _scorers[key]


def expression(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """Read a mathematical expression as sympy does. Raises ValueError or SyntaxError for anything else."""
    # A comment, or a letter that Python takes for another one, would be read twice in two ways.
    if not text.isascii() or "#" in text or not all(map(_is_mathematics, ast.walk(ast.parse(text, mode="eval")))):
        raise ValueError("this is no expression of numbers, names and known functions")
    return parse_expr(text, local_dict=local_dict)


def _is_mathematics(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
            return name in _FUNCTIONS
        case ast.Call():
            return False
    return isinstance(
        node, ast.Expression | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Name | ast.expr_context
    )


def _read_instead_of_evaluating() -> None:
    for modules, read in ((READS_LITERALS, ast.literal_eval), (READS_EXPRESSIONS, expression)):
        for name, evaluates in modules.items():
            module = importlib.import_module(f"reasoning_gym.{name}")
            found = getattr(module, evaluates, None)
            # A module's own name comes before a built-in one. Of sympy only what parses is another.
            is_library = isinstance(found, types.ModuleType)
            setattr(
                module, evaluates, types.SimpleNamespace(**vars(found) | {"parse_expr": read}) if is_library else read
            )


_read_instead_of_evaluating()
