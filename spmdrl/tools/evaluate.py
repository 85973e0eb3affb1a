"""Evaluate a model on held-out prompts, with transformers: `spmdrl evaluate RUN`, or `spmdrl evaluate MODEL --data FILE
--reward KIND`. The result has pass@k and an interval; two evaluations of the same prompts are compared.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tomlkit
import torch
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from spmdrl.algo.evaluation import overlapping, paired_difference
from spmdrl.algo.metrics import scalars
from spmdrl.config import Config, FileSettings, ModelConfig, SetData, TuningConfig, read_config, read_run_config
from spmdrl.config.engines import ENGINES, EngineFacts
from spmdrl.config.sets import GENERATED, known_sets, set_name
from spmdrl.config.strict import about, conform, parse_own_json
from spmdrl.data.sources import FileSource
from spmdrl.data.tokenizer import decode, load_tokenizer, uses_template
from spmdrl.dist.session import default_device_type
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.envs.client import open_environments
from spmdrl.faults.text import Parser, say
from spmdrl.model.attention import Kernel, choose_kernel
from spmdrl.model.load import compute_dtype, load_model_config, load_plain, weights_of
from spmdrl.preflight.hub import PREFIX, NotInCache, model_folder, set_file, with_files_here
from spmdrl.preflight.inputs import open_held_out
from spmdrl.refit.refit import load_whole
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.env_context import open_env_context
from spmdrl.rollout.policy_judge import PolicyJudge
from spmdrl.rollout.sampling import eval_sampling
from spmdrl.rollout.scheduler import sample
from spmdrl.run import kernel_of_run
from spmdrl.step.evaluate import ScoredPrompt, eval_metrics, scored_prompts
from spmdrl.tools.init import KINDS, choose, measure, parse
from spmdrl.tools.program import program, writing
from spmdrl.tools.starting import RESPONSE_TOKENS, starting_tables
from spmdrl.types import RewardOutcome, Rollout, UserError

# Evaluation sets by name: where they are, what their columns mean, and which of their items training has seen.


INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."  # as the models' own cards ask for it


def set_tables(name: str, *, download: bool) -> dict[str, Any]:
    """Return the tables of a configuration that this set decides. Raises UserError where there is none of the name."""
    try:
        source = {"kind": "set", "name": set_name(name)}
    except ValueError as error:
        raise UserError(f"--set {name} {error}") from None
    if name.startswith(GENERATED):
        return {"source": source, "reward": "reasoning_gym"}
    try:
        path = set_file(name, download)
    except UserError as error:
        remedy = "; add --download to fetch it once" if isinstance(error, NotInCache) else ""
        raise UserError(f"--set {name} (hf:{known_sets()[name].repository}): {error}{remedy}") from error
    return {"source": source | {"path": path}, "reward": "math", "system_prompt": INSTRUCTION}


def seen_in_training(questions: Sequence[str], cfg: Config | TuningConfig) -> set[int]:
    """Return the places of the questions that a run's files have too: see `algo.evaluation.overlapping`."""
    files = (FileSource(source, seed=0) for source in cfg.data.sources if isinstance(source, FileSettings))
    return overlapping(questions, (row.question for file in files for row in file.in_file_order()))


# The evaluation.


USUAL_REWARD = "math"  # of a file that is given as a set
MAX_PROMPT_TOKENS = 2048  # of a set's question


def _of_run(run: Path, overrides: Sequence[str]) -> tuple[Config, Path]:
    """The settings of a run and the folder of its model. Raises UserError where it has none, or nothing held out."""
    if isinstance(tuned := read_run_config(str(run / "config.toml"), []), TuningConfig):
        raise UserError(
            f"{run} is a run of {tuned.table}, which has no rewards; give --data FILE --reward KIND, or --set NAME"
        )
    cfg = with_files_here(read_config(Config, str(run / "config.toml"), overrides))
    if cfg.eval is None:
        raise UserError(f"{run}/config.toml has no [eval] section, so there are no held-out prompts")
    return cfg, _export_of(run)


