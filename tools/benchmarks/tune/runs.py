"""Turns of layouts on a pool of ranks: each is measured once, and what was measured is given to whoever asks again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.planner import Problem
from hetmesh.testing.pool import WorkerError, WorkerPool
from hetmesh.training.environment import open_payloads
from hetmesh.training.tune.findings import Finding
from hetmesh.training.tune.guesses import Layouts
from hetmesh.training.tune.measure import Ranks
from hetmesh.training.tune.tuner import Asked, parsed


@dataclass
class Runs:
    """What layouts of one problem take.

    Attributes:
        path: where turns are kept from one start to the next; None: nowhere.
        known: by layout its turns in order.
    """

    pool: WorkerPool
    asked: Asked
    problem: Problem
    layouts: Layouts
    path: Path | None = None
    known: dict[str, list[Finding]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for own in json.loads(self.path.read_text("utf-8")):
                finding = Finding(**(own | {"steps": tuple(own["steps"])}))
                self.known.setdefault(finding.layout, []).append(finding)

    def turn(self, layout: str, number: int, steps: int) -> Finding:
        """The turn of that number, from 0, of so many steps: of one that had more, the first of them."""
        turns = self.known.setdefault(layout, [])
        if len(turns) <= number or (len(turns[number].steps) < steps and not turns[number].failed):
            turns[number:] = [self.measured(layout, steps)]
            if self.path is not None:
                kept = [asdict(own) for each in self.known.values() for own in each]
                self.path.write_text(json.dumps(kept), "utf-8")
        whole = turns[number]
        return replace(whole, steps=whole.steps[:steps], spent_s=whole.spent_s - sum(whole.steps[steps:]))

    def measured(self, layout: str, steps: int) -> Finding:
        """A turn that nobody has had."""
        try:
            text = self.asked.recipe_text(self.problem, self.layouts.plans[layout])
            return self.pool.run(_measured, self.asked, text, layout, steps, timeout=120)[0]
        except (RecipeError, WorkerError) as error:
            return Finding(layout, failed=str(error).partition("\n")[0])


def _measured(rank: int, asked: Asked, text: str, layout: str, steps: int) -> Finding:
    torch.set_num_threads(1)
    with open_payloads(asked.recipe) as payloads:
        return Ranks(World.current(), payloads).measure(parsed(asked, text), layout, steps)


@contextmanager
def pools() -> Iterator[dict[int, WorkerPool]]:
    """Pools by their number of ranks, made when they are asked for; all are closed in the end."""
    made = _Pools()
    try:
        yield made
    finally:
        for pool in made.values():
            pool.close()


class _Pools(dict[int, WorkerPool]):
    def __missing__(self, ranks: int) -> WorkerPool:
        for other in self.values():  # sleeping workers cost memory
            other.close()
        self.clear()
        self[ranks] = WorkerPool(ranks)
        return self[ranks]
