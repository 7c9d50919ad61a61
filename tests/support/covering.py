"""Covering arrays: few rows that hold every combination of values of any two factors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
"""A value of each factor, or of some of them."""
CANDIDATES = 20
"""Rows that are tried for each one that is taken."""


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, strength: int = 2
) -> list[Row]:
    """Rows such that any `strength` values of different factors that a row can hold together are together in one.

    Greedy (AETG: Cohen et al., IEEE TSE 23(7), 1997), the same for the same arguments: a row begins with a combination
    that is missing, and takes for one factor after another the value that completes most missing ones.

    Args:
        allowed: whether values may be together, of any part of a row; a part of what is allowed is allowed.
    """
    chance = random.Random(0)
    missing = {
        frozenset(zip(names, values, strict=True)): None
        for names in combinations(factors, strength)
        for values in product(*(factors[name] for name in names))
    }

    def gain(row: Row) -> int:
        """Missing combinations that hold the last value of a row."""
        *others, last = row.items()
        return sum(frozenset((*some, last)) in missing for some in combinations(others, strength - 1))

    def completed(row: Row, left: Sequence[str]) -> Row | None:
        if not left:
            return row
        name, *rest = left
        values = chance.sample(list(factors[name]), len(factors[name]))
        tried = [extended for value in values if allowed(extended := row | {name: value})]
        return next((done for more in sorted(tried, key=gain, reverse=True) if (done := completed(more, rest))), None)

    rows: list[Row] = []
    while missing:
        first = dict(next(iter(missing)))
        left = [name for name in factors if name not in first]
        orders = [chance.sample(left, len(left)) for _ in range(CANDIDATES)]
        found = [row for order in orders if allowed(first) and (row := completed(first, order))]
        if not found:  # no row holds it
            del missing[frozenset(first.items())]
            continue
        best = max(found, key=lambda row: sum(held in missing for held in _held(row, strength)))
        for held in _held(best, strength):
            missing.pop(held, None)
        rows.append({name: best[name] for name in factors})
    return rows


def _held(row: Row, strength: int) -> list[frozenset[tuple[str, Any]]]:
    return [frozenset(some) for some in combinations(row.items(), strength)]
