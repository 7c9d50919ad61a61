"""Captions, questions and turns by the names of columns, in every kind of file; what makes no sample is said."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import tomli
from test_data_conversations import image, root, talk, text  # noqa: F401
from test_data_stores import PICTURES, make, write_tar

from hetmesh.data import check_sample, make_source
from hetmesh.data.find_conversations import find_conversations
from hetmesh.errors import RecipeError, SampleError
from support import data_forms

ADDRESS = "is an address, and nothing is downloaded"
ASKED, SAID = "<s> USER: {} ASSISTANT: a cat </s>", ["a cat </s>"]
ANSWERS = [{"answer": answer, "answer_id": i} for i, answer in enumerate(["a dog", "a cat", "a cat"])]
FORMS = pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", pytest.param("parquet", marks=pytest.mark.slow)])


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """`rows(form, records)`: a file of that form, beside the pictures that records may name."""

    def write(form, records):
        for i, data in enumerate(PICTURES):
            (tmp_path / f"{i}.png").write_bytes(data)
        path = tmp_path / f"rows.{form}"
        if form == "parquet":
            datasets = pytest.importorskip("datasets")
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
            datasets.Dataset.from_list(records).to_parquet(path)
        elif form == "jsonl":
            path.write_text("\n".join(map(json.dumps, records)))
        else:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(records[0]), delimiter={"csv": ",", "tsv": "\t"}[form])
                writer.writeheader()
                writer.writerows(records)
        return path

    return write


def decoded(source, index=0):
    """The words of a sample, those of its targets, and how many images it has."""
    meta, sample = source.meta(index), source.load(index)
    check_sample(sample, meta, source.placeholders)
    words = source._chat.tokenizer.convert_ids_to_tokens(sample.tokens.tolist())
    targets = [" ".join(words[a:b]) for a, b in meta.targets]
    return " ".join(words), targets, len(sample.media.get("image", ()))


@FORMS
@pytest.mark.parametrize(
    ("record", "options", "asked", "left"),
    [
        ({"image": "0.png", "question": "what is", "answer": "a cat", "x": "y"}, {}, "<image> what is", "x"),
        ({"file_name": "0.png", "text": "a cat"}, {}, "<image>", "none"),
        ({"": "0", "image": "0.png", "text": "a cat"}, {}, "<image>", "none"),  # as pandas writes an index
        ({"image": "0.png", "caption": "a cat"}, {"prompt": "what is"}, "<image> what is", "none"),
        ({"image": "0.png", "text": "a cat"}, {"prompt": "what <image> is"}, "what <image> is", "none"),
        (
            {"photo": "0.png", "q": "what <image> is", "a": "a cat", "text": "a dog"},
            {"columns": {"image": "photo", "question": "q", "answer": "a"}},
            "what <image> is",
            "text",
        ),
    ],
)
def test_columns_by_name(root, rows, form, record, options, asked, left):  # noqa: F811
    source = make(root, rows(form, [record, record]), **options)
    assert decoded(source, 1) == (ASKED.format(asked), SAID, 1)
    (note,) = [note for note in source.abilities.notes() if note.startswith("samples are made of the columns image =")]
    assert note.endswith(f"columns that are not read: {left}")


def test_what_is_not_read_beside_turns_is_said(root, rows):  # noqa: F811
    """An image under a name that nobody reads, without a mark in the text, is missed by nobody."""
    turns = [{"from": "human", "value": "what is"}, {"from": "gpt", "value": "a cat"}]
    for record, notes in (
        ({"conversations": turns, "img": "0.png"}, [r"columns messages = 'conversations'; .* not read: img"]),
        ({"conversations": json.dumps(turns), "img": "0.png"}, [r"messages = 'conversations'; .* not read: img"]),
        ({"id": "a", "conversations": turns}, []),
    ):
        source = make(root, rows("jsonl", [record]))
        assert decoded(source, 0)[1] == ["a cat </s>"]
        said = [note for note in source.abilities.notes() if note.startswith("samples are made of")]
        assert len(said) == len(notes)
        assert all(map(re.search, notes, said))


@pytest.mark.slow
def test_the_options_that_the_page_shows(root, rows):  # noqa: F811
    page = (Path(__file__).parents[2] / "src" / "hetmesh" / "data" / "README.md").read_text()
    (block,) = re.findall(r"```toml\n(\[data\.options\].*?)```", page, re.DOTALL)
    options = tomli.loads(block)["data"]["options"]
    record = {"picture": {"bytes": PICTURES[0]}, "question": "what is", "label": "a cat", "reward": 2, "answer": "a"}
    path = rows("parquet", [record])
    (path.parent / "vqa").mkdir()
    path.rename(path.parent / options.pop("path").replace("*", "0"))
    source = make(root, path.parent / "vqa" / "train-0.parquet", **options)
    assert decoded(source) == (ASKED.format("<image> what is"), SAID, 1)
    assert {name: value.tolist() for name, value in source.load(0).values.items()} == {
        "weight": [1.0] * 3,
        "reward": [2.0] * 3,
    }


FOUND = {
    "LLaVA": ("llava.json", "", ""),
    "OpenAI": ("train.jsonl", "", ""),
    "transformers": ("chats.json", "", ""),
    "JSON lines of questions": ("qa.jsonl", "", ""),
    "webdataset": ("shard-000.tar", "", ""),
    "img2dataset": ("0000*.tar", "", ""),
    "the_cauldron": ("train-00000-of-00001.parquet", "", ""),
    "VQA": ("data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet", ""),
    "imagefolder": ("train/metadata.csv", "validation/metadata.csv", ""),
    "TSV": ("pets.tsv", "", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", data_forms.FORMS)
def test_where_a_folder_has_each_form(tmp_path, monkeypatch, form):
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    data_forms.FORMS[form](tmp_path / "data")
    found = find_conversations(str(tmp_path / "data"))
    given = (found.path, found.validation_path, found.media_folder)
    assert tuple(name.removeprefix(f"{tmp_path}/data/") for name in given) == FOUND[form]


def test_images_without_texts_and_tables_of_other_columns_are_said(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(PICTURES[0])
    with pytest.raises(RecipeError, match=r"no conversations in it: .*images need texts: a metadata.csv or .jsonl"):
        find_conversations(str(tmp_path))
    (tmp_path / "rows.csv").write_text("file,title\ncat/0.png,a cat\n")
    with pytest.raises(RecipeError, match=r"rows.csv:0': needs one of messages, texts, .* it has \['file', 'title'\]"):
        find_conversations(str(tmp_path))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (ANSWERS, SAID),
        (["a cat", "a dog", "a cat"], SAID),
        (["a cat", "a dog"], SAID),  # as often: the first
        ({"answer": ["a dog", "a cat", "a cat"], "answer_id": [1, 2, 3]}, SAID),
        ("a cat", SAID),
        ([], None),
        ([{"text": "a cat"}], None),
        (None, None),
    ],
)
def test_the_most_frequent_of_several_answers(root, rows, answers, expected):  # noqa: F811
    source = make(root, rows("jsonl", [{"image": "0.png", "question": "what is this", "answers": answers}]))
    if expected is None:
        with pytest.raises(SampleError, match=r"rows.jsonl:0': a question, answer or caption must be a text, got"):
            source.meta(0)
    else:
        assert decoded(source)[1] == expected


def test_turns_of_the_cauldron_follow_all_of_its_images(root, rows):  # noqa: F811
    texts = [{"user": "what is this", "assistant": "a cat", "source": "pets"}, {"user": "and", "assistant": "a dog"}]
    source = make(root, rows("jsonl", [{"images": ["0.png", "1.png"], "texts": texts}]))
    words = "<s> USER: <image> <image> what is this ASSISTANT: a cat </s> USER: and ASSISTANT: a dog </s>"
    assert decoded(source) == (words, ["a cat </s>", "a dog </s>"], 2)


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"image": "0.png", "text": "a"}, {"columns": {"image": "photo"}}, r"'photo', which is not among \['image', "),
        ({"image": "0.png", "title": "a"}, {}, r"needs one of messages, texts, question \+ answer, text, it has \['im"),
        ({"image": "0.png", "text": ["a", "b"]}, {}, r"must be a text, got \['a', 'b'\]"),
        ({"url": "0.png", "text": "a"}, {}, r"its caption 'text' is of nothing: it has no media, only \['text'"),
        (
            {"image": None, "text": "a"},
            {"prompt": "what is this"},
            r"its caption 'text' is of nothing: it has no media",
        ),
        ({"image": "https://x.org/0.png", "text": "a"}, {}, ADDRESS),
        ({"image": "gone.png", "text": "a"}, {}, r"cannot read .*/gone.png: there is no such file; names start in"),
        ({"image": "0.png", "texts": [{"user": "a"}]}, {}, "KeyError.'assistant'"),
    ],
)
def test_columns_that_make_no_sample_are_said(root, rows, form, record, options, message):  # noqa: F811
    if form == "parquet":
        message = message.replace(ADDRESS, "must be bytes, {bytes, path} or a file's name")
    with pytest.raises((SampleError, RecipeError), match=message):
        make(root, rows(form, [record]), **options).check_files(0)


def test_options_and_files_of_columns_that_are_wrong(root, rows):  # noqa: F811
    path = rows("csv", [{"image": "0.png", "text": "a cat"}])
    with pytest.raises(RecipeError, match=r"\[data.options\] columns: unknown \['images'\]; valid are \['id', 'image'"):
        make(root, path, columns={"images": "image"})
    for wrong in ("image,image\n0.png,a\n", "image,text\n0.png\n", "image,text\n0.png,a,b\n"):
        path.write_text(wrong)
        with pytest.raises(RecipeError, match=r"rows.csv': cannot be read as .csv of UTF-8: each row must have one"):
            make(root, path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.jsonl.zst"])
def test_compressed_files_are_to_be_unpacked(root, name):  # noqa: F811
    (root / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(RecipeError, match=rf"path = '.*{name}': {Path(name).suffix} is compressed; unpack it"):
        make(root, root / name)


def test_a_hub_id_says_how_to_get_it(root):  # noqa: F811
    with pytest.raises(RecipeError) as caught:
        make_source("conversations", path="HuggingFaceM4/the_cauldron", tokenizer="Qwen/Qwen2.5-VL-3B-Instruct")
    assert "hf download HuggingFaceM4/the_cauldron --repo-type dataset --local-dir the_cauldron" in str(caught.value)
    assert "hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir Qwen2.5-VL-3B-Instruct" in str(caught.value)
    with pytest.raises(RecipeError, match=r"there is no such file$"):
        make(root, "data/pets.json")


@pytest.mark.parametrize(
    ("members", "options", "asked", "left"),
    [
        ({"json": {"caption": "a dog", "width": 3}, "txt": "a cat"}, {}, "<image>", []),
        ({"json": {"caption": "a cat", "width": 3}}, {}, "<image>", []),
        ({"json": {"caption": "a cat"}, "txt": "a dog"}, {"columns": {"text": "caption"}}, "<image>", ["txt"]),
        ({"json": {"question": "what", "answer": "a cat"}, "txt": "a dog"}, {}, "<image> what", ["txt"]),
        ({"json": talk([image("jpg"), text("what")], "a cat"), "txt": "a dog"}, {}, "<image> what", ["txt"]),
    ],
)
def test_what_of_a_shard_is_the_caption(root, tmp_path, members, options, asked, left):  # noqa: F811
    stored = {f"x.{key}": (v if key == "txt" else json.dumps(v)).encode() for key, v in members.items()}
    source = make(root, write_tar(tmp_path / "x.tar", [{"x.jpg": PICTURES[0], **stored}]), **options)
    assert decoded(source) == (ASKED.format(asked), SAID, 1)
    assert source.check_files(0) == left
    sample = source.load(0)
    assert sample.bytes_read == sample.bytes_needed > len(PICTURES[0])


@pytest.mark.parametrize(
    ("record", "columns", "asked", "left"),
    [
        ({"image": "b.jpg", "caption": "a cat"}, {}, "<image>", ["a.jpg"]),
        ({"talk": talk("what", "a cat")["messages"]}, {"messages": "talk"}, "what", ["a.jpg", "b.jpg"]),
    ],
)
def test_a_record_of_a_shard_says_which_of_its_images_it_wants(root, tmp_path, record, columns, asked, left):  # noqa: F811
    members = {"x.a.jpg": PICTURES[0], "x.b.jpg": PICTURES[1], "x.json": json.dumps(record).encode()}
    source = make(root, write_tar(tmp_path / "x.tar", [members]), columns=columns)
    assert decoded(source) == (ASKED.format(asked), SAID, 2 - len(left))
    assert source.check_files(0) == left


def test_a_prompt_asks_for_texts_without_media(root, rows):  # noqa: F811
    source = make(root, rows("jsonl", [{"text": "a cat"}]), prompt="what is")
    assert decoded(source) == (ASKED.format("what is"), SAID, 0)


@pytest.mark.slow
def test_marks_calls_and_nulls_of_a_table(root, rows):  # noqa: F811
    """A table gives every object all keys that one of them has; media of a text with marks lie in a column."""
    template = (
        "{% for t in tools %}{{ t.a.keys() | join(' ') }} {% endfor %}{% for m in messages %}{{ m.role }} "
        "{{ m.content }} {% for c in m.tool_calls %}{{ c.function.arguments.keys() | join(' ') }} {% endfor %}</s> "
        "{% endfor %}"
    )
    asked, said = {"role": "user", "content": "<image> what"}, {"role": "assistant", "content": "a"}

    def call(**arguments):
        return [asked, said | {"tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}]

    records = [
        {"messages": call(cat=1), "images": PICTURES[:1], "tools": [{"a": {"is": 1}}], "weight": 1.0},
        {"messages": call(dog=1), "images": PICTURES[1:2], "tools": [{"a": {"this": 1}}], "weight": 0.5},
    ]
    path = rows("parquet", records)
    source = make(root, path, chat_template=template, values=["weight"])
    words = "{} user <image> what </s> assistant a {} </s>"
    assert [decoded(source, i)[0] for i in range(2)] == [words.format("is", "cat"), words.format("this", "dog")]
    assert source.load(1).values["weight"].tolist() == [0.5] * source.meta(1).num_targets
    with pytest.raises(SampleError, match=r"'weight' = 0\.5 beside its turns"):
        make(root, path, chat_template=template).meta(1)
