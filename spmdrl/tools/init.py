"""`python -m spmdrl.tools.init`: write a starting configuration for a model and a file of data.

What is not given by an option is asked on a terminal, and is an error elsewhere unless there is a good value for it.
Lengths are measured on the data, and memory is planned as by `tools.fit`. The file that is written passes `--dry-run`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, DataConfig, FileData, ModelConfig
from spmdrl.config.base import INT32_MAX, Gib, PathText
from spmdrl.config.run import RunName
from spmdrl.config.strict import shown
from spmdrl.data.sources import FileSource, Row, first_record, in_row
from spmdrl.data.stream import question_key
from spmdrl.data.tokenizer import encode_prompt, encode_text, load_tokenizer
from spmdrl.data.vision import ImageCounter
from spmdrl.engine.sglang.images import image_problems
from spmdrl.families import vision_family
from spmdrl.faults.supervise import count_gpus
from spmdrl.faults.text import Parser, say
from spmdrl.faults.verdict import EXIT_INTERRUPTED
from spmdrl.memory.device import GIB
from spmdrl.model.load import load_model_config
from spmdrl.preflight.hub import PREFIX, NotInCache, data_file, model_folder, with_models_here, with_training_file
from spmdrl.tools.fit import fitting_settings
from spmdrl.tools.inline_toml import inline
from spmdrl.tools.local import RANKS_WITHOUT_GPU, program_of, run_name
from spmdrl.tools.program import option, program, writing
from spmdrl.types import UserError

# The usual names of columns, the likeliest first.
PROMPTS = ("prompt", "question", "problem", "messages", "query", "instruction", "input")
ANSWERS = ("answer", "label", "solution", "final_answer", "target", "ground_truth", "expected", "output")
IMAGES = ("images", "image")
REWARDS = ("math", "exact", "code")
FINAL = "####"  # before the final answer of a solution, as GSM8K has it
KINDS = {".jsonl": "jsonl", ".parquet": "parquet"}

GROUP_SIZE = 8
ROLLOUTS_PER_STEP = 512  # at least, whatever the number of GPUs, where the data has as many prompts
MAX_HELD_OUT = 200
GPU_GIB = 79.0  # of the GPUs that most have
Gpus = Annotated[int, Field(ge=0, le=4096)]
RESPONSE_TOKENS = {"math": 3072, "code": 2048}  # where a model reasons before it answers
COMMENTS = {
    "data.max_prompt_tokens": "the longest of {rows} has {prompt}{with_images}",
    "rollout.prompts_per_step": "with group_size, the rollouts of a step",
    "rollout.max_response_tokens": "a longer response is cut off",
    "pack.max_tokens_per_micro_batch": "of one forward pass on a rank",
    "eval.num_prompts": "of the same file, and never trained on",
    "optim.lr": "the first thing to tune",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The user's part of a configuration."""

    model: str
    model_folder: str  # the same, unless `model` is a name on a hub
    data: FileData
    data_file: str  # as model_folder
    download: bool
    reward: str  # one of REWARDS, or a function
    gpus: int
    gpu_gib: float
    name: str

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.gpus or RANKS_WITHOUT_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The number of rows, the longest prompt and answer in tokens, and the model that is to read them."""

    rows: int
    questions: int  # that differ
    prompt: int
    answer: int
    has_images: bool
    model: Any  # transformers' config

    @property
    def model_limit(self) -> int:
        """How many tokens the model was made for."""
        return getattr(self.model.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@program("cannot write a configuration")
def main(argv: Sequence[str] | None = None) -> int:
    """Write the configuration; returns the exit code."""
    arguments = parse(argv)
    out = Path(arguments.out)
    try:
        choices = _chosen(arguments, out)
        measured = measure(choices)
        tables = starting_tables(choices, measured)
        fitted = fit(tables, choices)
        _write(out, "\n".join(lines_of(tables, choices, measured, fitted)), choices)
    except (KeyboardInterrupt, EOFError):
        return EXIT_INTERRUPTED
    say(
        f"wrote {shown(out)}, which passes its check; start it on this machine with\n\n"
        f"    spmdrl train {shown(out)}\n\n"
        "and compare what is computed of such a model with transformers' own, in a minute, with\n\n"
        f"    spmdrl model {shown(choices.model)}\n"
    )
    return 0


def _chosen(arguments: argparse.Namespace, out: Path) -> Choices:
    """Return what the options choose. Raises UserError for what is wrong with them and with the file to write."""
    if os.path.lexists(out):
        problems = [f"{shown(out)} is there already; name another file with --out, or remove it"]
    elif not out.parent.is_dir():
        problems = [f"{shown(out)} cannot be written: {shown(out.parent)} is no folder; make it, or name another --out"]
    else:
        return choose(arguments)
    if None not in (arguments.model, arguments.data, arguments.reward):  # so that nothing is asked
        try:
            choose(arguments)
        except UserError as error:
            problems.append(str(error))
    raise UserError("\n".join(problems))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write a starting configuration for a model and a file of data.")
    parser.add_argument(
        "--model", type=option(PathText), metavar="DIR", help="a Hugging Face model directory, or hf:ORGANISATION/NAME"
    )
    parser.add_argument(
        "--data", type=option(PathText), metavar="FILE", help="jsonl or parquet, or hf:ORGANISATION/NAME[:FILE]"
    )
    parser.add_argument("--prompt-column", metavar="NAME", help="if its name is not a usual one")
    parser.add_argument("--answer-column", metavar="NAME", help='the reference answer; "" if the data has none')
    parser.add_argument("--image-column", metavar="NAME", help='if its name is not a usual one; "" leaves images out')
    parser.add_argument(
        "--image-root",
        type=option(PathText),
        metavar="DIR",
        help="folder of the images, if they are not beside the data",
    )
    parser.add_argument(
        "--reward", type=option(str), metavar="KIND", help=f"{', '.join(REWARDS)}, or a function such as my.py:score"
    )
    parser.add_argument(
        "--gpus", type=option(Gpus), help="of this machine; 0: its CPU; otherwise as many as are visible"
    )
    parser.add_argument(
        "--gpu-gib", type=option(Gib), default=GPU_GIB, help=f"memory of each; {GPU_GIB:g} unless given"
    )
    parser.add_argument("--download", action="store_true", help="fetch what names on a hub stand for, into the cache")
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
    model = arguments.model or _ask("--model", "model directory")
    folder = _here(model_folder, model, "--model", download=arguments.download)
    load_tokenizer(folder)  # says what is wrong before more is asked
    path = arguments.data or _ask("--data", "file of data, jsonl or parquet")
    path = _here(with_training_file, path, "--data", download=arguments.download)
    if (kind := KINDS.get(Path(path).suffix)) is None:
        raise UserError(
            f"--data {path}: its name ends with none of {', '.join(KINDS)}, which say what it is; a data set "
            "on a hub is hf:ORGANISATION/NAME"
        )
    file = _here(data_file, path, "--data", download=arguments.download)
    record = first_record(FileData(kind=kind, path=file))  # type: ignore[arg-type]
    columns = list(record)
    prompt = _column(columns, arguments.prompt_column, PROMPTS, "--prompt-column", "column of the prompt")
    others = [column for column in columns if column != prompt]
    answer = _column(others, arguments.answer_column, (*ANSWERS, ""), "--answer-column", "column of the answer")
    images = _image_column(record, arguments.image_column, load_model_config(ModelConfig(path=folder)))
    reward = arguments.reward or _ask("--reward", f"reward, {', '.join(REWARDS)} or my.py:function")
    if reward not in REWARDS and ":" not in reward:
        raise UserError(f"--reward {reward}: it is one of {', '.join(REWARDS)}, or a function such as my.py:score")
    if reward in ("math", "exact") and not answer:
        raise UserError(f"--reward {reward} compares with a reference answer; name its column with --answer-column")
    return Choices(
        model=model,
        model_folder=folder,
        data=FileData(
            kind=kind,  # type: ignore[arg-type]
            path=path,
            prompt_column=prompt,
            answer_column=answer,
            answer_after=FINAL if answer and f"\n{FINAL} " in str(record[answer]) else None,
            image_column=images,
            image_root=arguments.image_root,
        ),
        data_file=file,
        download=arguments.download,
        reward=reward,
        gpus=count_gpus() if arguments.gpus is None else arguments.gpus,
        gpu_gib=arguments.gpu_gib,
        name=arguments.name or run_name(model, arguments.data or path),
    )


def _here(find: Callable[[str, bool], str], name: str, option: str, *, download: bool) -> str:
    """Return the directory or file that a name on a hub stands for, and any other name as it is."""
    if not name.startswith(PREFIX):
        return name
    try:
        return find(name, download)
    except UserError as error:
        remedy = "; add --download to fetch it once" if isinstance(error, NotInCache) else ""
        raise UserError(f"{option} {name}: {error}{remedy}") from error


def _ask(name: str, question: str) -> str:
    if not sys.stdin.isatty():
        raise UserError(f"{name} is needed ({question}): there is no terminal to ask on")
    while True:
        with contextlib.suppress(argparse.ArgumentTypeError):  # it is asked again
            return str(option(PathText)(input(f"{question}: ").strip()))


def _column(columns: Collection[str], given: str | None, usual: Sequence[str], option: str, question: str) -> str:
    """Return the name of a column: the given one, the first usual one that is there, or the user's."""
    if given is None:
        found = next((name for name in usual if name in columns or not name), None)
        given = found if found is not None else _ask(option, f"{question}, of {', '.join(columns)}")
    if given and given not in columns:
        raise UserError(f"{option} {given}: the data has {', '.join(columns)}")
    return given


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
    limits = DataConfig(sources=(data,), max_prompt_tokens=INT32_MAX)
    family = vision_family(model)
    counter = None if family is None else ImageCounter(family, choices.model_folder, limits, tokenizer=tokenizer)
    prompts, answers, questions, images = list[int](), list[int](), set[int](), 0
    for row in FileSource(data, seed=0).in_file_order():
        prompts.append(_prompt_tokens(row, tokenizer, counter))
        answers.append(len(encode_text(tokenizer, row.answer or "")))
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


