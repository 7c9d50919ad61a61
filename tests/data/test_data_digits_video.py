"""Digits in clips: answers are what the frames show, metadata tells the payload, nothing depends on who asks."""

import runpy
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

from hetmesh.data import check_meta, check_sample
from hetmesh.data.digits import NOISE, data_set, images_of
from hetmesh.errors import RecipeError

_MODULE = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "digits_video_data.py"))
BLANK, KINDS, VideoDigitsSource = (_MODULE[name] for name in ("BLANK", "KINDS", "VideoDigitsSource"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_answers_are_what_the_frames_show(split):
    source = VideoDigitsSource(split)
    asked, lengths = set(), set()
    for index in range(200):
        meta, sample, question = source.meta(index), source.load(index), source.ask(index)
        check_meta(meta)
        check_sample(sample, meta, source.placeholders)
        assert torch.equal(source.load(index, ()).tokens, sample.tokens)
        assert not source.load(index, ()).media
        assert set(question.images) <= {BLANK, *images_of(split)}
        digits = "".join(str(data_set()[1][image]) for image, _ in groupby(question.images) if image != BLANK)
        kind = source.kind(index)
        assert (
            source.answer(index)
            == {
                "count": str(len(digits)),
                "first": digits[0],
                "last": digits[-1],
                "order": digits,
            }[kind]
        )
        assert source.decode(sample.tokens.tolist()) == source.question(index) + source.answer(index)
        (clip,) = sample.media["video"]
        shown = np.stack([np.zeros((8, 8)) if i == BLANK else data_set()[0][i] for i in question.images])
        noise = np.abs(clip[:, 0].numpy() * 8 + 8 - shown).max(axis=(1, 2))
        assert ((noise > 0) & (noise <= NOISE + 1e-5)).all() if split == "train" else not noise.any()
        assert torch.equal(VideoDigitsSource(split).load(index).media["video"][0], clip)
        asked.add(kind)
        lengths.add(len(clip))
    assert (asked, lengths) == (set(KINDS), set(range(4, 17)))


def test_the_questions_never_change_between_versions():
    source = VideoDigitsSource()
    assert [(source.question(i), source.answer(i), len(source.ask(i).images)) for i in range(4)] == FIRST
    assert [VideoDigitsSource(seed=1).ask(i) for i in range(9)] != [source.ask(i) for i in range(9)]


FIRST = [
    ("first <video>=", "9", 6),
    ("count <video>=", "5", 16),
    ("count <video>=", "4", 8),
    ("first <video>=", "5", 11),
]


def test_with_a_tail_long_clips_are_rare():
    lengths = [len(VideoDigitsSource(max_frames=64, tail=1.0).ask(i).images) for i in range(1000)]
    assert min(lengths) == 4
    assert 16 < max(lengths) <= 64
    assert np.median(lengths) <= 6


def test_what_no_clip_can_have_is_refused():
    for options, reason in (({"max_frames": 3}, "max_frames must be at least 4, got 3"), ({"split": "x"}, "no split")):
        with pytest.raises(RecipeError, match=reason):
            VideoDigitsSource(**options)
    with pytest.raises(IndexError, match="index 384 is not in"):
        VideoDigitsSource("validation").ask(384)
