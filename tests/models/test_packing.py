"""Packing against a loop over tokens."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from hetmesh.models.packing import pack_tokens


@given(data=st.data(), lengths=st.lists(st.integers(1, 6), max_size=4))
def test_every_token_target_and_placeholder_once_and_in_the_rank_s_order(data, lengths):
    width = max(lengths, default=1)
    ids = torch.arange(100, 100 + len(lengths) * width).reshape(len(lengths), width)
    real = [(i, j) for i, n in enumerate(lengths) for j in range(n)]
    predicting = [(i, j) for i, j in real if j + 1 < lengths[i] and data.draw(st.booleans())]
    images = [(i, j) for i, j in real if data.draw(st.booleans())]
    flat = lambda places: torch.tensor([i * width + j for i, j in places], dtype=torch.int64)  # noqa: E731
    batch = {
        "input_ids": ids,
        "position_ids": torch.arange(width).repeat(len(lengths), 1),
        "target_positions": flat(predicting),
        "targets": torch.arange(len(predicting)),
        "positions.image": flat(images),
    }
    order = data.draw(st.permutations(range(len(real))))
    cut = data.draw(st.integers(0, len(real)))
    for kept in (order[:cut], order[cut:]):
        out = pack_tokens(batch, lengths, tuple((t, t + 1) for t in kept))
        mine = [real[t] for t in kept]
        assert out["input_ids"].tolist() == [[int(ids[i, j]) for i, j in mine]]
        assert out["position_ids"].tolist() == [[j for _, j in mine]]
        expected = [(k, mine.index(place)) for k, place in enumerate(predicting) if place in mine]
        assert out["target_index"].tolist() == out["targets"].tolist() == [k for k, _ in expected]
        assert out["target_positions"].tolist() == [p for _, p in expected]
        assert out["positions.image"].tolist() == [k for k, place in enumerate(mine) if place in images]
