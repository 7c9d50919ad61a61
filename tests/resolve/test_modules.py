"""The sizes of the modules of a recipe are worked out once."""

from pathlib import Path

from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve import modules
from hetmesh.resolve.resolved import resolve

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_pipeline.toml"


def test_a_module_is_built_once_for_its_sizes(monkeypatch):
    built = []
    build = modules.empty_module
    monkeypatch.setattr(modules, "empty_module", lambda *which: built.append(which[2]) or build(*which))
    resolved = resolve(load_recipe(RECIPE))
    first = dict(resolved.shapes)
    assert sorted(built) == sorted(resolved.adapters) == sorted(first)
    assert dict(resolved.shapes) == first
    assert sorted(built) == sorted(first)

    frozen = resolve(load_recipe(RECIPE, ["--modules.vision.trainable", "false"])).shapes
    assert not any(layer.trainable for layer in frozen["vision"].layers)
    assert all(frozen[name] == shape for name, shape in first.items() if name != "vision")
