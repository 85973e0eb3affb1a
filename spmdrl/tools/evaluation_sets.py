"""Evaluation sets by name: where they are, what their columns mean, and which of their items training has seen."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.algo.evaluation import overlapping
from spmdrl.config import Config, FileData, FileSettings, TuningConfig
from spmdrl.data.sources import FileSource
from spmdrl.preflight.hub import NotInCache, data_file, with_split_file
from spmdrl.types import UserError

GENERATED = "reasoning_gym/"  # before the name of a task
GENERATED_ITEMS = 100
INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."  # as the models' own cards ask for it
_TABLE = Path(__file__).with_name("evaluation_sets.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A data set on a hub with questions of one final answer each."""

    repository: str
    split: str
    prompt_column: str
    answer_column: str
    about: str
    answer_after: str | None = None

    def source(self, name: str, *, download: bool) -> dict[str, Any]:
        """Return the table of its source. Raises UserError when its file is not there."""
        try:
            named = with_split_file(f"hf:{self.repository}", download, split=self.split)
            path = data_file(named, download)
        except UserError as error:
            remedy = "; add --download to fetch it once" if isinstance(error, NotInCache) else ""
            raise UserError(f"--set {name} (hf:{self.repository}): {error}{remedy}") from error
        columns = {"prompt_column": self.prompt_column, "answer_column": self.answer_column, "task": name}
        after = {} if self.answer_after is None else {"answer_after": self.answer_after}
        return {"kind": "jsonl" if path.endswith(".jsonl") else "parquet", "path": path, **columns, **after}


def known_sets() -> Mapping[str, EvaluationSet]:
    """Return the sets that have names."""
    return {name: EvaluationSet(**table) for name, table in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()}


def set_tables(name: str, *, download: bool) -> dict[str, Any]:
    """Return the tables of a configuration that this set decides. Raises UserError where there is none of the name."""
    if name.startswith(GENERATED):
        source = {"kind": "reasoning_gym", "task": name.removeprefix(GENERATED)}
        return {"sources": [source], "num_prompts": GENERATED_ITEMS, "reward": "reasoning_gym"}
    if (found := known_sets().get(name)) is None:
        raise UserError(f"--set {name}: there are {', '.join(known_sets())}, and {GENERATED}TASK of reasoning-gym")
    source = found.source(name, download=download)
    questions = {row.question for row in FileSource(FileData.model_validate(source), seed=0).in_file_order()}
    return {"sources": [source], "num_prompts": len(questions), "reward": "math", "system_prompt": INSTRUCTION}


def seen_in_training(questions: Sequence[str], cfg: Config | TuningConfig) -> set[int]:
    """Return the places of the questions that a run's files have too: see `algo.evaluation.overlapping`."""
    return overlapping(questions, _questions_of(cfg))


def _questions_of(cfg: Config | TuningConfig) -> Iterator[str]:
    files: Iterable[FileSettings] = (source for source in cfg.data.sources if isinstance(source, FileSettings))
    for source in files:
        yield from (row.question for row in FileSource(source, seed=0).in_file_order())
