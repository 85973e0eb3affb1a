"""The parts that every rank of a run shares: opened once, closed once.

Constructors take a `Run`. Phases and maths get the values they need, so that their signatures say what they read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from spmdrl import checkpoint
from spmdrl.config import Config, ParallelConfig, PreferencesConfig, TuningConfig
from spmdrl.config.engines import ENGINES, engine_facts
from spmdrl.config.plan import Plan, layouts
from spmdrl.data.stream import HeldOutPrompts, PromptStream, TrainingPair
from spmdrl.data.vision import ImageIntake
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.lock import FolderInUse, owned
from spmdrl.faults.verdict import SUPERVISED
from spmdrl.faults.watch import Watch, watch_over
from spmdrl.memory.device import MemoryPlan
from spmdrl.memory.phase import PhaseMemory
from spmdrl.model.attention import choose_kernel
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.frozen import FrozenModel, load_frozen
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import compute_dtype
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.machine import processor
from spmdrl.model.policy import PackedModel, Policy
from spmdrl.model.reward_model import load_reward_model
from spmdrl.model.routes import Routers, routes_refusal
from spmdrl.report import Report, RunFolder
from spmdrl.rewards.client import RewardClient
from spmdrl.types import UserError

SettingsT = TypeVar("SettingsT", bound=Config | TuningConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a run reads besides weights; `preflight/inputs.py` opens and checks it."""

    plan: Plan
    model_config: Any  # transformers' config of the model directory
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    prompts: PromptStream
    images: ImageIntake  # what becomes of images; its store has their pixels on this node
    held_out: HeldOutPrompts  # of all ranks
    held_out_pairs: list[TrainingPair]  # of all ranks; none but in fine-tuning that evaluates
    # Of the device of a rank that trains; None for a run without an engine, and where there is no device.
    memory: MemoryPlan | None
    phases: list[PhaseMemory]  # what each phase is predicted to hold


