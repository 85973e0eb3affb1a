"""Counter-based randomness: a random number is a hash of what it is for, so nothing random has a history.

The hash is SplitMix64's Weyl constant and finaliser (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195; the
constants of Stafford's "Mix13").
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**64 - 1
_START = 0x243F6A8885A308D3  # fractional digits of pi: the hash of zeros is not zero
_WEYL = 0x9E3779B97F4A7C15  # odd, so multiplying by it loses nothing
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*values: int) -> int:
    """A well-mixed 63-bit hash of whole numbers (each modulo 2^64); their order and their count matter."""
    word = _START
    for value in values:
        word ^= value * _WEYL & _WORD
        word = (word ^ word >> 30) * _FIRST & _WORD
        word = (word ^ word >> 27) * _SECOND & _WORD
        word ^= word >> 31
    return word >> 1


def rollout_seed(run_seed: int, step: int, prompt_id: int, sample_index: int) -> int:
    """The 63-bit seed of one rollout: the same whatever rank samples it, and after a resume."""
    return mix(run_seed, step, prompt_id, sample_index)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one response of a rollout, counted from 0; the first has the rollout's own."""
    return mix(seed, turn) if turn else seed


def environment_seed(run_seed: int, prompt_id: int) -> int:
    """The 63-bit seed of a prompt's environment: one for all its rollouts, which are compared with each other."""
    return mix(run_seed, prompt_id)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """The 24 upper bits of `mix(seed, position)` as a fraction: [N] float32 in [0, 1).

    seeds and positions are [N] int64. Bitwise the same on every device, and entry i depends on nothing but seeds[i] and
    positions[i].
    """
    word = _absorb(_absorb(torch.full_like(seeds, _signed(_START)), seeds), positions)
    return _shift_right(word, 40).to(torch.float32) * 2.0**-24


def _absorb(word: Tensor, values: Tensor) -> Tensor:
    """One round of `mix`. int64 multiplication wraps, which is multiplication modulo 2^64."""
    word = word ^ values * _signed(_WEYL)
    word = (word ^ _shift_right(word, 30)) * _signed(_FIRST)
    word = (word ^ _shift_right(word, 27)) * _signed(_SECOND)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Logical shift. torch shifts int64 arithmetically, so the copies of the sign bit are masked away."""
    return word >> bits & 2 ** (64 - bits) - 1


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word
