"""The StepCosts of a recipe: every stage, transfer and collective of one step, from sizes and metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hetmesh.balance import BatchPlan
from hetmesh.cost import (
    LayerShape,
    LayerTime,
    Machine,
    ModuleShape,
    Profile,
    Rates,
    StageCost,
    StaticMemory,
    StepCosts,
    Work,
    activation_bytes,
    computed_work,
    layer_time,
    load_machine,
    static_memory,
    upstream_flags,
)
from hetmesh.cost.collectives import gradient_sum_time, shard_gather_time, tensor_parallel_time
from hetmesh.cost.memory import local_elements
from hetmesh.errors import RecipeError
from hetmesh.graph import ModuleGraph, Stage
from hetmesh.layout import MeshSpec
from hetmesh.schedule import Schedule
from hetmesh.training.meter import measure_peak
from hetmesh.training.module_shapes import module_shapes
from hetmesh.training.transfer_costs import transfer_costs

if TYPE_CHECKING:
    from hetmesh.models import Adapter
    from hetmesh.recipe.recipe import Recipe

_TOUCHED = {"AdamW": 8, "Adam": 8, "SGD": 4}  # elements read and written per parameter: norm, scaling and update


def recipe_step_costs(
    recipe: Recipe,
    plan: BatchPlan,
    schedule: Schedule,
    *,
    graph: ModuleGraph,
    adapters: Mapping[str, Adapter],
    machine: Machine | None = None,
    profile: Profile | None = None,
) -> StepCosts:
    """What the step of `plan` costs under `schedule`, as it is run: full recomputation, FSDP and frozen parts included.

    Args:
        graph, adapters: from `hetmesh.training.job.describe`.
        machine: default: that of `[metrics] machine`, else a CPU.
        profile: its fitted seconds take the place of the analytic ones for every layer.

    Raises:
        RecipeError: a module cannot be built on the meta device, so that its sizes are not known, or the machine is
            unknown.
        HetmeshError: the machine has no peak in a dtype that is computed in, or the profile lacks a layer.
    """
    machine = machine or load_machine(recipe.metrics.machine or "cpu")
    shapes = module_shapes(recipe, adapters)
    modules = {name: _module(recipe, graph, name, shapes[name], machine, profile) for name in graph.order}
    stages = schedule.stages
    built = {
        s: _StageModel(modules[s.module], s, s in {e.destination for e in stages.gradient_edges}) for s in stages.stages
    }
    work = {name: _lane_work(plan, name) for name in graph.order}
    costs = {
        (s, m): built[s].cost(work[s.module][m], s in stages.backward_stages, s in schedule.recompute, first=m == 0)
        for s in stages.stages
        for m in range(schedule.microbatches)
    }
    return StepCosts(
        costs,
        transfer_costs(plan, schedule, machine),
        {s: built[s].gather for s in stages.stages},
        {s: built[s].reduce for s in stages.stages if s in stages.trainable_stages},
        _optimizer(recipe, modules.values(), machine),
        _static_bytes(recipe, modules.values()),
        busy_slowdown=machine.busy_slowdown,
        ranks_per_node=machine.ranks_per_node,
    )


@dataclass(frozen=True)
class _Module:
    """What the costs of a module's stages follow from."""

    shape: ModuleShape
    mesh: MeshSpec
    splits: tuple[tuple[str, ...], ...]
    upstream: tuple[bool, ...]
    machine: Machine
    rates: Rates | None
    profile: Profile | None
    checkpoint: str
    reshard: str
    itemsize: int
    parameter_itemsize: int

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The layers that are checkpointed and gathered by themselves (`hetmesh.parallel.blocks`, by sizes)."""
        several = {layer.name: _elements(layer) for layer in self.shape.layers if layer.name and len(layer.weights) > 2}
        return frozenset(name for name, size in several.items() if 8 * size >= max(several.values()))

    def time(self, layer: LayerShape, work: Work, upstream: bool, recompute: bool) -> LayerTime:
        tp = self.mesh.axis_size("tp")
        if self.profile is not None:
            if not layer.name:  # parameters of no layer are not measured
                return LayerTime()
            return self.profile.predict(layer, work, upstream=upstream, tp=tp, recompute=recompute)
        assert self.rates is not None
        return layer_time(layer, work, self.rates, upstream=upstream, tp=tp, recompute=recompute)


def _module(
    recipe: Recipe,
    graph: ModuleGraph,
    name: str,
    shape: ModuleShape | None,
    machine: Machine,
    profile: Profile | None,
) -> _Module:
    if shape is None:
        raise RecipeError(f"modules.{name}: its costs are not known, since it cannot be built on the meta device")
    spec, options = graph[name], graph[name].options
    dtype = options.row_dtype
    kind = str(dtype).removeprefix("torch.")
    rates = None
    if profile is None:
        measured = measure_peak(dtype) if machine.peak(kind) is None and machine.name == "cpu" else None
        rates = Rates.of(machine, kind, measured)
    return _Module(
        shape,
        spec.mesh,
        spec.splits or (spec.layers,),
        upstream_flags(shape, any(graph.needs_gradient(b) for b in graph.inputs(name))),
        machine,
        rates,
        profile,
        options.activation_checkpoint,
        options.reshard_after_forward,
        dtype.itemsize,
        options.parameter_dtype.itemsize,
    )


class _StageModel:
    """The costs of one stage of a module.

    Args:
        fed: whether a gradient flows back out of the stage: then the backward has a part for the input.
    """

    def __init__(self, module: _Module, stage: Stage, fed: bool) -> None:
        self.module, self.fed = module, fed
        self.mesh = module.mesh.slice("pp", stage.index % module.mesh.axis_size("pp"))
        names = set(module.splits[stage.index])
        if stage.index == 0:
            names.add("")  # what belongs to no layer
        pairs = zip(module.shape.layers, module.upstream, strict=True)
        self.layers = [(layer, before) for layer, before in pairs if layer.name in names]

    def cost(self, lanes: Sequence[Work], backward: bool, recompute: bool, *, first: bool) -> StageCost:
        """Of one microbatch, on the lane that takes longest.

        Args:
            recompute: the whole stage runs its forward again.
            first: the microbatch for which `gather` was counted.
        """
        each = [self._lane_cost(work, backward, recompute, first) for work in dict.fromkeys(lanes)]
        return max(each, key=lambda cost: (cost.forward + cost.backward, cost.activation_bytes))

    def _lane_cost(self, work: Work, backward: bool, recompute: bool, first: bool) -> StageCost:
        module, tp = self.module, self.mesh.axis_size("tp")
        total, kept, sums_forward, sums_backward = LayerTime(), 0, 0.0, 0.0
        for layer, before in self.layers:
            again = backward and (recompute or (module.checkpoint == "full" and layer.name in module.blocks))
            total += module.time(layer, work, before, again)
            sums = tensor_parallel_time(
                layer, work, self._group("tp"), module.machine, itemsize=module.itemsize, upstream=before
            )
            sums_forward += sums.forward
            sums_backward += sums.backward + (sums.forward if again and (before or layer.trainable) else 0.0)
            kept += activation_bytes(layer, work, module.itemsize, upstream=before, tp=tp, recompute=again)
        sums_forward += 0.0 if first else self.gather
        if not backward:
            return StageCost(total.forward + sums_forward, collectives_forward=sums_forward)
        sums_backward += self._gathered_again + self._scatter
        rest = total.recompute + sums_backward
        # What makes no gradient of the stage's own input is the part for its parameters.
        own = total.backward_input + rest if self.fed else 0.0
        weight = total.backward_weight + (0.0 if self.fed else total.backward_input + rest)
        return StageCost(total.forward + sums_forward, own, weight, sums_forward, sums_backward, kept)

    def _group(self, axis: str) -> tuple[int, ...]:
        return self.mesh.axis_groups(axis)[0] if axis in self.mesh.axes else ()

    @cached_property
    def _weights(self) -> list[tuple[str, int, bool]]:
        """Layer, elements on one tensor parallel rank, and whether trainable; of every parameter once."""
        found: dict[str, tuple[str, int, bool]] = {}
        for layer, _ in self.layers:
            for weight in layer.weights:
                elements = local_elements(weight, (self.mesh.axis_size("tp"), 1), (0, 0))
                found.setdefault(weight.name, (layer.name, elements, weight.trainable))
        return list(found.values())

    @cached_property
    def gather(self) -> float:
        """Seconds of gathering all parameters of the stage."""
        return self._gather_of(lambda _: True)

    @property
    def _gathered_again(self) -> float:
        """Seconds of gathering for the backward what was let go after the forward."""
        reshard, blocks = self.module.reshard, self.module.blocks
        return 0.0 if reshard == "never" else self._gather_of(lambda name: reshard == "always" or name in blocks)

    def _gather_of(self, chosen: Callable[[str], bool]) -> float:
        group = self._group("dp_shard")
        elements: dict[str, int] = {}
        for name, count, _ in self._weights:
            if chosen(name):
                owner = name if name in self.module.blocks else ""
                elements[owner] = elements.get(owner, 0) + count
        itemsize = self.module.itemsize
        return sum(shard_gather_time(count, itemsize, group, self.module.machine) for count in elements.values())

    @cached_property
    def _sums(self) -> tuple[float, float]:
        elements = sum(count for _, count, trainable in self._weights if trainable)
        shards, replicas = self._group("dp_shard"), self._group("dp_replicate")
        return gradient_sum_time(elements, self.module.parameter_itemsize, shards, replicas, self.module.machine)

    @property
    def _scatter(self) -> float:
        """FSDP reduces in the backward of every microbatch, and over replicas too."""
        return sum(self._sums) if self._group("dp_shard") else 0.0

    @property
    def reduce(self) -> float:
        """Seconds of the sum over lanes after the last backward."""
        return 0.0 if self._group("dp_shard") else self._sums[1]


def _elements(layer: LayerShape) -> int:
    return sum(weight.numel for weight in layer.weights)


def _lane_work(plan: BatchPlan, name: str) -> list[tuple[Work, ...]]:
    """Per microbatch and lane what is computed, padding included."""
    return [
        tuple(
            computed_work(plan.graph, name, [plan.samples[i] for i in plan.samples_of(name, m, lane)])
            for lane in range(plan.graph[name].num_lanes)
        )
        for m in range(plan.num_microbatches)
    ]


def _optimizer(recipe: Recipe, modules: Iterable[_Module], machine: Machine) -> dict[int, float]:
    """Reading and writing parameters, gradients and state once; the seconds of what each rank holds of each module."""
    seconds: dict[int, float] = {}
    for rank, module, held in _held(recipe, modules):
        elements = held.gradients / module.parameter_itemsize
        touched = elements * module.parameter_itemsize * _TOUCHED.get(recipe.optimizer.name, 8)
        spent = touched / machine.memory_bandwidth if machine.memory_bandwidth else 0.0
        seconds[rank] = seconds.get(rank, 0.0) + spent
    return seconds


def _static_bytes(recipe: Recipe, modules: Iterable[_Module]) -> dict[int, int]:
    total: dict[int, int] = {}
    for rank, _, held in _held(recipe, modules):
        total[rank] = total.get(rank, 0) + held.total
    return total


def _held(recipe: Recipe, modules: Iterable[_Module]) -> Iterator[tuple[int, _Module, StaticMemory]]:
    """What each rank holds of each module, with the stages of its place in the pipeline."""
    for module in modules:
        pp = module.mesh.axis_size("pp")
        for coordinate in range(pp):
            names = {layer for run in module.splits[coordinate::pp] for layer in run} | (
                {""} if coordinate == 0 else set()
            )
            part = ModuleShape(module.shape.name, tuple(x for x in module.shape.layers if x.name in names))
            mesh = module.mesh.slice("pp", coordinate)
            memory = static_memory(part, mesh, module.parameter_itemsize, recipe.optimizer.name)
            yield from ((rank, module, held) for rank, held in memory.items())
