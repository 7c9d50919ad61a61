"""Conversations: tokens and targets by chat template, images and recordings as their directory wants them."""

from __future__ import annotations

import json
import os
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.data import check_meta, check_sample, make_source
from hetmesh.data.chat import DEFAULT_TEMPLATE
from hetmesh.data.images import ImageProcessor
from hetmesh.errors import RecipeError, SampleError

WORDS = ["USER:", "ASSISTANT:", "what", "is", "this", "and", "a", "cat", "dog", "be", "kind", "user", "assistant"]
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<audio>", "<|end|>"]
CHATML = "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}<|end|>\n{% endfor %}"
MEAN, STD = [0.48, 0.45, 0.4], [0.26, 0.27, 0.28]
CLIP = {
    "size": 12,  # as in OpenAI's own directory: the shorter edge
    "crop_size": 8,
    "do_center_crop": True,
    "do_resize": True,
    "resample": 3,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
    "image_processor_type": "CLIPImageProcessor",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Directories `tokenizer` (words; no template), `clip`, `whisper`, and media files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    root = tmp_path_factory.mktemp("conversations")
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>", "<audio>", "<|end|>"],
    )
    fast.save_pretrained(root / "tokenizer")
    (root / "clip").mkdir()
    (root / "clip" / "preprocessor_config.json").write_text(json.dumps(CLIP))
    WhisperFeatureExtractor(
        feature_size=6, sampling_rate=1600, chunk_length=1, hop_length=160, n_fft=400
    ).save_pretrained(root / "whisper")
    draw = np.random.default_rng(0)
    for name, size in (("wide.png", (20, 30, 3)), ("tall.png", (50, 13, 3)), ("grey.png", (9, 9))):
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(root / name)
    (root / "broken.png").write_bytes((root / "wide.png").read_bytes()[:60])
    np.save(root / "features.npy", draw.random((6, 10)))
    with wave.open(str(root / "sound.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(1600)
        file.writeframes(draw.integers(-9999, 9999, (700, 2), dtype=np.int16).tobytes())
    return root


def source(root: Path, *records: Any, **options: Any):
    file = root / "data.jsonl"
    file.write_text("\n\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    given = {"path": str(file), "tokenizer": str(root / "tokenizer"), "image_processor": str(root / "clip"), **options}
    return make_source("conversations", **given)


def talk(*turns: Any, **more: Any) -> dict[str, Any]:
    """Turns of user and assistant in alternation."""
    roles = ("user", "assistant")
    return {"id": "t", "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(turns)], **more}


def image(name: str = "wide.png") -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def said(source: Any, index: int = 0) -> tuple[str, list[str]]:
    """All tokens as words, and those of each target span."""
    meta, sample = source.meta(index), source.load(index)
    check_meta(meta)
    check_sample(sample, meta, source.placeholders)
    words = source._chat.tokenizer.convert_ids_to_tokens(sample.tokens.tolist())
    return " ".join(words), [" ".join(words[a:b]) for a, b in meta.targets]


def test_without_a_template_the_form_is_vicunas(root):
    data = source(root, talk([image(), text("\nwhat is this")], "a cat", "and this", "a dog"))
    words, targets = said(data)
    assert words == "<s> USER: <image> what is this ASSISTANT: a cat </s> USER: and this ASSISTANT: a dog </s>"
    assert targets == ["a cat </s>", "a dog </s>"]
    assert data.meta(0).media[0].shape == (3, 8, 8)
    assert (data.placeholders, data.vocab_size) == ({"image": 3}, len(SPECIAL + WORDS))


def test_a_template_of_the_tokenizer_or_of_the_recipe(root):
    record = talk("what is this", " a cat ", "and this", "a dog")
    record["messages"].insert(0, {"role": "system", "content": "be kind"})
    words, targets = said(source(root, record, chat_template=CHATML))
    assert words.startswith("<s> <unk> be kind <|end|> <s> user what is this <|end|> <s> assistant a cat <|end|>")
    assert targets == ["a cat <|end|>", "a dog <|end|>"]  # the end of the turn too: the model must learn to stop


def test_a_line_break_behind_a_mark_is_the_one_that_the_template_writes(root):
    written = "{% if p.type == 'image' %}<image>\n{% else %}{{ p.text | replace('\n', ' be ') }}{% endif %}"
    form = f"{{% for m in messages %}}{{% for p in m.content %}}{written}{{% endfor %}} <|end|> {{% endfor %}}"
    assert (
        said(source(root, shown(1, "<image>\nwhat\nis"), chat_template=form))[0]
        == "<image> what be is <|end|> a cat <|end|>"
    )
    parts = talk([image(), text("\nwhat")], "a cat")
    assert said(source(root, parts, chat_template=form))[0] == "<image> be what <|end|> a cat <|end|>"
    other = form.replace("<image>\n", "<image> ")
    assert said(source(root, shown(1, "<image>\nwhat"), chat_template=other))[0].startswith("<image> be what <|end|>")


def test_a_template_whose_answers_do_not_end_is_noted(root):
    unended = DEFAULT_TEMPLATE.replace("{{ eos_token }}", " ")
    data = source(root, talk("what is this", "a cat"), chat_template=unended)
    assert said(data)[1] == ["a cat"]
    (note,) = data.abilities.notes()
    assert "does not learn to stop" in note
    assert "writes </s> after" in note
    assert data.end_ids == (data._chat.tokenizer.eos_token_id,)
    assert source(root, talk("what is this", "a cat")).abilities.notes() == ()


def test_what_a_template_writes_behind_its_generation_prompt_is_noted(root):
    form = "{% for m in messages %}{{ m.role }} THINK{{ m.content }} <|end|> {% endfor %}"
    asks = "{% if add_generation_prompt %}assistant {% endif %}"
    (note,) = source(
        root, talk("what", "a cat"), chat_template=form.replace("THINK", "be kind ") + asks
    ).abilities.notes()
    assert "writes 'be kind ' between its generation prompt and an answer: it is no target" in note
    for template in (form.replace("THINK", "") + asks, form.replace("THINK", "be kind ")):
        assert source(root, talk("what", "a cat"), chat_template=template).abilities.notes() == ()


def test_a_template_that_writes_nothing_for_an_image_is_noted(root):
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    written = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}} {written} <|end|> {{% endfor %}}"
    (note,) = source(root, talk([image(), text(" what")], "a cat"), chat_template=template).abilities.notes()
    assert "writes nothing for a part of type 'image': texts have '<image>' in its place" in note


def test_templates_that_spoil_what_is_said_are_errors(root):
    for template, message in (
        (DEFAULT_TEMPLATE.replace("{% for m in messages %}", "{% for m in messages[:1] %}"), "each of the assistant's"),
        (DEFAULT_TEMPLATE.replace("ASSISTANT: {{ m['content'] }}", "{{ m['content'] | upper }}"), "changes what the"),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
        (
            DEFAULT_TEMPLATE.replace("USER: {{ m['content'] }}", "USER:"),
            r"placeholders of \[\], its media are \['image'\]",
        ),
    ):
        data = source(root, talk([image(), text("what")], "a cat"), chat_template=template)
        with pytest.raises(SampleError, match=f"sample 't': .*{message}"):
            data.meta(0)


def test_lines_ids_and_samples_of_several_kinds(root):
    both = {"image": "<image>", "audio": "<audio>"}
    first = talk([image("tall.png"), {"type": "audio", "audio": "features.npy"}, image()], "a cat", id="one")
    second = talk("what", "a dog")
    del second["id"]
    third = talk([{"type": "audio", "audio": "sound.wav"}], "be kind", id=3)
    options = {"placeholders": both, "audio_processor": str(root / "whisper")}
    data = source(root, first, second, third, **options)
    assert [data.meta(i).id for i in range(len(data))] == ["one", "data.jsonl:1", "3"]
    meta, sample = data.meta(0), data.load(0)
    assert [(m.name, m.shape, m.position) for m in meta.media] == [
        ("image", (3, 8, 8), 2),
        ("audio", (6, 10), 3),
        ("image", (3, 8, 8), 4),
    ]
    check_sample(sample, meta, data.placeholders)
    assert data.meta(2).media[0].shape == data.load(2).media["audio"][0].shape == (6, 10)
    assert torch.equal(sample.media["audio"][0], torch.from_numpy(np.load(root / "features.npy")).float())


def test_metadata_comes_without_media_files(root):
    data = source(root, talk([image("missing.png")], "a cat"))
    assert data.meta(0).media[0].shape == (3, 8, 8)
    with pytest.raises(SampleError, match=r"sample 't': cannot read .*missing\.png"):
        data.load(0)


def test_where_sizes_differ_the_header_is_read(root, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**CLIP, "size": {"shortest_edge": 6}, "do_center_crop": False})
    )
    data = source(root, talk([image(), image("broken.png")], "a cat"), image_processor=str(tmp_path))
    assert [m.shape for m in data.meta(0).media] == [(3, 6, 9), (3, 6, 9)]  # the broken one's header is whole
    with pytest.raises(SampleError, match=r"sample 't': cannot read .*broken\.png"):
        data.load(0)


