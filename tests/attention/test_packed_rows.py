"""Packed rows: a mapping that keeps its attention, and what users' models see of it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hetmesh.attention import attend
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.packed_rows import PackedRows, attention_of, with_tensors
from hetmesh.context import causal, join
from hetmesh.errors import BoundaryError


def packed():
    tensors = {"input_ids": torch.arange(7)[None], "target_index": torch.arange(2)}
    return PackedRows(tensors, ContextAttention(join([causal(4), causal(3)])))


def test_other_tensors_keep_the_attention():
    rows = packed()
    assert dict(rows) == dict(rows.tensors)
    others = with_tensors(rows, {**rows, "input_ids": rows["input_ids"] + 1})
    assert attention_of(others) is rows.attention
    assert others["input_ids"][0, 0] == 1
    assert attention_of(with_tensors({}, {"input_ids": torch.zeros(1)})) is None


def test_attend_keeps_packed_samples_apart_and_refuses_a_copy_of_their_batch():
    q, k, v = torch.randn(3, 1, 2, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = [
        scaled_dot_product_attention(*(x[:, :, rows] for x in (q, k, v)), is_causal=True)
        for rows in (slice(4), slice(4, 7))
    ]
    torch.testing.assert_close(attend(q, k, v, packed()), torch.cat(apart, dim=2))
    with pytest.raises(BoundaryError, match="not a copy of it"):
        attend(q, k, v, dict(packed()))
