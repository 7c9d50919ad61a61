"""The search: the best layouts of every placement, by simulation.

All candidates are estimated (`estimate.py`). Those with the least estimates are simulated as they would run, with a
sampled batch as the balancer lays it out; the best of these again with more lanes and batches, then what differs from
the best in one choice, until nothing near is faster. Where there are no more than would be simulated, all are. The best
pipeline with encoders on its ranks is simulated under bubble_fill too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hetmesh.errors import HetmeshError
from hetmesh.planner.candidates import (
    can_run,
    encoder_pipelines,
    homogeneous,
    microbatch_sizes,
    module_plans,
    rank_splits,
    reshard_variants,
    schedules,
    with_schedules,
)
from hetmesh.planner.estimate import Estimator
from hetmesh.planner.layout_plan import PLACEMENTS, LayoutPlan, ModulePlan
from hetmesh.planner.predict import MIN_LANES, Prediction, Predictor, batch_flops
from hetmesh.planner.problem import Problem
from hetmesh.simulate import LayerCosts

_MAX_SIMULATED = 48  # at most, of each placement
_MAX_FITTING, _MAX_NEIGHBOURS, _FINALISTS, _MAX_RESHARDED = 12, 4, 4, 8
_MAX_UNEVEN_SPLITS = 12  # splits of microbatches over an encoder's lanes
BATCHES = 2
"""Sampled batches of the simulation that decides, unless `search` is given another number."""


Split = tuple[int, ...]
"""Of the microbatches of an LLM, how many each encoder pipeline on its ranks takes."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: of each placement, the fastest first; what does not fit into memory is not in here.
        considered: candidates.
        simulated: of them, those that were.
        too_large: of them, those that do not fit.
        refused: why others cannot run, and how many.
        least_bytes: of the rank that holds most, where that is least of all that were simulated; None: none was.
    """

    best: Mapping[str, tuple[Prediction, ...]]
    considered: int = 0
    simulated: int = 0
    too_large: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    least_bytes: int | None = None

    @property
    def fastest(self) -> Prediction | None:
        """Of all placements."""
        return min((found[0] for found in self.best.values() if found), key=lambda p: p.step_s, default=None)


def search(problem: Problem, *, shown: int = 3, batches: int = BATCHES) -> Found:
    """Search the layouts of `problem`. Deterministic.

    Args:
        shown: how many of each placement are returned.
        batches: sampled global batches whose mean decides; a certified macro batch says how many (`macro_batch.py`).
    """
    return _Search(problem, batches).run(shown)


class _Search:
    def __init__(self, problem: Problem, batches: int) -> None:
        self.problem = problem
        layers = LayerCosts(problem.machine, problem.profile)
        self.estimator = Estimator(problem, layers)
        assignments: dict = {}  # many layouts have the same lanes, and so the same balanced batches
        self.predictors = {
            "quick": Predictor(problem, layers=layers, quick=True, assignments=assignments),
            "one batch": Predictor(problem, 1, MIN_LANES, layers, assignments=assignments),
            "exact": Predictor(problem, batches, MIN_LANES, layers, assignments=assignments),
        }
        self.refused: Counter[str] = Counter()
        self.known: dict[tuple[str, tuple], Prediction | None] = {}
        self.estimated: dict[tuple, float] = {}

    def run(self, shown: int) -> Found:
        best = {}
        for placement in PLACEMENTS:
            every = (way for plan in candidates(self.problem, placement) for way in reshard_variants(plan))
            plans = list(itertools.islice(every, _MAX_SIMULATED + 1))
            if len(plans) <= _MAX_SIMULATED:  # estimates have nothing to choose from
                self.estimated |= {plan.key(): 0.0 for plan in plans}
                best[placement] = tuple(self._filled(self._measured(plans))[:shown])
                continue
            promising = self._promising(candidates(self.problem, placement), or_least=True)
            leaders = self._simulated(promising, _MAX_FITTING)[: max(_FINALISTS, shown)]
            firsts = {plan.microbatch_size: plan for plan in reversed(promising)}  # estimates compare sizes badly
            chosen = {plan.key(): plan for plan in (*leaders, *firsts.values())}
            final = self._filled(self._reshard_variants(self._near(list(chosen.values()))))
            best[placement] = tuple(final[:shown])
        asked = {key: found for (_, key), found in self.known.items()}
        found = [plan for plan in asked.values() if plan is not None]
        too_large = sum(not plan.fits for plan in found)
        least = min((plan.peak_bytes for plan in found), default=None)
        return Found(best, len(self.estimated), len(asked), too_large, dict(self.refused), least)

    def _predict(self, plan: LayoutPlan, how: str = "quick") -> Prediction | None:
        key = how, plan.key()
        if key not in self.known:
            try:
                self.known[key] = self.predictors[how].predict(plan)
            except HetmeshError as error:
                self.refused[str(error).partition("\n")[0]] += 1
                self.known[key] = None
        return self.known[key]

    def _promising(self, plans: Iterable[LayoutPlan], or_least: bool = False) -> list[LayoutPlan]:
        """The candidates with the least estimates, of those that may fit. Where none may, and with `or_least`, some of
        the least bytes: their simulation says whether that is so, and what would fit."""
        limit = self.problem.limit
        found: list[tuple[float, int, LayoutPlan]] = []
        larger: list[tuple[int, int, LayoutPlan]] = []
        for plan in plans:
            if plan.key() in self.estimated:
                continue
            try:
                ways = [(self.estimator.estimate(way), way) for way in reshard_variants(plan)]
            except HetmeshError as error:
                self.refused[str(error).partition("\n")[0]] += 1
                continue
            self.estimated[plan.key()] = ways[0][0][0]
            (seconds, size), plan = min(ways, key=lambda way: (limit and way[0][1] > limit, *way[0]))
            if not limit or size <= limit:
                found.append((seconds, len(found), plan))
            else:
                larger.append((size, len(larger), plan))
        if or_least and not found:
            return [plan for _, _, plan in heapq.nsmallest(_MAX_NEIGHBOURS, larger)]
        return [plan for _, _, plan in heapq.nsmallest(_MAX_SIMULATED, found)]

    def _simulated(self, plans: Iterable[LayoutPlan], enough: int) -> list[LayoutPlan]:
        """Plans by their simulated seconds, once enough have been found that fit."""
        found: list[Prediction] = []
        for plan in plans:
            prediction = self._predict(plan)
            if prediction is not None and prediction.fits:
                found.append(prediction)
                if len(found) == enough:
                    break
        return [prediction.plan for prediction in sorted(found, key=_by_seconds)]

    def _near(self, plans: list[LayoutPlan]) -> list[Prediction]:
        """The best of `plans`, and of what differs from the best in one choice, until that is no faster."""
        pool = dict.fromkeys(plan.key() for plan in plans)
        found = self._measured(plans)
        while found:
            leader = found[0]
            near = [plan for plan in neighbours(self.problem, leader.plan) if plan.key() not in pool]
            pool |= dict.fromkeys(plan.key() for plan in near)
            near = [plan for plan in near if ("quick", plan.key()) not in self.known]
            for plan in near:
                self.estimated.pop(plan.key(), None)
            better = self._measured(self._simulated(self._promising(near), _MAX_NEIGHBOURS)[:2])
            known = {each.plan.key() for each in found}
            found = sorted([*found, *(each for each in better if each.plan.key() not in known)], key=_by_seconds)
            if found[0] is leader:
                break
        return found

    def _reshard_variants(self, found: list[Prediction]) -> list[Prediction]:
        """With all ways in which FSDP may gather the best."""
        best = [prediction.plan for prediction in found[:_MAX_RESHARDED]]
        more = {way.key(): way for plan in best for way in reshard_variants(plan)}
        for prediction in found:
            more.pop(prediction.plan.key(), None)
        self.estimated |= dict.fromkeys(more, 0.0)
        return sorted([*found, *self._measured(more.values())], key=_by_seconds)

    def _filled(self, found: list[Prediction]) -> list[Prediction]:
        """With the best pipeline on whose ranks encoders lie under bubble_fill too, if that is faster than without, and
        with whole microbatches for their lanes: it takes long to place, so no other is tried."""
        fixed = self.problem.fixed.get(("", "schedule"))
        wanted, colocated = fixed or "three_phase", [p for p in found if p.plan.placement == "colocated"]
        best = next((p for p in colocated if p.plan.schedule == wanted), None)
        if best is None or fixed not in (None, "bubble_fill"):
            return found
        filled = replace(best.plan, schedule="bubble_fill")
        self.estimated.setdefault(filled.key(), 0.0)
        plans = [*self._uneven(filled)] if fixed else [filled, *self._uneven(filled)]
        more = [p for p in self._measured(plans) if p.step_s < 0.999 * best.step_s]
        return sorted([*more, *found], key=_by_seconds)

    def _uneven(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """`plan` with the best split of microbatches over the lanes of each encoder in turn, as one batch has it."""
        sink = plan.modules[self.problem.graph.sink.name]
        microbatches = self.problem.global_batch_size // (sink.lanes * plan.microbatch_size)
        for name in self.problem.own[:-1]:
            if (pipelines := encoder_pipelines(plan, name)) < 2:
                continue

            def split(shares: Split, name: str = name, plan: LayoutPlan = plan) -> LayoutPlan:
                return replace(plan, shares={**plan.shares, name: shares})

            def seconds(shares: Split, split: Callable[[Split], LayoutPlan] = split) -> float:
                self.estimated.setdefault(split(shares).key(), 0.0)
                found = self._predict(split(shares), "one batch")
                return found.step_s if found is not None and found.fits else math.inf

            shares = best_split(microbatches, pipelines, seconds, _MAX_UNEVEN_SPLITS)
            if shares is not None:
                plan = split(shares)
                yield plan

    def _measured(self, plans: Iterable[LayoutPlan]) -> list[Prediction]:
        found = [p for plan in plans if (p := self._predict(plan, "exact")) is not None and p.fits]
        return sorted(found, key=_by_seconds)


def _by_seconds(prediction: Prediction) -> tuple[float, str]:
    return prediction.step_s, str(prediction.plan)


def candidates(problem: Problem, placement: str) -> Iterator[LayoutPlan]:
    """All candidates of a placement."""
    *encoders, last = problem.own
    if placement == "homogeneous":
        for sink in module_plans(problem, last, 0, problem.ranks):
            yield from with_schedules(problem, placement, homogeneous(problem, sink))
        return
    if not encoders:
        return
    places = [dict.fromkeys(problem.own, (0, problem.ranks))]
    if placement == "disjoint":
        flops = batch_flops(problem)
        places = []
        for ranks in rank_splits(problem, {name: flops[name] for name in problem.own}):
            stops = list(itertools.accumulate(ranks))
            places.append(dict(zip(problem.own, zip([0, *stops], stops, strict=False), strict=True)))
    for place in places:
        layouts = [list(module_plans(problem, name, start, stop - start)) for name, (start, stop) in place.items()]
        for chosen in itertools.product(*layouts):
            yield from with_schedules(problem, placement, [dict(zip(problem.own, chosen, strict=True))])


def neighbours(problem: Problem, plan: LayoutPlan) -> Iterator[LayoutPlan]:
    """Candidates that differ from `plan` in one choice: the layout of one module, the microbatch size, the schedule, or
    a few ranks that go from one module to another."""
    for name, own in plan.modules.items():
        first, stop = own.ranks
        for other in module_plans(problem, name, first, stop - first):
            moved = sum(a != b for a, b in zip(other.degrees, own.degrees, strict=True))
            moved += other.expert_parallel != own.expert_parallel
            if other != own and moved + (other.activation_checkpoint != own.activation_checkpoint) <= 2:
                yield from _with(problem, plan, {**plan.modules, name: other})
    yield from _with(problem, plan, plan.modules)


def _with(problem: Problem, plan: LayoutPlan, modules: Mapping[str, ModulePlan]) -> Iterator[LayoutPlan]:
    sink = modules[problem.graph.sink.name]
    if plan.placement == "homogeneous":
        for same in homogeneous(problem, sink):
            yield from with_schedules(problem, plan.placement, [same])
        return
    sizes = microbatch_sizes(problem, sink.lanes, sink.degree("pp"))
    kept = [plan.microbatch_size] if plan.microbatch_size in sizes and modules is not plan.modules else sizes
    for size in kept:
        for schedule, per_rank in schedules(problem, plan.placement, sink):
            near = replace(plan, modules=modules, microbatch_size=size, schedule=schedule, stages_per_rank=per_rank)
            if can_run(near):
                yield near


def splits(microbatches: int, pipelines: int) -> Iterator[Split]:
    """All C(microbatches - 1, pipelines - 1) ways to give each pipeline at least one microbatch, ascending; none where
    there are fewer microbatches than pipelines."""
    for cuts in itertools.combinations(range(1, microbatches), pipelines - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, microbatches)))


def best_split(microbatches: int, pipelines: int, seconds: Callable[[Split], float], most: int) -> Split | None:
    """The split of which a step is shortest; of equal ones the first. As in Optimus, they are enumerated where they are
    few; of many, single microbatches of an even one are moved to other pipelines for as long as that helps.

    Args:
        seconds: of a step; infinity: it cannot be.
        most: splits whose seconds are asked for.

    Returns:
        None: none can be.
    """
    known: dict[Split, float] = {}

    def found() -> Split | None:
        best = min(known, key=known.__getitem__, default=None)
        return None if best is None or known[best] == math.inf else best

    if microbatches < pipelines or most < 1:
        return None
    if math.comb(microbatches - 1, pipelines - 1) <= most:
        known = {split: seconds(split) for split in splits(microbatches, pipelines)}
        return found()
    each, more = divmod(microbatches, pipelines)
    best = tuple(each + (j < more) for j in range(pipelines))
    known[best] = seconds(best)
    moves = list(itertools.permutations(range(pipelines), 2))
    tried, at = 0, 0
    while tried < len(moves) and len(known) < most:
        source, target = moves[at]
        moved = tuple(n - (j == source) + (j == target) for j, n in enumerate(best))
        if moved[source] and moved not in known:
            known[moved] = seconds(moved)
            if known[moved] < known[best]:
                best, tried = moved, -1
        if tried >= 0:  # a move that helped is tried again
            at = (at + 1) % len(moves)
        tried += 1
    return found()
