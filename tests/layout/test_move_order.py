"""In which order tensors move: no rank holds much more than the larger of its shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.layout.move_order import move_order


def peak_of(order, before, after):
    """The most that a rank holds over the larger of its shares, counted move by move."""
    before, after = np.array(before, float), np.array(after, float)
    larger, held, peak = np.maximum(before.sum(0), after.sum(0)), before.sum(0), 1.0
    for item in order:
        peak = max(peak, max((held + after[item])[larger > 0] / larger[larger > 0], default=1.0))
        held += after[item] - before[item]
    return peak


def test_two_ranks_that_change_places_take_turns():
    """In the order of names, one of them would hold both shares in the end."""
    before = np.zeros((40, 2))
    before[:20, 0] = before[20:, 1] = 1
    order, peak = move_order(before, before[:, ::-1])
    assert sorted(order) == list(range(40))
    assert peak == pytest.approx(1.05)
    assert peak_of(range(40), before, before[:, ::-1]) == 2.0


@st.composite
def layouts(draw):
    items, ranks = draw(st.integers(0, 12)), draw(st.integers(1, 5))
    each = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)
    return [np.array(draw(st.lists(each, min_size=items, max_size=items))).reshape(items, ranks) for _ in range(2)]


@given(layouts())
def test_each_item_moves_once_and_the_peak_is_as_counted(case):
    order, peak = move_order(*case)
    assert sorted(order) == list(range(len(case[0])))
    assert peak == pytest.approx(peak_of(order, *case))
