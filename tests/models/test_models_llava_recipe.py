"""recipes/llava_style.toml, with its paths filled in: checked, trained on shards, equal to one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.testing.parity import TOLERANCE, compare, reference, run
from support.llava_parts import TEMPLATE, filled, save_llava_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_llava_parts(tmp_path_factory.mktemp("llava"))


def test_check_names_every_path_that_is_missing():
    with pytest.raises(RecipeError) as caught:
        checked(load_recipe(TEMPLATE))
    keys = re.findall(r"^(\S+ ?\S+) = '/path/to/", str(caught.value), flags=re.MULTILINE)
    data = [f"[data.options] {key}" for key in ("path", "tokenizer", "image_processor", "media_folder")]
    assert keys == ["modules.vision.initial_load_path", "modules.llm.initial_load_path", *data]
    assert len(keys) == TEMPLATE.read_text().count(' = "/path/to/') - 1  # but for a commented one


def test_check_accepts_the_filled_template(folder):
    text = "\n".join(checked(filled(folder))[1])
    assert "clip" in text
    assert "llama" in text


def on_this_rank(rank, recipe):
    return run(recipe, World.current())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_h5_both_stages_equal_one_process(pool, folder, stage):
    recipe = filled(folder, "--modules.llm.trainable", "false" if stage == 1 else "true")
    truth = reference(recipe)
    compare(truth, pool(2).run(on_this_rank, recipe), TOLERANCE["float64"])
    trained = {name.split(".")[0] for name, gradient in truth.gradients.items() if gradient is not None}
    assert trained == ({"projector"} if stage == 1 else {"projector", "llm"})
