"""`spmdrl init`: a configuration for a model and a file that nobody has described, which passes its check."""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spmdrl.tools import init, local
from spmdrl.tools.init import choose, main, measure, parse
from spmdrl.tools.model_rows import ROWS, Verdict
from spmdrl.tools.starting import starting_tables
from spmdrl.tools.tiny_model import character_tokenizer, save_tiny_model
from spmdrl.train import main as train
from tests.helpers.vision import photo, save_vision_files
from tests.helpers.vision_models import save_gemma3_vl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "model"
    save_tiny_model(folder, num_layers=1, hidden_size=32)
    return folder


@pytest.fixture(autouse=True)
def without_verdict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict takes seconds, and depends on the model alone."""
    if "verdict" not in request.node.name:
        monkeypatch.setattr(init, "ask_for_verdict", lambda _: None)


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n} + 1 =", "label": str(n + 1)}) + "\n" for n in range(100)))
    return file


def written(path: str = "mine.toml") -> dict[str, Any]:
    return tomllib.loads(Path(path).read_text())


def test_lengths_and_columns_are_those_of_the_data(model: Path, sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]
    assert main(given) == 0  # it has passed its dry run
    assert "spmdrl train mine.toml" in capsys.readouterr().out
    tables = written()
    (source,) = tables["data"]["sources"]
    assert (source["prompt_column"], source["answer_column"]) == ("question", "label")
    assert tables["data"]["max_prompt_tokens"] == 16 and "# the longest of 100 has 8" in Path("mine.toml").read_text()
    assert tables["eval"]["num_prompts"] == 10 and tables["eval"]["sources"] == tables["data"]["sources"]
    assert tables["rollout"]["prompts_per_step"] == 64 and len(sums.read_text().splitlines()) > 64
    assert main([*given, "--answer-column", "lable"]) == 2  # both mistakes at once
    told = capsys.readouterr().err
    assert "mine.toml is there already; name another file with --out" in told
    assert "--answer-column lable: the data has label" in told


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init-eyes") / "model"
    save_tiny_model(folder, num_layers=1, hidden_size=32, vision=True)
    return folder


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows with no image, one of a token, or three of nine; their folder is not that of the rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawn").mkdir()
    photo(16, 16).save(tmp_path / "drawn/small.png")
    photo(48, 48).save(tmp_path / "drawn/large.png")
    of_each = [[], ["small.png"], ["large.png"] * 3]
    rows = [
        {"prompt": "<image>" * len(some) + f"{number + 10}: how many?", "image": some, "answer": str(len(some))}
        for number, some in ((number, of_each[number % 3]) for number in range(30))
    ]
    file = tmp_path / "pictures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_the_verdict_comes_first(model: Path, sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]
    assert main(given) == 0
    comparing, rest = capsys.readouterr().out.split("\n", 1)
    assert comparing.startswith("comparing a tiny model of this kind") and "wrote mine.toml" in rest
    assert "no verdict" not in rest, rest
    lines = [re.split(" {2,}", line.strip()) for line in rest.partition("wrote")[0].splitlines()]
    found = {question: answer for question, answer, *_ in lines}
    assert found == dict.fromkeys((name for name in ROWS if not re.search("two ranks|[cte]p 2|SGLang", name)), "yes")


@pytest.mark.parametrize("answer", ["no", "refused", "none can be built"])
def test_a_verdict_of_no_writes_nothing(
    model: Path, sums: Path, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Verdict("packed", answer, "the reason")] if answer in ("no", "refused") else answer  # type: ignore[arg-type]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(found)
    monkeypatch.setattr(init, "ask_for_verdict", lambda _: receiver)
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]
    assert main(given) == (2 if answer == "no" else 0) and Path("mine.toml").exists() == (answer != "no")
    told = capsys.readouterr()
    assert answer in told.out
    if answer == "no":
        assert "computed otherwise than by transformers' own code (packed: the reason); spmdrl model " in told.err
        assert main([*given, "--no-verdict"]) == 0


def test_images_count_as_the_models_own_processor_counts_them(eyes: Path, pictures: Path) -> None:
    given = ["--model", str(eyes), "--data", str(pictures), "--reward", "exact", "--gpus", "0", "--image-root", "drawn"]
    assert main(given) == 0  # it has passed its dry run, which reads the size of every image
    tables = written()
    (source,) = tables["data"]["sources"]
    assert (source["image_column"], source["image_root"]) == ("image", "drawn")
    said = Path("mine.toml").read_text()
    (longest,) = re.findall(r"# the longest of 30 has (\d+), with those of its images", said)
    without = len(character_tokenizer(vision=True).encode("10: how many?"))
    assert 3 * 9 + without < int(longest) <= tables["data"]["max_prompt_tokens"] < 128
    for limit, code in ((int(longest), 0), (int(longest) - 1, 2)):  # then the dry run names the row
        Path("limit.toml").write_text(re.sub(r"max_prompt_tokens = \d+", f"max_prompt_tokens = {limit}", said))
        assert train(["limit.toml", "--dry-run", "--ranks", "2"]) == code
    assert main([*given[:-2], "--out", "beside.toml"]) == 2  # there are no images beside the rows


@pytest.mark.skipif(find_spec("sglang") is None, reason="then it is never chosen")
def test_the_engine_is_one_that_sees_what_the_model_sees(eyes: Path, pictures: Path) -> None:
    gemma = save_gemma3_vl(pictures.parent / "gemma")
    save_vision_files(gemma)
    for model, engine in ((str(eyes), "sglang"), (gemma, "torch")):
        given = ["--model", model, "--data", str(pictures), "--reward", "exact", "--gpus", "1", "--image-root", "drawn"]
        choices = choose(parse(given))
        assert starting_tables(choices, measure(choices))["rollout"]["engine"] == engine


def test_images_that_a_model_does_not_see_are_left_out_by_name(
    model: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = pictures.read_text().replace("<image>", "").splitlines(keepends=True)
    pictures.write_text("".join(reversed(lines)))  # the first row has images
    given = ["--model", str(model), "--data", str(pictures), "--reward", "exact", "--gpus", "0"]
    assert main(given) == 2
    assert 'the data has images in "image", and qwen3 reads text only' in capsys.readouterr().err
    assert main([*given, "--image-column", ""]) == 0
    assert "image_column" not in written()["data"]["sources"][0]


def test_a_step_has_no_more_prompts_than_the_data(model: Path, sums: Path) -> None:
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:33]))
    assert main(["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]) == 0
    assert written()["rollout"]["prompts_per_step"] == 30 and written()["eval"]["num_prompts"] == 3


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang's share of memory is what has to fit")
def test_memory_is_planned_for_gpus_that_are_not_here(model: Path, sums: Path) -> None:
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "2", "--gpu-gib", "4"]
    assert main(given) == 0
    assert "so that it fits into 4 GiB" in Path("mine.toml").read_text()


def test_what_is_not_given_is_asked_on_a_terminal_until_it_can_be_used(
    model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[str] = iter(["nowhere", str(model), "sums.txt", str(sums), "", "best", "exact"])
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["--gpus", "0", "--out", "asked.toml"]) == 0
    data, reward = (
        "file of data, jsonl or parquet: ",
        "reward, math, choice, exact, code, format, length or my.py:function: ",
    )
    assert asked == ["model directory: ", "model directory: ", data, data, reward, reward, reward]
    said = capsys.readouterr().out
    assert "--data sums.txt: its name ends with none of .jsonl, .parquet" in said and "--reward best: it is one" in said
    assert written("asked.toml")["reward"] == {"terms": [{"kind": "exact"}]}


@pytest.mark.parametrize(
    ("distinct", "rows", "held_out", "prompts"), [(1, 20, None, 2), (2, 40, None, 2), (30, 40, 3, 26)]
)
def test_equal_questions_count_once(
    model: Path, sums: Path, distinct: int, rows: int, held_out: int | None, prompts: int
) -> None:
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(lines[number % distinct] for number in range(rows)))
    assert main(["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]) == 0
    tables = written()
    assert tables.get("eval", {}).get("num_prompts") == held_out and tables["rollout"]["prompts_per_step"] == prompts


def test_rewards_after_the_first_count_little(model: Path, sums: Path) -> None:
    assert main(["--model", str(model), "--data", str(sums), "--reward", "exact,length", "--gpus", "0"]) == 0
    tables = written()
    assert tables["reward"] == {"terms": [{"kind": "exact"}, {"kind": "length", "weight": 0.1}]}
    assert tables["eval"]["success_at"] == 1.0  # that of the first alone
    Path("a,b.py").write_text("def score(prompt, response, answer, metadata):\n    return 0.5\n")
    Path("c.py").write_text(Path("a,b.py").read_text())
    several = ["--reward", "a,b.py:score", "--reward", "c.py:score,length,exact", "--out", "several.toml"]
    assert main(["--model", str(model), "--data", str(sums), *several, "--gpus", "0", "--no-verdict"]) == 0
    assert written("several.toml")["reward"]["terms"] == [
        {"kind": "function", "function": "a,b.py:score"},
        {"kind": "function", "function": "c.py:score", "weight": 0.1},
        {"kind": "length", "weight": 0.1},
        {"kind": "exact", "weight": 0.1},
    ]


def here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Do without a process what `spmdrl init` does in one, whose imports take seconds."""
    try:
        code = main(command[3:])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return subprocess.CompletedProcess(command, code)


