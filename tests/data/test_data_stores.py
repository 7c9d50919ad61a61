"""Stores and the index: the same conversations from JSON, tar shards and tables; what is broken is said."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_data_conversations import CLIP, image, root, talk, text  # noqa: F401

from hetmesh.cli import main
from hetmesh.data import check_sample, make_source
from hetmesh.data.metadata_index import build_index
from hetmesh.data.source import metas_of
from hetmesh.data.stores.store import FileSpan
from hetmesh.data.synthetic import SyntheticSource
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import MetaArrays


def jpeg(side: int, name: str = "") -> bytes:
    buffer = io.BytesIO()
    draw = np.random.default_rng(side)
    Image.fromarray(draw.integers(0, 256, (side, side + 3, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = [jpeg(20), jpeg(9), jpeg(14)]
TALKS = [
    talk([image("jpg"), text("what is this")], "a cat", id="one"),
    talk("what", "a dog", id="two"),
    talk([image("left.png"), text("and"), image("right.png")], "a cat", id="three"),
]
MEMBERS = [
    {"one.json": json.dumps(TALKS[0]).encode(), "one.jpg": PICTURES[0]},
    {"two.json": json.dumps(TALKS[1]).encode()},
    {"three.json": json.dumps(TALKS[2]).encode(), "three.left.png": PICTURES[1], "three.right.png": PICTURES[2]},
    {"four.txt": b"a dog", "four.png": PICTURES[2]},
]


def write_tar(path: Path, samples) -> Path:
    with tarfile.open(path, "w") as archive:
        for members in samples:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def make(root: Path, path, processor: Path | None = None, **more):  # noqa: F811
    options = {"tokenizer": str(root / "tokenizer"), "image_processor": str(processor or root / "clip")}
    return make_source("conversations", path=str(path), **options, **more)


@pytest.fixture
def any_size(tmp_path) -> Path:
    """A processor whose results are as large as their images."""
    folder = tmp_path / "any"
    folder.mkdir()
    (folder / "preprocessor_config.json").write_text(json.dumps({**CLIP, "do_resize": False, "do_center_crop": False}))
    return folder


def contents(source):
    found = []
    for index in range(len(source)):
        meta, sample = source.meta(index), source.load(index)
        check_sample(sample, meta, source.placeholders)
        assert 0 < sample.bytes_read == sample.bytes_needed
        found.append((meta, sample.tokens.tolist(), [torch.clone(i) for i in sample.media.get("image", ())]))
    return found


def equal(a, b):
    return all(
        x[0].media == y[0].media and x[1] == y[1] and all(map(torch.equal, x[2], y[2]))
        for x, y in zip(a, b, strict=True)
    )


def test_one_set_of_conversations_from_every_kind_of_file(root, tmp_path, any_size):  # noqa: F811
    shards = [write_tar(tmp_path / f"shard-{i}.tar", part) for i, part in enumerate((MEMBERS[:2], MEMBERS[2:3]))]
    expected = contents(make(root, tmp_path / "shard-*.tar", any_size))
    assert [meta.id for meta, _, _ in expected] == ["one", "two", "three"]
    assert [len(images) for _, _, images in expected] == [1, 0, 2]
    assert make(root, shards[0], any_size).load(0).bytes_read == sum(map(len, MEMBERS[0].values()))

    for members in MEMBERS[:3]:
        for name, data in members.items():
            (tmp_path / name.replace("one.jpg", "jpg").removeprefix("three.")).write_bytes(data)
    (tmp_path / "list.json").write_text(json.dumps(TALKS))
    assert equal(contents(make(root, tmp_path / "list.json", any_size)), expected)

    llava = [
        {"id": "one", "image": "jpg", "conversations": [("human", "<image>what is this"), ("gpt", "a cat")]},
        {"id": "two", "conversations": [("human", "what"), ("gpt", "a dog")]},
        {
            "id": 3,
            "image": ["left.png", "right.png"],
            "conversations": [("human", "<image>and<image>"), ("gpt", "a cat")],
        },
    ]
    for each in llava:
        each["conversations"] = [{"from": who, "value": said} for who, said in each["conversations"]]
    (tmp_path / "llava.json").write_text(json.dumps(llava))
    assert equal(contents(make(root, tmp_path / "llava.json", any_size)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "arrow", "folder"])
def test_tables_hold_the_same_conversations(root, tmp_path, any_size, form, monkeypatch):  # noqa: F811
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    expected = contents(make(root, write_tar(tmp_path / "a.tar", MEMBERS[:3]), any_size))
    bare = [json.loads(json.dumps(each)) for each in TALKS]
    for each in bare:
        for turn in each["messages"]:
            if isinstance(turn["content"], str):
                turn["content"] = [text(turn["content"])]
            for part in turn["content"]:
                part.pop("image", None)
    rows = [{"id": t["id"], "messages": t["messages"], "images": []} for t in bare]
    rows[0]["images"], rows[2]["images"] = PICTURES[:1], PICTURES[1:]
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / ("saved" if form == "folder" else f"table.{form}")
    if form == "parquet":
        named = tmp_path / "names.parquet"
        datasets.Dataset.from_list([{"messages": bare[0]["messages"], "images": ["a.png"]}]).to_parquet(named)
        with pytest.raises(SampleError, match=r"cannot read .*/a\.png: there is no such file; names start"):
            make(root, named, any_size).meta(0)
        spare = tmp_path / "spare.parquet"
        datasets.Dataset.from_list([{"messages": bare[0]["messages"], "images": PICTURES[:2]}]).to_parquet(spare)
        with pytest.raises(SampleError, match="its row holds 2 of 'image' and its conversation has a place for 1"):
            make(root, spare, any_size).meta(0)
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
    if form == "arrow":
        path = next((tmp_path / "saved").glob("*.arrow"))
    assert equal(contents(make(root, path, any_size)), expected)


def test_a_caption_beside_an_image_is_what_the_assistant_says(root, tmp_path):  # noqa: F811
    source = make(root, write_tar(tmp_path / "captions.tar", MEMBERS[3:]))
    meta, sample = source.meta(0), source.load(0)
    check_sample(sample, meta, source.placeholders)
    words = source._chat.tokenizer.convert_ids_to_tokens(sample.tokens.tolist())
    assert meta.id == "four.txt:0" or meta.id == "four"
    assert [" ".join(words[a:b]) for a, b in meta.targets] == ["a dog </s>"]


@pytest.mark.parametrize("keep", [0.1, 0.55, 0.8])
def test_a_truncated_shard_makes_its_last_sample_unreadable(root, tmp_path, keep):  # noqa: F811
    path = write_tar(tmp_path / "cut.tar", [{f"{i}.txt": b"a dog", f"{i}.png": PICTURES[2]} for i in range(8)])
    whole = len(make(root, path))
    used = whole * (2 * 512 + 512 + -(-len(PICTURES[2]) // 512) * 512)
    path.write_bytes(path.read_bytes()[: int(used * keep)])
    source = make(root, path)
    assert len(source) <= whole
    for i in range(len(source) - 1):
        assert source.load(i).media["image"]
    with pytest.raises(SampleError, match=r"sample '\d': .*cut.tar is cut off"):
        source.meta(len(source) - 1)


def test_files_that_are_missing_or_empty_are_errors(root, tmp_path):  # noqa: F811
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.tar").write_bytes(b"\0" * 10240)
    (tmp_path / "no.tar").write_bytes(b"nothing")
    (tmp_path / "bad.json").write_text("[{")
    for name, message in (
        ("gone.jsonl", r"\[data.options\] path = '.*gone.jsonl': there is no such file"),
        ("gone-*.tar", "there is no such file"),
        ("empty.jsonl", "the source is empty"),
        ("empty.tar", "hold no samples"),
        ("no.tar", "no.tar is no tar shard"),
        ("bad.json", "begins as a JSON list, but is none"),
    ):
        with pytest.raises(RecipeError, match=message):
            make(root, tmp_path / name)
    source = make(root, write_tar(tmp_path / "a.tar", [{"x.png": PICTURES[0]}]))
    with pytest.raises(SampleError, match=r"'x' of .*a\.tar: it has no \.json and no \.txt"):
        source.meta(0)
    source = make(root, write_tar(tmp_path / "twice.tar", [MEMBERS[1], MEMBERS[1]]))
    with pytest.raises(SampleError, match=r"'two' of .*twice\.tar: it has two members of one extension"):
        source.meta(0)


def test_an_index_knows_everything_without_a_file_and_is_stale_when_they_change(root, tmp_path, any_size):  # noqa: F811
    paths = [write_tar(tmp_path / f"s-{i}.tar", part) for i, part in enumerate((MEMBERS[:2], MEMBERS[2:]))]
    plain = make(root, tmp_path / "s-*.tar", any_size)
    path = build_index(plain)
    assert path.parent == tmp_path
    indexed = make(root, tmp_path / "s-*.tar", any_size)
    hidden = [(each, tmp_path / f"hidden-{each.name}") for each in paths]
    for each, other in hidden:
        each.rename(other)
    assert [indexed.meta(i) for i in range(4)] == [MetaArrays.meta(metas_of(indexed, range(4)), i) for i in range(4)]
    for each, other in hidden:
        other.rename(each)
    assert [indexed.meta(i) for i in range(4)] == [plain.meta(i) for i in range(4)]
    assert equal(contents(indexed), contents(plain))

    state = paths[0].stat()
    os.utime(paths[0], ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    with pytest.raises(
        RecipeError, match=r"is stale: the files of the data changed since it was made; .*hetmesh index"
    ):
        make(root, tmp_path / "s-*.tar", any_size)
    os.utime(paths[0], ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(RecipeError, match="is stale: the options of"):
        make(root, tmp_path / "s-*.tar", any_size, pad_to_square=True)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(RecipeError, match="is damaged"):
        make(root, tmp_path / "s-*.tar", any_size)


def test_hetmesh_index_makes_one_and_says_what_cannot_be_read(root, tmp_path, capsys):  # noqa: F811
    write_tar(tmp_path / "s.tar", [*MEMBERS, {"x.png": PICTURES[0]}])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
        [modules.llm]
        model = "qwen3"
        [data]
        source = "conversations"
        [data.options]
        path = "{tmp_path}/s.tar"
        tokenizer = "{root}/tokenizer"
        image_processor = "{root}/clip"
    """)
    assert main(["index", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "s.tar.hetmesh-index.npz: 5 samples, " in out
    assert ", 4 image" in out
    assert "cannot be read: sample 'x'" in out
    with pytest.raises(SampleError, match="sample 'x'"):
        make(root, tmp_path / "s.tar").meta(4)
    assert main(["index", str(recipe), "--data.source", "digits"]) == 2
    assert "keeps no index" in capsys.readouterr().err


def test_arrays_say_what_single_metadata_say():
    source = SyntheticSource(length=200)
    arrays = metas_of(source, range(200))
    metas = [source.meta(i) for i in range(200)]
    assert [arrays.meta(i) for i in range(200)] == metas
    assert arrays.num_targets.tolist() == [meta.num_targets for meta in metas]
    assert arrays.counts("image").tolist() == [meta.num_items("image") for meta in metas]
    assert not arrays.counts("audio").any()
    some = [7, 3, 3, 199]
    assert [arrays.take(some).meta(i) for i in range(4)] == [metas[i] for i in some]


def test_a_span_reads_no_byte_beside_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    span = FileSpan(path, 10, 20)
    assert span.read() == bytes(range(10, 30))
    with span.open() as file:
        assert file.read() == bytes(range(10, 30))
        file.seek(-3, io.SEEK_END)
        assert file.read(9) == bytes([27, 28, 29])
    with pytest.raises(OSError, match="ends after 100 bytes, need 120"):
        FileSpan(path, 90, 30).read()


def test_a_span_is_whole_where_the_file_system_gives_less_at_a_time(tmp_path, monkeypatch):
    """As Linux does of more than 2 GiB, and a network's file system of less."""

    class Few(io.FileIO):
        def read(self, size=-1):
            return super().read(min(size, 7))

    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    monkeypatch.setattr(Path, "open", lambda self, mode, buffering: Few(self, mode))
    assert FileSpan(path, 10, 20).read() == bytes(range(10, 30))


def converted(data: bytes, form: str) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["x.gif"], "GIF"),
        (["x.bmp"], "BMP"),
        (["x.tiff"], "TIFF"),
        (["x.TIF"], "TIFF"),
        (["x.seg.png"], "PNG"),
        (["x.0.png", "x.1.png"], "PNG"),
        (["x.png", "x.x.png"], "PNG"),
    ],
)
def test_every_image_beside_a_caption_is_read(root, tmp_path, names, form):  # noqa: F811
    images = {name: converted(PICTURES[i], form) for i, name in enumerate(names)}
    source = make(root, write_tar(tmp_path / "x.tar", [{"x.txt": b"a dog", **images}]))
    meta, sample = source.meta(0), source.load(0)
    check_sample(sample, meta, source.placeholders)
    assert meta.num_items("image") == len({item.flatten()[0].item() for item in sample.media["image"]}) == len(names)
    assert source.check_files(0) == []


