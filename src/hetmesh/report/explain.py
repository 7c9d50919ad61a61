"""From a recipe to a RecipeView: one process, no process group, no weights; metadata of one global batch."""

from __future__ import annotations

from collections.abc import Mapping

from hetmesh.balance import BatchPlan, boundary_layouts, plan_batch
from hetmesh.boundary.groups import ends_are_tied, job_groups, most_on_a_rank
from hetmesh.boundary.transport import MEMORY, choose
from hetmesh.cost import ModuleShape, Work, imbalance, module_flops, module_memory
from hetmesh.graph import BoundarySpec, ModuleGraph, boundary_edge
from hetmesh.layout import Layout, MeshSpec, RowSplit, TransferPlan, missing_elements, plan_transfer
from hetmesh.recipe.recipe import Recipe
from hetmesh.report.values import BoundaryView, HeldView, ModuleView, RecipeView, Traffic
from hetmesh.resolve.balance_options import recipe_balance
from hetmesh.resolve.describe import describe, make_loader
from hetmesh.resolve.memory_fit import memory_fit
from hetmesh.resolve.module_shapes import module_shapes, notes_on_experts
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.schedule import Schedule, peaks_in_flight
from hetmesh.simulate import peak_rows

LINKS = (MEMORY, "gloo", "nccl")
"""What may carry messages: the memory of one host, where all ranks are on its CPUs, or a backend."""

SHORT = {"dp_replicate": "dp", "dp_shard": "fsdp"}
"""Names of mesh axes in a cell, where they differ from the axis's own."""


def explain(recipe: Recipe, machine: str | None = None) -> RecipeView:
    """Check `recipe` and say what it means.

    Args:
        machine: a name or TOML file, whose memory it is to fit; None: `[metrics] machine`.

    Raises:
        RecipeError: what `hetmesh check` would find.
        SampleError: the first global batch does not suit the modules.
    """
    source, adapters, graph = describe(recipe)
    batch = recipe.batch
    loader = make_loader(recipe, source, graph, adapters)
    drawn = loader.batch(0)
    plan = plan_batch(graph, drawn.metas, batch.microbatch_size, recipe_balance(recipe, graph, adapters))
    held = _held(plan, StepSchedules(recipe, graph, adapters).of(plan))
    shapes = module_shapes(recipe, adapters)
    model = agreed_step_model(recipe, graph, adapters, machine)
    groups = job_groups(graph, recipe.world_size, lambda spec: ends_are_tied(spec, shapes[spec.name]))
    return RecipeView(
        description=recipe.job.description,
        ranks=recipe.world_size,
        idle_ranks=tuple(sorted(set(range(recipe.world_size)) - set(graph.ranks))),
        steps=recipe.training.steps,
        schedule=recipe.schedule,
        global_batch_size=batch.global_batch_size,
        microbatch_size=batch.microbatch_size,
        microbatches=plan.num_microbatches,
        tokens=plan.num_tokens,
        dtype=recipe.training.dtype,
        optimizer=recipe.optimizer.name,
        modules=tuple(_module(recipe, plan, name, shapes[name], held[name]) for name in recipe.modules),
        process_groups=len(groups),
        process_groups_per_rank=most_on_a_rank(groups),
        fit=None if model is None else memory_fit(recipe, graph, adapters, loader, model),
        boundaries=tuple(_boundary(plan, b, graph[b.source].options.row_dtype.itemsize) for b in graph.boundaries),
        notes=notes_on_experts(shapes),
    )


def _held(plan: BatchPlan, schedule: Schedule) -> dict[str, tuple[HeldView, ...]]:
    """Per module, of its stages."""
    s = schedule
    most = peaks_in_flight(s.actions, s.stages, s.routes, s.training, s.split)
    rows = peak_rows(plan, schedule)
    return {
        name: tuple(HeldView(most[stage], rows[stage]) for stage in s.stages.of_module(name))
        for name in plan.graph.order
    }


