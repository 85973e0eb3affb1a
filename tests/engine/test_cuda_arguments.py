"""SGLang's own reading of our arguments on a Hopper device that is only simulated: nothing is started."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from spmdrl.dist.session import World
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.options import sglang_options
from spmdrl.model.load import load_model_config
from spmdrl_sglang_cpu import on_import
from tests.helpers.config_file import GOOD, read
from tests.helpers.models import save_qwen3, save_qwen3_next
from tests.helpers.ranks import run_ranks
from tests.helpers.vision import save_vision_files
from tests.helpers.vision_models import save_qwen3_vl

pytestmark = pytest.mark.slow  # SGLang is imported anew, behind a device that is only simulated

MEMORY_MIB = 143_771
GIVES_BACK = 'offload.engine=["kv_cache", "weights", "cuda_graph"]'
APART = ('rollout.placement="disaggregated"', "rollout.num_ranks=1")
CASES = {
    "plain": (),
    "full": ("rollout.sglang.cuda_graph_backend_prefill=full", GIVES_BACK),
    "asked": (*APART, "rollout.sglang.disable_prefill_cuda_graph=false"),
    "none": ("rollout.cuda_graphs=false",),
    "exact": ("true_on_policy=true", "rollout.attention_backend=triton"),
    "hybrid": ("model.path={folder}/hybrid",),
    "images": ("model.path={folder}/images",),
}


class AnyModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of which every name is something: those that SGLang imports on a device, and that are not called."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.split(".")[0] in ("sgl_kernel", "pynvml"):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: MagicMock()  # type: ignore[method-assign]


def simulate_a_device() -> None:
    """For this process, and before it imports SGLang."""
    sys.meta_path.insert(0, AnyModule())
    on_import.install()
    properties = SimpleNamespace(major=9, minor=0, total_memory=MEMORY_MIB * 2**20, multi_processor_count=132)
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    for name, answer in (answers | {"get_device_name": "H200", "get_device_properties": properties}).items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.version.cuda = "13.0"
    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"


def resolved(folder: Path) -> dict[str, Any]:
    """Resolve the arguments of each case as SGLang does."""
    simulate_a_device()
    sglang_process.import_sglang()
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.model_overrides import qwen3_vl
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    for module in (memory_hook, qwen3_vl):
        module.get_device_memory_capacity = lambda device=None: float(MEMORY_MIB)
    plan: Any = SimpleNamespace(max_sampled_tokens=100)
    world = World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        patience=timedelta(minutes=1),
        device=torch.device("cuda", 0),
    )
    found = {}
    for name, overrides in CASES.items():
        changes = [f"model.path={folder / 'model'}", *(override.format(folder=folder) for override in overrides)]
        cfg = read(folder, GOOD, "rollout.engine=sglang", *changes)
        options = sglang_options(cfg, plan, world, load_model_config(cfg.model))
        with sglang_process._launch_surroundings(options.environment, sockets=str(folder)):
            arguments = ServerArgs(**options.arguments)
            arguments.resolve_once()
            arguments.check_server_args()
        view = resolved_view(arguments)
        graphs = view.cuda_graph_config
        found[name] = {
            "graphs": (graphs.decode.backend, graphs.prefill.backend),
            "largest": graphs.decode.max_bs,
            "given": {key: (value, getattr(view, key)) for key, value in options.arguments.items()},
            "pixels go by": view.mm_feature_transport,
            "backends": (view.attention_backend, view.sampling_backend),
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("device")
    save_qwen3(folder / "model", head_dim=128)
    save_qwen3_next(folder / "hybrid", head_dim=128)
    save_vision_files(save_qwen3_vl(folder / "images"), patch_size=4)
    return run_ranks(1, resolved, folder, timeout_s=120.0)[0]


def test_prompts_get_the_graphs_that_were_asked_for_and_no_others(found: dict[str, Any]) -> None:
    assert {name: case["graphs"] for name, case in found.items()} == {
        "plain": ("full", "disabled"),
        "full": ("full", "full"),
        "asked": ("full", "breakable"),
        "none": ("disabled", "disabled"),
        "exact": ("full", "disabled"),
        "hybrid": ("full", "disabled"),
        "images": ("full", "disabled"),
    }
    assert found["plain"]["largest"] == 256  # rollout.max_running: no batch is larger


def test_sglang_keeps_what_it_is_given(found: dict[str, Any]) -> None:
    changed = {
        (name, key): values
        for name, case in found.items()
        for key, values in case["given"].items()
        if values[0] is not None and values[0] != values[1]
    }
    assert changed == {}


def test_pixels_take_no_memory_of_the_device_in_the_trainers_process(found: dict[str, Any]) -> None:
    assert {case["pixels go by"] for case in found.values()} == {"cpu"}


def test_kernels_that_it_chooses_itself(found: dict[str, Any]) -> None:
    """The first two are what `attention_problem` assumes; without flashinfer, torch samples."""
    assert found["plain"]["backends"] == found["asked"]["backends"] == ("fa3", "pytorch")
    assert found["exact"]["backends"] == ("triton", "pytorch")
