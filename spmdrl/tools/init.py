"""`python -m spmdrl.tools.init`: write a starting configuration for a model and a file of data.

What is not given by an option is asked on a terminal, and is an error elsewhere unless there is a good value for it.
Lengths are measured on the data, and memory is planned as by `tools.fit`. The file that is written passes `--dry-run`.
Meanwhile another process compares a tiny model of this kind with transformers' own code, as far as one rank can; see
`spmdrl model`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from spmdrl.config import (
    FileData,
    FileSettings,
    ModelConfig,
    PreferenceFile,
    PromptsConfig,
    SftConfig,
    TuningConfig,
)
from spmdrl.config.base import INT32_MAX, Gib, PathText
from spmdrl.config.run import RunName
from spmdrl.config.strict import shown
from spmdrl.data.conversations import asked, imitated
from spmdrl.data.sources import FileSource, Row, first_record, in_row
from spmdrl.data.stream import question_key
from spmdrl.data.tokenizer import encode_prompt, encode_text, load_tokenizer, stop_token_ids
from spmdrl.data.vision import ImageCounter, NoImages
from spmdrl.families import vision_family
from spmdrl.faults.supervise import count_gpus
from spmdrl.faults.text import Parser, say
from spmdrl.faults.verdict import EXIT_INTERRUPTED
from spmdrl.memory.device import GIB
from spmdrl.model.load import load_model_config
from spmdrl.preflight.hub import PREFIX, NotInCache, data_file, model_folder, with_models_here, with_training_file
from spmdrl.step.tuning_data import PairEncoder
from spmdrl.tools.fit import fitting_settings
from spmdrl.tools.local import MODULES, program_of, run_name
from spmdrl.tools.model import answers_on_one_rank
from spmdrl.tools.program import ignored_interrupts, inline, option, program, writing
from spmdrl.tools.starting import COMPARING, OPTIONS, REWARDS, TASKS, Choices, Measured, Task, starting_tables
from spmdrl.types import UserError

IMAGES = ("images", "image")  # the usual names of their column, the likelier first
FINAL = "####"  # before the final answer of a solution, as GSM8K has it
KINDS = {".jsonl": "jsonl", ".parquet": "parquet"}

GPU_GIB = 79.0  # of the GPUs that most have
Gpus = Annotated[int, Field(ge=0, le=4096)]
QUESTIONS = {
    "reward": f"reward, {', '.join(REWARDS)} or my.py:function",
    "teacher": "teacher, the directory of a model with the same tokenizer",
}
Accepted = TypeVar("Accepted")
_NOUNS = {"chosen": "chosen answer", "rejected": "rejected answer"}
COMMENTS = {
    "data.max_prompt_tokens": "the longest of {rows} has {prompt}{with_images}",
    "rollout.prompts_per_step": "with group_size, the rollouts of a step",
    "rollout.max_response_tokens": "a longer response is cut off",
    "pack.max_tokens_per_micro_batch": "of one forward pass on a rank",
    "eval.num_prompts": "of the same file, and never trained on",
    "held_out.num_prompts": "of the same file, and never trained on",
    "sft.max_response_tokens": "the longest of {rows} has {answer}",
    "sft.turns": 'of a conversation; "all" imitates each of its answers',
    "pairs.max_response_tokens": "the longest of {rows} has {answer}",
    "optim.lr": "the first thing to tune",
}


@program("cannot write a configuration")
def main(argv: Sequence[str] | None = None) -> int:
    """Write the configuration; returns the exit code."""
    arguments = parse(argv)
    out = Path(arguments.out)
    try:
        choices = _chosen(arguments, out)
        asked = None if arguments.no_verdict else ask_for_verdict(choices.model)
        measured = measure(choices)
        tables = starting_tables(choices, measured)
        fitted = fit(tables, choices)
        if asked is not None:
            _heed(asked, choices.model)
        _write(out, "\n".join(lines_of(tables, choices, measured, fitted)), choices)
    except EOFError:
        return EXIT_INTERRUPTED
    say(
        f"wrote {shown(out)}, which passes its check; start it on this machine with\n\n"
        f"    spmdrl {choices.task} {shown(out)}\n\n"
        "and compare more of what is computed of such a model, two ranks, cp, tp, ep and SGLang, in a minute, with\n\n"
        f"    spmdrl model {shown(choices.model)}\n"
    )
    return 0


def ask_for_verdict(model: str) -> Connection:
    """Start the process that gives the verdict on a model, and return where it arrives."""
    say("comparing a tiny model of this kind with transformers' own code, in seconds; --no-verdict leaves it out")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # A process of its own sees no GPU, and ends with this one.
    with ignored_interrupts():
        multiprocessing.get_context("spawn").Process(target=_give_verdict, args=(model, sender), daemon=True).start()
    sender.close()
    return receiver


def _give_verdict(model: str, sender: Connection) -> None:
    sender.send(answers_on_one_rank(model))


def _heed(receiver: Connection, model: str) -> None:
    """Show the verdict. Raises UserError where something is computed otherwise than by transformers."""
    try:
        found = receiver.recv()
    except EOFError:
        found = "its process ended"
    if isinstance(found, str):
        say(f"no verdict: {found}")
        return
    say("\n".join(f"  {one.question.ljust(22)}{one.answer}  {one.remark}".rstrip() for one in found))
    for one in found:
        if one.answer == "no":
            raise UserError(
                f"--model {shown(model)} is computed otherwise than by transformers' own code ({one.question}: "
                f"{one.remark}); spmdrl model {shown(model)} shows more, and --no-verdict writes a configuration anyway"
            )


def _chosen(arguments: argparse.Namespace, out: Path) -> Choices:
    """Return what the options choose. Raises UserError for what is wrong with them and with the file to write."""
    if os.path.lexists(out):
        problems = [f"{shown(out)} is there already; name another file with --out, or remove it"]
    elif not out.parent.is_dir():
        problems = [f"{shown(out)} cannot be written: {shown(out.parent)} is no folder; make it, or name another --out"]
    else:
        return choose(arguments)
    needed = ("model", "data", *filter(None, [TASKS[arguments.task].needs]))
    if all(getattr(arguments, name) is not None for name in needed):  # so that nothing is asked
        try:
            choose(arguments)
        except UserError as error:
            problems.append(str(error))
    raise UserError("\n".join(problems))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options of `spmdrl init`; argparse ends the program for those that it does not know."""
    parser = Parser(description="Write a starting configuration for a model and a file of data.")
    parser.add_argument(
        "--task", choices=[*TASKS], default="train", help="the program that it is for; train unless given"
    )
    parser.add_argument(
        "--model", type=option(PathText), metavar="DIR", help="a Hugging Face model directory, or hf:ORGANISATION/NAME"
    )
    parser.add_argument(
        "--data", type=option(PathText), metavar="FILE", help="jsonl or parquet, or hf:ORGANISATION/NAME[:FILE]"
    )
    parser.add_argument("--prompt-column", metavar="NAME", help="if its name is not a usual one")
    parser.add_argument("--answer-column", metavar="NAME", help='the reference answer; "" if the data has none')
    parser.add_argument("--response-column", metavar="NAME", help="sft: the response to imitate")
    parser.add_argument("--chosen-column", metavar="NAME", help="pairs: the answer that is preferred")
    parser.add_argument("--rejected-column", metavar="NAME", help="pairs: the other answer")
    parser.add_argument("--image-column", metavar="NAME", help='if its name is not a usual one; "" leaves images out')
    parser.add_argument(
        "--image-root",
        type=option(PathText),
        metavar="DIR",
        help="folder of the images, if they are not beside the data",
    )
    parser.add_argument(
        "--reward",
        type=option(str),
        action="append",
        metavar="KIND",
        help=f"{', '.join(REWARDS)}, or a function such as my.py:score; others, after a comma or by the option again, "
        "count a tenth of it",
    )
    parser.add_argument(
        "--teacher", type=option(PathText), metavar="DIR", help="distill: the model to learn from, as --model"
    )
    parser.add_argument(
        "--gpus", type=option(Gpus), help="of this machine; 0: its CPU; otherwise as many as are visible"
    )
    parser.add_argument(
        "--gpu-gib", type=option(Gib), default=GPU_GIB, help=f"memory of each; {GPU_GIB:g} unless given"
    )
    parser.add_argument("--download", action="store_true", help="fetch what names on a hub stand for, into the cache")
    parser.add_argument("--no-verdict", action="store_true", help="do not compare what is computed with transformers")
    parser.add_argument("--name", type=option(RunName), help="of the run; otherwise made of the model and the data")
    parser.add_argument(
        "--out",
        type=option(PathText),
        metavar="TOML",
        default="mine.toml",
        help="the file to write; mine.toml unless given",
    )
    return parser.parse_args(argv)