@pytest.mark.slow
def test_one_line_writes_a_configuration_and_starts_it(
    model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = ["spmdrl.train", str(model), "sums.jsonl"]
    line = [*begun, "--reward", "exact", "--no-verdict", "--dry-run", "run.num_steps=2"]
    assert local.main(line) == 0
    assert "wrote model-sums.toml" in (said := capsys.readouterr().out) and "num_steps = 2" in said
    first = Path("model-sums.toml").read_bytes()
    assert first.startswith(
        f"# spmdrl train --model={model} --data=sums.jsonl --reward=exact --no-verdict --name=model-sums".encode()
    )
    assert written("model-sums.toml")["run"]["num_steps"] == 200  # a setting of the command line is that start's alone
    assert local.main(line) == 0 and Path("model-sums.toml").read_bytes() == first
    monkeypatch.setattr(subprocess, "run", here)
    for wrong, said in {
        "--reward=math": "model-sums.toml is there already, and was not written for these options",
        "--gold=x": "unrecognized arguments: --gold=x",
    }.items():
        with pytest.raises(SystemExit) as ended:
            local.main([*begun, wrong, *(["--name", "new"] if wrong.startswith("--gold") else [])])
        assert ended.value.code == 2
        if wrong == "--reward=math":
            assert said in capsys.readouterr().err
    assert not Path("new.toml").exists()


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
SUM = {"question": "2 + 2 =", "label": "4"}
PAIRS = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " no idea"}


