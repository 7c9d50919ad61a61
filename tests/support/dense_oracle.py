"""Attention masks entry by entry, from the rule in words: what masks as segments are tested by."""

from __future__ import annotations

import numpy as np

from hetmesh.context import Mask, Segment
from hetmesh.context.rule import TEXT, Rule, Sees


def dense(mask: Mask) -> np.ndarray:
    """The whole mask, bool [length, length], entry by entry from the rule in words: the oracle of the tests."""
    out = np.zeros((mask.length, mask.length), bool)
    owner = {p: segment for segment in mask.segments for p in range(segment.start, segment.stop)}
    for i, query in owner.items():
        for j, key in owner.items():
            out[i, j] = _sees(query, i, key, j)
    return out


def _sees(query: Segment, i: int, key: Segment, j: int) -> bool:
    if key.document == query.document and key.instance == query.instance:
        return query.rule is Rule.BIDIRECTIONAL or j <= i
    if j > i or key.document > query.document:
        return False
    if key.document == query.document:
        return bool(query.sees & (Sees.TEXT if key.instance == TEXT else Sees.INSTANCES))
    return bool(query.sees & (Sees.EARLIER_TEXT if key.instance == TEXT else Sees.EARLIER_INSTANCES))