def choose(arguments: argparse.Namespace) -> Choices:
    """Complete the options by questions. Raises UserError where there is nobody to ask, or an option is wrong."""
    _require_meaning(arguments)
    download, needs = arguments.download, TASKS[arguments.task].needs
    given = _answer(arguments.model, "--model", "model directory", partial(_model, download=download))
    model, folder, model_config = given
    data = _answer(arguments.data, "--data", "file of data, jsonl or parquet", partial(_data, download=download))
    path, kind, file, record = data
    columns = _columns(record, arguments)
    images = _image_column(record, arguments.image_column, model_config)
    rewards, teacher = tuple[str, ...](), arguments.teacher
    if arguments.reward is not None or needs == "reward":
        accept = partial(_rewards, columns=columns, record=record)
        rewards = _answer(arguments.reward, "--reward", QUESTIONS["reward"], accept)
    if teacher is not None or needs == "teacher":
        teacher = _answer(teacher, "--teacher", QUESTIONS["teacher"], partial(_teacher, download=download))
    settings: dict[str, Any] = {"kind": kind, "path": path, "image_column": images, "image_root": arguments.image_root}
    settings |= {f"{name}_column": column for name, column in columns.items()}
    return Choices(
        task=arguments.task,
        model=model,
        model_folder=folder,
        data=_source(settings, record),
        data_file=file,
        other_columns=tuple(name for name in record if name not in (*columns.values(), images)),
        download=arguments.download,
        rewards=rewards,
        teacher=teacher,
        gpus=count_gpus() if arguments.gpus is None else arguments.gpus,
        gpu_gib=arguments.gpu_gib,
        name=arguments.name or run_name(model, arguments.data or path, arguments.task),
    )


