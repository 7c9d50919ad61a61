"""Who sees whom: the one statement of the visibility rule that every backend uses.

For a query at position i of segment Q and a key at position j of segment K:

1. Own instance (same document, same instance): a bidirectional Q sees all of it, a causal Q sees j <= i.
2. Anything else must lie before (j < i), in the same document or in one with a smaller number, and be of a kind that Q
   `sees`: text or instances of its own document, text or instances of earlier documents.
3. Positions in no segment are padding: they see nothing and nobody sees them.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np

TEXT = 0
"""The instance number of a document's text; images, clips and recordings have positive numbers."""


class Rule(IntEnum):
    """Which tokens of its own instance a token sees."""

    CAUSAL = 0
    BIDIRECTIONAL = 1


class Sees(IntFlag):
    """What else a token sees, as far as it lies before."""

    NOTHING = 0
    TEXT = 1
    INSTANCES = 2
    DOCUMENT = TEXT | INSTANCES
    EARLIER_TEXT = 4
    EARLIER_INSTANCES = 8
    EARLIER_DOCUMENTS = EARLIER_TEXT | EARLIER_INSTANCES


class Fields(NamedTuple):
    """What the visibility rule asks of segments, as arrays of one shape."""

    document: np.ndarray
    instance: np.ndarray
    rule: np.ndarray
    sees: np.ndarray

    def take(self, index: Any) -> Fields:
        return Fields(*(field[index] for field in self))


NEVER, BEFORE, ALWAYS = 0, 1, 2
"""Values of `reach`: no key of K is seen; those at or before the query; all."""


def reach(query: Fields, key: Fields) -> np.ndarray:
    """The visibility rule, for pairs of segments whose fields broadcast: `NEVER`, `BEFORE` or `ALWAYS` (int8).

    `BEFORE` also says "must lie before" of two different segments: segments do not overlap, so no position is equal.
    """
    same = query.document == key.document
    own = same & (query.instance == key.instance)
    kind = (key.instance != TEXT) + 2 * ~same  # the bit of Sees that asks for this kind of key
    asked = ((query.sees >> kind) & 1).astype(bool) & (key.document <= query.document)
    return np.where(own & (query.rule == Rule.BIDIRECTIONAL), ALWAYS, own | asked).astype(np.int8)
