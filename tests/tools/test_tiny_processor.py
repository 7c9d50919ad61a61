"""Tiny directories with processors: what transformers' own processor makes of a batch, its own model reads."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("surveying.tiny_processor")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [("llava", ["image"]), ("qwen3_vl", ["image", "video"]), ("idefics3", ["image"]), ("qwen2_audio", ["audio"])],
)
def test_the_class_reads_what_the_processor_of_its_directory_makes(load, model_type, kinds):
    classes = load("surveying.classes")
    known = {**classes.image_text_classes(), **classes.audio_text_classes()}
    row = load("surveying.processor_forward").check(model_type, known[model_type])
    assert row["built"], row
    assert row["forward"], row
    assert row["template"]
    assert list(row["kinds"]) == kinds
    for kind in kinds:
        of_kind = row["kinds"][kind]
        assert of_kind["counts"] == [2, 1, 0]
        assert not of_kind["alike"]
        assert of_kind["tokens"] > 3
        assert of_kind.get("rows", of_kind["tokens"]) == of_kind["tokens"]


def test_tokens_have_the_ids_of_the_config_and_all_ids_are_the_models(load, tmp_path):
    from transformers import AutoTokenizer

    tiny = load("surveying.tiny_processor")
    config = load("surveying.tiny_config").make_tiny(tiny.default_config("qwen3_vl"))
    config.save_pretrained(tmp_path)
    tiny.save_processor("qwen3_vl", config, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") == config.vision_start_token_id
    assert max(tokenizer.get_vocab().values()) < config.text_config.vocab_size
    said = "<|vision_start|>naïve?<|im_end|>"
    assert tokenizer.decode(tokenizer(said)["input_ids"]) == said
    config.text_config.vocab_size = 200
    with pytest.raises(ValueError, match="the vocabulary of the tiny model 200"):
        tiny.save_processor("qwen3_vl", config, tmp_path)


def test_a_family_whose_processor_cannot_be_made_here_says_why(load, tmp_path):
    with pytest.raises(ValueError, match="needs torchaudio"):
        load("surveying.tiny_processor").save_processor("granite_speech", None, tmp_path)
