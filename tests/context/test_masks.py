"""Masks against pictures drawn by hand, and every backend against the dense oracle entry by entry."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_masks import random_mask

from hetmesh.context.key_tiles import block_edges, full_tiles, needed_keys, tile_counts, tile_intervals
from hetmesh.context.masks import MASKS, causal, of_sample, text_with_instances
from hetmesh.context.rule import TEXT, Rule, Sees
from hetmesh.context.segments import Mask, Segment, join, visible
from hetmesh.errors import LayoutError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.testing.dense_masks import sees
from support.dense_oracle import dense
from support.mask_families import blockwise_causal, families, padded, prefix

IMAGE = [(2, 4)]


def picture(mask):
    return ["".join("x" if seen else "." for seen in row) for row in dense(mask)]


@pytest.mark.parametrize(
    ("mask", "drawn"),
    [
        (causal(3), ["x..", "xx.", "xxx"]),
        (text_with_instances(5, IMAGE), ["x....", "xx...", "..xx.", "..xx.", "xxxxx"]),
        (text_with_instances(5, IMAGE, instances_see=Sees.TEXT), ["x....", "xx...", "xxxx.", "xxxx.", "xxxxx"]),
        (text_with_instances(4, [(0, 1), (2, 3)]), ["x...", "xx..", "..x.", "xxxx"]),
        (text_with_instances(4, [(0, 1), (2, 3)], numbers=[1, 1]), ["x.x.", "xx..", "x.x.", "xxxx"]),
        (join([causal(2), text_with_instances(2, [(0, 1)])]), ["x...", "xx..", "..x.", "..xx"]),
        (prefix([causal(2), text_with_instances(2, [(0, 2)])]), ["x...", "xx..", "xxxx", "xxxx"]),
        (blockwise_causal([1, 2, 1]), ["x...", ".x..", ".xx.", "xxxx"]),
        (blockwise_causal([2, 1], rule=Rule.BIDIRECTIONAL), ["xx.", "xx.", "xxx"]),
        (padded(causal(2), 3), ["x..", "xx.", "..."]),
    ],
)
def test_masks_as_drawn(mask, drawn):
    assert picture(mask) == drawn


def test_a_sample_gives_its_own_mask():
    media = (MediaItem("image", (1,), 1, 2), MediaItem("audio", (1,), 4, 1))
    assert of_sample(SampleMeta("s", 6, media)) == text_with_instances(6, [(1, 3), (4, 5)])
    with pytest.raises(SampleError, match="'s'"):
        of_sample(SampleMeta("s", 4, media))


@pytest.mark.parametrize("kind", sorted(MASKS))
@given(data=st.data())
def test_masks_of_items_with_runs_are_those_of_the_reference(kind, data):
    tokens, media = 0, []
    for _ in range(data.draw(st.integers(0, 3))):
        tokens += data.draw(st.integers(0, 2))
        runs = []
        for gap, rows in data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3)):
            runs.append((tokens + gap, rows))
            tokens += gap + rows
        placed = data.draw(st.booleans()) or len(runs) > 1
        name = data.draw(st.sampled_from(["image", "audio"]))
        media.append(MediaItem(name, (), runs[0][0], sum(r for _, r in runs), runs=tuple(runs) if placed else ()))
    stop = tokens + data.draw(st.integers(1, 3))
    meta = SampleMeta("s", stop, tuple(media), ((max(tokens, 1), stop),) if stop > 1 else ())
    expected = [[sees(kind, meta, i, j) for j in range(stop)] for i in range(stop)]
    assert dense(MASKS[kind](meta)).tolist() == expected


@pytest.mark.parametrize("span", [(0, 0), (-1, 2), (2, 9), (1, 3)])
def test_bad_segments_are_named(span):
    good = Segment(0, TEXT, 2, 4, Rule.CAUSAL, Sees.NOTHING)
    with pytest.raises(LayoutError, match="disjoint"):
        Mask((good, Segment(0, 1, *span, Rule.CAUSAL, Sees.NOTHING)), 6)


def visible_tiles(truth, edges, tile):
    """bool [groups, tiles]: which tiles have a visible entry."""
    truth = np.pad(truth, ((0, 0), (0, -len(truth) % tile)))
    columns = truth.reshape(len(truth), truth.shape[1] // tile, tile).any(2)
    out = np.zeros((len(edges) - 1, columns.shape[1]), bool)
    for g, (a, b) in enumerate(itertools.pairwise(edges)):
        out[g] = columns[a:b].any(0)
    return out


@pytest.mark.parametrize("part", range(10))
def test_random_masks_equal_the_oracle_entry_by_entry(part):
    rng = random.Random(part)
    for _ in range(100):
        mask = random_mask(rng)
        truth = dense(mask)
        everything = np.arange(mask.length)
        assert (visible(mask, everything, everything) == truth).all(), mask
        some = np.array(sorted(rng.sample(range(mask.length), mask.length // 2)), int)
        other = np.array(rng.sample(range(mask.length), mask.length // 3), int)
        assert (visible(mask, other, some) == truth[np.ix_(other, some)]).all(), mask


@pytest.mark.parametrize("part", range(5))
def test_tiles_equal_those_of_the_dense_mask(part):
    rng = random.Random(part)
    for _ in range(40):
        mask = random_mask(rng)
        truth = dense(mask)
        edges = block_edges(mask.length, rng.choice([1, 4, 16]))
        if rng.random() < 0.4:
            edges = np.array(sorted(rng.choices(range(mask.length + 1), k=rng.randint(1, 9))))
        tile = rng.choice([1, 2, 5, 8])
        expected = visible_tiles(truth, edges, tile)
        assert tile_counts(mask, edges, tile).tolist() == expected.sum(1).tolist(), mask
        assert listed(tile_intervals(mask, edges, tile)) == [np.flatnonzero(row).tolist() for row in expected], mask


def listed(found):
    spans = list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))
    runs = [spans[a:b] for a, b in itertools.pairwise(found.first.tolist())]
    assert all(b < c for row in runs for (_, b), (c, _) in itertools.pairwise(row)), "ascending and apart"
    return [[t for a, b in row for t in range(a, b)] for row in runs]


@pytest.mark.parametrize("part", range(4))
def test_full_tiles_are_those_without_a_hidden_entry(part):
    rng = random.Random(part)
    for _ in range(60):
        mask = random_mask(rng)
        truth, tile = dense(mask), rng.choice([1, 2, 5])
        edges = np.array(sorted(rng.choices(range(mask.length + 1), k=rng.randint(1, 20))))
        spans = [(t, min(t + tile, mask.length)) for t in range(0, mask.length, tile)]
        expected = [
            [i for i, (c, d) in enumerate(spans) if a < b and truth[a:b, c:d].all()]
            for a, b in itertools.pairwise(edges.tolist())
        ]
        assert listed(full_tiles(mask, edges, tile)) == expected, mask


@pytest.mark.parametrize("name", families(4096))
def test_tiles_of_the_families_equal_those_of_every_entry(name):
    mask = families(4096)[name]
    everything, edges = np.arange(mask.length), block_edges(mask.length, 128)
    expected = visible_tiles(visible(mask, everything, everything), edges, 32)
    assert tile_counts(mask, edges, 32).tolist() == expected.sum(1).tolist()
    assert tile_intervals(mask, edges, 32).counts.tolist() == expected.sum(1).tolist()


def test_needed_keys_are_the_blocks_that_some_row_sees():
    rng = random.Random(0)
    for _ in range(300):
        mask = random_mask(rng)
        cuts = sorted(rng.choices(range(mask.length + 1), k=2 * rng.randint(0, 3)))
        queries = list(zip(cuts[::2], cuts[1::2], strict=True))
        rng.shuffle(queries)
        block = rng.choice([1, 4, 16])
        rows = [r for a, b in queries for r in range(a, b)]
        seen = dense(mask)[rows].any(0)
        expected = [p for p in range(mask.length) if seen[p // block * block : (p // block + 1) * block].any()]
        found = needed_keys(mask, tuple(queries), block)
        assert [p for a, b in found for p in range(a, b)] == expected, mask
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(found))


@pytest.mark.parametrize("edges", [[4, 2], [0, 9], [-1, 3]])
def test_bad_edges_are_refused(edges):
    with pytest.raises(LayoutError, match="ascend"):
        tile_counts(causal(8), np.array(edges), 2)
