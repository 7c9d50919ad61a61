"""What a rank of the LLM receives of the rows of its boundary, beside what it needs."""

from __future__ import annotations

import math

from hetmesh.balance import boundary_layouts
from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.bounds import minimal_elements
from hetmesh.testing.parity import run
from hetmesh.training.job import Job


def received_rows(rank: int, recipe: Recipe) -> tuple[int, int, int]:
    """Bytes of rows that reached the LLM's first stage here in a step in float64, the fewest that could, and those of
    all rows. Collective."""
    world = World.current()
    world.log.clear()
    run(recipe, world, steps=1)
    job = Job.assemble(resolve(recipe), world)
    plan = job.plan([d.meta for d in next(job.loader)])
    boundary = job.graph.inputs("llm")[0]
    layouts = [boundary_layouts(plan, boundary, m) for m in range(plan.num_microbatches)]
    needed = sum(minimal_elements(*each).get(rank, 0) for each in layouts)
    return world.log.bytes_received(boundary.name, "forward"), 8 * needed, 8 * sum(math.prod(s) for s, *_ in layouts)
