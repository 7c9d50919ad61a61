"""The synthetic source: well-formed samples of realistic sizes, the same everywhere."""

import pytest
import torch

from hetmesh.data import SyntheticSource, check_meta, check_sample, make_source
from hetmesh.errors import RecipeError
from hetmesh.models.split.processor import processor_at

SMALL = {"image_shape": (3, 8, 8), "vocab_size": 50, "image_token": 7, "text_tokens": (3, 40)}


def test_metadata_and_payloads_agree():
    source = make_source("synthetic", **SMALL)
    seen = set()
    for index in range(60):
        meta = source.meta(index)
        check_meta(meta)
        sample = source.load(index)
        check_sample(sample, meta, source.placeholders)
        assert 3 <= meta.tokens - len(meta.media) <= 40
        assert meta.num_targets >= 1
        low, high = sample.tokens.aminmax()
        assert 0 < low <= high < 50
        seen.add(len(meta.media))
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_a_directorys_processor_prepares_its_images(processors):
    directory = processors("qwen2_5_vl")
    options = {**SMALL, "vocab_size": 512, "image_shape": (3, 64, 96), "processor": str(directory), "max_images": 2}
    source = make_source("synthetic", **options)
    assert source.placeholders == {"image": processor_at(directory, "").row_tokens["image"]}
    seen = set()
    for index in range(20):
        meta, sample = source.meta(index), source.load(index)
        check_meta(meta)
        check_sample(sample, meta, source.placeholders)
        rows = [i for item in meta.media for start, n in item.runs for i in range(start, start + n)]
        assert (sample.tokens == source.placeholders["image"]).nonzero().flatten().tolist() == rows
        assert sample.unit_rows.get("image", 0) == len(rows)
        assert not source.load(index, kinds=()).units
        seen.add(len(meta.media))
    assert seen == {0, 1, 2}


def test_samples_depend_on_seed_and_index_only():
    one, two, other = (SyntheticSource(**SMALL, seed=seed) for seed in (0, 0, 1))
    assert one.meta(5) == two.meta(5) != other.meta(5)
    assert torch.equal(one.load(5).tokens, two.load(5).tokens)
    with pytest.raises(IndexError):
        one.meta(len(one))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_shape": (3, 8)}, "image_shape: must be channels, height and width"),
        ({"text_tokens": (9, 4)}, "text_tokens: must be the shortest"),
        ({"text_only": 2}, r"text_only: must be in 0\.\.1, got 2"),
        ({"max_images": -1}, "max_images: must be at least 0, got -1"),
        ({"length": 0}, "length: must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(RecipeError, match=message):
        make_source("synthetic", **options)
