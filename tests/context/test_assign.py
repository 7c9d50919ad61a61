"""Assignments: every token once, under the caps, equal everywhere; balance on sizes that are quick to check."""

import itertools
import random

import numpy as np
import pytest
from random_masks import random_mask

from hetmesh.context import POLICIES, assign, balanced, causal, join, tile_counts
from hetmesh.context.key_tiles import block_edges
from hetmesh.context.pieces import plan_pieces
from hetmesh.context.token_assignment import lpt
from hetmesh.errors import LayoutError
from hetmesh.layout import Layout, MeshSpec, RowSplit
from support.dense_oracle import dense
from support.mask_families import blockwise, families, loads, padded

FAMILIES = families(32_768)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_token_has_one_rank(policy):
    rng = random.Random(policy)
    for _ in range(60):
        mask, ranks, block = random_mask(rng), rng.randint(1, 9), rng.choice([1, 2, 7, 16])
        shares = assign(mask, ranks, policy=policy, block=block, tile=rng.choice([1, 4]))
        assert len(shares) == ranks
        assert sorted(p for runs in shares for a, b in runs for p in range(a, b)) == list(range(mask.length))
        for runs in shares:
            assert all(a % block == 0 and (b % block == 0 or b == mask.length) for a, b in runs)
            assert all(b < c for (_, b), (c, _) in itertools.pairwise(runs)), "ascending, none to join"


