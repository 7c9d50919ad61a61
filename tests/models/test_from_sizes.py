"""Tokens planned from sizes are those that the processor makes of the media."""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.models.split.batching import random_item
from hetmesh.models.split.from_sizes import FromSizes, _is_like
from hetmesh.models.split.processor import clip, processor_at
from support.tiny_processors import save as save_tiny_processor

TAKE_SHAPES = {
    "llava": {"image": True},
    "qwen2_5_vl": {"image": True, "video": True},
    "llava_onevision": {"image": True, "video": True},
    "idefics3": {"image": True},
    "qwen3_vl": {"video": True},  # writes when frames are
    "mistral3": {"image": True},
    "internvl": {"image": True},
    "qwen2_audio": {"audio": False},
    "gemma4": {"image": True},  # pads, though there is but one text
    "minicpmv4_6": {"image": True},  # writes numbers of images
    "molmo2": {"image": False},  # writes a BOS
}
ASK_MORE = {"idefics3"}
"""Of what their tokenizer makes: the token at a character."""
WORDS = st.text(st.sampled_from("ab .,\n\té<>|"), max_size=12)
SIDE = st.integers(20, 400)
SIZES = {
    "image": st.tuples(SIDE, SIDE),
    "video": st.tuples(st.integers(2, 6), st.integers(28, 120), st.integers(28, 120)),
    "audio": st.tuples(st.integers(1600, 40000)),
}


@cache
def from_sizes(name: str) -> FromSizes:
    """Of a tiny directory."""
    with TemporaryDirectory() as folder:
        return FromSizes(processor_at(save_tiny_processor(name, Path(folder)), "key"))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in TAKE_SHAPES.items() for kind in kinds])
@settings(max_examples=10)
@given(data=st.data())
def test_tokens_are_those_of_real_media(name: str, kind: str, data: st.DataObject) -> None:
    planned = from_sizes(name)
    processor = planned.processor
    assert planned.takes_shapes(kind) is TAKE_SHAPES[name][kind]
    assert logging.root.manager.disable == logging.NOTSET
    assert planned.runs_as_one([kind]) is (name not in ASK_MORE)
    sizes = data.draw(st.lists(SIZES[kind], min_size=1, max_size=3 if kind == "image" else 1))
    text = data.draw(WORDS) + "".join(processor.written(kind) + data.draw(WORDS) for _ in sizes)
    if data.draw(st.booleans()) and processor.tokenizer.bos_token:
        text = processor.tokenizer.bos_token + text
    blanks = [processor.blank(kind, size) for size in sizes]
    if kind == "video":
        sizes = [clip(blank.frames, data.draw(st.sampled_from((1.0, 2.0, 7.5)))) for blank in blanks]
        blanks = sizes
    items = {kind: [random_item(blank) for blank in blanks]}
    expected = processor(text, items)
    made = planned(text, {kind: sizes})
    assert (made.given, made.expanded, made.places) == (expected.given, expected.expanded, expected.places)
    assert (made.ids.tolist(), made.offsets.tolist()) == (expected.ids.tolist(), expected.offsets.tolist())
    if (grid := expected.units[kind].get(f"{kind}_grid_thw")) is not None:
        assert made.units[kind][f"{kind}_grid_thw"].tolist() == grid.tolist()
    if planned.runs_as_one([kind]):
        loaded = processor(text, items, runs_as_one=True)
        assert loaded.ids.tolist() == expected.ids.tolist()
        assert loaded.offsets.tolist() == expected.offsets.tolist()
        assert loaded.units[kind].keys() == expected.units[kind].keys()
        assert all(torch.equal(loaded.units[kind][key], tensor) for key, tensor in expected.units[kind].items())


def test_what_lacks_a_tensor_is_not_alike() -> None:
    processor = from_sizes("qwen2_5_vl").processor
    made = processor(processor.written("image"), {"image": [processor.blank("image", (60, 90))]})
    keys = ["image_grid_thw"]
    assert _is_like(made, made, keys)
    assert not _is_like(replace(made, units={}), made, keys)
