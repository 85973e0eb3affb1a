"""The tables of a starting configuration: what each kind of run needs, and the settings that it starts with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from spmdrl.config import Config, FileData, FileSettings, PreferencesConfig, SftConfig, TuningConfig
from spmdrl.engine.sglang.requests import image_problems
from spmdrl.tools.local import RANKS_WITHOUT_GPU
from spmdrl.types import UserError

# The usual names of columns, the likeliest first; "" where data may have none.
PROMPTS = ("prompt", "question", "problem", "messages", "query", "instruction", "input")
ANSWERS = (
    *("answer", "label", "solution", "final_answer", "answerKey", "target", "ground_truth", "expected", "output"),
    "",
)
RESPONSES = ("response", "completion", "output", "generation", "solution", "answer", "target", "label")
CHOSEN = ("chosen", "chosen_response", "preferred")
REJECTED = ("rejected", "rejected_response", "dispreferred")
REWARDS = ("math", "choice", "exact", "code", "format", "length")
COMPARING = ("math", "choice", "exact")  # of these, with a reference answer
BESIDE = 0.1  # weight of each reward after the first
TEACHER = "teacher"  # its table in [models]

GROUP_SIZE = 8
ROLLOUTS_PER_STEP = 512  # at least, whatever the number of GPUs, where the data has as many prompts
ROWS_PER_STEP = 128  # at most, of answers in a file
STEPS_PER_PASS = 50  # at least, over a file of as many answers
MAX_HELD_OUT = 200
RESPONSE_TOKENS = {"math": 3072, "code": 2048, "choice": 2048}  # where a model reasons before it answers
_COLUMNS = ("prompt", "answer", "response", "chosen", "rejected", "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of run: what it needs besides a model, and how fast it learns."""

    about: str  # how a configuration's first line starts
    settings: type[Config] | type[TuningConfig]
    columns: Mapping[str, Sequence[str]]  # of its data, with their usual names, in the order in which they are found
    needs: str | None = None  # an option that has to be given or answered
    options: frozenset[str] = field(default=frozenset())  # that it takes besides those of all kinds and its columns'
    lr: float  # on GPUs
    lr_on_cpu: float  # where models are tiny
    group_size: int = 1
    passes: int = 0  # over the answers of a file

    def takes(self, option: str) -> bool:
        """True for an option that has a meaning for this kind of run."""
        return option in self.options or option.removesuffix("_column") in self.columns


