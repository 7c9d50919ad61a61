"""A hypothesis strategy for routes of microbatches."""

from __future__ import annotations

from hypothesis import strategies as st

from hetmesh.graph import Routes, StageGraph


@st.composite
def routes(draw: st.DrawFn, stages: StageGraph, *, most: int = 5) -> Routes:
    """Microbatches of every module of `stages`, 1 to `most`, and which feed which: by number, or any pairs."""
    modules = list(dict.fromkeys(stage.module for stage in stages.stages))
    if draw(st.integers(0, 3)) == 0:
        return Routes.of(stages, draw(st.integers(1, most)))
    counts = {module: draw(st.integers(1, most)) for module in modules}
    pairs = {}
    for edge in stages.edges:
        ends = edge.source.module, edge.destination.module
        if not edge.internal and ends not in pairs:
            each = st.tuples(*(st.integers(0, counts[module] - 1) for module in ends))
            pairs[ends] = draw(st.lists(each, max_size=2 * most))
    return Routes.make(counts, pairs)
