"""Balanced token assignment: attention work and tokens at once, in few runs, with little remote traffic.

Close the sequence into a circle. To split R ranks into a + b, some arc has exactly a/R of both tokens and work: turn an
arc with that many tokens around the circle; its work averages a/R, so somewhere it is (intermediate value theorem).
What is outside the arc is a circle again, so both sides are split on. A split adds two cuts at most, so R ranks have
less than two runs each. Blocks are not continuous: what an arc misses, one exchange of two blocks makes up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_MISS_COST = 100.0
"""What missing the balance by one slack costs, in runs: balance first, then few runs."""

_TOLERANCE = 0.0045
"""Most work of a rank over the mean, less one, that is left alone."""

_SPLIT_TOLERANCES = 0.75
"""What one split may miss, in tolerances. Splits halve what is missed, and swaps remove what is too much."""

_SPARE_BLOCKS = 3  # blocks by which an arc may be shorter or longer than its share, as far as the token cap lets it

_END_BLOCKS = 8  # blocks at the ends of runs that are tried with all others; a rank has two per run


def balanced(
    work: np.ndarray,
    tokens: np.ndarray,
    ranks: int,
    *,
    token_cap: float = 1.02,
    block_cost: float = 0.0,
    cut: np.ndarray | None = None,
) -> np.ndarray:
    """The rank of every block, int64 [blocks].

    Args:
        work: cost of each block; whole numbers, whose sums do not depend on the machine.
        tokens: rows of each block; all alike but the last, which may have fewer.
        token_cap: most tokens of a rank over the mean, where whole blocks allow it.
        block_cost: what the rows of a block cost besides, in `work`. Layers of either kind wait for each other, so that
            too much of one does not make up for too little of the other: both misses count.
        cut: what a cut before each block costs, in runs; by default one, and the keys that the block sees, most of
            which lie on the other side, in those that a mean block sees.
    """
    blocks = len(work)
    if not blocks:
        return np.zeros(0, np.int64)
    mean_tokens = int(tokens.sum()) / ranks
    limit = max(math.ceil(blocks / ranks), int(token_cap * mean_tokens / int(tokens[0])))
    slack = max(_TOLERANCE * (float(work.sum()) + block_cost * blocks) / ranks, 1e-9)
    work = work.astype(np.float64)
    cut = 1 + work * (blocks / max(work.sum(), slack)) if cut is None else cut
    circle = _Circle(work, cut, limit, slack * _SPLIT_TOLERANCES, block_cost)
    owner = np.zeros(blocks, np.int64)
    todo = [(np.arange(blocks), 0, ranks)]
    while todo:
        order, first, parts = todo.pop()
        if parts == 1 or not len(order):
            owner[order] = first
            continue
        inside = circle.split(order, parts)
        todo += [(order[inside], first, parts // 2), (order[~inside], first + parts // 2, parts - parts // 2)]
    _settle(work, owner, ranks, slack)
    return owner


@dataclass(frozen=True, eq=False)
class _Circle:
    """How a circle of blocks is split in two.

    Attributes:
        work: of every block of the sequence.
        limit: most blocks of a rank.
        cut: what a cut before each block costs, in runs; nothing where there is a seam already.
        slack: work by which a split may miss.
        block_cost: of each block, beside its work.
    """

    work: np.ndarray
    cut: np.ndarray
    limit: int
    slack: float
    block_cost: float

    def split(self, order: np.ndarray, parts: int) -> np.ndarray:
        """Which blocks of `order`, ascending and closed into a circle, go to the first half of `parts` ranks: bool."""
        work = self.work[order]
        start, length, error = self._arc(order, work, parts)
        inside = np.zeros(len(order), bool)
        inside[(start + np.arange(length)) % len(order)] = True
        for _ in range(3):
            if abs(error) <= self.slack or not 0 < length < len(order):
                break
            near = _near(len(self.work), order[inside], order[~inside])[order]
            x, y = _pair(work, near, np.flatnonzero(inside), np.flatnonzero(~inside), error, self.slack)
            left = error - work[x] + work[y]
            if abs(left) >= abs(error):
                break
            inside[x], inside[y], error = False, True, left
        return inside

    def _arc(self, order: np.ndarray, work: np.ndarray, parts: int) -> tuple[int, int, float]:
        """Start and length of the best arc, and the work that it has too much."""
        blocks, share = len(order), (parts // 2) / parts
        fewest = max(blocks - (parts - parts // 2) * self.limit, math.floor(blocks * share) - _SPARE_BLOCKS, 0)
        most = min(parts // 2 * self.limit, math.ceil(blocks * share) + _SPARE_BLOCKS, blocks)
        cut = self.cut[order]
        cut[1:] *= order[1:] == order[:-1] + 1
        cut[0] *= order[0] == order[-1] + 1
        sums = np.zeros(2 * blocks + 1)
        np.cumsum(np.concatenate([work, work]), out=sums[1:])
        stops = np.arange(blocks) + np.arange(fewest, most + 1)[:, None]
        error = sums[stops] - (sums[:blocks] + share * sums[blocks])
        cost = np.abs(error)
        cost += self.block_cost * np.abs(np.arange(fewest, most + 1) - blocks * share)[:, None]
        cost *= _MISS_COST / self.slack
        np.maximum(cost, _MISS_COST, out=cost)
        cost += cut
        cost += np.concatenate([cut, cut, cut[:1]])[stops]
        best = int(cost.argmin())
        return best % blocks, fewest + best // blocks, float(error.flat[best])


def _near(blocks: int, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For every block of the sequence its neighbours that are ours less those that are theirs: what taking it from us
    and giving it to them adds to the runs."""
    side = np.zeros(blocks + 2, np.int64)
    side[ours + 1], side[theirs + 1] = 1, -1
    return side[:-2] + side[2:]


