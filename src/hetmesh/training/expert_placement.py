"""How even the routing of a step was, and experts that move every few steps to where the tokens since then are even.

Values throughout, equal on all ranks: which expert lies where, by module and block, follows from sums over all ranks.
Checkpoints have experts in the order of their numbers, so that every layout reads them, and record where they lay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.balance.place_experts import Placement, place_experts, skew
from hetmesh.boundary import World
from hetmesh.graph import ModuleGraph
from hetmesh.models import Adapter
from hetmesh.parallel import ParallelModule
from hetmesh.parallel.experts import ExpertBlock, ExpertLayers, RoutedTokens, move_experts
from hetmesh.parallel.experts.routed_tokens import routed_tokens
from hetmesh.records.metrics import Loads

Optimizers = tuple[Any, Any] | None
"""Of `make_optimizers`, or `([optimizer, ...], None)`; None: nothing is kept of any parameter."""

State = dict[str, dict[str, list[list[int]]]]
"""What a checkpoint says, by module, a line per block: `placements`, and the `tokens` of each expert since then."""


class ExpertLoads:
    """The load-balancing loss and tokens of each expert in the last step, over all ranks; on their device until read.
    `parallel`: the modules of this rank."""

    def __init__(
        self, world: World, graph: ModuleGraph, adapters: Mapping[str, Adapter], parallel: Mapping[str, ParallelModule]
    ) -> None:
        self.world, self.graph, self.parallel = world, graph, parallel
        experts = {name: adapter.abilities.experts for name, adapter in adapters.items()}
        self.layers: dict[str, ExpertLayers] = {name: layers for name, layers in experts.items() if layers is not None}

    @property
    def width(self) -> int:
        """Numbers of one rank."""
        return sum(len(layers.blocks) * (1 + layers.count) for layers in self.layers.values())

    def mine(self) -> Tensor:
        """Those of this rank, float64 `[width]` on its device: per block the loss, then the tokens of each expert."""
        out = torch.zeros(self.width, dtype=torch.float64, device=self.world.device)
        for name, rows in self.rows(out).items():
            tokens = self._tokens(name)
            for block, (loss, counts) in (tokens.loads() if tokens is not None else {}).items():
                rows[block, 0], rows[block, 1:] = loss, counts
        return out

    def rows(self, numbers: Tensor) -> dict[str, Tensor]:
        """Views of `[width]` numbers by module, `[blocks, 1 + experts]`."""
        sizes = [len(layers.blocks) * (1 + layers.count) for layers in self.layers.values()]
        return {
            name: part.view(len(self.layers[name].blocks), -1)
            for name, part in zip(self.layers, numbers.split(sizes), strict=True)
        }

    def ranks(self, name: str) -> int:
        """Along the `ep` axis of a module."""
        return self.graph[name].mesh.axis_size("ep")

    def _tokens(self, name: str) -> RoutedTokens | None:
        """Of the first of the tensor parallel ranks, which all compute the same."""
        parallel = self.parallel.get(name)
        if parallel is None:
            return None
        coordinate = dict(zip(parallel.spec.axes, parallel.spec.coordinate(self.world.rank) or (), strict=True))
        return routed_tokens(parallel.module) if coordinate.get("tp", 0) == 0 else None

    def read(self, sums: Tensor, targets: int, placements: Mapping[str, Sequence[Placement]]) -> Loads:
        """From the sum of all ranks' `mine`, the step's targets, and where experts lay in it, by module and block."""
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


@dataclass(frozen=True)
class Moved:
    """What became of the experts of one module.

    Attributes:
        moved: experts that changed their rank, over all blocks.
        experts: over all blocks.
        before, after: the tokens of the fullest rank over the mean rank's, as measured before and as they would have
            been; of the block where that is largest.
        tokens: of each expert since the last time, by block.
    """

    moved: int
    experts: int
    before: float
    after: float
    tokens: Sequence[Sequence[int]] = ()

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl has of it."""
        numbers = {"ranks_max_over_mean_before": self.before, "ranks_max_over_mean_after": self.after}
        rounded = {key: round(value, 4) for key, value in numbers.items()}
        return {"moved": self.moved, "experts": self.experts, **rounded, "tokens": self.tokens}

    def __str__(self) -> str:
        if not self.moved:
            return f"none of {self.experts} moved, tokens of ranks max/mean {self.before:.2f}"
        return (
            f"{self.moved} of {self.experts} moved to other ranks, tokens of ranks max/mean {self.before:.2f} -> "
            f"{self.after:.2f}"
        )


