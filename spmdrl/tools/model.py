"""`spmdrl model PATH_OR_CONFIG_OR_NAME`: can this model be trained here, and is what is computed right?

It builds a tiny model with random weights and the settings of the real one, of which it changes sizes alone, and
compares every way to compute with transformers' own eager code, in float32 on this machine's CPU. Nothing is
downloaded. The exit code is 0 when every answer is yes, else 1, and 2 when no model can be built.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from spmdrl.config import Config, ModelConfig
from spmdrl.families import vision_family, without_sounds
from spmdrl.faults.text import Parser, say
from spmdrl.memory.device import GIB
from spmdrl.model.load import model_without_memory
from spmdrl.model.supported import refusal_of_config, refusal_of_model
from spmdrl.model.trunk import has_language_model
from spmdrl.preflight.forecast import Model, predict
from spmdrl.tools.fit import shortages, summary
from spmdrl.tools.model_rows import ON_ONE_RANK, ROWS, WITHOUT_SGLANG, Subject, Verdict, prepare, verdicts
from spmdrl.tools.model_shrink import save_tiny, shrunk
from spmdrl.tools.model_source import ModelSource, released, source_of
from spmdrl.tools.program import ToolConsole, program
from spmdrl.types import UserError

EXIT_NOT_ALL = 1
_STYLES = {"yes": "green", "no": "bold red", "refused": "yellow"}
_GPU_GIB = 80
_MOST_RANKS = 1024
_USUAL: Mapping[str, Any] = {
    "run": {"name": "model", "num_steps": 1},
    "model": {"path": "model", "gradient_checkpointing": "full"},
    "data": {"max_prompt_tokens": 1024, "sources": [{"kind": "jsonl", "path": "data.jsonl"}]},
    "reward": {"terms": [{"kind": "exact"}]},
    "optim": {"lr": 1e-6},
    "pack": {"max_tokens_per_micro_batch": 8192},
    "offload": {"trainer": "all", "engine": ["kv_cache", "weights"]},
}


def answers(
    source: ModelSource, folder: Path, questions: Collection[str] = WITHOUT_SGLANG, *, dtype: str = "float32"
) -> Iterator[Verdict]:
    """Build the tiny model in `folder` and answer questions about it. Raises UserError where none can be built.

    SGLang computes in `dtype`.
    """
    path, cfg = folder / "tiny", ModelConfig(path="model")
    if refusal := refusal_of_config(source.config):
        yield Verdict("trained", "refused", refusal)
        return
    if not has_language_model(source.config.model_type) and vision_family(source.config) is None:
        has_none = f"transformers {transformers.__version__} has no causal language model of type"
        yield Verdict("trained", "refused", f"{has_none} {source.config.model_type}; a newer one may have it")
        return
    try:
        config = shrunk(source.config)
        refusal = refusal_of_model(model_without_memory(config, cfg), cfg.attention)
        if not refusal:
            save_tiny(config, path)
    except Exception as error:  # transformers raises many types for settings that its code does not take
        raise UserError(f"{source.name}: no tiny model can be built of it: {' '.join(str(error).split())}") from error
    if refusal:
        yield Verdict("trained", "refused", refusal)
    else:
        yield from verdicts(Subject(source, path, dtype=dtype), questions)


def answers_on_one_rank(model: str) -> list[Verdict] | str:
    """Answer what one rank can without SGLang, in a process of its own; a sentence where no tiny model can be built."""
    torch.set_num_threads(1)  # another process works at the same time
    quiet()
    with tempfile.TemporaryDirectory(prefix="spmdrl-model-") as folder:
        try:
            return list(answers(source_of(model), Path(folder), ON_ONE_RANK))
        except UserError as error:
            return str(error)


def memory_line(config: Any) -> str:
    """Say how many GPUs a run of reinforcement learning with usual settings needs for the model at its real size."""
    model = Model.read(without_sounds(config), ModelConfig(path="model"))
    for num_ranks in (2**power for power in range(_MOST_RANKS.bit_length())):
        for tp_size in (size for size in (1, 2, 4, 8) if size <= num_ranks):
            rollout = {"engine": "sglang", "tp_size": tp_size, "prompts_per_step": max(64, num_ranks), "group_size": 8}
            cfg = Config.model_validate({**_USUAL, "rollout": {**rollout, "max_response_tokens": 3072}})
            found = predict(cfg, model, num_ranks=num_ranks, device_bytes=_GPU_GIB * GIB, on_gpu=True)
            if not any(shortages(found)):
                return f"SGLang's tp_size {tp_size}, 4,096 tokens of a rollout: {summary(found)}"
    return f"with SGLang and 4,096 tokens of a rollout it does not fit into {_MOST_RANKS} x {_GPU_GIB} GiB"


@program("no verdict")
def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict and return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory, config.json, hf:ORGANISATION/NAME, or a released model")
    parser.add_argument("--list", action="store_true", help="list the models whose released settings are known")
    arguments = parser.parse_args(argv)
    if arguments.list:
        say("\n".join(f"{name.ljust(28)}{row['model']}" for name, row in released().items()))
        return 0
    if arguments.model is None:
        parser.error("name a model, or --list those whose released settings are known")
    source = source_of(arguments.model)
    quiet()
    prepare("spmdrl.tools.model_rows")
    questions = ROWS if find_spec("sglang") else WITHOUT_SGLANG
    with tempfile.TemporaryDirectory(prefix="spmdrl-model-") as folder:
        found = list(answers(source, Path(folder), questions))
    _print(source, found)
    return 0 if all(verdict.answer == "yes" for verdict in found) else EXIT_NOT_ALL


def quiet(*, on_cpu: bool = True) -> None:
    """Compute on this machine's CPU, and let transformers say nothing but errors."""
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _print(source: ModelSource, found: Sequence[Verdict]) -> None:
    table = Table(
        box=None, padding=(0, 2, 0, 0), title=f"{source.name} ({source.config.model_type})", title_justify="left"
    )
    for verdict in found:
        table.add_row(verdict.question, Text(verdict.answer, style=_STYLES[verdict.answer]), verdict.remark)
    ToolConsole.of_width(200).print(table)
    if all(verdict.answer != "no" and verdict.question != "trained" for verdict in found):
        say(memory_line(source.config))


if __name__ == "__main__":
    sys.exit(main())
