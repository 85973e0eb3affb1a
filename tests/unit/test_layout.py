"""docs/layout.md is kept: rooms import downwards, each library has its door, and no room outgrows its walls."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.helpers import measures

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/layout.md").read_text(encoding="utf-8")
NOT_OURS = ("engine/sglang/startup",)  # it bears the name of a module of Python's
UNCLEAR_STARTS = re.compile(r"^(What|Whether|Of|As|Those|That|The same)\b")

Table = dict[str, list[str]]


def table(page: str, heading: str, column: int = 0) -> Table:
    """The rows of the table under a heading: names in the first column, and those in a column after it."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {first: re.findall(r"`([^`]+)`", rest[column]) for first, *rest in rows}


def layers(page: str) -> dict[str, int]:
    """The row of each room, 0 at the top."""
    return {room: row for row, first in enumerate(table(page, "Layers")) for room in re.findall(r"`([^`]+)`", first)}


def doors(page: str) -> Table:
    """The files that may import each library."""
    return {first.strip().strip("`"): files for first, files in table(page, "One door for each library").items()}


def sources(package: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every file of the package, by its path in it."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(NOT_OURS):
            yield name, measures.parsed(path)


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it."""
    for node in measures.nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str:
    """The room of a file or of what follows the package's name in an import."""
    return re.split(r"[./]", name)[0]


def is_of(library: str, dotted: str) -> bool:
    """True when an imported name belongs to a library."""
    return f"{dotted}.".startswith(f"{library}.")


def layout_problems(package: Path, page: str) -> Iterator[str]:
    """Sentences about files without a layer, imports that do not point downwards, and second doors."""
    row_of, files_of = layers(page), doors(page)
    for name, tree in sources(package):
        room = room_of(name)
        if room == "__init__":
            continue
        if room not in row_of:
            yield f"{name} has no layer"
            continue
        for dotted in imported(tree):
            top, _, rest = dotted.partition(".")
            other = room_of(rest) if top == package.name else room
            if other in row_of and other != room and row_of[other] <= row_of[room]:
                yield f"{name} imports {dotted}, which is not below it"
            for library, files in files_of.items():
                if is_of(library, dotted) and name not in files:
                    yield f"{name} imports {library}, whose door is {' and '.join(files)}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in measures.nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_rooms_import_downwards_and_each_library_has_its_door() -> None:
    assert list(layout_problems(ROOT / "spmdrl", PAGE)) == []


def test_the_page_names_no_room_or_door_that_is_not_there() -> None:
    package = ROOT / "spmdrl"
    for room in layers(PAGE):
        assert (package / room).is_dir() or (package / f"{room}.py").is_file(), room
    trees = dict(sources(package))
    for library, files in doors(PAGE).items():
        for file in files:
            assert any(is_of(library, dotted) for dotted in imported(trees[file])), (library, file)


MADE_UP = """
## Layers

| layer | its job |
|---|---|
| `loop` | |
| `left` `right` | |
| `base` | |

## One door for each library

| library | is imported by |
|---|---|
| `engine_library` | `left/door.py` |
"""


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "loop.py": "from made_up.left.door import open_it\nfrom made_up import base",
        "left/door.py": "import engine_library.core\nfrom made_up.base import thing\ndef open_it(): ...",
        "right/__init__.py": "import made_up.base",
        "base.py": "import os",
    }
    for name, text in files.items():
        (tmp_path / "made_up" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made_up" / name).write_text(text)
    assert list(layout_problems(tmp_path / "made_up", MADE_UP)) == []
    return tmp_path / "made_up"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("base.py", "from made_up.loop import x", "base.py imports made_up.loop.x, which is not below it"),
        ("base.py", "def f():\n    from made_up import loop", "base.py imports made_up.loop, which is not below it"),
        ("right/a.py", "import made_up.left.door", "right/a.py imports made_up.left.door, which is not below it"),
        ("attic.py", "", "attic.py has no layer"),
        ("right/a.py", "from engine_library import x", "right/a.py imports engine_library, whose door is left/door.py"),
    ],
)
def test_an_import_that_is_turned_upwards_is_found(made_up: Path, file: str, text: str, problem: str) -> None:
    (made_up / file).write_text(text)
    assert list(layout_problems(made_up, MADE_UP)) == [problem]


def test_the_root_of_the_package_is_no_corridor() -> None:
    entries = [path for path in (ROOT / "spmdrl").iterdir() if not path.name.startswith("__")]
    assert len([path for path in entries if path.suffix == ".py"]) == limit("modules at the root")
    assert len([path for path in entries if path.is_dir()]) == limit("packages at the root")


def test_no_file_and_no_function_is_too_long() -> None:
    for name, tree in sources(ROOT / "spmdrl"):
        lines = (ROOT / "spmdrl" / name).read_text(encoding="utf-8").count("\n")
        assert lines <= limit("lines of a file"), f"{name} has {lines} lines"
        for function in functions(tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            assert length <= limit("lines of a function"), f"{name}: {function.name} has {length} lines"


def test_files_of_torch_are_read_as_tensors_alone() -> None:
    """Otherwise a file runs what its pickles say."""
    loads = re.compile(r"torch\.load\(([^)]*)\)")
    found = {
        f"{path.relative_to(ROOT)}: {call}"
        for folder in ("spmdrl", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for call in loads.findall(path.read_text(encoding="utf-8"))
        if "weights_only=True" not in call
    }
    assert found == set()


def test_what_programs_print_is_made_printable_in_one_place() -> None:
    """Files may hold characters that a terminal obeys."""
    # The last two of the page are programs that other processes start, and say nothing that others have written.
    package = ROOT / "spmdrl"
    prints = re.compile(r"(?<![\w.])print\(")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if prints.search(path.read_text("utf-8"))}
    assert found == set(places_of("print"))


def test_the_loop_fits_on_a_page() -> None:
    tree = ast.parse((ROOT / "spmdrl/train.py").read_text(encoding="utf-8"))
    (train,) = [function for function in functions(tree) if function.name == "train"]
    (loop,) = [node for node in ast.walk(train) if isinstance(node, ast.For)]
    assert (train.end_lineno or 0) - train.lineno + 1 <= 70
    assert (loop.end_lineno or 0) - loop.lineno + 1 <= 35
    inside = [node for statement in train.body for node in ast.walk(statement)]
    assert not [node for node in inside if isinstance(node, ast.FunctionDef | ast.Lambda)], "closures"
    assert not [node for node in ast.walk(loop) if isinstance(node, ast.If)], "a feature is no branch of the loop"
    assert depth(train) <= 4


def depth(node: ast.AST) -> int:
    """How many blocks are nested in each other."""
    below = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return below + isinstance(node, ast.With | ast.For | ast.While | ast.If | ast.Try)


def test_docstrings_of_public_names_stand_without_the_signature() -> None:
    """A first sentence is an imperative or names a thing."""
    unclear = []
    for name, tree in sources(ROOT / "spmdrl"):
        for node in measures.nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                private = getattr(node, "name", "").startswith("_") and not getattr(node, "name", "").startswith("__")
                text = ast.get_docstring(node) or ""
                if not private and UNCLEAR_STARTS.match(text):
                    unclear.append(f"{name}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}")
    assert unclear == []


def undocumented(body: list[ast.stmt], around: str = "") -> Iterator[str]:
    """The public classes and functions of 6 or more lines without a docstring."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1
            if lines >= 6 and ast.get_docstring(node) is None:
                yield f"{around}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node.body, f"{around}{node.name}.")


def test_public_names_of_some_length_have_docstrings() -> None:
    """Outside `config/`, whose classes are tables and rules with names that say what they refuse."""
    missing = [
        f"{name}: {found}"
        for name, tree in sources(ROOT / "spmdrl")
        if room_of(name) != "config"
        for found in undocumented(tree.body)
    ]
    assert missing == []


def test_a_missing_docstring_is_found_in_a_class_too() -> None:
    body = "\n".join(f"        x = {n}" for n in range(6))
    program = f"class A:\n    '''Ours.'''\n    def f():\n{body}\n    def _g():\n{body}\n    def short(): ..."
    assert list(undocumented(ast.parse(program).body)) == ["A.f"]


def test_model_types_are_named_in_one_file() -> None:
    types = CONFIG_MAPPING_NAMES.keys() - {"clip", "git"}  # which mean something else here
    named = [
        f"{name}: {node.value}"
        for name, tree in sources(ROOT / "spmdrl")
        for node in measures.nodes(tree)
        if isinstance(node, ast.Constant) and node.value in types and name != "families.py"
    ]
    assert named == ["engine/sglang/tool_calls.py: mistral"], "a parser of SGLang's"
    assert places_of("model_type") == ["families.py", "engine/sglang/tool_calls.py"]


def test_comments_of_families_name_files_that_read_their_fields() -> None:
    fields, files = 0, []
    for line in (ROOT / "spmdrl/families.py").read_text(encoding="utf-8").split("FAMILIES: ")[0].splitlines():
        if line.startswith("class "):
            is_row, files = line.startswith(("class SGLangFamily", "class ModelFamily")), []
        elif named := re.findall(r"[\w/]+\.py\b", line) if line.startswith("    # ") else []:
            files = named
        elif (field := re.match(r"    (\w+): ", line)) and is_row:
            fields += 1
            assert files, f"no comment names a file that reads {field[1]}"
            for name in files:
                assert f".{field[1]}" in (ROOT / "spmdrl" / name).read_text(encoding="utf-8"), (field[1], name)
    assert fields > 25


def files_that_assign(attribute: str) -> list[str]:
    return [
        name
        for name, tree in sources(ROOT / "spmdrl")
        for node in measures.nodes(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == attribute
    ]


def test_a_module_gets_another_class_in_one_place() -> None:
    assert files_that_assign("__class__") == places_of("__class__")


def test_files_that_give_a_module_another_forward_are_in_the_list_of_layers() -> None:
    listed = re.findall(r"`([\w/]+\.py)`", ast.get_docstring(dict(sources(ROOT / "spmdrl"))["model/layers.py"]) or "")
    assert sorted(set(files_that_assign("forward"))) == sorted(listed)


STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_call|check_output|getoutput)|asyncio\.create_subprocess_\w+"
    r"|os\.(fork|forkpty|system|popen|exec\w+|spawn\w+|posix_spawnp?)"
    r"|(?!psutil\b).*\b(Process|Pool|ProcessPoolExecutor|start_processes)"
)


def starts_processes(tree: ast.Module) -> bool:
    """True when a file calls something that starts a process, or imports its bare name."""
    called = (ast.unparse(node.func) for node in measures.nodes(tree) if isinstance(node, ast.Call))
    by_name = (dotted for dotted in imported(tree) if dotted.startswith(("subprocess.", "os.", "asyncio.")))
    return any(STARTS.fullmatch(name) for name in (*called, *by_name))


def test_processes_are_started_by_the_files_of_the_page() -> None:
    starting = {name for name, tree in sources(ROOT / "spmdrl") if starts_processes(tree)}
    assert starting == {name.strip(" `") for name in table(PAGE, "Who starts processes")}


@pytest.mark.parametrize(
    ("program", "starts"),
    [
        ("subprocess.Popen(['ls'])", True),
        ("from os import fork", True),
        ("def f():\n    multiprocessing.get_context('spawn').Process(target=f).start()", True),
        ("await asyncio.create_subprocess_exec('ls')", True),
        ("psutil.Process(1)", False),
        ("def f(process: subprocess.Popen[bytes]): process.kill()", False),
        ("WorkerPool(1)", False),
    ],
)
def test_a_start_of_a_process_is_found(program: str, starts: bool) -> None:
    assert starts_processes(ast.parse(program)) == starts


def test_the_room_for_a_cpu_is_named_in_one_place() -> None:
    text = re.compile(r"spmdrl[./]cpu\b")
    naming = {
        name
        for name, tree in sources(ROOT / "spmdrl")
        if text.search((ROOT / "spmdrl" / name).read_text(encoding="utf-8"))
        or any(is_of("spmdrl.cpu", dotted) for dotted in imported(tree))
    }
    assert {name for name in naming if not name.startswith("cpu/")} == set(places_of("spmdrl.cpu"))


def test_no_file_imports_itself_over_others() -> None:
    assert measures.circles(measures.import_graph(measures.modules(), deferred=True)) == []


def test_a_circle_is_found_also_over_an_import_inside_a_function(tmp_path: Path) -> None:
    for name, text in {"a": "from made_up import b", "b": "def f():\n    from made_up.a import x", "c": ""}.items():
        (tmp_path / "made_up").mkdir(exist_ok=True)
        (tmp_path / "made_up" / f"{name}.py").write_text(text)
    files = measures.modules(tmp_path / "made_up")
    assert measures.circles(measures.import_graph(files, deferred=True)) == [["made_up.a", "made_up.b"]]
    assert measures.circles(measures.import_graph(files, deferred=False)) == []


def test_rooms_stay_within_the_sizes_of_the_page() -> None:
    sizes = table_of_numbers("Sizes")
    rooms: dict[str, list[Path]] = {}
    for name, path in measures.modules().items():
        rooms.setdefault(measures.room_of(name), []).append(path)
    assert sizes.keys() == rooms.keys() - {"__init__"}
    lines = {room: sum(map(measures.code_lines, paths)) for room, paths in rooms.items()}
    wrong = [
        f"{room}: {len(rooms[room])} files, {lines[room]} lines of code"
        for room, (max_files, max_lines) in sizes.items()
        if len(rooms[room]) != max_files or not is_close(max_lines, lines[room])
    ]
    assert wrong == []


def is_close(limit: int, count: int) -> bool:
    """True when a limit of the page is kept, and is no further above the count than a change may leave it."""
    return count <= limit <= count + max(5, count // 100)


def test_a_limit_is_kept_and_follows_what_shrinks() -> None:
    assert is_close(10, 10) and is_close(10, 5) and is_close(1010, 1000)
    assert not is_close(10, 11) and not is_close(10, 4) and not is_close(1011, 1000)


def test_a_public_class_or_name_of_a_type_has_one_owner() -> None:
    several = {name: places for name, places in measures.owners(measures.modules()).items() if len(places) > 1}
    assert not several


def test_names_of_types_have_owners_as_classes_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "class A1b: ...\nPlace = tuple[int]\nRow: TypeAlias = int\n_Row = T = MAX = 1"
        )
    owners = measures.owners({name: tmp_path / f"{name}.py" for name in ("a", "b")})
    assert owners == {"A1b": ["a", "b"], "Place": ["a", "b"], "Row": ["a", "b"]}


def test_few_files_are_small() -> None:
    paths = [path for path in measures.modules().values() if path.name != "__init__.py"]
    small = [path.name for path in paths if measures.code_lines(path) <= limit("lines of code of a small file")]
    assert is_close(limit("small files"), len(small))


def test_few_lines_are_imports() -> None:
    paths = measures.modules().values()
    share = sum(map(measures.import_lines, paths)) / sum(map(measures.code_lines, paths))
    assert is_close(limit("import lines in 1,000 lines of code"), math.ceil(1000 * share))


def test_rings_of_rooms_are_those_of_the_tree() -> None:
    """A room's row names the ring under which the tree of the page shows it."""
    tree = PAGE.split("    spmdrl/\n")[1].split("    spmdrl_sglang_cpu/")[0]
    kinds = {"inner": "the inner ring", "outer": "the outer ring", "optional": "an optional room"}
    starts = {kind: tree.index(heading) for kind, heading in kinds.items()}
    section = PAGE.split("## Sizes\n", 1)[1].split("\n## ", 1)[0]
    rings = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    assert len(rings) == len(table_of_numbers("Sizes")) and starts["inner"] < starts["outer"] < starts["optional"]
    for room, ring in rings:
        shown = re.search(
            rf"^ {{8}}(?:train\.py .*\b)?{room}(?:/|\.py)", tree, re.MULTILINE
        )  # train.py's row has others
        assert shown, room
        assert max((at, kind) for kind, at in starts.items() if at < shown.start())[1] == ring, room


def test_words_to_avoid_become_fewer() -> None:
    """In names, docstrings and comments: a change that removes some lowers the number of the page."""
    allowed = {word: count for word, (count,) in table_of_numbers("Words").items()}
    found = measures.words(measures.modules().values())
    assert allowed.keys() == set(measures.BANNED)
    assert {word: found[word] for word in allowed if not is_close(allowed[word], found[word])} == {}


def test_a_word_is_found_in_names_docstrings_and_comments_alone(tmp_path: Path) -> None:
    text = '"""It is kept, so\n    many."""\n# goes\nkept_rows = held_out = "kept"\ndef f(_held): self.kept'
    (tmp_path / "a.py").write_text(text)
    assert measures.words([tmp_path / "a.py"]) == {"kept": 3, "held": 1, "goes": 1, "so many": 1}


def test_modules_import_no_more_than_the_page_says() -> None:
    files = measures.modules()
    graph = measures.import_graph(files, deferred=False)
    for module, (max_files,) in table_of_numbers("Closures").items():
        assert is_close(max_files, len(measures.closure(graph, f"spmdrl.{module}"))), module


def test_modules_are_imported_without_the_libraries_of_the_page() -> None:
    for name, libraries in table(PAGE, "Closures", column=1).items():
        module = name.strip(" `")
        if libraries:
            program = f"import sys, spmdrl.{module}; print([name for name in {libraries} if name in sys.modules])"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert done.stdout.strip() == "[]", module


def limit(name: str) -> int:
    (number,) = table_of_numbers("Limits")[name]
    return number


def places_of(trick: str) -> list[str]:
    """The files of the page in which something is done that is done nowhere else."""
    rows = table(PAGE, "One place for each trick", column=1)
    (files,) = [files for first, files in rows.items() if f"`{trick}`" in first]
    return files


def table_of_numbers(heading: str) -> dict[str, tuple[int, ...]]:
    """The rows of a table of the page whose cells after the first are numbers; others are left out."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert len({first for first, *_ in rows}) == len(rows), f"two rows of the table {heading} have one name"
    numbers = [[cell.strip().replace(",", "") for cell in rest] for _, *rest in rows]
    return {
        first.strip(" `"): tuple(int(cell) for cell in cells if cell.isdigit())
        for (first, *_), cells in zip(rows, numbers, strict=True)
    }
