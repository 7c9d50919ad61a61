"""Cuts of chains and stage counts over graphs against brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.stage_counts import Chain, stage_counts, time_of_cuts
from hetmesh.cost import partition
from hetmesh.cost.stage_cuts import runs
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec


def cuts(n, stages):
    for places in itertools.combinations(range(1, n), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *places, n)))


def brute_force(costs, stages, ties="even"):
    scored = [
        (max(s), sum(x * x for x in s), c) for c in cuts(len(costs), stages) for s in [[*map(sum, runs(costs, c))]]
    ]
    if ties != "even":
        fastest = [c for most, _, c in scored if most == min(scored)[0]]
        return max(fastest) if ties == "early" else min(fastest)
    return min(scored)[2]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_cut_equals_brute_force(data):
    costs = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    for ties in ("even", "early", "late"):
        assert partition(costs, stages, ties=ties) == brute_force(costs, stages, ties=ties)


def test_ties_are_even_and_then_earlier_stages_take_fewer():
    assert partition([1, 1, 1, 1, 3], 3) == (2, 2, 1)  # (1, 3, 1) is as fast
    assert partition([1, 1, 1], 2) == (1, 2)
    assert [partition([1, 1, 1, 1, 3], 3, ties=ties) for ties in ("early", "late")] == [(3, 1, 1), (1, 3, 1)]
    with pytest.raises(GraphError, match="no rule 'last'; valid are even, early, late"):
        partition([1, 1], 2, ties="last")


def test_a_large_chain_is_quick():
    assert sum(partition([1.5] * 200 + [7.25], 64)) == 201


def test_what_cannot_be_cut_says_so():
    with pytest.raises(GraphError, match="cannot cut 2 layers into 3 stages; valid are 1 to 2"):
        partition([1, 1], 3)


def graph(encoders):
    names = [f"e{i}" for i in range(encoders)]
    mesh = MeshSpec.make([0], tp=1)
    modules = [ModuleSpec(name, mesh) for name in (*names, "projector", "llm")]
    edges = [BoundarySpec(names[0], "projector"), BoundarySpec("projector", "llm")]
    edges += [BoundarySpec(name, "llm") for name in names[1:]]
    return ModuleGraph(tuple(modules), tuple(edges))


def brute_counts(g, chains, ranks, microbatches):
    names = [n for n in g.order if chains[n].follows is None]
    best = None
    for counts in itertools.product(*(range(1, len(chains[n].costs) + 1) for n in names)):
        stages = dict(zip(names, counts, strict=True))
        if sum(chains[n].ranks * k for n, k in stages.items()) != ranks:
            continue
        each = [[(name, c) for c in cuts(len(chains[name].costs), count)] for name, count in stages.items()]
        for choice in itertools.product(*each):
            score = time_of_cuts(g, chains, dict(choice), microbatches).seconds
            best = score if best is None else min(best, score)
    return best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stage_counts_equal_brute_force(data):
    g = graph(data.draw(st.integers(1, 2)))

    def chain(n, **kwargs):
        numbers = st.lists(st.integers(0, 5), min_size=n, max_size=n)
        return Chain(tuple(data.draw(numbers)), tuple(data.draw(numbers)), **kwargs)

    chains = {name: chain(data.draw(st.integers(1, 4)), ranks=data.draw(st.integers(1, 2))) for name in g.order}
    chains["projector"] = Chain((1, 2), (1, 0), follows="llm")
    ranks, microbatches = data.draw(st.integers(2, 10)), data.draw(st.integers(1, 6))
    expected = brute_counts(g, chains, ranks, microbatches)
    if expected is None:
        with pytest.raises(GraphError, match="no way"):
            stage_counts(g, chains, ranks, microbatches)
        return
    found = stage_counts(g, chains, ranks, microbatches)
    assert found.seconds == expected
    assert sum(chains[n].ranks * len(c) for n, c in found.layers.items()) == ranks


def test_a_frozen_encoder_gives_its_ranks_to_the_llm():
    g = graph(1)
    f = (1.0,) * 8
    chains = {
        "e0": Chain(f, (0.0,) * 8),
        "projector": Chain((0.0,), (0.0,), follows="llm"),
        "llm": Chain(f, (2.0,) * 8),
    }
    aware = stage_counts(g, chains, 8, 16)
    assert {n: len(c) for n, c in aware.layers.items()} == {"e0": 2, "llm": 6}
    blind = stage_counts(g, {n: c if n == "projector" else c.blind for n, c in chains.items()}, 8, 16)
    assert time_of_cuts(g, chains, blind.layers, 16).seconds >= aware.seconds
    assert len(blind.layers["e0"]) == 4
    assert aware.critical == 32
