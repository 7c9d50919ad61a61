"""Balanced token assignment: attention work and tokens at once, in few runs, with little remote traffic.

Close the sequence into a circle. To split R ranks into a + b, some arc has exactly a/R of both tokens and work: turn an
arc with that many tokens around the circle; its work averages a/R, so somewhere it is (intermediate value theorem).
What is outside the arc is a circle again, so both sides are split on. A split adds two cuts at most, so R ranks have
less than two runs each. Blocks are not continuous: what an arc misses, one exchange of two blocks makes up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_MISS = 100.0
"""What missing the balance by one slack costs, in runs: balance first, then few runs."""


def balanced(
    work: np.ndarray, tokens: np.ndarray, ranks: int, *, token_cap: float = 1.02, tolerance: float = 0.004
) -> np.ndarray:
    """The rank of every block, int64 [blocks].

    Args:
        work: cost of each block, any unit.
        tokens: rows of each block; all alike but the last, which may have fewer.
        ranks: at least 1.
        token_cap: most tokens of a rank over the mean, where whole blocks allow it.
        tolerance: most work of a rank over the mean, less one, that is left alone.
    """
    blocks = len(work)
    if not blocks:
        return np.zeros(0, np.int64)
    mean_tokens = int(tokens.sum()) / ranks
    limit = max(math.ceil(blocks / ranks), int(token_cap * mean_tokens / int(tokens[0])))
    slack = max(tolerance * float(work.sum()) / ranks, 1e-9)
    circle = _Circle(work.astype(np.float64), limit, slack / 2)
    owner = np.zeros(blocks, np.int64)
    todo = [(np.arange(blocks), 0, ranks)]
    while todo:
        order, first, parts = todo.pop()
        if parts == 1 or not len(order):
            owner[order] = first
            continue
        inside = circle.split(order, parts)
        todo += [(order[inside], first, parts // 2), (order[~inside], first + parts // 2, parts - parts // 2)]
    _settle(circle.work, owner, ranks, slack)
    return owner


@dataclass(frozen=True, eq=False)
class _Circle:
    """How a circle of blocks is split in two.

    Attributes:
        work: of every block of the sequence.
        limit: most blocks of a rank.
        slack: work by which a split may miss.
    """

    work: np.ndarray
    limit: int
    slack: float

    def split(self, order: np.ndarray, parts: int) -> np.ndarray:
        """Which blocks of `order`, ascending and closed into a circle, go to the first half of `parts` ranks: bool."""
        work, share = self.work[order], (parts // 2) / parts
        start, length, error = self._arc(order, work, parts, share)
        inside = np.zeros(len(order), bool)
        inside[(start + np.arange(length)) % len(order)] = True
        for _ in range(3):
            pair = self._exchange(order, work, inside, error) if abs(error) > self.slack else None
            if pair is None:
                break
            inside[list(pair)] = False, True
            error -= work[pair[0]] - work[pair[1]]
        return inside

    def _arc(self, order: np.ndarray, work: np.ndarray, parts: int, share: float) -> tuple[int, int, float]:
        """Start and length of the best arc, and what it has too much."""
        blocks, ideal = len(order), len(order) * share
        fewest = max(blocks - (parts - parts // 2) * self.limit, math.floor(ideal) - 1, 0)
        most = min(parts // 2 * self.limit, math.ceil(ideal) + 1, blocks)
        lengths = np.arange(fewest, most + 1)[:, None]
        behind = np.concatenate([[0.0], np.cumsum(np.concatenate([work, work]))])
        starts = np.arange(blocks)
        error = behind[starts + lengths] - behind[:blocks] - share * behind[blocks]
        # A cut costs a run and the keys that the block behind it sees, unless it is on a seam.
        seam = order != np.roll(order, 1) + 1
        cut = np.where(seam, 0.0, 1.0 + work / max(work.mean(), 1e-9))
        cost = cut + cut[(starts + lengths) % blocks]
        cost += _MISS * np.maximum(np.abs(error) / self.slack - 1, 0)
        best = int(cost.argmin())
        return best % blocks, int(lengths[best // blocks, 0]), float(error.ravel()[best])

    def _exchange(
        self, order: np.ndarray, work: np.ndarray, inside: np.ndarray, error: float
    ) -> tuple[int, int] | None:
        """The blocks, one inside and one outside, that change places best; None if that does not help."""
        side = np.zeros(len(self.work) + 2)
        side[order + 1] = np.where(inside, 1, -1)
        near = side[order] + side[order + 2]  # what taking a block out adds to the runs; putting one in takes it off
        out, into = np.flatnonzero(inside), np.flatnonzero(~inside)
        sorted_into = into[np.argsort(work[into], kind="stable")]
        wanted = np.searchsorted(work[sorted_into], work[out] - error)
        close = sorted_into[np.clip(wanted[:, None] + np.arange(-2, 2), 0, len(into) - 1)]
        options = [
            (out[:, None], close),
            (out[near[out] <= 0][:, None], into[None, :]),
            (out[:, None], into[near[into] >= 0][None, :]),
        ]
        best, pair = _MISS * (abs(error) / self.slack - 1), None
        for x, y in options:
            if x.size and y.size:
                left = np.abs(error - work[x] + work[y]) / self.slack
                cost = _MISS * np.maximum(left - 1, 0) + near[x] - near[y]
                at = int(cost.argmin())
                if cost.ravel()[at] < best:
                    x, y = np.broadcast_arrays(x, y)
                    best, pair = cost.ravel()[at], (int(x.ravel()[at]), int(y.ravel()[at]))
        return pair


def _settle(work: np.ndarray, owner: np.ndarray, ranks: int, slack: float) -> None:
    """Swap blocks of the heaviest rank with blocks of light ones while it helps; changes `owner`."""
    load = np.bincount(owner, work, ranks)
    aim = load.sum() / ranks + slack
    for _ in range(4 * ranks):
        heavy = int(load.argmax())
        if load[heavy] <= aim:
            return
        for light in np.argsort(load, kind="stable")[:4].tolist():
            pair = _swap(work, owner, load, heavy, light, aim)
            if pair is not None:
                break
        else:
            return
        x, y = pair
        owner[x], owner[y] = light, heavy
        load[heavy] -= work[x] - work[y]
        load[light] += work[x] - work[y]


def _swap(
    work: np.ndarray, owner: np.ndarray, load: np.ndarray, heavy: int, light: int, aim: float
) -> tuple[int, int] | None:
    x, y = np.flatnonzero(owner == heavy), np.flatnonzero(owner == light)
    around = np.concatenate([[-1], owner, [-1]])
    side = (around == heavy).astype(np.int64) - (around == light)
    near = side[:-2] + side[2:]
    moved = work[x][:, None] - work[y]
    worst = np.maximum(load[heavy] - moved, load[light] + moved)
    slack = max(aim - load.sum() / len(load), 1e-9)
    cost = _MISS * np.maximum((worst - aim) / slack, 0) + near[x][:, None] - near[y]
    if not cost.size:
        return None
    at = int(cost.argmin())
    return (int(x[at // len(y)]), int(y[at % len(y)])) if worst.ravel()[at] < load[heavy] else None
