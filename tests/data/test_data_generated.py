"""Media of the assistant's turns that are made: one token each, no targets, files as they are."""

from __future__ import annotations

import io
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hetmesh
from hetmesh.data import check_meta, check_sample, make_source
from hetmesh.data.expand import Expander, expand_tokens
from hetmesh.data.metadata_index import build_index
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.source import abilities_of
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.resolve.media import media_extents
from support.data_forms import write_tar
from support.made_media import MADE, SOUND, VECTOR, add_tokens, write_files

ONE = {"image_out": {"token": MADE, "shape": [3, 8, 8]}}
ALL = {
    **ONE,
    "audio_out": {"token": SOUND, "shape": [1000], "sampling_rate": 1600},
    "tensor_out": {"token": VECTOR, "shape": [2, 3]},
}
SHAPES = {"image_out": (3, 8, 8), "audio_out": (1000,), "tensor_out": (2, 3)}
FORMS = ["by tokenizer", "by processor"]


@pytest.fixture(scope="module")
def root(processors, tmp_path_factory) -> Path:
    """The directory `model`, with a processor and further tokens, and media files."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(processors("qwen2_5_vl"), folder / "model")
    add_tokens(folder / "model")
    write_files(folder)
    return folder


def source(root: Path, form: str, *records: Any, name: str = "data.jsonl", **options: Any) -> Any:
    (root / name).write_text("\n".join(json.dumps(record) for record in records))
    return again(root, form, name, **options)


def again(root: Path, form: str, name: str = "data.jsonl", **options: Any) -> Any:
    given: dict[str, Any] = {"generated": ONE, **options}
    if form == "by processor":
        return make_source("conversations", path=str(root / name), processor=str(root / "model"), **given)
    given.setdefault("placeholders", {})
    return make_source("conversations", path=str(root / name), tokenizer=str(root / "model"), **given)


def talk(*turns: Any, **more: Any) -> dict[str, Any]:
    """Turns of user and assistant in alternation."""
    roles = ("user", "assistant")
    return {"id": "t", "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(turns)], **more}


def part(kind: str, value: str) -> dict[str, str]:
    return {"type": kind, kind: value}


DRAWN = [part("text", "Here: "), part("image", "wide.png"), part("text", " and done.")]


def targets_of(data: Any, index: int = 0) -> list[str]:
    meta, sample = data.meta(index), data.load(index)
    check_meta(meta)
    check_sample(sample, meta, data.placeholders)
    return [data._chat.tokenizer.decode(sample.tokens[a:b]).rstrip("\n") for a, b in meta.targets]


@pytest.mark.parametrize("form", FORMS)
def test_an_image_of_the_assistant_is_an_item_in_its_place(root, form):
    data = source(root, form, talk("draw it", DRAWN, "again", [part("image", "square.png")]))
    meta, sample = data.meta(0), data.load(0)
    assert [(item.name, item.shape, item.rows, item.runs) for item in meta.media] == [
        ("image_out", (3, 8, 8), 1, ())
    ] * 2
    token = data.placeholders["image_out"]
    assert [int(sample.tokens[item.position]) for item in meta.media] == [token, token]
    assert targets_of(data) == ["Here: ", " and done.<|im_end|>", "<|im_end|>"]
    square = np.asarray(Image.open(root / "square.png"), np.float32).transpose(2, 0, 1) / 127.5 - 1
    assert torch.equal(sample.media["image_out"][1], torch.from_numpy(square))
    with Image.open(root / "wide.png") as wide:  # of 20 rows the middle 20 columns
        middle = np.asarray(wide.resize((8, 8), Image.Resampling.BICUBIC, (5, 0, 25, 20)), np.float32)
    assert torch.equal(sample.media["image_out"][0], torch.from_numpy(middle.transpose(2, 0, 1) / 127.5 - 1))
    assert data.load(0, ()).media == {}


def test_what_the_user_gives_is_read_as_before(root):
    asked = [part("image", "wide.png"), part("text", "another one")]
    data = source(root, "by processor", talk(asked, DRAWN, asked, "no"))
    alone = source(root, "by processor", talk(asked, "Here:  and done.", asked, "no"), name="alone.jsonl")
    meta, sample, reads = data.meta(0), data.load(0), alone.load(0)
    assert [item.name for item in meta.media] == ["image", "image_out", "image"]
    assert targets_of(data) == ["Here: ", " and done.<|im_end|>", "no<|im_end|>"]
    for key, values in reads.units["image"].items():
        assert torch.equal(sample.units["image"][key], values)
    assert set(sample.units) == {"image"}
    made = meta.media[1].position
    assert torch.equal(torch.cat([sample.tokens[:made], sample.tokens[made + 1 :]]), reads.tokens)
    assert data.turns(0)[2] == alone.turns(0)[2]  # media that are read
    assert sample.bytes_read == sample.bytes_needed > reads.bytes_read


@pytest.mark.parametrize("form", FORMS)
def test_recordings_and_tensors_are_made_too(root, form):
    said = [part("audio", "sound.wav"), part("tensor", "vector.npy"), *DRAWN]
    data = source(root, form, talk("all", said), generated=ALL)
    meta, sample = data.meta(0), data.load(0, ("audio_out", "tensor_out"))
    assert [item.name for item in meta.media] == ["audio_out", "tensor_out", "image_out"]
    assert {item.name: item.shape for item in meta.media} == SHAPES == abilities_of(data).media_shapes
    (sound,), (vector,) = sample.media["audio_out"], sample.media["tensor_out"]
    assert sound[:700].std() > 0.05
    assert sound[700:].eq(0).all()
    assert torch.equal(vector, torch.from_numpy(np.load(root / "vector.npy")).float())
    assert targets_of(data) == ["Here: ", " and done.<|im_end|>"]


def test_all_forms_of_records_name_what_is_made(root):
    records = [
        {
            "image": "square.png",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<image>"}],
        },
        talk("a", [{"type": "image_url", "image_url": {"url": "square.png"}}]),
        talk("a", [{"type": "image"}], image="square.png"),
    ]
    data = source(root, "by tokenizer", *records)
    write_tar(
        root / "data.tar",
        {"0.json": json.dumps(talk("a", [part("image", "png")])).encode(), "0.png": (root / "square.png").read_bytes()},
    )
    shards = make_source(
        "conversations", path=str(root / "data.tar"), tokenizer=str(root / "model"), placeholders={}, generated=ONE
    )
    items = [*(data.load(i).media["image_out"][0] for i in range(3)), shards.load(0).media["image_out"][0]]
    assert all(torch.equal(item, items[0]) for item in items)


@pytest.mark.parametrize("family", ["llava", "gemma3", "idefics3", "paligemma"])
def test_processors_take_what_is_made_as_text(root, processors, tmp_path, family):
    """PaliGemma's takes the answer apart from the question."""
    folder = shutil.copytree(processors(family), tmp_path / family)
    add_tokens(folder)
    asked = [part("image", "wide.png"), part("text", "another one")]
    (root / "data.jsonl").write_text(json.dumps(talk(asked, DRAWN)))
    data = make_source("conversations", path=str(root / "data.jsonl"), processor=str(folder), generated=ONE)
    meta, sample = data.meta(0), data.load(0)
    assert [item.name for item in meta.media] == ["image", "image_out"]
    assert int(sample.tokens[meta.media[1].position]) == data.placeholders["image_out"]
    assert targets_of(data)[0].strip() == "Here:"
    assert " and done." in targets_of(data)[1]
    assert sample.media["image_out"][0].shape == (3, 8, 8)


