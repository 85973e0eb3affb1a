"""The parity matrix: layouts of tiny models, trained from the same weights on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from spmdrl.config import PackConfig
from spmdrl.dist.session import spmd_session
from spmdrl.tools.parity_cases import (
    ONE_BIT,
    ONE_RANK,
    Case,
    CaseResult,
    Reinforcement,
    Settings,
    cases,
    deviation,
    random_batch,
    train_case,
)
from spmdrl.types import Sequence as Tokens
from tests.helpers.configs import loss_config, model_config
from tests.helpers.ranks import run_ranks

LOSS = {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.05, "entropy_coef": 0.01}
VOCABULARY = 96  # tp divides it
PACK = PackConfig(max_tokens_per_micro_batch=64)


@dataclass(frozen=True, slots=True)
class Trial:
    """A case with the settings that it is trained with."""

    settings: Settings
    case: Case = ONE_RANK


def _outcomes(trials: Sequence[Trial], batch: list[Tokens]) -> list[CaseResult | None]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        found = []
        for trial in trials:
            try:
                found.append(train_case(trial.case, trial.settings, batch, world))
            except Exception as error:
                error.add_note(f"in the case {trial.case.name}")
                raise
        return found


def with_random_candidates(batch: list[Tokens], width: int) -> list[Tokens]:
    """Sequences as if top-k and top-p had left up to `width` tokens for each that is trained; a third has none."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for place, sequence in enumerate(batch):
        tokens = torch.tensor(sequence.token_ids)
        others = (
            torch.rand(len(tokens), VOCABULARY, generator=draw).scatter_(1, tokens[:, None], 1.0).topk(width).indices
        )
        others[:, 1:][torch.rand(len(tokens), width - 1, generator=draw) < 0.3] = -1
        others[~torch.tensor(sequence.loss_mask)] = -1
        found.append(replace(sequence, candidates=others.int()) if place % 3 else sequence)
    return found


def outcomes(trials: Sequence[Trial], *, num_sequences: int, num_candidates: int = 0) -> list[CaseResult]:
    """Train each trial; all must have one number of ranks, and share their processes and their process group."""
    (num_ranks,) = {trial.case.num_ranks for trial in trials}
    batch = random_batch(vocabulary=VOCABULARY, num_sequences=num_sequences, max_tokens=40)
    batch = with_random_candidates(batch, num_candidates) if num_candidates else batch
    first, *_ = run_ranks(num_ranks, _outcomes, trials, batch, timeout_s=240)
    return first


def by_reward(path: str, more: Mapping[str, Any] = MappingProxyType({}), **model: Any) -> Settings:
    """Settings of reinforcement learning with every term of the loss that suits all models, and `more`."""
    learning = Reinforcement(loss=loss_config(**LOSS, **more), temperature=0.8)
    return Settings(model=model_config(path, **model), pack=PACK, learning=learning)


def matrix(
    settings: Settings, wanted: Callable[[Case], bool], num_candidates: int = 0
) -> dict[str, tuple[Case, CaseResult]]:
    """The outcome of one rank, of weights one bit apart and of every wanted case, by its name; all cases of as many
    ranks share their processes."""
    every = [ONE_RANK, ONE_BIT, *filter(wanted, cases(settings))]
    found: dict[str, tuple[Case, CaseResult]] = {}
    for num_ranks in sorted({case.num_ranks for case in every}):
        some = [case for case in every if case.num_ranks == num_ranks]
        trials = [Trial(settings, case) for case in some]
        results = outcomes(trials, num_sequences=24, num_candidates=num_candidates)
        found |= {case.name: (case, result) for case, result in zip(some, results, strict=True)}
    return found


def require_same(found: dict[str, tuple[Case, CaseResult]]) -> None:
    """Require that each case has the gradients of one rank, within what its reason allows."""
    (_, one), (_, one_bit) = (found[case.name] for case in (ONE_RANK, ONE_BIT))
    for case, result in found.values():
        if case is not ONE_BIT:
            require_close(case, result, one, one_bit)


def require_close(case: Case, result: CaseResult, one: CaseResult, one_bit: CaseResult | None = None) -> None:
    """Require that a case has the gradients of one rank, within what its reason allows."""
    assert max(float(x.norm()) for x in one.gradients.values()) > 1e-2, "gradients of 0 prove nothing"
    apart = deviation(result, one, one_bit)
    assert apart.is_within, f"{case.name}: {apart}; allowed is that {case.reason}"
