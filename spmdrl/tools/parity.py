"""`python -m spmdrl.tools.parity CONFIG`: does every parallel layout give the same gradients as one rank?

It trains on a batch of random sequences in float32, on 1, 2 and 4 ranks of this machine, in every layout that the model
supports, with the loss of the configuration (for spmdrl.train or spmdrl.sft). A difference larger than rounding is a
bug, in spmdrl or in the model's code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from rich.table import Table
from transformers.utils import logging as transformers_logging

from spmdrl.config import Config, PreferencesConfig, TuningConfig, read_run_config
from spmdrl.dist.session import spmd_session
from spmdrl.faults.text import Parser
from spmdrl.model.load import load_model_config
from spmdrl.preflight.hub import with_models_here
from spmdrl.tools.parity_cases import (
    ADAMW_BOUND_OF_MOST,
    BOUND,
    MOST,
    ONE_BIT,
    ONE_RANK,
    TIMES_ONE_BIT,
    UPDATES,
    Case,
    CaseResult,
    Imitation,
    Reinforcement,
    Settings,
    cases,
    deviation,
    own_case,
    random_batch,
    train_case,
)
from spmdrl.tools.program import ToolConsole, program
from spmdrl.types import UserError

EXIT_DIFFERENT = 1
_RANKS = (1, 2, 4)


def matrix(cfg: Config | TuningConfig, settings: Settings) -> list[Case]:
    """List the cases of a configuration; all are compared with the first, and the second shows what rounding does."""
    own = own_case(cfg.parallel)
    every = [ONE_RANK, ONE_BIT, *cases(settings)]
    return every if own.parallel in [case.parallel for case in every] else [*every, own]


def compute(arguments: argparse.Namespace, folder: Path) -> None:
    """Compute the cases with this number of ranks and save their results in the folder; called on each rank."""
    transformers_logging.disable_progress_bar()
    cfg = with_models_here(read_run_config(arguments.config, arguments.override))
    settings = _settings(cfg)
    batch = random_batch(
        vocabulary=load_model_config(cfg.model).get_text_config().vocab_size,
        num_sequences=arguments.sequences,
        max_tokens=arguments.tokens,
        seed=cfg.run.seed,
    )
    with spmd_session(threads_per_rank=cfg.run.threads_per_rank, deterministic=True) as world:
        for number, case in enumerate(matrix(cfg, settings)):
            if case.num_ranks != world.num_ranks:
                continue
            try:
                found = train_case(case, settings, batch, world)
            except UserError as error:  # raised on every rank
                if world.is_main:
                    (folder / f"{number}.refused").write_text(str(error), encoding="utf-8")
                continue
            if found is not None:
                torch.save({field.name: getattr(found, field.name) for field in fields(found)}, folder / f"{number}.pt")


def _read(path: Path) -> CaseResult:
    return CaseResult(**torch.load(path, weights_only=True))


def compare(arguments: argparse.Namespace) -> bool:
    """Run all cases, print them, and return True when all agree. Raises UserError when one rank cannot train."""
    transformers_logging.disable_progress_bar()
    cfg = with_models_here(read_run_config(arguments.config, arguments.override))
    budget = cfg.pack.max_tokens_per_micro_batch
    if budget is not None and arguments.tokens > budget:
        raise UserError(
            f"--tokens {arguments.tokens} is more than pack.max_tokens_per_micro_batch = {budget}; lower it"
        )
    load_model_config(cfg.model)  # here an error is printed once, and not by every rank
    every = matrix(cfg, _settings(cfg))
    with tempfile.TemporaryDirectory(prefix="spmdrl-parity-") as temporary:
        folder = Path(temporary)
        for num_ranks in sorted({case.num_ranks for case in every if case.num_ranks <= arguments.ranks}):
            _launch(num_ranks, arguments, folder)
        if (refused := folder / "0.refused").exists():
            raise UserError(refused.read_text(encoding="utf-8"))
        if not all((folder / f"{every.index(case)}.pt").exists() for case in (ONE_RANK, ONE_BIT)):
            raise UserError("one rank could not train on the batch; its error is printed above")
        return _print(every, folder, most_ranks=arguments.ranks)


def _settings(cfg: Config | TuningConfig) -> Settings:
    if isinstance(cfg, PreferencesConfig):
        raise UserError(
            "the loss of pairs cannot be compared here; give the configuration of spmdrl.train or spmdrl.sft"
        )
    if isinstance(cfg, TuningConfig):
        return Settings(model=cfg.model, lora=cfg.lora, pack=cfg.pack, learning=Imitation())
    learning = Reinforcement(loss=cfg.loss, temperature=cfg.rollout.temperature)
    replays = cfg.correction.router_replay != "none"
    return Settings(model=cfg.model, lora=cfg.lora, pack=cfg.pack, learning=learning, replays_routes=replays)


def _launch(num_ranks: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Compute the cases of `num_ranks` ranks, on CUDA devices where there are enough of them."""
    elastic = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun = [sys.executable, "-m", *elastic, "--nproc-per-node", str(num_ranks)]
    options = ["--sequences", str(arguments.sequences), "--tokens", str(arguments.tokens), "--worker", str(folder)]
    has_devices = torch.cuda.device_count() >= num_ranks
    # Each rank sets its own number; torchrun says at length that it takes 1 where none is given.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run(
        [*torchrun, "-m", "spmdrl.tools.parity", arguments.config, *arguments.override, *options],
        env=os.environ | threads | ({} if has_devices else {"CUDA_VISIBLE_DEVICES": ""}),
        check=False,  # cases without a result are shown as failed
    )


