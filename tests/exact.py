"""Whether this processor can keep what `true_on_policy` promises; where not, a run refuses and tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from spmdrl.model import invariant
from tests.tiny import save_qwen3


def skip_where_inexact(folder: Path) -> None:
    """Skip, with the run's own sentence, where operators are not exact."""
    model = AutoModelForCausalLM.from_pretrained(save_qwen3(folder))
    for dtype in invariant.DTYPES:
        for problem in invariant.machine_problems(model, dtype):
            pytest.skip(problem)
