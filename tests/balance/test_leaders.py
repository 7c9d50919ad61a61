"""Which modules go along with another one, and which lanes share ranks."""

import pytest

from hetmesh.balance.co_located import lane_affinity, leaders
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec

DP = MeshSpec.make(range(4), dp_replicate=4)
DP_TP = MeshSpec.make(range(4), dp_replicate=2, tp=2)
OTHERS = MeshSpec.make([4, 5], dp_replicate=2)


@pytest.mark.parametrize(
    ("vision", "projector", "led"),
    [
        (DP, DP_TP, {"vision": "vision", "projector": "llm", "llm": "llm"}),
        (DP, DP, {"vision": "vision", "projector": "vision", "llm": "llm"}),
        (DP_TP, DP_TP, {"vision": "llm", "projector": "llm", "llm": "llm"}),
        (DP, OTHERS, {"vision": "vision", "projector": "projector", "llm": "llm"}),
    ],
)
def test_modules_of_one_mesh_go_together(vision, projector, led):
    graph = ModuleGraph(
        (
            ModuleSpec("vision", vision, features=4, media="image"),
            ModuleSpec("projector", projector, features=4),
            ModuleSpec("llm", DP_TP),
        ),
        (BoundarySpec("vision", "projector", None), BoundarySpec("projector", "llm", "image")),
    )
    assert leaders(graph) == led


def test_lanes_that_share_ranks():
    permuted = MeshSpec.make([3, 0, 2, 1], dp_replicate=4)
    llm = ModuleSpec("llm", DP_TP)  # lanes of ranks 0-1 and 2-3
    assert lane_affinity(ModuleSpec("vision", DP), llm).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert lane_affinity(ModuleSpec("vision", permuted), llm).tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert lane_affinity(ModuleSpec("vision", OTHERS), llm) is None


def test_what_one_of_several_consumers_shares_with_its_producer():
    graph = ModuleGraph(
        (
            ModuleSpec("vision", DP, features=4, media="image"),
            ModuleSpec("projector", DP, features=4),
            ModuleSpec("llm", DP_TP),
        ),
        (
            BoundarySpec("vision", "projector", None),
            BoundarySpec("vision", "llm", "thumbnail"),
            BoundarySpec("projector", "llm", "image"),
        ),
    )
    assert leaders(graph) == {"vision": "vision", "projector": "vision", "llm": "llm"}
