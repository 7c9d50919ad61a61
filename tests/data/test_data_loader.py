"""The loader: equal everywhere, every sample once per epoch, exact resume, payloads only on demand."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.data import DigitsSource, Loader, Sample, expand
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta


class Tiny:
    """`size` samples of 3 tokens; odd ones hold an image. Counts its loads."""

    vocab_size, pad_id, placeholders = 10, 0, {"image": 1}

    def __init__(self, size: int = 5) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def meta(self, index: int) -> SampleMeta:
        return SampleMeta(f"tiny/{index}", 3, (MediaItem("image", (1, 4, 4), 1),) * (index % 2), ((2, 3),))

    def load(self, index: int, kinds: object = None) -> Sample:
        self.loaded.append(index)
        images = [torch.zeros(1, 4, 4)] * (index % 2)
        return Sample(f"tiny/{index}", torch.tensor([2, 1 if images else 2, 3]), {"image": images})


PREPARE = partial(expand, item_rows={"image": lambda shape: shape[1] * shape[2] // 4})


@given(st.integers(1, 23), st.integers(1, 40), st.integers(0, 99), st.booleans())
def test_no_sample_is_lost_or_repeated_within_an_epoch(size, batch, seed, shuffle):
    loader = Loader(Tiny(size), batch, seed=seed, shuffle=shuffle)
    row = [i for step in range(3 * size // batch + 2) for i in loader.indices(step)]
    for epoch in range(3):
        assert Counter(row[epoch * size : (epoch + 1) * size]) == Counter(range(size))
    if not shuffle:
        assert row == [i % size for i in range(len(row))]


def test_epochs_and_seeds_are_shuffled_differently():
    loader = Loader(Tiny(50), 50)
    orders = {loader.indices(0), loader.indices(1), Loader(Tiny(50), 50, seed=1).indices(0), tuple(range(50))}
    assert len(orders) == 4


def test_the_global_batch_is_a_pure_function_of_seed_and_step():
    a, b = (Loader(DigitsSource(), 16, PREPARE, seed=3) for _ in range(2))
    later = a.batch(7)
    assert [next(b) for _ in range(8)][7] == later == a.batch(7)
    assert len(later) == 16


def test_metadata_comes_expanded_and_without_loading_any_payload():
    source = Tiny()
    batch = Loader(source, 5, PREPARE).batch(0)
    assert source.loaded == []
    assert {d.index: d.meta.tokens for d in batch} == {0: 3, 1: 6, 2: 3, 3: 6, 4: 3}


def test_only_the_samples_asked_for_are_loaded_and_they_match_their_metadata():
    source = Tiny()
    loader = Loader(source, 5, PREPARE)
    mine = [d for d in loader.batch(0) if d.index in (1, 4)]
    samples = loader.load(mine)
    assert source.loaded == [d.index for d in mine]
    assert [(s.id, len(s.tokens)) for s in samples] == [(d.meta.id, d.meta.tokens) for d in mine]


def test_a_loader_without_prepare_gives_samples_as_the_source_does():
    loader = Loader(Tiny(), 2, shuffle=False)
    assert [d.meta for d in loader.batch(0)] == [Tiny().meta(0), Tiny().meta(1)]
    assert loader.load(loader.batch(0))[1].tokens.tolist() == [2, 1, 3]


def test_what_seq_len_drops_is_reported():
    drawn = Loader(Tiny(), 2, partial(PREPARE, seq_len=4), shuffle=False).batch(0)
    assert [(d.dropped_media, d.dropped_tokens) for d in drawn] == [(0, 0), (1, 5)]


@given(st.integers(0, 12), st.integers(0, 12))
def test_a_restored_loader_continues_exactly(before, after):
    whole = Loader(Tiny(), 3, PREPARE, seed=5)
    expected = [next(whole) for _ in range(before + after)][before:]
    first = Loader(Tiny(), 3, PREPARE, seed=5)
    for _ in range(before):
        next(first)
    resumed = Loader(Tiny(), 3, PREPARE, seed=5)
    resumed.load_state_dict(first.state_dict())
    assert [next(resumed) for _ in range(after)] == expected
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Loader(Tiny(), 4, seed=5), "global_batch_size was 3 and is 4"),
        (Loader(Tiny(), 3), "seed was 5 and is 0"),
        (Loader(Tiny(6), 3, seed=5), "the number of samples of data.source was 5 and is 6"),
        (Loader(Tiny(), 3, seed=5, shuffle=False), "shuffle was 1 and is 0"),
    ],
)
def test_a_position_of_other_batches_is_refused(other, message):
    with pytest.raises(RecipeError, match=message):
        other.load_state_dict(Loader(Tiny(), 3, seed=5).state_dict())


def test_a_position_with_missing_keys_is_refused():
    state = Loader(Tiny(), 3).state_dict()
    del state["step"]
    with pytest.raises(RecipeError, match=r"lacks \['step'\]"):
        Loader(Tiny(), 3).load_state_dict(state)


def test_bad_arguments_are_errors():
    with pytest.raises(RecipeError, match="global_batch_size = 0"):
        Loader(Tiny(), 0)
    with pytest.raises(RecipeError, match="Tiny is empty"):
        Loader(Tiny(0), 1)


def test_a_token_outside_the_vocabulary_is_an_error_that_names_the_sample():
    class Wrong(Tiny):
        vocab_size = 3

    loader = Loader(Wrong(), 1, shuffle=False)
    with pytest.raises(SampleError, match=r"'tiny/0': token ids 2..3 must be in 0..2"):
        loader.load(loader.batch(0))