TASKS = {
    "train": Task(
        about="Learning by rewards",
        settings=Config,
        columns={"prompt": PROMPTS, "answer": ANSWERS},
        needs="reward",
        options=frozenset({"reward"}),
        lr=1e-6,
        lr_on_cpu=1e-4,
        group_size=GROUP_SIZE,
    ),
    "sft": Task(
        about="Fine-tuning on responses",
        settings=SftConfig,
        columns={"prompt": PROMPTS, "response": RESPONSES},
        lr=1e-5,
        lr_on_cpu=1e-3,
        passes=2,
    ),
    "pairs": Task(
        about="Learning from pairs of answers",
        settings=PreferencesConfig,
        columns={"chosen": CHOSEN, "rejected": REJECTED, "prompt": (*PROMPTS, "")},
        lr=5e-7,
        lr_on_cpu=1e-4,
        passes=1,
    ),
    "distill": Task(
        about="Learning from a teacher, on the policy's own responses,",
        settings=Config,
        columns={"prompt": PROMPTS, "answer": ANSWERS},
        needs="teacher",
        options=frozenset({"reward", "teacher"}),
        lr=2e-6,
        lr_on_cpu=1e-3,
    ),
}
OPTIONS = ("reward", "teacher", "answer_column", "response_column", "chosen_column", "rejected_column")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The user's part of a configuration."""

    task: str  # of TASKS
    model: str
    model_folder: str  # the same, unless `model` is a name on a hub
    data: FileSettings
    data_file: str  # as model_folder
    other_columns: tuple[str, ...]  # of the data, that no setting names
    download: bool
    rewards: tuple[str, ...]  # of REWARDS, or functions; the first is the task's
    teacher: str | None  # as `model`
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
    answer: int  # of a response to imitate, and of those of a pair, with the end-of-sequence token
    has_images: bool
    model: Any  # transformers' config

    @property
    def model_limit(self) -> int:
        """How many tokens the model was made for."""
        return getattr(self.model.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    @property
    def num_held_out(self) -> int:
        """Questions to evaluate on; rows that ask the same are taken together."""
        return min(MAX_HELD_OUT, self.questions // 10)


def starting_tables(choices: Choices, measured: Measured) -> dict[str, Any]:
    """Return the tables of a configuration for what was chosen. Raises UserError where the model is too small."""
    settings = {"kind", "path", "image_root", "answer_after", *(f"{name}_column" for name in _COLUMNS)}
    source = choices.data.model_dump(include=settings, exclude_none=True)
    if issubclass(TASKS[choices.task].settings, TuningConfig):
        return _tuning_tables(choices, measured, source)
    return _sampling_tables(choices, measured, source)


def _sampling_tables(choices: Choices, measured: Measured, source: dict[str, Any]) -> dict[str, Any]:
    """Those of a run that samples responses."""
    task, ranks, held_out = TASKS[choices.task], choices.num_ranks, measured.num_held_out
    prompt = min(_round_up(measured.prompt), measured.model_limit - 1)
    if prompt < measured.prompt:
        raise UserError(
            f"the longest prompt has {measured.prompt} tokens, and the model was made for {measured.model_limit} in "
            "all; take another model, or leave long prompts out of the data"
        )
    usual_length = _round_up(2 * measured.answer + 1) if measured.answer else 1024
    response = min(RESPONSE_TOKENS.get(next(iter(choices.rewards), ""), usual_length), measured.model_limit - prompt)
    usual = ranks * -(-ROLLOUTS_PER_STEP // (task.group_size * ranks))
    # A step asks no question twice, but for data of fewer questions than ranks.
    prompts = max(ranks, min(usual, (measured.questions - held_out) // ranks * ranks))
    tables: dict[str, Any] = _first_tables(choices, source, num_steps=200, prompt=prompt)
    tables["rollout"] = {
        "prompts_per_step": prompts,
        "group_size": task.group_size,
        "max_response_tokens": response,
        "engine": "sglang" if choices.gpus and find_spec("sglang") else "torch",
        "max_running": min(256, prompts * task.group_size // ranks),
    }
    if choices.rewards:
        tables["reward"] = {"terms": [_term(*one) for one in enumerate(choices.rewards)]}
    if choices.teacher is not None:
        tables["models"] = {TEACHER: {"path": choices.teacher}}
        tables["distill"] = {"teacher": TEACHER, "divergence": "reverse"}
        tables["advantage"] = {"estimator": "none"}
    tables |= _last_tables(choices, max_tokens=prompt + response)
    if tables["rollout"]["engine"] == "sglang" and any(image_problems(Config.model_validate(tables), measured.model)):
        tables["rollout"]["engine"] = "torch"
    if held_out and choices.rewards:
        tables["eval"] = {"num_prompts": held_out, "every": 25, "sources": [source]}
        if len(choices.rewards) > 1:
            tables["eval"] |= {"success_at": 1.0}
    return tables


def _term(place: int, reward: str) -> dict[str, Any]:
    """The table of a reward, which counts little compared with the first one."""
    kind = {"kind": reward} if reward in REWARDS else {"kind": "function", "function": reward}
    return kind | ({"weight": BESIDE} if place else {})


def _tuning_tables(choices: Choices, measured: Measured, source: dict[str, Any]) -> dict[str, Any]:
    """Those of a run that learns from the answers of a file."""
    task, ranks, limit = TASKS[choices.task], choices.num_ranks, measured.model_limit
    assert issubclass(task.settings, TuningConfig), "there are two kinds of runs"
    if measured.prompt + measured.answer > limit:
        raise UserError(
            f"the longest prompt has {measured.prompt} tokens and the longest answer {measured.answer}, and the model "
            f"was made for {limit} in all; take another model, or leave long rows out of the data"
        )
    prompt = min(_round_up(measured.prompt), limit - measured.answer)
    response = min(_round_up(measured.answer), limit - prompt)
    per_step = max(ranks, min(ROWS_PER_STEP, measured.rows // STEPS_PER_PASS) // ranks * ranks)
    num_steps = -(-task.passes * measured.rows // per_step)
    tables: dict[str, Any] = _first_tables(choices, source, num_steps=num_steps, prompt=prompt)
    own = tables[task.settings.table] = {task.settings.rows_setting: per_step, "max_response_tokens": response}
    if isinstance(choices.data, FileData) and choices.data.response_column is None:
        own["turns"] = "last"
    tables |= _last_tables(choices, max_tokens=(prompt + response) * task.settings.sequences_per_row)
    tables["optim"] |= {"schedule": "linear", "warmup_steps": num_steps // 10}
    if measured.num_held_out:
        every = max(1, num_steps // 10)
        tables["held_out"] = {"num_prompts": measured.num_held_out, "every": every, "sources": [source]}
    return tables


def _first_tables(choices: Choices, source: dict[str, Any], *, num_steps: int, prompt: int) -> dict[str, Any]:
    return {
        "run": {"name": choices.name, "num_steps": num_steps, "seed": 1}
        | ({"download": True} if choices.download else {}),
        "model": {"path": choices.model},
        "data": {"max_prompt_tokens": prompt, "sources": [source]},
    }


def _last_tables(choices: Choices, *, max_tokens: int) -> dict[str, Any]:
    task = TASKS[choices.task]
    return {
        "optim": {"lr": task.lr if choices.gpus else task.lr_on_cpu},
        "pack": {"max_tokens_per_micro_batch": max(16384, max_tokens)},
        "checkpoint": {"every": 50},
    }


def _round_up(tokens: int) -> int:
    """Return the next power of two, from 16 on."""
    return max(16, 1 << (tokens - 1).bit_length())