def _prompt_tokens(row: Row, tokenizer: PreTrainedTokenizerBase, counter: ImageCounter | None) -> int:
    """Count the tokens of a prompt with those of its images, which are not decoded."""
    with in_row(row.where):
        if row.images and counter is None:
            raise UserError("the prompt has images, and the model reads text only; take a model that reads images")
        place = counter.placeholder if row.images and counter else None
        token_ids, _ = encode_prompt(tokenizer, row.prompt, system_prompt=None, chat_template="auto", place=place)
        return len(token_ids) + sum(counter.num_tokens(image) - 1 for image in row.images if counter)


def starting_tables(choices: Choices, measured: Measured) -> dict[str, Any]:
    """Return the tables of a configuration for what was chosen. Raises UserError where the model is too small."""
    prompt = min(_round_up(measured.prompt), measured.model_limit - 1)
    if prompt < measured.prompt:
        raise UserError(
            f"the longest prompt has {measured.prompt} tokens, and the model was made for {measured.model_limit} in "
            "all; take another model, or leave long prompts out of the data"
        )
    wanted = RESPONSE_TOKENS.get(choices.reward, _round_up(2 * measured.answer + 1) if measured.answer else 1024)
    response = min(wanted, measured.model_limit - prompt)
    ranks = choices.num_ranks
    held_out = min(MAX_HELD_OUT, measured.questions // 10)  # rows that ask the same are held out together
    usual = ranks * -(-ROLLOUTS_PER_STEP // (GROUP_SIZE * ranks))
    # A step asks no question twice, but for data of fewer questions than ranks.
    prompts = max(ranks, min(usual, (measured.questions - held_out) // ranks * ranks))
    columns = {"prompt_column", "answer_column", "answer_after", "image_column"}
    source = choices.data.model_dump(include={"kind", "path", "image_root"} | columns, exclude_none=True)
    kinds = {"kind": choices.reward} if choices.reward in REWARDS else {"kind": "function", "function": choices.reward}
    tables: dict[str, Any] = {
        "run": {"name": choices.name, "num_steps": 200, "seed": 1} | ({"download": True} if choices.download else {}),
        "model": {"path": choices.model},
        "data": {"max_prompt_tokens": prompt, "sources": [source]},
        "rollout": {
            "prompts_per_step": prompts,
            "group_size": GROUP_SIZE,
            "max_response_tokens": response,
            "engine": "sglang" if choices.gpus and find_spec("sglang") else "torch",
            "max_running": min(256, prompts * GROUP_SIZE // ranks),
        },
        "reward": {"terms": [kinds]},
        "optim": {"lr": 1e-6 if choices.gpus else 1e-4},
        "pack": {"max_tokens_per_micro_batch": max(16384, prompt + response)},
        "checkpoint": {"every": 50},
    }
    if tables["rollout"]["engine"] == "sglang" and any(image_problems(Config.model_validate(tables), measured.model)):
        tables["rollout"]["engine"] = "torch"
    return tables | ({"eval": {"num_prompts": held_out, "every": 25, "sources": [source]}} if held_out else {})


def fit(tables: dict[str, Any], choices: Choices) -> set[str]:
    """Put the settings into the tables that make the run fit its GPUs, and return them. UserError where none do."""
    if not choices.gpus:
        return set()
    cfg = with_models_here(Config.model_validate(tables))
    settings = fitting_settings(cfg, num_ranks=choices.num_ranks, device_bytes=int(choices.gpu_gib * GIB))
    for setting, value in settings.items():
        table, _, key = setting.partition(".")
        tables.setdefault(table, {})[key] = value
    return set(settings)


def lines_of(tables: Mapping[str, Any], choices: Choices, measured: Measured, fitted: Collection[str]) -> Iterator[str]:
    """Yield the lines of the configuration, with comments."""
    machine = f"{choices.gpus} GPU{'s' * (choices.gpus > 1)}" if choices.gpus else "a CPU"
    yield f"# Learning by rewards on {machine}; `docs/configuration.md` has every setting."
    for name, table in tables.items():
        yield f"\n[{name}]"
        for key, value in table.items():
            if key == "sources":
                continue
            with_images = ", with those of its images" if measured.has_images else ""
            comment = COMMENTS.get(f"{name}.{key}", "").format(
                rows=measured.rows, prompt=measured.prompt, with_images=with_images
            )
            if f"{name}.{key}" in fitted:
                comment = f"so that it fits into {choices.gpu_gib:g} GiB"
            yield f"{key} = {inline(value)}" + (f" # {comment}" if comment else "")
        for source in table.get("sources", ()):
            yield f"\n[[{name}.sources]]"
            yield from (f"{key} = {inline(value)}" for key, value in source.items())
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
        code = program_of("spmdrl.train")([str(out), "--dry-run", "--ranks", str(choices.num_ranks)])
    if code:
        problems = said.getvalue().partition("cannot start:")[2].strip()
        raise UserError("\n".join(line.strip().removeprefix("- ") for line in problems.splitlines()))


def _round_up(tokens: int) -> int:
    """Return the next power of two, from 16 on."""
    return max(16, 1 << (tokens - 1).bit_length())


if __name__ == "__main__":
    sys.exit(main())
