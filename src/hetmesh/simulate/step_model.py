"""StepModel: what the step of any plan and schedule costs, from the graph, the sizes of its modules and a machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import numpy as np

from hetmesh.balance import BatchPlan
from hetmesh.cost import (
    Lanes,
    Machine,
    ModuleShape,
    Profile,
    StageCost,
    StageParts,
    StaticMemory,
    StepCosts,
    Work,
    module_memory,
)
from hetmesh.cost.flops import SampleCosts
from hetmesh.cost.static_memory import update_bytes
from hetmesh.errors import HetmeshError
from hetmesh.graph import ModuleGraph, Routes, Stage, StageGraph, stage_graph
from hetmesh.layout.hashing import memoized
from hetmesh.schedule import Schedule
from hetmesh.simulate.lanes import group_ranks, lane_groups, merge_equal_replicas, plan_flows
from hetmesh.simulate.layer_costs import LayerCosts
from hetmesh.simulate.rank_work import RankWork, rank_work
from hetmesh.simulate.stage_costs import ModuleCosts, StageCosts
from hetmesh.simulate.transfer_costs import Ways, transfer_costs

UNIT_S = 1e-15
"""Of measured loads, which are whole numbers."""

_UPDATED_ELEMENTS = {"AdamW": 8, "Adam": 8, "SGD": 4}  # read and written per parameter: norm, scaling and update


def _rounded(value: float) -> float:
    """To nine digits: balancers shall find the same on processors that sum in another order."""
    return float(f"{value:.9g}")


class StepModel:
    """The one model of what a step costs, for training, simulation, explanation and planning.

    Args:
        graph: modules on their meshes, with their stages and options.
        shapes: the sizes of every module.
        machine: needs a peak in every dtype that is computed in, unless there is a profile.
        profile: its fitted seconds take the place of the analytic ones for every layer.
        optimizer, implementation: their names in a recipe.
        weight_decay: whether there is any.
        layers: what is known of layers on this machine already; give the same to the models of many layouts.
        sample: destination ranks and microbatches of which the bytes of transfers are counted; others follow them.
        whole: the graph of which `graph` holds some lanes, on the same ranks: what collectives take, and what ranks
            hold, is as there. None: `graph` is the whole.

    Raises:
        HetmeshError: the sizes of a module are not given, or the profile was measured in another dtype.
    """

    def __init__(
        self,
        graph: ModuleGraph,
        shapes: Mapping[str, ModuleShape],
        machine: Machine,
        *,
        profile: Profile | None = None,
        optimizer: str = "AdamW",
        implementation: str = "fused",
        weight_decay: bool = True,
        layers: LayerCosts | None = None,
        sample: int = 32,
        whole: ModuleGraph | None = None,
    ) -> None:
        if missing := [name for name in graph.order if shapes.get(name) is None]:
            raise HetmeshError(f"costs of a step: the sizes of modules {missing} are not known")
        dtype = str(graph.llm.options.row_dtype).removeprefix("torch.")
        if profile is not None and profile.dtype != dtype:
            llm = graph.llm.name
            raise HetmeshError(f"the profile was measured in {profile.dtype}, and {llm!r} computes in {dtype}")
        self.graph, self.machine, self.profile = graph, machine, profile
        self.optimizer, self.sample = optimizer, sample
        self.implementation, self.weight_decay = implementation, weight_decay
        known = layers or LayerCosts(machine, profile)
        self._modules = {
            name: ModuleCosts(
                (whole or graph)[name], shapes[name], any(map(graph.needs_gradient, graph.inputs(name))), known
            )
            for name in graph.order
        }

    def shape(self, module: str) -> ModuleShape:
        return self._modules[module].shape

    @cached_property
    def stages(self) -> StageGraph:
        """The stages of `graph`, for policies."""
        return stage_graph(self.graph)

    @cached_property
    def memory(self) -> Mapping[str, Mapping[int, StaticMemory]]:
        """Per module and rank what it holds for the whole run."""
        return {name: module_memory(own.shape, own.spec, self.optimizer) for name, own in self._modules.items()}

    def costs(
        self,
        plan: BatchPlan,
        schedule: Schedule,
        *,
        lanes: bool = True,
        parts: bool = False,
        ways: Ways | None = None,
    ) -> StepCosts:
        """What the step of `plan` takes under `schedule`, as it is run: recomputation, FSDP, frozen parts, packed
        samples and context parallelism included.

        Args:
            lanes: False: all lanes of a stage start together and take as long as the slowest.
            parts: whether to say what actions consist of, too.
            ways: what is known of the transfers of this plan and schedule (`transfer_costs`).

        Raises:
            HetmeshError: the machine has no peak in a dtype that is computed in, or the profile lacks a layer.
        """
        stages, routes = schedule.stages, schedule.routes
        built = self._built(stages, schedule.recompute)
        work = {name: [rank_work(plan, name, m) for m in range(routes.count(name))] for name in self.graph.order}
        costs = _stage_costs(built, work)
        return StepCosts(
            costs,
            transfer_costs(plan, schedule, self.machine, self.sample, ways),
            {stage: built[stage].gather for stage in stages.stages},
            {stage: built[stage].reduce for stage in stages.stages if stage in stages.trainable_stages},
            self._optimizer_seconds,
            {rank: memory.total for rank, memory in self.held.items()},
            action_overhead=self.machine.action_overhead,
            hand_over=self.machine.hand_over,
            busy_slowdown=self.machine.busy_slowdown,
            ranks_per_node=self.machine.ranks_per_node,
            lanes=self._lanes(plan, schedule, built, work) if lanes else None,
            stage_bytes={stage: built[stage].stage_bytes for stage in stages.stages},
            parts=self._parts(built, work, costs) if parts else {},
            update_bytes=self._update_bytes,
        )

    def typical_costs(self, routes: Routes, work: Callable[[str], Work]) -> StepCosts:
        """What actions take, and consist of, in microbatches that are all alike; nothing else of a step.

        Args:
            work: by module, what a microbatch gives one lane where there are as many as of the LLM.
        """
        built, given = self._built(self.stages, ()), {}
        for name in self.graph.order:
            count, whole = routes.count(name), work(name)
            share = routes.count(self.graph.llm.name) / max(count, 1) / self.graph[name].mesh.axis_size("cp")
            mean = Work(*(round(share * n) for n in (whole.rows, whole.pairs, whole.targets)))
            given[name] = [(RankWork(mean),)] * count
        costs = _stage_costs(built, given)
        return StepCosts(costs, parts=self._parts(built, given, costs), hand_over=self.machine.hand_over)

    def _built(self, stages: StageGraph, recompute: Collection[Stage]) -> dict[Stage, StageCosts]:
        fed = {edge.destination for edge in stages.gradient_edges}
        return {
            stage: self._stage_costs(stage, stage in fed, stage in stages.backward_stages, stage in recompute)
            for stage in stages.stages
        }

    def _lanes(
        self,
        plan: BatchPlan,
        schedule: Schedule,
        built: Mapping[Stage, StageCosts],
        work: Mapping[str, Sequence[Sequence[RankWork]]],
    ) -> Lanes | None:
        groups: dict[Stage, tuple[tuple[int, ...], ...]] = {}
        of_groups: dict[tuple[Stage, int], tuple[StageCost, ...]] = {}
        for stage in schedule.stages.stages:
            spec = self.graph[stage.module]
            groups[stage] = group_ranks(spec, stage.index)
            if len(groups[stage]) > 1:
                found = built[stage].group_costs(work[stage.module], lane_groups(spec))
                of_groups |= {(stage, m): costs for m, costs in found.items()}
        return merge_equal_replicas(groups, plan_flows(plan, schedule), of_groups)

    def _parts(
        self,
        built: Mapping[Stage, StageCosts],
        work: Mapping[str, Sequence[Sequence[RankWork]]],
        costs: Mapping[tuple[Stage, int], StageCost],
    ) -> dict[tuple[Stage, int], StageParts]:
        known: dict[tuple, StageParts] = {}
        found = {}
        for (stage, m), cost in costs.items():
            key = stage, cost, frozenset(work[stage.module][m])
            if key not in known:
                known[key] = built[stage].parts(work[stage.module][m], cost)
            found[stage, m] = known[key]
        return found

    def sample_costs(self, module: str, work: Work) -> SampleCosts:
        """What samples cost a module, in `UNIT_S` on all ranks of a lane, collectives inside layers included. `work`:
        of a typical microbatch of a lane, at which the backward is compared with the forward."""
        forward, backward = (sum(parts) for parts in zip(*self._stage_seconds(module), strict=True))
        typical, spec = self._typical(module, work), self._modules[module].spec
        ratio = _rounded(float(backward @ typical / (forward @ typical))) if forward @ typical else 0.0
        whole = (forward + backward) / (1 + ratio)
        # Balancers divide what a lane costs by its ranks; a layer's seconds are of a rank, with all rows of its lane
        # under tensor parallelism, and a share of them under context parallelism.
        ranks = spec.mesh.axis_size("tp") * np.array([spec.mesh.axis_size("cp"), 1, 1, 1])
        constant, row, pair, target = (round(_rounded(n)) for n in whole * ranks / UNIT_S)
        return SampleCosts((row, pair, target), ratio, constant)

    def stage_shares(self, module: str, work: Work) -> tuple[tuple[float, float], ...]:
        """Of each stage of a module, its share of the forward and of the backward; `work` as in `sample_costs`."""
        typical = self._typical(module, work)
        seconds = np.array([[forward @ typical, back @ typical] for forward, back in self._stage_seconds(module)])
        whole = seconds.sum(0)
        shares = np.where(whole > 0, seconds / np.where(whole > 0, whole, 1.0), 0.0)
        return tuple((_rounded(forward), _rounded(back)) for forward, back in shares)

    def _typical(self, module: str, work: Work) -> np.ndarray:
        cp = self._modules[module].spec.mesh.axis_size("cp")
        return np.array([1.0, work.rows / cp, work.pairs / cp, work.targets / cp])

    def _stage_seconds(self, module: str) -> list[tuple[np.ndarray, np.ndarray]]:
        return [costs.seconds for stage, costs in self._built(self.stages, ()).items() if stage.module == module]

    @memoized
    def _stage_costs(self, stage: Stage, fed: bool, backward: bool, recompute: bool) -> StageCosts:
        """Made once: a model is asked about many plans of one graph."""
        return StageCosts(self._modules[stage.module], stage, fed=fed, backward=backward, recompute=recompute)

    @cached_property
    def _optimizer_seconds(self) -> dict[int, float]:
        """Reading and writing parameters, gradients and state once, on each rank; and what comes once per step."""
        bandwidth, once = self.machine.memory_bandwidth, self.machine.step_overhead
        per_byte = _UPDATED_ELEMENTS.get(self.optimizer, 8) / bandwidth if bandwidth else 0.0
        return {rank: once + held.gradients * per_byte for rank, held in self.held.items()}

    @cached_property
    def held(self) -> dict[int, StaticMemory]:
        """Per rank what it holds for the whole run, of all modules."""
        total: dict[int, StaticMemory] = {}
        for ranks in self.memory.values():
            for rank, memory in ranks.items():
                total[rank] = total.get(rank, StaticMemory()).beside(memory)
        return total

    @cached_property
    def _update_bytes(self) -> dict[int, int]:
        of_rank = {rank: [ranks[rank] for ranks in self.memory.values() if rank in ranks] for rank in self.held}
        return {
            rank: update_bytes(held, self.optimizer, self.implementation, self.weight_decay)
            for rank, held in of_rank.items()
        }


def _stage_costs(
    built: Mapping[Stage, StageCosts], work: Mapping[str, Sequence[Sequence[RankWork]]]
) -> dict[tuple[Stage, int], StageCost]:
    return {
        (stage, m): cost
        for stage, costs in built.items()
        for m, cost in enumerate(costs.costs(work[stage.module]) if work[stage.module] else ())
    }
