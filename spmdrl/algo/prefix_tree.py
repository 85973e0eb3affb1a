"""Prefix trees: sequences that begin alike have these tokens in common, so that each is computed once.

A node is a run of tokens that the same sequences have. Depth first, the tokens of the nodes are one row: those of a
sequence are the nodes from a root to its last token, and all that comes after a node by way of its children follows it
without a gap. Prefixes are shared in whole blocks, as in an engine's cache, so that no node is too short to be worth a
call, and so that every rank knows from the hashes of blocks what sequences share, wherever they are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from spmdrl.types import PrefixTree
from spmdrl.types import Sequence as Trajectory

BLOCK_TOKENS = 16

Tokens = Sequence[int]


def compared_tokens(sequence: Trajectory) -> tuple[int, ...]:
    """Return a sequence's tokens as numbers, equal where tokens are computed alike: placeholders have one of their
    image's own, below 0, and tokens that replay routes one of both."""
    tokens = list(sequence.token_ids)
    for image in sequence.images:
        tokens[image.start : image.end] = [-1 - int(image.digest[:15], 16)] * image.num_tokens
    if sequence.routes is not None:
        of_tokens = zip(tokens, sequence.routes.numpy(), strict=True)
        tokens = [_hashed(array("q", [token]).tobytes() + routes.tobytes()) for token, routes in of_tokens]
    return tuple(tokens)


def _hashed(data: bytes) -> int:
    """Return a hash of 63 bits, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def shared_tokens(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences begin with alike, in whole blocks."""
    longest = min(len(one), len(other)) // BLOCK_TOKENS
    low, high = 0, longest  # blocks that are alike, and the most that may be
    while low < high:
        middle = (low + high + 1) // 2
        edges = slice(low * BLOCK_TOKENS, middle * BLOCK_TOKENS)
        low, high = (middle, high) if one[edges] == other[edges] else (low, middle - 1)
    return low * BLOCK_TOKENS


def block_hashes(tokens: Tokens) -> tuple[int, ...]:
    """Return for each whole block a hash, 63 bits, of it and all before it: alike where prefixes are."""
    found = [0]
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        found.append(_hashed(array("q", [found[-1], *tokens[end - BLOCK_TOKENS : end]]).tobytes()))
    return tuple(found[1:])


def prefix_tree(sequences: Sequence[tuple[int, ...]]) -> PrefixTree | None:
    """Find the tree of sequences that are laid end to end in this order; None where none begins as another does.

    Tokens are equal where their numbers are.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    # In this order a sequence has no more in common with any earlier one than with its neighbour.
    shared = [0, *(shared_tokens(sequences[a], sequences[b]) for a, b in pairwise(order))]
    if not any(shared):
        return None
    # The tokens that a sequence is the first to have are one run of rows, cut into nodes where later ones branch off.
    branches: list[tuple[int, int]] = []  # of each place in `order`: that of the one it branches off from, and where
    ends = [{len(sequences[index])} for index in order]
    path: list[int] = []  # places whose runs lead to the latest
    for place, depth in enumerate(shared):
        while path and shared[path[-1]] >= depth:
            path.pop()
        branches.append((path[-1] if path else -1, depth))
        if path:
            ends[path[-1]].add(depth)
        path.append(place)
    starts = [*accumulate(map(len, sequences), initial=0)]
    rows = torch.empty(starts[-1], dtype=torch.int64)
    tokens, lengths, parents = [], [], []
    node_at = {(-1, 0): -1}  # the node that ends there
    num_rows = 0
    for place, (index, depth) in enumerate(zip(order, shared, strict=True)):
        start, end = starts[index], starts[index + 1]
        like = starts[order[place - 1]]
        rows[start : start + depth] = rows[like : like + depth]
        tokens.append(torch.arange(start + depth, end))
        rows[start + depth : end] = torch.arange(num_rows, num_rows + len(tokens[-1]))
        num_rows += len(tokens[-1])
        parent = node_at[branches[place]]
        for first, last in pairwise([depth, *sorted(ends[place])]):
            if last > first:
                parents.append(parent)
                lengths.append(last - first)
                parent = node_at[place, last] = len(parents) - 1
    return PrefixTree(torch.cat(tokens), rows, tuple(lengths), tuple(parents))
