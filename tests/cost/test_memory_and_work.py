"""Static memory against real shards; work and imbalance from metadata."""

import pytest

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.cost import (
    LayerShape,
    ModuleShape,
    WeightShape,
    Work,
    imbalance,
    sample_work,
    static_memory,
    total_work,
)
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

MODULE = ModuleShape(
    "m",
    (
        LayerShape("a", (WeightShape("a.up", (10, 6), 1, tp_dim=0), WeightShape("a.up_bias", (10,), tp_dim=0))),
        LayerShape("b", (WeightShape("b.down", (5, 10), 1, trainable=False, tp_dim=1), WeightShape("b.norm", (5,)))),
    ),
)


def test_data_parallel_ranks_hold_everything():
    memory = static_memory(MODULE, MeshSpec.make([3, 5], dp_replicate=2), 4, "AdamW")
    assert set(memory) == {3, 5}
    for held in memory.values():
        assert held.elements == 60 + 10 + 50 + 5 == MODULE.parameters
        assert (held.parameters, held.gradients, held.optimizer) == (4 * 125, 4 * 75, 8 * 75)
        assert held.total == 4 * 125 + 12 * 75


def test_shards_of_tensor_parallelism_and_fsdp():
    memory = static_memory(MODULE, MeshSpec.make(range(6), dp_shard=2, tp=3), 1, "SGD")
    # up 10 x 6: rows 4, 4, 2 over tp, each halved; its bias alike; down 5 x 10: columns 4, 4, 2, then rows 3, 2
    assert [memory[r].elements for r in range(6)] == [
        2 * 6 + 2 + 3 * 4 + 3,
        2 * 6 + 2 + 3 * 4 + 3,
        1 * 6 + 1 + 3 * 2 + 3,
        2 * 6 + 2 + 2 * 4 + 2,
        2 * 6 + 2 + 2 * 4 + 2,
        1 * 6 + 1 + 2 * 2 + 2,
    ]
    assert all(held.optimizer == 0 for held in memory.values())
    assert memory[0].gradients == 2 * 6 + 2 + 3


def graph(encoders: int, lanes: int) -> ModuleGraph:
    return ModuleGraph(
        (
            ModuleSpec("vision", MeshSpec.make(range(encoders), dp_replicate=encoders), media="image", features=8),
            ModuleSpec("projector", MeshSpec.make(range(lanes), dp_replicate=lanes), features=8),
            ModuleSpec("llm", MeshSpec.make(range(lanes), dp_replicate=lanes)),
        ),
        (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")),
    )


def sample(name: str, items: tuple[int, ...], text: int, encoder_rows: int = 1) -> SampleMeta:
    media = tuple(MediaItem("image", (1, 8, 8), sum(items[:i]), rows) for i, rows in enumerate(items))
    total = sum(items)
    rows = {"vision": total * encoder_rows, "projector": total}
    return SampleMeta(name, total + text, media, ((total + text - 2, total + text),), rows)


def test_work_of_a_sample():
    g = graph(1, 1)
    s = sample("s", (3, 5), 10)
    assert sample_work(g, "vision", s) == Work(8, 9 + 25)
    assert sample_work(g, "projector", s) == Work(8)
    assert sample_work(g, "llm", s) == Work(18, 18**2, 2)
    assert sample_work(g, "vision", sample("t", (), 4)) == Work()
    # an encoder whose projector keeps one row of four
    assert sample_work(g, "vision", sample("u", (3, 5), 10, encoder_rows=4)) == Work(32, 12**2 + 20**2)


def plan(counts: list[int], encoders: int, microbatch_size: int) -> BatchPlan:
    samples = [sample(str(i), (4,) * n, 3) for i, n in enumerate(counts)]
    return plan_batch(graph(encoders, 1), samples, microbatch_size)


def test_lane_work_adds_up_to_the_batch():
    p = plan([3, 1, 0, 2, 5, 0], 2, 3)
    work = p.lane_work("vision")
    assert work.shape == (2, 2, 3)
    assert Work.sum_of(work) == Work(4 * 11, 16 * 11)
    first = [p.samples[i] for i in p.samples_of("vision", 0, 1)]
    assert Work(*work[0, 1].tolist()) == total_work(sample_work(p.graph, "vision", each) for each in first)


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([2, 2, 2, 2], 4, 1.0),
        ([4, 0, 0, 0], 2, 2.0),
        ([3, 1, 1, 3], 4, 1.0),
        ([3, 1, 1, 3], 2, 1.5),  # even over the step, but not in any microbatch
        ([0, 0], 2, 1.0),
    ],
)
def test_imbalance(counts, size, expected):
    assert imbalance(plan(counts, 2, size).lane_work("vision")) == pytest.approx(expected)
