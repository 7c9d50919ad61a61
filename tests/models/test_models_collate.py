"""Collation: exact positions, and an error that names the sample for every disagreement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetmesh.data.source import Sample
from hetmesh.errors import SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.collate import collate_media, collate_tokens, target_values

IMAGE, SKETCH, PAD = 1, 2, 0
PLACEHOLDERS = {"image": IMAGE, "sketch": SKETCH}
SOURCES = {"projector": "image", "drawing": "sketch"}


def sample(name, tokens, targets=(), items=()):
    media: dict[str, list[torch.Tensor]] = {}
    metas = []
    for kind, position, rows in items:
        media.setdefault(kind, []).append(torch.full((1, 2, 2), float(position)))
        metas.append(MediaItem(kind, (1, 2, 2), position, rows))
    meta = SampleMeta(name, len(tokens), tuple(metas), tuple(targets))
    return Sample(name, torch.tensor(tokens), media), meta


A = sample("a", [5, IMAGE, IMAGE, SKETCH, 6, 7], [(4, 6)], [("image", 1, 2), ("sketch", 3, 1)])
B = sample("b", [8, 9, 4], [(1, 2), (2, 3)])
C = sample("c", [IMAGE, 3, IMAGE], [(1, 2)], [("image", 0, 1), ("image", 2, 1)])


def tokens(*pairs):
    samples, metas = zip(*pairs, strict=True) if pairs else ((), ())
    return collate_tokens(samples, metas, sources=SOURCES, placeholders=PLACEHOLDERS, pad_id=PAD)


def test_tokens():
    batch = tokens(A, B, C)
    assert batch["input_ids"].tolist() == [[5, 1, 1, 2, 6, 7], [8, 9, 4, 0, 0, 0], [1, 3, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch["targets"].tolist() == [6, 7, 9, 4, 3]
    assert batch["target_positions"].tolist() == [3, 4, 6, 7, 12]
    assert batch["positions.image"].tolist() == [1, 2, 12, 14]
    assert batch["positions.sketch"].tolist() == [3]


def test_rows_of_kinds_that_share_a_placeholder_token_are_told_apart():
    image = MediaItem("image", (), 1, 3, runs=((1, 2), (4, 1)))
    video = MediaItem("sketch", (), 5, 2, runs=((5, 1), (7, 1)))
    meta = SampleMeta("s", 9, (image, video))
    given = Sample("s", torch.tensor([4, 1, 1, 4, 1, 1, 4, 1, 4])), meta
    how = {"sources": SOURCES, "placeholders": {"image": IMAGE, "sketch": IMAGE}, "pad_id": PAD}
    batch = collate_tokens([B[0], given[0]], [B[1], meta], **how)
    assert batch["positions.image"].tolist() == [10, 11, 13]
    assert batch["positions.sketch"].tolist() == [14, 16]


def test_no_samples():
    batch = tokens()
    assert batch["input_ids"].shape[0] == 0
    assert all(batch[key].numel() == 0 for key in batch)
    assert collate_media([], [], "image", (1, 2, 2))["media"].shape == (0, 1, 2, 2)


def test_media_in_order():
    samples, metas = zip(A, B, C, strict=True)
    media = collate_media(samples, metas, "image", (1, 2, 2))["media"]
    assert media[:, 0, 0, 0].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((A[0], replace(A[1], media=A[1].media[1:])), "sample 'a': 2 'image' placeholder tokens, but .* emits 0 rows"),
        ((A[0], replace(A[1], rows={"drawing": 2})), "sample 'a': 1 'sketch' placeholder .* 'drawing' emits 2 rows"),
        ((A[0], replace(A[1], position_ids=((0, 1),))), "sample 'a': position_ids must be 1 rows of 6"),
    ],
)
def test_bad_tokens_name_the_sample(pair, message):
    with pytest.raises(SampleError, match=message):
        tokens(B, pair)


def test_bad_media_names_the_sample():
    with pytest.raises(SampleError, match="sample 'c': 2 'image' in its metadata, 1 in its payload"):
        collate_media([Sample("c", C[0].tokens, {"image": C[0].media["image"][:1]})], [C[1]], "image", (1, 2, 2))


def test_values_are_those_of_the_targets_that_are_left():
    """One number of a sample, or one for each target, of which `seq_len` has cut the last."""
    whole, cut = (SampleMeta(name, 6, (), ((1, 2), (3, 5))) for name in "ab")
    cut = replace(cut, tokens=4, targets=((1, 2), (3, 4)))
    values = {"w": torch.tensor([1.0, 2, 3]).double(), "r": torch.tensor(0.1, dtype=torch.float64)}
    samples = [Sample(name, torch.arange(6), values=values) for name in "ab"]
    found = target_values(samples, [whole, cut], ["w", "r"])
    assert {name: value.tolist() for name, value in found.items()} == {
        "values.w": [1, 2, 3, 1, 2],
        "values.r": [0.1] * 5,
    }
    assert target_values([], [], ["w"])["values.w"].shape == (0,)
    blank = replace(samples[0], values={})  # of a sample that cannot be read, which has no targets
    assert len(target_values([blank], [replace(whole, targets=())], ["w"])["values.w"]) == 0
    for wrong in ({}, {"w": torch.ones(2)}, {"w": torch.ones(3, 1)}):
        with pytest.raises(SampleError, match="sample 'a': its value 'w' must be one number or one for each target"):
            target_values([replace(samples[0], values=wrong)], [whole], ["w"])
