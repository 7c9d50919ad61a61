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
from typing import Any

from hetmesh._processes import no_garbage_collection
from hetmesh.errors import HetmeshError
from hetmesh.planner.candidates import (
    can_run,
    encoder_pipelines,
    gathered_once,
    homogeneous,
    module_plans,
    rank_splits,
    suits,
    variants,
    with_schedules,
)
from hetmesh.planner.estimate import Estimator
from hetmesh.planner.layout_plan import PLACEMENTS, LayoutPlan, ModulePlan
from hetmesh.planner.microbatch_splits import Split, best_split
from hetmesh.planner.predict import MIN_LANES, Prediction, Predictor, batch_flops, deciding_predictor
from hetmesh.planner.problem import Problem
from hetmesh.schedule import PolicyOptions

_MAX_SIMULATED = 128  # of each placement, where there are no more
_MAX_GROUPS, _MAX_TRIED = 12, 4  # of candidates, and how many of each are simulated until one fits
_MAX_FITTING, _MAX_NEIGHBOURS, _FINALISTS, _MAX_VARIED = 8, 4, 4, 4
_NEARLY_FULL = 0.7  # of what a rank may hold: a few lanes and one batch may then hide that a layout does not fit
_FILLABLE, _MAX_FILLED = ("three_phase", "interleaved"), 2
_CLOSE = 1.05  # of an estimate: what variants may take, of which the longer are not simulated
_MAX_UNEVEN_SPLITS = 12  # splits of microbatches over an encoder's lanes
BATCHES = 2
"""Sampled batches of the simulation that decides, unless `search` is given another number."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: of each placement, the fastest first; what does not fit into memory is not in here.
        considered, simulated, too_large: how many candidates there were, were simulated (`every`), and do not fit.
        refused: why others cannot run, and how many.
        least_bytes: of the rank that holds most, where that is least of all that were simulated; None: none was.
    """

    best: Mapping[str, tuple[Prediction, ...]]
    considered: int = 0
    simulated: int = 0
    too_large: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    least_bytes: int | None = None
    every: tuple[Prediction, ...] = ()

    @property
    def fastest(self) -> Prediction | None:
        """Of all placements."""
        return min((found[0] for found in self.best.values() if found), key=lambda p: p.step_s, default=None)


def search(problem: Problem, *, shown: int = 3, batches: int = BATCHES, exact: Predictor | None = None) -> Found:
    """Search the layouts of `problem`. Deterministic.

    Args:
        shown: how many of each placement are returned.
        batches: sampled global batches whose mean decides; a certified macro batch says how many (`macro_batch.py`).
        exact: what decides instead, which may know layouts from another machine (`Predictor.on`).
    """
    with no_garbage_collection():
        return _Search(problem, exact or deciding_predictor(problem, batches)).run(shown)


