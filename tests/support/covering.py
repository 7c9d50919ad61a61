"""Covering arrays: few rows that hold every combination of values of any two factors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
"""A value of each factor, or of some of them."""
CANDIDATES = 5
"""Rows that are tried for each one that is taken."""


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    strength: int = 2,
    together: Sequence[tuple[str, ...]] = (),
) -> list[Row]:
    """Rows such that any `strength` values of different factors that a row can hold together are together in one.

    Greedy (AETG: Cohen et al., IEEE TSE 23(7), 1997), the same for the same arguments: a row begins with a combination
    that is missing, and takes for one factor after another the value that completes most missing ones.

    Args:
        allowed: whether values may be together, of any part of a row; a part of what is allowed is allowed.
        together: further factors of which every combination is to be in a row.
    """
    chance = random.Random(0)
    wanted = [*combinations(factors, strength), *together]
    wanted_of = {name: [names for names in wanted if name in names] for name in factors}
    missing = {
        frozenset(zip(names, values, strict=True)): None
        for names in wanted
        for values in product(*(factors[name] for name in names))
    }

    def held(row: Row, some: Sequence[tuple[str, ...]]) -> list[frozenset[tuple[str, Any]]]:
        """Combinations of `some` factors that are in a row."""
        return [frozenset((name, row[name]) for name in names) for names in some if row.keys() >= {*names}]

    def gain(row: Row) -> int:
        """Missing combinations that hold the last value of a row."""
        return sum(each in missing for each in held(row, wanted_of[next(reversed(row))]))

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
        best = max(found, key=lambda row: sum(each in missing for each in held(row, wanted)))
        for each in held(best, wanted):
            missing.pop(each, None)
        rows.append({name: best[name] for name in factors})
    return rows