class Callback:
    """Calls of a script's own at the edges of a run; see `spmdrl/trainer.py`.

    Every rank calls it with the same values. One that raises StopRequested on all of them ends the run as if it had
    been asked to stop; anything else that it raises ends the run as an error.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when a step is done, with its row of metrics.jsonl."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation of the weights after this step; 0 is before the first."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called when a checkpoint has been copied; it is written into this folder in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[SettingsT]):
    """This rank among the others: its process group, its meshes, and what the settings mean on its device."""

    cfg: SettingsT
    folder: RunFolder
    world: World
    meshes: Meshes

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return compute_dtype(self.cfg.model.compute_dtype, self.device.type)

    @property
    def kernel(self) -> Kernel:
        """The attention kernel of the trainer, and of an engine that computes as the trainer does."""
        return kernel_of_run(self.cfg, self.device.type, self.dtype)

    @property
    def machine(self) -> dict[str, Any]:
        """The processor, threads and kernels, on which the last bits of results depend."""
        room = cpu_room() if self.device.type == "cpu" else None
        kernels = {"linear_kernels": None, "layers_in_c": None} if room is None else room.describe()
        return {"processor": processor(), "threads_per_rank": torch.get_num_threads(), **kernels}

    def load_policy(self) -> Policy:
        """Load the policy that the run trains; every rank that trains must call this, and reads its own shards."""
        cfg = self.cfg
        temperature = cfg.rollout.temperature if isinstance(cfg, Config) else 1.0
        policy = load_trained(
            cfg.model, cfg.lora, self.meshes, seed=cfg.run.seed, temperature=temperature, kernel=self.kernel
        )
        if isinstance(cfg, Config) and routes_refusal(policy.model) is None:
            policy.routers = Routers(policy.model)
            if any(one.loss.expert_balance_coef for one in cfg.algorithms):
                policy.routers.watch_scores()
        return policy

    def load_trained(self) -> PackedModel:
        """Load what the run trains: its policy, or a reward model. Every rank that trains must call this."""
        cfg = self.cfg
        if isinstance(cfg, PreferencesConfig) and cfg.pairs.trains_reward_model:
            return load_reward_model(cfg.model, self.meshes.model, seed=cfg.run.seed, kernel=self.kernel)
        return self.load_policy()

    def load_frozen(self, policy: PackedModel) -> dict[str, FrozenModel]:
        """Return the frozen models that the policy is compared with, by name: a reference, and teachers."""
        cfg = self.cfg
        if not isinstance(policy, Policy):  # a reward model
            return {}
        return load_frozen(
            policy, cfg.model, cfg.frozen_models, self.meshes, temperatures=cfg.temperatures, kernel=self.kernel
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Run[SettingsT]):
    """A `Run` that is being trained: opened inputs, a watchdog, a report, and where training begins."""

    inputs: Inputs
    watch: Watch
    report: Report
    resume_point: checkpoint.ResumePoint
    reward_client: RewardClient | None  # None: nothing is sampled, so nothing is rewarded
    exits: ExitStack  # closed when the run ends, however it ends
    callbacks: Sequence[Callback] = ()

    @property
    def plan(self) -> Plan:
        """Every count that follows from the settings."""
        return self.inputs.plan

    @property
    def rewards(self) -> RewardClient:
        """This rank's reward processes; fine-tuning has none."""
        assert self.reward_client is not None, "fine-tuning rewards nothing"
        return self.reward_client

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that lasts as long as the run."""
        return self.exits.enter_context(context)


@contextmanager
def open_run(
    cfg: SettingsT,
    folder: RunFolder,
    *,
    engine_ranks: int = 0,
    layouts: Mapping[str, ParallelConfig] = MappingProxyType({}),
) -> Iterator[Run[SettingsT]]:
    """Join the other ranks and build the meshes; every rank enters and leaves together. `layouts` are those of the
    models besides the policy that the run loads, where they have their own."""
    with spmd_session(
        threads_per_rank=cfg.run.threads_per_rank,
        deterministic=cfg.run.deterministic,
        patience_minutes=cfg.run.patience_minutes,
    ) as world:
        ranks_per_engine = cfg.rollout.tp_size if isinstance(cfg, Config) else 1
        meshes = build_meshes(
            world, cfg.parallel, ranks_per_engine=ranks_per_engine, engine_ranks=engine_ranks, layouts=layouts
        )
        run = Run(cfg=cfg, folder=folder, world=world, meshes=meshes)
        room = cpu_room() if run.device.type == "cpu" else None
        with nullcontext() if room is None else room.agree(run):
            yield run


def kernel_of_run(cfg: Config | TuningConfig, device_type: str, dtype: torch.dtype) -> Kernel:
    """Choose the attention kernel of the trainer and of the torch engine. Raises UserError when it cannot run here."""
    if isinstance(cfg, TuningConfig) or not cfg.true_on_policy:
        return choose_kernel(cfg.model.attention, device_type, dtype)
    kernels = engine_facts(cfg.rollout.engine).exact_kernels.get(device_type, {})
    if cfg.rollout.attention_backend not in kernels:
        here = "a CUDA device" if device_type == "cuda" else "a CPU"
        exact = next(name for name, (_, facts) in ENGINES.items() if device_type in facts.exact_kernels)
        raise UserError(
            f'true_on_policy = true has no exact kernels for rollout.engine = "{cfg.rollout.engine}" on {here}; set '
            f'rollout.engine = "{exact}", or true_on_policy = false'
        )
    return cast(Kernel, kernels[cfg.rollout.attention_backend])


@contextmanager
def owning(folder: Path, world: World, mesh: DeviceMesh, *, instead: str = "") -> Iterator[None]:
    """Own a run's folder on the first rank. Raises UserError on every rank if another process does; see `owned`."""
    with ExitStack() as exits:
        with raise_on_all_ranks(mesh):
            if world.is_main:
                try:
                    exits.enter_context(owned(folder, instead=instead))
                except FolderInUse as error:
                    raise UserError(str(error)) from None
        yield


@contextmanager
def open_launch(
    cfg: SettingsT, inputs: Inputs, folder: RunFolder, *, callbacks: Sequence[Callback] = ()
) -> Iterator[Launch[SettingsT]]:
    """Open a run to train it, from the checkpoint that `[resume]` chooses.

    An error while it is open is reported before anything is closed.
    """
    with (
        RewardClient(cfg.reward, inputs.tokenizer, judged=folder.judged, sets=cfg.set_rewards)
        if isinstance(cfg, Config)
        else nullcontext() as reward_client,
        open_run(cfg, folder, engine_ranks=inputs.plan.engine_ranks, layouts=layouts(cfg)) as run,
        nullcontext() if SUPERVISED in os.environ else owning(folder.path, run.world, run.meshes.world),
        watch_over(
            FaultFiles(folder.path), run.world, timeout_s=cfg.watchdog.timeout_s, stop_before=cfg.run.stop_before
        ) as watch,
        ExitStack() as exits,
    ):
        if inputs.images.store is not None:
            exits.enter_context(closing(inputs.images.store))
        resume_point = checkpoint.find_resume_point(cfg, folder.checkpoints, run.meshes.world)
        report = exits.enter_context(
            Report(
                cfg.report,
                folder,
                num_steps=inputs.plan.num_steps,
                active=run.world.is_main,
                start_step=resume_point.saved_step,
                on_phase=watch.enter,
            )
        )
        with watch.reporting():
            yield Launch(
                cfg=cfg,
                folder=folder,
                world=run.world,
                meshes=run.meshes,
                inputs=inputs,
                watch=watch,
                report=report,
                resume_point=resume_point,
                reward_client=reward_client,
                exits=exits,
                callbacks=callbacks,
            )