class _Search:
    def __init__(self, problem: Problem, exact: Predictor) -> None:
        self.problem, self.predictors = problem, {"exact": exact}
        self.estimator = Estimator(problem, exact.layers)
        if not problem.alike:  # many layouts have the same lanes, and so the same balanced batches
            shared: dict[str, Any] = {"layers": exact.layers, "assignments": exact.assignments}
            self.predictors["quick"] = Predictor(problem, quick=True, **shared)
            if exact.batches > 1:
                self.predictors["one batch"] = Predictor(problem, 1, MIN_LANES, **shared)
        self.refused: Counter[str] = Counter()
        self.known: dict[tuple[str, tuple], Prediction | None] = {}
        self.estimated: dict[tuple, float] = {}

    def run(self, shown: int) -> Found:
        best = {}
        for placement in PLACEMENTS:
            every = (way for plan in candidates(self.problem, placement) for way in variants(self.problem, plan))
            plans = list(itertools.islice(every, _MAX_SIMULATED + 1))
            if len(plans) <= _MAX_SIMULATED:  # estimates have nothing to choose from
                self.estimated |= {plan.key(): 0.0 for plan in plans}
                best[placement] = tuple(self._filled(self._measured(plans))[:shown])
                continue
            leaders = self._simulated(self._promising(candidates(self.problem, placement), _MAX_GROUPS), _MAX_FITTING)
            firsts = {plan.microbatch_size: plan for plan in reversed(leaders)}  # estimates compare sizes badly
            chosen = {plan.key(): plan for plan in (*leaders[: max(_FINALISTS, shown)], *firsts.values())}
            final = self._filled(self._variants(self._near(list(chosen.values()))), leaders)
            best[placement] = tuple(final[:shown])
        asked = {key: found for (_, key), found in self.known.items()}
        found = tuple(plan for plan in asked.values() if plan is not None)
        too_large, least = sum(not p.fits for p in found), min((p.peak_bytes for p in found), default=None)
        return Found(best, len(self.estimated), len(asked), too_large, dict(self.refused), least, found)

    def _predict(self, plan: LayoutPlan, how: str = "quick") -> Prediction | None:
        how = how if how in self.predictors else "exact"
        key = how, plan.key()
        if key not in self.known:
            try:
                self.known[key] = self.predictors[how].predict(plan)
            except HetmeshError as error:
                self.refused[str(error).partition("\n")[0]] += 1
                self.known[key] = None
        return self.known[key]

    def _promising(self, plans: Iterable[LayoutPlan], groups: int = 0) -> list[list[LayoutPlan]]:
        """Of each group of candidates (`_group`) those that are estimated to fit, of which none with as many stages per
        rank is both faster and smaller than another: the fastest first, in groups and of groups. Where none fits, some
        of the least bytes: their simulation says whether that is so, and what would fit.

        Args:
            groups: how many; 0: candidates are all of one group, and all of them come.
        """
        limit, most = self.problem.tensor_limit, math.inf
        found: dict[tuple, list[tuple[float, int, LayoutPlan]]] = {}
        larger: list[tuple[int, int, LayoutPlan]] = []
        for plan in plans:
            if (key := plan.key()) in self.estimated:
                continue
            try:
                seconds, size = self.estimator.least(plan)
                if seconds < most and (not limit or size <= limit):
                    seconds, size, plan = self._estimate(plan, most)
            except HetmeshError as error:
                self.refused[str(error).partition("\n")[0]] += 1
                continue
            self.estimated[key] = seconds
            if limit and size > limit:
                larger.append((size, len(larger), plan))
            elif seconds < most:
                front = found.setdefault(_group(plan) if groups else (), [])
                turns = _turns(plan)
                if not groups:
                    front.append((seconds, size, plan))
                elif not any(own[0] <= seconds and own[1] <= size and _turns(own[2]) == turns for own in front):
                    front[:] = [e for e in front if e[0] < seconds or e[1] < size or _turns(e[2]) != turns]
                    front.append((seconds, size, plan))
                    if len(found) >= groups:
                        # what is a little slower may be what fits
                        most = 1.15 * sorted(min(own[0] for own in front) for front in found.values())[groups - 1]
        if groups and not found:
            return [[plan] for _, _, plan in heapq.nsmallest(_MAX_NEIGHBOURS, larger)]
        fronts = sorted((sorted(front, key=lambda each: each[:2]) for front in found.values()), key=lambda f: f[0][:2])
        return [_in_rounds([plan for *_, plan in front]) for front in fronts[: groups or 1]]

    def _estimate(self, plan: LayoutPlan, most: float) -> tuple[float, int, LayoutPlan]:
        """Seconds and bytes of a candidate whose modules gather once per step; where that does not fit, of the first of
        its variants that does, or of the smallest."""
        least: tuple[float, int, LayoutPlan] | None = None
        limit = self.problem.tensor_limit
        for way in itertools.chain([gathered_once(plan)], variants(self.problem, plan)):
            seconds, size = self.estimator.estimate(way, most)
            if least is None or size < least[1]:
                least = seconds, size, way
            if not limit or size <= limit:
                break
        assert least is not None
        return least

    def _simulated(self, fronts: Iterable[list[LayoutPlan]], enough: int) -> list[LayoutPlan]:
        """The first of each front that fits, by their simulated seconds, once enough have been found."""
        found: list[Prediction] = []
        for front in fronts:
            each = (self._predict(plan) for plan in front[:_MAX_TRIED])
            found += itertools.islice((prediction for prediction in each if prediction and self._fits(prediction)), 1)
            if len(found) == enough:
                break
        return [prediction.plan for prediction in sorted(found, key=_by_seconds)]

    def _fits(self, prediction: Prediction) -> bool:
        """Whether a candidate fits that has been simulated, also with more lanes and batches where it is close."""
        if not (prediction.fits and prediction.peak_bytes > _NEARLY_FULL * self.problem.limit > 0):
            return prediction.fits
        exact = self._predict(prediction.plan, "exact")
        return exact is not None and exact.fits

    def _near(self, plans: list[LayoutPlan]) -> list[Prediction]:
        """The best of `plans`, and of what differs from the best in one choice, until that is no faster."""
        pool = dict.fromkeys(plan.key() for plan in plans)
        found = self._measured(plans)
        while found:
            leader = found[0]
            near = [plan for plan in neighbours(self.problem, leader.plan) if plan.key() not in pool]
            pool |= dict.fromkeys(plan.key() for plan in near)
            near = [plan for plan in near if not {("quick", plan.key()), ("exact", plan.key())} & self.known.keys()]
            for plan in near:
                self.estimated.pop(plan.key(), None)
            better = self._measured(self._simulated(self._nearest(leader.plan, near), _MAX_NEIGHBOURS)[:2])
            known = {each.plan.key() for each in found}
            found = sorted([*found, *(each for each in better if each.plan.key() not in known)], key=_by_seconds)
            if found[0] is leader:
                break
        return found

    def _nearest(self, leader: LayoutPlan, near: list[LayoutPlan]) -> list[list[LayoutPlan]]:
        """Of the neighbours of `leader` those with the least estimates, with its layout of the LLM and without."""
        same = [_group(plan) == _group(leader) for plan in near]
        kinds = [[plan for plan, own in zip(near, same, strict=True) if own is kind] for kind in (True, False)]
        fronts = [self._promising(plans) for plans in kinds if plans]
        return [[plan] for front in fronts for plan in (front[0] if front else [])[: _MAX_NEIGHBOURS // 2]]

    def _variants(self, found: list[Prediction]) -> list[Prediction]:
        """With the variants of the best that are not estimated to take longer."""
        more: dict[tuple, LayoutPlan] = {}
        for prediction in found[:_MAX_VARIED]:
            seconds, _ = self.estimator.estimate(prediction.plan)
            for way in variants(self.problem, prediction.plan):
                if self.estimator.estimate(way)[0] <= _CLOSE * seconds:
                    more[way.key()] = way
        for prediction in found:
            more.pop(prediction.plan.key(), None)
        self.estimated |= dict.fromkeys(more, 0.0)
        return sorted([*found, *self._measured(more.values())], key=_by_seconds)

    def _filled(self, found: list[Prediction], others: Iterable[LayoutPlan] = ()) -> list[Prediction]:
        """With the best pipelines on whose ranks encoders lie under bubble_fill too, if that is faster than without,
        and the best of these with more slices and whole microbatches for their lanes. It takes long to place, so of
        `others`, which were not simulated to the end, few are tried: where microbatches differ, gaps do."""
        fixed, name = self.problem.fixed.get(("", "schedule")), self.problem.own[-1]
        plans = [p.plan for p in found] + ([] if self.problem.alike else [*others])
        pipelines = {
            plan.modules[name].degrees: plan
            for plan in reversed(plans)
            if plan.placement == "colocated" and plan.schedule in (fixed, *_FILLABLE)
        }
        best = next((p.step_s for p in found if p.plan.schedule in (fixed, *_FILLABLE)), math.inf)
        if fixed not in (None, "bubble_fill"):
            return found
        more: list[Prediction] = []

        def near() -> bool:
            return bool(more) and more[0].step_s < _CLOSE * min(p.step_s for p in (*found, *more))

        for plan in [*reversed(pipelines.values())][:_MAX_FILLED]:
            more = sorted([*more, *self._measured(self._new(self._inner(plan)))], key=_by_seconds)
            if not near():
                break
        for ways in (self._slices, self._uneven) if near() else ():
            more = sorted([*more, *self._measured(self._new(ways(more[0].plan)))], key=_by_seconds)
        keys = {p.plan.key() for p in found}
        more = [p for p in more if p.step_s < 0.999 * best and p.plan.key() not in keys]
        return sorted([*more, *found], key=_by_seconds)

    def _new(self, plans: Iterable[LayoutPlan]) -> list[LayoutPlan]:
        """Of plans that are no candidates those that can run; they count as considered."""
        kept = [plan for plan in plans if can_run(plan)]
        self.estimated |= {plan.key(): 0.0 for plan in kept if plan.key() not in self.estimated}
        return kept

    def _inner(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """`plan` under bubble_fill, over the schedules of the LLM that are like its own."""
        name = self.problem.own[-1]
        modules = {each: replace(own, stages_per_rank=1) for each, own in plan.modules.items()}
        llm = plan.modules[name]
        kinds = [("1f1b", modules[name]), ("zero_bubble", modules[name])]
        if llm.stages_per_rank > 1:
            kinds = [("1f1b", modules[name]), ("interleaved", llm)]
        for inner, own in kinds:
            options = PolicyOptions(inner=inner, early=inner == "interleaved" and plan.options.early)
            yield replace(plan, modules={**modules, name: own}, schedule="bubble_fill", options=options)

    def _slices(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """`plan`, whose gaps are filled, with twice and four times as many slices of its encoders."""
        for times in (2, 4):
            modules = dict(plan.modules)
            for name in self.problem.own[:-1]:
                own, most = plan.modules[name], self.problem.facts[name].most_stages
                count = min(own.stages_per_rank * times, most // own.degree("pp"))
                modules[name] = replace(own, stages_per_rank=max(count, own.stages_per_rank))
            if modules != plan.modules:
                yield replace(plan, modules=modules)

    def _uneven(self, plan: LayoutPlan) -> Iterator[LayoutPlan]:
        """`plan` with the best split of microbatches over the lanes of each encoder in turn, as one batch has it."""
        llm = plan.modules[self.problem.graph.llm.name]
        microbatches = self.problem.global_batch_size // (llm.lanes * plan.microbatch_size)
        for name in self.problem.own[:-1]:
            if name in plan.with_llm or (pipelines := encoder_pipelines(plan, name)) < 2:
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


def _group(plan: LayoutPlan) -> tuple:
    """What candidates have in common of which the best estimate is enough: how the LLM lies, and microbatches. Of what
    else may differ estimates know more, and neighbours lead from one to the other."""
    *_, llm = plan.modules.values()
    return llm.ranks, llm.degrees, llm.activation_checkpoint, plan.microbatch_size


def _in_rounds(front: list[LayoutPlan]) -> list[LayoutPlan]:
    """The first with each number of stages per rank, the second of each, and so on: how much more is held with more of
    them estimates do not know."""
    seen: Counter[int] = Counter()
    rounds = []
    for place, plan in enumerate(front):
        rounds.append((seen[_turns(plan)], place))
        seen[_turns(plan)] += 1
    return [front[place] for _, place in sorted(rounds)]


def _turns(plan: LayoutPlan) -> int:
    return [*plan.modules.values()][-1].stages_per_rank


def _by_seconds(prediction: Prediction) -> tuple[float, str]:
    return prediction.step_s, str(prediction.plan)


def candidates(problem: Problem, placement: str) -> Iterator[LayoutPlan]:
    """All candidates of a placement."""
    *encoders, last = problem.own
    if placement == "homogeneous":
        for llm in module_plans(problem, last, 0, problem.ranks):
            yield from with_schedules(problem, placement, homogeneous(problem, llm))
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
        for llm in layouts.pop():
            suiting = [[own for own in each if placement == "disjoint" or suits(own, llm)] for each in layouts]
            for chosen in itertools.product(*suiting):
                yield from with_schedules(problem, placement, [dict(zip(problem.own, (*chosen, llm), strict=True))])


def neighbours(problem: Problem, plan: LayoutPlan) -> Iterator[LayoutPlan]:
    """Candidates that differ from `plan` in one choice: the layout of one module, the microbatch size, or the schedule
    with its stages per rank."""
    for name, own in plan.modules.items():
        first, stop = own.ranks
        for other in module_plans(problem, name, first, stop - first):
            moved = sum(a != b for a, b in zip(other.degrees, own.degrees, strict=True))
            moved += other.expert_parallel != own.expert_parallel
            if other != own and moved + (other.activation_checkpoint != own.activation_checkpoint) <= 2:
                yield from _with(problem, plan, {**plan.modules, name: other})
    yield from _with(problem, plan, plan.modules)


def _with(problem: Problem, plan: LayoutPlan, modules: Mapping[str, ModulePlan]) -> Iterator[LayoutPlan]:
    *encoders, llm = modules.values()
    choices: Iterable[Mapping[str, ModulePlan]] = [modules]
    if plan.placement == "homogeneous":
        choices = homogeneous(problem, llm)
    elif plan.placement == "colocated" and not all(suits(own, llm) for own in encoders):
        return
    choices = [{name: replace(own, stages_per_rank=1) for name, own in each.items()} for each in choices]
    for near in with_schedules(problem, plan.placement, choices):
        if modules is plan.modules or near.microbatch_size == plan.microbatch_size:
            yield near
