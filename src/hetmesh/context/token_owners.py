"""Token ownership: which rank of a lane keeps which of the lane's tokens, where the activations between the blocks of
a module are split along the sequence. Pure: the runtime's shards and the planner's layouts both follow from it."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hetmesh.context.masks import lane_mask, media_mask
from hetmesh.context.segments import Mask
from hetmesh.context.token_assignment import assign
from hetmesh.graph import ModuleSpec, SampleMeta
from hetmesh.graph.sample import kinds_of
from hetmesh.layout import Intervals
from hetmesh.layout.intervals import extent


@dataclass(frozen=True)
class TokenShares:
    """Equal shares of the `total` flat tokens of a lane: B padded samples of S tokens, one after another.

    A share is contiguous and may span samples; the last ones are shorter or empty, and are padded to `size`.
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
    """Which rows, of those that replace the placeholders `at`, one rank keeps. `starts`: the first row of each sample
    in the row space. Returns intervals of rows in the order in which the rank keeps their tokens."""
    runs: list[tuple[int, int, int]] = []  # first token, tokens, first row
    for sample, first, row in zip(samples, tokens.starts, starts, strict=True):
        for item in sample.media:
            if item.name in kinds_of(at):
                for position, rows in item.spans:
                    runs.append((first + position, rows, row))
                    row += rows
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


BLOCK = 128
"""Query rows that an attention kernel works on together; shorter sequences are cut more finely."""


def share_media(module: ModuleSpec, samples: Sequence[SampleMeta]) -> tuple[LaneTokens, Mask]:
    """The tokens of the media of one lane in one microbatch of an encoder whose ranks share them, and what they see of
    each other. No cut along `cp` splits a row. `samples` are expanded."""
    unit, ranks = module.tokens_per_row, module.mesh.axis_size("cp")
    mask = media_mask([unit * i.rows for s in samples for i in s.media if i.name in kinds_of(module.media or "")])
    starts = tuple(itertools.accumulate((unit * s.rows.get(module.name, 0) for s in samples), initial=0))
    block = unit * max(1, min(BLOCK, starts[-1] // (4 * ranks)) // unit)
    shares = assign(mask, ranks, policy=module.assignment, block=block)
    return LaneTokens(starts[:-1], starts[-1], shares, _parts(module)), mask


def share_tokens(module: ModuleSpec, samples: Sequence[SampleMeta]) -> tuple[LaneTokens, Mask | None]:
    """The tokens of one lane in one microbatch of `module`, and what they see where packed. `samples` are expanded."""
    if module.tokens_per_row:
        return share_media(module, samples)
    lengths = [sample.tokens for sample in samples]
    if not module.packed:
        width = max(lengths, default=1)
        total = len(samples) * width
        return LaneTokens(tuple(i * width for i in range(len(samples))), total, (((0, total),),), _parts(module)), None
    starts = tuple(itertools.accumulate(lengths, initial=0))
    ranks = module.mesh.axis_size("cp")
    mask = lane_mask(samples, module.attention_mask)
    # Few tokens are cut finely enough that every rank gets some: a kernel of whole blocks would not matter there.
    block = max(1, min(BLOCK, starts[-1] // (4 * ranks)))
    row, cut = module.token_costs
    shares = assign(mask, ranks, policy=module.assignment, block=block, row_cost=row, cut_cost=cut)
    return LaneTokens(starts[:-1], starts[-1], shares, _parts(module)), mask


def _parts(module: ModuleSpec) -> int:
    return module.mesh.axis_size("tp") if "tp" in module.token_axes else 1