def test_a_column_of_a_table_has_what_is_read_and_what_is_made(root):
    import datasets

    files = [{"bytes": (root / name).read_bytes(), "path": None} for name in ("wide.png", "square.png")]
    record = talk([{"type": "image"}, part("text", "again")], [{"type": "image"}])
    datasets.Dataset.from_list([{"images": files, "messages": json.dumps(record["messages"])}]).to_parquet(
        root / "data.parquet"
    )
    named = talk([part("image", "wide.png"), part("text", "again")], [part("image", "square.png")])
    rows, lines = again(root, "by processor", "data.parquet").load(0), source(root, "by processor", named).load(0)
    assert torch.equal(rows.media["image_out"][0], lines.media["image_out"][0])
    assert torch.equal(rows.units["image"]["pixel_values"], lines.units["image"]["pixel_values"])


@pytest.mark.parametrize("form", FORMS)
def test_an_index_a_cut_and_more_tokens_agree_with_the_payload(root, form):
    asked = [part("image", "wide.png"), part("text", "another")] if form == "by processor" else "another"
    data = source(
        root, form, talk("draw", DRAWN, asked, [part("image", "square.png"), part("text", "so")]), talk("a", "b")
    )
    build_index(data)
    try:
        kept = again(root, form)
        assert [kept.meta(i) for i in range(2)] == [data.meta(i) for i in range(2)]
        with pytest.raises(RecipeError, match=r"stale: the options of \[data\] changed"):
            again(root, form, generated=ALL)
    finally:
        data.index_path.unlink()
    whole = data.meta(0)
    sample = data.load(0)
    for seq_len in (None, *range(whole.media[0].position + 1, whole.tokens + 9)):
        expander = Expander({"image": lambda _: 1, "image_out": lambda shape: 5}, seq_len)
        cut = expander.all(MetaArrays.of([whole])).metas.meta(0)
        expanded = expand_tokens(sample, whole, cut, data.placeholders)
        assert len(expanded.tokens) == cut.tokens
        at = {p for item in cut.media for start, n in item.spans for p in range(start, start + n)}
        fixed = torch.tensor(list(data.placeholders.values()))
        assert at == set(torch.isin(expanded.tokens, fixed).nonzero().flatten().tolist())
        assert len(expanded.media.get("image_out", ())) == cut.num_items("image_out")
        for start, stop in cut.targets:
            assert not torch.isin(expanded.tokens[start:stop], fixed).any()
    assert cut.num_items("image_out") == 2