def _module(
    recipe: Recipe, plan: BatchPlan, name: str, shape: ModuleShape | None, held: tuple[HeldView, ...]
) -> ModuleView:
    spec, graph = plan.graph[name], plan.graph
    mesh = spec.mesh
    work = plan.lane_work(name)
    whole = Work.sum_of(work)
    upstream = any(graph.needs_gradient(b) for b in graph.inputs(name))
    return ModuleView(
        name=name,
        model=recipe.modules[name].model,
        ranks=mesh.ranks,
        axes=dict(zip(mesh.axes, mesh.sizes, strict=True)),
        lanes=spec.num_lanes,
        cells={rank: cell(mesh, rank) for rank in mesh.ranks},
        training=_training(shape, graph, name),
        dtype=str(spec.options.row_dtype).removeprefix("torch."),
        parameters=shape.parameters if shape else None,
        trainable_parameters=shape.trainable_parameters if shape else None,
        memory=module_memory(shape, spec, recipe.optimizer.name) if shape else {},
        stages=spec.splits,
        microbatches=plan.routes.count(name),
        held=held,
        work=whole,
        flops=module_flops(shape, whole, upstream=upstream) if shape else None,
        imbalance=imbalance(work),
    )


def cell(mesh: MeshSpec, rank: int) -> str:
    """The coordinates of a member, e.g. `"dp0 tp1"`."""
    coordinate = mesh.coordinate(rank) or ()
    return " ".join(f"{SHORT.get(axis, axis)}{i}" for axis, i in zip(mesh.axes, coordinate, strict=True))


def _training(shape: ModuleShape | None, graph: ModuleGraph, name: str) -> str:
    if shape is None:
        return "trained" if graph[name].trainable else "frozen"
    if shape.trainable_parameters in (0, shape.parameters):
        return "trained" if shape.trainable_parameters else "frozen"
    return "partly"


def _boundary(plan: BatchPlan, boundary: BoundarySpec, itemsize: int) -> BoundaryView:
    routes = list(plan.routes.along(boundary_edge(plan.graph, boundary)))
    first = (routes[0].source, routes[0].destination) if routes else (0, 0)
    shape, src, dst = boundary_layouts(plan, boundary, *first)
    forward = plan_transfer(shape, src, dst)
    backward = None
    if plan.graph.needs_gradient(boundary):
        bound = missing_elements(shape, dst.gradient(), src.gradient())
        backward = _traffic(forward.transpose(), bound, itemsize)
    return BoundaryView(
        boundary.key,
        boundary.destination,
        boundary.at,
        shape,
        layout_text(src, shape),
        layout_text(dst, shape),
        _traffic(forward, missing_elements(shape, src, dst), itemsize),
        backward,
        boundary.layer,
        first,
        len(routes),
    )


def _traffic(plan: TransferPlan, bound: int, itemsize: int) -> Traffic:
    transport: Mapping[str, str] = {link: choose(plan, link) for link in LINKS}
    return Traffic(plan.bytes_moved(itemsize), bound * itemsize, transport)


def layout_text(layout: Layout, shape: tuple[int, ...]) -> str:
    """A layout in words: `"lane 2: rows split 768+768, tp 4: replicated"`."""
    axes = zip(layout.mesh.axes, layout.mesh.sizes, layout.placements, strict=True)
    words = [f"{axis} {size}: {_placement_text(placement, shape)}" for axis, size, placement in axes if size > 1]
    return ", ".join(words) or f"all {shape[0]} rows on rank {layout.mesh.ranks[0]}"


def _placement_text(placement: object, shape: tuple[int, ...]) -> str:
    if not isinstance(placement, RowSplit):
        return "replicated" if type(placement).__name__ == "Replicate" else str(placement)
    counts = [sum(stop - start for start, stop in rows) for rows in placement.intervals]
    if len(counts) == 1:
        return f"all {counts[0]} rows"
    if len(counts) <= 4:
        return f"rows split {'+'.join(map(str, counts))}"
    return f"rows split, {min(counts)} to {max(counts)} each"
