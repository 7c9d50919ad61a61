"""What the simulator predicts of a recipe before any machine is booked: its first step, and the memory of all ranks."""

from __future__ import annotations

import math

from hetmesh.balance import BatchPlan, largest_batches
from hetmesh.boundary.process_groups import job_communicators
from hetmesh.data.payloads import Unreadable
from hetmesh.data.source import Sample
from hetmesh.graph.sample import kinds_of
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.schedule import ahead
from hetmesh.simulate import MemoryFit, RankMemory, StepModel, Timeline, largest_memory, rank_memory, simulate

MAX_SAMPLES = 4096
"""Samples, evenly from all of the run, among which the largest are looked for; at least one global batch."""

MAX_PREPARED = 4
"""Samples with videos that are loaded to see how long that takes."""


def simulate_recipe(
    resolved: ResolvedRecipe,
    *,
    machine: str | None = None,
    profile: str | None = None,
    model: StepModel | None = None,
) -> Timeline:
    """Simulate the first step of a recipe: one process, no process group, no weights.

    Args:
        machine: a name or TOML file; None: `[metrics] machine`, else this CPU.
        profile: a file of `hetmesh profile`; None: `[profiling] profile`, and without one the analytic costs.
        model: in place of that of `machine` and `profile`.

    Raises:
        RecipeError: sizes of a module or a machine are not known.
    """
    recipe = resolved.recipe
    plan, model = resolved.plan(resolved.loader().batch(0).metas), model or resolved.step_model(machine, profile)
    if machine or profile:
        schedule = StepSchedules(recipe, resolved.graph, model, resolved.typical).of(plan)
    else:
        schedule = resolved.schedules.of(plan)
    beside = sorted({stage.module for stage in schedule.beside}) if schedule.in_collectives else ()
    return simulate(schedule, model.costs(plan, schedule, parts=bool(beside)), beside=beside)


def notes_on_videos(resolved: ResolvedRecipe, step_seconds: float) -> list[str]:
    """Per module that reads videos, whether workers prepare (decode) those of its lanes in the first step while a step
    of `step_seconds` runs: some samples are loaded here and now, and others take as long for each of their rows."""
    recipe, loader, notes = resolved.recipe, resolved.loader(), list[str]()
    reads = {name: kinds for name, media in recipe.wiring.media.items() if "video" in (kinds := kinds_of(media or ""))}
    if not reads:
        return []
    drawn = loader.batch(0)
    plan = resolved.plan(drawn.metas)
    for name, kinds in reads.items():
        rows = {i: meta.rows[name] for i, meta in enumerate(plan.samples) if meta.num_items("video")}
        tried = [*rows][:MAX_PREPARED]
        twice = [drawn[i] for i in (*tried[:1], *tried)]  # the first time takes longer
        loaded = loader.try_load(twice, {sample.index: kinds for sample in twice})[1:]
        taken = [(each.load_s, rows[i]) for each, i in zip(loaded, tried, strict=True) if isinstance(each, Sample)]
        if not taken:
            wrong = [each.message for each in loaded if isinstance(each, Unreadable)]
            notes += [f"how long the videos of a step take is not known: {message}" for message in wrong[:1]]
            continue
        seconds, measured = map(sum, zip(*taken, strict=True))
        lanes = [sum(rows.get(i, 0) for part in lane for i in part) for lane in zip(*plan.lanes[name], strict=True)]
        most, workers = max(lanes) * seconds / measured, recipe.data.num_workers
        fits, enough = most <= workers * step_seconds, math.ceil(most / step_seconds)
        notes.append(
            f"preparing the videos of a step takes, as tried here, {most:.3g} s for lane {lanes.index(max(lanes))} of "
            f"{name}, which has most: data.num_workers = {workers} "
            + ("hides that behind the step" if fits else f"does not hide that behind the step, {enough} would")
        )
    return notes


def memory_fit(resolved: ResolvedRecipe, model: StepModel) -> MemoryFit:
    """What every rank holds at most, and whether `model.machine` has as much.

    The largest batch: of up to `MAX_SAMPLES` samples, from all of the run, those that give a module most rows, or the
    LLM most targets, together in one batch; of the batches by each measure the worst for each rank
    (`hetmesh.balance.largest_batches`). Raises RecipeError, SampleError: a balancer or a sample refuses the batch.
    """
    loader, size = resolved.loader(), resolved.recipe.batch.global_batch_size
    steps = resolved.recipe.training.steps
    batches = min(max(MAX_SAMPLES // size, 1), steps)
    samples = loader.drawn([i for k in range(batches) for i in loader.indices(k * steps // batches)]).metas
    plans = map(resolved.plan, largest_batches(resolved.graph, samples, size))
    ranks = largest_memory(step_memory(resolved, model, plan) for plan in plans)
    return MemoryFit(model.machine.name, model.machine.memory_bytes, ranks, len(samples), steps * size)


def step_memory(resolved: ResolvedRecipe, model: StepModel, plan: BatchPlan) -> dict[int, RankMemory]:
    """Per rank what it holds at most in the step of one `plan`: what a dry run or a real one of that step measures."""
    schedule = ahead(resolved.schedules.of(plan))  # what is begun before its place holds memory from then on
    communicators = job_communicators(model.graph, resolved.recipe.world_size, lambda spec: model.shape(spec.name))
    return rank_memory(model, schedule, model.costs(plan, schedule), communicators)