@pytest.mark.parametrize("name", ["wide.png", "tall.png", "grey.png"])
@pytest.mark.parametrize(
    "config",
    [
        {**CLIP, "size": {"shortest_edge": 12}, "crop_size": {"height": 8, "width": 8}},
        {**CLIP, "size": {"shortest_edge": 6}, "crop_size": {"height": 8, "width": 9}},
        {**CLIP, "do_center_crop": False, "size": {"height": 10, "width": 7}, "resample": 2},
        {**CLIP, "do_resize": False, "do_normalize": False, "crop_size": {"height": 8, "width": 8}},
    ],
    ids=["clip", "padded crop", "siglip", "crop only"],
)
def test_images_equal_those_of_transformers(root, tmp_path, name, config):
    from transformers import AutoImageProcessor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    processor = ImageProcessor(tmp_path, "key", pad_to_square=False)
    picture = Image.open(root / name)
    given = processor(picture)
    own = AutoImageProcessor.from_pretrained(tmp_path)
    expected = own(images=[Image.open(root / name).convert("RGB")], return_tensors="pt")["pixel_values"][0]
    assert given.shape == processor.extent(*picture.size)
    assert torch.equal(given, expected)


def test_files_that_no_8_bit_image_can_come_of(root, tmp_path):
    """Pillow would clip deeper pixels to black and white; opening a pipe would never end."""
    draw = np.random.default_rng(0)
    for name, pixels in (
        ("deep.png", draw.integers(0, 65536, (9, 9), dtype=np.uint16)),
        ("deep.tif", draw.integers(0, 65536, (9, 9), dtype=np.int32)),
        ("real.tif", draw.random((9, 9), dtype=np.float32)),
    ):
        Image.fromarray(pixels).save(tmp_path / name)
        with pytest.raises(SampleError, match=rf"sample 't': cannot read .*{name}: its pixels have more than 8 bits"):
            source(root, talk([image(name)], "a cat"), media_folder=str(tmp_path)).load(0)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**CLIP, "size": {"shortest_edge": 6}, "do_center_crop": False})
    )
    data = source(root, talk([image("pipe.png")], "a"), media_folder=str(tmp_path), image_processor=str(tmp_path))
    for read in (data.meta, data.load):
        with pytest.raises(SampleError, match=r"sample 't': cannot read .*pipe.png: .* is not a regular file"):
            read(0)