@pytest.mark.parametrize(
    ("task", "row", "options", "columns"),
    [
        ("sft", {"question": "2 + 2 =", "completion": " four"}, [], {"prompt": "question", "response": "completion"}),
        ("sft", {"id": 1, "text": "2 + 2 =", "reply": " four"}, ["--prompt-column=text", "--response-column=reply"],
         {"prompt": "text", "response": "reply"}),
        ("sft", {"prompt": "2 + 2?", "messages": CHAT}, [], {"prompt": "messages"}),
        ("pairs", PAIRS, [], {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
        ("pairs", {"chosen": "2 + 2 = four", "rejected": "2 + 2 = five or so"}, [], {"prompt": ""}),
        ("pairs", {"prompt": "2 + 2?", "chosen": CHAT, "rejected": [CHAT[0], CHAT[1] | {"content": "many!"}]}, [],
         {"prompt": ""}),
        ("distill", SUM, [], {"prompt": "question", "answer": ""}),
        ("distill", SUM, ["--reward=exact"], {"prompt": "question", "answer": "label"}),
    ],
)  # fmt: skip
def test_each_kind_of_run_starts_from_a_model_and_data(
    talker: Path, task: str, row: dict[str, Any], options: list[str], columns: dict[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(numbered(row, n)) + "\n" for n in range(40)))
    given = ["--task", task, "--model", str(talker), "--data", "rows.jsonl", "--gpus", "0", *options]
    assert main(given + (["--teacher", str(talker)] if task == "distill" else [])) == 0  # it has passed its dry run
    tables = written()
    (source,) = tables["data"]["sources"]
    assert {name: source[f"{name}_column"] for name in columns} == columns
    assert ("response_column" in source) == (task == "sft" and "response" in columns)
    limits = tables["sft" if task == "sft" else "pairs" if task == "pairs" else "rollout"]
    if task == "distill":
        assert tables["models"]["teacher"]["path"] == str(talker) and limits["group_size"] == 1
        assert ("eval" in tables) == ("reward" in tables) == bool(options)
    else:
        assert limits["max_response_tokens"] == 16 and tables["run"]["num_steps"] == {"sft": 40, "pairs": 20}[task]
        assert tables["held_out"]["num_prompts"] == 4 and tables["held_out"]["sources"] == [source]
    assert ("# other columns of the data: id\n" in Path("mine.toml").read_text()) == ("id" in row)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init-talker") / "model"
    save_tiny_model(folder, num_layers=1, hidden_size=32, chat=True)
    return folder


def numbered(row: Any, number: int) -> Any:
    """The row with another question."""
    if isinstance(row, dict):
        return {name: numbered(value, number) for name, value in row.items()}
    if isinstance(row, list):
        return [numbered(value, number) for value in row]
    return row.replace("2 + 2", f"2 + {number}") if isinstance(row, str) else row


def test_a_run_of_the_same_name_is_told_where_it_refuses_the_settings(
    model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(_: list[str]) -> int:
        print("cannot start: since the checkpoint of step 6, run.num_steps was 6 and is 9", file=sys.stderr)
        return 2

    monkeypatch.setattr("spmdrl.tools.init.program_of", lambda _: refuses)
    Path("runs/model-sums").mkdir(parents=True)
    given = ["--model", str(model), "--data", "sums.jsonl", "--reward", "exact", "--gpus", "0", "--no-verdict"]
    assert main(given) == 2
    assert "runs/model-sums is the run of this name, which would be resumed; another --name" in capsys.readouterr().err
    assert not list(Path().glob("*.toml"))


def test_one_line_starts_each_kind_of_run(
    model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", here)
    lines: dict[str, list[str]] = {"sft": [], "distill": ["--teacher", str(model)]}
    for task, options in lines.items():
        line = [task, str(model), "sums.jsonl", *options, "--dry-run"]
        assert local.main(line) == 0 and f"wrote model-sums-{task}.toml" in capsys.readouterr().out
        assert Path(f"model-sums-{task}.toml").read_text().startswith(f"# spmdrl {task} --model={model}")
    assert local.main(["spmdrl.sft", "model-sums-sft.toml", "--dry-run"]) == 0
    for wrong, said in {
        ("sft", "--lr=1"): "model-sums-sft.toml is there already, and was not written for these options; start it with "
        "`spmdrl sft model-sums-sft.toml`",
        ("sft", "--task=pairs", "--name=x"): "--task has no meaning for spmdrl sft",
        ("tune",): '"tune" is no program of ranks; they are train, sft, pairs, distill',
    }.items():
        with pytest.raises(SystemExit, match="2"):
            local.main([wrong[0], str(model), "sums.jsonl", *wrong[1:]])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "row", "options", "words"),
    [
        ("sft", {"prompt": "1 + 1"}, [], "the data has prompt alone, and no column that could be the response"),
        ("sft", {"prompt": "1 + 1", "reply": "2", "id": 1}, [],
         "--response-column is needed (column of the response, of reply, id): there is no terminal"),
        ("sft", SUM, ["--reward", "math"], "--reward has no meaning for spmdrl sft; remove it"),
        ("sft", {"prompt": "1", "answer": "2" * 300}, [],
         "the longest prompt has 1 tokens and the longest answer 301, and the model was made for 256 in all"),
        ("pairs", {"prompt": "1 + 1", "good": "2", "bad": "3"}, [],
         "--chosen-column is needed (column of the chosen answer, of prompt, good, bad)"),
        ("pairs", PAIRS | {"chosen": " no idea"}, [],
         "rows.jsonl line 1: the chosen and the rejected answer are equal"),
        ("distill", {"prompt": "1 + 1"}, [], "--teacher is needed (teacher, the directory of a model with the same"),
        ("distill", {"prompt": "1 + 1", "answer": "2"}, ["--answer-column", "answer", "--teacher", "x"],
         "--answer-column is for a reward, and there is none"),
        ("distill", {"prompt": "1 + 1"}, ["--teacher", "none"], 'models.teacher.path = "none"'),
        ("train", PAIRS, ["--chosen-column", "chosen"], "--chosen-column has no meaning for spmdrl train; remove it"),
    ],
)  # fmt: skip
def test_what_a_kind_of_run_lacks_is_asked_for_in_a_sentence(
    model: Path, task: str, row: dict[str, Any], options: list[str], words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["--task", task, "--model", str(model), "--data", "rows.jsonl", "--gpus", "0", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cannot write a configuration: ") and words in said and not Path("mine.toml").exists()


@pytest.mark.parametrize(
    "model, data, name",
    [
        ("hf:Qwen/Qwen3-0.6B", "hf:openai/gsm8k", "Qwen3-0.6B-openai-gsm8k"),
        ("hf:Qwen/Qwen3-0.6B@main", "hf:openai/gsm8k@main:main/train.parquet", "Qwen3-0.6B-openai-gsm8k"),
        ("models/a", "my data/é.jsonl", "a--"),
        ("runs/tuned/hf", "sums.jsonl", "tuned-sums"),
    ],
)
def test_a_run_is_named_after_its_model_and_data(model: str, data: str, name: str) -> None:
    assert local.run_name(model, data) == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--out": "no/such/x.toml"}, "no/such/x.toml cannot be written: no/such is no folder; make it, or name"),
        ({"--out": "sums.jsonl/x.toml"}, "sums.jsonl is no folder"),
        ({"--out": "/proc/x.toml"}, "/proc/x.toml cannot be written (No such file or directory)"),
        ({"--out": "dangling.toml"}, "dangling.toml is there already"),
        ({"--model": None}, "--model is needed (model directory): there is no terminal to ask on"),
        ({"--data": "sums.csv"}, "--data sums.csv: its name ends with none of .jsonl, .parquet"),
        ({"--data": "none.jsonl"}, "cannot read none.jsonl: No such file or directory"),
        ({"--prompt-column": "text"}, "--prompt-column text: the data has question, label"),
        ({"--reward": "best"}, "--reward best: it is one of math, choice, exact, code, format, length, or a function"),
        ({"--answer-column": ""}, "name its column with --answer-column: the data has question, label"),
        ({"--reward": "my.py:score"}, "there is no file my.py"),
    ],
)
def test_mistakes_are_told_and_write_nothing(
    changes: dict[str, str | None], words: str, model: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--model": str(model), "--data": "sums.jsonl", "--reward": "exact", "--gpus": "0"} | changes
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    Path("dangling.toml").symlink_to("target.toml")
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("cannot write a configuration: ") and words in said and said.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"sums.jsonl", "dangling.toml"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("--out", "x" * 300 + ".toml", "is longer than any path of a file system"),
        ("--out", "a\0.toml", '"a\\x00.toml": must not hold the character NUL'),
        ("--out", "", '"": is empty'),
        ("--data", "a\udcff.jsonl", "a\\udcff.jsonl is not valid Unicode"),
        ("--reward", "a\udcff:b", "a\\udcff:b is not valid Unicode"),
        ("--model", "x" * 5000, "is longer than any path"),
        ("--gpu-gib", "nan", '"nan": input should be less than or equal to'),
        ("--gpu-gib", "inf", "less than or equal to"),
        ("--gpu-gib", "0", "greater than 0"),
        ("--gpu-gib", "1e300", "less than or equal to"),
        ("--gpus", "10000000000", "less than or equal to 4096"),
        ("--gpus", "9" * 5000, "exceeded maximum size"),
        ("--name", "x" * 5000, "at most 200 characters"),
        ("--name", "a/b", "should match pattern"),
    ],
)
def test_an_option_that_no_setting_takes_is_refused_at_once(
    name: str, value: str, words: str, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, value])
    assert words in capsys.readouterr().err and {path.name for path in Path().iterdir()} == {"sums.jsonl"}


def test_a_file_that_cannot_be_written_whole_is_removed(
    model: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert main(["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "mine.toml cannot be written (File too large)" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"sums.jsonl"}
