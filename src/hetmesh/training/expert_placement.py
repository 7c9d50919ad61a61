"""Experts that change places in a run: moved every few steps to where the tokens since the last time are even.

Values throughout, equal on all ranks: which expert lies where, by module and block, follows from sums over all ranks.
Checkpoints have experts in their own order, so that every layout reads them, and say beside it where they lay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.balance.expert_placement import Placement, place_experts, skew
from hetmesh.parallel.experts import ExpertBlock, move_experts
from hetmesh.training.expert_loads import ExpertLoads

if TYPE_CHECKING:
    from hetmesh.training.job import Job

Optimizers = tuple[Any, Any] | None
"""Of `make_optimizers`, or `([optimizer, ...], None)`; None: nothing is kept of any parameter."""

State = dict[str, dict[str, list[list[int]]]]
"""What a checkpoint says, by module, a line per block: `placements`, and the `tokens` of each expert since then."""


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

    Attributes:
        placements: by module and block; also of modules whose experts never move.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.loads = job, ExpertLoads(job)
        self.placements: dict[str, list[Placement]] = {n: self._numbered(n) for n in self.loads.layers}
        tables = job.recipe.parallelism.modules
        steps = {name: tables[name].expert_placement_interval for name in self.loads.layers if name in tables}
        self.every = {name: interval for name, interval in steps.items() if interval and self.loads.ranks(name) > 1}
        width = self.loads.width if self.every else 0
        self._noted = torch.zeros(width, dtype=torch.float64, device=job.world.device)

    def behind_step(self, step: int, optimizers: Optimizers) -> dict[str, Moved]:
        """Note what experts got in step `step`, which has just been taken, and move those of modules that are due.
        Collective over all ranks of the job."""
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

    def to_own_places(self, optimizers: Optimizers) -> None:
        """Bring every expert to its own number, where tensors are in the order of experts. Collective."""
        self._bring({name: self._numbered(name) for name in self.every}, optimizers)

    @contextmanager
    def in_own_places(self, optimizers: Optimizers) -> Iterator[None]:
        """For the body, every expert is at its own number. Collective. After an error they stay there."""
        away = {name: self.placements[name] for name in self.every}
        self.to_own_places(optimizers)
        yield
        self._bring(away, optimizers)

    def state(self) -> State:
        """What `restore` needs; of modules whose experts move. Collective over all ranks of the job."""
        tokens = self._tokens() if self.every else {}
        return {n: {"placements": [*map(list, self.placements[n])], "tokens": tokens[n]} for n in self.every}

    def restore(self, saved: Mapping[str, Mapping[str, Sequence[Sequence[int]]]], optimizers: Optimizers) -> None:
        """Go on from a `state`, which may be of another layout, once experts are loaded in their own places.
        Collective."""
        for name in [name for name in self.every if name in saved]:
            self._bring({name: [tuple(each) for each in saved[name]["placements"]]}, optimizers)
            if self.job.world.rank == 0:  # the others' shares are in its sums
                rows = self.loads.rows(self._noted)[name]
                rows[:, 1:] = torch.tensor(saved[name]["tokens"], dtype=torch.float64)

    def _bring(self, placements: Mapping[str, list[Placement]], optimizers: Optimizers) -> None:
        world = self.job.world
        for name, wanted in placements.items():
            if wanted == self.placements[name]:
                continue
            world.connect()
            parallel = self.job.parallel.get(name)
            for block in parallel.module.modules() if parallel is not None else ():
                if isinstance(block, ExpertBlock) and block.placement != wanted[block.number]:
                    move_experts(block, wanted[block.number], lambda p: _moments(p, optimizers), world)
            self.placements[name] = wanted

    def _tokens(self) -> dict[str, list[list[int]]]:
        """Of each expert since its module was last due, over all ranks, by module and block."""
        world, sums = self.job.world, self._noted.clone()
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
