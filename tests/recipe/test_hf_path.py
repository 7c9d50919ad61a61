"""`[model] hf_path`: what a directory stands for, from its JSON files alone."""

from __future__ import annotations

import json

import pytest

from hetmesh.errors import RecipeError
from hetmesh.recipe.hf_path import check_placeholders
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.rewrite import rewritten

CONFIG = {"model_type": "gemma3", "vision_config": {}, "text_config": {}, "image_token_index": 7}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<img>"}]}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return tmp_path


def parse(folder, more="", *overrides):
    return parse_recipe(f"[model]\nhf_path = '{folder}'\n{more}", overrides)


def test_it_stands_for_modules_boundaries_and_data(folder):
    recipe = parse(folder, "[data.options]\npath = 'talks.jsonl'")

    assert {name: module.model for name, module in recipe.modules.items()} == {"vision": "hf_encoder", "llm": "hf_llm"}
    assert all(module.initial_load_path == str(folder) for module in recipe.modules.values())
    assert recipe.modules["llm"].attention_mask == "bidirectional_runs"  # as the family has it
    assert [(b.source, b.destination, b.at) for b in recipe.boundaries] == [("vision", "llm", "image")]
    assert recipe.data.source == "conversations"
    assert recipe.data.options == {"processor": str(folder), "path": "talks.jsonl"}
    own = parse(folder, "[data.options]\npath = 'talks.jsonl'\ntokenizer = 'x'").data.options
    assert own == {"path": "talks.jsonl", "tokenizer": "x"}
    (table,) = parse(folder, "[[data.mixture]]\nsource = 'conversations'\nweight = 1.0").data.mixture
    assert table.options == {"processor": str(folder)}


def test_what_the_recipe_says_itself_holds(folder):
    recipe = parse(
        folder,
        "[modules.vision]\ntrainable = false\n[data.options]\npath = 'x'\ntokenizer = 'other'",
        *("--modules.llm.attention_mask", "causal", "--modules.llm.lr", "1e-3"),
    )
    assert not recipe.modules["vision"].trainable
    assert (recipe.modules["llm"].attention_mask, recipe.modules["llm"].lr) == ("causal", 1e-3)
    assert recipe.data.options["tokenizer"] == "other"
    assert parse(folder, "[data]\nsource = 'digits'").data.options == {}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, r"model.hf_path = '.*': there is no config.json in it"),
        ({"model_type": "llama"}, r"\(model_type 'llama'\) has neither vision_config nor audio_config"),
        (
            {"model_type": "emu3", "vision_config": {}},
            r"'emu3' is not supported: its images are tokens of its vocabulary",
        ),
        (
            {"model_type": "granite_speech", "text_config": {}, "encoder_config": {}},
            "'granite_speech' is not supported: hetmesh takes .* config.json, which has text_config, encoder_config",
        ),
        (
            {"model_type": "gemma4", "text_config": {}, "vision_config": None},
            "'gemma4' is not supported: .* which has text_config, vision_config = null",
        ),
        ({"model_type": "fuyu", "text_config": {}}, "'fuyu' is not supported: .* which has text_config$"),
        *(
            ({"model_type": name, "text_config": {}, f"{tower}_config": {}}, f"'{name}' is not supported: {reason}")
            for name, tower, reason in (
                ("instructblip", "vision", "its tower reads the question"),
                ("florence2", "vision", "its LLM is an encoder and a decoder"),
                ("kosmos-2.5", "vision", "it calls no tower by get_image_features"),
            )
        ),
    ],
)
def test_directories_that_are_no_multimodal_model_are_refused(folder, config, says):
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=says):
        parse(folder)


def test_an_id_of_the_hub_says_how_to_get_it():
    with pytest.raises(RecipeError, match=r"directory: hf download Qwen/Qwen3-VL-2B --local-dir Qwen3-VL-2B$"):
        parse("Qwen/Qwen3-VL-2B")


def test_torchtitans_keys_say_what_to_write(folder):
    with pytest.raises(RecipeError, match=r"model.hf_assets_path = 'x': .*; write \[model\] hf_path"):
        parse(folder, "hf_assets_path = 'x'")


def test_it_is_rewritten_with_tables_for_the_modules_that_it_stands_for(folder):
    text = f"[model]\nhf_path = '{folder}'  # mine\n"
    after = rewritten(text, {("modules", "llm", "lr"): 0.5, ("parallelism",): {"vision": {"ranks": [0]}}})
    assert "# mine" in after
    recipe = parse_recipe(after)
    assert recipe.modules["llm"].lr == 0.5
    assert list(recipe.modules) == ["vision", "llm"]
    with pytest.raises(RecipeError, match="unknown module 'projector'"):
        rewritten(text, {("modules", "projector", "lr"): 0.5})


def test_the_token_of_an_item_is_that_of_the_config(folder):
    recipe = parse(folder, "[data.options]\npath = 'talks.jsonl'")
    check_placeholders(recipe, {"image": 7}, 8)
    check_placeholders(recipe, {}, 8)  # reads no images
    with pytest.raises(RecipeError, match=r"image_token_index = 7, but data.options.placeholders.image is token 5"):
        check_placeholders(recipe, {"image": 5}, 8)
    with pytest.raises(RecipeError, match=r"image_token_index = 7, but the tokenizer has 7 tokens, 0 to 6"):
        check_placeholders(recipe, {"image": 7}, 7)
    check_placeholders(parse(folder, "[data]\nsource = 'digits'"), {"image": 5}, 7)  # which has a vocabulary of its own
