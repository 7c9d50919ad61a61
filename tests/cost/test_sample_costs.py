"""What each sample costs: for all samples at once the same as the FLOPs of each; what is frozen has no backward."""

import pytest

from hetmesh.cost import Flops, LayerShape, ModuleShape, WeightShape, Work, layer_flops, module_flops, sample_work
from hetmesh.cost.flops import SampleCosts
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

TYPICAL = Work(40, 800, 10)
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


def shape(trainable=True, by_chunks=False):
    blocks = [LayerShape(f"b{i}", (WeightShape(f"b{i}.w", (8, 5), 1, trainable),), attention_width=6) for i in range(2)]
    head = LayerShape("head", (WeightShape("head.w", (11, 8), 1, trainable),), on_targets=True, by_chunks=by_chunks)
    return ModuleShape("m", (*blocks, head))


@pytest.mark.parametrize("name", GRAPH.order)
def test_the_work_of_all_samples_is_that_of_each(name):
    costs = SampleCosts.of(shape(), TYPICAL, upstream=True)
    each = [module_flops(shape(), sample_work(GRAPH, name, sample), upstream=True).forward for sample in SAMPLES]
    assert costs.work(GRAPH, name, SAMPLES).tolist() == each
    assert (each[0] > 0) == (name == "llm")  # which alone works on text


def test_what_comes_after_the_forward():
    assert SampleCosts.of(shape(), TYPICAL, upstream=True).backward == 2.0
    assert SampleCosts.of(shape(trainable=False), TYPICAL, upstream=False).backward == 0.0
    assert 1 < SampleCosts.of(shape(trainable=False), TYPICAL, upstream=True).backward < 2  # attention's is twice


def test_what_a_head_by_chunks_does_in_its_forward_is_not_counted_as_backward():
    """A step of a sample is as long as with whole logits, within what whole numbers round; of a typical one its parts
    are those of the module."""
    whole, chunks = (SampleCosts.of(shape(by_chunks=each), TYPICAL, upstream=True) for each in (False, True))
    assert 0 < chunks.backward < whole.backward
    for one, other in zip(whole.forward, chunks.forward, strict=True):
        assert other * (1 + chunks.backward) == pytest.approx(one * (1 + whole.backward), abs=3)
    found = module_flops(shape(by_chunks=True), TYPICAL, upstream=True)
    assert chunks.backward == found.backward / found.forward
    head = shape(by_chunks=True).layers[-1]
    assert layer_flops(head, TYPICAL, upstream=True) == Flops(3 * 2 * 11 * 8 * TYPICAL.targets)


def test_where_sizes_are_unknown_rows_count():
    assert SampleCosts.of(None, TYPICAL, upstream=True).work(GRAPH, "llm", SAMPLES).tolist() == [7, 40]
