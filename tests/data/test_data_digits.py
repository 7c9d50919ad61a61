"""The digits source: deterministic, answers are right, nothing of the validation split is ever trained on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.data import DigitsSource, check_meta, check_sample
from hetmesh.data.digits import (
    DRAWING_VOCABULARY,
    END,
    KINDS,
    NOISE,
    VOCABULARY,
    WEIGHTS,
    WORDS,
    _additions,
    data_set,
    images_of,
    read_by_judge,
    text_art,
)
from hetmesh.errors import RecipeError, SampleError

TRAIN, VALIDATION = DigitsSource("train"), DigitsSource("validation")
DRAWING = {split: DigitsSource(split, draw=0.5) for split in ("train", "validation")}
SOME = range(2000)


def test_the_images_are_the_data_set():
    images, labels = data_set()
    assert (images.shape, images.dtype, images.max()) == ((1797, 8, 8), np.uint8, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_splits_share_no_image_and_no_addition():
    assert not set(images_of("train")) & set(images_of("validation"))
    assert len(images_of("train")) + len(images_of("validation")) == 1797
    assert set(data_set()[1][list(images_of("validation"))]) == set(range(10))
    assert not set(_additions("train")) & set(_additions("validation"))
    assert len(_additions("train")) + len(_additions("validation")) == 400
    for source, split in ((TRAIN, "train"), (DigitsSource("train", 7), "train"), (VALIDATION, "validation")):
        shown = {i for index in range(384) for i in source.ask(index).images}
        assert shown <= set(images_of(split))


def test_questions_are_a_pure_function_of_seed_split_and_index():
    again = DigitsSource("train")
    assert [again.ask(i) for i in reversed(range(50))][::-1] == [TRAIN.ask(i) for i in range(50)]
    assert torch.equal(again.load(3).tokens, TRAIN.load(3).tokens)
    for a, b in zip(again.load(0).media["image"], TRAIN.load(0).media["image"], strict=True):
        assert torch.equal(a, b)
    others = [DigitsSource("train", 1), VALIDATION]
    assert all([o.ask(i) for i in range(50)] != [TRAIN.ask(i) for i in range(50)] for o in others)


def test_the_questions_never_change_between_versions():
    assert [(TRAIN.question(i), TRAIN.answer(i)) for i in range(4)] == FIRST


FIRST = [
    ("read <image><image><image>=", "002"),
    ("read <image><image><image>=", "014"),
    ("add 7+14=", "21"),
    ("add 15+3=", "18"),
]


@given(st.sampled_from([TRAIN, VALIDATION]), st.data())
def test_metadata_payload_and_answer_agree(source, data):
    index = data.draw(st.integers(0, len(source) - 1))
    meta, sample, question = source.meta(index), source.load(index), source.ask(index)
    check_meta(meta)
    check_sample(sample, meta, source.placeholders)
    ((start, stop),) = meta.targets
    assert stop == meta.tokens
    assert sample.tokens[-1] == END
    assert source.decode(sample.tokens[start:].tolist()) == source.answer(index)
    assert source.decode(sample.tokens.tolist()) == source.question(index) + source.answer(index)
    digits = [int(data_set()[1][i]) for i in question.images]
    right = {
        "read": lambda: "".join(map(str, digits)),
        "sum": lambda: str(sum(digits)),
        "add": lambda: str(sum(map(int, question.text.removeprefix("add ").rstrip("=").split("+")))),
    }
    assert question.answer == right[source.kind(index)]()
    for image, i in zip(sample.media["image"], question.images, strict=True):
        assert image.dtype == torch.float32
        noise = image[0] * 8 + 8 - torch.from_numpy(data_set()[0][i])
        assert (0 < noise.abs().max() <= NOISE + 1e-5) if source is TRAIN else not noise.any()


def test_samples_vary_in_every_modality():
    kinds = [TRAIN.kind(i) for i in SOME]
    for kind, weight in zip(KINDS, WEIGHTS, strict=True):
        assert kinds.count(kind) / len(kinds) == pytest.approx(weight, abs=0.04)
    assert {len(TRAIN.meta(i).media) for i in SOME} == set(range(7))
    assert {VALIDATION.kind(i) for i in range(len(VALIDATION))} == set(KINDS)
    assert len(VALIDATION) >= 300
    assert len({VALIDATION.meta(i).id for i in range(len(VALIDATION))}) == len(VALIDATION)


def test_decode_stops_at_the_end_and_shows_unknown_tokens():
    assert TRAIN.decode([VOCABULARY.index("4"), 99, END, 3]) == "4<99?>"
    assert TRAIN.decode([]) == ""


def test_pictures_stand_side_by_side():
    levels = np.array([[[0, 2, 4], [16, 8, 6]], [[16, 16, 0], [0, 0, 10]]], np.uint8)
    assert text_art(levels).splitlines() == ["  ..::  @@@@  ", "@@==--      ++"]
    index = next(i for i in SOME if len(TRAIN.ask(i).images) == 3)
    assert [len(line) for line in TRAIN.picture(index).splitlines()] == [3 * 16 + 2 * 2] * 8
    assert TRAIN.picture(next(i for i in SOME if TRAIN.kind(i) == "add")) == ""


@pytest.mark.parametrize("split", DRAWING)
def test_a_drawing_is_a_request_and_a_real_digit_of_its_split(split):
    source, labels = DRAWING[split], data_set()[1]
    drawings = [i for i in range(384) if source.kind(i) == "draw"]
    assert len(drawings) / 384 == pytest.approx(0.5, abs=0.06)
    for index in drawings:
        meta, sample = source.meta(index), source.load(index)
        check_meta(meta)
        check_sample(sample, meta, source.placeholders)
        assert "image_out" not in source.load(index, ("image",)).media
        ((image,), (item,)) = source.ask(index).drawn, sample.media["image_out"]
        assert image in images_of(split)
        assert torch.equal(item[0] * 8 + 8, torch.from_numpy(data_set()[0][image]).float())
        assert source.decode(sample.tokens.tolist()).split() == [
            "draw",
            "an" if labels[image] == 8 else "a",
            f"{WORDS[labels[image]]}=<image_out>",
        ]
        assert (meta.targets, meta.media[0].position) == ((), meta.tokens - 1)
    assert {int(labels[source.ask(i).drawn[0]]) for i in drawings} == set(range(10))


def test_drawings_change_no_token_of_what_is_there():
    """Nor is there any of them without the option."""
    assert DRAWING_VOCABULARY[: len(VOCABULARY)] == VOCABULARY
    assert (TRAIN.vocab_size, dict(TRAIN.placeholders)) == (len(VOCABULARY), {"image": 2})
    assert set(DRAWING_VOCABULARY) >= set("".join(WORDS))
    questions = [i for i in SOME if DRAWING["train"].kind(i) != "draw"]
    assert {DRAWING["train"].kind(i) for i in questions} == set(KINDS)
    for source in (DRAWING["train"], TRAIN):
        for index in questions[:200]:
            assert max(source.load(index).tokens.tolist()) < len(VOCABULARY)


def test_a_drawing_is_asked_for_in_the_words_of_the_source():
    source = DRAWING["validation"]
    meta, sample = source.prompt("draw a seven", ())
    check_meta(meta)
    check_sample(sample, meta, source.placeholders)
    assert source.decode(sample.tokens.tolist()) == "draw a seven=<image_out>"
    with pytest.raises(SampleError, match=r"'draw a cat' is no drawing that it knows; valid are \['draw a zero', "):
        source.prompt("draw a cat", ())
    with pytest.raises(SampleError, match="no question has the character 'n'"):
        VALIDATION.prompt("draw a seven", ())


def test_the_judge_reads_real_digits_that_it_has_not_seen():
    """And nothing else than it sees."""
    images, labels = data_set()
    unseen = [i for i in range(1797) if i not in set(images_of("validation"))]
    read = np.concatenate([read_by_judge(images[unseen[i : i + 100]] / 8 - 1) for i in range(0, len(unseen), 100)])
    assert (read == labels[unseen]).mean() == pytest.approx(0.971, abs=5e-4)
    source = DRAWING["validation"]
    drawings = [i for i in range(384) if source.kind(i) == "draw"]
    assert all(source.judge(i, source.load(i).media["image_out"][0]) for i in drawings)
    blank = torch.zeros(1, 8, 8)
    assert sum(source.judge(i, blank) for i in drawings) < len(drawings) / 4


def test_bad_arguments_are_errors():
    for draw in (-0.1, 1.1, math.nan):
        with pytest.raises(RecipeError, match="digits: draw must be a share from 0 to 1"):
            DigitsSource(draw=draw)
    with pytest.raises(RecipeError, match="no split 'test'"):
        DigitsSource("test")
    with pytest.raises(IndexError, match=r"index 384 is not in 0..383"):
        VALIDATION.meta(384)


def test_a_heavy_tail_of_images():
    """More than x images with probability 1 / (x + 1) ** tail; other questions, and all without a tail, stay."""
    plain, heavy = DigitsSource(max_images=16), DigitsSource(max_images=16, tail=0.6)
    counts = np.array([len(heavy.ask(i).images) for i in range(4000) if heavy.kind(i) == "read"])
    for x in (1, 3, 9, 15):
        assert (counts > x).mean() == pytest.approx((x + 1) ** -0.6, abs=0.04)
    assert (counts.min(), counts.max()) == (1, 16)
    for i in range(50):
        assert heavy.kind(i) == plain.kind(i)
        if plain.kind(i) != "read":
            assert heavy.ask(i) == plain.ask(i)
    assert len(DigitsSource(max_images=3, tail=1e-9).ask(0).images) <= 3
    for tail in (-1.0, math.inf, math.nan):
        with pytest.raises(RecipeError, match="digits: tail must be a number from 0 on"):
            DigitsSource(tail=tail)
