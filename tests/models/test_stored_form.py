"""Forms of stored tensors do to blocks what torch does to values, and every share is read once and written back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.models.weights.stored_form import (
    by_stored,
    cut,
    exchanged,
    in_parts,
    joined,
    reads,
    refitted,
    stacked,
    stored_shape,
    whole,
)


def value_of(form, stored):
    """The tensor that a form describes, block by block."""
    out = torch.full(form.shape, -1.0)
    for block in form.blocks:
        place = tuple(slice(*each) for each in block.place)
        out[place] = block.to_module(stored[block.stored][block.slices(block.place)])
    return out


@st.composite
def described(draw):
    """A form, the stored tensors, and the tensor that torch makes of them by the same operations."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    count = draw(st.integers(1, 3))
    stored = {f"t{i}": torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * i for i in range(count)}
    form, value = whole("t0", shape), stored["t0"]
    if count > 1:
        parts = [whole(name, shape) for name in stored]
        dim = draw(st.integers(0, len(shape) - 1))
        form, value = draw(
            st.sampled_from(
                [
                    (stacked(parts, dim), torch.stack(list(stored.values()), dim)),
                    (joined(parts, dim), torch.cat(list(stored.values()), dim)),
                ]
            )
        )
    for _ in range(draw(st.integers(0, 3))):
        a, b = draw(st.integers(0, value.ndim - 1)), draw(st.integers(0, value.ndim - 1))
        kind = draw(st.sampled_from(["exchange", "cut", "double", "parts"]))
        if kind == "exchange":
            form, value = exchanged(form, a, b), value.transpose(a, b)
        elif kind == "cut":
            start = draw(st.integers(0, value.shape[a] - 1))
            stop = draw(st.integers(start + 1, value.shape[a]))
            form, value = cut(form, a, start, stop), value.narrow(a, start, stop - start)
        elif kind == "parts" and value.ndim < 5:
            n = draw(st.sampled_from([n for n in range(1, 5) if value.shape[a] % n == 0]))
            form, value = in_parts(form, a, n), value.unflatten(a, (n, -1))
        elif value.numel() < 200:
            form, value = joined([form, form], a), torch.cat([value, value], a)
    return form, stored, value


@given(described(), st.data())
def test_forms_are_what_torch_makes_and_shares_are_read_once(case, data):
    form, stored, value = case
    assert form.shape == tuple(value.shape)
    assert torch.equal(value_of(form, stored), value)
    share = []
    for size in value.shape:
        edges = sorted(data.draw(st.sets(st.integers(0, size), max_size=4)))
        share.append(tuple(zip(edges[::2], edges[1::2], strict=False)))
    index = [torch.tensor([i for a, b in each for i in range(a, b)], dtype=torch.int64) for each in share]
    expected = value[torch.meshgrid(*index, indexing="ij")]
    found = torch.full(expected.shape, -1.0)
    count = 0
    for read in reads(form, share):
        found[read.target] = read.block.to_module(stored[read.block.stored][read.source])
        count += found[read.target].numel()
    assert torch.equal(found, expected)
    assert count == expected.numel()


@given(described())
def test_blocks_go_back_to_where_they_came_from(case):
    form, stored, value = case
    for name, blocks in by_stored({"": form}).items():
        out = torch.full(stored[name].shape, -1.0)
        for _, block in blocks:
            out[block.slices(block.place)] = block.to_file(value[tuple(slice(*each) for each in block.place)])
        held = out >= 0
        assert torch.equal(out[held], stored[name][held])
        if len(blocks) == 1 and bool(held.all()):
            assert stored_shape(blocks) == stored[name].shape


def test_a_hole_is_no_shape():
    form = stacked([cut(whole("t", (4, 2)), 0, 2, 4)], 0)
    assert stored_shape(by_stored({"": form})["t"]) is None


def test_a_dim_as_two_is_the_same_memory_or_an_error():
    form = whole("t", (4, 6, 5))
    assert refitted(form, (4, 2, 3, 5)) == in_parts(form, 1, 2)
    assert refitted(form, (4, 6, 5)) is form
    for shape in ((4, 5, 6), (2, 2, 3, 2, 5), (4, 6)):
        with pytest.raises(ValueError, match="in the same order"):
            refitted(form, shape)
    with pytest.raises(ValueError, match="no 4 equal parts"):
        in_parts(form, 1, 4)
