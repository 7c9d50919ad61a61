"""What a candidate's step takes and holds, from a simulation of sampled batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hetmesh.balance import BatchPlan, largest_batches, plan_batch
from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.co_located import lane_ranks
from hetmesh.balance.run_balancer import assign
from hetmesh.cost import Machine, StepCosts, Work, module_flops
from hetmesh.graph import LANE_AXES, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec
from hetmesh.planner.candidates import samples_of_batches
from hetmesh.planner.layout_plan import LayoutPlan, laid_out
from hetmesh.planner.problem import Problem
from hetmesh.schedule import POLICIES, Schedule
from hetmesh.simulate import (
    CLASSES,
    LayerCosts,
    MemoryFit,
    RankMemory,
    StepModel,
    Timeline,
    average_bubbles,
    largest_memory,
    rank_memory,
    simulate,
)
from hetmesh.simulate.fill_bubbles import fill_bubbles
from hetmesh.simulate.transfer_costs import Ways


def some_lanes(graph: ModuleGraph, least: int = 1) -> tuple[ModuleGraph, float]:
    """The graph of the first lanes of every module of `graph`, so many that they exchange rows with each other alone
    where all lanes get equally much: of the LLM at least `least`, of the others in proportion; and the share of the
    LLM's lanes that is in it. Ranks keep their numbers."""
    total = graph.llm.num_lanes
    step = math.lcm(*(total // math.gcd(total, graph[name].num_lanes) for name in graph.order))
    for count in range(step, total, step):
        if count < least:
            continue
        chosen = {name: _taken(graph, name, count) for name in graph.order}
        if all(found is not None for found in chosen.values()):
            modules = [_of_lanes(spec, chosen[spec.name] or []) for spec in graph.modules]
            return ModuleGraph(tuple(modules), graph.boundaries), count / total
    return graph, 1.0


def _taken(graph: ModuleGraph, name: str, count: int) -> list[int] | None:
    """The lanes of a module that go with the first `count` of the LLM; None where lanes would be torn apart."""
    own, llm = lane_ranks(graph[name]), lane_ranks(graph.llm)
    if name == graph.llm.name:
        return list(range(count))
    wanted = len(own) * count // len(llm)
    inside, all_of_llm = set().union(*llm[:count]), set().union(*llm)
    if not set().union(*own) & all_of_llm:
        return list(range(wanted))
    found = [i for i, lane in enumerate(own) if lane & inside]
    if len(found) != wanted or any(own[i] & (all_of_llm - inside) for i in found):
        return None
    return found


def _of_lanes(spec: ModuleSpec, lanes: list[int]) -> ModuleSpec:
    """`spec` with some of its lanes, along one data-parallel axis."""
    mesh = spec.lane_mesh
    array = np.take(mesh.array, lanes, mesh.axes.index("lane"))
    axis = next((axis for axis in reversed(LANE_AXES) if axis in spec.mesh.axes), LANE_AXES[0])
    axes = tuple(axis if name == "lane" else name for name in mesh.axes)
    return replace(spec, mesh=MeshSpec(tuple(array.ravel().tolist()), axes, array.shape))


MIN_LANES = 4
"""Lanes of the LLM in a simulation that decides, at least."""


@dataclass(frozen=True)
class Prediction:
    """A candidate and what it is expected to do.

    Attributes:
        plan: the candidate.
        step_s: seconds of a step, mean over the sampled batches.
        tokens_per_s: of the LLM, per rank of the job.
        mfu: model FLOPs over what all ranks could do at their peak; None without a peak.
        peak_bytes: of tensors, on the rank that holds most.
        fits: whether that is within the limit, with communicators and the device's context where they were counted.
        bubbles: seconds of a step for which the mean rank is idle, by class; `compute` for which it is not.
    """

    plan: LayoutPlan
    step_s: float
    tokens_per_s: float
    mfu: float | None
    peak_bytes: int
    fits: bool
    bubbles: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


class Laid(NamedTuple):
    """A sampled batch of a candidate: the graph of the lanes that are simulated and of all, its plan, its schedule, and
    what is known of its transfers."""

    graph: ModuleGraph
    whole: ModuleGraph
    batch: BatchPlan
    schedule: Schedule
    ways: Ways


class Predictor:
    """Predicts candidates of one problem; layers are measured once for all.

    Args:
        batches: sampled global batches; their mean counts.
        lanes: of the LLM that are simulated at least; all of them where there are fewer.
        quick: balances by the first candidate of `auto` alone, counts the bytes of fewer transfers, and lets all lanes
            of a stage start together.
        assignments: what balancers made of batches, shared with other predictors; filled on the way.

    Attributes:
        laid: by plan what its steps are whatever they take; None: that is not kept.
    """

    def __init__(
        self,
        problem: Problem,
        batches: int = 1,
        lanes: int = 1,
        layers: LayerCosts | None = None,
        *,
        quick: bool = False,
        assignments: dict[tuple, Assignment] | None = None,
    ) -> None:
        self.problem, self.batches, self.lanes, self.quick = problem, batches, lanes, quick
        self.assignments = {} if assignments is None else assignments
        policy = "two_dim" if quick and problem.balance.policy == "auto" else problem.balance.policy
        self.balance, self.sample = replace(problem.balance, policy=policy), 2 if quick else 8
        self.layers = layers or LayerCosts(problem.machine, problem.profile)
        self.laid: dict[tuple, list[Laid]] | None = None
        self._flops = batch_flops(problem)

    def on(self, machine: Machine) -> Predictor:
        """The same batches and schedules on another machine; what they are is worked out once for both."""
        self.laid = {} if self.laid is None else self.laid
        problem, given = replace(self.problem, machine=machine), (self.batches, self.lanes)
        other = Predictor(problem, *given, quick=self.quick, assignments=self.assignments)
        other.laid = self.laid
        return other

    def predict(self, plan: LayoutPlan) -> Prediction:
        """Raises HetmeshError where the candidate cannot be laid out or run so."""
        return self.summary(plan, self.timelines(plan))

    def summary(self, plan: LayoutPlan, timelines: Sequence[Timeline]) -> Prediction:
        """What simulated steps of a candidate say of it."""
        problem = self.problem
        step = float(np.mean([timeline.makespan for timeline in timelines]))
        peak = max(max(timeline.peak_bytes) for timeline in timelines)
        reserved = problem.reserved(laid_out(problem, plan)) if peak <= problem.limit else 0
        tokens = float(problem.typical.tokens.mean()) * problem.global_batch_size
        ideal = 0.0
        for name, flops in self._flops.items():
            peak_flops = problem.machine.peak(str(problem.graph[name].options.row_dtype).removeprefix("torch."))
            ideal += flops / peak_flops if peak_flops else float("nan")
        mfu = ideal / (step * problem.ranks)
        each = [average_bubbles(timeline) for timeline in timelines]
        kinds = {kind: float(np.mean([getattr(one, kind) for one in each])) for kind in ("compute", *CLASSES)}
        fits = not problem.limit or peak + reserved <= problem.limit
        rate = tokens / step / problem.ranks
        return Prediction(plan, step, rate, None if mfu != mfu else mfu, peak, fits, MappingProxyType(kinds))

    def timelines(self, plan: LayoutPlan) -> list[Timeline]:
        """The simulated step of each sampled batch, with as many lanes as stand for all."""
        return [simulate(schedule, costs) for _, schedule, costs in self.steps(plan)]

    def _assign(self, loads: BatchLoads, slots: Slots, policy: str) -> Assignment:
        """`assign`, once per batch, lanes and numbers of microbatches."""
        key = loads.digest, slots.digest, policy
        if key not in self.assignments:
            self.assignments[key] = assign(loads, slots, policy)
        return self.assignments[key]

    def memory(self, plan: LayoutPlan) -> dict[int, RankMemory]:
        """What each rank that is simulated holds at most in the steps of all sampled batches."""
        problem = self.problem
        counts = problem.communicators(laid_out(problem, plan)) if problem.communicators else {}
        return largest_memory(
            rank_memory(model, schedule, costs, counts) for model, schedule, costs in self.steps(plan)
        )

    def steps(self, plan: LayoutPlan) -> Iterator[tuple[StepModel, Schedule, StepCosts]]:
        """What is simulated: the model, the schedule of each sampled batch, and what it costs."""
        known: dict[str, Any] = {"profile": self.problem.profile, "optimizer": self.problem.optimizer}
        shapes = {name: facts.shape for name, facts in self.problem.facts.items()}
        given = {"sample": self.sample, "layers": self.layers, **known}
        if kept := (self.laid or {}).get(plan.key()):
            model = StepModel(kept[0].graph, shapes, self.problem.machine, whole=kept[0].whole, **given)
            for own in kept:
                yield model, own.schedule, model.costs(own.batch, own.schedule, lanes=not self.quick, ways=own.ways)
            return
        whole = laid_out(self.problem, plan)
        graph, share = some_lanes(whole, self.lanes)
        model = StepModel(graph, shapes, self.problem.machine, whole=whole, **given)
        balance = replace(self.balance, microbatch_sizes=plan.encoder_sizes, microbatch_shares=plan.shares)
        laid = []
        for samples in samples_of_batches(self.problem, self.batches, share):
            batch = plan_batch(graph, samples, plan.microbatch_size, balance, assign=self._assign)
            options = replace(plan.options, validated=False)
            if plan.schedule == "bubble_fill":
                schedule = fill_bubbles(model, batch, True, options)
            else:
                schedule = POLICIES[plan.schedule](model.stages, batch.routes, True, options)
            laid.append(Laid(graph, whole, batch, schedule, {}))
            yield model, schedule, model.costs(batch, schedule, lanes=not self.quick, ways=laid[-1].ways)
        if self.laid is not None:
            self.laid[plan.key()] = laid


def deciding_predictor(problem: Problem, batches: int) -> Predictor:
    """What decides between layouts; where all samples are alike one lane and one batch stand for all."""
    return Predictor(problem, 1, 1) if problem.alike else Predictor(problem, batches, MIN_LANES)


def plan_fit(problem: Problem, plan: LayoutPlan) -> MemoryFit:
    """Whether a layout fits the machine on the largest batch of the problem's samples, with the lanes of a search."""
    size = problem.global_batch_size
    batches = largest_batches(problem.graph, problem.samples, size)
    ranks = largest_memory(
        Predictor(replace(problem, samples=drawn), lanes=MIN_LANES).memory(plan) for drawn in batches
    )
    samples = len(problem.samples)
    memory = problem.machine.memory_bytes if problem.memory_bytes is None else problem.memory_bytes
    return MemoryFit(problem.machine.name, memory, ranks, samples, samples)


def batch_flops(problem: Problem) -> dict[str, float]:
    """Per module the FLOPs of a global batch, forward and backward."""
    found = {}
    for name, facts in problem.facts.items():
        each = problem.mean_work[name] * problem.global_batch_size
        upstream = any(map(problem.graph.needs_gradient, problem.graph.inputs(name)))
        work = Work(*(round(float(n)) for n in each))
        found[name] = float(module_flops(facts.shape, work, upstream=upstream).total)
    return found