def _export_of(run: Path) -> Path:
    """The folder of a run's exported model. Raises UserError where there is none."""
    if not (run / "hf" / "config.json").is_file():
        raise UserError(
            f"{run}/hf holds no exported model; the run writes it after the last step, unless export.at_end or "
            f"export.merged is false, and `spmdrl export {run}` from a checkpoint"
        )
    return run / "hf"


def _resolved(given: str) -> str:
    """A run's exported model, or the model that is given itself. Raises UserError for a run without one."""
    run = Path(given)
    return str(_export_of(run)) if (run / "config.toml").is_file() or (run / "hf").is_dir() else given


def _of_set(
    run: str, name: str, reward: str | None, overrides: Sequence[str], *, download: bool
) -> tuple[Config, Path]:
    """Settings for a run's exported model, or any model, and an evaluation set: a name, a file of data, or a
    configuration. Raises UserError."""
    model = _resolved(run)
    folder = model_folder(model, download) if model.startswith(PREFIX) else model
    if Path(name).suffix == ".toml":
        return _of_settings(name, folder, overrides)
    if Path(name).suffix in KINDS:
        return _of_model(run, name, reward or USUAL_REWARD, overrides, download=download)
    chosen = set_tables(name, download=download)
    limit = load_model_config(ModelConfig(path=folder)).get_text_config().max_position_embeddings
    prompt = min(MAX_PROMPT_TOKENS, limit // 2)
    data = {
        "max_prompt_tokens": prompt,
        "sources": [SetData.model_validate(chosen["source"]).rows.model_dump(exclude_none=True)],
    }
    if "system_prompt" in chosen and uses_template(load_tokenizer(folder), "auto"):
        data["system_prompt"] = chosen["system_prompt"]
    tables = {
        "run": {"name": "evaluate", "num_steps": 1},
        "model": {"path": folder},
        "data": data,
        "rollout": {
            "prompts_per_step": 1,
            "group_size": 2,
            "max_response_tokens": min(RESPONSE_TOKENS["math"], limit - prompt),
        },
        "reward": {"terms": [{"kind": chosen["reward"]}]},
        "optim": {"lr": 1e-6},
        "pack": {"max_tokens_per_micro_batch": limit},
        "eval": {"sources": [chosen["source"]]},
    }
    return _read(tables, overrides)


def _of_settings(file: str, folder: str, overrides: Sequence[str]) -> tuple[Config, Path]:
    """Settings for a model, with the held-out prompts, environment and rewards of a configuration. Raises UserError."""
    cfg = with_files_here(read_config(Config, file, [f"model.path={json.dumps(folder)}", *overrides]))
    if cfg.eval is None:
        raise UserError(f"--set {file} has no [eval] section, so there are no held-out prompts")
    return cfg, Path(folder)


def _of_model(model: str, data: str, reward: str, overrides: Sequence[str], *, download: bool) -> tuple[Config, Path]:
    """Settings for a model, or a run's, and all questions of a file, as `spmdrl init` would choose them. Raises
    UserError."""
    options = ["--model", _resolved(model), "--data", data, "--reward", reward, "--gpus", "0"]
    choices = choose(parse([*options, "--download"] if download else options))
    tables = starting_tables(choices, measured := measure(choices))
    every = {"num_prompts": measured.questions, "sources": tables["data"]["sources"]}
    return _read(tables | {"eval": every}, overrides)


def _read(tables: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Config, Path]:
    with TemporaryDirectory() as folder:
        file = Path(folder, "evaluate.toml")
        file.write_text(tomlkit.dumps(tables), encoding="utf-8")
        cfg = with_files_here(read_config(Config, str(file), overrides))
    return cfg, Path(cfg.model.path)


def answers(cfg: Config, folder: Path) -> list[tuple[Rollout, RewardOutcome]]:
    """Load a model into an engine, and return its responses to the held-out prompts with their rewards."""
    held_out = open_held_out(cfg)
    device = torch.device(default_device_type())
    dtype = compute_dtype(cfg.model.compute_dtype, device.type)
    model = load_plain(cfg.model.model_copy(update={"path": str(folder)}), dtype)
    engine = TorchEngine(
        model.config,
        device=device,
        dtype=dtype,
        kernel=_kernel(cfg, device.type, dtype),
        max_running=cfg.rollout.max_running,
        images=held_out.images.store,
    )
    load_whole(engine, weights_of(model), version=0)
    with RewardClient(cfg.reward, held_out.tokenizer, sets=cfg.set_rewards) as rewards, ExitStack() as exits:
        env_context = None
        if cfg.environment is not None:
            client = exits.enter_context(open_environments(cfg.environment))
            env_context = open_env_context(cfg, client, held_out.tokenizer, held_out.stop_token_ids, held_out.images)
        sampling = eval_sampling(cfg, held_out.stop_token_ids)
        pending = sample(
            engine,
            held_out.prompts,
            sampling,
            env_context,
            rewards.submit,
            run_seed=cfg.run.seed,
            step=0,
            restore_images=lambda episode: held_out.prompts.restore(episode.prompt),
            in_order=True,
        )
        read = partial(decode, held_out.tokenizer)
        judge = PolicyJudge(engine, held_out.tokenizer, held_out.stop_token_ids, cfg, None, read)
        return rewards.collect(rewards.complete(pending, judge))


def _kernel(cfg: Config, device_type: str, dtype: torch.dtype) -> Kernel:
    """Return the attention kernel of the run's engine, if the torch engine has it on this device."""
    _, facts = ENGINES.get(cfg.rollout.engine, ("", EngineFacts()))
    if facts.in_process and device_type in facts.exact_kernels:
        return kernel_of_run(cfg, device_type, dtype)
    return choose_kernel(cfg.model.attention, device_type, dtype)


def items_of(prompts: Sequence[ScoredPrompt], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file of an evaluation; a number in their keys tells equal texts apart."""
    times: Counter[str] = Counter()
    for one in prompts:
        item = _item_of(one, tokenizer)
        times[item["key"]] += 1
        yield item | {"key": f"{item['key']}-{times[item['key']]}"}


def _item_of(one: ScoredPrompt, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A prompt, and what came of each response."""
    texts = [
        tokenizer.decode([token for response in rollout.responses for token in response.token_ids])
        for rollout, _ in one.answers
    ]
    return {
        "key": hashlib.sha256(f"{one.prompt.text}\0{one.prompt.answer}".encode()).hexdigest()[:16],
        "prompt": one.prompt.text,
        "answer": one.prompt.answer,
        "task": one.prompt.task,
        "right": list(one.right),
        "rewards": [outcome.reward for _, outcome in one.answers],
        "responses": texts,
    }


def read_items(path: Path) -> dict[str, float]:
    """Read the share of right responses to each prompt, by the prompt's key, from the file of an evaluation."""
    with about(path):
        rows = conform([parse_own_json(line) for line in path.read_bytes().splitlines()], list[_EvaluatedItem])
    return {row.key: sum(row.right) / len(row.right) for row in rows}


class _EvaluatedItem(BaseModel):
    key: str
    right: Annotated[list[bool], Field(min_length=1)]


def against(ours: Mapping[str, float], theirs: Mapping[str, float], name: str) -> dict[str, float]:
    """Compare two evaluations of the same prompts. Raises UserError where they are of others."""
    if ours.keys() != theirs.keys():
        shared = len(ours.keys() & theirs.keys())
        raise UserError(
            f"--against {name} is of other prompts: of {len(ours)} here and {len(theirs)} there {shared} are the same; "
            "evaluate both models on the same file"
        )
    found = paired_difference([ours[key] for key in ours], [theirs[key] for key in ours])
    return {f"against/{name}/{field}": value for field, value in asdict(found).items()}


@program("cannot evaluate")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", help="a run's folder, a model directory, or hf:ORGANISATION/NAME")
    parser.add_argument("override", nargs="*", help="section.key=value, such as eval.samples_per_prompt=8")
    parser.add_argument(
        "--set",
        metavar="NAMES",
        help=f"evaluation sets: {', '.join(known_sets())}, {GENERATED}TASK; a file of data; or a configuration, whose "
        "[eval], [environment] and [reward] are taken",
    )
    parser.add_argument("--download", action="store_true", help="fetch a set, data or a model that is not in the cache")
    parser.add_argument("--trained-on", metavar="RUN", help="count the questions that are in this run's data too")
    parser.add_argument(
        "--data", metavar="FILE", help="in place of what a run held out: jsonl or parquet, or hf:ORGANISATION/NAME"
    )
    parser.add_argument(
        "--reward",
        metavar="KIND",
        help=f"of --data, as of spmdrl init; of a --set that is a file, {USUAL_REWARD} unless given",
    )
    parser.add_argument("--items", type=Path, metavar="FILE", help="write each prompt with its responses as JSON lines")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the --items of another evaluation")
    given = parser.parse_intermixed_args(argv)
    if (given.data is None) != (given.reward is None) and given.set is None:
        raise UserError("--data and --reward belong together; give both, or neither for the held-out prompts of a run")
    transformers_logging.disable_progress_bar()  # the result is one line of JSON
    theirs = None if given.against is None else read_items(given.against)
    names = [] if given.set is None else given.set.split(",")
    if len(names) > 1 and (given.items or given.against):
        raise UserError("--items and --against are of one evaluation, and --set names several; give one set at a time")
    if names and given.data is not None:
        raise UserError("--set and --data both say what is asked; give one of them")
    is_held_out = not names and given.data is None
    if (trained_on := given.trained_on) is None and not is_held_out and Path(given.run, "config.toml").is_file():
        trained_on = given.run
    trained = None if trained_on is None else with_files_here(read_run_config(str(Path(trained_on, "config.toml")), []))
    if names:
        for name in names:
            opened = _of_set(given.run, name, given.reward, given.override, download=given.download)
            say(json.dumps({"set": name} | _evaluated(*opened, trained, given.items, theirs, str(given.against))))
    else:
        opened = (
            _of_run(Path(given.run), given.override)
            if is_held_out
            else _of_model(given.run, given.data, given.reward, given.override, download=given.download)
        )
        say(json.dumps(_evaluated(*opened, trained, given.items, theirs, str(given.against))))


def _evaluated(
    cfg: Config,
    folder: Path,
    trained: Config | TuningConfig | None,
    written: Path | None,
    theirs: Mapping[str, float] | None,
    name: str,
) -> dict[str, float]:
    """Evaluate a model, write its items, and compare them with those of `name`; returns the metrics.

    `trained` are the settings of a run whose data may have the questions too.
    """
    outcomes = answers(cfg, folder)
    values = scalars(eval_metrics(outcomes, success_at=cfg.success_at))
    tokenizer = load_tokenizer(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    scored = scored_prompts(outcomes, success_at=cfg.success_at)
    items = [*items_of(scored, tokenizer)]
    if trained is not None:
        seen = seen_in_training([one.prompt.question for one in scored], trained)
        values["eval/seen_in_training_count"] = float(len(seen))
        for place, item in enumerate(items):
            item["seen_in_training"] = place in seen
    if written is not None:
        with writing(written, "--items"):
            written.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    if theirs is not None:
        ours = {item["key"]: sum(item["right"]) / len(item["right"]) for item in items}
        values |= against(ours, theirs, name)
    return values


if __name__ == "__main__":
    sys.exit(main())
