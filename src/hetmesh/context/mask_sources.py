"""What queries may see, as interval lists shared by all queries of one kind.

A segment's visible keys come from at most two *sources*. Text has one: all that the text of its document sees. An
image has its own tokens, and what images of its document see besides; the latter is one source for all of them, so
that a thousand images do not list the same text a thousand times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetmesh.context.rule import ALWAYS, NEVER, TEXT, Fields, Sees, reach

_STRANGER = -1  # an instance that no segment has: what a source sees for everybody, own tokens left out


class Lists(NamedTuple):
    """Interval lists, ascending and apart: those of source s are `first[s]:first[s + 1]`.

    `start_keys` are start + s * stride: sorted as a whole, so one binary search serves all sources.
    """

    first: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    start_keys: np.ndarray

    def part(self, low: int, high: int, stride: int) -> Lists:
        """The lists [low, high), numbered from 0."""
        edges = self.first[low : high + 1]
        held = slice(edges[0], edges[-1])
        return Lists(edges - edges[0], self.starts[held], self.stops[held], self.start_keys[held] - low * stride)


@dataclass(frozen=True, eq=False)
class Sources:
    """The sources of a mask.

    Attributes:
        of_segment: int64 [2, segments]: the sources of each segment, -1 for none.
        before: what a query sees as far as it lies at or before the query.
        always: what it sees wherever it lies.
    """

    of_segment: np.ndarray
    before: Lists
    always: Lists
    stride: int

    def __len__(self) -> int:
        return len(self.before.first) - 1


def find_sources(fields: Fields, starts: np.ndarray, stops: np.ndarray, length: int) -> Sources:
    """The sources of the segments of a sequence, given by position.

    Time grows with segment pairs within a document (of all documents where earlier ones are seen), never with tokens.
    """
    f = fields
    text = f.instance == TEXT
    order = np.lexsort((f.instance, f.document))  # stable, so by position within an instance
    document, instance = f.document[order], f.instance[order]
    new_document = document[1:] != document[:-1]
    new_instance = new_document | (instance[1:] != instance[:-1])
    number, instance_edges = _number(order, new_instance)
    document_number, document_edges = _number(order, new_document)

    # Equal numbers mean equal sources. Text sees by its own rule; what others see besides their own is a stranger's.
    kind = (2 * document_number + text) * 32 + f.sees * 2 + f.rule * text
    viewer, viewer_of = _distinct(kind, text | (f.sees != Sees.NOTHING))
    own, own_of = _distinct(2 * number + f.rule, ~text)
    own[own >= 0] += len(viewer_of)
    example = np.concatenate([viewer_of, own_of])
    is_own = np.arange(len(example)) >= len(viewer_of)
    asks = f.take(example)
    asks = asks._replace(
        instance=np.where(is_own | text[example], asks.instance, _STRANGER),
        sees=np.where(is_own, Sees.NOTHING, asks.sees),
    )
    # Candidates are runs of the order above: the own instance, the document, or all documents up to it.
    low = np.where(is_own, instance_edges[number[example]], document_edges[document_number[example]])
    high = np.where(is_own, instance_edges[number[example] + 1], document_edges[document_number[example] + 1])
    low[(asks.sees & Sees.EARLIER_DOCUMENTS) != 0] = 0
    source, at = ragged(low, high)
    key = order[at]
    found = reach(asks.take(source), f.take(key))
    stride, sources = length + 1, len(example)
    # Both kinds in one go: those seen always are numbered after those seen before. As keys, touching intervals of
    # different sources stay apart: a stop is at most stride - 1.
    seen = found != NEVER
    base = ((source + sources * (found == ALWAYS)) * stride)[seen]
    key = key[seen]
    start_keys, stop_keys = merge(starts[key] + base, stops[key] + base)
    owner = start_keys // stride
    base = owner * stride
    edges = owner.searchsorted(np.arange(2 * sources + 1))
    whole = Lists(edges, start_keys - base, stop_keys - base, start_keys)
    return Sources(
        np.stack([viewer, own]), whole.part(0, sources, stride), whole.part(sources, 2 * sources, stride), stride
    )


def ragged(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers low[i], ..., high[i] - 1 of every i, one after another, and the i of each."""
    counts = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - low, counts)


def merge(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join intervals, in any order, that overlap or touch."""
    order = starts.argsort(kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    first, last = np.ones(len(order), bool), np.ones(len(order), bool)
    first[1:] = last[:-1] = starts[1:] > stops[:-1]
    return starts[first], stops[last]


def _number(order: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the runs of `order`, given where a new one begins: per segment, and the edges of the runs in `order`."""
    number = np.empty(len(order), np.int64)
    number[order[:1]] = 0
    number[order[1:]] = new.cumsum()
    return number, np.concatenate([[0], np.flatnonzero(new) + 1, [len(order)]])


def _distinct(values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct values of the chosen segments: per segment (-1 if not chosen), and a segment of each."""
    rows = np.flatnonzero(chosen)
    _, example, inverse = np.unique(values[rows], return_index=True, return_inverse=True)
    number = np.full(len(values), -1)
    number[rows] = inverse
    return number, rows[example]
