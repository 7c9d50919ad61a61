"""Token ownership: which rank of a lane keeps which of the lane's tokens, where the activations between the blocks of
a module are split along the sequence. Pure: the runtime's shards and the planner's layouts both follow from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetmesh.graph.sample import SampleMeta
from hetmesh.layout import Intervals
from hetmesh.layout.intervals import extent


@dataclass(frozen=True)
class TokenShares:
    """Equal shares of the `total` flat tokens of a lane: B padded samples of S tokens, one after another.

    A share is contiguous and may span samples; the last ones are shorter or empty, and are padded to `size`.

    Attributes:
        total: B * S.
        parts: ranks that share them.
    """

    total: int
    parts: int

    @property
    def size(self) -> int:
        """Tokens of a whole share."""
        return -(-self.total // self.parts)

    def span(self, part: int) -> tuple[int, int]:
        """The tokens `[start, stop)` that a rank keeps."""
        return min(part * self.size, self.total), min((part + 1) * self.size, self.total)


@dataclass(frozen=True)
class LaneTokens:
    """The flat tokens of a lane, and which of the ranks that share them keeps which.

    Attributes:
        starts: the flat position of the first token of each sample.
        total: all flat tokens, padding included where samples are padded.
        shares: per coordinate along `cp`, the kept positions as ordered intervals; together all positions, once.
        parts: ranks along `tp` that cut each share further, into equal parts of its tokens in their order.
    """

    starts: tuple[int, ...]
    total: int
    shares: tuple[Intervals, ...]
    parts: int = 1

    def kept(self, owner: int) -> Intervals:
        """The positions that one of the ranks keeps, in order; ranks by `cp`, then `tp`."""
        share = self.shares[owner // self.parts]
        if self.parts == 1:
            return share
        start, stop = TokenShares(extent(share), self.parts).span(owner % self.parts)
        return cut_out(share, start, stop)

    def rows(self, owner: int) -> int:
        """Rows of the activations that the rank holds: its tokens, at least one, and padded like its neighbours'."""
        return TokenShares(max(extent(self.shares[owner // self.parts]), 1), self.parts).size


def cut_out(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Entries `start` to `stop` of the concatenation of `intervals`."""
    found, at = [], 0
    for a, b in intervals:
        lower, upper = max(start, at), min(stop, at + b - a)
        if lower < upper:
            found.append((a + lower - at, a + upper - at))
        at += b - a
    return tuple(found)


def owned_rows(
    samples: Sequence[SampleMeta], starts: Sequence[int], at: str, tokens: LaneTokens, owner: int
) -> Intervals:
    """Which rows, of those that replace the placeholders `at`, one rank keeps.

    Args:
        samples: those of the lane, in order; expanded.
        starts: the first row of each sample in the row space.

    Returns:
        Intervals of rows in the order in which the rank keeps their tokens.
    """
    runs: list[tuple[int, int, int]] = []  # first token, tokens, first row
    for sample, first, row in zip(samples, tokens.starts, starts, strict=True):
        for position, count in _runs(sample, at):
            runs.append((first + position, count, row))
            row += count
    ends = [token + count for token, count, _ in runs]
    kept: list[tuple[int, int]] = []
    for start, stop in tokens.kept(owner):
        i = bisect_right(ends, start)
        while i < len(runs) and runs[i][0] < stop:
            token, count, row = runs[i]
            lower, upper = max(start, token), min(stop, token + count)
            kept.append((row + lower - token, row + upper - token))
            i += 1
    return tuple(kept)


def _runs(sample: SampleMeta, at: str) -> Iterable[tuple[int, int]]:
    return ((item.position, item.rows) for item in sample.media if item.name == at)
