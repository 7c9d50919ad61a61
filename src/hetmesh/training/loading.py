"""Where a recipe's samples are loaded, and the steps to come, planned early enough for their samples to be there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hetmesh.balance import BatchPlan
from hetmesh.data.loader import TRAIN, VALIDATION, DrawnSample
from hetmesh.data.payloads import Direct, InWorkers, Payloads, SplitSources
from hetmesh.data.registry import recipe_source
from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.schedule import Schedule
from hetmesh.training.feed import Feed

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe
    from hetmesh.training.job import Job

PATIENCE = 0.8
"""Share of the time that ranks wait for each other after which a sample counts as hanging: the rank that waits for the
sample shall say so before the others say that they wait for the rank."""


def open_payloads(recipe: Recipe) -> Payloads:
    """Where the samples of `recipe` are loaded; worker processes start here, so call it before anything has a thread.

    Raises:
        RecipeError: the data source cannot be made.
    """
    keys = recipe.data
    sources = SplitSources(
        {TRAIN: partial(recipe_source, keys), VALIDATION: partial(recipe_source, keys, "validation")}
    )
    if not keys.num_workers:
        return Direct(sources)
    sources[TRAIN]  # made now, forked workers share them
    with contextlib.suppress(RecipeError):  # there may be none
        sources[VALIDATION]
    return InWorkers(sources, keys.num_workers, keys.prefetch_factor, PATIENCE * recipe.comm.train_timeout_seconds)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One step before it runs: its samples, which lane and microbatch handles each, the order of its actions, and the
    feed that gives this rank's modules their inputs."""

    drawn: Sequence[DrawnSample]
    plan: BatchPlan
    schedule: Schedule
    feed: Feed


class Upcoming:
    """The steps of a run in order. While one runs, later ones are planned as workers get to their samples."""

    def __init__(self, job: Job, last: int) -> None:
        self._job, self._last = job, last
        self._made: dict[int, PlannedStep] = {}
        job.loader.payloads.when_idle(self._ahead)

    def take(self) -> PlannedStep:
        """The step at which the loader is, which then advances.

        Raises:
            SampleError: a sample's metadata is malformed or does not suit the modules.
        """
        loader = self._job.loader
        if loader.step not in self._made:
            self._made[loader.step] = self._make(loader.step)
        step = self._made.pop(loader.step)
        loader.step += 1
        return step

    def _make(self, number: int) -> PlannedStep:
        drawn = self._job.loader.batch(number)
        plan = self._job.plan(drawn.metas)
        schedule, feed = self._job.schedule(plan), self._job.feed(drawn, plan)
        feed.announce(schedule)
        return PlannedStep(drawn, plan, schedule, feed)

    def _ahead(self) -> None:
        """Plan the step after the last planned one."""
        number = max(self._made, default=self._job.loader.step - 1) + 1
        if number < self._last:
            with contextlib.suppress(HetmeshError):  # what is wrong with that step is said when it comes
                self._made[number] = self._make(number)
