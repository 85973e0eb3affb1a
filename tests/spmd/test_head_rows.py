"""Ranks whose tokens are all prompt or filling send nothing through the head, and still take part in every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.config import ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.load import load_policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import Sequence
from tests.helpers.configs import model_config
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks

LAYOUTS = [{}, {"cp": 2}, {"tp": 2}]
Scored = tuple[dict[str, Tensor], dict[str, Tensor]]  # columns [T] of the loss tokens, gradients by name


def _sequence(prompt: int, response: int, *, index: int) -> Sequence:
    length = prompt + response
    return Sequence(
        index=index,
        token_ids=tuple(2 + (7 * index + 5 * i) % 90 for i in range(length)),
        loss_mask=(False,) * prompt + (True,) * response,
        rollout_logprobs=(0.0,) * length,
        reward=0.0,
    )


def _scored(path: str, layouts: list[dict[str, int]]) -> list[Scored]:
    """Compute a rank's results of two micro-batches: by a head told the loss tokens, then by one that scores all.

    The second micro-batch is all filling; in layouts with several shares so are both of the others'.
    """
    found = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        for layout in layouts:
            meshes = build_meshes(world, ParallelConfig(**layout))
            multiple, is_first = meshes.model.cp.size(), meshes.data.get_local_rank() == 0
            first = [_sequence(40, 6, index=0), _sequence(3, 9, index=1)] if is_first else []
            for every_row in (False, True):
                policy = load_policy(model_config(path), meshes.model, temperature=0.8)
                columns = {}
                for number, sequences in enumerate((first, [])):
                    micro_batch = lay_end_to_end(sequences, {}, multiple=multiple)
                    mask = micro_batch.loss_mask
                    scores = policy(replace(micro_batch, loss_mask=mask | every_row))
                    columns |= {
                        f"{name} {number}": torch.where(mask, values, 0.0)
                        for name, values in (("logprobs", scores.logprobs), ("entropy", scores.entropy))
                    }
                    per_token = columns[f"logprobs {number}"] + 0.3 * columns[f"entropy {number}"]
                    (torch.linspace(-1, 1, len(mask)) * per_token).sum().backward()
                gradients = {name: x.grad.full_tensor() for name, x in policy.model.named_parameters()}
                found.append(({name: x.detach() for name, x in columns.items()}, gradients))
    return found


def test_in_every_layout_the_rows_that_count_give_what_all_rows_give(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=96, num_hidden_layers=1)
    (alone,) = run_ranks(1, _scored, path, [{}])
    together = run_ranks(2, _scored, path, LAYOUTS)
    columns, gradients = alone[0]
    for number, (found_columns, found_gradients) in enumerate(alone[1:] + together[0]):
        for name, values in columns.items():
            torch.testing.assert_close(
                found_columns[name][: len(values)], values, rtol=0, atol=1e-5, msg=f"{number} {name}"
            )
        assert found_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (found_gradients[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"case {number}, {name}: relative error {error:.1e}"
