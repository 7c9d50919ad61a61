"""The parts of balancers: normal loads, exchanges, caps, orders, blocks."""

from dataclasses import replace

import numpy as np
import pytest

from hetmesh.balance import BatchLoads, Slots, assign, lane_orders, pipeline_score, spread
from hetmesh.balance.batch_blocks import BatchBlocks
from hetmesh.balance.caps import NO_CAP, within_caps
from hetmesh.balance.lane_orders import best_orders
from hetmesh.balance.local_search import lower_peaks, resplit
from hetmesh.balance.lpt import SCALE, as_table, from_table, least_loaded, longest_first, normalised, scrambled
from hetmesh.balance.policies.auto import MIN_GAIN
from hetmesh.balance.policies.disttrain import _reordered
from hetmesh.balance.policies.entrain import effective_microbatches
from hetmesh.balance.step_lengths import step_lengths


def sums(load, bins):
    padded = np.concatenate([load, np.zeros((int(bins.max()) + 1, load.shape[1]), np.int64)])
    return padded[bins].sum(1)


def test_normal_loads_fill_bins_to_the_scale():
    work = np.random.default_rng(0).integers(0, 1 << 50, (100, 3))
    work[:, 1] = 0
    load = normalised(work, 7)
    assert load.dtype == np.int64
    assert load.sum(0) / 7 == pytest.approx([SCALE, 0, SCALE], rel=1e-6)


def test_longest_first_takes_everybody_once_and_deals_a_round_each():
    load = np.random.default_rng(1).integers(1, 100, (23, 2))
    bins = longest_first(load, 5, 6)
    assert sorted(bins.ravel().tolist()) == list(range(30))
    counts = (bins < 23).sum(1)
    assert counts.max() - counts.min() <= 1
    totals = sums(load, bins).max(1)
    assert totals.max() / totals.min() < 1.5


def test_longest_first_deals_the_weightiest_samples_first_and_to_the_emptiest_bins():
    load = np.array([[3], [9], [1], [5], [7], [2]])
    bins = longest_first(load, 3, 2)
    assert load[bins[:, 0], 0].tolist() == [9, 7, 5] == sorted(load[bins[:, 0], 0].tolist(), reverse=True)
    assert load[bins, 0].sum(1).tolist() == [10, 9, 8]


def test_a_permutation_is_fixed_and_depends_on_its_seed():
    assert scrambled(8, 0).tolist() == [3, 5, 7, 4, 1, 2, 6, 0]
    assert sorted(scrambled(1000, 5).tolist()) == list(range(1000))
    assert (scrambled(1000, 5) != scrambled(1000, 6)).sum() > 900


def test_exchanges_only_improve_and_keep_everybody():
    rng = np.random.default_rng(2)
    load = normalised(np.exp(rng.standard_normal((96, 2)) * 0.8 + 5).astype(np.int64), 16)
    before = longest_first(load, 16, 9)
    after = resplit(load, before, 24)
    assert sorted(after.ravel().tolist()) == sorted(before.ravel().tolist())
    assert sums(load, after).std(0).sum() < 0.5 * sums(load, before).std(0).sum()
    lower = lower_peaks(load, after, np.maximum(load.max(0), SCALE))
    assert sums(load, lower).max() <= sums(load, after).max()


