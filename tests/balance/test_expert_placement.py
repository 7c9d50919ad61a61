"""Placement of experts: always a permutation, near the best there is, and nothing moves for nothing."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.balance.place_experts import place_experts, rank_loads, skew
from hetmesh.errors import GraphError


def zipf(experts, seed, tokens=1_000_000):
    """The k-th expert takes a share like 1/k, in shuffled order."""
    shares = 1 / np.arange(1, experts + 1)
    return np.random.default_rng(seed).permutation(tokens * shares / shares.sum()).astype(int)


def fewest_on_fullest(loads, ranks):
    """Brute force over all ways to deal experts evenly."""
    room = len(loads) // ranks

    def rest(left, most):
        if not left:
            return most
        first, *others = left
        return min(
            rest([e for e in others if e not in mates], max(most, loads[first] + sum(loads[e] for e in mates)))
            for mates in itertools.combinations(others, room - 1)
        )

    return rest(list(range(len(loads))), 0)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([(8, 2), (8, 4), (6, 3), (9, 3)]))
def test_it_is_near_the_best_of_all(data, sizes):
    experts, ranks = sizes
    loads = data.draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    current = data.draw(st.permutations(range(experts)))
    found = place_experts(loads, ranks, current, worth=0.0)
    assert sorted(found) == list(range(experts))
    best = fewest_on_fullest(loads, ranks)
    assert rank_loads(loads, found, ranks).max() <= 1.2 * best + 1
    assert skew(loads, found, ranks) <= skew(loads, current, ranks)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("experts", "ranks"), [(16, 2), (64, 4), (128, 2), (128, 4)])
def test_skewed_routing_is_evened_out(experts, ranks, seed):
    loads = zipf(experts, seed)
    heaviest, *others = sorted(loads, reverse=True)
    least = heaviest + sum(others[-(experts // ranks - 1) :])  # it has company: ranks hold equally many
    bound = max(1.0, least * ranks / loads.sum())
    assert skew(loads, place_experts(loads, ranks, worth=0.0), ranks) <= 1.02 * bound


def test_an_expert_that_stays_on_its_rank_keeps_its_place():
    loads = zipf(64, 3)
    now = place_experts(loads, 4)
    later = loads + np.random.default_rng(0).integers(0, 30_000, 64)
    then = place_experts(later, 4, now, worth=0.0)
    stayed = [e for e in range(64) if now.index(e) // 16 == then.index(e) // 16]
    assert all(now.index(e) == then.index(e) for e in stayed)
    assert len(stayed) >= 32  # it exchanges, and does not deal anew
    assert skew(later, then, 4) < skew(later, now, 4)


def test_nothing_moves_for_little():
    loads = [100, 100, 101, 99]
    assert place_experts(loads, 2, (3, 0, 1, 2)) == (3, 0, 1, 2)
    assert place_experts([0] * 8, 4) == tuple(range(8))


def test_loads_that_are_none_are_refused():
    with pytest.raises(GraphError, match="6 experts cannot be dealt evenly to 4 ranks"):
        place_experts([1] * 6, 4)
    with pytest.raises(GraphError, match="at least 0"):
        place_experts([1, -1], 2)
    with pytest.raises(GraphError, match="name each of them once"):
        place_experts([1, 1], 2, (0, 0))
