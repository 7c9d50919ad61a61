"""A first estimate of a candidate, in microseconds: typical microbatches, no transfers, no waiting but a pipeline's.

It says which candidates are worth a simulation. What modules cost is worked out once per layout of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hetmesh.cost import StageCost
from hetmesh.cost.static_memory import most_held
from hetmesh.graph import Stage
from hetmesh.planner.layout_plan import LayoutPlan, ModulePlan, laid_out_module
from hetmesh.planner.problem import Problem
from hetmesh.simulate import LayerCosts, RankWork
from hetmesh.simulate.layer_costs import kinds
from hetmesh.simulate.stage_costs import ModuleCosts, StageCosts


@dataclass(frozen=True)
class ModuleEstimate:
    """One module in a typical microbatch.

    Attributes:
        stages: seconds of forward and backward of each stage.
        once: seconds of a step that do not depend on microbatches, of the slowest stage.
        kept: bytes of activations of a microbatch, of the stage that keeps most.
        held: bytes for the whole run on the rank that holds most, and what FSDP keeps whole during a step.
    """

    stages: tuple[float, ...]
    once: float
    kept: int
    held: int


class Estimator:
    """Estimates candidates of one problem."""

    def __init__(self, problem: Problem, layers: LayerCosts) -> None:
        self.problem, self.layers = problem, layers
        self._known: dict[tuple, ModuleEstimate] = {}

    def estimate(self, plan: LayoutPlan) -> tuple[float, int]:
        """Seconds of a step and bytes of the rank that holds most, both rough. Raises HetmeshError: the candidate
        cannot be laid out so."""
        problem, (*encoders, name) = self.problem, self.problem.own
        own = plan.modules[name]
        microbatches = problem.global_batch_size // (own.lanes * plan.microbatch_size)
        sink = self._module(name, own, plan.microbatch_size, plan.stages_per_rank)
        pp = own.degree("pp")
        samples = plan.microbatch_size * own.lanes
        before = [self._module(name, plan.modules[name], samples / plan.modules[name].lanes, 1) for name in encoders]
        slowest, whole = max(sink.stages) * len(sink.stages) / pp, sum(sink.stages)
        of_encoders = [module.stages[0] for module in before]
        flight = min(pp, microbatches)
        if plan.placement == "disjoint":
            seconds = (microbatches - 1) * max(slowest, *of_encoders) + whole + max(of_encoders)
            peak = max(sink.held + flight * sink.kept, *(e.held + (flight + 1) * e.kept for e in before))
            return seconds + max(sink.once, *(module.once for module in before)), peak
        if plan.placement == "homogeneous":  # before the first stage, on its ranks
            slowest, whole = max(slowest, sink.stages[0] + sum(of_encoders)), whole + sum(of_encoders)
            of_encoders = []
        seconds = microbatches * sum(of_encoders) + (microbatches - 1) * slowest + whole
        ahead = (
            microbatches if plan.schedule == "three_phase" else 2 * flight if plan.schedule == "bubble_fill" else flight
        )
        peak = sink.held + flight * sink.kept + sum(module.held + ahead * module.kept for module in before)
        return seconds + sink.once + sum(module.once for module in before), peak

    def _module(self, name: str, plan: ModulePlan, samples: float, stages_per_rank: int) -> ModuleEstimate:
        node = self.problem.machine.ranks_per_node or self.problem.ranks
        key = name, plan.ranks[0] % node, *plan.key()[1:], samples, stages_per_rank
        if key not in self._known:
            self._known[key] = self._make(name, plan, samples, stages_per_rank)
        return self._known[key]

    def _make(self, name: str, plan: ModulePlan, samples: float, stages_per_rank: int) -> ModuleEstimate:
        problem, graph = self.problem, self.problem.graph
        spec = laid_out_module(problem, name, plan.mesh, plan, samples, stages_per_rank)
        upstream = any(map(graph.needs_gradient, graph.inputs(name)))
        module = ModuleCosts(spec, problem.facts[name].shape, upstream, self.layers)
        work = problem.typical_work(name, samples)
        rows = problem.samples.tokens if name == graph.sink.name else problem.samples.rows_of(name)
        mean = float(rows.mean()) or 1.0
        large = 1.0 + 2.0 * float(rows.std()) / mean / math.sqrt(max(samples, 1.0))  # as the largest microbatches are
        if name == graph.sink.name and not spec.packed:
            work = replace(work, **_padded(problem, samples))
            large = min(large, samples * float(rows.max()) / work.rows)
        shared = plan.degree("cp")
        work = replace(work, rows=-(-work.rows // shared), pairs=-(-work.pairs // shared))
        costs: list[StageCost] = []
        once, whole = 0.0, 0
        known: dict[tuple, StageCost] = {}
        kind_of = {layer.name: kind for layer, kind in zip(module.shape.layers, kinds(module.shape), strict=True)}
        for i in range(spec.num_stages):
            alike = (i == 0, *map(kind_of.__getitem__, spec.stage_layers(i)))
            if alike in known:  # also where ranks of another place along `pp` hold it
                costs.append(known[alike])
                continue
            stage = StageCosts(
                module, Stage(name, i), fed=upstream or i > 0, backward=graph.backward_reaches(name), recompute=False
            )
            known[alike] = stage.costs([[RankWork(work)], [RankWork(work)]])[1]
            costs.append(known[alike])
            once = max(once, stage.reduce + (stage.gather if spec.options.whole_in_step else 0.0))
            if (own := stage.stage_bytes).whole:
                whole = max(whole, own.gathered + own.whole_gradients)
        held = whole * stages_per_rank + most_held(problem.facts[name].shape, spec, problem.optimizer)
        kept = math.ceil(large * max(cost.activation_bytes for cost in costs)) * stages_per_rank
        return ModuleEstimate(tuple(cost.forward + cost.backward for cost in costs), once, kept, held)


def _padded(problem: Problem, samples: float) -> dict[str, int]:
    """Rows and pairs of `samples` samples that are padded to the longest of them, drawn from those of the problem: the
    expected values of the longest, and of its square."""
    tokens = np.sort(problem.samples.tokens).astype(float)
    below = (np.arange(len(tokens) + 1) / len(tokens)) ** samples  # that all are among the shortest 0, 1, ...
    chance = np.diff(below)
    return {"rows": round(samples * float(chance @ tokens)), "pairs": round(samples * float(chance @ tokens**2))}
