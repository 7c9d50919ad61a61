"""What each sample costs: for all samples at once the same as the FLOPs of each; what is frozen has no backward."""

import pytest

from hetmesh.cost import LayerShape, ModuleShape, WeightShape, module_flops, sample_work
from hetmesh.cost.flops import SampleCosts
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

ONE = MeshSpec.make([0], dp_replicate=1)
GRAPH = ModuleGraph(
    (
        ModuleSpec("vision", ONE, features=4, media="image"),
        ModuleSpec("projector", ONE, features=4),
        ModuleSpec("llm", ONE),
    ),
    (BoundarySpec("vision", "projector", None), BoundarySpec("projector", "llm", "image")),
)
SAMPLES = [
    SampleMeta("text", 7, targets=((3, 5),), rows={"vision": 0, "projector": 0}),
    SampleMeta(
        "images",
        40,
        tuple(MediaItem("image", (3, 8, 8), i, rows) for i, rows in enumerate((9, 4))),
        ((30, 40),),
        rows={"vision": 26, "projector": 13},  # the projector joins two rows to one
    ),
]


def shape(trainable=True):
    blocks = [LayerShape(f"b{i}", (WeightShape(f"b{i}.w", (8, 5), 1, trainable),), attention_width=6) for i in range(2)]
    return ModuleShape(
        "m", (*blocks, LayerShape("head", (WeightShape("head.w", (11, 8), 1, trainable),), on_targets=True))
    )


@pytest.mark.parametrize("name", GRAPH.order)
def test_the_work_of_all_samples_is_that_of_each(name):
    costs = SampleCosts.of(shape(), upstream=True)
    each = [module_flops(shape(), sample_work(GRAPH, name, sample), upstream=True).forward for sample in SAMPLES]
    assert costs.work(GRAPH, name, SAMPLES).tolist() == each
    assert (each[0] > 0) == (name == "llm")  # which alone works on text


def test_what_comes_after_the_forward():
    assert SampleCosts.of(shape(), upstream=True).backward == 2.0
    assert SampleCosts.of(shape(trainable=False), upstream=False).backward == 0.0
    assert SampleCosts.of(shape(trainable=False), upstream=True).backward == 1.0


def test_where_sizes_are_unknown_rows_count():
    assert SampleCosts.of(None, upstream=True).work(GRAPH, "llm", SAMPLES).tolist() == [7, 40]
