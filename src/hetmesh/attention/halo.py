"""The rows in front of pieces that a causal convolution reads, and who has them. Values, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetmesh.attention.attention_plan import TakenRows, taken_rows
from hetmesh.context import Mask
from hetmesh.context.mask_sources import merge
from hetmesh.context.pieces import plan_pieces
from hetmesh.layout import Intervals


@dataclass(frozen=True, eq=False)
class Halo:
    """What a causal convolution reads. Its rows are this rank's, then those of `taken`, then one of zeros.

    Attributes:
        taken: the rows in front of pieces that go on.
        rows: int64: what the convolution runs over: in front of each piece its `kernel - 1` rows, or zeros.
        out: int64: where in that each of this rank's rows is.
    """

    taken: TakenRows
    rows: np.ndarray
    out: np.ndarray


@lru_cache(maxsize=128)
def plan_halo(mask: Mask, shares: tuple[Intervals, ...], coordinate: int, kernel: int) -> Halo:
    """The halo of one rank's pieces for a convolution over `kernel` tokens."""
    reach = kernel - 1
    taken = []
    for rank in range(len(shares)):
        pieces = plan_pieces(mask, shares, rank)
        first, stop = np.maximum(pieces.samples, pieces.starts - reach), pieces.starts
        spans = merge(first[first < stop], stop[first < stop])
        taken.append(tuple(zip(*(edges.tolist() for edges in spans), strict=True)))
    pieces = plan_pieces(mask, shares, coordinate)
    own, sizes = int(pieces.bounds[-1]), np.diff(pieces.bounds)
    held = np.array([p for a, b in taken[coordinate] for p in range(a, b)], np.int64)
    front = pieces.starts[:, None] + np.arange(-reach, 0)  # [pieces, reach], positions
    found = np.searchsorted(held, front)
    front = np.where(front >= pieces.samples[:, None], own + found, own + len(held))
    out = np.arange(own) + reach * np.repeat(np.arange(1, len(sizes) + 1), sizes)
    rows = np.empty(own + reach * len(sizes), np.int64)
    rows[out] = np.arange(own)
    rows[(pieces.bounds[:-1] + reach * np.arange(len(sizes)))[:, None] + np.arange(reach)] = front
    return Halo(taken_rows(tuple(taken), shares, coordinate), rows, out)
