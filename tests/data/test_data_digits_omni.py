"""Digits seen and heard: tones tell the digit, metadata tells the payload, nothing depends on who asks."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from hetmesh.data import DigitsSource, check_meta, check_sample
from hetmesh.data.digits import data_set
from hetmesh.errors import RecipeError

_MODULE = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "digits_omni_data.py"))
BINS, FRAMES, PAIRS = (_MODULE[name] for name in ("BINS", "FRAMES", "PAIRS"))
OmniDigitsSource, recording = _MODULE["OmniDigitsSource"], _MODULE["recording"]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_payloads_are_what_metadata_says(split):
    source = OmniDigitsSource(split)
    kinds = set()
    for index in range(120):
        meta, sample = source.meta(index), source.load(index)
        check_meta(meta)
        check_sample(sample, meta, source.placeholders)
        for wanted in ((), ("image",), ("audio",)):
            part = source.load(index, wanted)
            check_sample(part, meta, source.placeholders, wanted)
            assert set(part.media) <= set(wanted)
            assert torch.equal(part.tokens, sample.tokens)
        assert source.question(index).count("<audio>") == meta.num_items("audio")
        assert source.decode(sample.tokens.tolist()).startswith(source.question(index))
        again = OmniDigitsSource(split).load(index)
        assert all(map(torch.equal, again.media.get("audio", ()), sample.media.get("audio", ())))
        kinds.add(source.kind(index))
    assert {"read images", "read tones", "read both", "add"} <= kinds


def test_without_tones_they_are_the_digits():
    omni, plain = OmniDigitsSource(tones=0.0), DigitsSource()
    for index in range(20):
        a, b = omni.load(index), plain.load(index)
        assert torch.equal(a.tokens, b.tokens)
        assert all(map(torch.equal, a.media.get("image", ()), b.media["image"]))
    with pytest.raises(RecipeError, match=r"tones must be in 0..1, got 2"):
        OmniDigitsSource(tones=2)


def test_tones_tell_the_digit_through_the_noise():
    """The mean of the frames, compared with the mean of other recordings of each digit."""
    draw = np.random.RandomState(0)
    known = np.stack([np.mean([recording(d, draw).mean(1) for _ in range(20)], 0) for d in range(10)])
    right = sum(
        int(np.square(known - recording(d, draw).mean(1)).sum(1).argmin()) == d for d in range(10) for _ in range(20)
    )
    assert right >= 190
    assert recording(3, draw).shape == (BINS, FRAMES)
    assert len(set(PAIRS)) == 10
    assert int(data_set()[1].max()) == 9


@pytest.mark.parametrize("seed", [-1, 2**40, None])
def test_any_seed_makes_recordings_of_its_own(seed):
    """As the questions of any seed do."""
    source, other = OmniDigitsSource(seed=seed, tones=1.0), OmniDigitsSource(tones=1.0)
    index = next(i for i in range(20) if source.meta(i).media)
    assert torch.equal(source.load(index).media["audio"][0], source.load(index).media["audio"][0])
    assert all(not torch.equal(made, source.load(index).media["audio"][0]) for made in first_recordings(other))


def first_recordings(source):
    return [source.load(i).media["audio"][0] for i in range(10) if source.meta(i).media]
