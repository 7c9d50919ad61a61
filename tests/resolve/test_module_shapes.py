"""The sizes of modules are worked out once for each adapter and each way to train it."""

import gc
from pathlib import Path

from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve import module_shapes as shapes_of
from hetmesh.resolve.describe import describe

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_pipeline.toml"


def test_a_module_is_built_once_until_its_adapter_is_gone(monkeypatch):
    built = []
    build = shapes_of.empty_module
    monkeypatch.setattr(shapes_of, "empty_module", lambda *which: built.append(which[2]) or build(*which))
    recipe = load_recipe(RECIPE)
    _, adapters, _ = describe(recipe)
    first = shapes_of.module_shapes(recipe, adapters)
    assert sorted(built) == sorted(adapters)
    assert shapes_of.module_shapes(recipe, adapters) == first

    frozen = load_recipe(RECIPE, ["--modules.vision.trainable", "false"])
    second = shapes_of.module_shapes(frozen, adapters)
    assert built.count("vision") == 2
    assert not any(layer.trainable for layer in second["vision"].layers)
    assert {name: second[name] for name in adapters if name != "vision"} == {
        k: first[k] for k in adapters if k != "vision"
    }

    known = {id(adapter) for adapter in adapters.values()}
    assert known <= shapes_of._known.keys()
    del adapters
    gc.collect()
    assert not known & shapes_of._known.keys()