def _model(name: str, *, download: bool) -> tuple[str, str, Any]:
    """Return the name of a model, its directory, which has a tokenizer, and its configuration in transformers."""
    folder = _here(model_folder, name, "--model", download=download)
    load_tokenizer(folder)  # says what is wrong before more is asked
    return name, folder, load_model_config(ModelConfig(path=folder))


def _teacher(name: str, *, download: bool) -> str:
    """Return the name of a model whose directory is here."""
    _here(model_folder, name, "--teacher", download=download)
    return name


def _data(name: str, *, download: bool) -> tuple[str, str, str, dict[str, Any]]:
    """Return the file that data is in, its kind, where it is, and its first record."""
    path = _here(with_training_file, name, "--data", download=download)
    if (kind := KINDS.get(Path(path).suffix)) is None:
        raise UserError(
            f"--data {path}: its name ends with none of {', '.join(KINDS)}, which say what it is; a data set "
            "on a hub is hf:ORGANISATION/NAME"
        )
    file = _here(data_file, path, "--data", download=download)
    return path, kind, file, first_record(FileSettings(kind=kind, path=file))  # type: ignore[arg-type]


def _require_meaning(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option of another task."""
    task = TASKS[arguments.task]
    for name in OPTIONS:
        if getattr(arguments, name) is not None and not task.takes(name):
            raise UserError(f"--{name.replace('_', '-')} has no meaning for spmdrl {arguments.task}; remove it")
    if arguments.answer_column and arguments.reward is None and task.needs != "reward":
        raise UserError("--answer-column is for a reward, and there is none; give --reward, or remove it")


def _rewards(given: str | Sequence[str], columns: Mapping[str, str], record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the rewards that an answer or options name, several of them after commas.

    The name of a function's file may have commas too.
    Raises UserError for one that is none, or has nothing to compare with.
    """
    rewards: list[str] = []
    for text in [given] if isinstance(given, str) else given:
        file, _, name = text.rpartition(":")
        rewards += [text] if "," not in name and Path(file).is_file() else text.split(",")
    for reward in rewards:
        if reward not in REWARDS and ":" not in reward:
            raise UserError(f"--reward {reward}: it is one of {', '.join(REWARDS)}, or a function such as my.py:score")
        if reward in COMPARING and not columns["answer"]:
            raise UserError(
                f"--reward {reward} compares with a reference answer; name its column with --answer-column: the data "
                f"has {', '.join(record)}"
            )
    return tuple(rewards)


def _columns(record: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, str]:
    """Return the names of a task's columns by what they hold, "" for one that the data does not have."""
    task = TASKS[arguments.task]
    left, found = list(record), dict[str, str]()
    for name in task.columns:
        given = getattr(arguments, f"{name}_column")
        if given is None and _is_elsewhere(name, record, found, arguments):
            found[name] = ""
            continue
        usual, noun = _usual(name, record, task), _NOUNS.get(name, name)
        if not left and "" not in usual:
            raise UserError(f"the data has {', '.join(record)} alone, and no column that could be the {noun}")
        found[name] = _column(left, given, usual, f"--{name}-column", f"column of the {noun}")
        left = [column for column in left if column != found[name]]
    return found


def _usual(name: str, record: Mapping[str, Any], task: Task) -> Sequence[str]:
    """Return the usual names of a column: answered conversations come first where they are imitated."""
    usual = task.columns[name]
    is_conversation = name == "prompt" and task.settings is SftConfig and _role(record, "messages", -1) == "assistant"
    return ("messages", *usual) if is_conversation else usual


def _is_elsewhere(
    name: str, record: Mapping[str, Any], found: Mapping[str, str], arguments: argparse.Namespace
) -> bool:
    """True for a column that is not needed: what it would hold is in another, or there is nothing to compare with."""
    if name == "response":
        return _role(record, found["prompt"], -1) == "assistant"
    if name == "prompt" and "chosen" in found:
        return _role(record, found["chosen"], 0) not in (None, "assistant")
    return name == "answer" and arguments.reward is None and TASKS[arguments.task].needs != "reward"


def _role(record: Mapping[str, Any], column: str, place: int) -> str | None:
    """Return the role of a message of a conversation; None where the column has none."""
    value = record.get(column)
    return value[place].get("role") if isinstance(value, list) and value and isinstance(value[place], dict) else None


def _source(settings: dict[str, Any], record: Mapping[str, Any]) -> FileSettings:
    """Return the source of a file with these settings, for the rows of which `record` is the first."""
    if "chosen_column" in settings:
        return PreferenceFile(**settings)
    answer = settings.setdefault("answer_column", "")
    settings["response_column"] = settings.get("response_column") or None
    return FileData(**settings, answer_after=FINAL if answer and f"\n{FINAL} " in str(record[answer]) else None)


def _here(find: Callable[[str, bool], str], name: str, option: str, *, download: bool) -> str:
    """Return the directory or file of a name on a hub, and any other name as it is."""
    if not name.startswith(PREFIX):
        return name
    try:
        return find(name, download)
    except UserError as error:
        remedy = "; add --download to fetch it once" if isinstance(error, NotInCache) else ""
        raise UserError(f"{option} {name}: {error}{remedy}") from error


def _answer(given: Any, name: str, question: str, accept: Callable[[Any], Accepted]) -> Accepted:
    """Return what `accept` makes of an option or, where it is not given, of the first answer that it accepts.

    Raises UserError where it does not accept the option, or nobody is there to ask.
    """
    if given is not None:
        return accept(given)
    if not sys.stdin.isatty():
        raise UserError(f"{name} is needed ({question}): there is no terminal to ask on")
    while True:
        with contextlib.suppress(argparse.ArgumentTypeError):  # no answer: it is asked again
            try:
                return accept(str(option(PathText)(input(f"{question}: ").strip())))
            except UserError as error:
                say(str(error))


def _column(columns: Collection[str], given: str | None, usual: Sequence[str], option: str, question: str) -> str:
    """Return the name of a column: the given one, the first usual one that is there, or the user's."""

    def there(name: str) -> str:
        if name and name not in columns:
            raise UserError(f"{option} {name}: the data has {', '.join(columns)}")
        return name

    if given is None:
        given = next((name for name in usual if name in columns or not name), None)
    return _answer(given, option, f"{question}, of {', '.join(columns)}", there)


def _image_column(record: Mapping[str, Any], given: str | None, model_config: Any) -> str | None:
    """Return the name of the column of images: the given one, or the first usual one; None where there is none.

    Raises UserError for images that the model would not see.
    """
    if given is not None:
        return _column(record.keys(), given, (), "--image-column", "") or None
    found = next((name for name in IMAGES if name in record), None)
    if found is not None and vision_family(model_config) is None:
        if record[found]:
            raise UserError(
                f'the data has images in "{found}", and {model_config.model_type} reads text only; take a model that '
                'reads images, or leave them out with --image-column ""'
            )
        return None
    return found


def measure(choices: Choices) -> Measured:
    """Measure all rows of the data with the model's tokenizer and processor. Raises UserError when they cannot be
    read."""
    tokenizer = load_tokenizer(choices.model_folder)
    model = load_model_config(ModelConfig(path=choices.model_folder))
    data = choices.data.model_copy(update={"path": choices.data_file})
    limits = PromptsConfig(sources=(data,), max_prompt_tokens=INT32_MAX)
    family = vision_family(model)
    counter = None if family is None else ImageCounter(family, choices.model_folder, limits, tokenizer=tokenizer)
    settings = TASKS[choices.task].settings
    form = partial(imitated, turns="last") if settings is SftConfig else asked
    num_answer_tokens = _answer_counter(choices, tokenizer, model)
    prompts, answers, questions, images = list[int](), list[int](), set[int](), 0
    for row in FileSource(data, seed=0, form=form).in_file_order():
        prompts.append(_prompt_tokens(row, tokenizer, counter))
        answers.append(num_answer_tokens(row))
        questions.add(hash(question_key(row)))
        images += len(row.images)
    return Measured(
        rows=len(prompts),
        questions=len(questions),
        prompt=max(prompts),
        answer=max(answers),
        has_images=images > 0,
        model=model,
    )


def _answer_counter(choices: Choices, tokenizer: PreTrainedTokenizerBase, model: Any) -> Callable[[Row], int]:
    """Return what counts the tokens of a row's answer: of a pair the longer one, and 0 where there is none."""
    settings = TASKS[choices.task].settings
    if not issubclass(settings, TuningConfig):
        return lambda row: len(encode_text(tokenizer, row.answer or ""))
    short = Measured(rows=1, questions=1, prompt=1, answer=1, has_images=False, model=model)
    cfg = settings.model_validate(starting_tables(choices, short))  # counts do not depend on its lengths
    no_images = NoImages("there is an image after the prompt, and only prompts show images; remove the row")
    encode = PairEncoder(cfg, tokenizer, stop_token_ids(tokenizer, choices.model_folder), no_images)

    def longer(row: Row) -> int:
        with in_row(row.where):
            return max(encode.num_tokens(row.exchanges), encode.num_tokens(row.rejected))

    return longer


def _prompt_tokens(row: Row, tokenizer: PreTrainedTokenizerBase, counter: ImageCounter | None) -> int:
    """Count the tokens of a prompt with those of its images, which are not decoded."""
    with in_row(row.where):
        if row.images and counter is None:
            raise UserError("the prompt has images, and the model reads text only; take a model that reads images")
        place = counter.placeholder if row.images and counter else None
        token_ids, _ = encode_prompt(tokenizer, row.prompt, system_prompt=None, chat_template="auto", place=place)
        return len(token_ids) + sum(counter.num_tokens(image) - 1 for image in row.images if counter)


def fit(tables: dict[str, Any], choices: Choices) -> set[str]:
    """Put the settings into the tables that make the run fit its GPUs, and return them. UserError where none do."""
    if not choices.gpus:
        return set()
    cfg = with_models_here(TASKS[choices.task].settings.model_validate(tables))
    settings = fitting_settings(cfg, num_ranks=choices.num_ranks, device_bytes=int(choices.gpu_gib * GIB))
    for setting, value in settings.items():
        table, _, key = setting.partition(".")
        tables.setdefault(table, {})[key] = value
    return set(settings)


def lines_of(tables: Mapping[str, Any], choices: Choices, measured: Measured, fitted: Collection[str]) -> Iterator[str]:
    """Yield the lines of the configuration, with comments."""
    machine = f"{choices.gpus} GPU{'s' * (choices.gpus > 1)}" if choices.gpus else "a CPU"
    yield f"# {TASKS[choices.task].about} on {machine}; `docs/configuration.md` has every setting."
    for name, table in tables.items():
        yield f"\n[{name}]"
        for key, value in table.items():
            if key == "sources":
                continue
            with_images = ", with those of its images" if measured.has_images else ""
            comment = COMMENTS.get(f"{name}.{key}", "").format(
                rows=measured.rows, prompt=measured.prompt, answer=measured.answer, with_images=with_images
            )
            if f"{name}.{key}" in fitted:
                comment = f"so that it fits into {choices.gpu_gib:g} GiB"
            yield f"{key} = {inline(value)}" + (f" # {comment}" if comment else "")
        for source in table.get("sources", ()):
            yield f"\n[[{name}.sources]]"
            yield from (f"{key} = {inline(value)}" for key, value in source.items())
            if choices.other_columns:
                yield f"# other columns of the data: {', '.join(map(shown, choices.other_columns))}"
    yield ""


def _write(out: Path, text: str, choices: Choices) -> None:
    """Write the configuration, and remove it where it cannot be written whole or does not pass its dry run."""
    with writing(out, "--out"):
        file = out.open("x", encoding="utf-8")
    try:
        with writing(out, "--out"), file:
            file.write(text)
        _require_start(out, choices)
    except BaseException:
        out.unlink()
        raise


def _require_start(out: Path, choices: Choices) -> None:
    """Raise UserError when the configuration does not pass its dry run."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        code = program_of(MODULES[choices.task])([str(out), "--dry-run", "--ranks", str(choices.num_ranks)])
    if code:
        problems = said.getvalue().partition("cannot start:")[2].strip()
        if (folder := Path("runs", choices.name)).exists():
            problems += f"\n{folder} is the run of this name, which would be resumed; another --name begins a new one"
        raise UserError("\n".join(line.strip().removeprefix("- ") for line in problems.splitlines()))


if __name__ == "__main__":
    sys.exit(main())
