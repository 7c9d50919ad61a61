"""LayoutPlan: one candidate. Which ranks hold each module and with which degrees, and how a step runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hetmesh.cost.flops import token_costs
from hetmesh.cost.stage_cuts import default_splits
from hetmesh.errors import GraphError
from hetmesh.graph import LANE_AXES, ModuleGraph, ModuleSpec, experts_mesh, with_neighbours_meshes
from hetmesh.graph.module_graph import CheckpointMode, Reshard, reshard_in_pipeline
from hetmesh.layout import MeshSpec
from hetmesh.planner.problem import Problem
from hetmesh.schedule import PolicyOptions
from hetmesh.schedule.schedule import DEFAULT

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
PLACEMENTS = ("homogeneous", "colocated", "disjoint")
"""All modules on all ranks with the same degrees; all on all ranks, each with its own; each on ranks of its own."""


@dataclass(frozen=True)
class ModulePlan:
    """Where one module lies and how it runs.

    Attributes:
        ranks: first rank and the one after the last.
        degrees: size of each of `AXES`.
        activation_checkpoint: what is computed again.
        expert_parallel: of the ranks along `dp_shard`, else along `dp_replicate`, how many hold different experts.
        reshard: when FSDP lets go of gathered parameters (`ModuleOptions`); "default" is "never" in a pipeline.
        sequence_parallel: whether ranks along `tp` share the tokens between products.
        stages_per_rank: stages that take turns at each place along `pp`; of an encoder under bubble_fill its slices.
    """

    ranks: tuple[int, int]
    degrees: tuple[int, int, int, int, int]
    activation_checkpoint: CheckpointMode = "none"
    expert_parallel: int = 1
    reshard: Reshard = "default"
    sequence_parallel: bool = False
    stages_per_rank: int = 1

    def key(self) -> tuple:
        """What tells plans of a module apart, and orders them. (`astuple` copies each value: a quarter of a search.)"""
        own = self.activation_checkpoint, self.expert_parallel, self.reshard
        return self.ranks, self.degrees, *own, self.sequence_parallel, self.stages_per_rank

    @property
    def reshard_after_forward(self) -> Reshard:
        """What `reshard` means with its degrees."""
        return reshard_in_pipeline(self.reshard, self.degree("pp"))

    def degree(self, axis: str) -> int:
        return self.degrees[AXES.index(axis)]

    @property
    def lanes(self) -> int:
        """Data-parallel coordinates."""
        return math.prod(self.degree(axis) for axis in LANE_AXES if axis in AXES)

    @property
    def mesh(self) -> MeshSpec:
        """Axes of size 1 are left out, as in a recipe; with experts an axis `ep`."""
        sizes = {axis: size for axis, size in zip(AXES, self.degrees, strict=True) if size > 1} or {"dp_replicate": 1}
        mesh = MeshSpec(tuple(range(*self.ranks)), tuple(sizes), tuple(sizes.values()))
        return experts_mesh(mesh, self.expert_parallel)

    def __str__(self) -> str:
        names = ("PP", "DP", "FSDP", "CP", "TP")
        text = " x ".join(f"{name} {size}" for name, size in zip(names, self.degrees, strict=True) if size > 1)
        experts = f", EP {self.expert_parallel}" if self.expert_parallel > 1 else ""
        turns = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        again = ", recomputed" if self.activation_checkpoint == "full" else ""
        gathered = {"default": "", "never": ", gathered once a step", "always": ", gathered per microbatch"}
        return f"{text or 'one rank'}{experts}{turns}{again}{gathered[self.reshard]}"


@dataclass(frozen=True)
class LayoutPlan:
    """One candidate.

    Attributes:
        placement: one of `PLACEMENTS`.
        modules: of the modules with meshes of their own.
        schedule: a key of `hetmesh.schedule.POLICIES`.
        microbatch_size: samples per microbatch and lane of the LLM.
        options: of the schedule, as far as recipes have keys for them.
        shares: of encoders whose lanes take whole microbatches, how many each on the ranks of a lane of the LLM takes.
        with_llm: the modules that have the microbatches of the LLM: those after it, and encoders that feed these alone.
    """

    placement: str
    modules: Mapping[str, ModulePlan] = field(default_factory=lambda: MappingProxyType({}))
    schedule: str = "sequential"
    microbatch_size: int = 1
    options: PolicyOptions = DEFAULT
    shares: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    with_llm: frozenset[str] = frozenset()

    @property
    def encoder_sizes(self) -> dict[str, int]:
        """Samples per lane and microbatch of encoders that have microbatches of their own: those with more lanes than a
        microbatch of the LLM has samples, which would leave lanes idle otherwise."""
        *encoders, llm = self.modules
        samples = self.microbatch_size * self.modules[llm].lanes
        if self.placement == "homogeneous":
            return {}
        free = [name for name in encoders if name not in self.shares and name not in self.with_llm]
        return {name: 1 for name in free if self.modules[name].lanes > samples}

    def __str__(self) -> str:
        parts = (f"{name}: {plan} on {plan.ranks[0]}-{plan.ranks[1] - 1}" for name, plan in self.modules.items())
        shares = "".join(f"; {'+'.join(map(str, own))} for the lanes of {name}" for name, own in self.shares.items())
        return f"{self.placement}; {'; '.join(parts)}; {self.step}; microbatches of {self.microbatch_size}{shares}"

    @property
    def step(self) -> str:
        """Its schedule, with the options that differ from the defaults."""
        over = f" over {self.options.inner}" if self.schedule == "bubble_fill" and self.options.inner != "1f1b" else ""
        early = ", early warm-up" if self.options.early else ""
        windows = f" in windows of {self.options.window}" if self.options.window else ""
        return f"{self.schedule}{over}{windows}{early}"

    def key(self) -> tuple:
        """What tells candidates apart."""
        modules = tuple((name, *own.key()) for name, own in self.modules.items())
        step = self.schedule, self.microbatch_size, self.options
        return self.placement, modules, *step, tuple(self.shares.items())


def laid_out(problem: Problem, plan: LayoutPlan) -> ModuleGraph:
    """The graph of the problem on the meshes of a candidate, with stages cut by what layers cost. Raises GraphError,
    RecipeError: it cannot be cut so."""
    graph, topology = problem.graph, problem.graph.topology
    meshes = with_neighbours_meshes(topology, {name: module.mesh for name, module in plan.modules.items()})
    specs = []
    for name in topology.names:
        owner, own = name, plan.modules.get(name)
        while owner not in plan.modules and (neighbour := topology.neighbour(owner)) is not None:
            owner = neighbour
        spec = laid_out_module(problem, name, meshes[name], own)
        if own is None:  # the keys of its layout come with the mesh
            reshard = plan.modules[owner].reshard_after_forward
            spec = replace(spec, options=replace(spec.options, reshard_after_forward=reshard))
        specs.append(spec)
    return ModuleGraph(tuple(specs), graph.boundaries)


def laid_out_module(problem: Problem, name: str, mesh: MeshSpec, own: ModulePlan | None) -> ModuleSpec:
    """One module of the problem on a mesh. `own`: its plan, where it has a mesh of its own. Raises GraphError,
    RecipeError: it cannot be cut so."""
    graph, facts = problem.graph, problem.facts[name]
    spec = graph[name]
    options = spec.options
    stages, axes = 1, ("cp",) if mesh.axis_size("cp") > 1 else ()
    if own is not None:
        stages = mesh.axis_size("pp") * own.stages_per_rank
        options = replace(
            options,
            activation_checkpoint=own.activation_checkpoint,
            reshard_after_forward=own.reshard_after_forward,
            sequence_parallel=own.sequence_parallel,
        )
    splits: tuple[tuple[str, ...], ...] = ()
    if stages > 1:
        if facts.activation is None:
            raise GraphError(f"module {name!r} cannot be a pipeline")
        upstream = any(graph[before].trainable for before in graph.topology.upstream(name))
        recomputed = options.activation_checkpoint == "full"
        work = problem.typical_work(name, problem.global_batch_size)
        seconds: tuple[float, ...] = ()
        if problem.profile is not None:
            seconds = problem.profile.layer_seconds(facts.shape, work, upstream, mesh.axis_size("tp"), recomputed)
        splits = default_splits(
            facts.shape,
            stages,
            upstream_trainable=upstream,
            recomputed=recomputed,
            together=facts.first_layers,
            work=work,
            seconds=seconds,
        )
    llm, shared = name == graph.llm.name, bool(axes)
    if llm and options.sequence_parallel:
        axes = (*axes, "tp")
    return replace(
        spec,
        mesh=mesh,
        splits=splits,
        frozen_layers=facts.frozen_layers if stages > 1 else frozenset(),
        activation=facts.activation if stages > 1 else None,
        options=options,
        packed=llm and (spec.packed or shared),
        token_axes=axes if llm or not graph.inputs(name) else (),
        tokens_per_row=facts.tokens_per_row if shared else 0,
        token_costs=token_costs(facts.shape, options.row_dtype.itemsize) if llm and shared else (0, 0),
    )
