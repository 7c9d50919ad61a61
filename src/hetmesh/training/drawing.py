"""Media items that a module after the LLM makes of held-out samples, on the layout that trains.

One step of sampling a round: all ranks evaluate the samples with their items so far, and every rank knows the velocity
of each. So any layout will do, and nothing is computed that an evaluation does not; the price is a forward per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.graph import Stage
from hetmesh.models.draws import EVALUATION
from hetmesh.models.generator import GeneratorAdapter
from hetmesh.training.evaluate import draw_held_out, evaluating
from hetmesh.training.job import Job
from hetmesh.training.unreadable import leave_out_unreadable


def drawers(job: Job) -> list[str]:
    """The modules that make media items by flow matching, from nothing but the LLM's hidden states."""
    adapters = {
        name: adapter for name in job.graph.order if isinstance(adapter := job.adapters[name], GeneratorAdapter)
    }
    return [name for name, adapter in adapters.items() if adapter.encoder is None and adapter.abilities.draws > 0]


def draw_items(job: Job, source: Source, name: str, limit: int | None = None) -> dict[int, Tensor]:
    """The items that module `name`, one of `drawers`, makes of those of the first `limit` samples that have some: by
    sample, `[items, *shape]`, from the noise of evaluations. Samples that cannot be read are left out. Collective over
    all ranks; training goes on as if this had not been."""
    batch, media = job.recipe.batch.global_batch_size, job.graph[name].media or ""
    loader = Loader(source, batch, job.loader.prepare, shuffle=False, skip=job.loader.skip)
    held_out = draw_held_out(job.world, loader, min(len(source), limit or len(source)))
    asked = [each.index for part in held_out for each in part if each.meta.num_items(media)]
    found: dict[int, Tensor] = {}
    with evaluating(job):
        for start in range(0, len(asked), batch):
            with job.world.watchdog.watching("metadata of the held-out samples to draw"):
                drawn = loader.drawn(asked[start : start + batch])
            found |= _draw(job, name, loader, drawn)
    return found


def _draw(job: Job, name: str, loader: Loader, drawn: DrawnBatch) -> Iterator[tuple[int, Tensor]]:
    world, adapter = job.world, job.adapters[name]
    assert isinstance(adapter, GeneratorAdapter)
    plan = job.plan(drawn.metas)
    feed = job.feed(drawn, plan, EVALUATION, loader)
    unreadable: Mapping[int, str] = {}
    if loader.skip:
        plan, unreadable = leave_out_unreadable(feed, world)
    lane = job.graph[name].lane_of(world.rank)
    items = [each.meta.num_items(job.graph[name].media or "") for each in drawn]
    rows = [count * adapter.latents for count in items]
    ends = list(accumulate(rows, initial=0))
    state = feed.draws.of(name, [each.meta.id for each in drawn], items, rows, adapter.width)["noise"]
    schedule = job.schedule(plan, training=False)

    def places(m: int) -> list[int]:
        """Rows of `state` that this rank's lane handles in a microbatch."""
        assert lane is not None
        return [row for i in plan.samples_of(name, m, lane) for row in range(ends[i], ends[i + 1])]

    for step in range(adapter.steps):
        velocity = torch.zeros(state.shape, dtype=state.dtype, device=world.device)

        def inputs(stage: Stage, m: int, step: int = step, state: Tensor = state) -> Mapping[str, Any]:
            batch = feed(stage, m)
            if stage.module != name or "noise" not in batch:
                return batch
            own = state[places(m)].to(batch["noise"].dtype)
            # As noise and as data it is the item at any time: (1 - t) x + t x.
            return {**batch, "noise": own, "targets": own, "time": torch.full_like(batch["time"], step / adapter.steps)}

        def observe(m: int, predicted: Tensor, _: Mapping[str, Tensor], velocity: Tensor = velocity) -> None:
            if job.counts_loss(name):
                velocity[places(m)] = predicted.to(velocity.dtype)

        job.runtime.run(schedule, plan, inputs, {name: observe}, step=0)
        with world.waiting(f"sum of what {name!r} draws over all ranks"):
            dist.all_reduce(velocity, group=world.group(range(world.size)))
        state = state + velocity.cpu() / adapter.steps
    for i, latents in enumerate(state.split(rows)):
        if i not in unreadable:
            yield drawn.indices[i], adapter.to_items(latents.view(-1, adapter.latents, adapter.width))