def test_exchanges_stay_in_their_group_and_reach_their_targets():
    rng = np.random.default_rng(3)
    load = normalised(rng.integers(20, 100, (120, 1)), 12)
    bins = longest_first(load, 12, 12)
    group = np.arange(12) // 3
    after = resplit(load, bins, 24, group=group)
    for g in range(4):
        assert sorted(after[group == g].ravel().tolist()) == sorted(bins[group == g].ravel().tolist())
    target = np.where(np.arange(12) % 2, SCALE // 2, 3 * SCALE // 2)[:, None]
    after = sums(load, resplit(load, bins, 60, target=target))
    assert np.abs(after - target).max() < 0.1 * SCALE


def test_orders_are_judged_by_what_is_left_after_deferral(monkeypatch):
    rng = np.random.default_rng(9)
    loads = BatchLoads(("vision", "llm"), np.exp(rng.standard_normal((40, 2)) + 6).astype(np.int64))
    slots = Slots((2, 2), (8, 8), stages=(2, 2), deferral=True)
    seen = []

    def keep(work, slots, *, unit, late):
        seen.append((work, late))
        return np.tile(np.arange(8), (2, 1))

    monkeypatch.setattr(lane_orders, "best_orders", keep)
    found = assign(loads, slots, "two_dim")
    ((work, late),) = seen
    assert found.deferred.any()
    blocks = BatchBlocks(slots)
    assert (blocks.by_window(found, loads) == work).all()
    assert (blocks.late(found) == late).all()


def test_tables_are_inverse_to_bins():
    bins = np.array([2, 0, 2, 2, 1])
    table = as_table(bins, 4, spare=1)
    assert table.tolist() == [[1, 5, 5, 5], [4, 5, 5, 5], [0, 2, 3, 5], [5, 5, 5, 5]]
    assert (from_table(table, 5) == bins).all()


def test_least_loaded_counts_ties_and_limits():
    load = np.array([5, 0, 0, 0, 4])
    assert least_loaded(np.arange(5), load, [[0, 1, 2]]).tolist() == [0, 1, 2, 1, 2]
    assert least_loaded(np.arange(5), load, [[0, 1, 2]], limit=2).tolist() == [0, 1, 2, 1, 2]
    assert least_loaded(np.arange(3), load, [[0], [1]], group=np.array([1, 0, 1, 0, 0])).tolist() == [1, 0, 1, -1, -1]
    ties = np.array([1, 9, 1, 1, 1])
    assert least_loaded(np.array([1, 2, 3]), load, [[0, 1]], ties=ties).tolist() == [-1, 0, 1, 1, -1]


def test_a_repair_moves_exchanges_or_starts_again():
    tokens = np.array([[6], [5], [4], [3]])
    caps = np.array([[9], [9]])
    for start in ([0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]):
        bins = within_caps(np.array(start), tokens, caps, tokens[:, 0])
        assert [int(tokens[bins == b].sum()) for b in (0, 1)] == [9, 9], start
    assert within_caps(np.array([0, 0, 0, 0]), tokens, np.array([[9], [8]]), tokens[:, 0]) is None
    free = np.array([[NO_CAP], [5]])
    assert within_caps(np.array([1, 1, 0, 0]), tokens, free, tokens[:, 0]).tolist() == [0, 1, 0, 0]
    inside = np.array([0, 0, 1])
    bins = within_caps(np.array([0, 0, 2, 2]), tokens, np.array([[9], [9], [9]]), tokens[:, 0], inside)
    assert bins.tolist() == [0, 1, 2, 2] or bins.tolist() == [1, 0, 2, 2]


def test_the_order_found_is_no_worse_than_any_sorted_one():
    rng = np.random.default_rng(4)
    work = rng.integers(1, 100, (3, 9, 2))
    slots = Slots((3, 3), (9, 9), stages=(3, 3))
    orders = best_orders(work, slots)
    assert [sorted(order) for order in orders.tolist()] == [list(range(9))] * 3

    def lengths(order):
        return step_lengths(np.take_along_axis(work, order[:, :, None], 1), slots.stages, slots.backward)

    found = lengths(orders)
    for key in (work.sum(2), -work.sum(2), work[:, :, 0]):
        assert (found <= lengths(np.argsort(key, axis=1, kind="stable"))).all()
    searched, first = lengths(best_orders(work, slots, rounds=4)), lengths(best_orders(work, slots, rounds=0))
    assert (searched <= first).all()
    assert (searched < first).any()
    locked = best_orders(work, replace(slots, lockstep=True))
    assert (locked == locked[0]).all()
    paired = best_orders(work, slots, unit=2, late=np.zeros((3, 9), bool))
    assert (paired[:, :-1:2] % 2 == 0).all()
    assert (paired[:, 1:-1:2] == paired[:, :-1:2] + 1).all()
    assert (paired[:, -1] == 8).all()


def test_blocks_of_modules_that_differ():
    blocks = BatchBlocks(Slots((4, 3), (6, 4)))
    assert (blocks.windows, blocks.groups) == (4, 3)
    assert blocks.window_of[0].tolist() == [0, 0, 1, 2, 2, 3]
    assert blocks.group_of[0].tolist() == [0, 0, 1, 2]
    assert blocks.parts.sum(1).tolist() == [24, 12]
    assert not blocks.uniform
    assert blocks.target.sum(0) == pytest.approx(SCALE * 12, abs=12)


def test_k_eff_is_how_many_microbatches_hold_as_much_as_the_largest_sample():
    assert effective_microbatches(np.array([10, 5, 5, 4]), 8) == 2
    assert effective_microbatches(np.array([1] * 20), 8) == 8
    assert effective_microbatches(np.array([0, 0]), 8) == 8
    assert effective_microbatches(np.array([7, 0]), 8) == 1


def test_disttrain_begins_and_ends_small():
    total = np.array([9, 2, 7, 1, 8, 3, 6])
    order = _reordered(np.stack([total, total], 1), 3)
    assert sorted(order.tolist()) == list(range(7))
    assert total[order[0]] == 1
    assert sorted(total[order[-2:]].tolist()) == [2, 3]


def test_what_auto_returns_is_never_slower_than_no_balancing():
    for seed in range(12):
        rng = np.random.default_rng(seed)
        work = np.exp(rng.uniform(0.1, 1.5) * rng.standard_normal((int(rng.integers(1, 80)), 2)) + 6).astype(np.int64)
        loads = BatchLoads(("vision", "llm"), work)
        slots = Slots((2, 2), (8, 8), stages=(2, 3), deferral=bool(seed % 2))
        score = pipeline_score(loads, slots)
        found = assign(loads, slots, "auto")
        assert score(found) <= score(assign(loads, slots, "none"))
        assert found.policy.removeprefix("auto: ") in {each.policy for each in found.tried}  # what it says it compared
        if len(found.tried) > 1:
            assert [each.score for each in found.tried] == [score(each) for each in found.tried]
            assert score(found) <= (1 + 2 * MIN_GAIN) * min(map(score, found.tried))


def test_fewer_windows_are_taken_where_a_giant_needs_company():
    rng = np.random.default_rng(5)
    work = np.repeat(np.exp(1.6 * rng.standard_normal(128) + 6).astype(np.int64)[:, None], 2, 1)
    loads, slots = BatchLoads(("vision", "llm"), work), Slots((2, 2), (32, 32), stages=(4, 4))
    found = assign(loads, slots, "auto")
    assert "windows" in found.policy
    assert found.microbatches == (32, 32)
    score = pipeline_score(loads, slots)
    assert score(found) < 0.98 * score(assign(loads, slots, "two_dim"))
    assert max(each.over_bound for each in spread(loads, found).values()) <= 1.1
