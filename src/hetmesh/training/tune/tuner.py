"""Tuner: lets layouts run in turns until none is left that is predicted to win; and what ranks do meanwhile."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hetmesh.boundary import World, init
from hetmesh.boundary.world import gather_objects
from hetmesh.cost import Machine, load_machine
from hetmesh.errors import LOST_PEER, HetmeshError, RecipeError, UsageError
from hetmesh.planner import LayoutPlan, Problem
from hetmesh.recipe.recipe import Recipe, parse_recipe, place_beside
from hetmesh.resolve.planning import certified, planned_text, recipe_macro_batch, recipe_problem
from hetmesh.resolve.resolved import resolve
from hetmesh.training.environment import choose_kernels, open_payloads
from hetmesh.training.tune.constants import corrected_memory, fit_constants, with_factors
from hetmesh.training.tune.findings import Finding, Findings
from hetmesh.training.tune.guesses import Guess, Layouts
from hetmesh.training.tune.measure import WARM_UP, Ranks, out_of_memory
from hetmesh.training.tune.turns import STEPS, Ranking, Turn, next_turn, rank

STATE_FILE = "tune.json"
_MOST_STEPS = WARM_UP + STEPS + 2


class Tuner:
    """The search, without ranks: `next` says whose turn it is, `add` takes what came of it.

    Args:
        machine: whose constants may be wrong.
        budget: seconds of turns, after which there is no further one; None: as many as it takes.

    Attributes:
        machine: with the constants that fit what was measured.
        ranking: what is predicted by now.
        untried: the turn for which the budget was too small; None: it has sufficed.
    """

    def __init__(self, layouts: Layouts, machine: Machine, findings: Findings, budget: float | None = None) -> None:
        self.layouts, self.given, self.findings, self.budget = layouts, machine, findings, budget
        self.machine, self.ranking = machine, Ranking()
        self.untried: Turn | None = None
        self._guesses: tuple[Machine | None, dict[str, Guess]] = None, {}
        if findings.first_factors and not layouts.complete:
            layouts.search(with_factors(machine, findings.first_factors))
        self._look()

    def _look(self) -> None:
        """Predict all layouts again."""
        machine = with_factors(self.given, self.findings.factors)
        if machine != self._guesses[0]:
            self._guesses = machine, self.layouts.guesses(machine)
        guesses = self._guesses[1]
        self.machine = corrected_memory(self.layouts, machine, self.findings, guesses)
        limit = (self.layouts.limit(self.machine) or math.inf) - (self.machine.context_bytes - machine.context_bytes)
        ran = self.findings.seconds
        fitting = {k: own for k, own in guesses.items() if own.peak_bytes + own.reserved <= limit or k in ran}
        self.ranking = rank(self.layouts, fitting, self.findings)

    def add(self, finding: Finding) -> None:
        """Take it in; fit and predict again."""
        again, predicted = finding.layout in self.findings.seconds, self.ranking.seconds.get(finding.layout)
        self.findings.add(finding)
        enough = finding.steps and not again and len(self.findings.seconds) >= self.ranking.first
        if enough and self._unexpected(finding, predicted):
            first = not self.findings.factors
            self.findings.factors = fit_constants(self.layouts, self.given, self.findings)
            self.findings.first_factors = self.findings.first_factors or self.findings.factors
            self.findings.save()
            if first and not self.layouts.complete:  # of many layouts other ones look fast on another machine
                self.layouts.search(with_factors(self.given, self.findings.factors))
                self.__dict__.pop("before", None)
        self._look()

    def _unexpected(self, finding: Finding, predicted: float | None) -> bool:
        """Whether the constants do not say what a layout takes as well as they say it of others."""
        if not self.findings.factors or predicted is None:
            return True
        return abs(math.log(self.findings.seconds[finding.layout] / predicted)) > self.ranking.doubt

    def next(self) -> Turn | None:
        """None: no layout is predicted to win by more than scatter, or the budget is spent."""
        turn = next_turn(self.ranking, self.findings, self.layouts.common)
        if turn is None or self.budget is None or not self.findings.each:
            return turn
        usual = self.findings.spent_s / len(self.findings.each)
        self.untried = turn if self.findings.spent_s + usual > self.budget else None
        return None if self.untried else turn

    @cached_property
    def before(self) -> dict[str, float]:
        """Seconds of each layout on the machine that was given."""
        return {name: guess.seconds for name, guess in self.layouts.guesses(self.given).items()}

    @property
    def best(self) -> str | None:
        """The layout that is expected to be fastest of those that ran; None: none did."""
        expected = {name: own for name, own in self.ranking.expected.items() if name in self.layouts.plans}
        return min(expected, key=lambda name: expected[name]) if expected else None


@dataclass(frozen=True)
class Asked:
    """What a tuning is asked for, equal on all ranks.

    Attributes:
        recipe, path, text, overrides: the recipe, and what it was read from.
        ranks: how many there are.
        machine, profile, fixed: as of `recipe_problem`.
        budget: see `Tuner`.
        folder: where the findings are kept; None: nowhere.
    """

    recipe: Recipe
    path: str
    text: str
    overrides: Sequence[str] = ()
    ranks: int = 1
    machine: str | None = None
    profile: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    folder: Path | None = None

    def problem(self) -> Problem:
        """What the planner works on."""
        resolved, machine, profile = resolve(self.recipe), self.machine, self.profile
        problem = recipe_problem(resolved, machine=machine, ranks=self.ranks, fixed=self.fixed, profile=profile)
        return certified(problem, recipe_macro_batch(problem))[0]

    def recipe_text(self, problem: Problem, plan: LayoutPlan) -> str:
        """The recipe with a layout. Raises RecipeError: it cannot be written so."""
        return planned_text(self.recipe, self.text, self.overrides, problem, plan)

    @property
    def digest(self) -> str:
        """Of what findings are about."""
        machine = load_machine(self.machine or self.recipe.metrics.machine or "cpu")
        recipe = self.recipe.model_dump_json(by_alias=True)
        about = recipe, machine, self.profile, self.ranks, sorted(self.fixed.items())
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def parsed(asked: Asked, text: str) -> Recipe:
    """A planned recipe, of enough steps."""
    steps = max(asked.recipe.training.steps, _MOST_STEPS)
    recipe = parse_recipe(text, (f"--training.steps={steps}",))
    place_beside(recipe, str(Path(asked.path).resolve().parent))
    return recipe


def tune(asked: Asked, report: Callable[[Tuner], None]) -> Tuner | None:
    """Tune on the ranks of this job, on each of which it is called; on rank 0 the search comes back. `report`: called
    there after each turn.

    A layout that fails is a finding. Ranks that wait for one that failed lose their connections, so all leave the job
    and meet in a new one. Where they do not all come, this raises; started again, it goes on behind that layout.
    """
    with open_payloads(asked.recipe) as payloads:
        timeout = asked.recipe.comm.init_timeout_seconds
        world = init(timeout=timeout, init_timeout=timeout)
        choose_kernels(asked.recipe.debug.deterministic, world.device)
        try:
            deciding = _Deciding(asked, report) if world.rank == 0 else None
            ranks = Ranks(world, payloads)
            while (turn := _agreed(deciding, world)) is not None:
                layout, text, steps = turn
                started = time.perf_counter()
                try:
                    found = ranks.measure(parsed(asked, text), layout, steps)
                except Exception as error:
                    said, full = f"{type(error).__name__}: {error}", out_of_memory(error)
                    world.close()
                    error.__traceback__ = error.__cause__ = error.__context__ = None
                    world = ranks = None  # type: ignore[assignment]
                else:
                    said = ""
                gc.collect()
                if said:  # a rank that waits for one that it never met notices after `timeout`
                    world = init(timeout=timeout, init_timeout=2 * timeout)
                    ranks = Ranks(world, payloads)
                    found = _failed(layout, gather_objects((said, full), world, "why a layout failed"), started)
                if deciding is not None:
                    deciding.add(found)
            return None if deciding is None else deciding.tuner
        finally:
            if world is not None:
                world.close()


def _failed(layout: str, everyone: Sequence[tuple[str, bool]], started: float) -> Finding:
    """What ranks say of a layout that failed on them; those that lost a peer know least."""
    full = [rank for rank, (_, full) in enumerate(everyone) if full]
    ranks = full or sorted(range(len(everyone)), key=lambda rank: bool(LOST_PEER.search(everyone[rank][0])))
    said = f"rank {ranks[0]}: {everyone[ranks[0]][0]}".partition("\n")[0]
    return Finding(layout, spent_s=time.perf_counter() - started, failed=said, out_of_memory=bool(full))


class _Deciding:
    """What rank 0 does between turns."""

    def __init__(self, asked: Asked, report: Callable[[Tuner], None]) -> None:
        self.asked, self.report = asked, report
        problem = asked.problem()
        path = None if asked.folder is None else asked.folder / STATE_FILE
        findings = Findings(asked.digest) if path is None else Findings.load(path, asked.digest)
        findings.peak_flops = findings.peak_flops or dict(problem.machine.peak_flops)
        machine = replace(problem.machine, peak_flops=findings.peak_flops)  # a CPU's is measured at each start
        self.problem = replace(problem, machine=machine)
        layouts = Layouts(self.problem)
        if not layouts.plans:
            raise UsageError("no layout of these ranks can be simulated; `hetmesh plan` says why")
        self.tuner = Tuner(layouts, self.problem.machine, findings, asked.budget)

    def next(self) -> tuple[str, str, int] | None:
        """The layout that runs next, its recipe, and its timed steps."""
        while (turn := self.tuner.next()) is not None:
            plan = self.tuner.layouts.plans[turn.layout]
            try:
                text = self.asked.recipe_text(self.problem, plan)
            except RecipeError as error:
                self.add(Finding(turn.layout, failed=str(error).partition("\n")[0]))
                continue
            self.tuner.findings.begin(turn.layout)
            return turn.layout, text, turn.steps
        return None

    def add(self, finding: Finding) -> None:
        self.tuner.add(finding)
        self.report(self.tuner)


def _agreed(deciding: _Deciding | None, world: World) -> tuple[str, str, int] | None:
    """What rank 0 decides, on all ranks. Raises HetmeshError: it could not."""
    said: list[Any] = [None, ""]
    if deciding is not None:
        try:
            said[0] = deciding.next()
        except HetmeshError as error:
            said[1] = str(error)
    with world.waiting("which layout runs next", "rank 0"):
        dist.broadcast_object_list(said, src=0, group=world.group(range(world.size)), device=world.device)
    if said[1]:
        raise HetmeshError(said[1])
    return said[0]
