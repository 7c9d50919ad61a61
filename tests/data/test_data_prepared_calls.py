"""Calls of tools, weights and columns where a directory's own processor prepares the samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data_tool_calls import ASK, CALLS, QWEN3, QWEN_CALL, TOLD, TOOLS

from hetmesh.data import make_source, media_files
from hetmesh.errors import SampleError
from support.data_forms import picture, write_tar
from support.media_files import write_video
from surveying.tiny_processor import default_config, fit_config, save_processor


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory of qwen2_5_vl's processor, one token per byte; and images."""
    root = tmp_path_factory.mktemp("prepared")
    config = default_config("qwen2_5_vl")
    fit_config("qwen2_5_vl", config)
    config.save_pretrained(root / "model")
    save_processor("qwen2_5_vl", config, root / "model")
    for i in range(2):
        (root / f"{i}.png").write_bytes(picture(i))
    return root


WRITTEN = (
    "{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}" + QWEN3.replace("m.content if m.content is string else ''", "said(m.content or '')")
)


def source(root, records, **options):
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"processor": str(root / "model"), "chat_template": WRITTEN, **options}
    return make_source("conversations", path=str(root / "data.jsonl"), **options)


def said(data, index=0):
    """The text of each run of targets."""
    meta, tokens = data.meta(index), data.load(index).tokens.tolist()
    return [data._chat.tokenizer.decode(tokens[a:b]) for a, b in meta.targets]


def test_targets_and_values_follow_what_the_processor_puts_in_the_place_of_images(root):
    image = {"type": "image", "image": "0.png"}
    told = TOLD | {"content": [image, {"type": "text", "text": "dry"}]}
    asked = ASK | {"content": [image, {"type": "text", "text": "Rain?"}]}
    turns = [asked, CALLS[1], told, CALLS[3] | {"weight": 0.5}]
    data = source(root, [{"id": "t", "messages": turns, "tools": TOOLS, "reward": 2}], values=["weight", "reward"])
    assert said(data) == [f"\n{QWEN_CALL}", "No.<|im_end|>"]
    (first, second), sample = ([b - a for a, b in data.meta(0).targets], data.load(0))
    assert sample.values["weight"].tolist() == [1.0] * first + [0.5] * second
    assert sample.values["reward"].tolist() == [2.0] * (first + second)
    assert [item.rows > 1 for item in data.meta(0).media] == [True, True]


def test_columns_of_a_prepared_sample(root):
    texts = [{"user": "Rain?", "assistant": "No."}, {"user": "Snow?", "assistant": "No."}]
    data = source(root, [{"images": ["0.png", "1.png"], "texts": texts}, {"image": "1.png", "text": "Rain."}])
    assert [said(data, i) for i in range(2)] == [["No.<|im_end|>"] * 2, ["Rain.<|im_end|>"]]
    assert [data.meta(i).num_items("image") for i in range(2)] == [2, 1]


def test_videos_of_every_form(root, monkeypatch):
    write_video(root / "clip.mp4", "mpeg4")
    turns = [{"from": "human", "value": "<video>\nRain?"}, {"from": "gpt", "value": "No."}]
    columns = {"video": "clip.mp4", "question": "Rain?", "answer": "No."}
    written = "'<|vision_start|>' ~ ('<|video_pad|>' if p.type == 'video' else '<|image_pad|>') ~ '"
    template = WRITTEN.replace("if p.type == 'image'", "if p.type != 'text'")
    template = template.replace("'<|vision_start|><|image_pad|>", written)
    write_tar(root / "x.tar", {"x.mp4": (root / "clip.mp4").read_bytes(), "x.txt": b"No."})
    records = [{"video": "clip.mp4", "conversations": turns}, columns]
    data = source(root, records, chat_template=template)
    tar = make_source("conversations", path=str(root / "x.tar"), processor=str(root / "model"), chat_template=template)
    for each, index in ((data, 0), (data, 1), (tar, 0)):
        assert said(each, index) == ["No.<|im_end|>"]
        assert [(item.name, item.rows) for item in each.meta(index).media] == [("video", data.meta(0).media[0].rows)]
    monkeypatch.setattr(media_files, "MOST_PIXELS", 39 * 48 * 64)
    for ask in (data.meta, data.load):
        with pytest.raises(SampleError, match=r"clip.mp4: 40 frames of 48 x 64 pixels are 122880, more than 119808"):
            ask(0)
