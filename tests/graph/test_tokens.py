"""Token ownership against the padded token grid written out."""

import hypothesis.strategies as st
from hypothesis import given

from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.graph.tokens import TokenShares, owned_rows


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
        item = MediaItem(draw(st.sampled_from(["image", "scan"])), (1,), position, draw(st.integers(1, 5)))
        media.append(item)
        position += item.rows
    return SampleMeta("s", position + draw(st.integers(1, 4)), tuple(media))


@given(lane=st.lists(samples(), max_size=4), parts=st.integers(1, 5), gap=st.integers(0, 3))
def test_each_row_belongs_to_the_rank_that_keeps_its_placeholder(lane, parts, gap):
    width = max((s.tokens for s in lane), default=1)
    shares = TokenShares(len(lane) * width, parts)
    starts, expected, row = [], [[] for _ in range(parts)], 0
    for i, sample in enumerate(lane):
        row += gap  # rows of samples of other lanes
        starts.append(row)
        for item in sample.media:
            for k in range(item.rows if item.name == "image" else 0):
                expected[(i * width + item.position + k) // shares.size].append(row)
                row += 1
    for part in range(parts):
        rows = [r for a, b in owned_rows(lane, starts, "image", shares, part) for r in range(a, b)]
        assert rows == expected[part]