def test_padding_to_a_square_shows_the_whole_image(root, tmp_path):
    half = {"size": 8, "crop_size": 8, "resample": 0, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**CLIP, **half}))
    processor = ImageProcessor(tmp_path, "key", pad_to_square=True)
    white = Image.new("RGB", (16, 8), "white")
    result = processor(white)
    assert result.shape == processor.extent(16, 8) == processor.fixed_shape == (3, 8, 8)
    assert result[:, 2:6].eq(1).all()
    assert result[:, :2].abs().max() < 0.01  # the mean


def shown(files, asked):
    """A record in LLaVA's form."""
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": "a cat"}]
    return {"id": "x", "image": ["wide.png"] * files, "conversations": turns}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"sample 'data.jsonl:0': must be an object with `messages`"),
        ("[]", r"sample 'data.jsonl:0': must be an object with `messages`, got \[\]"),
        ("null", r"sample 'data.jsonl:0': must be an object with `messages`, got None"),
        ({"id": "x", "messages": [{"role": "user"}]}, "sample 'x': must be an object with `messages`.*content"),
        ({"id": "x", "messages": [{"role": "human", "content": "a"}]}, "sample 'x': .* there is no role human, only"),
        ('{"id": "\\ud800", "messages": []}', "sample 'data.jsonl:0': .*surrogates not allowed"),
        ("[" * 100_000, "sample 'data.jsonl:0': .*nested too deep"),
        (talk([{"type": "video", "video": "a"}]), "sample 't': it has 'video', but"),
        (talk([{"type": "image", "image": 3}]), "a part of `content` must be"),
        (shown(1, "what is <image><image>"), "sample 'x': it has more places for 'image' than files"),
        ({**shown(0, "<video> what"), "video": "a.mp4"}, "sample 'x': it has 'video', but"),
        (shown(2, "what is <image>"), r"sample 'x': more files of \['image'\] than marks in the text"),
        (talk("what is <image>"), "its text contains '<image>', which stands for media"),
        (
            talk([{"type": "audio", "audio": "a.npy"}]),
            r"it has 'audio', but \[data.options\] placeholders has no token",
        ),
    ],
)
def test_each_bad_line_names_the_sample(root, record, message):
    with pytest.raises(SampleError, match=message):
        source(root, record).meta(0)


