"""What queries may see, as interval lists shared by all queries of one kind.

A segment's visible keys come from at most two *sources*. Text has one: all that the text of its document sees. An
image has its own tokens, and what images of its document see besides; the latter is one source for all of them, so
that a thousand images do not list the same text a thousand times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetmesh.context.masks import ALWAYS, BEFORE, TEXT, Fields, Mask, Sees, reach

_STRANGER = -1  # an instance that no segment has: what a source sees for everybody, own tokens left out


class Lists(NamedTuple):
    """Interval lists, ascending and apart: those of source s are `first[s]:first[s + 1]`.

    `start_keys` and `stop_keys` are edge + s * stride: sorted as a whole, so one binary search serves all sources.
    """

    first: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    start_keys: np.ndarray
    stop_keys: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Intervals per source."""
        return np.diff(self.first)


@dataclass(frozen=True, eq=False)
class Sources:
    """The sources of a mask.

    Attributes:
        of_segment: int64 [2, segments]: the sources of each segment, -1 for none.
        before: what a query sees as far as it lies at or before the query.
        always: what it sees wherever it lies.
        stride: see `Lists`.
    """

    of_segment: np.ndarray
    before: Lists
    always: Lists
    stride: int

    def __len__(self) -> int:
        return len(self.before.first) - 1


def find_sources(mask: Mask) -> Sources:
    """The sources of a mask; time grows with pairs of segments within a document (of all documents where earlier ones
    are seen), never with tokens.
    """
    f = mask.fields
    is_text = f.instance == TEXT
    order = np.lexsort((f.instance, f.document))  # stable, so by position within an instance
    document, instance = f.document[order], f.instance[order]
    new_instance = np.append(True, (document[1:] != document[:-1]) | (instance[1:] != instance[:-1]))[: len(order)]
    run = np.cumsum(new_instance) - 1  # documents and instances numbered densely, in key order
    edges = np.append(np.flatnonzero(new_instance), len(order))
    instance_of = np.empty(len(order), np.int64)
    instance_of[order] = run

    viewers = np.flatnonzero(is_text | (f.sees != Sees.NOTHING))
    viewer_instance = np.where(is_text, TEXT, _STRANGER)
    viewer, viewer_rep = _groups(
        viewers, f.document, viewer_instance, np.where(is_text, f.rule, 0), f.sees, rows=len(order)
    )
    owns = np.flatnonzero(~is_text)
    own, own_rep = _groups(owns, instance_of, f.rule, rows=len(order))
    own[owns] += len(viewer_rep)

    reps = Fields(
        *(np.concatenate([a, b]) for a, b in zip(f.take(viewer_rep), f.take(own_rep), strict=True))
    )
    reps = reps._replace(
        instance=np.append(viewer_instance[viewer_rep], f.instance[own_rep]),
        sees=np.append(f.sees[viewer_rep], np.zeros_like(own_rep)),
    )
    far = (f.sees[viewer_rep] & Sees.EARLIER_DOCUMENTS) != 0
    low = np.where(far, 0, np.searchsorted(document, f.document[viewer_rep]))
    low = np.append(low, edges[instance_of[own_rep]])
    high = np.append(np.searchsorted(document, f.document[viewer_rep], side="right"), edges[instance_of[own_rep] + 1])
    source, at = ragged(low, high)
    key = order[at]
    found = reach(reps.take(source), f.take(key))
    stride = mask.length + 1
    lists = (_lists(mask, source[found == kind], key[found == kind], len(reps.rule), stride) for kind in (BEFORE, ALWAYS))
    return Sources(np.stack([viewer, own]), *lists, stride)


def ragged(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers low[i], ..., high[i] - 1 of every i, one after another, and the i of each."""
    counts = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - low, counts)


def merge(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join intervals, in any order, that overlap or touch."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order]) if len(stops) else stops
    seam = np.append(True, starts[1:] > stops[:-1])[: len(starts)]
    return starts[seam], stops[np.append(seam[1:], True)[: len(stops)]]


def _groups(chosen: np.ndarray, *columns: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct combinations of columns among the chosen rows: the number per row (-1 if not chosen), and
    one representative row per number.
    """
    taken = [column[chosen] for column in columns]
    order = np.lexsort(taken)
    new = np.zeros(len(order), bool)
    new[:1] = True
    for column in taken:
        new[1:] |= column[order][1:] != column[order][:-1]
    number = np.full(rows, -1)
    number[chosen[order]] = np.cumsum(new) - 1
    return number, chosen[order[new]]


def _lists(mask: Mask, source: np.ndarray, key: np.ndarray, sources: int, stride: int) -> Lists:
    # Offset by source, touching intervals of different sources stay apart: a stop is at most stride - 1.
    starts, stops = merge(mask.starts[key] + source * stride, mask.stops[key] + source * stride)
    owner = starts // stride
    first = np.searchsorted(owner, np.arange(sources + 1))
    return Lists(first, starts - owner * stride, stops - owner * stride, starts, stops)
