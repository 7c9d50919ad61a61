"""The static graph: order, sink, frozen-aware gradients, and clear errors."""

import pytest

from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, Edge, ModuleGraph, ModuleSpec, Stage, stage_graph
from hetmesh.graph.module_graph import Activation
from hetmesh.layout import MeshSpec

ONE = MeshSpec.make([0], dp_replicate=1)


def graph(*edges, frozen=()):
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    modules = tuple(ModuleSpec(name, ONE, trainable=name not in frozen) for name in names)
    return ModuleGraph(modules, tuple(BoundarySpec(a, b) for a, b in edges))


def test_producers_come_before_consumers():
    g = graph(("llm_in", "llm"), ("vision", "llm_in"), ("audio", "llm"))
    assert g.order.index("vision") < g.order.index("llm_in") < g.order.index("llm") == 3
    assert g.llm.name == "llm"
    assert [b.name for b in g.inputs("llm")] == ["llm_in->llm", "audio->llm"]
    assert [b.name for b in g.outputs("vision")] == ["vision->llm_in"]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("a", "b"), ("b", "a")], "cycle"),
        ([("a", "b"), ("a", "c")], r"exactly one module may have no consumer .*\['b', 'c'\]; every other .* needs a "),
        ([("a", "b"), ("b", "c"), ("c", "b"), ("b", "d")], "cycle"),
        ([("a", "b"), ("a", "b")], "at most one boundary"),
    ],
)
def test_what_is_no_graph_with_one_llm_is_refused(edges, message):
    with pytest.raises(GraphError, match=message):
        graph(*edges)


def test_unknown_and_repeated_modules_are_named():
    with pytest.raises(GraphError, match="no module 'visoin'"):
        ModuleGraph((ModuleSpec("llm", ONE),), (BoundarySpec("visoin", "llm"),))
    with pytest.raises(GraphError, match="distinct names"):
        ModuleGraph((ModuleSpec("llm", ONE), ModuleSpec("llm", ONE)))


def test_gradients_flow_only_to_what_has_something_trainable_upstream():
    g = graph(("vision", "projector"), ("projector", "llm"), frozen=("vision", "llm"))
    needs = {b.name: g.needs_gradient(b) for b in g.boundaries}
    assert needs == {"vision->projector": False, "projector->llm": True}
    stages = stage_graph(g)
    assert stages.backward_stages == {Stage("projector"), Stage("llm")}
    assert stages.gradient_edges == {Edge(Stage("projector"), Stage("llm"))}


def test_lanes_are_all_data_parallel_axes_together():
    module = ModuleSpec("m", MeshSpec.make(range(8), dp_replicate=2, dp_shard=2, tp=2))
    assert module.num_lanes == 4
    assert [module.lane_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert module.lane_of(9) is None
    assert ModuleSpec("m", MeshSpec.make([4, 5], tp=2)).num_lanes == 1


def test_a_stage_without_layers_is_refused():
    mesh = MeshSpec.make([0, 1], pp=2)
    with pytest.raises(GraphError, match="every stage must hold a layer"):
        ModuleSpec("m", mesh, ("a", "b"), splits=(("a", "b"), ()), activation=Activation(4))
