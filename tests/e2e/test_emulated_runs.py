"""Whole runs on emulated CUDA devices, in every layout, do in float32 what one rank does on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.emulated_runs import EmulatedRun, run_on_devices
from tests.helpers.models import save_qwen3_moe, save_qwen3_next
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    model_and_sums,
    rows,
    sample_rows,
    steady_rows,
    sums_from_files,
    weights,
    write_config,
)
from tests.helpers.vision import save_vision_files, write_questions
from tests.helpers.vision_models import save_qwen3_vl

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares emulated devices with a CPU"),
    pytest.mark.timeout(900),  # a compiler may be at work
]

FLOAT32 = ["model.compute_dtype=float32", "report.samples_per_step=100", "run.num_steps=2"]
APART = ['rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=0"]
OFFLOAD = ["optim.state_on_host=true", 'offload.trainer="all"', 'offload.engine=["kv_cache","weights"]']


def dense(folder: Path) -> dict[str, Any]:
    save_tiny_model(folder / "model", num_layers=2, spare_tokens=1)  # two ranks can split an even vocabulary
    return sums_from_files(folder)


def mixture(folder: Path) -> dict[str, Any]:
    return model_and_sums(save_qwen3_moe, folder, num_experts=8)


def hybrid(folder: Path) -> dict[str, Any]:
    return model_and_sums(save_qwen3_next, folder)


def images(folder: Path) -> dict[str, Any]:
    save_qwen3_vl(folder / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(folder / "model")
    return {
        "data": write_questions(folder, "train", first=0, count=12) | {"max_prompt_tokens": 64},
        "eval": write_questions(folder, "held-out", first=100, count=4) | {"num_prompts": 4},
    }


# A model, settings that change the run, and for each layout of it the number of devices and its settings.
ADAPTERS = ["lora.rank=4"]
RUNS: dict[str, tuple[Callable[[Path], dict[str, Any]], list[str], dict[str, tuple[int, list[str]]]]] = {
    "dense": (
        dense,
        [],
        {
            "fsdp": (2, []),
            "fsdp-offload": (2, OFFLOAD),
            "offload": (1, OFFLOAD),
            "disaggregated": (2, APART),
            "cp": (2, ["parallel.cp=2"]),
            "ulysses": (2, ["parallel.cp=2", 'parallel.cp_style="ulysses"']),
            "tp": (2, ["parallel.tp=2"]),
            "hsdp": (4, ["parallel.dp_replicate=2", *OFFLOAD]),
            "tp-cp": (4, ["parallel.tp=2", "parallel.cp=2"]),
            "hsdp-apart": (4, [*APART[:1], "rollout.num_ranks=2", *APART[2:], "parallel.dp_replicate=2"]),
        },
    ),
    "adapters": (dense, ADAPTERS, {"adapters": (2, [])}),
    "mixture": (mixture, [], {"ep": (2, ["parallel.ep=2"])}),
    "hybrid": (hybrid, [], {"hybrid": (2, [])}),
    "images": (images, [], {"images": (2, [])}),
}
IN_THE_GATE = ("fsdp-offload",)
CASES = [
    pytest.param(kind, name, id=name, marks=() if name in IN_THE_GATE else pytest.mark.slow)
    for kind, (_, _, layouts) in RUNS.items()
    for name in layouts
]


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a kind of run, in which one rank on a CPU has made `runs/cpu`."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            save, settings, _ = RUNS[kind]
            rollout = {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 6}
            tables = save(folders[kind])
            evaluation = {"num_prompts": 4, "every": 1} | tables.pop("eval")
            write_config(folders[kind], rollout=rollout, eval=evaluation, **tables)
            launch(folders[kind], 1, "run.name=cpu", *FLOAT32, *settings)
        return folders[kind]

    return folder_of


def compared(run: Path) -> list[dict[str, float]]:
    """The numbers of each step that do not depend on the layout: of learning, sampling and judging."""
    kinds = ("update", "reward", "rollout", "eval")
    return [
        {name: value for name, value in row.items() if name.split("/")[0] in kinds and value is not None}
        for row in steady_rows(run)
    ]


def responses(run: Path) -> dict[tuple[Any, ...], str]:
    """The responses that the first rank writes down, by step, prompt and place in the group."""
    named = (row for row in sample_rows(run) if "response" in row)
    return {tuple(row[name] for name in ("step", "prompt_id", "sample_index")): row["response"] for row in named}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_layout_does_what_one_rank_does_on_a_cpu(on_a_cpu: Callable[[str], Path], kind: str, name: str) -> None:
    folder = on_a_cpu(kind)
    num_devices, settings = RUNS[kind][2][name]
    shared = [*FLOAT32, *RUNS[kind][1]]
    run_on_devices(folder, EmulatedRun(num_devices, [f"run.name={name}", *shared, *settings]))
    expected, found = folder / "runs/cpu", folder / "runs" / name
    assert responses(found).items() <= responses(expected).items()
    assert len(rows(found)) == 3
    for one, other in zip(compared(expected), compared(found), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4, nan_ok=True)
    assert all(row["mismatch/max_abs_nats"] < 1e-5 for row in rows(found)[1:])
    before, one, other = load_file(folder / "model/model.safetensors"), weights(expected), weights(found)
    assert one.keys() == other.keys()
    moved = sum(float((one[name] - before[name]).square().sum()) for name in before.keys() & one.keys()) ** 0.5
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5
    assert apart < 1e-2 * moved, (apart, moved)


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "settings"), [(1, OFFLOAD), (2, [])])
def test_a_run_that_stopped_or_was_killed_is_bitwise_the_run_that_did_not(
    on_a_cpu: Callable[[str], Path], num_devices: int, settings: list[str]
) -> None:
    """In the dtype of devices, bfloat16, with kernels of attention over many sequences."""
    folder, name = on_a_cpu("dense"), f"on-{num_devices}"

    def with_name(moment: str, *others: str) -> list[str]:
        return [f"run.name={name}-{moment}", *settings, "run.num_steps=3", "checkpoint.every=1", *others]

    run_on_devices(
        folder,
        EmulatedRun(num_devices, with_name("whole")),
        EmulatedRun(num_devices, with_name("stopped", "run.num_steps=1")),
        EmulatedRun(num_devices, with_name("stopped")),
        EmulatedRun(num_devices, with_name("killed"), killed_in=3),
        EmulatedRun(num_devices, with_name("killed")),
    )
    whole = folder / "runs" / f"{name}-whole"
    for moment in ("stopped", "killed"):
        again = folder / "runs" / f"{name}-{moment}"
        assert_same_weights(whole, again)
        assert steady_rows(whole) == steady_rows(again)
