"""The parity matrix on tiny models: every layout gives what one rank gives."""

from __future__ import annotations

import pytest

from spmdrl.config import PackConfig
from spmdrl.dist.session import spmd_session
from spmdrl.parity import ONE_RANK, Case, Outcome, Settings, cases, deviation, outcome, random_batch
from spmdrl.types import Sequence
from tests.spmd.ranks import run_ranks
from tests.tiny import loss_config, model_config, save_qwen3

LOSS = {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.05, "entropy_coef": 0.01}
VOCABULARY = 96  # tp divides it


def _outcomes(some: list[Case], settings: Settings, batch: list[Sequence]) -> list[Outcome | None]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [outcome(case, settings, batch, world) for case in some]


def matrix(path: str, excluded: tuple[str, ...] = ()) -> dict[str, tuple[Case, Outcome]]:
    """The outcome of every case by its name; all cases of as many ranks share their processes."""
    settings = Settings(
        model=model_config(path),
        loss=loss_config(**LOSS),
        pack=PackConfig(max_tokens_per_micro_batch=64),
        temperature=0.8,
    )
    batch = random_batch(vocabulary=VOCABULARY, num_sequences=24, max_tokens=40)
    every = [ONE_RANK, *(case for case in cases(settings) if not any(word in case.name for word in excluded))]
    found = {}
    for num_ranks in (1, 2, 4):
        some = [case for case in every if case.num_ranks == num_ranks]
        first, *_ = run_ranks(num_ranks, _outcomes, some, settings, batch, timeout_s=240)
        found |= {case.name: (case, result) for case, result in zip(some, first, strict=True)}
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Outcome]]:
    return matrix(save_qwen3(tmp_path_factory.mktemp("dense"), vocab_size=VOCABULARY), excluded=("ep",))


def test_every_layout_of_a_dense_model_gives_what_one_rank_gives(dense: dict[str, tuple[Case, Outcome]]) -> None:
    _, one = dense["1 rank"]
    assert max(float(x.norm()) for x in one.gradients.values()) > 1e-2, "gradients of 0 prove nothing"
    for name, (case, result) in dense.items():
        found = deviation(result, one)
        assert found.is_within, f"{name}: {found}; allowed is that {case.reason}"
