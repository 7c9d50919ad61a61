"""What runs on the two ranks: stages by themselves at some shapes, and whole steps, in turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from benchmarks.busy import BusyMeter, Sizes, blocks, pin
from hetmesh.balance import BatchPlan, edge_layouts, plan_batch
from hetmesh.boundary import World
from hetmesh.cost import Profile, Work
from hetmesh.data.drawn import DrawnBatch
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.runtime import Recording
from hetmesh.runtime.step_runner import LOSS, StepRunner
from hetmesh.schedule import Action, Kind
from hetmesh.schedule.schedule import backward_kinds
from hetmesh.simulate import rank_work
from hetmesh.training.job import Job
from hetmesh.training.profile import profile_recipe

PARTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}
MESSAGES = (1 << 12, 1 << 16, 1 << 18, 1 << 20)
"""Bytes."""


@dataclass
class Measured:
    """What one rank measured.

    Attributes:
        stages: (stage, part, rows, pairs) -> seconds of each repetition.
        transfers: bytes -> seconds from the start of a send on the other rank to the arrival here.
        reductions: per stage, seconds of each repetition.
        overheads: seconds per compute action that the runtime itself took, per step of other shapes.
        steps: per step, what was recorded, and the end.
        busy: seconds of plain code alone and beside the other rank (`benchmarks.busy`).
        kept_off: shares of the plain code's turns in which it did not have its core.
    """

    stages: dict[tuple[Stage, str, int, int], list[float]] = field(default_factory=dict)
    transfers: dict[int, list[float]] = field(default_factory=dict)
    reductions: dict[Stage, list[float]] = field(default_factory=dict)
    overheads: list[float] = field(default_factory=list)
    steps: list[tuple[Recording, float]] = field(default_factory=list)
    busy: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    kept_off: list[float] = field(default_factory=list)


def measure(
    rank: int, recipe: Recipe, sizes: Sequence[int], rounds: int, seconds: float, steps: int, busy: Sizes
) -> Measured:
    """Rounds of: every stage by itself at microbatches of `sizes` for `seconds`, messages, plain code, `steps` steps.

    Args:
        sizes: samples per microbatch, none of them the recipe's own.
        busy: of the plain code.
    """
    pin(rank)
    meter = BusyMeter(blocks(busy), seconds)
    job = Job.assemble(resolve(recipe), World.current())
    others, lanes = job.loader.batch(1), job.graph.llm.num_lanes
    probe = Probe(job, [others[: size * lanes] for size in sizes])
    probe.run_step(recipe.batch.microbatch_size)  # first contacts
    for i in range(rounds):  # short ones: what else a machine does comes and goes within seconds
        probe.stages_alone(seconds)
        probe.messages()
        probe.reductions()
        meter.round()
        if i % 2 == 0:
            probe.overhead(min(sizes))
        for _ in range(steps):
            probe.measured.steps.append(probe.run_step(recipe.batch.microbatch_size))
    probe.measured.busy, probe.measured.kept_off = (meter.alone, meter.together), meter.kept_off
    return probe.measured


class Probe:
    """A job of which parts are run and timed.

    Args:
        microbatches: what every stage of this rank is measured with, by itself.
    """

    def __init__(self, job: Job, microbatches: Sequence[DrawnBatch]) -> None:
        self.job, self.measured = job, Measured()
        self.rank = job.world.rank
        self.drawn = job.loader.batch(0)
        self.cases = [(stage, drawn) for drawn in microbatches for stage in job.runtime.modules]

    def stages_alone(self, seconds: float) -> None:
        """All stages of this rank in turn, while the other rank does the same with its own."""
        dist.barrier()
        stop = time.perf_counter() + seconds
        while True:
            for stage, drawn in self.cases:
                self._stage_alone(stage, drawn)
            over = torch.tensor(time.perf_counter() > stop, dtype=torch.int32)
            dist.all_reduce(over)  # context-parallel ranks run a stage together, so equally often
            if over:
                return

    def _stage_alone(self, stage: Stage, drawn: DrawnBatch) -> None:
        """One stage on one microbatch, through the code with which the runtime executes actions."""
        job, rank = self.job, self.rank
        plan = plan_batch(job.graph, drawn.metas, len(drawn))
        schedule = recipe_schedule(job.recipe, job.graph, 1)
        stages = schedule.stages
        step = StepRunner(job.runtime, schedule, plan, job.feed(drawn, plan, 0), {}, 0)
        for edge in stages.inputs(stage):
            shape, _, layout = edge_layouts(plan, edge, 0)
            rows = torch.randn(layout.local_shape(shape, rank), dtype=job.graph[edge.source.module].options.row_dtype)
            step.leaves[edge, 0] = rows.requires_grad_(edge in stages.gradient_edges)
        work = own_work(plan, stage.module, 0, rank)
        if any(job.graph[stage.module].mesh.axis_size(axis) > 1 for axis in ("cp", "tp", "dp_shard", "ep")):
            dist.barrier()  # what they wait for each other is in their actions
        for kind in (Kind.FORWARD, *backward_kinds(stage, stages, schedule.split)):
            if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                outputs = {name: output for name, output in step.outputs[stage, 0].items() if name != LOSS}
                step.gradients[stage, 0] = {name: torch.randn_like(output) for name, output in outputs.items()}
            started = time.perf_counter()
            step.execute(Action(kind, stage, 0))
            key = (stage, PARTS[kind], work.rows, work.pairs)
            self.measured.stages.setdefault(key, []).append(time.perf_counter() - started)

    def messages(self, repeats: int = 2) -> None:
        """Both ranks send to each other at once, as neighbours in a pipeline do."""
        other = 1 - self.rank
        for size in MESSAGES:
            buffer, incoming = torch.zeros(size // 4), torch.zeros(size // 4)
            for _ in range(repeats):
                dist.barrier()
                received, started = dist.irecv(incoming, other), time.perf_counter()
                sent = dist.isend(buffer, other)
                assert received is not None
                assert sent is not None
                received.wait()
                self.measured.transfers.setdefault(size, []).append(time.perf_counter() - started)
                sent.wait()

    def reductions(self) -> None:
        """The sum of each stage's gradients over its lanes; the first of two brings the lanes together."""
        for stage, start in self.job.runtime.reducers.items():
            start()()
            started = time.perf_counter()
            start()()
            self.measured.reductions.setdefault(stage, []).append(time.perf_counter() - started)

    def overhead(self, size: int) -> None:
        """What the actions of a step take that are neither work nor waits, per action that is work."""
        recording, _ = self.run_step(size)
        work = sum(action.kind in PARTS for action, _, _ in recording)
        spent = sum(stop - start for action, start, stop in recording if action.kind is Kind.SEND)
        spent += sum(after[1] - before[2] for before, after in itertools.pairwise(recording))
        self.measured.overheads.append(spent / work)

    def run_step(self, size: int) -> tuple[Recording, float]:
        """One step with `size` samples per microbatch: what was recorded, and its end."""
        job = self.job
        drawn = self.drawn[: job.recipe.batch.num_microbatches * size]
        plan = plan_batch(job.graph, drawn.metas, size)
        feed = job.feed(drawn, plan, 0)
        recording = job.runtime.recording = []
        dist.barrier()
        job.runtime.run(job.schedule(plan), plan, feed, step=0)
        end, job.runtime.recording = time.perf_counter(), None
        return recording, end


def profile(rank: int, recipe: Recipe, seconds: float) -> Profile:
    """What `hetmesh profile` fits to this rank's core, while the other rank does the same."""
    pin(rank)
    dist.barrier()
    return profile_recipe(resolve(recipe), seconds=seconds)


def own_work(plan: BatchPlan, name: str, microbatch: int, rank: int) -> Work:
    """What a member rank computes of a module in a microbatch; where ranks share the tokens of a lane, most of each
    number: they wait for each other."""
    spec = plan.graph[name]
    lane, each = spec.lane_of(rank), rank_work(plan, name, microbatch)
    assert lane is not None
    shares = len(each) // spec.num_lanes
    works = [one.work for one in each[lane * shares : (lane + 1) * shares]]
    return Work(*(max(getattr(work, f.name) for work in works) for f in fields(Work)))
