"""What the simulator says of layouts on a machine: of a step, of what ranks do in it, and of their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hetmesh.cost import Machine
from hetmesh.errors import HetmeshError
from hetmesh.planner import LayoutPlan, Predictor, Problem, search
from hetmesh.planner.predict import deciding_predictor
from hetmesh.simulate import Timeline

MOST_LAYOUTS = 96
"""Of those that the planner has simulated, how many are candidates, the fastest first."""
KINDS = {"F": "forward", "GATHER": "forward", "B": "backward", "I": "backward", "W": "backward"}
SUMS, OPTIMIZER, COLLECTIVES = "sums", "optimizer", "collectives"


@dataclass(frozen=True)
class Guess:
    """Of one layout.

    Attributes:
        seconds: of a step.
        peak_bytes: of tensors on the rank that holds most.
        reserved: bytes of communicators and context beside them.
        parts: seconds on the mean rank (`step_parts`).
    """

    seconds: float
    peak_bytes: int = 0
    reserved: int = 0
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def part_name(kind: str, target: str) -> str:
    """Of a span: `"llm forward"`, or one of the names above. `kind`: of `simulate.timeline.KINDS`."""
    return f"{target.partition('.')[0]} {KINDS[kind]}" if kind in KINDS else SUMS if kind == "REDUCE" else OPTIMIZER


def step_parts(timeline: Timeline) -> dict[str, float]:
    """Seconds of a simulated step on the mean rank, by module and direction, of sums and the optimizer, and of these
    the collectives inside layers."""
    size, parts = [len(ranks) for ranks in timeline.tracks], defaultdict[str, float](float)
    for span in timeline.spans():
        parts[part_name(span.kind, span.target)] += size[span.track] * (span.stop - span.start)
    parts[COLLECTIVES] = sum(n * inside for n, inside in zip(size, timeline.collectives, strict=True))
    return {name: seconds / sum(size) for name, seconds in parts.items()}


class Layouts:
    """The candidates of a problem, those that the planner simulates; what they are is worked out once for all machines.

    Attributes:
        plans: by name.
        complete: whether the planner has no others.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.plans, self.complete = problem, dict[str, LayoutPlan](), False
        self._predictor = deciding_predictor(problem, 1)  # few batches are measured, too
        self.search(problem.machine)

    def search(self, machine: Machine) -> None:
        """Add what the planner simulates for a machine: the fastest, and the fastest common one wherever it stands."""
        found = search(replace(self.problem, machine=machine), exact=self._predictor.on(machine))
        every = sorted(found.every, key=lambda own: (own.step_s, str(own.plan)))
        common = [own for own in every if own.plan.placement == "homogeneous"][:1]
        self.plans |= {str(own.plan): own.plan for own in (*every[:MOST_LAYOUTS], *common)}
        self.complete = found.considered == found.simulated <= MOST_LAYOUTS

    @property
    def common(self) -> set[str]:
        """Those that other frameworks have, too: all modules in one layout."""
        return {name for name, plan in self.plans.items() if plan.placement == "homogeneous"}

    def limit(self, machine: Machine) -> int:
        """Bytes that a rank of that machine may hold; 0: not known."""
        return replace(self.problem, machine=machine).limit

    def guesses(self, machine: Machine, names: Iterable[str] | None = None, *, parts: bool = False) -> dict[str, Guess]:
        """By name, of `names` or all; those that cannot run are left out."""
        predictor, found = self._predictor.on(machine), {}
        for name in self.plans if names is None else names:
            try:
                found[name] = self._guess(predictor, self.plans[name], parts)
            except HetmeshError:
                continue
        return found

    def _guess(self, predictor: Predictor, plan: LayoutPlan, parts: bool) -> Guess:
        (timeline,) = predictor.timelines(plan)
        assert predictor.laid is not None
        reserved = predictor.problem.reserved(predictor.laid[plan.key()][0].whole)
        return Guess(timeline.makespan, max(timeline.peak_bytes), reserved, step_parts(timeline) if parts else {})
