"""Parity of whole models of transformers that hetmesh splits by itself: two steps of SGD equal transformers' own
model in one process, by its own forward."""

from __future__ import annotations

import re

import pytest

from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import parity
from hetmesh.testing.parity import compare, run_as
from support import tiny_vlms
from support.split_layouts import CP_PP, DP_TP, FSDP, LAYOUTS, OF_VISION, SHARES, SP, STAGES, WHOLE
from support.whole_reference import whole_reference

SPLIT = [name for name in tiny_vlms.MODELS if name not in ("paligemma2", "llava_relu")]


ADAPTED = """
    [modules.projector]
    [modules.vision]
    trainable = false
    [modules.llm.lora]
    rank = 2
    [parallelism.vision]
    ranks = [0, 1]
    tensor_parallel_degree = 2
    [parallelism.llm]
    ranks = [2, 3]
    pipeline_parallel_degree = 2"""


def recipe(path, layout):
    training = "pack_samples = true\n" if "pack_samples" in layout else ""
    tables = layout.replace("[training]\n", "").replace("pack_samples = true", "")
    towers = tiny_vlms.TOWERS.get(path.name, ("vision",))
    tables = re.sub(OF_VISION, lambda table: "".join(table[0].replace("vision", each) for each in towers), tables)
    text = tiny_vlms.recipe_text(path).replace('dtype = "float64"', f'dtype = "float64"\n{training}')
    return parse_recipe(text + "\n" + tables)


def check(pool4, folder, name, layout):
    given = recipe(tiny_vlms.save(name, folder), LAYOUTS.get(layout, layout))
    compare(whole_reference(given, 2), pool4.run(run_as, given, 2, None, None, timeout=120), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_vl", CP_PP),
        pytest.param("gemma3", DP_TP, marks=pytest.mark.exhaustive),  # its mask under TP: test_parity_sequence.py
    ],
)
def test_u24_a_split_model_equals_transformers_own(pool4, tmp_path, name, layout):
    check(pool4, tmp_path, name, layout)


@pytest.mark.exhaustive  # test_two_directories.py has FSDP of towers
@pytest.mark.slow
def test_u23_a_tower_with_position_embeddings_under_fsdp_equals_transformers_own(pool4, tmp_path):
    check(pool4, tmp_path, "internvl", FSDP)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "internvl", "paligemma"])
def test_a_projector_of_its_own_under_a_frozen_tower_and_an_llm_with_lora(pool4, tmp_path, name):
    given = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path), ADAPTED))
    parity.check(pool4, given)


OFTEN = [("qwen2_5_vl", SHARES)]
"""Windows, whole attention, images of several sizes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, layout, marks=[] if (name, layout) in OFTEN else [pytest.mark.exhaustive], id=f"{name}-{kind}"
        )
        for name in SPLIT
        if name not in WHOLE
        for kind, layout in (("stages", STAGES), ("shares", SHARES))
    ],
)
def test_stages_of_a_tower_and_shares_of_its_tokens_equal_transformers_own(pool4, tmp_path, name, layout):
    check(pool4, tmp_path, name, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPLIT)
def test_every_family_in_every_layout(pool4, tmp_path, name, layout):
    if name == "llava_cohere2" and layout == SP:
        pytest.skip("refused: layers with a sliding window")
    check(pool4, tmp_path, name, layout)
