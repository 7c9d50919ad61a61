"""Shares of tokens against a loop over positions."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from hetmesh.context.token_owners import TokenShares
from hetmesh.parallel.tokens import positions_in_share


@given(data=st.data(), total=st.integers(0, 12), parts=st.integers(1, 5))
def test_every_position_is_in_one_share_and_where_its_token_is(data, total, parts):
    chosen = {
        key: [i for i in range(total) if data.draw(st.booleans())] for key in ("target_positions", "positions.image")
    }
    batch = {"input_ids": torch.zeros(1, total, dtype=torch.int64), "targets": torch.zeros(3, dtype=torch.int64)}
    batch |= {key: torch.tensor(positions, dtype=torch.int64) for key, positions in chosen.items()}
    found = {key: {} for key in chosen}
    for part in range(parts):
        start, _ = TokenShares(max(total, 1), parts).span(part)
        out = positions_in_share(batch, part, parts)
        assert set(out) == {f"{prefix}.{key}" for prefix in ("share", "share_index") for key in chosen}
        for key, positions in chosen.items():
            for place, which in zip(out[f"share.{key}"].tolist(), out[f"share_index.{key}"].tolist(), strict=True):
                assert 0 <= place < TokenShares(max(total, 1), parts).size
                assert start + place == positions[which]
                assert which not in found[key]
                found[key][which] = part
    assert all(list(found[key]) == list(range(len(positions))) for key, positions in chosen.items())
