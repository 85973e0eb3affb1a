"""Every correction of the mismatch, and batches with garbage at all tokens that it must not read."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.losses import token_weights
from spmdrl.config import CorrectionConfig
from spmdrl.learn.correction import accepted_counts, accepted_tokens, apply_rejection, batch_sums
from spmdrl.types import MicroBatch

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
RESPONSES = (1, 9, 0, 5, 1, 12, 3, 7)  # loss tokens of each sequence: single ones and none at all
CUTS = ([8], [3, 5], [1] * 8, [0, 2, 6])
MAX_RESPONSE_TOKENS = 20
CLIP = 0.2
GARBAGE = (math.nan, math.inf, -math.inf)
CORRECTIONS: list[dict[str, Any]] = [
    {},
    *({"kind": "tis", "level": level} for level in LEVELS),
    {"kind": "icepop"},
    *({"kind": "mis", "mode": mode, "level": level, "high": 1.5} for mode, level in itertools.product(MODES, LEVELS)),
    *({"kind": "mis", "mode": "clip", "level": level, "batch_normalize": True} for level in LEVELS),
    *({"reject": level, "reject_low": 0.8, "reject_high": 1.1} for level in LEVELS),
    {"veto_below": 0.2},
    {"opsm_delta_nats": 0.1},
    {"kind": "tis", "batch_normalize": True, "reject": "token", "veto_below": 0.2, "opsm_delta_nats": 0.0},
    {
        "kind": "mis",
        "mode": "mask",
        "level": "sequence",
        "batch_normalize": True,
        "reject": "geometric",
        "reject_high": 1.25,
    },
]


def random_columns(seed: int = 0, size: float = 0.8) -> list[dict[str, Tensor]]:
    """Columns of each sequence, [n] float64; prompt tokens hold garbage, and so do holes in a response."""
    draw = random.Random(seed)
    sequences = []
    for index, num_loss_tokens in enumerate(RESPONSES):
        mask = [False] * (1 + index % 3) + [True] * num_loss_tokens
        if num_loss_tokens > 4:
            mask.insert(4, False)  # a token inserted by a tool
        rows = []
        for seen in mask:
            b = -3 * draw.random()
            o = b + draw.gauss(0, size)
            row = (o + draw.gauss(0, 0.3), o, b)
            rows.append(row if seen else tuple(draw.choice(GARBAGE) for _ in row))
        n, o, b = torch.tensor(rows, dtype=torch.float64).T
        advantage = draw.gauss(0, 1)
        sequences.append({"n": n, "o": o, "b": b, "mask": torch.tensor(mask), "A": torch.full((len(mask),), advantage)})
    return sequences


def micro_batch_of(
    sequences: Sequence[dict[str, Tensor]], first: int, weights: list[float]
) -> tuple[MicroBatch, Tensor]:
    """A micro-batch of these, the log-probabilities of now, and filling where there is nothing."""
    none = {"n": torch.zeros(1), "o": torch.zeros(1), "b": torch.zeros(1), "A": torch.zeros(1)}
    rows = list(sequences) or [none | {"mask": torch.zeros(1, dtype=torch.bool)}]
    lengths = torch.tensor([len(row["mask"]) for row in rows])
    columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    per_sequence = torch.tensor(weights or [0.0], dtype=torch.float64)
    micro_batch = MicroBatch(
        token_ids=torch.arange(len(columns["mask"])),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        loss_mask=columns["mask"],
        loss_weights=per_sequence.repeat_interleave(lengths) * columns["mask"],
        rewards=columns["A"],
        baseline_rewards=columns["A"],
        advantages=columns["A"],
        rollout_logprobs=columns["b"],
        old_logprobs=columns["o"],
        sequence_index=tuple(range(first, first + len(rows))),
        sequence_segment=(0,) * len(rows),
    )
    return micro_batch, columns["n"].double()


def batch(
    sequences: list[dict[str, Tensor]], cut: Sequence[int], aggregation: str = "token_mean"
) -> list[tuple[MicroBatch, Tensor]]:
    counts = [int(sequence["mask"].sum()) for sequence in sequences]
    weights = token_weights(
        counts,
        aggregation=aggregation,
        global_loss_tokens=sum(counts),
        global_rollouts=sum(count > 0 for count in counts),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    edges = [0, *itertools.accumulate(cut)]
    return [micro_batch_of(sequences[a:b], a, weights[a:b]) for a, b in itertools.pairwise(edges)]


def corrected(
    micro_batches: list[MicroBatch], correction: CorrectionConfig, aggregation: str = "token_mean"
) -> list[MicroBatch]:
    """Settle a correction as `correct` does, with one rank."""
    accepted = [accepted_tokens(m, correction) for m in micro_batches]
    pairs = list(zip(micro_batches, accepted, strict=True))
    sums = sum(batch_sums(m, mask, correction) for m, mask in pairs).tolist()
    rows = torch.cat([accepted_counts(m, mask) for m, mask in pairs]).long().tolist()
    options = {"aggregation": aggregation, "max_response_tokens": MAX_RESPONSE_TOKENS}
    return [apply_rejection(m, mask, dict(rows), sums, **options) for m, mask in pairs]