class ExpertPlacement:
    """Where the experts of a job lie.

    Args:
        intervals: by module, the steps after which its experts may move; 0: never.

    Attributes:
        placements: by module and block; also of modules whose experts never move.
    """

    def __init__(self, loads: ExpertLoads, intervals: Mapping[str, int]) -> None:
        self.loads, self.world = loads, loads.world
        self.placements: dict[str, list[Placement]] = {n: self._numbered(n) for n in self.loads.layers}
        moving = [name for name in loads.layers if intervals.get(name) and loads.ranks(name) > 1]
        self.every = {name: intervals[name] for name in moving}
        width = loads.width if self.every else 0
        self._noted = torch.zeros(width, dtype=torch.float64, device=self.world.device)

    def after_step(self, step: int, optimizers: Optimizers) -> dict[str, Moved]:
        """Note what experts got in step `step`, just taken, and move those of modules that are due. Collective."""
        if not self.every:
            return {}
        self._noted += self.loads.mine()
        due = [name for name, interval in self.every.items() if step % interval == 0]
        tokens = self._tokens() if due else {}
        out = {}
        for name in due:
            before, ranks = self.placements[name], self.loads.ranks(name)
            after = [place_experts(row, ranks, now) for row, now in zip(tokens[name], before, strict=True)]
            self._bring({name: after}, optimizers)
            self.loads.rows(self._noted)[name].zero_()
            out[name] = Moved(
                moved=sum(_changes_of_rank(*pair, ranks) for pair in zip(before, after, strict=True)),
                experts=sum(map(len, after)),
                before=max(map(skew, tokens[name], before, [ranks] * len(before))),
                after=max(map(skew, tokens[name], after, [ranks] * len(after))),
                tokens=tokens[name],
            )
        return out

    def to_expert_order(self, optimizers: Optimizers) -> None:
        """Bring every expert to the place of its number, so that tensors are in the order of experts. Collective."""
        self._bring({name: self._numbered(name) for name in self.every}, optimizers)

    @contextmanager
    def in_expert_order(self, optimizers: Optimizers) -> Iterator[None]:
        """In the body, every expert is in the place of its number. Collective. After an error they stay there."""
        away = {name: self.placements[name] for name in self.every}
        self.to_expert_order(optimizers)
        yield
        self._bring(away, optimizers)

    def state(self) -> State:
        """What `restore` needs; of modules whose experts move. Collective over all ranks of the job."""
        tokens = self._tokens() if self.every else {}
        return {n: {"placements": [*map(list, self.placements[n])], "tokens": tokens[n]} for n in self.every}

    def restore(self, saved: Mapping[str, Mapping[str, Sequence[Sequence[int]]]], optimizers: Optimizers) -> None:
        """Go on from a `state` (of any layout) once experts are loaded in the places of their numbers. Collective."""
        for name in [name for name in self.every if name in saved]:
            self._bring({name: [tuple(placement) for placement in saved[name]["placements"]]}, optimizers)
            if self.world.rank == 0:  # the others' shares are in its sums
                rows = self.loads.rows(self._noted)[name]
                rows[:, 1:] = torch.tensor(saved[name]["tokens"], dtype=torch.float64)

    def _bring(self, placements: Mapping[str, list[Placement]], optimizers: Optimizers) -> None:
        world = self.world
        for name, wanted in placements.items():
            if wanted == self.placements[name]:
                continue
            world.connect()
            parallel = self.loads.parallel.get(name)
            for block in parallel.module.modules() if parallel is not None else ():
                if isinstance(block, ExpertBlock) and block.placement != wanted[block.number]:
                    move_experts(block, wanted[block.number], lambda p: _moments(p, optimizers), world)
            self.placements[name] = wanted

    def _tokens(self) -> dict[str, list[list[int]]]:
        """Of each expert since its module was last due, over all ranks, by module and block."""
        world, sums = self.world, self._noted.clone()
        with world.waiting("the tokens of experts on all ranks"):
            dist.all_reduce(sums, group=world.group(range(world.size)))
            rows = self.loads.rows(sums.cpu())
        return {name: each[:, 1:].long().tolist() for name, each in rows.items()}

    def _numbered(self, name: str) -> list[Placement]:
        layers = self.loads.layers[name]
        return [tuple(range(layers.count))] * len(layers.blocks)


def _changes_of_rank(before: Placement, after: Placement, ranks: int) -> int:
    each = len(before) // ranks
    parts = [slice(i, i + each) for i in range(0, len(before), each)]
    return sum(len(set(after[part]) - set(before[part])) for part in parts)


def _moments(parameter: nn.Parameter, optimizers: Optimizers) -> list[Tensor]:
    """What an optimizer keeps of a parameter beside numbers such as its steps."""
    kept = [sorted(o.state[parameter].items()) for o in (optimizers or ([],))[0] if parameter in o.state]
    return [each for state in kept for _, each in state if isinstance(each, DTensor) and each.shape == parameter.shape]
