"""Routes of random assignments: every row once, in the order in which each side has its rows."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hetmesh.balance import BatchPlan, boundary_layouts, edge_layouts, route_runs, row_space
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, Routes, SampleMeta, boundary_edge
from hetmesh.layout import MeshSpec, plan_transfer
from support.assignments import RandomAssignment

EDGE = BoundarySpec("vision", "llm", "image")


UNIT = 2  # patches per row


def graph(encoder_lanes, llm_lanes, encoder_cp=1, cp=1, encoder_tp=1):
    """An encoder whose ranks along `cp` and `tp` share its patches."""
    shared = {"token_axes": ("cp", "tp"), "tokens_per_row": UNIT} if encoder_cp * encoder_tp > 1 else {}
    size = encoder_lanes * encoder_cp * encoder_tp
    mesh = MeshSpec.make(range(size), dp_replicate=encoder_lanes, cp=encoder_cp, tp=encoder_tp)
    vision = ModuleSpec("vision", mesh, media="image", features=4, **shared)
    shared = {"token_axes": ("cp",), "packed": True} if cp > 1 else {}
    mesh = MeshSpec.make(range(1, 1 + llm_lanes * cp), dp_replicate=llm_lanes, cp=cp)
    return ModuleGraph((vision, ModuleSpec("llm", mesh, **shared)), (EDGE,))


def meta(i, rows):
    """A sample of one image of `rows` rows behind two tokens of text, and three more behind it."""
    media = (MediaItem("image", (1, 4, 4), 2, rows),) if rows else ()
    return SampleMeta(f"s{i}", 5 + rows, media, targets=((4, 5),), rows={"vision": rows})


def lanes_of(*microbatches):
    """One lane."""
    return tuple((tuple(samples),) for samples in microbatches)


def owned(plan, side, m, rank):
    """By brute force: the rows, as (sample, row in it), that a rank has of one microbatch, in its order."""
    module = plan.graph["vision" if side == "source" else "llm"]
    lane = module.lane_of(rank)
    samples = plan.samples_of(module.name, m, lane)
    if "cp" not in module.token_axes:
        return [(i, row) for i in samples for row in range(plan.samples[i].rows["vision"])]
    mesh = module.stage_mesh(0)
    at = dict(zip(mesh.axes, mesh.coordinate(rank), strict=True))
    share = plan.lane_tokens(module.name, m, lane).shares[at.get("cp", 0)]
    if side == "source":
        rows = [(i, row) for i in samples for row in range(plan.samples[i].rows["vision"])]
        patches = [patch for a, b in share for patch in range(a, b)]
        tp = mesh.axis_size("tp")
        size = -(-len(patches) // tp)
        patches = patches[size * at.get("tp", 0) :][:size]
        return [rows[patch // UNIT] for patch in patches if patch % UNIT == UNIT - 1]
    tokens = [(i, t) for i in samples for t in range(plan.samples[i].tokens)]
    kept = [tokens[position] for a, b in share for position in range(a, b)]
    return [(i, t - 2) for i, t in kept if 2 <= t < 2 + plan.samples[i].rows["vision"]]


def in_layout(layout, shape, space, rank):
    """The same of one route, by its layout."""
    numbered = [(i, row) for i, count in zip(space.samples, space.counts, strict=True) for row in range(count)]
    return [numbered[row] for a, b in layout.intervals(shape, rank)[0] for row in range(a, b)]


@pytest.mark.slow
@settings(max_examples=120)
@given(
    rows=st.lists(st.integers(0, 4), max_size=12),
    lanes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cp=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    tp=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_row_goes_once_and_keeps_its_place(rows, lanes, cp, tp, seed):
    plan = RandomAssignment(seed)(graph(*lanes, *cp, tp), [meta(i, n) for i, n in enumerate(rows)], 1)
    routes, edge = plan.routes, boundary_edge(plan.graph, EDGE)
    seen = []
    for route in routes.along(edge):
        space = row_space(plan, EDGE, *route[1:])
        shape, src, dst = edge_layouts(plan, *route)
        assert shape == (space.total, 4)
        plan_transfer(shape, src, dst)  # every row that the LLM keeps has a source
        seen += [i for i, count in zip(space.samples, space.counts, strict=True) if count]
        for layout, side, m, other in ((src, "source", *route[1:]), (dst, "destination", *route[:0:-1])):
            elsewhere = plan.microbatch_of("llm" if side == "source" else "vision")
            for rank in layout.mesh.ranks:
                whole = owned(plan, side, m, rank)
                mine = in_layout(layout, shape, space, rank)
                assert mine == [(i, row) for i, row in whole if elsewhere[i] == other]
                runs = route_runs(plan, edge, side, m, rank)
                dealt = list(itertools.chain.from_iterable([to] * count for to, count in runs))
                assert [key for key, to in zip(whole, dealt, strict=True) if to == other] == mine
    assert sorted(seen) == [i for i, count in enumerate(rows) if count]


def plan_of(vision, llm, rows=(1, 1, 1, 1)):
    samples = tuple(meta(i, n) for i, n in enumerate(rows))
    return BatchPlan(graph(1, 1), samples, {"vision": lanes_of(*vision), "llm": lanes_of(*llm)})


def test_routes_are_where_samples_with_rows_meet():
    assert plan_of([(0, 1), (2, 3)], [(0, 1), (2, 3)]).routes == Routes.make({"vision": 2, "llm": 2})
    late = plan_of([(0, 1), (2, 3)], [(0,), (1, 2, 3)])
    assert dict(late.routes.pairs) == {("vision", "llm"): ((0, 0), (0, 1), (1, 1))}
    more = plan_of([(0,), (1,), (2,), (3,)], [(1, 0), (3, 2)])
    assert dict(more.routes.pairs) == {("vision", "llm"): ((0, 0), (1, 0), (2, 1), (3, 1))}
    assert (more.routes.count("vision"), more.routes.count("llm"), more.num_microbatches) == (4, 2, 2)


def test_samples_without_rows_make_no_route_and_do_not_part_what_goes_by_number():
    """A text-only sample may be anywhere: equal numbers stay the plainest case, with a route also where it is empty."""
    by_number = plan_of([(0, 1), (2, 3)], [(0, 3), (2, 1)], rows=(1, 0, 1, 0))
    assert by_number.routes == Routes.make({"vision": 2, "llm": 2})
    assert boundary_layouts(by_number, EDGE, 0)[0] == (1, 4)
    nothing = plan_of([(0, 1), (2, 3)], [(3, 2), (0, 1)], rows=(0, 0, 0, 0))
    assert nothing.routes == Routes.make({"vision": 2, "llm": 2})
    other_counts = plan_of([(0, 1), (2, 3)], [(0, 1, 2, 3)], rows=(0, 0, 0, 1))
    assert dict(other_counts.routes.pairs) == {("vision", "llm"): ((1, 0),)}


def test_an_encoder_that_does_not_say_how_many_tokens_make_a_row_cannot_share_them():
    """Published rows have encoders with context parallelism of which only sizes are known."""
    given = graph(1, 1, encoder_cp=2)
    vision = replace(given["vision"], tokens_per_row=0)
    plan = RandomAssignment(0)(ModuleGraph((vision, given["llm"]), (EDGE,)), [meta(0, 3), meta(1, 4)], 1)
    with pytest.raises(GraphError, match=r"'vision': its ranks along .*tokens_per_row"):
        [edge_layouts(plan, *route) for route in plan.routes.along(boundary_edge(plan.graph, EDGE))]


def test_a_module_without_microbatches_is_refused():
    with pytest.raises(GraphError, match="module 'vision' needs microbatches of 1 lanes"):
        plan_of([], [()], rows=())
