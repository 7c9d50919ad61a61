"""How even the routing of a step was: the load-balancing loss and the tokens of each expert, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetmesh.parallel.experts import ExpertLayers, RoutedTokens
from hetmesh.parallel.experts.apply import routed_tokens

if TYPE_CHECKING:
    from hetmesh.training.job import Job

Loads = Mapping[str, Mapping[str, float]]
"""By module: `balance_loss`, the mean over tokens and blocks, without its coefficient (`experts per token` where
routing is even); `max_over_mean`, the tokens of the busiest expert over the mean expert's, in the block where that is
largest; `without_tokens`, experts of any block that got none."""


class ExpertLoads:
    """What the ranks of a job noted of their experts in the last step. Nothing is read until all of it is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        found = {name: adapter.abilities.experts for name, adapter in job.adapters.items()}
        self.layers: dict[str, ExpertLayers] = {name: each for name, each in found.items() if each is not None}

    @property
    def width(self) -> int:
        """Numbers of one rank."""
        return sum(len(each.blocks) * (1 + each.count) for each in self.layers.values())

    def mine(self) -> Tensor:
        """Those of this rank, float64 `[width]` on its device: per block the loss, then the tokens of each expert."""
        out = torch.zeros(self.width, dtype=torch.float64, device=self.job.world.device)
        at = 0
        for name, layers in self.layers.items():
            rows = out[at : at + len(layers.blocks) * (1 + layers.count)].view(len(layers.blocks), -1)
            at += rows.numel()
            tokens = self._tokens(name)
            for block, (loss, counts) in (tokens.loads() if tokens is not None else {}).items():
                rows[block, 0], rows[block, 1:] = loss, counts
        return out

    def _tokens(self, name: str) -> RoutedTokens | None:
        """Of the first of the tensor parallel ranks, which all compute the same."""
        parallel = self.job.parallel.get(name)
        if parallel is None:
            return None
        coordinate = dict(zip(parallel.spec.axes, parallel.spec.coordinate(self.job.world.rank) or (), strict=True))
        return routed_tokens(parallel.module) if coordinate.get("tp", 0) == 0 else None

    def read(self, sums: Tensor, targets: int) -> Loads:
        """From the sum of all ranks' `mine`, on the CPU, and the targets of the step."""
        out: dict[str, dict[str, float]] = {}
        at = 0
        for name, layers in self.layers.items():
            rows = sums[at : at + len(layers.blocks) * (1 + layers.count)].view(len(layers.blocks), -1)
            at += rows.numel()
            tokens = rows[:, 1:]
            if not tokens.any():  # a router that is not trained
                continue
            out[name] = {
                "balance_loss": round(rows[:, 0].mean().item() / max(targets, 1), 6),
                "max_over_mean": round((tokens.amax(1) / tokens.mean(1)).max().item(), 4),
                "without_tokens": int((tokens == 0).sum()),
            }
        return out
