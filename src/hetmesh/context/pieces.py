"""Where a recurrence begins anew, goes on, and is cut: the pieces of samples that the ranks of a group keep.

A *piece* is a run of positions of one sample on one rank. Between two pieces of a sample is a *cut*: what the tokens
before it left behind (the state of a recurrence, the last inputs of a convolution) is on the rank of the piece before,
and the piece behind goes on from it. Values, and functions of values: equal on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetmesh.context.segments import Mask
from hetmesh.layout import Intervals, RowSplit
from hetmesh.layout.intervals import coalesce


@dataclass(frozen=True, eq=False)
class Cuts:
    """All cuts of a row, in the order of their positions, and one rank's part in them.

    Attributes:
        chained: bool `[cuts]`: whether the piece before a cut begins at a cut too, which is then the one before.
        before, behind: which cuts the pieces of each rank lie before, and behind.
        leaving: the pieces of this rank that lie before a cut, in the order of these cuts.
        entering: its pieces behind a cut.
        of_entering: int64 `[leaving]`: where among `entering` each piece of `leaving` is, -1 for beginnings of samples.
    """

    chained: np.ndarray
    before: RowSplit
    behind: RowSplit
    leaving: np.ndarray
    entering: np.ndarray
    of_entering: np.ndarray

    def __len__(self) -> int:
        return len(self.chained)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of one rank, which lie one after another in its rows.

    Attributes:
        bounds: int64 `[pieces + 1]`: the local rows at which they begin, and all rows. A rank without rows has one row
            that counts for nothing, a piece of its own.
        starts: int64 `[pieces]`: the positions at which they begin.
        samples: int64 `[pieces]`: the positions at which their samples begin.
        cuts: of the whole row.
    """

    bounds: np.ndarray
    starts: np.ndarray
    samples: np.ndarray
    cuts: Cuts


@lru_cache(maxsize=64)
def plan_pieces(mask: Mask, shares: tuple[Intervals, ...], coordinate: int) -> Pieces:
    """The pieces of one rank. Cached: layers share it. Each document of `mask` is a sample."""
    begins = sample_starts(mask)
    table = np.concatenate([_cut_runs(rank, runs, begins) for rank, runs in enumerate(shares)])
    order = np.argsort(table[:, 1])
    owner, start, row = table[order].T
    sample = begins[begins.searchsorted(start, "right") - 1] if len(start) else start
    behind = np.flatnonzero(start > sample)  # of each cut the piece behind it; before it is the one before
    local = np.flatnonzero(owner == coordinate)
    local = local[np.argsort(row[local])]
    index = np.full(len(start), -1)
    index[local] = np.arange(len(local))
    entering = index[behind][owner[behind] == coordinate]
    leaving = index[behind - 1][owner[behind - 1] == coordinate]
    place = np.full(len(local) + 1, -1)
    place[entering] = np.arange(len(entering))
    before_by_rank, behind_by_rank = (_by_rank(owner[pieces], len(shares)) for pieces in (behind - 1, behind))
    chained = (start > sample)[behind - 1] if len(behind) else np.zeros(0, bool)
    cuts = Cuts(chained, before_by_rank, behind_by_rank, leaving, entering, place[leaving])
    if not len(local):
        return Pieces(np.array([0, 1]), np.array([0]), np.array([0]), cuts)
    rows = sum(b - a for a, b in shares[coordinate])
    return Pieces(np.append(row[local], rows), start[local], sample[local], cuts)


def sample_starts(mask: Mask) -> np.ndarray:
    """Where the samples of a row begin, ascending; the first at 0."""
    documents = mask.fields.document
    first = np.flatnonzero(documents[1:] != documents[:-1]) + 1
    return np.append(0, mask.starts[first])


def _cut_runs(rank: int, runs: Intervals, begins: np.ndarray) -> np.ndarray:
    """`[pieces, 3]`: the rank, the position at which each begins, and its local row."""
    found, row = [np.zeros((0, 3), np.int64)], 0
    for a, b in runs:
        if a < b:
            inner = begins[begins.searchsorted(a, "right") : begins.searchsorted(b, "left")]
            starts = np.append(a, inner)
            found.append(np.stack([np.full(len(starts), rank), starts, row + starts - a], 1))
            row += b - a
    return np.concatenate(found)


def _by_rank(owner: np.ndarray, ranks: int) -> RowSplit:
    which = [np.flatnonzero(owner == rank).tolist() for rank in range(ranks)]
    return RowSplit(0, tuple(coalesce([(i, i + 1) for i in found]) for found in which))
