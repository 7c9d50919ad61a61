"""Expansion and truncation keep payload, media and targets in step; every bad sample is one clear error (U14)."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.data import Expander, Sample, check_meta, check_sample, expand_tokens
from hetmesh.data.metadata_index import build_index, load_index
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import Activation, MediaItem, MetaArrays, ModuleSpec, SampleMeta
from hetmesh.graph.sample import UNIT_ITEMS, UNIT_ROWS
from hetmesh.layout import MeshSpec
from support.expanding import Expansion, expand

PLACEHOLDERS = {"image": 1, "audio": 2}
ITEM_ROWS = {"image": lambda shape: shape[-1] * shape[-2] // 4, "audio": lambda shape: shape[0]}
SHAPES = {"image": [(1, 2, 2), (3, 4, 4), (1, 4, 6)], "audio": [(1,), (2,), (7,)]}
IMAGE = MediaItem("image", (1, 4, 4), 1)  # 4 rows
PLACED = MediaItem("image", (), 1, 3, runs=((1, 2), (5, 1)))


@st.composite
def samples(draw: st.DrawFn) -> tuple[SampleMeta, Sample, list]:
    """Metadata and payload from random segments; also the segments, from which tests expand independently.

    Every text token has a value of its own (100, 101, ...), every media tensor too. Items of some kinds are placed: of
    no shape that a count could be asked for, with runs of any rows that may lie side by side.
    """
    placed = draw(st.sets(st.sampled_from(sorted(SHAPES))))
    runs_of_item = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4)
    text = st.tuples(st.just("text"), st.booleans(), st.integers(1, 4))
    media = st.sampled_from(sorted(SHAPES)).flatmap(
        lambda k: st.tuples(st.just(k), st.sampled_from(SHAPES[k]), st.booleans())
    )
    parts = draw(st.lists(st.one_of(text, media), min_size=1, max_size=8))
    tokens: list[int] = []
    items, targets, tensors = [], [], {"image": [], "audio": []}
    for kind, what, how in parts:
        position = len(tokens)
        if kind == "text":
            tokens += range(100 + position, 100 + position + how)
            if what and position > 0:
                targets.append((position, len(tokens)))
        elif kind in placed:
            runs = []
            for gap, rows in draw(runs_of_item):
                tokens += range(100 + len(tokens), 100 + len(tokens) + (gap if runs else 0))
                runs.append((len(tokens), rows))
                tokens += [PLACEHOLDERS[kind]] * rows
            items.append(MediaItem(kind, (), position, sum(rows for _, rows in runs), (7,), tuple(runs)))
        else:
            rows = ITEM_ROWS[kind](what) if how else 1  # True: the source expanded it already
            items.append(MediaItem(kind, what, position, rows))
            tensors[kind].append(torch.full(what, float(position)))
            tokens += [PLACEHOLDERS[kind]] * rows
    meta = SampleMeta("s", len(tokens), tuple(items), tuple(targets))
    units = {kind: {"values": torch.rand(2, 3), "grid": torch.tensor([[1, 2]])} for kind in placed}
    units = {kind: unit for kind, unit in units.items() if meta.num_items(kind)}
    return meta, Sample("s", torch.tensor(tokens), tensors, units=units), parts


def expanded_by_hand(meta: SampleMeta, sample: Sample) -> tuple[list[tuple[int, bool]], list[list[range]]]:
    """(token, is target) of the uncut expanded sequence, and the ranges of each media item, token by token."""
    starts = {item.position: item for item in meta.media}
    sequence: list[tuple[int, bool]] = []
    blocks, position = [], 0
    while position < meta.tokens:
        item = starts.get(position)
        if item and item.runs:
            blocks.append([])
            for start, rows in item.runs:
                sequence += [(int(token), False) for token in sample.tokens[position:start]]
                blocks[-1].append(range(len(sequence), len(sequence) + rows))
                sequence += [(PLACEHOLDERS[item.name], False)] * rows
                position = start + rows
        elif item:
            rows = ITEM_ROWS[item.name](item.shape)
            blocks.append([range(len(sequence), len(sequence) + rows)])
            sequence += [(PLACEHOLDERS[item.name], False)] * rows
            position += item.rows
        else:
            target = any(a <= position < b for a, b in meta.targets)
            sequence.append((int(sample.tokens[position]), target))
            position += 1
    return sequence, blocks


@given(samples(), st.one_of(st.none(), st.integers(1, 30)))
def test_expansion_and_truncation_match_an_independent_walk(case, seq_len):
    check_against_a_walk(*case[:2], seq_len)


def check_against_a_walk(meta: SampleMeta, sample: Sample, seq_len: int | None) -> None:
    sequence, blocks = expanded_by_hand(meta, sample)
    end = len(sequence) if seq_len is None else min(len(sequence), seq_len)
    while any(block[0].start < end < block[-1].stop for block in blocks):  # never part of a media item
        end -= 1
    if end == 0:
        with pytest.raises(SampleError, match="'s': nothing fits into seq_len"):
            expand(Expander(ITEM_ROWS, seq_len=seq_len), meta)
        return
    result = expand(Expander(ITEM_ROWS, seq_len=seq_len), meta)
    payload = expand_tokens(sample, meta, result.meta, PLACEHOLDERS)

    assert payload.tokens.tolist() == [token for token, _ in sequence[:end]]
    assert result.meta.tokens == end
    assert result.dropped_tokens == len(sequence) - end
    flags = [any(a <= p < b for a, b in result.meta.targets) for p in range(end)]
    assert flags == [target for _, target in sequence[:end]]
    survive = [block for block in blocks if block[-1].stop <= end]
    assert [[range(at, at + rows) for at, rows in i.spans] for i in result.meta.media] == survive
    assert [(i.position, i.rows) for i in result.meta.media] == [(b[0].start, sum(map(len, b))) for b in survive]
    assert [(i.name, i.size, bool(i.runs)) for i in result.meta.media] == [
        (i.name, i.size, bool(i.runs)) for i in meta.media[: len(survive)]
    ]
    assert result.dropped_media == meta.media[len(survive) :]
    for name in PLACEHOLDERS:  # the tensors that survive are those of the items that survive
        of_kind = [i for i in meta.media[: len(survive)] if i.name == name]
        positions = [float(i.position) for i in of_kind if not i.runs]
        assert [t.flatten()[0].item() for t in payload.media.get(name, ())] == positions
        # a unit is whole as long as an item of it is left, and says how many rows it makes
        assert (name in payload.units) == any(i.runs for i in of_kind)
        if name in payload.units:
            assert payload.units[name] is sample.units[name]
            assert payload.unit_rows[name] == sum(i.rows for i in meta.media if i.name == name)
    check_meta(result.meta)
    check_sample(payload, result.meta, PLACEHOLDERS)


def test_placed_items_are_cut_whole_at_every_place():
    audio = MediaItem("audio", (2,), 8)
    more = (PLACED, audio, MediaItem("image", (), 10, 4, runs=((10, 1), (12, 2), (14, 1))), replace(audio, position=16))
    meta = SampleMeta("s", 19, more, ((6, 8), (9, 10), (15, 16), (17, 19)))
    tokens = torch.arange(100, 119)
    tokens[[p for item in more for at, rows in item.spans for p in range(at, at + rows)]] = 1
    tokens[[8, 16]] = 2
    sample = Sample(
        "s", tokens, {"audio": [torch.full((2,), 8.0), torch.full((2,), 16.0)]}, units={"image": {"x": tokens}}
    )
    for seq_len in (*range(1, 23), None):
        check_against_a_walk(meta, sample, seq_len)


@given(samples())
def test_an_expanded_sample_expands_to_itself(case):
    meta, sample, _ = case
    once = expand(Expander(ITEM_ROWS), meta).meta
    payload = expand_tokens(sample, meta, once, PLACEHOLDERS)
    assert expand(Expander(ITEM_ROWS), once) == Expansion(once)
    assert torch.equal(expand_tokens(payload, once, once, PLACEHOLDERS).tokens, payload.tokens)


@given(samples(), st.integers(1, 30))
def test_truncation_is_a_prefix_of_at_most_seq_len_and_cutting_twice_changes_nothing(case, seq_len):
    meta, _, _ = case
    try:
        cut = expand(Expander(ITEM_ROWS, seq_len=seq_len), meta).meta
    except SampleError:
        return
    assert cut.tokens <= seq_len
    assert cut.num_targets <= meta.num_targets
    assert expand(Expander(ITEM_ROWS, seq_len=seq_len), cut).meta == cut


def test_positions_and_targets_move_along():
    meta = SampleMeta("s", 6, (IMAGE, MediaItem("image", (1, 2, 2), 3)), ((2, 3), (4, 6)))
    assert expand(Expander(ITEM_ROWS), meta).meta == SampleMeta(
        "s", 9, (replace(IMAGE, rows=4), MediaItem("image", (1, 2, 2), 6, 1)), ((5, 6), (7, 9))
    )


def test_a_cut_inside_a_media_item_drops_the_whole_item_and_all_that_follows():
    meta = SampleMeta("s", 5, (IMAGE,), ((3, 5),))  # expanded: text, 4 rows, text, 2 targets
    result = expand(Expander(ITEM_ROWS, seq_len=4), meta)
    assert result == Expansion(SampleMeta("s", 1), dropped_media=(IMAGE,), dropped_tokens=7)
    assert expand(Expander(ITEM_ROWS, seq_len=5), meta).meta.media == (replace(IMAGE, rows=4),)


def test_a_sample_whose_targets_are_all_cut_is_legal():
    meta = SampleMeta("s", 10, (), ((5, 10),))
    assert expand(Expander(ITEM_ROWS, seq_len=5), meta).meta == SampleMeta("s", 5)
    assert expand(Expander(ITEM_ROWS, seq_len=7), meta).meta.targets == ((5, 7),)


def test_text_only_samples_need_no_encoder():
    assert expand(Expander({}), SampleMeta("s", 3)).meta == SampleMeta("s", 3)


def test_module_rows_are_those_of_the_sample_after_the_cut():
    meta = SampleMeta("s", 3, (IMAGE, MediaItem("image", (1, 2, 2), 2)))
    module_rows = {"vision": ("image", ITEM_ROWS["image"]), "ears": ("audio", ITEM_ROWS["audio"])}
    assert expand(Expander(ITEM_ROWS, module_rows=module_rows), meta).meta.rows == {"vision": 5, "ears": 0}
    assert expand(Expander(ITEM_ROWS, seq_len=5, module_rows=module_rows), meta).meta.rows == {"vision": 4, "ears": 0}


def test_what_passes_between_stages_is_of_whole_units_where_the_cut_leaves_an_item_of_them():
    items = tuple(MediaItem("image", (), at, 2, runs=((at, 1), (at + 2, 1))) for at in (1, 5, 9))
    metas = [SampleMeta("s", 14, items), SampleMeta("t", 5, items[:1]), SampleMeta("u", 3)]
    rows = {"vision": ("image", ITEM_ROWS["image"])}
    mesh, passed = MeshSpec.make([0, 1], pp=2), Activation(3, per_row=2, per_item=1)
    vision = ModuleSpec("vision", mesh, ("a", "b"), "image", splits=(("a",), ("b",)), activation=passed)
    for seq_len, emitted, whole in ((14, 6, 15), (12, 6, 15), (11, 4, 15), (7, 2, 15), (4, 2, 15), (3, 0, 0)):
        cut = Expander(ITEM_ROWS, seq_len=seq_len, module_rows=rows).all(MetaArrays.of(metas)).metas
        of_t = 5 if seq_len > 3 else 0
        assert [meta.rows["vision"] for meta in cut] == [emitted, 2 * bool(of_t), 0]
        assert [vision.activation_rows([meta]) for meta in cut] == [whole, of_t, 0]
        assert vision.activation_rows(list(cut)) == whole + of_t


def test_expand_is_pure():
    meta = SampleMeta("s", 3, (IMAGE,))
    assert expand(Expander(ITEM_ROWS), meta) == expand(Expander(ITEM_ROWS), meta)
    assert meta == SampleMeta("s", 3, (IMAGE,))
    assert pickle.loads(pickle.dumps(IMAGE)) == IMAGE


MODULE_ROWS = {
    "vision": ("image", lambda shape: 4 * ITEM_ROWS["image"](shape)),
    "audio": ("audio", ITEM_ROWS["audio"]),
    "blind": (None, ITEM_ROWS["image"]),
}


def from_arrays(metas):
    """The same metadata as a source has it that keeps arrays and no objects."""
    return replace(MetaArrays.of(metas), given=())


@pytest.mark.slow
@given(st.lists(samples(), max_size=8), st.data())
def test_arrays_give_back_the_metadata_that_they_are_of(cases, data):
    metas = [replace(meta, id=f"s{i}") for i, (meta, _, _) in enumerate(cases)]
    arrays = from_arrays(metas)
    arrays.check()
    assert list(arrays) == metas
    assert arrays.stops.tolist() == [item.stop for meta in metas for item in meta.media]
    some = data.draw(st.lists(st.integers(0, len(metas) - 1), max_size=9)) if metas else []
    assert list(arrays.take(some)) == [metas[i] for i in some]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("run_ends", lambda ends: ends[:-1]),
        ("run_ends", lambda ends: ends + 1),
        ("runs", lambda runs: runs[:1]),
        ("runs", lambda runs: runs.astype("int32")),
        ("runs", lambda runs: runs[:, 0]),
    ],
)
def test_runs_that_do_not_belong_to_their_items_are_found(name, wrong):
    arrays = from_arrays([SampleMeta("s", 9, (PLACED,)), SampleMeta("t", 9, (IMAGE,))])
    arrays.check()
    with pytest.raises(ValueError, match=r"^run"):
        replace(arrays, **{name: wrong(getattr(arrays, name))}).check()


class Kept:
    """A source of metadata alone, with an index."""

    vocab_size, pad_id, placeholders, index_inputs, store_arrays = 200, 0, PLACEHOLDERS, {"files": 1}, {}

    def __init__(self, index_path, metas):
        self.index_path, self._metas = index_path, metas

    def __len__(self):
        return len(self._metas)

    def meta(self, index):
        return self._metas[index]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(samples(), min_size=1, max_size=8))
def test_an_index_gives_back_the_metadata_that_it_is_of(tmp_path_factory, cases):
    metas = [replace(meta, id=f"s{i}") for i, (meta, _, _) in enumerate(cases)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetmesh.data.metadata_index._CHUNK_SAMPLES", 3)
        path = build_index(Kept(tmp_path_factory.mktemp("index") / "x.npz", metas))
    arrays, _ = load_index(path, Kept.index_inputs)
    assert list(arrays) == metas


def test_an_index_without_runs_is_stale(tmp_path):
    path = build_index(Kept(tmp_path / "x.npz", [SampleMeta("s", 9, (PLACED,))]))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if not name.startswith("run")}
    texts = json.loads(arrays["texts"].tobytes()) | {"version": 3}
    arrays["texts"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(RecipeError, match=r"x\.npz is stale: its format is 3, not 4; make it anew: hetmesh index"):
        load_index(path, Kept.index_inputs)


@pytest.mark.slow
@given(st.lists(samples(), max_size=8), st.one_of(st.none(), st.integers(1, 30)), st.booleans())
def test_many_at_once_are_expanded_as_one_by_one(cases, seq_len, objects):
    metas = [replace(meta, id=f"s{i}") for i, (meta, _, _) in enumerate(cases)]
    each = Expander(ITEM_ROWS, seq_len, MODULE_ROWS, lambda meta: ((meta.tokens,),), {"vision": 4})
    kept, refused = [], []
    for i, meta in enumerate(metas):
        try:
            expand(each, meta)
            kept.append(i)
        except SampleError:
            refused.append(i)
    arrays = MetaArrays.of(metas) if objects else from_arrays(metas)
    assert list(each.refusals(arrays)) == refused
    found = each.all(arrays.take(kept))
    expected = [expand(each, metas[i]) for i in kept]
    for i, meta in zip(kept, (e.meta for e in expected), strict=True):
        rows = {"blind": 0}
        for module, kind, ratio in (("vision", "image", 4), ("audio", "audio", 1)):
            left, whole = ([item for item in m.media if item.name == kind] for m in (meta, metas[i]))
            rows[module] = ratio * sum(item.rows for item in left)
            if left and len(left) < len(whole) and whole[0].runs:  # whose unit stays whole
                rows[module + UNIT_ROWS] = ratio * sum(item.rows for item in whole)
                rows[module + UNIT_ITEMS] = len(whole)
        assert meta.rows == rows
    assert list(found.metas) == [e.meta for e in expected]
    assert found.dropped_media.tolist() == [len(e.dropped_media) for e in expected]
    assert found.dropped_tokens.tolist() == [e.dropped_tokens for e in expected]
    assert found.metas.num_targets.tolist() == [e.meta.num_targets for e in expected]


def test_sizes_of_items_are_kept_and_counted_in_arrays_too():
    items = (replace(IMAGE, size=(3, 5)), MediaItem("audio", (2,), 2), MediaItem("audio", (2,), 3, size=(7,)))
    metas = [SampleMeta("s", 4, items), SampleMeta("t", 4, tuple(replace(item, size=()) for item in items))]
    each = Expander({"image": lambda extent: sum(extent), "audio": len})
    found = list(each.all(from_arrays(metas)).metas)
    assert found == [expand(each, meta).meta for meta in metas]
    assert [[item.rows for item in meta.media] for meta in found] == [[17, 1, 2], [9, 1, 1]]
    assert [item.size for item in found[0].media] == [(3, 5), (), (7,)]


def test_dimensions_of_size_0_are_dimensions():
    """Not the mark of a dimension that a shape of another kind does not have."""
    metas = [SampleMeta("s", 3, (replace(IMAGE, shape=(0, 4, 4)), MediaItem("audio", (2,), 2)))]
    each = Expander(ITEM_ROWS)
    assert each.refusals(from_arrays(metas)) == {}
    assert list(each.all(from_arrays(metas)).metas) == [expand(each, metas[0]).meta]


MALFORMED = [
    (
        SampleMeta("s", 3, (MediaItem("video", (2, 2), 1),)),
        r"'s': no module reads media of kind 'video'.*audio.*im",
    ),
    (SampleMeta("s", 4, (replace(IMAGE, rows=3),)), r"'s': the 'image' at position 1 has 3 placeholder .* 4 rows"),
    (SampleMeta("s", 3, (MediaItem("image", (1, 1, 1), 1),)), r"'s': a 'image' of shape \(1, 1, 1\) makes 0 rows"),
    (SampleMeta("s", 3, (), ((1, 4),)), r"'s': target span \[1, 4\) must be .*\[1, 3\)"),
    (SampleMeta("s", 3, (), ((0, 2),)), r"'s': target span \[0, 2\)"),
    (SampleMeta("s", 3, (), ((2, 2),)), r"'s': target span \[2, 2\)"),
    (SampleMeta("s", 5, (), ((1, 3), (2, 4))), r"'s': target span \[2, 4\) must be .*\[3, 5\)"),
    (SampleMeta("s", 3, (IMAGE,), ((1, 2),)), r"'s': target span \[1, 2\) covers the 'image' at position 1"),
    (SampleMeta("s", 1, (IMAGE,)), r"'s': the 'image' at positions 1..1 must lie in 0..0"),
    (SampleMeta("s", 3, (IMAGE, IMAGE)), r"'s': the 'image' at positions 1..1 must lie in 2..2"),
    (SampleMeta("s", 3, (replace(IMAGE, rows=0),)), r"'s': the 'image' at position 1 has 0 rows"),
    (
        SampleMeta("s", 9, (replace(PLACED, rows=4),)),
        r"'s': the 'image' at position 1 with 4 rows has the runs \[\(1, 2",
    ),
    (SampleMeta("s", 9, (replace(PLACED, position=0),)), r"'s': the 'image' at position 0 with 3 rows has the runs"),
    (SampleMeta("s", 9, (replace(PLACED, runs=((1, 2), (2, 1))),)), r"'s': .* runs .*must ascend without overlap"),
    (SampleMeta("s", 9, (replace(PLACED, runs=((1, 2), (0, 1))),)), r"'s': .* runs .*must ascend without overlap"),
    (SampleMeta("s", 9, (replace(PLACED, runs=((1, 3), (5, 0))),)), r"'s': .* runs .*must ascend without overlap"),
    (SampleMeta("s", 9, (replace(PLACED, rows=1, runs=((1, 2), (5, -1))),)), r"'s': .* runs .*must ascend"),
    (SampleMeta("s", 5, (PLACED,)), r"'s': the 'image' at positions 1..5 must lie in 0..4"),
    (SampleMeta("s", 9, (PLACED, MediaItem("audio", (1,), 3))), r"'s': the 'audio' at positions 3..3 must lie in 6..8"),
    (
        SampleMeta("s", 9, (PLACED,), ((3, 5),)),
        r"'s': target span \[3, 5\) covers the 'image' at position 1; .*between",
    ),
    (SampleMeta("s", 9, (PLACED, replace(IMAGE, position=7))), r"'s': of its 'image' items some have runs and some"),
    (SampleMeta("s", 9, (replace(PLACED, name="video"),)), r"'s': no module reads media of kind 'video'"),
    (SampleMeta("s", 0), r"'s': it has 0 tokens"),
    (SampleMeta("s", 2, position_ids=((0, 1),)), r"'s': position_ids are set after expansion"),
    (SampleMeta("s", -3), r"'s': it has -3 tokens"),
    (SampleMeta("s", 1 << 61, (), ((2, 1),)), r"'s': target span \[2, 1\)"),
]


@pytest.mark.parametrize(("meta", "message"), MALFORMED)
def test_malformed_metadata_is_an_error_that_names_the_sample(meta, message):
    with pytest.raises(SampleError, match=message):
        expand(Expander(ITEM_ROWS), meta)
    assert list(Expander(ITEM_ROWS).refusals(MetaArrays.of([SampleMeta("t", 9, (PLACED,)), meta]))) == [1]


@pytest.mark.slow
@given(st.data(), st.lists(samples(), min_size=1, max_size=4))
def test_malformed_metadata_is_found_among_others(data, cases):
    metas = [meta for meta, _, _ in cases]
    at = data.draw(st.integers(0, len(metas)))
    metas.insert(at, data.draw(st.sampled_from(MALFORMED))[0])
    assert list(Expander(ITEM_ROWS).refusals(MetaArrays.of(metas))) == [at]


def test_a_media_item_that_can_never_fit_is_an_error():
    with pytest.raises(SampleError, match=r"'s': nothing fits into seq_len 3: its first 'image' takes 4 tokens"):
        expand(Expander(ITEM_ROWS, seq_len=3), SampleMeta("s", 2, (replace(IMAGE, position=0),)))
    placed = SampleMeta("s", 6, (replace(PLACED, position=0, runs=((0, 2), (4, 1))),))
    assert expand(Expander(ITEM_ROWS, seq_len=5), placed).meta.tokens == 5
    with pytest.raises(SampleError, match=r"'s': nothing fits into seq_len 4: its first 'image' takes 5 tokens"):
        expand(Expander(ITEM_ROWS, seq_len=4), placed)
    assert list(Expander(ITEM_ROWS, seq_len=4).refusals(from_arrays([SampleMeta("t", 9), placed]))) == [1]


META = SampleMeta("s", 4, (IMAGE, MediaItem("image", (1, 2, 2), 2)), ((3, 4),))
TENSORS = [torch.zeros(1, 4, 4), torch.zeros(1, 2, 2)]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample("t", torch.tensor([9, 1, 1, 9]), {"image": TENSORS}), "'s': its payload has the id 't'"),
        (Sample("s", torch.tensor([9, 1, 1]), {"image": TENSORS}), r"'s': tokens are torch.int64 \[3\].*int64 \[4\]"),
        (Sample("s", torch.tensor([9.0, 1, 1, 9]), {"image": TENSORS}), r"'s': tokens are torch.float32 \[4\]"),
        (
            Sample("s", torch.tensor([9, 1, 9, 9]), {"image": TENSORS}),
            "'s': 1 'image' placeholder tokens.* 2 rows of 2 ",
        ),
        (
            Sample("s", torch.tensor([9, 1, 1, 1]), {"image": TENSORS}),
            "'s': 3 'image' placeholder tokens.* 2 rows of 2 ",
        ),
        (Sample("s", torch.tensor([9, 1, 9, 1]), {"image": TENSORS}), r"'s': .*at positions \[1, 3\].* says \[1, 2\]"),
        (Sample("s", torch.tensor([9, 1, 1, 9]), {"image": TENSORS[:1]}), "'s': its payload has 1 'image' .* 2 of"),
        (Sample("s", torch.tensor([9, 1, 1, 9])), "'s': its payload has 0 'image' .* 2 of"),
        (
            Sample("s", torch.tensor([9, 1, 1, 9]), {"image": TENSORS[::-1]}),
            r"'s': its payload has 2 'image' of shapes",
        ),
        (
            Sample("s", torch.tensor([9, 1, 1, 9]), {"image": TENSORS, "video": TENSORS}),
            r"'s': media of kind 'video' has no placeholder token; kinds with one: \['audio', 'image'\]",
        ),
        (
            Sample("s", torch.tensor([9, 1, 1, 2]), {"image": TENSORS}),
            "'s': 1 'audio' placeholder tokens.* 0 rows of 0 ",
        ),
    ],
)
def test_a_payload_that_disagrees_with_its_metadata_is_an_error_that_names_both(sample, message):
    with pytest.raises(SampleError, match=message):
        expand_tokens(sample, META, expand(Expander(ITEM_ROWS), META).meta, PLACEHOLDERS)


UNIT = {"image": {"pixel_values": torch.zeros(5, 2)}}
OF_PLACED = torch.tensor([9, 1, 1, 9, 9, 1, 9])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            Sample("s", OF_PLACED),
            "'s': its payload has 0 tensors in a unit of its 'image', its metadata 1 'image' that",
        ),
        (Sample("s", OF_PLACED, units={"image": {}}), "'s': its payload has 0 tensors in a unit of its 'image'"),
        (
            Sample("s", OF_PLACED, units={**UNIT, "audio": UNIT["image"]}),
            "'s': its payload has 1 tensors in a unit of its 'audio', its metadata 0 'audio' that",
        ),
        (Sample("s", OF_PLACED, units={**UNIT, "video": {}}), "'s': media of kind 'video' has no placeholder token"),
        (Sample("s", OF_PLACED, {"image": TENSORS}, units=UNIT), "'s': its payload has 2 'image' of shapes .* 0 of"),
        (
            Sample("s", torch.tensor([9, 1, 1, 1, 9, 9, 9]), units=UNIT),
            r"'s': .* at positions \[1, 2, 3\], its metadata says \[1, 2, 5\]",
        ),
        (
            Sample("s", torch.tensor([9, 1, 1, 1, 9, 1, 9]), units=UNIT),
            "'s': 4 'image' placeholder tokens.* 3 rows of 1",
        ),
    ],
)
def test_a_payload_that_disagrees_with_runs_is_an_error(sample, message):
    meta = SampleMeta("s", 7, (PLACED,))
    with pytest.raises(SampleError, match=message):
        expand_tokens(sample, meta, expand(Expander(ITEM_ROWS), meta).meta, PLACEHOLDERS)


def test_units_of_kinds_that_are_not_wanted_are_left_out():
    meta = SampleMeta("s", 7, (PLACED,))
    expanded = expand(Expander(ITEM_ROWS), meta).meta
    assert expand_tokens(Sample("s", OF_PLACED), meta, expanded, PLACEHOLDERS, ()).units == {}
    assert expand_tokens(Sample("s", OF_PLACED, units=UNIT), meta, expanded, PLACEHOLDERS, ("audio",)).units == {}
    wanted = expand_tokens(Sample("s", OF_PLACED, units=UNIT), meta, expanded, PLACEHOLDERS, ("image",))
    assert (wanted.units, wanted.unit_rows) == (UNIT, {"image": 3})


def test_kinds_may_share_a_placeholder_token():
    """Some processors write the token of images for the rows of videos."""
    video = MediaItem("video", (), 3, 2, runs=((3, 1), (5, 1)))
    meta = SampleMeta("s", 7, (replace(PLACED, rows=2, runs=((1, 2),)), video))
    placeholders, units = {"image": 1, "video": 1}, {**UNIT, "video": UNIT["image"]}
    rows = {"image": len, "video": len}
    sample = Sample("s", torch.tensor([9, 1, 1, 1, 9, 1, 9]), units=units)
    assert expand_tokens(sample, meta, expand(Expander(rows), meta).meta, placeholders).units == units
    with pytest.raises(SampleError, match=r"'s': 3 'image' placeholder tokens \(id 1\) in its sequence, 4 rows of 2"):
        check_sample(replace(sample, tokens=torch.tensor([9, 1, 1, 1, 9, 9, 9])), meta, placeholders)


def test_a_kind_of_media_without_a_placeholder_is_an_error():
    sample = Sample("s", torch.tensor([9, 1, 1, 9]), {"image": TENSORS})
    with pytest.raises(SampleError, match="'s': media of kind 'image' has no placeholder token"):
        expand_tokens(sample, META, expand(Expander(ITEM_ROWS), META).meta, {"audio": 2})
