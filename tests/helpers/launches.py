"""A `Launch` from its parts, for tests that run pieces of a run without its command line."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import ResumePoint
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.data.image_store import ImageStore
from spmdrl.data.stream import HeldOutPrompts
from spmdrl.data.vision import NoImages
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import World
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.watch import Watch
from spmdrl.model.load import load_model_config
from spmdrl.report import Report, RunFolder
from spmdrl.run import Inputs, Launch

NONE_HELD_OUT = HeldOutPrompts()


def launch_of(
    cfg: Config,
    plan: Plan,
    world: World,
    meshes: Meshes,
    folder: Path,
    *,
    prompts: Any = None,
    held_out: Any = NONE_HELD_OUT,
    stop_token_ids: frozenset[int] = frozenset({1}),
    rewards: Any = None,
    images: ImageStore | None = None,
) -> Launch[Config]:
    """A launch that begins at step 0, prints nothing, and writes into `folder` what a rank logs."""
    inputs = Inputs(
        plan=plan,
        model_config=load_model_config(cfg.model),
        tokenizer=None,  # type: ignore[arg-type]  # nothing here has text
        stop_token_ids=stop_token_ids,
        prompts=prompts,
        images=NoImages("nothing here has text", images),
        held_out=held_out,
        held_out_pairs=[],
        memory=None,
        phases=[],
    )
    return Launch(
        cfg=cfg,
        folder=RunFolder(folder),
        world=world,
        meshes=meshes,
        inputs=inputs,
        watch=Watch(FaultFiles(folder), launch="test", rank=world.rank, num_ranks=world.num_ranks),
        report=Report(cfg.report, None, num_steps=plan.num_steps, active=False),
        resume_point=ResumePoint(folder / "checkpoints", 0),
        reward_client=rewards,
        exits=ExitStack(),
    )
