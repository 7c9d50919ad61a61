"""The timeline of one training step: what every rank did when, beside what the simulator expects."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.balance import BatchPlan
from hetmesh.boundary.world import gather_objects
from hetmesh.cost import Profile
from hetmesh.errors import HetmeshError
from hetmesh.files import write_json
from hetmesh.records.dump_folder import TIMELINE_FILE
from hetmesh.schedule import Schedule
from hetmesh.simulate import Timeline, simulate
from hetmesh.training.job import Job
from hetmesh.training.upcoming import PlannedStep

logger = logging.getLogger(__name__)


class StepRecorder:
    """Records the step that `[profiling]` names, and writes `timeline.json` on rank 0. Raises HetmeshError:
    `[profiling] profile` is none."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.path, self.keys = job, folder / TIMELINE_FILE, job.recipe.profiling
        if self.keys.timeline and self.keys.profile:
            Profile.load(self.keys.profile)  # what is wrong with it is said before the first step
        self.zero = self._computed_at = 0.0

    def begin(self, step: int) -> bool:
        """Start recording if `step` is to be recorded. Collective then: the ranks agree on a zero."""
        wanted = self.keys.timeline and step == min(self.keys.timeline_step, self.job.recipe.training.steps)
        if wanted:
            with self.job.world.waiting("start of the recorded step"):
                dist.barrier(group=self.job.world.group(range(self.job.world.size)))
            self.zero, self.job.runtime.recording = time.perf_counter(), []
            self.job.runtime.collectives = []
        return wanted

    def computed(self) -> None:
        """Call it when this rank's last action is over. The rest of the step is the optimizer's, except the wait until
        all ranks have summed losses and norms, which is shown before all of it."""
        self._computed_at = time.perf_counter()

    def end(self, planned: PlannedStep) -> None:
        """Gather what all ranks recorded of a step and write it. Collective."""
        runtime, world = self.job.runtime, self.job.world
        schedule, plan = planned.schedule, planned.plan
        computed = self._computed_at + world.log.agreeing_s
        world.accelerator.synchronize()  # the optimizer's work is queued by now, and not done
        recording, runtime.recording = runtime.recording or [], None
        places = {action: i for i, action in enumerate(schedule.actions)}
        recorded = [(places[action], start - self.zero, stop - self.zero) for action, start, stop in recording]
        inside = [(gathers, start - self.zero, stop - self.zero) for gathers, start, stop in runtime.collectives]
        mine = recorded, (computed - self.zero, time.perf_counter() - self.zero), inside
        everyone = gather_objects(mine, world, "recordings of all ranks")
        if world.rank:
            return
        records = {
            rank: [(schedule.actions[i], start, stop) for i, start, stop in own]
            for rank, (own, *_) in enumerate(everyone)
            if rank in self.job.graph.ranks
        }
        optimizer = {rank: everyone[rank][1] for rank in records}
        collectives = {rank: everyone[rank][2] for rank in records}
        out: dict[str, Any] = {
            "step": planned.number + 1,
            "measured": Timeline.recorded(schedule, records, optimizer=optimizer, collectives=collectives).as_json(),
        }
        if (predicted := self._predicted(schedule, plan)) is not None:
            out["predicted"] = predicted
        write_json(self.path, out)

    def _predicted(self, schedule: Schedule, plan: BatchPlan) -> dict[str, Any] | None:
        try:
            with torch.random.fork_rng(devices=[]):  # modules are built to learn their sizes, and may draw
                model = self.job.resolved.step_model()
                return simulate(schedule, model.costs(plan, schedule)).as_json()
        except HetmeshError:  # sizes of a user's module, or a machine's peak, are not known
            return None
        except Exception:  # steps are recorded by default: no prediction is worth a run
            logger.warning("the recorded step could not be predicted; training goes on", exc_info=True)
            return None
