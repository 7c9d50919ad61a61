"""Where modules are cut by default."""

import pytest

from hetmesh.cost import LayerShape, ModuleShape, WeightShape, Work
from hetmesh.cost.stage_cuts import default_splits
from hetmesh.errors import RecipeError

WORK = Work(100, 1000, 10)


def llm(blocks, trainable=True, head=4):
    def layer(name, *shape, per_row=1, **kwargs):
        return LayerShape(name, (WeightShape(f"{name}.w", shape, per_row, trainable),), **kwargs)

    return ModuleShape(
        "llm",
        (
            layer("embed", 50, 8, per_row=0),
            *(layer(f"b{i}", 8, 8) for i in range(blocks)),
            layer("norm", 8, per_row=0),
            layer("head", 8 * head, 8, on_targets=True),
        ),
    )


def cut(shape, stages, upstream=False, work=WORK):
    return default_splits(shape, stages, upstream_trainable=upstream, work=work)


def test_layers_without_flops_go_with_a_neighbour():
    assert cut(llm(4), 2, upstream=True) == (("embed", "b0", "b1"), ("b2", "b3", "norm", "head"))
    assert cut(llm(2), 3, upstream=True) == (("embed", "b0"), ("b1", "norm"), ("head",))


def test_more_stages_than_layers_with_flops():
    assert cut(llm(1), 4) == (("embed",), ("b0",), ("norm",), ("head",))
    with pytest.raises(RecipeError, match=r"parallelism.llm: 5 pipeline stages for 4 layers; valid are 1 to 4"):
        cut(llm(1), 5)


def test_a_head_on_many_targets_weighs_more():
    few, many = (cut(llm(6, head=10), 2, True, Work(100, 1000, targets)) for targets in (1, 50))
    assert len(few[0]) == 1 + 3
    assert len(many[0]) > len(few[0])


def test_what_is_frozen_weighs_less():
    names = [f"b{i}" for i in range(6)]
    layers = tuple(LayerShape(n, (WeightShape(n, (8, 8), 1, i >= 4),)) for i, n in enumerate(names))
    assert [len(run) for run in cut(ModuleShape("m", layers), 2)] == [4, 2]  # 4 x 1 against 2 + 3


def test_first_layers_that_share_a_stage_leave_none_empty():
    """Whisper's convolutions cost something each, and yet share a stage with its positions."""

    def cut_together(stages):
        together = ("embed", "b0")
        return default_splits(llm(2), stages, upstream_trainable=False, work=WORK, together=together)

    assert cut_together(4) == (("embed", "b0"), ("b1",), ("norm",), ("head",))
    with pytest.raises(RecipeError, match=r"for 5 layers, of which .* share a stage; valid are 1 to 4"):
        cut_together(5)