def test_balanced_respects_the_token_cap_whatever_the_work():
    rng = np.random.default_rng(0)
    for _ in range(150):
        blocks, ranks, cap = int(rng.integers(1, 300)), int(rng.integers(1, 17)), float(rng.choice([1.0, 1.02, 1.3]))
        work = rng.integers(0, int(rng.choice([1, 3, 1000])), blocks) ** int(rng.choice([1, 3]))
        tokens = np.full(blocks, 16)
        tokens[-1] = rng.integers(1, 17)
        owner = balanced(work, tokens, ranks, token_cap=cap)
        most = max(-(-blocks // ranks), int(cap * tokens.sum() / ranks / tokens[0]))
        assert np.bincount(owner, minlength=ranks).max() <= most
        assert (owner == balanced(work.copy(), tokens.copy(), ranks, token_cap=cap)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_work_and_tokens_are_balanced_at_once_in_few_runs(name):
    found = loads(FAMILIES[name], assign(FAMILIES[name], 4))
    assert found.tile_imbalance <= 1.005
    assert found.token_imbalance <= 1.02
    assert np.mean(found.runs) <= 5


@pytest.mark.parametrize("ranks", [2, 3, 6, 7])
@pytest.mark.parametrize("name", ["image_bits", "causal", "packed_multimodal"])
def test_any_number_of_ranks_is_balanced(name, ranks):
    mask = families(128 * 64 * ranks, seed=ranks)[name]
    found = loads(mask, assign(mask, ranks))
    assert found.tile_imbalance <= 1.005
    assert found.token_imbalance <= 1.02
    assert np.mean(found.runs) <= 5


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_where_rows_count_too_there_are_fewer_cuts_and_layers_wait_no_longer(name, ranks):
    """Of Qwen3.5-9B a row costs 100,000 pairs. Layers of either kind wait for their slowest rank."""
    mask, row = FAMILIES[name], 100_000
    pairs = tile_counts(mask, block_edges(mask.length, 128)).sum() * 128 * 32 / mask.length
    cuts, waits = [], []
    for weights in ({}, {"row_cost": row, "cut_cost": 2500}):
        shares = assign(mask, ranks, **weights)
        found = loads(mask, shares)
        cuts.append(len(plan_pieces(mask, shares, 0).cuts))
        waits.append((pairs * found.tile_imbalance + row * found.token_imbalance) / (pairs + row))
    assert cuts[1] <= cuts[0]
    assert waits[1] <= waits[0] + 0.0045
    assert waits[1] <= 1.005


def test_cuts_lie_between_samples_where_those_within_send_more():
    rng, cuts = random.Random(0), np.zeros((12, 2), int)
    for found in cuts:
        mask = join([causal(128 * rng.randint(2, 12)) for _ in range(10)])
        shares = (assign(mask, 4, row_cost=100_000, cut_cost=cost) for cost in (0, 2500))
        found[:] = [len(plan_pieces(mask, each, 0).cuts) for each in shares]
    assert (cuts[:, 1] <= cuts[:, 0]).all()
    assert cuts[:, 1].sum() < 0.7 * cuts[:, 0].sum()


def test_packed_documents_mostly_stay_with_their_keys():
    mask = FAMILIES["packed_documents"]
    ours, published = (sum(loads(mask, assign(mask, 8, policy=p)).remote) for p in ("balanced", "lpt"))
    assert ours <= 0.25 * published


def test_one_bit_per_image_fetches_less_than_the_published_rule():
    mask = families(65_536)["image_bits"]
    ours, published = (sum(loads(mask, assign(mask, 8, policy=p)).remote) for p in ("balanced", "lpt"))
    assert ours <= 0.8 * published


@pytest.mark.parametrize("seed", range(3))
def test_blockwise_causal_is_balanced_as_the_cpu_pays(seed):
    mask = blockwise(16_384, seed)
    rows = tile_counts(mask, block_edges(mask.length, 1), 1)
    work = [sum(int(rows[a:b].sum()) for a, b in runs) for runs in assign(mask, 8, block=1, tile=1)]
    assert max(work) <= 1.01 * rows.sum() / 8
    tiles = loads(mask, assign(mask, 8, block=16, tile=16), block=16, tile=16)
    assert tiles.tile_imbalance <= 1.01


def test_loads_count_what_a_dense_mask_shows():
    rng = random.Random(5)
    for _ in range(60):
        mask, block, tile = random_mask(rng), rng.choice([4, 8]), rng.choice([1, 2, 4])
        cuts = sorted(rng.choices(range(mask.length + 1), k=rng.randint(0, 5)))
        runs = [(a, b) for a, b in zip([0, *cuts], [*cuts, mask.length], strict=True) if a < b]
        shares = tuple(tuple(runs[r::2]) for r in range(2))
        truth = dense(mask)
        truth = np.pad(truth, ((0, 0), (0, -mask.length % tile)))
        columns = truth.reshape(mask.length, truth.shape[1] // tile, tile).any(2)
        found = loads(mask, shares, block=block, tile=tile)
        for rank, mine in enumerate(shares):
            parts = [r for a, b in mine for r in _parts(a, b, block)]
            assert found.tiles[rank] == sum(int(columns[a:b].any(0).sum()) for a, b in parts)
            held = np.zeros(mask.length, bool)
            held[[p for a, b in mine for p in range(a, b)]] = True
            needed = np.flatnonzero(columns[held].any(0))
            assert found.remote[rank] == sum(not held[t * tile : (t + 1) * tile].all() for t in needed)
        whole = [(a, min(a + block, mask.length)) for a in range(0, mask.length, block)]
        assert found.ideal_tiles == sum(int(columns[a:b].any(0).sum()) for a, b in whole) / 2


def _parts(start, stop, block):
    edges = [start, *(e for e in range(start + 1, stop) if e % block == 0), stop]
    return list(itertools.pairwise(edges))


def test_lpt_gives_each_block_to_the_least_loaded_rank():
    assert lpt(np.array([5, 1, 4, 3, 3]), np.ones(5), 2).tolist() == [0, 1, 1, 1, 0]


def test_zigzag_balances_a_causal_mask_and_contiguous_does_not():
    mask = causal(2048)
    assert loads(mask, assign(mask, 4, policy="zigzag")).tile_imbalance == 1
    assert loads(mask, assign(mask, 4, policy="contiguous")).tile_imbalance > 1.6


def test_an_assignment_is_a_layout():
    shares = assign(padded(causal(250), 300), 2, block=16)
    layout = Layout(MeshSpec.make([3, 5], cp=2), [RowSplit(1, shares)])
    assert layout.intervals((4, 300), 5)[1] == shares[1]


@pytest.mark.parametrize("wrong", [{"policy": "random"}, {"ranks": 0}, {"block": 0}, {"tile": 0}])
def test_bad_arguments_are_refused(wrong):
    arguments = {"ranks": 2, **wrong}
    with pytest.raises(LayoutError):
        assign(causal(64), **arguments)
