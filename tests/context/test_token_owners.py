"""Token ownership against the padded token grid written out."""

import hypothesis.strategies as st
from hypothesis import given

from hetmesh.context.token_owners import LaneTokens, TokenShares, cut_out, owned_rows
from hetmesh.graph.sample import MediaItem, SampleMeta


@given(total=st.integers(0, 40), parts=st.integers(1, 7))
def test_shares_are_equal_contiguous_and_cover_every_token_once(total, parts):
    shares = TokenShares(total, parts)
    spans = [shares.span(part) for part in range(parts)]
    assert [token for start, stop in spans for token in range(start, stop)] == list(range(total))
    assert all(stop - start <= shares.size for start, stop in spans)
    assert shares.size * parts < total + parts


@st.composite
def samples(draw):
    """A sample with images and scans of several rows between its text tokens."""
    media, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 3))
        name, runs = draw(st.sampled_from(["image", "scan"])), []
        for gap, rows in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=3)):
            runs.append((position + gap, rows))
            position += gap + rows
        placed = tuple(runs) if len(runs) > 1 or draw(st.booleans()) else ()
        media.append(MediaItem(name, (1,), runs[0][0], sum(rows for _, rows in runs), runs=placed))
    return SampleMeta("s", position + draw(st.integers(1, 4)), tuple(media))


def places(item):
    return [place for start, rows in item.spans for place in range(start, start + rows)]


@given(lane=st.lists(samples(), max_size=4), parts=st.integers(1, 5), gap=st.integers(0, 3))
def test_each_row_belongs_to_the_rank_that_keeps_its_placeholder(lane, parts, gap):
    width = max((s.tokens for s in lane), default=1)
    total = len(lane) * width
    tokens = LaneTokens(tuple(i * width for i in range(len(lane))), total, (((0, total),),), parts)
    shares = TokenShares(total, parts)
    starts, expected, row = [], [[] for _ in range(parts)], 0
    for i, sample in enumerate(lane):
        row += gap  # rows of samples of other lanes
        starts.append(row)
        for item in sample.media:
            for place in places(item) if item.name == "image" else ():
                expected[(i * width + place) // shares.size].append(row)
                row += 1
    for part in range(parts):
        rows = [r for a, b in owned_rows(lane, starts, "image", tokens, part) for r in range(a, b)]
        assert rows == expected[part]


@given(data=st.data(), lane=st.lists(samples(), max_size=4), ranks=st.integers(1, 4), parts=st.integers(1, 3))
def test_packed_tokens_of_any_assignment_bring_their_rows_in_their_order(data, lane, ranks, parts):
    """Context parallelism gives a rank any intervals, in any order; sequence parallelism cuts them further."""
    lengths = [s.tokens for s in lane]
    total = sum(lengths)
    owner = data.draw(st.lists(st.integers(0, ranks - 1), min_size=total, max_size=total))
    order = data.draw(st.permutations(range(total)))
    kept = [[t for t in order if owner[t] == r] for r in range(ranks)]
    starts = [sum(lengths[:i]) for i in range(len(lane))]
    tokens = LaneTokens(tuple(starts), total, tuple(tuple((t, t + 1) for t in own) for own in kept), parts)
    row_of, row, first = {}, 0, []
    for start, sample in zip(starts, lane, strict=True):
        first.append(row)
        for item in sample.media:
            for place in places(item) if item.name == "image" else ():
                row_of[start + place] = row
                row += 1
    for r in range(ranks):
        shares = TokenShares(len(kept[r]), parts)
        for part in range(parts):
            start, stop = shares.span(part)
            mine = kept[r][start:stop]
            i = r * parts + part
            assert [t for a, b in tokens.kept(i) for t in range(a, b)] == mine
            rows = [x for a, b in owned_rows(lane, first, "image", tokens, i) for x in range(a, b)]
            assert rows == [row_of[t] for t in mine if t in row_of]
            assert tokens.rows(i) >= len(mine)


def test_cutting_out_of_intervals():
    assert cut_out(((10, 14), (2, 5)), 3, 6) == ((13, 14), (2, 4))
    assert cut_out(((10, 14),), 2, 2) == ()
