"""Token ownership: which rank of a lane keeps which of the lane's tokens, where the activations between the blocks of
a module are split along the sequence. Pure: the runtime's shards and the planner's layouts both follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetmesh.graph.sample import SampleMeta
from hetmesh.layout import Intervals


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


def owned_rows(
    samples: Sequence[SampleMeta], starts: Sequence[int], at: str, shares: TokenShares, part: int
) -> Intervals:
    """Which rows, of those that replace the placeholders `at`, one rank keeps.

    Args:
        samples: those of the lane, in order; expanded.
        starts: the first row of each sample in the row space.

    Returns:
        Intervals of rows in the order of their tokens.
    """
    start, stop = shares.span(part)
    width = max((sample.tokens for sample in samples), default=1)
    kept: list[tuple[int, int]] = []
    for i, (sample, row) in enumerate(zip(samples, starts, strict=True)):
        for first, count in _runs(sample, at):
            token = i * width + first
            lower, upper = max(start, token), min(stop, token + count)
            if lower < upper:
                kept.append((row + lower - token, row + upper - token))
            row += count
    return tuple(kept)


def _runs(sample: SampleMeta, at: str) -> Iterable[tuple[int, int]]:
    return ((item.position, item.rows) for item in sample.media if item.name == at)