def _pair(
    work: np.ndarray, near: np.ndarray, ours: np.ndarray, theirs: np.ndarray, amount: float, slack: float
) -> tuple[int, int]:
    """The blocks of two sides that change places best, so that `amount` of work, within `slack`, moves from us to
    them. Tried are blocks at the ends of runs with all others, and otherwise those whose work fits best."""
    best, pair = math.inf, (0, 0)
    for x, y in _options(work, near, ours, theirs, amount):
        if x.size and y.size:
            cost = np.abs(amount - work[x] + work[y])
            cost *= _MISS_COST / slack
            cost = np.maximum(cost, _MISS_COST) + (near[x] - near[y])
            at = int(cost.argmin())
            if cost.flat[at] < best:
                x, y = np.broadcast_arrays(x, y)
                best, pair = cost.flat[at], (int(x.flat[at]), int(y.flat[at]))
            if best <= _MISS_COST + 2:
                break
    return pair


def _options(
    work: np.ndarray, near: np.ndarray, ours: np.ndarray, theirs: np.ndarray, amount: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield ours[near[ours] <= 0][:_END_BLOCKS, None], theirs
    yield ours, theirs[near[theirs] >= 0][:_END_BLOCKS, None]
    by_work = theirs[np.argsort(work[theirs], kind="stable")]
    fitting = np.searchsorted(work[by_work], work[ours] - amount)
    yield ours, by_work[np.minimum(fitting, len(theirs) - 1)]
    yield ours, by_work[np.maximum(fitting - 1, 0)]


def _settle(work: np.ndarray, owner: np.ndarray, ranks: int, slack: float) -> None:
    """Swap blocks of the heaviest rank with blocks of light ones while it helps; changes `owner`."""
    load = np.bincount(owner, work, ranks)
    aim = load.sum() / ranks + slack
    for _ in range(4 * ranks):
        heavy = int(load.argmax())
        if load[heavy] <= aim:
            return
        for light in np.argsort(load, kind="stable")[:4].tolist():
            ours, theirs = np.flatnonzero(owner == heavy), np.flatnonzero(owner == light)
            if light == heavy or not len(theirs):
                continue
            # Between what frees the heavy rank and what the light one can take.
            least, most = load[heavy] - aim, aim - load[light]
            amount, room = (least + max(most, least)) / 2, max((most - least) / 2, slack / 100)
            x, y = _pair(work, _near(len(owner), ours, theirs), ours, theirs, amount, room)
            moved = work[x] - work[y]
            if 0 < moved < load[heavy] - load[light]:
                break
        else:
            return
        owner[x], owner[y] = light, heavy
        load[heavy] -= moved
        load[light] += moved