@pytest.mark.parametrize("answer", ["", " \n", [], [text(" ")]])
def test_an_answer_of_nothing_is_no_target(root, answer):
    """It once trained the token that ends a turn alone."""
    two = talk("what", "a cat", "what", answer, id="x")
    data = source(root, talk("what", answer, id="x"), two)
    for index, turn in enumerate((1, 3)):
        for ask in (data.check_files, data.meta, data.load):
            with pytest.raises(SampleError, match=f"sample 'x': turn {turn}, the assistant's, is empty: the model"):
                ask(index)
    for key in ({"weight": 0}, {"train": False}):
        two["messages"][3] |= key
        assert said(source(root, two))[1] == ["a cat </s>"]
        two["messages"][3] = {"role": "assistant", "content": answer}


def test_each_bad_option_names_its_key(root, tmp_path):
    for options, message in (
        ({"placeholders": {"image": "<picture>"}}, r"placeholders: '<picture>' \(for 'image'\) is not one token"),
        ({"placeholders": {"image": "USER: is"}}, "is not one token of the vocabulary"),
        (
            {"placeholders": {"sound": "<image>"}},
            r"unknown kinds of media \['sound'\]; valid are \['image', 'video', 'audio'\]",
        ),
        ({"placeholders": {"image": "<image>", "audio": "<image>"}}, "needs a token of its own"),
        ({"tokenizer": str(root / "clip")}, r"\[data.options\] tokenizer = '.*clip'"),
        ({"image_processor": str(root / "tokenizer")}, "image_processor = .*tokenizer': OSError: Can't load image pro"),
        ({"split": "validation"}, "'validation' needs validation_path, got 'validation'"),
        ({"chat": 1}, "options .* unexpected keyword argument 'chat'|it takes"),
    ):
        with pytest.raises(RecipeError, match=message):
            source(root, talk("what", "a cat"), **options)
    missing = {"tokenizer": "/no/tokenizer", "image_processor": "/no/clip", "media_folder": "/no/media"}
    with pytest.raises(RecipeError) as caught:
        source(root, talk("what"), **missing)
    for key, value in missing.items():
        assert f"[data.options] {key} = '{value}': there is no such directory" in str(caught.value)


def test_an_image_without_a_processor_and_padding_that_is_no_placeholder(root):
    with pytest.raises(
        SampleError, match=re.escape("it has an image, but [data.options] image_processor is not given")
    ):
        source(root, talk([image()], "a cat"), image_processor=None).meta(0)
    assert source(root, talk("what"), placeholders={"image": "</s>"}).pad_id == 1  # <s>: </s> is taken