def test_a_caption_of_a_video_is_refused_where_the_model_takes_none(root, tmp_path):  # noqa: F811
    source = make(root, write_tar(tmp_path / "x.tar", [{"x.mp4": b"ftyp", "x.txt": b"a dog"}]))
    for ask in (source.check_files, source.meta, source.load):
        with pytest.raises(
            SampleError, match=r"sample 'x': it has 'video', but \[data.options\] placeholders has no token"
        ):
            ask(0)


def test_a_caption_of_nothing_that_is_read_is_refused(root, tmp_path):  # noqa: F811
    source = make(root, write_tar(tmp_path / "x.tar", [{"x.jfif": PICTURES[0], "x.txt": b"a dog"}, {"y.txt": b"a"}]))
    with pytest.raises(SampleError, match=r"sample 'x' of .*: it has only 'x\.jfif' beside its text; media may"):
        source.meta(0)
    for prompt in ("", "what is this"):
        alone = make(root, tmp_path / "x.tar", prompt=prompt)
        with pytest.raises(SampleError, match=r"sample 'y' of .*: its caption 'text' is of nothing: it has no media"):
            alone.check_files(1)


def test_members_that_nobody_reads_are_said_of_each_sample(root, tmp_path):  # noqa: F811
    caption = {"x.txt": b"a dog", "x.png": PICTURES[0], "x.cls": b"7"}
    record = {"y.json": json.dumps(TALKS[1]).encode(), "y.jpg": PICTURES[0]}
    source = make(root, write_tar(tmp_path / "x.tar", [caption, record, MEMBERS[2]]))
    assert [source.check_files(i) for i in range(3)] == [["cls"], ["jpg"], []]
