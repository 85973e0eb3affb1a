"""The exchange of sequences: from the ranks that sampled them to the ranks that train on them."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.prefix_tree import block_hashes, compared_tokens
from spmdrl.dist.collectives import exchange_rows, gather_objects, gather_rows
from spmdrl.types import NO_TEACHER, Hint, ImageSpan, Place, Sequence, TurnSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo:
    """Size, place and rewards of one sequence; every rank has those of all sequences of the step."""

    index: int  # place of its rollout in the step's global order
    segment: int = 0  # place among the trajectories of its rollout
    num_tokens: int
    num_loss_tokens: int
    num_read_tokens: int = 0  # those of its `observation_spans`
    num_turns: int = 0
    num_images: int = 0
    rank: int  # rank of the mesh
    reward: float = 0.0
    baseline_reward: float = math.nan  # nan where there is none
    prior_turn_rewards: float = 0.0  # the rewards of the turns of the segments before
    teacher: int = NO_TEACHER  # its place in the settings
    algorithm: int = 0  # its place in the settings
    num_hinted: int = 0  # tokens of its hint
    num_replaced: int = 0
    num_layers: int = 0  # of its routes, 0 without any
    num_chosen: int = 0  # experts of a token in a layer
    num_candidates: int = 0  # of each of its tokens
    # Of its first blocks of tokens, as far as another sequence of its rank begins with them: `algo/prefix_tree.py`.
    block_hashes: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequence: Sequence, *, rank: int) -> SequenceInfo:
        """Describe a sequence of a rank."""
        num_layers, num_chosen = (0, 0) if sequence.routes is None else sequence.routes.shape[1:]
        return cls(
            index=sequence.index,
            segment=sequence.segment,
            num_tokens=len(sequence.token_ids),
            num_loss_tokens=sum(sequence.loss_mask),
            num_read_tokens=sum(end - start for start, end in sequence.observation_spans),
            num_turns=len(sequence.turns),
            num_images=len(sequence.images),
            rank=rank,
            reward=sequence.reward,
            baseline_reward=sequence.baseline_reward,
            prior_turn_rewards=sequence.prior_turn_rewards,
            teacher=sequence.teacher,
            algorithm=sequence.algorithm,
            num_hinted=len(sequence.hint.token_ids),
            num_replaced=sequence.hint.num_replaced,
            num_layers=num_layers,
            num_chosen=num_chosen,
            num_candidates=0 if sequence.candidates is None else sequence.candidates.shape[1],
        )

    @property
    def place(self) -> Place:
        """The place of its rollout, and its own among the rollout's."""
        return self.index, self.segment

    @property
    def num_whole(self) -> int:
        """Whole numbers that are sent for it: n tokens, n mask entries, its hint, its turns and its images."""
        others = self.num_hinted + _TURN_WIDTH * self.num_turns + _IMAGE_WIDTH * self.num_images
        return 2 * self.num_tokens + others

    @property
    def wide(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its routes and of its candidates; some dimension is 0 without any."""
        routes = (self.num_tokens, self.num_layers, self.num_chosen)
        return {"routes": routes, "candidates": (self.num_tokens, self.num_candidates)}


_TURN_WIDTH = 8  # number, start, end, state, role, team, newest, and the bits of the reward
_IMAGE_WIDTH = 7  # the halves of the digest, first token and number of tokens, and the grid


# What ranks send each other of it: the rest follows from the sender, or is compared later.
_COLUMNS = {
    column.name: int if column.type == "int" else float
    for column in fields(SequenceInfo)
    if column.name not in ("rank", "block_hashes")
}


def gather_infos(sequences: list[Sequence], mesh: DeviceMesh) -> list[SequenceInfo]:
    """Return the sizes of all ranks' sequences in their global order, on every rank."""
    mine = info_rows(SequenceInfo.of(sequence, rank=mesh.get_local_rank()) for sequence in sequences)
    everyone = [part.tolist() for part in gather_rows(mesh, mine)]
    infos = [_info(row, rank) for rank, rows in enumerate(everyone) for row in rows]
    return sorted(infos, key=lambda info: info.place)


def info_rows(infos: Iterable[SequenceInfo]) -> Tensor:
    """Return what a rank sends of its sequences. In float64 rewards arrive as they were sent, and counts are exact."""
    rows = [[getattr(info, name) for name in _COLUMNS] for info in infos]
    return torch.tensor(rows, dtype=torch.float64).view(-1, len(_COLUMNS))


def _info(row: list[float], rank: int) -> SequenceInfo:
    columns: dict[str, Any] = {name: kind(value) for (name, kind), value in zip(_COLUMNS.items(), row, strict=True)}
    return SequenceInfo(rank=rank, **columns)


def with_block_hashes(infos: list[SequenceInfo], sequences: list[Sequence], mesh: DeviceMesh) -> list[SequenceInfo]:
    """Return the infos of all ranks' sequences with their hashes; every rank of the mesh calls this with its own."""
    mine = {s.place: block_hashes(compared_tokens(s)) for s in sequences}
    counts = Counter(chain.from_iterable(mine.values()))
    shared = {place: tuple(takewhile(lambda block: counts[block] > 1, blocks)) for place, blocks in mine.items()}
    found = {place: blocks for part in gather_objects(mesh, shared) for place, blocks in part.items()}
    return [replace(info, block_hashes=found[info.place]) for info in infos]


def exchange(
    sequences: list[Sequence],
    infos: list[SequenceInfo],
    share_of: Mapping[Place, int],
    mesh: DeviceMesh,
    *,
    ranks_per_share: int = 1,
) -> list[Sequence]:
    """Send each sequence to all ranks of share share_of[place]; return this rank's share, in global order.

    Each share belongs to `ranks_per_share` neighbouring ranks, which all work on the same sequences. Between ranks
    there is one all-to-all for integers, one for floats and, where there are some, one for routes and one for
    candidates; `infos` tells every rank how much each rank sends.
    """
    if mesh.size() == 1:
        return sorted(sequences, key=lambda sequence: sequence.place)
    mine, me, ranks = mesh.get_local_rank() // ranks_per_share, mesh.get_local_rank(), range(mesh.size())
    in_order = sorted(sequences, key=lambda sequence: sequence.place)
    own = {info.place: info for info in infos if info.rank == me}
    outgoing = [[s for s in in_order if share_of[s.place] == rank // ranks_per_share] for rank in ranks]
    stays, outgoing[me] = outgoing[me], []
    comes = (info for info in infos if share_of[info.place] == mine and info.rank != me)
    incoming = sorted(comes, key=lambda info: (info.rank, info.place))

    def splits(width: Callable[[SequenceInfo], int]) -> tuple[list[int], list[int]]:
        sent = [sum(width(own[s.place]) for s in part) for part in outgoing]
        received = [sum(width(info) for info in incoming if info.rank == rank) for rank in ranks]
        return sent, received

    # The rewards of whole rollouts are known already.
    everything = [s for part in outgoing for s in part]
    whole = torch.tensor([*chain.from_iterable(map(_whole_numbers, everything))], dtype=torch.int64)
    logprobs_sent = chain.from_iterable(s.rollout_logprobs for s in everything)
    fractions = torch.tensor([*logprobs_sent], dtype=torch.float32)
    whole = exchange_rows(mesh, whole, *splits(lambda info: info.num_whole))
    fractions = exchange_rows(mesh, fractions, *splits(lambda info: info.num_tokens))

    parts = whole.split([info.num_whole for info in incoming])
    logprobs = fractions.split([info.num_tokens for info in incoming])
    received = [
        _sequence(info, numbers, of_tokens.tolist())
        for info, numbers, of_tokens in zip(incoming, parts, logprobs, strict=True)
    ]
    for name, dtype in (("routes", torch.int16), ("candidates", torch.int32)):

        def size(info: SequenceInfo, name: str = name) -> int:
            return math.prod(info.wide[name])

        def num_bytes(info: SequenceInfo, name: str = name, dtype: torch.dtype = dtype) -> int:
            return math.prod(info.wide[name]) * dtype.itemsize

        if not any(map(size, infos)):
            continue
        columns = [column.flatten() for s in everything if (column := getattr(s, name)) is not None]
        # As bytes: not every backend knows every dtype.
        flat = torch.cat([torch.empty(0, dtype=dtype), *columns]).view(torch.uint8)
        flat = exchange_rows(mesh, flat, *splits(num_bytes)).view(dtype)
        of_sequences = zip(received, incoming, flat.split([size(info) for info in incoming]), strict=True)
        received = [
            replace(sequence, **{name: values.view(info.wide[name])}) if size(info) else sequence
            for sequence, info, values in of_sequences
        ]
    return sorted([*stays, *received], key=lambda sequence: sequence.place)


def send_tensors(
    local: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    *,
    dtype: torch.dtype,
    sent_by: Mapping[str, int],
    wanted: list[set[str]],
    mesh: DeviceMesh,
) -> dict[str, Tensor]:
    """Send tensors of the host to all ranks that want them; return those that this rank wants, by name.

    `local` are this rank's. Of all ranks' tensors, all ranks know the same: their `sizes`, in the same order, the rank
    that sends each of them, and the names that each rank has `wanted` [R]. All have the same dtype.
    """
    me, ranks = mesh.get_local_rank(), range(mesh.size())
    own = {name: local[name] for name in wanted[me] if sent_by[name] == me}
    outgoing = [[name for name in sizes if sent_by[name] == me and name in wanted[rank]] for rank in ranks]
    incoming = [[name for name in sizes if sent_by[name] == rank and name in wanted[me]] for rank in ranks]
    outgoing[me] = incoming[me] = []
    sent = [local[name].to(dtype).reshape(-1) for names in outgoing for name in names]
    # As bytes: not every backend knows every dtype.
    flat = torch.cat([torch.empty(0, dtype=dtype), *sent]).view(torch.uint8)

    def num_bytes(of_ranks: list[list[str]]) -> list[int]:
        return [sum(sizes[name].numel() for name in names) * dtype.itemsize for names in of_ranks]

    received = exchange_rows(mesh, flat, num_bytes(outgoing), num_bytes(incoming)).view(dtype)
    names = [name for of_rank in incoming for name in of_rank]
    parts = received.split([sizes[name].numel() for name in names])
    return own | {name: part.view(sizes[name]) for name, part in zip(names, parts, strict=True)}


def _whole_numbers(sequence: Sequence) -> Iterator[int]:
    """Iterate over everything about a sequence that is no logprob and that its `SequenceInfo` does not tell."""
    turns = (
        (turn.number, turn.start, turn.end, turn.state, turn.role, turn.team, turn.newest, _bits(turn.reward))
        for turn in sequence.turns
    )
    images = ((*_halves(image.digest), image.start, image.num_tokens, *image.grid) for image in sequence.images)
    return chain(sequence.token_ids, sequence.loss_mask, sequence.hint.token_ids, *turns, *images)


def _sequence(info: SequenceInfo, whole: Tensor, logprobs: list[float]) -> Sequence:
    n = info.num_tokens
    tokens, mask = whole[: 2 * n].view(2, n).tolist()
    widths = [info.num_hinted, _TURN_WIDTH * info.num_turns, _IMAGE_WIDTH * info.num_images]
    of_hint, of_turns, of_images = whole[2 * n :].split(widths)
    return Sequence(
        index=info.index,
        segment=info.segment,
        token_ids=tuple(tokens),
        loss_mask=tuple(map(bool, mask)),
        rollout_logprobs=tuple(logprobs),
        reward=info.reward,
        baseline_reward=info.baseline_reward,
        turns=tuple(
            TurnSpan(
                number=number,
                start=start,
                end=end,
                state=state,
                role=role,
                team=team,
                newest=newest,
                reward=_from_bits(reward),
            )
            for number, start, end, state, role, team, newest, reward in of_turns.view(-1, _TURN_WIDTH).tolist()
        ),
        prior_turn_rewards=info.prior_turn_rewards,
        teacher=info.teacher,
        algorithm=info.algorithm,
        hint=Hint(info.num_replaced, tuple(of_hint.tolist())),
        images=tuple(
            ImageSpan(digest=_digest(high, low), start=start, num_tokens=num_tokens, grid=(frames, rows, columns))
            for high, low, start, num_tokens, frames, rows, columns in of_images.view(-1, _IMAGE_WIDTH).tolist()
        ),
    )


def _halves(digest: str) -> tuple[int, int]:
    """A digest of 32 hexadecimal digits as two signed whole numbers."""
    high, low = struct.unpack(">2q", bytes.fromhex(digest))
    return high, low


def _digest(high: int, low: int) -> str:
    return struct.pack(">2q", high, low).hex()


def _bits(value: float) -> int:
    """The bits of a float64, as a signed whole number: rewards of turns travel among the tokens, exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
