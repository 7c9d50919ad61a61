"""Families that the code does not name: they train as transformers trains them, or are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hetmesh
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import compare, run_as
from hetmesh.verify.self_check import TOLERANCE, self_check
from support import tiny_vlms
from support.whole_reference import whole_reference

IMAGE = {"image_token_id": tiny_vlms.IMAGE}


def aya_vision(t):
    vision = {"model_type": "siglip_vision_model", **tiny_vlms.TOWER, "vision_use_head": False}
    text = tiny_vlms._text("cohere2", sliding_window=64, logit_scale=0.5)
    config = t.AyaVisionConfig(vision_config=vision, text_config=text, image_token_index=tiny_vlms.IMAGE)
    return t.AyaVisionForConditionalGeneration(config)


def cohere2_vision(t):
    vision = {"model_type": "siglip_vision_model", **tiny_vlms.TOWER, "vision_use_head": False}
    text = tiny_vlms._text("cohere2", sliding_window=64)
    config = t.Cohere2VisionConfig(
        vision_config=vision, text_config=text, alignment_intermediate_size=32, downsample_factor=2, **IMAGE
    )
    return t.Cohere2VisionForConditionalGeneration(config)


def video_llama_3(t):
    vision = {**tiny_vlms.SIZES, "hidden_size": 16, "patch_size": 2}
    config = t.VideoLlama3Config(
        vision_config=vision, text_config=tiny_vlms._text("qwen2"), video_token_id=tiny_vlms.VIDEO, **IMAGE
    )
    return t.VideoLlama3ForConditionalGeneration(config)


def lfm2_vl(t):
    vision = {"model_type": "siglip2_vision_model", **tiny_vlms.SIZES, "hidden_size": 16, "patch_size": 2}
    text = {"model_type": "lfm2", **tiny_vlms.TEXT, "layer_types": ["conv", "full_attention", "conv"]}
    return t.Lfm2VlForConditionalGeneration(t.Lfm2VlConfig(vision_config=vision, text_config=text, **IMAGE))


def kimi_k25(t):
    vision = {**tiny_vlms.SIZES, "hidden_size": 16, "patch_size": 2}
    text = {"model_type": "deepseek_v3", **tiny_vlms.TEXT, "num_key_value_heads": 4, "kv_lora_rank": 8}
    text |= {"q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    return t.Kimi_K25ForConditionalGeneration(t.Kimi_K25Config(vision_config=vision, text_config=text, **IMAGE))


TRAINED = {aya_vision: False, cohere2_vision: False, video_llama_3: True}
"""And whether a processor prepares their images."""

REFUSED = {
    lfm2_vl: r"has no processor of 'image', and its get_image_features takes \['pixel_attention_mask', 'spatial",
    kimi_k25: r"has no processor of 'image', and its get_image_features takes \['image_grid_thw'\]",
}
DISJOINT = """
[parallelism.vision]
ranks = [0, 1]
[parallelism.llm]
ranks = [2, 3]
tensor_parallel_degree = 2
"""


def saved(make, folder, monkeypatch):
    import transformers

    monkeypatch.setattr(tiny_vlms, "MODELS", {make.__name__: lambda: make(transformers)})
    return tiny_vlms.save(make.__name__, folder)


def test_the_code_names_none_of_them():
    package = Path(hetmesh.__file__).parent
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py")).lower()
    for make in (*TRAINED, *REFUSED):
        words = [part for part in make.__name__.split("_") if part]
        assert not re.search("[_ ]?".join(words), code), make.__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [make if make is video_llama_3 else pytest.param(make, marks=pytest.mark.exhaustive) for make in TRAINED],
    ids=lambda make: make.__name__,
)
def test_they_compute_and_train_as_transformers_does(pool4, tmp_path, monkeypatch, make):
    if TRAINED[make]:
        monkeypatch.setattr(tiny_vlms, "PREPARED", {make.__name__: ("image",)})
    recipe = parse_recipe(tiny_vlms.recipe_text(saved(make, tmp_path, monkeypatch), DISJOINT))
    assert self_check(recipe) < TOLERANCE
    compare(whole_reference(recipe, 2), pool4.run(run_as, recipe, 2, None, None, timeout=120), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_hetmesh_cannot_do_is_said(tmp_path, monkeypatch, make):
    with pytest.raises(RecipeError, match=REFUSED[make]):
        resolve(parse_recipe(tiny_vlms.recipe_text(saved(make, tmp_path, monkeypatch))))
