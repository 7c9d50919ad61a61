"""A random order of any size, computed place by place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 6  # of the Feistel network of `permuted`
_MASK = (1 << 64) - 1


def permuted(positions: Sequence[int], size: int, *key: int) -> list[int]:
    """Where a random permutation of `0..size-1` sends `positions`, computed one by one: no size costs memory.

    A Feistel network permutes the smallest even-bit block of integers that holds `0..size-1`; results outside are sent
    through it again until they fall inside ("cycle walking": J. Black and P. Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002). The round function is the finaliser of splitmix64. For shuffling, not for secrets. Unlike a
    library's shuffle the order can never change with a version, so a resumed run continues the same one.

    Args:
        size: 1..2**62.
        key: chooses the permutation, e.g. `(seed, epoch)`.
    """
    if not 1 <= size <= 1 << 62:
        raise ValueError(f"size must be in 1..2**62, got {size}")
    if any(not 0 <= p < size for p in positions):
        raise ValueError(f"positions must be in 0..{size - 1}, got {list(positions)}")
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    low = np.uint64((1 << int(half)) - 1)
    state = np.uint64(0)
    for part in key:
        state = _mix(np.array([part & _MASK], np.uint64) ^ _mix(np.array([state], np.uint64)))[0]
    round_keys = _mix(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64))

    values = np.array(positions, np.uint64)
    walking = np.ones(len(values), bool)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & low
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        values[walking] = left << half | right
        walking = values >= size
    return values.tolist()


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
