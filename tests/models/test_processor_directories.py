"""Directories with their own processors: what is measured of these, and what is refused because of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.split.batching import Pad, measure
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.processor import processor_at
from hetmesh.models.weights.pretrained import Pretrained

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    make = importlib.import_module("surveying.processor_forward").tiny_directory
    return lambda *of: (make(*of, tmp_path), tmp_path)[1]


def vision(path):
    pretrained = Pretrained(path, "modules.vision.initial_load_path")
    request = AdapterRequest("vision", media="image", consumers=("llm",), model="hf_encoder", pretrained=pretrained)
    return HfEncoderAdapter.make(request)


def test_samples_of_several_images_are_padded_though_two_of_alike_tiles_are_joined(directory):
    path = directory("granite_docling", "GraniteDoclingForConditionalGeneration")
    processor = processor_at(path, "a directory")
    assert isinstance(measure(processor, "image").rules["pixel_values"], Pad)
    assert processor.row_tokens["image"] == processor.own.image_token_id


def test_what_is_for_each_token_of_the_llm_is_refused(directory):
    path = directory("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration")
    with pytest.raises(RecipeError, match="takes moe_mm_token_type_ids of each token, which its processor makes"):
        vision(path)


def test_a_tower_that_reads_no_tensor_of_a_size_of_its_own_takes_what_the_processor_makes(directory):
    adapter = vision(directory("llava_next", "LlavaNextForConditionalGeneration"))
    assert adapter.call is None
    assert set(adapter.units.batchings["image"].rules) == {"pixel_values", "image_sizes"}
