"""Users' classes after the LLM, and a loss of one's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """Of the rows of an item, together, the rows of a tensor `[1, 8, 8]`."""

    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, in_features: int, out_features: int, queries: int):
        super().__init__()
        self.queries, self.up = queries, nn.Linear(queries * in_features, 12)
        self.down = nn.Linear(12, 8 * out_features)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows.flatten(1)).tanh()).unflatten(1, (8, -1))


class Flow(Head):
    """The velocities of these rows."""

    flows = True

    def __init__(self, in_features: int, out_features: int, queries: int):
        super().__init__(in_features, out_features, queries)
        self.noisy = nn.Linear(out_features + 1, out_features)

    def forward(self, rows: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        at = time[:, None, None].expand(*noisy.shape[:2], 1)
        return super().forward(rows) + self.noisy(torch.cat([noisy, at], -1))


def absolute_error(prediction: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (prediction - batch["targets"]).abs().sum()
