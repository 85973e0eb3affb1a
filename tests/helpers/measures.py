"""Measures of the package's code, which docs/layout.md limits: `python -m tests.helpers.measures` prints them all."""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "spmdrl"
# Words that say little to a reader who knows the field, in names, docstrings and comments of the package.
BANNED = (
    *("told", "kept", "held", "looked", "looks", "begun", "goes", "so many", "bear", "whoever", "anew", "foretold"),
    *("said", "beside", "stand for", "stands for", "go on", "goes on"),
)

Graph = dict[str, set[str]]


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """The files of the package by their dotted names."""
    paths = sorted(package.rglob("*.py"))
    names = (path.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def parsed(path: Path) -> ast.Module:
    return _parsed(path.read_text(encoding="utf-8"))


_parsed = functools.cache(ast.parse)


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree; many tests ask for those of every module."""
    return list(ast.walk(tree))


def code_lines(path: Path) -> int:
    """Count the lines that are code: no docstring of anything, no comment, not blank."""
    text = path.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in nodes(parsed(path)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                strings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in strings and re.match(r"\s*[^#\s]", line))


def import_lines(path: Path) -> int:
    """Count the lines of import statements, wherever they stand."""
    found = (node for node in nodes(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom))
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in found)


def room_of(name: str) -> str:
    """The room of a module: `spmdrl.model.lora.peft` is in `model`, `spmdrl.run` in `run`."""
    return name.split(".")[1] if "." in name else "__init__"


def import_graph(files: Mapping[str, Path], *, deferred: bool) -> Graph:
    """The modules of the package that each module imports; `deferred` counts those inside functions and
    `TYPE_CHECKING` too."""
    return {name: set(_imports(parsed(path), files, deferred)) - {name} for name, path in files.items()}


def _imports(tree: ast.Module, files: Mapping[str, Path], deferred: bool) -> Iterator[str]:
    for node in nodes(tree) if deferred else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full if full in files else node.module,) if name in files)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)


def closure(graph: Graph, name: str) -> set[str]:
    """The modules that are imported with this one, itself among them; what packages' `__init__` import is not."""
    seen, ahead = {name}, [name]
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules each of which imports, over others, all of its group."""
    reachable = {name: closure(graph, name) for name in graph}
    groups = {frozenset(other for other in reachable[name] if name in reachable[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def owners(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """The modules that define each public class, and each public name of a type, at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        for defined in {one for node in parsed(path).body for one in _types_of(node)}:
            found[defined].append(name)
    return found


def _types_of(node: ast.stmt) -> Iterator[str]:
    """Yield the public names in CamelCase that a statement defines: not one letter, not a constant in capitals."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [node.name] if isinstance(node, ast.ClassDef) else [one.id for one in targets if isinstance(one, ast.Name)]
    yield from (name for name in names if re.match(r"[A-Z].*[a-z]", name))


def functions(files: Iterable[Path]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found = (node for path in files for node in nodes(parsed(path)))
    return [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def words(files: Iterable[Path]) -> Counter[str]:
    """How often each banned word stands in names, docstrings and comments."""
    found: Counter[str] = Counter()
    for path in files:
        plain = " ".join("|".join(_prose(path)).lower().replace("_", " ").split())  # phrases over ends of lines too
        plain = re.sub(r"held[- ]outs?\b", "", plain)
        found.update({word: n for word in BANNED if (n := len(re.findall(rf"\b{word}\b", plain)))})
    return found


def _prose(path: Path) -> Iterator[str]:
    """Yield what a file's author chose: each name where it stands, each docstring, of a setting or field too, and
    each comment."""
    for node in nodes(parsed(path)):
        texts = [getattr(node, field, None) for field in ("name", "id", "arg", "attr")]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.append(node.value.value)
        yield from (text for text in texts if isinstance(text, str))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def main() -> None:
    files = modules()
    rooms: dict[str, list[Path]] = defaultdict(list)
    for name, path in files.items():
        rooms[room_of(name)].append(path)
    sizes = {path: code_lines(path) for path in files.values()}
    print(f"{'room':14}{'files':>6}{'code':>8}{'imports':>9}")
    for room, paths in sorted(rooms.items()):
        code = sum(sizes[path] for path in paths)
        print(f"{room:14}{len(paths):6}{code:8,}{sum(map(import_lines, paths)) / max(code, 1):9.1%}")
    code = sum(sizes.values())
    imports = sum(map(import_lines, sizes))
    print(f"{'all':14}{len(files):6}{code:8,}{imports / code:9.1%}")
    filled = [size for path, size in sizes.items() if path.name != "__init__.py"]
    print(f"median file {statistics.median(filled):.0f} lines of code; {sum(n < 40 for n in filled)} files below 40")
    bodies = [body_lines(function) for function in functions(sizes)]
    short = sum(lines <= 3 for lines in bodies) / len(bodies)
    print(f"{len(bodies):,} functions; median body {statistics.median(bodies):.0f} lines; {short:.0%} of 1 to 3 lines")
    graph = import_graph(files, deferred=False)
    for name in ("types", "engine.protocol", "refit.bucket", "model.policy", "learn.objective", "envs.worker"):
        print(f"closure of {name}: {len(closure(graph, f'spmdrl.{name}'))} files")
    print(f"circles, deferred imports included: {circles(import_graph(files, deferred=True))}")
    several = {name: places for name, places in owners(files).items() if len(places) > 1}
    print(f"{len(several)} names of classes and types with two or more owners: {', '.join(sorted(several))}")
    print(f"words to avoid: {dict(words(sizes).most_common())}")


if __name__ == "__main__":
    main()
