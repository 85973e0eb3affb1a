"""The exchange of sequences: from the ranks that sampled them to the ranks that train on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import gather_rows
from spmdrl.types import Sequence


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Size, place and rewards of one sequence; every rank has those of all sequences of the step."""

    index: int  # place in the step's global order
    num_tokens: int
    num_loss_tokens: int
    held_by: int  # rank of the mesh
    reward: float = 0.0
    baseline_reward: float = math.nan  # nan where there is none


def gather_infos(sequences: list[Sequence], mesh: DeviceMesh) -> list[SequenceInfo]:
    """Return the sizes of all ranks' sequences in their global order, on every rank."""
    mine = [(s.index, len(s.token_ids), sum(s.loss_mask), s.reward, s.baseline_reward) for s in sequences]
    # In float64 rewards arrive as they were sent, and counts are exact.
    everyone = gather_rows(mesh, torch.tensor(mine, dtype=torch.float64).view(-1, 5))
    sizes = [
        SequenceInfo(int(index), int(num_tokens), int(num_loss_tokens), rank, reward, baseline_reward)
        for rank, part in enumerate(everyone)
        for index, num_tokens, num_loss_tokens, reward, baseline_reward in part.tolist()
    ]
    return sorted(sizes, key=lambda size: size.index)


def exchange(
    sequences: list[Sequence],
    sizes: list[SequenceInfo],
    goes_to: Mapping[int, int],
    mesh: DeviceMesh,
    *,
    ranks_per_share: int = 1,
) -> list[Sequence]:
    """Send each sequence to all ranks of share goes_to[index]; return this rank's share, in global order.

    Each share belongs to `ranks_per_share` neighbouring ranks, which all work on the same sequences. There is one
    all-to-all for integers and one for floats; `sizes` tells every rank how much each rank sends.
    """
    mine, ranks = mesh.get_local_rank() // ranks_per_share, range(mesh.size())
    in_order = sorted(sequences, key=lambda sequence: sequence.index)
    outgoing = [[s for s in in_order if goes_to[s.index] == rank // ranks_per_share] for rank in ranks]
    incoming = sorted(
        (size for size in sizes if goes_to[size.index] == mine), key=lambda size: (size.held_by, size.index)
    )

    def splits(width: Callable[[int], int]) -> tuple[list[int], list[int]]:
        sent = [sum(width(len(s.token_ids)) for s in part) for part in outgoing]
        received = [sum(width(size.num_tokens) for size in incoming if size.held_by == rank) for rank in ranks]
        return sent, received

    # For each sequence: n tokens and n mask entries; n log-probabilities. Its reward is known already.
    everything = [s for part in outgoing for s in part]
    whole = torch.tensor([n for s in everything for n in (*s.token_ids, *s.loss_mask)], dtype=torch.int64)
    fractions = torch.tensor([x for s in everything for x in s.rollout_logprobs], dtype=torch.float32)
    whole = _all_to_all(whole, *splits(lambda n: 2 * n), mesh)
    fractions = _all_to_all(fractions, *splits(lambda n: n), mesh)

    received, at_whole, at_fraction = [], 0, 0
    for size in incoming:
        n = size.num_tokens
        tokens, mask = whole[at_whole : at_whole + 2 * n].view(2, n).tolist()
        logprobs = fractions[at_fraction : at_fraction + n].tolist()
        at_whole, at_fraction = at_whole + 2 * n, at_fraction + n
        received.append(
            Sequence(
                index=size.index,
                token_ids=tuple(tokens),
                loss_mask=tuple(map(bool, mask)),
                rollout_logprobs=tuple(logprobs),
                reward=size.reward,
                baseline_reward=size.baseline_reward,
            )
        )
    return sorted(received, key=lambda sequence: sequence.index)


def _all_to_all(values: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
    output = values.new_empty(sum(received))
    dist.all_to_all_single(output, values, received, sent, group=mesh.get_group())
    return output
