"""From a recipe to a RecipeView: one process, no process group, no weights; metadata of one global batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hetmesh.balance import BatchPlan, boundary_layouts
from hetmesh.boundary.process_groups import ends_are_tied, job_groups, most_on_a_rank
from hetmesh.boundary.transport import MEMORY, choose
from hetmesh.cost import ModuleShape, Work, imbalance, module_flops, module_memory
from hetmesh.formatting import counted
from hetmesh.graph import BoundarySpec, ModuleGraph, boundary_edge, dense_mesh
from hetmesh.layout import Layout, MeshSpec, RowSplit, TransferPlan, missing_elements, plan_transfer
from hetmesh.recipe.recipe import Recipe
from hetmesh.report.text import bytes_text
from hetmesh.report.timeline_text import hidden_text
from hetmesh.report.values import BoundaryView, HeldView, ModuleView, RecipeView, Traffic
from hetmesh.resolve.modules import notes_on_experts
from hetmesh.resolve.predictions import memory_fit, simulate_recipe
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.schedule import Schedule
from hetmesh.simulate import peak_rows
from hetmesh.simulate.rank_work import rank_work

LINKS = (MEMORY, "gloo", "nccl")  # what may carry messages: the memory of one host, or a backend
CELL_NAMES = {"dp_replicate": "dp", "dp_shard": "fsdp"}  # of mesh axes, where they differ from the axis's


def explain(resolved: ResolvedRecipe, machine: str | None = None) -> RecipeView:
    """What a recipe means: its modules, boundaries and work, and whether it fits the memory of `machine` (a name or
    TOML file; None: `[metrics] machine`).

    Raises:
        RecipeError: the machine or the profile of the recipe cannot be read.
        SampleError: the first global batch does not suit the modules.
    """
    recipe, graph, shapes = resolved.recipe, resolved.graph, resolved.shapes
    plan = resolved.plan(resolved.loader().batch(0).metas)
    schedule, model = resolved.schedules.of(plan), agreed_step_model(recipe, graph, shapes, machine)
    held, notes = _held(plan, schedule), notes_on_experts(shapes)
    notes = (*notes, *_cuts(plan, shapes[graph.llm.name]))
    if schedule.in_collectives and model is not None:
        notes = (*notes, f"predicted for encoders: {hidden_text(simulate_recipe(resolved, machine=machine))}")
    groups = job_groups(graph, recipe.world_size, lambda spec: ends_are_tied(spec, shapes[spec.name]))
    return RecipeView(
        description=recipe.job.description,
        ranks=recipe.world_size,
        idle_ranks=tuple(sorted(set(range(recipe.world_size)) - set(graph.ranks))),
        steps=recipe.training.steps,
        schedule=recipe.schedule,
        global_batch_size=recipe.batch.global_batch_size,
        microbatch_size=recipe.batch.microbatch_size,
        microbatches=plan.num_microbatches,
        tokens=plan.num_tokens,
        dtype={"bfloat16": "bfloat16 (parameters) and float32"}.get(recipe.training.dtype, recipe.training.dtype),
        optimizer=" and ".join(recipe.optimizer.names),
        modules=tuple(_module(recipe, plan, name, shapes[name], held[name]) for name in recipe.modules),
        process_groups=len(groups),
        process_groups_per_rank=most_on_a_rank(groups),
        fit=None if model is None else memory_fit(resolved, model),
        boundaries=tuple(_boundary(plan, b, graph[b.source].options.row_dtype.itemsize) for b in graph.boundaries),
        deferral=str(resolved.deferral),
        llm=recipe.llm,
        notes=notes,
    )


def _held(plan: BatchPlan, schedule: Schedule) -> dict[str, tuple[HeldView, ...]]:
    """Per module, of its stages."""
    stages, rows, most = schedule.stages, peak_rows(plan, schedule), schedule.peaks_in_flight()
    held = {stage: HeldView(most[stage], rows[stage]) for stage in stages.stages}
    return {name: tuple(held[stage] for stage in stages.of_module(name)) for name in plan.graph.order}


def _cuts(plan: BatchPlan, shape: ModuleShape | None) -> Iterator[str]:
    """What layers with a recurrence send where ranks that share tokens cut samples."""
    llm = plan.graph.llm
    if shape is None or not any(llm.token_costs):
        return
    work = [rank_work(plan, llm.name, m) for m in range(plan.routes.count(llm.name))]
    cuts = sum(rank.cuts.all for ranks in work for rank in ranks[:: llm.mesh.axis_size("cp")])
    for own, count in Counter(own for layer in shape.layers for own in layer.recurrences).items():
        sent = own.cut_bytes(llm.options.row_dtype.itemsize)
        each = f"{bytes_text(sent.forward)} forward and {bytes_text(sent.backward)} backward of states"
        text = f"context parallelism of {llm.name}: {counted(cuts, 'cut')} of samples in this batch, each {each}"
        yield f"{text} in each of {counted(count, 'layer')} with a recurrence, whatever the lengths"


def _module(
    recipe: Recipe, plan: BatchPlan, name: str, shape: ModuleShape | None, held: tuple[HeldView, ...]
) -> ModuleView:
    spec, graph, mesh = plan.graph[name], plan.graph, plan.graph[name].mesh
    work = plan.lane_work(name)
    total = Work.sum_of(work)
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
        work=total,
        flops=module_flops(shape, total, upstream=upstream) if shape else None,
        imbalance=imbalance(work),
        once_per_step=spec.options.whole_in_step if dense_mesh(mesh).axis_size("dp_shard") > 1 else None,
    )


def cell(mesh: MeshSpec, rank: int) -> str:
    """The coordinates of a member, e.g. `"dp0 tp1"`."""
    coordinate = mesh.coordinate(rank) or ()
    return " ".join(f"{CELL_NAMES.get(axis, axis)}{i}" for axis, i in zip(mesh.axes, coordinate, strict=True))


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
    layouts = layout_text(src, shape), layout_text(dst, shape)
    moved = _traffic(forward, missing_elements(shape, src, dst), itemsize), backward
    ends = boundary.key, boundary.destination, boundary.at
    return BoundaryView(*ends, shape, *layouts, *moved, boundary.layer, first, len(routes))


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
