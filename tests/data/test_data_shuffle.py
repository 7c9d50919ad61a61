"""The memoryless shuffle is a permutation, depends on its key, and never changes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hetmesh.data.sample_order import permuted


@given(st.integers(1, 500), st.integers(), st.integers(0, 9))
def test_it_is_a_permutation(size, seed, epoch):
    assert sorted(permuted(range(size), size, seed, epoch)) == list(range(size))


@given(st.integers(1, 1 << 62), st.data())
def test_any_size_costs_no_memory_and_positions_do_not_depend_on_each_other(size, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    together = permuted(positions, size, 1)
    assert together == [permuted([p], size, 1)[0] for p in positions]
    assert all(0 <= p < size for p in together)
    assert len(set(together)) == len(set(positions))


def test_every_order_of_four_is_about_equally_frequent():
    counts = Counter(tuple(permuted(range(4), 4, seed)) for seed in range(4800))
    assert len(counts) == 24
    assert 130 < min(counts.values()) <= max(counts.values()) < 270  # 200 +- 5 standard deviations


def test_the_order_never_changes_between_versions():
    assert permuted(range(10), 10, 0, 0) == FIRST
    assert permuted(range(10), 10, 0, 1) != FIRST


FIRST = [3, 7, 1, 5, 2, 6, 8, 0, 4, 9]