def test_a_mixture_knows_the_shape_of_what_one_source_makes(root):
    reads = source(root, "by tokenizer", *[talk("a", "b")] * 70, name="reads.jsonl", generated=None)
    draws = source(root, "by tokenizer", talk("a", DRAWN), name="draws.jsonl")
    mixture = MixtureSource({"reads": reads, "draws": draws})
    assert mixture.placeholders == draws.placeholders
    assert media_extents(mixture, False) == {"image_out": (3, 8, 8)}
    index = mixture.starts["draws"]
    check_sample(mixture.load(index), mixture.meta(index), mixture.placeholders)
    other = source(
        root, "by tokenizer", talk("a", DRAWN), generated={"image_out": {**ONE["image_out"], "token": SOUND}}
    )
    with pytest.raises(RecipeError, match="'draws' and 'other' must have one vocabulary: placeholder 'image_out' is"):
        MixtureSource({"reads": reads, "draws": draws, "other": other})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"image_in": {}}, r"generated: unknown kind 'image_in'; valid are \['image_out', 'audio_out', 'tensor_out'\]"),
        ({"image": {}}, "generated: unknown kind 'image'"),
        ({"video_out": {}}, "generated: unknown kind 'video_out'"),
        ({"image_out": MADE}, "generated.image_out: must be a table of token, shape, got '<"),
        ({"image_out": {"token": MADE}}, "generated.image_out: must be a table of token, shape"),
        ({"image_out": {"token": MADE, "shape": [8, 8]}}, r"generated.image_out: shape must be \[1 or 3 \(channels\)"),
        ({"image_out": {"token": MADE, "shape": [4, 8, 8]}}, r"generated.image_out: shape must be \[1 or 3"),
        ({"image_out": {"token": MADE, "shape": [3, 8, 0]}}, "generated.image_out: shape must be"),
        ({"tensor_out": {"token": MADE, "shape": []}}, "generated.tensor_out: shape must be one size or more"),
        (
            {"audio_out": {"token": MADE, "shape": [9]}},
            "generated.audio_out: must be a table of token, shape, sampling",
        ),
        ({"image_out": {"token": "<no>", "shape": [3, 8, 8]}}, "generated: '<no>' .for 'image_out'. is not one token"),
        (
            {"image_out": {"token": "<|padding|>", "shape": [3, 8, 8]}},
            r"generated: '<.padding.>' is the tokenizer's pad_token",
        ),
        ({"image_out": {"token": "<|eos|>", "shape": [3, 8, 8]}}, r"generated: .* is the tokenizer's eos_token"),
        (
            {**ONE, "tensor_out": {"token": MADE, "shape": [3]}},
            "generated = .*: each kind of media needs a token of its",
        ),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_options_that_make_no_sense_are_refused(root, form, table, says):
    with pytest.raises(RecipeError, match=r"\[data.options\] " + says):
        source(root, form, talk("a", "b"), generated=table)


def test_a_token_of_what_is_read_is_refused(root):
    table = {"image_out": {"token": "<|image_pad|>", "shape": [3, 8, 8]}}
    with pytest.raises(
        RecipeError, match=r"\[data.options\] generated = .*: each kind of media needs a token of its own"
    ):
        source(root, "by processor", talk("a", "b"), generated=table)


def test_a_token_of_rows_is_refused(root, processors):
    table = {"image_out": {"token": "<|image|>", "shape": [3, 8, 8]}}
    given = {"path": str(root / "data.jsonl"), "processor": str(processors("gemma3"))}
    (root / "data.jsonl").write_text(json.dumps(talk("a", "b")))
    with pytest.raises(RecipeError, match=r"generated.image_out: '<.image.>' stands for media that the model reads"):
        make_source("conversations", **given, generated=table)


