"""Evaluate a run's exported model on its held-out prompts, with transformers: `python -m spmdrl.tools.evaluate RUN`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from spmdrl.algo.metrics import scalars
from spmdrl.config import Config, read_config
from spmdrl.config.engines import ENGINES, EngineFacts
from spmdrl.dist.session import default_device_type
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.envs.client import open_environments
from spmdrl.faults.text import Parser, say
from spmdrl.model.attention import Kernel, choose_kernel
from spmdrl.model.load import compute_dtype, persistent_buffers
from spmdrl.model.trunk import model_class
from spmdrl.preflight.inputs import open_held_out
from spmdrl.refit.refit import load_whole
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.env_context import open_env_context
from spmdrl.rollout.sample import eval_sampling
from spmdrl.rollout.scheduler import sample
from spmdrl.run import kernel_of_run
from spmdrl.step.evaluate import eval_metrics
from spmdrl.tools.program import program
from spmdrl.types import UserError


def evaluate_export(run: Path) -> dict[str, float]:
    """Load RUN/hf into an engine and evaluate it on the run's held-out prompts. UserError if there is no model."""
    cfg = read_config(Config, str(run / "config.toml"), [])
    if cfg.eval is None:
        raise UserError(f"{run}/config.toml has no [eval] section, so there are no held-out prompts")
    if cfg.reward.model_terms:
        raise UserError(
            f"{run}/config.toml rewards by a model, which this program does not ask; eval/... of the run's metrics has "
            "the evaluation after its last step"
        )
    if not (run / "hf" / "config.json").is_file():
        raise UserError(
            f"{run}/hf holds no exported model; the run writes it after the last step, unless export.at_end or "
            "export.merged is false"
        )
    held_out = open_held_out(cfg)
    device = torch.device(default_device_type())
    dtype = compute_dtype(cfg.model.compute_dtype, device.type)
    model = model_class(AutoConfig.from_pretrained(run / "hf")).from_pretrained(run / "hf", dtype=dtype)
    engine = TorchEngine(
        model.config,
        device=device,
        dtype=dtype,
        kernel=_kernel(cfg, device.type, dtype),
        max_running=cfg.rollout.max_running,
        images=held_out.images.store,
    )
    load_whole(engine, dict(model.named_parameters()) | persistent_buffers(model), version=0)
    with RewardClient(cfg.reward, held_out.tokenizer) as rewards, ExitStack() as exits:
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
            restore_images=held_out.prompts.restore,
            in_order=True,
        )
        return scalars(eval_metrics(rewards.collect(pending), success_at=cfg.success_at))


def _kernel(cfg: Config, device_type: str, dtype: torch.dtype) -> Kernel:
    """Return the attention kernel of the run's engine, if the torch engine has it on this device."""
    _, facts = ENGINES.get(cfg.rollout.engine, ("", EngineFacts()))
    if facts.in_process and device_type in facts.exact_kernels:
        return kernel_of_run(cfg, device_type, dtype)
    return choose_kernel(cfg.model.attention, device_type, dtype)


@program("cannot evaluate")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()  # the result is one line of JSON
    say(json.dumps(evaluate_export(arguments.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
