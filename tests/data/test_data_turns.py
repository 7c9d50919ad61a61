"""The forms in which data sets hold conversations, and where a folder has them."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_data_conversations import PARTS, image, root, said, source, talk, text  # noqa: F401

from hetmesh.data import make_source
from hetmesh.data.find_conversations import Conversations, find_conversations
from hetmesh.data.metadata_index import build_index
from hetmesh.data.stores.store import data_url
from hetmesh.data.turns import turns_of
from hetmesh.errors import RecipeError, SampleError

ASK, SAY = {"type": "text", "text": "what"}, ("assistant", "a cat")
CAT = {"type": "image", "image": "cat.png"}
URL = "data:image/png;base64,AAAA"


def messages(*parts, **record):
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "a cat"}], **record}


def llava(text, **record):
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "a cat"}]
    return {"conversations": turns, **record}


FORMS = {
    # what: (record, content of the first turn)
    "ours": (messages(CAT, ASK), [CAT, ASK]),
    "LLaVA": (llava("<image>what", image="cat.png"), [CAT, ASK]),
    "LLaVA, several": (llava("<image>what<image>", image=["cat.png", "b.png"]), [CAT, ASK, {**CAT, "image": "b.png"}]),
    "OpenAI": (
        messages({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, ASK),
        [{**CAT, "image": URL}, ASK],
    ),
    "OpenAI, url alone": (messages({"type": "image_url", "image_url": "cat.png"}, ASK), [CAT, ASK]),
    "OpenAI, responses": (
        messages({"type": "input_image", "image_url": "cat.png"}, {"type": "input_text", "text": "what"}),
        [CAT, ASK],
    ),
    "OpenAI, audio": (
        messages({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        [{"type": "audio", "audio": "data:audio/wav;base64,AAAA"}],
    ),
    "transformers, url": (messages({"type": "image", "url": "cat.png"}, ASK), [CAT, ASK]),
    "transformers, path": (messages({"type": "image", "path": "cat.png"}, ASK), [CAT, ASK]),
    "transformers, base64": (messages({"type": "image", "base64": "AAAA"}), [{**CAT, "image": URL}]),
    "a data URL as base64": (messages({"type": "image", "base64": URL}), [{**CAT, "image": URL}]),
    "files of the record": (messages({"type": "image"}, ASK, images=["cat.png"]), [CAT, ASK]),
    "marks in messages": (
        {
            "messages": [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "a cat"}],
            "images": ["cat.png"],
        },
        [CAT, ASK],
    ),
    "a table's nulls": (messages({"type": "text", "text": "what", "image": None}), [ASK]),
    "the same file named twice": (messages(CAT, ASK, image="cat.png"), [CAT, ASK]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_ours(form):
    record, content = FORMS[form]
    asked, said = turns_of(record)
    assert asked == ("user", content)
    assert said in (SAY, ("assistant", [{"type": "text", "text": "a cat"}]))


@pytest.mark.parametrize(
    "record",
    [
        llava("what", image="cat.png"),
        llava("<image>what", image=["cat.png", "b.png"]),
        messages(ASK, images=["cat.png"]),  # which nobody would see
        messages({"type": "image"}, images=["cat.png", "b.png"]),
    ],
)
def test_files_without_a_place_are_errors(record):
    with pytest.raises(ValueError, match=r"more files of \['image'\] than marks in the text"):
        turns_of(record)


def test_who_speaks():
    record = {"messages": [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "what"}]}
    assert turns_of(record) == [("system", "be kind"), ("user", "what")]
    with pytest.raises(ValueError, match="`from` is 'bot', must be one of"):
        turns_of({"conversations": [{"from": "bot", "value": "a"}]})


def test_media_in_a_record():
    data = b"12345"
    url = "data:audio/x-wav;charset=x;base64," + base64.b64encode(data).decode()
    item = data_url(url, lambda: url)
    assert (item.name, item.length, item.read(), item.open().read()) == ("inline.wav", 5, data, data)
    assert str(item) == "inline.wav (5 bytes in the record)"  # so errors call it
    with pytest.raises(OSError, match="is no data URL of base64"):
        data_url("data:,hello", str)
    with pytest.raises(OSError, match="is no base64"):
        data_url("data:image/png;base64,A", lambda: "data:image/png;base64,A").read()


def test_images_in_the_record_and_addresses(root):  # noqa: F811
    data = base64.b64encode((root / "wide.png").read_bytes()).decode()
    asked = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    own = source(root, talk([asked, text("what")], "a cat"), talk([image(), text("what")], "a cat"))
    (given,), (expected,) = (own.load(i).media["image"] for i in range(2))
    assert torch.equal(given, expected)
    assert said(own) == said(own, 1)
    file = {"type": "image_url", "image_url": {"url": (root / "wide.png").as_uri()}}
    assert torch.equal(source(root, talk([file], "a cat")).load(0).media["image"][0], expected)
    asked["image_url"]["url"] = "https://example.org/cat.png"
    with pytest.raises(SampleError, match=r"sample 't': 'https://example.org/cat.png' is an address, and nothing is"):
        source(root, talk([asked], "a cat")).meta(0)


def test_conversations_in_which_nobody_answers_have_no_target(root):  # noqa: F811
    """They are counted, or end the run, as [data] on_no_target says; a batch of nothing else is an error."""
    turns = [{"from": "human", "value": "what is this"}, {"from": "human", "value": "and this"}]
    data = source(root, {"id": "h", "conversations": turns}, talk("what", "a cat"))
    assert [data.meta(i).targets == () for i in range(2)] == [True, False]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "png")
    (tmp_path / "pictures" / "cat.png").write_bytes(buffer.getvalue())
    (tmp_path / "talks.jsonl").write_text(json.dumps(llava("<image>what", image="cat.png")) + "\n")
    (tmp_path / "dataset.json").write_text('{"name": "pets"}')  # no conversation
    return tmp_path


def test_a_folder_has_one_file_of_conversations_and_the_media_beside_it(folder):
    expected = Conversations(str(folder / "talks.jsonl"), "", str(folder / "pictures"))
    assert find_conversations(str(folder)) == expected
    (folder / "talks_val.jsonl").write_bytes((folder / "talks.jsonl").read_bytes())
    found = find_conversations(str(folder))
    assert found == Conversations(
        str(folder / "talks.jsonl"), str(folder / "talks_val.jsonl"), str(folder / "pictures")
    )
    (folder / "pictures" / "cat.png").rename(folder / "cat.png")
    assert find_conversations(str(folder / "talks.jsonl")) == Conversations(str(folder / "talks.jsonl"))
    (folder / "more.jsonl").write_bytes((folder / "talks.jsonl").read_bytes())
    with pytest.raises(RecipeError, match=r"several files hold conversations: .*more.jsonl, .*talks.jsonl, .*; name"):
        find_conversations(str(folder))


def test_held_out_shards_are_not_among_the_others(folder):
    for name in ("a.tar", "b.tar", "val.tar"):
        with tarfile.open(folder / "pictures" / name, "w") as shard:
            shard.add(folder / "talks.jsonl", name)
    with pytest.raises(RecipeError, match=r"no pattern names a.tar, b.tar ... and leaves out the held-out ones"):
        find_conversations(str(folder / "pictures"))
    (folder / "pictures" / "b.tar").rename(folder / "pictures" / "a1.tar")
    found = find_conversations(str(folder / "pictures"))
    assert [Path(each).name for each in (found.path, found.validation_path)] == ["a*.tar", "val.tar"]


def test_what_is_not_there_is_said(folder):
    (folder / "pictures" / "cat.png").unlink()
    with pytest.raises(RecipeError, match=r"talks.jsonl names 'cat.png', which is neither beside it nor in a folder"):
        find_conversations(str(folder))
    (folder / "pictures" / "0.png").write_bytes(b"")
    records = [json.dumps(llava("<image>what", image=f"{i}.png")) for i in (0, 5)]
    (folder / "talks.jsonl").write_text("\n".join(records))
    with pytest.raises(RecipeError, match=r"talks.jsonl names '5.png', which is not in .*/pictures, as others are"):
        find_conversations(str(folder))
    assert find_conversations(str(folder), "elsewhere").media_folder == "elsewhere"
    with pytest.raises(RecipeError, match=r"--data = '.*pictures': no conversations in it: one conversation per line"):
        find_conversations(str(folder / "pictures"))
    with pytest.raises(RecipeError, match="--data = 'nowhere': there is no such file"):
        find_conversations("nowhere")


@pytest.mark.parametrize(("mark", "kind"), [("<image>", "image"), ("<audio>", "audio")])
def test_a_mark_in_a_message_without_a_file_is_refused_whatever_the_placeholder(mark, kind):
    # A tokenizer with another placeholder would make plain text of it, and nobody would miss the file.
    with pytest.raises(ValueError, match=f"contains '{mark}', which stands for media, and the record names no {kind}"):
        turns_of({"messages": [{"role": "user", "content": f"{mark} what is this"}]})


TWICE = [
    {"role": "user", "content": "what", "weight": 0},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "and this", "train": False},
    {"role": "assistant", "content": "a dog"},
]


@pytest.mark.parametrize(("first", "second"), [({"weight": 0}, {"weight": 1.0}), ({"train": False}, {"train": True})])
def test_a_turn_of_weight_0_is_no_target(root, first, second):  # noqa: F811
    turns = [TWICE[0], TWICE[1] | first, TWICE[2], TWICE[3] | second]
    words = "<s> USER: what ASSISTANT: a cat </s> USER: and this ASSISTANT: a dog </s>"
    assert said(source(root, {"id": "t", "messages": turns})) == (words, ["a dog </s>"])
    names = {"user": "human", "assistant": "gpt"}
    llava_form = [
        {"from": names[turn["role"]], "value": turn["content"], **{k: turn[k] for k in first if k in turn}}
        for turn in turns
    ]
    assert said(source(root, {"id": "t", "conversations": llava_form})) == (words, ["a dog </s>"])


@pytest.mark.parametrize(
    ("turn", "given", "message"),
    [
        (1, {"weight": 0.5}, r"sample 't': turn 1 has {'weight': 0.5}: `weight` must be 0 or 1.* loss of your own"),
        (2, {"train": True}, r"sample 't': turn 2 has {'train': True}, but only the assistant's turns are targets"),
        (3, {"tool_calls": [{"type": "function"}]}, r"sample 't': .* writes nothing of 'tool_calls'; remove it from"),
        (3, {"reasoning_content": "so"}, r"sample 't': .* writes nothing of 'reasoning_content'; remove it from"),
    ],
)
def test_weights_and_calls_that_cannot_be_honoured_are_refused(root, turn, given, message):  # noqa: F811
    turns = [each | given if i == turn else each for i, each in enumerate(TWICE)]
    data = source(root, {"id": "t", "messages": turns})
    for ask in (data.check_files, data.meta):
        with pytest.raises(SampleError, match=message):
            ask(0)
    assert said(source(root, {"id": "t", "messages": [each | {"tool_calls": None} for each in TWICE], "tools": []}))


def test_the_template_gets_every_key_of_a_turn(root):  # noqa: F811
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }} {{ m.reasoning_content }} </s> {% endfor %}"
    )
    for key, answer in (("name", "is a cat </s>"), ("reasoning_content", "a cat is </s>")):
        turns = [each | {key: "is"} if each["role"] == "assistant" else each for each in TWICE]
        words, targets = said(source(root, {"id": "t", "messages": turns}, chat_template=template))
        assert (targets[0], answer in words) == (answer, True)
    turns = [each | {"id": 3, "m": "so"} for each in TWICE]  # of which no template knows
    assert said(source(root, {"id": "t", "messages": turns}))
    llava_form = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a cat"}]
    with pytest.raises(SampleError, match="sample 't': it has 'system' beside its turns"):
        source(root, {"id": "t", "system": "be terse", "conversations": llava_form}).meta(0)


def test_media_in_an_answer_that_the_template_rewrites_are_refused_by_check(root):  # noqa: F811
    """A template may write an item of the assistant's turn as another text than the placeholder alone."""
    record = talk("what", [image(), text("a cat")])
    with pytest.raises(SampleError, match=r"sample 't': .* what the assistant says, which holds media: move these"):
        source(root, record, chat_template=PARTS).check_files(0)
    plain = source(root, record)
    assert plain.check_files(0) == []
    assert said(plain)[1] == ["a cat </s>"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]}, "`value` of a turn"),
        (
            {"conversations": [{"from": "human", "value": "<video>\nq"}, {"from": "gpt", "value": "a"}]},
            "it has more places for 'video' than files",
        ),
        ({"messages": TWICE, "system": "be terse"}, "it has 'system' beside its turns"),
        ({"messages": TWICE, "system_prompt": "be terse"}, "it has 'system_prompt' beside its turns"),
        ({"messages": TWICE, "weight": 0}, "it has 'weight' = 0 beside its turns"),
        ({"messages": TWICE, "weight": 0.5}, "it has 'weight' = 0.5 beside its turns, which is not read; .*a loss of"),
        ({"messages": TWICE, "train": False}, "it has 'train' = False beside its turns"),
        ({"messages": TWICE, "tools": "x"}, "its 'tools' are no JSON"),
        ({"messages": TWICE, "tools": {"a": 1}}, "its `tools` must be a list"),
        ({"messages": TWICE, "tools": [{"a": 1}]}, "the chat template writes nothing of 'tools'"),
        ({"messages": [{**TWICE[1], "loss": False}]}, "turn 0 has 'loss', which is not read"),
        ({"messages": TWICE, "image": "a.png", "images": ["a.png"]}, "it has both 'image' and 'images'"),
    ],
)
def test_what_a_record_says_and_nobody_reads_is_refused(root, record, message):  # noqa: F811
    with pytest.raises(SampleError, match=f"sample 't': {message}"):
        source(root, record | {"id": "t"}).meta(0)