def test_the_options_that_the_page_shows(root):
    page = Path(hetmesh.__file__).parent / "data" / "README.md"
    (block,) = re.findall(r"^```toml\n(\[data.options.generated\].*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    generated = tomllib.loads(block)["data"]["options"]["generated"]
    np.save(root / "grasp.npy", np.ones((8, 7), np.float32))
    said = [part("image", "wide.png"), part("audio", "sound.wav"), part("tensor", "grasp.npy")]
    made = source(root, "by processor", talk("all", said), generated=generated).load(0).media
    assert {kind: list(item.shape) for kind, (item,) in made.items()} == {k: t["shape"] for k, t in generated.items()}


def test_without_the_option_media_of_the_assistant_are_refused(root):
    data = source(root, "by tokenizer", talk("a", DRAWN), generated=None)
    with pytest.raises(
        SampleError, match=r"sample 't': it has 'image', but .* generated says what the assistant makes"
    ):
        data.meta(0)
    data = source(root, "by processor", talk("a", DRAWN), generated=None)
    with pytest.raises(SampleError, match=r"sample 't': the chat .* says, which holds media: .* generated"):
        data.meta(0)


def transparent(alpha: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGBA", (8, 8), (9, 9, 9, alpha)).save(buffer, "PNG")
    return buffer.getvalue()


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        ("image", transparent(100), "it is transparent"),
        ("image", b"no image", "it is no image that Pillow knows"),
        ("tensor", npy(np.zeros((3, 2))), r"it has the shape \[3, 2\], not \[2, 3\]"),
        ("tensor", npy(np.full((2, 3), np.nan)), "it has numbers that are not finite"),
        ("tensor", npy(np.array([None] * 3)), "its values are of type object, not numbers"),
        ("tensor", npy(np.zeros((2, 3)))[:-8], r"its header says \[2, 3\], 48 bytes, and there are 40"),
        ("tensor", b"no tensor", "magic string"),
    ],
)
def test_files_that_cannot_be_made_are_refused_by_the_sample(root, tmp_path, kind, data, says):
    (root / "bad.file").write_bytes(data)
    made = source(root, "by tokenizer", talk("a", [part(kind, "bad.file")]), generated=ALL)
    assert made.meta(0).media[0].name == f"{kind}_out"
    with pytest.raises(SampleError, match=rf"sample 't': cannot read .*bad.file: .*{says}"):
        made.load(0)


def test_an_alpha_channel_that_hides_nothing_is_left_out(root):
    (root / "opaque.png").write_bytes(transparent(255))
    assert source(root, "by tokenizer", talk("a", [part("image", "opaque.png")])).load(0).media["image_out"][
        0
    ].shape == (
        3,
        8,
        8,
    )


def test_a_recording_longer_than_the_shape_is_refused(root):
    short = {"audio_out": {"token": SOUND, "shape": [600], "sampling_rate": 1600}}
    data = source(root, "by tokenizer", talk("a", [part("audio", "sound.wav")]), generated=short)
    with pytest.raises(
        SampleError, match=r"sample 't': .*it has 700 samples at 1600 per second, more than the shape's 600"
    ):
        data.load(0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        (talk("a", [part("tensor", "vector.npy")]), {}, "it has 'tensor', but"),
        (talk([part("tensor", "vector.npy")], "b"), {"generated": ALL}, "it has 'tensor', but"),
        (talk("a", f"write {MADE}"), {}, re.escape(f"its text contains {MADE!r}, which stands for media")),
        (talk("a", [part("image", "none.png")]), {}, None),
    ],
)
def test_samples_that_cannot_be_are_refused(root, form, record, options, says):
    data = source(root, form, record, **options)
    with pytest.raises(SampleError, match=f"sample 't': {says or ''}"):
        data.load(0)


def test_turns_that_are_no_targets_make_nothing(root):
    record = talk("a", DRAWN, "b", "c")
    record["messages"][1]["train"] = False
    data = source(root, "by tokenizer", record)
    with pytest.raises(SampleError, match=r"sample 't': turn 1 is no target .*\[data.options\] generated"):
        data.meta(0)


def test_files_of_what_is_made_are_looked_for(root):
    data = source(root, "by processor", talk("a", [part("image", "none.png")]))
    with pytest.raises(SampleError, match=r"sample 't': cannot read .*none.png"):
        data.check_files(0, ("image_out",))