def test_validation_has_its_own_file(root):
    held_out = root / "held_out.jsonl"
    held_out.write_text(json.dumps(talk("this", "a dog", id="h")))
    options = {"validation_path": str(held_out)}
    assert source(root, talk("what", "a cat"), **options).meta(0).id == "t"
    assert source(root, talk("what", "a cat"), **options, split="validation").meta(0).id == "h"


def test_u21_only_the_kinds_that_are_wanted_are_read(root):
    both = {"image": "<image>", "audio": "<audio>"}
    record = talk([image("tall.png"), {"type": "audio", "audio": "features.npy"}], "a cat")
    data = source(root, record, placeholders=both)
    line, tall, features = (
        len((root / "data.jsonl").read_bytes()),
        (root / "tall.png").stat().st_size,
        (root / "features.npy").stat().st_size,
    )
    for kinds, needed in (
        ((), line),
        (("image",), line + tall),
        (("audio",), line + features),
        (None, line + tall + features),
    ):
        sample = data.load(0, kinds)
        assert set(sample.media) == ({"image", "audio"} if kinds is None else set(kinds))
        assert sample.bytes_read == sample.bytes_needed == needed
        check_sample(sample, data.meta(0), data.placeholders, kinds)
    assert source(root, talk([image("missing.png")], "a cat")).load(0, ()).tokens.numel() > 0


PARTS = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <s> <image> </s> {% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    " <|end|>{% endfor %}"
)


def test_a_template_with_a_branch_for_images_gets_parts(root):
    """It once got one text, so the branch never ran, and the tokens around an image were missing without a word."""
    words, targets = said(source(root, talk([image(), text("what")], "a cat"), chat_template=PARTS))
    assert words == "user <s> <image> </s> what <|end|> assistant a cat <|end|>"
    assert targets == ["a cat <|end|>"]


def test_a_template_whose_image_token_is_not_the_placeholder_is_refused(root):
    other = PARTS.replace("<s> <image> </s>", "<s>")
    with pytest.raises(RecipeError, match=r"template writes ' <s> ' for a part of type 'image', not '<image>'"):
        source(root, talk([image(), text("what")], "a cat"), chat_template=other)


ASKS = CHATML + "{% if add_generation_prompt %}<s>assistant {% endif %}"
OTHER = CHATML + "{% if add_generation_prompt %}<s>assistant <think>{% endif %}"


@pytest.mark.parametrize("template", [None, CHATML, ASKS, OTHER])
def test_a_prompt_is_what_comes_before_an_answer(root, template):
    both = {"image": "<image>", "audio": "<audio>"}
    options = {"placeholders": both, "audio_processor": str(root / "whisper"), "chat_template": template}
    asked = [image(), text("what is this and "), {"type": "audio", "audio": "sound.wav"}, text(" be kind")]
    data = source(root, talk(asked, "a cat"), **options)
    files = [("image", root / "wide.png"), ("audio", root / "sound.wav")]
    meta, sample = data.prompt("<image>what is this and <audio> be kind", files)
    like, loaded = data.meta(0), data.load(0)
    start = like.targets[0][0]
    assert sample.tokens.tolist() == loaded.tokens[:start].tolist()
    assert (meta.tokens, meta.media, meta.targets) == (start, like.media, ())
    for kind in both:
        assert torch.equal(sample.media[kind][0], loaded.media[kind][0])
    ends = {"</s>"} if template is None else {"</s>", "<|end|>"}
    assert set(data._chat.tokenizer.convert_ids_to_tokens(list(data.end_ids))) == ends
    answer = loaded.tokens[start:].tolist()
    assert data.decode([*answer, *sample.tokens.tolist()]) == "a cat"
    with pytest.raises(SampleError, match="more files of \\['audio'\\] than marks in the text"):
        data.prompt("<image>what", files)
    with pytest.raises(SampleError, match=r"cannot read .*broken.png"):
        data.prompt("what", [("image", root / "broken.png")])
