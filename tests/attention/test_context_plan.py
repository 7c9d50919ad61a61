"""What ranks fetch: the rows that they need, in chunks that bound what each receives and sends."""

import random

import numpy as np
import pytest
from random_contexts import random_mask, random_shares

from hetmesh.attention.attention_plan import fetch_order, plan_attention
from hetmesh.context import assign, needed_keys, text_with_instances, visible
from support.mask_families import families


def rows(runs):
    return [row for a, b in runs for row in range(a, b)]


def seen_by(mask, window):
    at = np.arange(mask.length)
    near = abs(at[:, None] - at[None, :]) < (window or mask.length + 1)
    return visible(mask, at, at) & near


@pytest.mark.parametrize("window", [None, 1, 20, 150])
def test_needed_blocks_under_a_window_equal_brute_force(window):
    for seed in range(60):
        rng = random.Random(seed)
        mask = random_mask(rng, rng.choice([1, 30, 200]))
        seen = seen_by(mask, window)
        for runs in random_shares(rng, mask.length, 3):
            for block in (1, 16):
                some = seen[rows(runs)].any(0)
                wanted = [j for j in range(mask.length) if some[j // block * block : (j // block + 1) * block].any()]
                assert rows(needed_keys(mask, runs, block, window)) == wanted
                if window is None:
                    assert needed_keys(mask, runs, block, mask.length) == needed_keys(mask, runs, block)


def test_chunks_bring_what_is_needed_once_and_are_bounded():
    for seed in range(60):
        rng = random.Random(seed)
        mask, ranks = random_mask(rng, rng.choice([30, 300, 900])), rng.randint(1, 6)
        shares, chunk = random_shares(rng, mask.length, ranks), rng.choice([7, 100, 5000])
        found = fetch_order(mask, shares, None, chunk)
        for rank, own in enumerate(shares):
            held = set(rows(own))
            taken = [row for step in found for row in rows(step[rank])]
            assert len(taken) == len(set(taken))
            assert set(taken) == set(rows(needed_keys(mask, own))) - held
            for step in found:
                sent = sum(len(held.intersection(rows(runs))) for other, runs in enumerate(step) if other != rank)
                assert len(rows(step[rank])) <= chunk
                assert sent <= chunk


@pytest.mark.parametrize("window", [None, 60])
def test_calls_cover_every_visible_pair_once(window):
    for seed in range(12):
        rng = random.Random(seed)
        mask = random_mask(rng, rng.choice([40, 500]))
        shares = random_shares(rng, mask.length, 3)
        seen = seen_by(mask, window)
        plan = plan_attention(mask, shares, 1, window, 100)
        count = np.zeros(seen.shape, np.int64)
        queries = np.array(rows(shares[1]), np.int64)
        for work in (plan.own, *(each for _, each in plan.chunks)):
            place = np.full(4 * mask.length + 400, -1)
            for a, b, row in zip(work.keys.starts, work.keys.stops, work.keys.rows, strict=True):
                place[row : row + b - a] = np.arange(a, b)
            for call in work.calls:
                q, k = queries[slice(*call.rows)], place[rows(call.keys)]
                assert (k >= 0).all()
                part = seen[np.ix_(q, k)]
                if call.positions is None:
                    assert part.all()
                else:
                    assert (plan.masks.of(call).numpy() == part).all()
                count[np.ix_(q, k)] += part
        expected = np.zeros_like(count)
        expected[queries] = seen[queries]
        assert (count == expected).all()


def test_few_pairs_are_computed_in_vain():
    """Blocks of one kind pay for what they see and a diagonal; tiles of 128 x 32 would pay for more."""
    mask = families(16_384)["image_bits"]
    plan = plan_attention(mask, assign(mask, 2), 0, None, 2048)
    calls = [call for work in (plan.own, *(each for _, each in plan.chunks)) for call in work.calls]
    sizes = [(b - a) * sum(d - c for c, d in call.keys) for call in calls for a, b in [call.rows]]
    masked = sum(size for size, call in zip(sizes, calls, strict=True) if call.positions)
    assert masked < 0.05 * sum(sizes)
    assert len(calls) < 300


def test_a_rank_without_rows_still_serves_others():
    mask = text_with_instances(400, [(100, 300)])
    plan = plan_attention(mask, (((0, 400),), ()), 1, None, 128)
    assert (plan.own.runs, plan.own.calls, plan.chunks) == ((), (), ())
    plan = plan_attention(mask, (((0, 200),), ((200, 400),)), 0, None, 128)
    assert sum(b - a for taken, _ in plan.chunks for a, b in taken.places) == 200
