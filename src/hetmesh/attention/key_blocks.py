"""The query blocks of one rank, and the calls of a local attention kernel that they make on a buffer of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetmesh.context import Mask, full_tiles, tile_intervals, visible
from hetmesh.context.mask_sources import ragged
from hetmesh.layout import Interval, Intervals
from hetmesh.layout.intervals import coalesce, extent

BLOCK = 128
"""Query rows of a block, at most; keys are fetched in blocks of that many positions."""

_CALL_ROWS = 1024  # query rows of a call without a mask: bounds its result
_CALL_KEYS = 1024  # keys of a call with a mask: bounds the mask

_MASK_BYTES = 1 << 26
"""Boolean masks kept per plan; further ones are made at each use. 16,384 tokens on two ranks take 4 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the local attention kernel.

    Attributes:
        rows: local query rows.
        keys: ranges of rows of the key buffer.
        positions: for a call with a mask the positions of its query rows and of its keys; None if all see all.
    """

    rows: Interval
    keys: Intervals
    positions: tuple[Interval, Intervals] | None = None


@dataclass(frozen=True, eq=False)
class Buffer:
    """Where the keys of a buffer come from: positions [starts, stops), ascending, begin at row `rows`."""

    starts: np.ndarray
    stops: np.ndarray
    rows: np.ndarray

    def places(self, runs: Intervals) -> Intervals:
        """Where ascending positions, all of them in the buffer, lie in it: row ranges in the order of `runs`."""
        starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
        run, at = ragged(self.stops.searchsorted(starts, "right"), self.starts.searchsorted(stops, "left"))
        shift = self.rows[at] - self.starts[at]
        low, high = np.maximum(starts[run], self.starts[at]) + shift, np.minimum(stops[run], self.stops[at]) + shift
        return coalesce(list(zip(low.tolist(), high.tolist(), strict=True)))

    @classmethod
    def of(cls, runs: Intervals) -> Buffer:
        """Positions that lie one after another, in the order given."""
        starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
        return cls.at(runs, np.cumsum(stops - starts) - (stops - starts))

    @classmethod
    def at(cls, runs: Intervals, rows: np.ndarray) -> Buffer:
        """Positions that begin at the given rows."""
        starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
        order = np.argsort(starts)
        return cls(starts[order], stops[order], rows[order])


@dataclass(frozen=True, eq=False)
class KernelCalls:
    """All calls of one rank's rows on one buffer.

    Attributes:
        runs: the positions of the rows, in local order.
        keys: where the rows of the buffer come from.
    """

    runs: Intervals
    keys: Buffer
    calls: tuple[Call, ...]


class PartialMasks:
    """Boolean masks `[rows, keys]` of the calls that need one."""

    def __init__(self, mask: Mask, window: int | None) -> None:
        self.mask, self.window = mask, window
        self._kept: dict[Call, Tensor] = {}
        self._room = _MASK_BYTES

    def of(self, call: Call) -> Tensor:
        """The mask of a call that has positions."""
        if call not in self._kept:
            found = torch.from_numpy(self._make(call))
            if found.numel() > self._room:
                return found
            self._room -= found.numel()
            self._kept[call] = found
        return self._kept[call]

    def _make(self, call: Call) -> np.ndarray:
        assert call.positions is not None
        queries = np.arange(*call.positions[0])
        keys = np.concatenate([np.arange(a, b) for a, b in call.positions[1]])
        seen = visible(self.mask, queries, keys)
        if self.window is not None:
            seen &= np.abs(queries[:, None] - keys[None, :]) < self.window
        return seen


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Intervals of key positions, each of a query block."""

    block: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def take(self, index: np.ndarray) -> KeyIntervals:
        return KeyIntervals(self.block[index], self.starts[index], self.stops[index])

    def clip(self, low: np.ndarray, high: np.ndarray) -> KeyIntervals:
        """Cut to [low, high) of each interval."""
        cut = KeyIntervals(self.block, np.maximum(self.starts, low), np.minimum(self.stops, high))
        return cut.take(np.flatnonzero(cut.starts < cut.stops))

    def without(self, other: KeyIntervals, stride: int) -> KeyIntervals:
        """What is left of it when `other`, a part of it, is taken away; positions are below `stride`."""
        edges = np.concatenate([self.starts, other.stops, self.stops, other.starts])
        edges += stride * np.concatenate([self.block, other.block, self.block, other.block])
        step = np.repeat([1, -1], len(self.block) + len(other.block))
        order = np.lexsort((step, edges))
        edges, left = edges[order], step[order].cumsum()
        held = np.flatnonzero((left[:-1] > 0) & (edges[1:] > edges[:-1])) if len(edges) else order
        block = edges[held] // stride
        return KeyIntervals(block, edges[held] - block * stride, edges[held + 1] - block * stride)

    def inside(self, buffer: Buffer) -> Iterator[tuple[int, Intervals, Intervals]]:
        """For each block with keys in the buffer, ascending: the block, their buffer rows, their positions."""
        low = buffer.stops.searchsorted(self.starts, "right")
        owner, at = ragged(low, buffer.starts.searchsorted(self.stops, "left"))
        starts, stops = (
            np.maximum(self.starts[owner], buffer.starts[at]),
            np.minimum(self.stops[owner], buffer.stops[at]),
        )
        shift = buffer.rows[at] - buffer.starts[at]
        found = zip(self.block[owner].tolist(), starts.tolist(), stops.tolist(), shift.tolist(), strict=True)
        for block, parts in itertools.groupby(found, key=lambda part: part[0]):
            keys = [(a, b, shift) for _, a, b, shift in parts]
            yield block, tuple((a + s, b + s) for a, b, s in keys), tuple((a, b) for a, b, _ in keys)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The query blocks of one rank.

    Attributes:
        starts, stops: their positions, ascending.
        rows: local row at which each begins.
        full: keys that all rows of a block see.
        partial: keys that some may see.
    """

    runs: Intervals
    starts: np.ndarray
    stops: np.ndarray
    rows: np.ndarray
    full: KeyIntervals
    partial: KeyIntervals

    @classmethod
    def make(cls, mask: Mask, runs: Intervals, window: int | None) -> Blocks:
        """Of a rank that keeps the positions `runs`, in this order."""
        own = Buffer.of(runs)
        starts, stops = _cut(own, mask)
        edges = np.append(np.stack([starts, stops], axis=1), mask.length)  # every second group lies between blocks
        run = own.stops.searchsorted(starts, "right")
        rows = own.rows[run] + starts - own.starts[run]
        lists = []
        for keys in (tile_intervals(mask, edges, 1), full_tiles(mask, edges, 1)):
            group = np.repeat(np.arange(len(edges) - 1), np.diff(keys.first))
            lists.append(KeyIntervals(group // 2, keys.starts, keys.stops).take(np.flatnonzero(group % 2 == 0)))
        seen, full = lists
        if window is not None:
            a, b = starts[seen.block], stops[seen.block]
            seen = seen.clip(a - window + 1, b + window - 1)
            a, b = starts[full.block], stops[full.block]
            full = full.clip(b - window, a + window)
        return cls(runs, starts, stops, rows, full, seen.without(full, mask.length + 1))

    def work(self, buffer: Buffer) -> KernelCalls:
        """What its rows compute on the keys of a buffer. What neighbouring blocks see alike makes one call: the kernel
        takes a sixth less time per pair for 512 rows than for 128."""
        calls: list[Call] = []
        group: list[Call] = []
        common: Intervals = ()
        for block, keys, _ in self.full.inside(buffer):
            call = Call(self._span(block), coalesce(sorted(keys)))
            shared = _both(common, call.keys)
            joins = group and group[-1].rows[1] == call.rows[0] and call.rows[1] - group[0].rows[0] <= _CALL_ROWS
            if not joins or 2 * extent(shared) < extent(call.keys):
                calls += _joined(group, common)
                group, shared = [], call.keys
            group.append(call)
            common = shared
        calls += _joined(group, common)
        for block, keys, positions in self.partial.inside(buffer):
            queries = (int(self.starts[block]), int(self.stops[block]))
            calls += [
                Call(self._span(block), coalesce([k for k, _ in part]), (queries, tuple(p for _, p in part)))
                for part in _slices(list(zip(keys, positions, strict=True)))
            ]
        return KernelCalls(self.runs, buffer, tuple(calls))

    def _span(self, block: int) -> Interval:
        row = int(self.rows[block])
        return row, row + int(self.stops[block] - self.starts[block])


def _joined(group: list[Call], common: Intervals) -> Iterator[Call]:
    """Calls without a mask of neighbouring blocks as one call on their common keys, and those for the rest."""
    if group:
        yield Call((group[0].rows[0], group[-1].rows[1]), common)
    for call in group:
        if rest := _first_only(call.keys, common):
            yield Call(call.rows, rest)


def _both(a: Intervals, b: Intervals) -> Intervals:
    """What two ascending interval lists share."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            out.append((low, high))
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return tuple(out)