def test_two_texts_in_a_row_are_refused_where_the_template_parts_them(root):  # noqa: F811
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}BETWEEN"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}</s>{% endfor %}"
    )
    turns = [{"role": "user", "content": [text("see"), text("what")]}, TWICE[1]]
    assert said(source(root, {"id": "t", "messages": turns}, chat_template=template.replace("BETWEEN", "")))
    with pytest.raises(SampleError, match="sample 't': turn 0 has two texts in a row, between which the chat template"):
        source(root, {"id": "t", "messages": turns}, chat_template=template.replace("BETWEEN", "; ")).meta(0)


@pytest.mark.parametrize("indexed", [False, True])
def test_values_of_turns_and_records_come_with_the_targets(root, indexed):  # noqa: F811
    """`weight`: the turn's times the record's; any other value is the record's."""
    turns = [TWICE[0], TWICE[1] | {"weight": 0.5}, TWICE[2], TWICE[3]]
    records = [
        {"id": "t", "messages": turns, "weight": 3, "reward": -2},
        {"id": "u", "messages": TWICE, "reward": "1e-1"},
    ]
    options = {"values": ["weight", "reward"]}
    data = source(root, *records, **options)
    if indexed:
        path = build_index(data)
        folders = {"tokenizer": str(root / "tokenizer"), "image_processor": str(root / "clip")}
        data = make_source("conversations", path=str(data.path), **folders, **options)
        assert data.abilities.metas is not None
    assert data.abilities.values == ("weight", "reward")
    assert said(data)[1] == ["a cat </s>", "a dog </s>"]
    values = [{name: value.tolist() for name, value in data.load(i).values.items()} for i in range(2)]
    assert values == [
        {"weight": [1.5] * 3 + [3.0] * 3, "reward": [-2.0] * 6},
        {"weight": [1.0] * 6, "reward": [0.1] * 6},
    ]
    if indexed:
        path.unlink()
    half = [TWICE[0], TWICE[1] | {"train": 0.5}]
    with pytest.raises(SampleError, match=r"turn 1 has {'train': 0.5}: .* `train` true or false"):
        source(root, {"id": "t", "messages": half, "reward": 1}, **options).meta(0)
    for wrong in (None, "much", float("inf")):
        with pytest.raises(
            SampleError, match=r"sample 't': its 'reward', which \[data.options\] values names, must be"
        ):
            source(root, {"id": "t", "messages": TWICE, "reward": wrong}, **options).check_files(0)
