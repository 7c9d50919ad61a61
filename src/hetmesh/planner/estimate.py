"""A first estimate of a candidate, in microseconds: typical microbatches, no transfers, no waiting but a pipeline's.

It says which candidates are worth a simulation. What modules cost is worked out once per layout of each.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from hetmesh.cost.static_memory import most_held
from hetmesh.graph import Stage
from hetmesh.graph.module_graph import Reshard
from hetmesh.planner.layout_plan import LayoutPlan, ModulePlan, laid_out_module
from hetmesh.planner.problem import Problem
from hetmesh.simulate import LayerCosts, RankWork
from hetmesh.simulate.layer_costs import kinds
from hetmesh.simulate.stage_costs import ModuleCosts, StageCosts


@dataclass(frozen=True)
class ModuleEstimate:
    """One module in a typical microbatch.

    Attributes:
        first: seconds of forward and backward of the first stage.
        slowest: of all stages on the ranks that have most.
        whole: of all stages.
        once: seconds of a step that do not depend on microbatches, of the slowest stage.
        kept: bytes of activations of a microbatch, of the rank that keeps most.
        spread: two standard deviations of these, as a share of them.
        beside: bytes that one forward or backward holds at most beyond that, on that rank.
        held: bytes for the whole run on the rank that holds most, and what FSDP keeps whole during a step.
    """

    first: float
    slowest: float
    whole: float
    once: float
    kept: int
    spread: float
    beside: int
    held: int

    def peak(self, microbatches: float) -> float:
        """Bytes of the rank that holds most with the activations of so many large microbatches, between actions."""
        return self.held + self.kept * (microbatches + self.spread * math.sqrt(microbatches))


class Estimator:
    """Estimates candidates of one problem."""

    def __init__(self, problem: Problem, layers: LayerCosts) -> None:
        self.problem, self.layers = problem, layers
        self._known: dict[tuple, ModuleEstimate] = {}
        self._least: dict[tuple, tuple[float, int]] = {}
        self._paddings: dict[float, dict[str, int]] = {}
        self._sorted_tokens = np.sort(problem.samples.tokens).astype(float)

    def least(self, plan: LayoutPlan) -> tuple[float, int]:
        """What a step takes at least, and what ranks hold, by the LLM alone: whatever its stages per rank, however its
        parameters are gathered, wherever encoders lie. Raises HetmeshError: see `estimate`."""
        name = self.problem.own[-1]
        own = plan.modules[name]
        key = own.key()[:-1], plan.microbatch_size
        if key not in self._least:
            ways: list[Reshard] = [own.reshard, *(("always",) if own.degree("dp_shard") > 1 else ())]
            seconds, held = math.inf, sys.maxsize
            for way in ways:
                module = self._module(name, replace(own, stages_per_rank=1, reshard=way), plan.microbatch_size)
                microbatches = self.problem.global_batch_size // (own.lanes * plan.microbatch_size)
                seconds = min(seconds, microbatches * module.whole / own.degree("pp"))
                held = min(held, math.ceil(module.peak(1)) + module.beside)
                if held <= self.problem.tensor_limit:
                    break
            self._least[key] = seconds, held
        return self._least[key]

    def estimate(self, plan: LayoutPlan, most: float = math.inf) -> tuple[float, int]:
        """Seconds of a step and bytes of the rank that holds most, both rough; without the encoders, a lower bound,
        where the LLM alone takes longer than `most` or does not fit. Raises HetmeshError: it has no such layout."""
        problem, (*encoders, name) = self.problem, self.problem.own
        own = plan.modules[name]
        samples = plan.microbatch_size * own.lanes
        microbatches = problem.global_batch_size // samples
        llm = self._module(name, own, plan.microbatch_size)
        flight = min(_in_flight(plan, own, microbatches), microbatches)
        bubble, peak = _bubble(plan, own, llm) + microbatches * _uneven(plan, own, llm), llm.peak(flight)
        seconds = microbatches * llm.slowest + bubble + llm.once
        if seconds > most or (problem.limit and most < math.inf and peak + llm.beside > problem.tensor_limit):
            return seconds, math.ceil(peak) + llm.beside
        before = [self._module(each, plan.modules[each], samples / plan.modules[each].lanes) for each in encoders]
        # The first of stages that take turns holds microbatches until all others have had their backwards.
        first = own.degree("pp") * (1 if own.stages_per_rank == 1 else 3 if plan.options.early else 2)
        once = max(llm.once, *(module.once for module in before), 0.0)
        if plan.placement == "disjoint":
            slowest = max(llm.slowest, *(module.slowest for module in before))
            bubbles = [module.whole for module in before]
            peaks = [peak + llm.beside]
            for each, module in zip(encoders, before, strict=True):
                ahead = _in_flight(plan, plan.modules[each], microbatches) + (0 if each in problem.after else first)
                peaks.append(module.peak(min(ahead, microbatches)) + module.beside)
            return microbatches * slowest + bubble + max(bubbles) + once, math.ceil(max(peaks))
        seconds -= llm.once
        for each, module in zip(encoders, before, strict=True):
            layout, ahead = plan.modules[each], flight
            if layout.ranks != own.ranks:  # before the first stage or behind the last, on its ranks
                seconds = max(seconds, microbatches * (llm.first + module.whole) + bubble) + module.whole
            else:
                seconds += microbatches * module.slowest + _bubble(plan, layout, module)
            if each in problem.after:  # its backward follows its forward
                ahead = _in_flight(plan, layout, microbatches)
            elif plan.schedule == "three_phase":
                ahead = plan.options.window or microbatches
            elif plan.schedule == "bubble_fill":
                ahead = 2 * flight
            elif plan.schedule == "interleaved":
                ahead = first + _in_flight(plan, layout, microbatches)
            peak += module.peak(min(ahead, microbatches))
        if plan.schedule != "interleaved":
            once = llm.once + sum(module.once for module in before)
        return seconds + once, math.ceil(peak) + max(llm.beside, *(module.beside for module in before), 0)

    def _module(self, name: str, plan: ModulePlan, samples: float) -> ModuleEstimate:
        node = self.problem.machine.ranks_per_node or self.problem.ranks
        key = name, plan.ranks[0] % node, *plan.key()[1:], samples
        if key not in self._known:
            self._known[key] = self._make(name, plan, samples)
        return self._known[key]

    def _make(self, name: str, plan: ModulePlan, samples: float) -> ModuleEstimate:
        problem, graph = self.problem, self.problem.graph
        spec = laid_out_module(problem, name, plan.mesh, plan)
        upstream = any(map(graph.needs_gradient, graph.inputs(name)))
        module = ModuleCosts(spec, problem.facts[name].shape, upstream, self.layers)
        work = problem.typical_work(name, samples)
        rows = problem.samples.tokens if name == graph.llm.name else problem.samples.rows_of(name)
        mean = float(rows.mean()) or 1.0
        spread = 2.0 * float(rows.std()) / mean / math.sqrt(max(samples, 1.0))
        if name == graph.llm.name and not spec.packed:
            work = replace(work, **self._padded(samples))
            spread = min(spread, samples * float(rows.max()) / work.rows - 1.0)
        shared = plan.degree("cp")
        work = replace(work, rows=-(-work.rows // shared), pairs=-(-work.pairs // shared))
        stages: list[tuple[float, ...]] = []
        known: dict[tuple, tuple[float, ...]] = {}
        kind_of = {layer.name: kind for layer, kind in zip(module.shape.layers, kinds(module.shape), strict=True)}
        for i in range(spec.num_stages):
            alike = (i == 0, *map(kind_of.__getitem__, spec.stage_layers(i)))
            if alike not in known:  # also where ranks of another place along `pp` hold it
                fed, backward = upstream or i > 0, graph.backward_reaches(name)
                stage = StageCosts(module, Stage(name, i), fed=fed, backward=backward, recompute=False)
                cost = stage.costs([[RankWork(work)], [RankWork(work)]])[1]
                once = stage.reduce + (stage.gather if spec.options.whole_in_step else 0.0)
                own = stage.stage_bytes
                whole = own.gathered + own.whole_gradients if own.whole else 0
                most = max(cost.forward_bytes, cost.backward_bytes)
                known[alike] = cost.forward + cost.backward, once, cost.activation_bytes, whole, most
            stages.append(known[alike])
        pp = plan.degree("pp")
        of_ranks = np.array([np.sum(stages[rank::pp], axis=0) for rank in range(pp)])
        slowest, once, kept, held, _ = of_ranks.max(0).tolist()
        beside = max(stage[-1] for stage in stages[int(of_ranks[:, 2].argmax()) :: pp])
        held += most_held(problem.facts[name].shape, spec, problem.optimizer)
        seconds = [stage[0] for stage in stages]
        return ModuleEstimate(
            seconds[0], slowest, sum(seconds), once, math.ceil(kept), spread, round(beside), round(held)
        )

    def _padded(self, samples: float) -> dict[str, int]:
        """Rows and pairs of `samples` samples that are padded to the longest of them, drawn from those of the problem:
        the expected values of the longest, and of its square."""
        if samples not in self._paddings:
            tokens = self._sorted_tokens
            below = (np.arange(len(tokens) + 1) / len(tokens)) ** samples  # that all are among the shortest 0, 1, ...
            chance = np.diff(below)
            rows, pairs = (round(samples * float(chance @ each)) for each in (tokens, tokens**2))
            self._paddings[samples] = {"rows": rows, "pairs": pairs}
        return self._paddings[samples]


def _bubble(plan: LayoutPlan, own: ModulePlan, module: ModuleEstimate) -> float:
    """Seconds that a rank waits for others of its pipeline to warm up and cool down: of stages that take turns, the
    first ones; of a backward in two parts, as if there were two."""
    waits = module.whole - module.whole / own.degree("pp")
    return waits / (own.stages_per_rank if plan.schedule != "zero_bubble" else 2)


def _uneven(plan: LayoutPlan, own: ModulePlan, module: ModuleEstimate) -> float:
    """Seconds per microbatch that ranks of a pipeline wait for each other because microbatches differ: those of more
    than two, and in turns, whose order is fixed, twice as long. Seen in simulations of samples of very different
    lengths, where it is a third of a step."""
    differ = module.spread / 2 * max(1 - 2 / own.degree("pp"), 0.0)
    return module.slowest * differ * (1.0 if own.stages_per_rank > 1 else 0.5)


def _in_flight(plan: LayoutPlan, own: ModulePlan, microbatches: int) -> float:
    """Microbatches of which a rank of a pipeline holds all of its stages' activations at most."""
    pp, turns = own.degree("pp"), own.stages_per_rank
    if turns == 1:
        return pp
    ahead = (pp - 1) * (2 if plan.options.early else 1) + (turns - 1) * min(pp, microbatches)
    return (ahead + 1) / turns
