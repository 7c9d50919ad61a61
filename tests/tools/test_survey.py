"""The survey of transformers' classes: what its rows say, and what its kept output holds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("survey")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_a_config_is_made_tiny_with_heads_of_their_size_and_one_width_between_its_parts(load):
    from transformers import Gemma3Config, Qwen3VLConfig

    make_tiny = load("surveying.tiny_config").make_tiny
    config = make_tiny(Qwen3VLConfig())
    text, vision = config.text_config, config.vision_config
    assert (text.num_attention_heads, text.hidden_size, text.num_hidden_layers) == (4, 4 * text.head_dim, 4)
    assert vision.out_hidden_size == text.hidden_size
    assert vision.hidden_size == 4 * 1152 // 16
    assert config.image_token_id == 1
    assert config.video_token_id >= 100
    gemma = make_tiny(Gemma3Config())
    assert set(gemma.text_config.layer_types) == {"sliding_attention", "full_attention"}
    assert gemma.vision_config.image_size == 4 * gemma.vision_config.patch_size


@pytest.mark.exhaustive
def test_rows_say_what_became_of_a_class(load):
    result = load("survey").run(["llava", "mllama", "chameleon"], 1, 120.0)
    rows = {row["model_type"]: row for row in result["image_text"]["rows"]}
    assert rows["llava"]["result"] == "passed"
    assert rows["llava"]["parts"] == ["llm", "vision"]
    assert rows["llava"]["max_difference"] < 1e-5
    assert rows["llava"]["max_training_error"] < 1e-9
    assert rows["mllama"]["result"] == "refused"
    assert "cross-attention" in rows["mllama"]["reason"]
    assert rows["chameleon"]["result"] == "not_buildable"
    assert result["image_text"]["split"] == result["split"] == result["passed"] == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_trains_another_way_is_called_silently_wrong(load, monkeypatch):
    one_class = load("surveying.one_class")
    from hetmesh.models.split.llm_half import HfLlmAdapter

    monkeypatch.setattr("hetmesh.verify.self_check.self_check", lambda recipe: 0.0)  # a gate that sees nothing
    logits = HfLlmAdapter.logits
    monkeypatch.setattr(HfLlmAdapter, "logits", lambda *given: logits(*given) * 1.01)
    row = one_class.survey("llava", "LlavaForConditionalGeneration")
    assert row["result"] == "silently_wrong"


def test_the_kept_output_has_no_class_that_is_silently_wrong():
    kept = json.loads((TOOLS / "results" / "survey.json").read_text(encoding="utf-8"))
    images, audio = kept["image_text"], kept["audio_text"]
    assert images["silently_wrong"] == audio["silently_wrong"] == 0
    assert images["passed"] >= 60
    assert audio["passed"] >= 4
    assert kept["video"] >= 8
    for kind in (images, audio):
        assert len(kind["rows"]) == kind["classes"]
        assert all(row["result"] == "passed" or row["reason"] for row in kind["rows"])
