"""Deferral: subset sums and bottleneck matching give what brute force gives; Entrain's worked case; caps."""

import itertools

import numpy as np
import pytest

from hetmesh.balance import BatchLoads, Slots, assign
from hetmesh.balance.deferral import SUMS, bottleneck_matching, defer


def after(members, work, pairing):
    """The load of each place in the order, after deferral."""
    place = {sample: i for i, m in enumerate(pairing.order) for sample in members[m]}
    loads = [0] * len(members)
    for sample, i in place.items():
        loads[i + (sample in pairing.deferred)] += int(work[sample])
    return loads


def brute_force(members, work, tokens=None, cap=None):
    """The least largest load over all pairings of the heavier half with the lighter one and all handovers."""
    loads = [sum(int(work[i]) for i in m) for m in members]
    heaviest = sorted(range(len(members)), key=lambda m: (-loads[m], m))
    half = len(members) // 2
    over, under = heaviest[:half], heaviest[len(members) - half :]
    middle = max((loads[m] for m in heaviest[half : len(members) - half]), default=0)

    def pair(o, u):
        best = max(loads[o], loads[u])
        for size in range(1, len(members[o]) + 1):
            for moved in itertools.combinations(members[o], size):
                if cap is not None and sum(tokens[i] for i in (*moved, *members[u])) > cap:
                    continue
                given = sum(int(work[i]) for i in moved)
                best = min(best, max(loads[o] - given, loads[u] + given))
        return best

    cost = {(o, u): pair(o, u) for o in over for u in under}
    return max(
        middle,
        min(max(cost[o, u] for o, u in zip(over, chosen, strict=True)) for chosen in itertools.permutations(under)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_deferral_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    sizes = rng.integers(0, 5, count)
    work = rng.integers(0, 40, int(sizes.sum()))
    members = [run.tolist() for run in np.split(np.arange(len(work)), np.cumsum(sizes)[:-1])]
    tokens = rng.integers(1, 10, len(work))
    cap = None if seed % 2 else int(max((tokens[m].sum() for m in members if m), default=1)) + 3
    pairing = defer(members, work, tokens, cap)
    assert sorted(pairing.order) == list(range(count))
    assert max(after(members, work, pairing)) == brute_force(members, work, tokens, cap)
    if cap is not None:
        assert max(after(members, tokens, pairing)) <= cap


def test_the_worked_case_gives_six_each():
    """18 encoder units over 6 microbatches are 3 each; of 36 LLM units every microbatch ends with 6: 3 hands over to 2,
    6 to 1 and 4 to 5."""
    llm = {1: [1, 1, 1], 2: [2, 1, 1], 3: [2, 3, 3], 4: [1, 3, 3], 5: [2, 2, 1], 6: [3, 3, 3]}
    members = [list(range(3 * i, 3 * i + 3)) for i in range(6)]
    work = np.array([units for m in sorted(llm) for units in llm[m]])
    encoder = np.ones(18, np.int64)
    assert [int(encoder[m].sum()) for m in members] == [3] * 6
    pairing = defer(members, work)
    assert after(members, work, pairing) == [6] * 6
    pairs = {(o + 1, u + 1) for o, u in zip(pairing.order[::2], pairing.order[1::2], strict=True)}
    assert pairs == {(3, 2), (6, 1), (4, 5)}


def test_entrain_ends_with_equal_llm_work():
    """Images of one size, texts of two: each microbatch is full by its images, deferral evens the texts."""
    work = np.array([[3, 4], [3, 8]] * 12)
    found = assign(BatchLoads(("vision", "llm"), work), Slots((1, 1), (8, 8), deferral=True), "entrain")
    vision, llm = (bins.ravel() for bins in found.sums(work))
    assert vision.tolist() == [9] * 8
    assert llm.max() - llm.min() <= 4
    late = found.microbatch[:, 1] - found.microbatch[:, 0]
    assert (late == found.deferred).all()


@pytest.mark.parametrize(("count", "scale"), [(40, 100), (300, 10**12), (12, 10**15)])
def test_all_samples_of_a_microbatch_may_move(count, scale):
    """However many and heavy: half the difference is met within the width of an interval of sums, and tokens within
    their cap."""
    rng = np.random.default_rng(count)
    work = rng.integers(1, scale, count + 4)
    tokens = rng.integers(1, 50, count + 4)
    members = [list(range(count)), list(range(count, count + 4))]
    difference = int(work[:count].sum() - work[count:].sum())
    loads = after(members, work, defer(members, work))
    assert sum(loads) == work.sum()
    assert abs(loads[0] - loads[1]) <= max(2 * difference / SUMS, 1)
    cap = int(tokens[count:].sum()) + 200
    capped = defer(members, work, tokens, cap)
    assert capped.deferred
    assert after(members, tokens, capped)[1] <= cap


@pytest.mark.parametrize("seed", range(20))
def test_intervals_of_sums_lose_little_to_brute_force(seed):
    """Ten samples of any work: as even as the best of 1024 subsets, up to a few intervals."""
    rng = np.random.default_rng(seed)
    work = rng.integers(1, 10**12, 12)
    members = [list(range(10)), [10, 11]]
    difference = int(work[:10].sum() - work[10:].sum())
    assert max(after(members, work, defer(members, work))) <= brute_force(members, work) + 4 * difference / SUMS


@pytest.mark.parametrize("seed", range(30))
def test_a_bottleneck_matching_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 7))
    cost = rng.integers(0, 12, (size, size))
    found = bottleneck_matching(cost)
    assert sorted(found) == list(range(size))
    best = min(max(cost[i, j] for i, j in enumerate(columns)) for columns in itertools.permutations(range(size)))
    assert max(cost[i, j] for i, j in enumerate(found)) == best
