"""Recordings of a directory: tokens, rows and features are those that transformers' own processor makes of them."""

from __future__ import annotations

import io
import json
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.expand import Expander, expand_tokens
from hetmesh.data.media_reader import RecordingProcessor
from hetmesh.errors import RecipeError, SampleError
from hetmesh.models.split.audio_calls import Frames, PaddedFrames
from hetmesh.recipe.recipe import parse_recipe

WORDS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>", "<|IMAGE|>", "<|VIDEO|>"]
NAMES = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
NAMES |= {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>"}
NAMES |= {"vision_bos_token": "<|im_start|>", "vision_eos_token": "<|im_end|>"}  # not what is tried here
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for p in m.content %}{% if p.type == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)
SAMPLES = (7001, 16000, 12345)
"""Of three recordings, of which a whole one has 16 frames."""


def tokenizer_of(folder, template):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=NAMES)
    fast.add_special_tokens({"additional_special_tokens": WORDS})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def directory(folder, model, template=None):
    from transformers import WhisperFeatureExtractor

    tokenizer = tokenizer_of(folder, template)
    extractor = WhisperFeatureExtractor(feature_size=6, hop_length=1000, chunk_length=1)
    extractor.save_pretrained(folder)
    config = {"model_type": model, "audio_config": {}, "text_config": {}, "audio_token_id": 0}
    if model == "qwen2_5_omni":
        config = {"model_type": model, "thinker_config": {**config, "model_type": f"{model}_thinker"}}
    (folder / "config.json").write_text(json.dumps(config))
    sounds = []
    for i, count in enumerate(SAMPLES):
        sounds.append(np.random.default_rng(i).integers(-9000, 9000, count).astype("<i2"))
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(sounds[-1].tobytes())
    parts = [{"type": "audio", "audio": f"{i}.wav"} for i in range(len(SAMPLES))]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    (folder / "talks.jsonl").write_text(json.dumps({"id": "one", "messages": turns}))
    return tokenizer, extractor, [sound.astype(np.float32) / 32768 for sound in sounds], turns


def source_of(folder):
    recipe = parse_recipe(f"[model]\nhf_path = '{folder}'\n[data.options]\npath = '{folder}/talks.jsonl'")
    return ConversationsSource(**recipe.data.options)


@pytest.mark.parametrize(
    ("model", "template", "call"),
    [("qwen2_audio", None, PaddedFrames(6, 16)), ("qwen2_5_omni", TEMPLATE, Frames(6))],
)
def test_they_are_those_of_transformers_own_processor(tmp_path, monkeypatch, model, template, call):
    import transformers

    tokenizer, extractor, sounds, turns = directory(tmp_path, model, template)
    kind = {"qwen2_audio": transformers.Qwen2AudioProcessor, "qwen2_5_omni": transformers.Qwen2_5OmniProcessor}[model]
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    others = {name: SimpleNamespace(merge_size=2) for name in kind.get_attributes() if name.endswith("_processor")}
    processor = kind(feature_extractor=extractor, tokenizer=tokenizer, **others)
    text = processor.apply_chat_template(turns, chat_template=template, tokenize=False)
    theirs = processor(text=text, audio=sounds, sampling_rate=16000, return_tensors="pt")

    source = source_of(tmp_path)
    meta, sample = source.meta(0), source.load(0)
    expanded = Expander({"audio": call.units})(meta).meta
    tokens = expand_tokens(sample, meta, expanded, source.placeholders).tokens
    assert tokens.tolist() == theirs["input_ids"][0].tolist()
    ours = call.arguments(call.collate(sample.media["audio"], [item.size for item in meta.media]))
    mask = theirs["feature_attention_mask"]
    assert ours["feature_attention_mask"].sum(dim=1).tolist() == mask.sum(dim=1).tolist() == [8, 16, 13]
    length = ours["input_features"].shape[2]
    assert length == 16
    if model == "qwen2_5_omni":  # which reads nothing behind a recording's own frames
        theirs["input_features"] = theirs["input_features"] * mask[:, None]
    torch.testing.assert_close(ours["input_features"], theirs["input_features"], atol=1e-5, rtol=0)
    for item in meta.media:
        call.check(item.extent)


def test_the_default_template_of_qwen2_audio_gives_way_to_a_file_but_not_to_the_tokenizers(tmp_path):
    directory(tmp_path, "qwen2_audio", TEMPLATE)
    (tmp_path / "chat_template.jinja").rename(tmp_path / "other.jinja")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    assert "helpful assistant" in source_of(tmp_path)._chat.template
    (tmp_path / "other.jinja").rename(tmp_path / "chat_template.jinja")
    assert source_of(tmp_path)._chat.template == TEMPLATE


def test_what_an_extractor_would_cut_and_other_extractors_are_refused(tmp_path):
    directory(tmp_path, "qwen2_audio")
    source = source_of(tmp_path)
    with wave.open(str(tmp_path / "1.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(b"\0" * 40000)
    with pytest.raises(SampleError, match=r"'one': cannot read .*1.wav.*: it lasts 1.2 s, more than the 1 s of"):
        source.meta(0)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, "feature_extractor_type": "Other"}))
    with pytest.raises(RecipeError, match=r"its feature extractor is 'Other', not WhisperFeatureExtractor"):
        RecordingProcessor(tmp_path, "key", "own").shape("x.wav", io.BytesIO())
    with pytest.raises(RecipeError, match=r"audio_frames: must be one of \['padded', 'counted', 'own'\], got 'all'"):
        ConversationsSource("x", str(tmp_path), audio_frames="all")
    for call, shape in ((Frames(6), (6, 2)), (PaddedFrames(6, 16), (6, 16)), (PaddedFrames(6, 16), (6, 16, 17))):
        with pytest.raises(SampleError, match="recordings must be of shape"):
            call.check(shape)
