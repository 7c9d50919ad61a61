"""Directories with their own processors: what is measured of these, and what is refused because of them."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hetmesh.data.preparation import placed_items
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.split.batching import Batching, Cat, Offset, Pad, _rule, measure, random_item
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.llm_half import HfLlmAdapter
from hetmesh.models.split.made import places_between
from hetmesh.models.split.processor import processor_at
from hetmesh.models.split.units import UnitCalls, taken
from hetmesh.models.weights.pretrained import Pretrained

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    make = importlib.import_module("surveying.processor_forward").tiny_directory
    return lambda *of: (make(*of, tmp_path), tmp_path)[1]


def vision(path, **config):
    pretrained = Pretrained(path, "modules.vision.initial_load_path")
    how = {"media": "image", "consumers": ("llm",), "model": "hf_encoder", "pretrained": pretrained}
    return HfEncoderAdapter.make(AdapterRequest("vision", config=config, **how))


def test_samples_of_several_images_are_padded_though_two_of_alike_tiles_are_joined(directory):
    path = directory("granite_docling", "GraniteDoclingForConditionalGeneration")
    processor = processor_at(path, "a directory")
    assert isinstance(measure(processor, "image").rules["pixel_values"], Pad)
    assert processor.row_tokens["image"] == processor.own.image_token_id


def test_what_is_for_each_token_of_the_llm_is_refused_unless_it_is_made_of_token_ids(directory, monkeypatch):
    path = directory("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration")
    assert vision(path).units is not None
    llm = HfLlmAdapter.make(AdapterRequest("llm", model="hf_llm", pretrained=Pretrained(path, "k")))
    own = processor_at(path, "a directory").own
    tokens = torch.tensor([own.image_token_id, 200, own.video_token_id])
    sample, meta = SimpleNamespace(id="s", tokens=tokens), SampleMeta("s", 3, (), ((2, 3),))
    batch = llm.collate([sample], [meta], placeholders={}, pad_id=200)
    assert batch["moe_mm_token_type_ids"].tolist() == [[1, 0, 2]]
    assert {"activation", "token_sharded", "use_packed"} <= llm.reasons.keys()
    monkeypatch.setattr("hetmesh.models.split.batching.hasattr", lambda *_: False, raising=False)
    with pytest.raises(RecipeError, match="takes moe_mm_token_type_ids of each token, which its processor makes"):
        vision(path)


def test_a_tower_that_reads_no_tensor_of_a_size_of_its_own_takes_what_the_processor_makes(directory):
    adapter = vision(directory("llava_next", "LlavaNextForConditionalGeneration"))
    assert adapter.item is None
    assert set(adapter.units.batchings["image"].rules) == {"pixel_values", "image_sizes"}


def test_a_projector_is_no_module_of_its_own_where_the_model_changes_what_it_gives(directory, monkeypatch):
    from transformers import LlavaModel

    path, own = directory("llava", "LlavaForConditionalGeneration"), LlavaModel.get_image_features
    assert not vision(path, projector=False).projects

    @functools.wraps(own)
    def doubled(*args, **kwargs):
        out = own(*args, **kwargs)
        out.pooler_output = [2 * rows for rows in out.pooler_output]
        return out

    monkeypatch.setattr(LlavaModel, "get_image_features", doubled)
    assert vision(path).projects
    with pytest.raises(RecipeError, match=r"changes what its projector gives, .*; leave \[modules.projector\] out"):
        vision(path, projector=False)


def test_items_of_a_processor_that_expands_texts_its_own_way_are_between_what_is_around_them(processors):
    processor = processor_at(processors("idefics2"), "a directory")
    image, token = processor.blank("image", (60, 90)), processor.written("image")
    text = f"a {token} b {token}c"  # it writes a space before the c
    made = processor(text, {"image": [image, image]})
    assert [text[slice(*place.before)] for place in made.places] == [token, token]
    inside = [made.expanded[slice(*place.after)] for place in made.places]
    assert [part.count(token) for part in inside] == [(made.ids == processor.row_tokens["image"]).sum() // 2] * 2
    placed = placed_items("s", processor, made, ["image", "image"])
    assert sum(item.rows for item in placed) == (made.ids == processor.row_tokens["image"]).sum() > 0
    with pytest.raises(ValueError, match="changes more of the text than what stands for items"):
        places_between(text, made.expanded.replace("b", "B"), {token: "image"})


def test_a_chat_template_may_write_another_token_than_that_of_the_rows(processors):
    processor = processor_at(processors("qianfan_ocr"), "a directory")
    assert processor.written("image") == "<image>" != processor.own.image_token
    made = processor("a <image> b", {"image": [processor.blank("image", (60, 90))]})
    (item,) = placed_items("s", processor, made, ["image"])
    assert item.rows == (made.ids == processor.own.image_token_id).sum() > 0


def test_images_are_one_list_for_all_texts_where_a_list_for_each_is_refused(processors):
    flat, nested = (processor_at(processors(name), "a directory") for name in ("got_ocr2", "llava"))
    assert flat.arguments({"image": [["a", "b"], ["c"]]})["images"] == ["a", "b", "c"]
    assert nested.arguments({"image": [["a", "b"], ["c"]]})["images"] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("family", "key", "rule"),
    [
        ("llava", "pixel_values", Cat(0)),
        ("minicpmv4_6", "pixel_values", Cat(3)),
        ("idefics3", "pixel_values", Pad(0.0)),
        ("molmo2", "image_token_pooling", Offset("pixel_values", 2)),
    ],
)
def test_rules_of_families(processors, family, key, rule):
    """As they are known (the first that holds is taken), and what they make of three samples is what the processor
    makes of these at once."""
    processor = processor_at(processors(family), "a directory")
    batching = measure(processor, "image")
    assert batching.rules[key] == rule
    counts = (2, 1, 1)
    items = [[random_item(processor.blank("image", (40 + 50 * i, 90)))] * n for i, n in enumerate(counts)]
    texts = [processor.written("image") * n for n in counts]
    made = batching.collate([processor(t, {"image": i}).units["image"] for t, i in zip(texts, items, strict=True)])
    both = processor.own(text=texts, padding=True, return_tensors="pt", **processor.arguments({"image": items}))
    for name, tensor in made.items():
        assert torch.equal(tensor, both[name]), name


def test_numbers_that_no_rule_joins_are_refused_and_features_beside_a_mask_are_padded():
    def rule(dtype):
        units = tuple({"x": torch.tensor([[n]], dtype=dtype), "mask": torch.ones(1, 1)} for n in (1, 2))
        return _rule("x", [(torch.tensor([[7], [8]], dtype=dtype), units)], SimpleNamespace(key="k", own=None))

    assert rule(torch.float32) == Pad(0.0)
    with pytest.raises(RecipeError, match="makes 'x' of two samples in a way that hetmesh does not know"):
        rule(torch.int64)


def units(*frames):
    """Of videos whose frames are stacked, a sample each; every one makes a row."""
    samples = [
        SimpleNamespace(id=f"s{i}", units={"video": {"frames": torch.ones(1, count, 2)}}, unit_rows={"video": 1})
        for i, count in enumerate(frames)
    ]
    metas = [SampleMeta(each.id, 3, (MediaItem("video", (), 1, 1, (), ((1, 1),)),)) for each in samples]
    blank = {"frames": torch.ones(1, 4, 2)}
    return UnitCalls({"video": Batching({"frames": Cat(0)}, (blank,), 1)}), samples, metas


def test_units_that_do_not_go_into_one_batch_name_their_samples():
    calls, samples, metas = units(4, 8)
    with pytest.raises(SampleError, match=r"samples \['s0', 's1'\]: .* do not go into one batch .*num_frames"):
        calls.batch(samples, metas, 1)


def test_a_tower_that_makes_other_rows_than_were_planned_is_an_error_and_what_cannot_be_read_are_zeros():
    calls, samples, metas = units(4, 4, 4)
    samples[1].units = {"video": {}}
    batch = calls.batch(samples, metas, 2)
    made = torch.arange(1.0, 5.0)[:, None].expand(4, 3)
    assert taken(made, batch)[:, 0].tolist() == [1, 2, 0, 0, 3, 4]
    assert len(batch["video.frames"]) == 2
    for wrong in (made[:3], torch.cat([made, made[:1]])):
        with pytest.raises(SampleError, match=f"{len(wrong)} rows were made of media, 4 were planned"):
            taken(wrong, batch)


def test_each_item_of_a_text_that_a_processor_expands_in_its_own_way_has_its_own_place():
    text, expanded = "one <i> and <a>, <i>", "one [xx] and {y}, [zzz]"
    places = places_between(text, expanded, {"<i>": "image", "<a>": "audio"})
    assert [(place.kind, expanded[slice(*place.after)]) for place in places] == [
        ("image", "[xx]"),
        ("audio", "{y}"),
        ("image", "[zzz]"),
    ]
    assert [text[slice(*place.before)] for place in places] == ["<i>", "<a>", "<i>"]
