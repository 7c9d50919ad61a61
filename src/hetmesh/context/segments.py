"""Attention masks as mask segments, for any length and any number of images or documents.

A multimodal mask is not causal: text is, the tokens of an image see each other in both directions, packed documents
do not see each other at all. A bit field per token (Cornstarch, arXiv 2503.11367, section on token distribution) holds
61 instances and no packing; a list of segments holds any number of both. Who sees whom is said in rule.py; tiles,
fetches and boolean masks all come from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetmesh.context.mask_sources import Sources, find_sources
from hetmesh.context.rule import ALWAYS, BEFORE, NEVER, Fields, Rule, Sees, reach
from hetmesh.errors import LayoutError
from hetmesh.layout.hashing import HashedOnce


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that are alike to the mask.

    Attributes:
        document: its document, a number >= 0; unrelated documents have different ones.
        instance: `TEXT`, or the number of an item within the document. One instance may have several segments.
        rule: within the own instance.
        sees: of what else lies before.
    """

    document: int
    instance: int
    start: int
    stop: int
    rule: Rule
    sees: Sees


@dataclass(frozen=True)
class Mask(HashedOnce):
    """The attention mask of one sequence.

    Attributes:
        segments: disjoint; kept in the order of their positions.
        length: tokens of the sequence; positions in no segment are padding.

    Raises:
        LayoutError: segments overlap, are empty or leave [0, length), or a number is negative.
    """

    segments: tuple[Segment, ...]
    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(sorted(self.segments, key=lambda s: s.start)))
        starts, stops = self.starts, self.stops
        wrong = (starts < 0) | (stops <= starts) | (stops > self.length)
        wrong[1:] |= starts[1:] < stops[:-1]
        wrong |= (self.fields.document < 0) | (self.fields.instance < 0)
        if wrong.any():
            raise LayoutError(
                f"mask of {self.length} tokens: segments must be disjoint, not empty and within the length, with "
                f"document and instance >= 0, got {self.segments[int(wrong.argmax())]}"
            )

    __hash__ = HashedOnce.__hash__

    @cached_property
    def _table(self) -> np.ndarray:
        rows = [(s.document, s.instance, s.rule, s.sees, s.start, s.stop) for s in self.segments]
        return np.array(rows, np.int64).reshape(-1, 6).T

    @cached_property
    def fields(self) -> Fields:
        return Fields(*self._table[:4])

    @property
    def starts(self) -> np.ndarray:
        """First positions, int64, ascending."""
        return self._table[4]

    @property
    def stops(self) -> np.ndarray:
        """Positions after the last."""
        return self._table[5]

    @cached_property
    def sources(self) -> Sources:
        """What its queries may see, as interval lists; found once per mask."""
        return find_sources(self.fields, self.starts, self.stops, self.length)

    def segment_of(self, positions: np.ndarray) -> np.ndarray:
        """Index of the segment of each position, -1 for padding."""
        if not self.segments:
            return np.full(len(positions), -1)
        index = np.searchsorted(self.starts, positions, side="right") - 1
        return np.where((index >= 0) & (positions < self.stops[index]), index, -1)


def visible(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of the key positions each of the query positions sees: bool [queries, keys].

    For small pieces, such as a tile that is visible in part: it takes time and memory for every entry.
    """
    queries, keys = np.asarray(queries, np.int64), np.asarray(keys, np.int64)
    q, k = mask.segment_of(queries), mask.segment_of(keys)
    if not mask.segments:
        return np.zeros((len(queries), len(keys)), bool)
    rows, row = np.unique(q, return_inverse=True)
    columns, column = np.unique(k, return_inverse=True)
    found = reach(mask.fields.take(rows[:, None]), mask.fields.take(columns[None, :]))
    found[rows < 0] = NEVER
    found[:, columns < 0] = NEVER
    found = found[row[:, None], column[None, :]]
    return (found == ALWAYS) | ((found == BEFORE) & (keys[None, :] <= queries[:, None]))


def join(parts: Iterable[Mask]) -> Mask:
    """Pack masks into one row, one after another, their documents numbered on: nobody sees another part, unless it
    asks for earlier documents."""
    segments: list[Segment] = []
    length = document = 0
    for part in parts:
        segments += [
            replace(s, document=s.document + document, start=s.start + length, stop=s.stop + length)
            for s in part.segments
        ]
        document = max((s.document for s in segments), default=-1) + 1
        length += part.length
    return Mask(tuple(segments), length)