def _first_only(a: Intervals, b: Intervals) -> Intervals:
    """What is in the first of two ascending interval lists and not in the second, a part of it."""
    edges = sorted([edge for span in a for edge in span] + [edge for span in b for edge in span])
    return tuple((low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high)


def _cut(own: Buffer, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of ascending runs. They end where a long segment does, so that most have rows of one kind, which see the
    same keys but for a diagonal; among short segments whole blocks with a mask are cheaper than many calls."""
    if not len(own.starts):
        return own.starts, own.stops
    long = mask.stops - mask.starts >= BLOCK
    edges = np.unique(np.concatenate([own.starts, own.stops, mask.starts[long], mask.stops[long]]))
    starts, stops = edges[:-1], edges[1:]
    run = np.minimum(own.stops.searchsorted(starts, "right"), len(own.stops) - 1)
    held = np.flatnonzero((own.starts[run] <= starts) & (starts < own.stops[run]))
    starts, stops = starts[held], stops[held]
    part, block = ragged(np.zeros_like(starts), -(-(stops - starts) // BLOCK))
    first = starts[part] + block * BLOCK
    return first, np.minimum(first + BLOCK, stops[part])


def _slices(pairs: list[tuple[Interval, Interval]]) -> Iterator[list[tuple[Interval, Interval]]]:
    """Cut pairs of equally long ranges into lists of at most `_CALL_KEYS` keys."""
    part: list[tuple[Interval, Interval]] = []
    room = _CALL_KEYS
    for (a, b), (p, _) in pairs:
        while a < b:
            step = min(room, b - a)
            part.append(((a, a + step), (p, p + step)))
            a, p, room = a + step, p + step, room - step
            if not room:
                yield part
                part, room = [], _CALL_KEYS
    if part:
        yield part
