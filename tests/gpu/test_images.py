"""Images on one CUDA device: a tiny Qwen3-VL with the embedded engine, and with SGLang."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.device_sizes import needs_kernels, sized
from tests.helpers.sglang_runs import require_learnt, ten_steps
from tests.helpers.small_run import rows, torchrun, weights, write_config
from tests.helpers.vision import save_vision_files, write_questions
from tests.helpers.vision_models import save_qwen3_vl


def write_run(folder: Path) -> None:
    """A model, questions with 0 to 3 pictures, and the configuration of a small run."""
    save_qwen3_vl(folder / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(folder / "model")
    write_config(
        folder, data=write_questions(folder, "train", first=0, count=30) | {"max_prompt_tokens": 64}, eval=None
    )


@pytest.mark.claim("Images", "A vision model trains on a GPU, its tower frozen or not.")
@pytest.mark.timeout(sized(240, emulated=900))
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_vision_model_learns(tmp_path: Path, tower: str) -> None:
    write_run(tmp_path)
    before = load_file(tmp_path / "model/model.safetensors")
    settings = ["model.freeze=[]"] if tower == "trained" else []
    torchrun(tmp_path, 1, "run.num_steps=8", "run.deterministic=false", *settings)
    run = tmp_path / "runs/run"
    steps = rows(run)
    require_learnt(steps)
    assert all(row["images/patches"] > 0 for row in steps)
    after = weights(run)
    unchanged = {torch.equal(before[name].to(after[name]), after[name]) for name in before if "visual" in name}
    assert unchanged == {tower == "frozen"}


@pytest.mark.claim("Images", "SGLang samples answers to prompts with images, which it reads as the trainer does.")
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
@needs_kernels
def test_sglang_reads_images_as_the_trainer_does(tmp_path: Path) -> None:
    """FlashAttention 3, SGLang's own choice for a tower on a Hopper device, may not be there."""
    write_run(tmp_path)
    steps = ten_steps(tmp_path, 1, "rollout.sglang.mm_attention_backend=triton_attn")
    require_learnt(steps)
    assert all(row["images/patches"] > 0 for row in steps)
