"""How even the routing of a step was: the load-balancing loss and the tokens of each expert, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetmesh.balance.expert_placement import Placement, skew
from hetmesh.parallel.experts import ExpertLayers, RoutedTokens
from hetmesh.parallel.experts.apply import routed_tokens
from hetmesh.records.step_values import Loads

if TYPE_CHECKING:
    from hetmesh.training.job import Job


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
        for name, rows in self.rows(out).items():
            tokens = self._tokens(name)
            for block, (loss, counts) in (tokens.loads() if tokens is not None else {}).items():
                rows[block, 0], rows[block, 1:] = loss, counts
        return out

    def rows(self, numbers: Tensor) -> dict[str, Tensor]:
        """Views of `[width]` numbers by module, `[blocks, 1 + experts]`."""
        sizes = [len(each.blocks) * (1 + each.count) for each in self.layers.values()]
        return {
            name: part.view(len(self.layers[name].blocks), -1)
            for name, part in zip(self.layers, numbers.split(sizes), strict=True)
        }

    def ranks(self, name: str) -> int:
        """Along the `ep` axis of a module."""
        return self.job.graph[name].mesh.axis_size("ep")

    def _tokens(self, name: str) -> RoutedTokens | None:
        """Of the first of the tensor parallel ranks, which all compute the same."""
        parallel = self.job.parallel.get(name)
        if parallel is None:
            return None
        coordinate = dict(zip(parallel.spec.axes, parallel.spec.coordinate(self.job.world.rank) or (), strict=True))
        return routed_tokens(parallel.module) if coordinate.get("tp", 0) == 0 else None

    def read(self, sums: Tensor, targets: int, placements: Mapping[str, Sequence[Placement]]) -> Loads:
        """From the sum of all ranks' `mine`, on the CPU, the targets of the step, and where experts lay in it, by
        module and block."""
        out: dict[str, dict[str, float]] = {}
        for name, rows in self.rows(sums).items():
            tokens = rows[:, 1:]
            if not tokens.any():  # nothing was computed that could be trained
                continue
            uneven = map(skew, tokens.long().tolist(), placements[name], [self.ranks(name)] * len(tokens))
            out[name] = {
                "balance_loss": round(rows[:, 0].mean().item() / max(targets, 1), 6),
                "max_over_mean": round((tokens.amax(1) / tokens.mean(1)).max().item(), 4),
                "ranks_max_over_mean": round(max(uneven), 4),
                "without_tokens": int((tokens == 0).sum()),
            }
        return out