def _print(every: list[Case], folder: Path, *, most_ranks: int) -> bool:
    allowed = f"{BOUND:g}, of a gradient {TIMES_ONE_BIT:g} times what one bit changes of it (at most {MOST:g})"
    table = Table(title=f"relative to 1 rank; allowed: {allowed}, after AdamW {ADAMW_BOUND_OF_MOST:g} of most weights")
    for column in ("layout", "ranks", "loss", "gradient", "of", "SGD", "AdamW", ""):
        table.add_column(column, justify="left" if column in ("layout", "of", "") else "right")
    one_rank, one_bit = (_read(folder / f"{every.index(case)}.pt") for case in (ONE_RANK, ONE_BIT))
    agrees = True
    for number, case in enumerate(every):
        if (refused := folder / f"{number}.refused").exists():
            table.add_row(case.name, str(case.num_ranks), "", "", "", "", "", refused.read_text(encoding="utf-8"))
        elif (path := folder / f"{number}.pt").exists():
            found = deviation(_read(path), one_rank, one_bit)
            agrees &= found.is_within or case.is_moved
            sizes = [f"{value:.1e}" for value in (found.loss, found.gradient, found.sgd, found.adamw_of_most)]
            verdict = "" if case.is_moved else "same" if found.is_within else "[red]different[/red]"
            table.add_row(case.name, str(case.num_ranks), *sizes[:2], found.worst, *sizes[2:], verdict)
        elif case.num_ranks > most_ranks:
            table.add_row(case.name, str(case.num_ranks), "", "", "", "", "", f"needs --ranks {case.num_ranks}")
        else:
            agrees = False
            table.add_row(case.name, str(case.num_ranks), "", "", "", "", "", "[red]failed[/red], see above")
    ToolConsole.of_width(200).print(table)
    return agrees


@program("cannot compare")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 1 when a layout differs, 2 when the user must change something."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--ranks", type=int, default=max(_RANKS), help="cases with more ranks are left out")
    parser.add_argument("--sequences", type=int, default=24, help="random sequences behind one update")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest sequence")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ranks < 1:
        parser.error("--ranks must be at least 1")
    if arguments.tokens < 4 or arguments.sequences < UPDATES:
        parser.error(f"--tokens must be at least 4, and --sequences at least {UPDATES}, the number of updates")
    if arguments.worker is not None:
        compute(arguments, arguments.worker)
        return 0
    return 0 if compare(arguments) else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
