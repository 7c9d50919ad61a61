"""Covering arrays: each combination that a row can hold is in one, no row is forbidden, and there are few."""

from itertools import combinations, product

import pytest

from support.covering import covering_rows

FACTORS = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3), "d": (0, 1)}


def allowed(row):
    """Two of them together, and three of which two alone would be allowed."""
    return not (row.get("a") == 2 and row.get("b") == 1) and sum(row.get(key, 0) for key in "acd") <= 4


def held(row, strength):
    return {frozenset(some) for some in combinations(row.items(), strength)}


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_that_a_row_can_hold_is_in_one(strength):
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    possible = set().union(*(held(row, strength) for row in every if allowed(row)))
    rows = covering_rows(FACTORS, allowed, strength)
    assert all(allowed(row) and list(row) == list(FACTORS) for row in rows)
    assert set().union(*(held(row, strength) for row in rows)) == possible
    assert len(rows) <= {2: 16, 3: 32}[strength] < sum(map(allowed, every))
    assert rows == covering_rows(FACTORS, allowed, strength)


def test_some_factors_are_in_rows_in_every_combination():
    rows = covering_rows(FACTORS, together=[("a", "b", "c")])
    assert {(row["a"], row["b"], row["c"]) for row in rows} == {*product(*(FACTORS[name] for name in "abc"))}


def test_what_no_row_can_hold_is_left_out():
    rows = covering_rows({"a": (0, 1), "b": (0, 1), "c": (0,)}, lambda row: row.get("a") != 1 or row.get("c") is None)
    assert {(row["a"], row["b"]) for row in rows} == {(0, 0), (0, 1)}
