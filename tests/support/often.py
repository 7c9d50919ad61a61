"""Parameters of which a default run takes some: the others repeat what these and other tests cover."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def some(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Every case, for `parametrize`; what is not in `often` is `exhaustive`."""
    every = list(cases)
    if unknown := [case for case in often if case not in every]:
        raise ValueError(f"no such cases: {unknown}")
    return [case if case in often else pytest.param(case, marks=pytest.mark.exhaustive) for case in every]


def combinations(often: Collection[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """Every combination of `values`, for `parametrize`; what is not in `often` is `exhaustive`."""
    every = list(product(*values))
    if unknown := set(often) - set(every):
        raise ValueError(f"no such combinations: {unknown}")
    return [each if each in often else pytest.param(*each, marks=pytest.mark.exhaustive) for each in every]
