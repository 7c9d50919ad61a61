"""The runtime: each rank runs its own subsequence of a schedule. The autograd graph is cut at the edges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.channels import job_channels
from hetmesh.boundary.groups import edge_groups
from hetmesh.boundary.watchdog import timed_out
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.graph import ModuleGraph, Stage, stage_graph
from hetmesh.parallel.random_state import device_module, random_place
from hetmesh.runtime.live_bytes import LiveBytes
from hetmesh.runtime.step import LoadBatch, Loss, Observe, StepRunner
from hetmesh.runtime.step_transfers import StepTransfers
from hetmesh.schedule import Action, Kind, Schedule

Reducer = Callable[[], Callable[[], None]]
"""Begins to sum the gradients of a stage over its mesh; what it returns waits for the sums."""

Recording = list[tuple[Action, float, float]]
"""What a rank did in a step: action, start and stop in seconds of `time.perf_counter`. A REDUCE comes twice: when the
sums begin, and when they are waited for."""


class Runtime:
    """Executes schedules on this rank.

    Args:
        world: this process.
        graph: the modules.
        modules: the stages that this rank holds, parallelised; called with a batch and the rows by source, they return
            a tensor, or several outputs by name (`BoundarySpec.output`).
        reducers: per such stage with something trainable, the REDUCE action.
        loss: the summed loss.
        transport: how boundary transfers are carried; see `hetmesh.boundary.transport`.
        seed: of everything random; see `hetmesh.parallel.random_state`.
        finish: called after the last action of a training step, when all gradients of this rank's stages are summed
            over their lanes.

    Build it on every rank of the job: it creates the process groups that boundaries may need.

    Attributes:
        places: per stage of this rank, where it draws random numbers.
        device_module: whose generator is seeded beside the CPU's; None where the device is the CPU.
        recording: set it to a list to have the actions of the next steps recorded.
        live_bytes: set it to a `LiveBytes` that is entered to have a span of it for each action of the next steps.
    """

    def __init__(
        self,
        world: World,
        graph: ModuleGraph,
        modules: Mapping[Stage, nn.Module],
        *,
        reducers: Mapping[Stage, Reducer],
        loss: Loss,
        transport: str = "auto",
        seed: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.world, self.graph, self.modules = world, graph, modules
        self.reducers, self.loss, self.transport = reducers, loss, transport
        self.finish = finish
        self.places = {stage: random_place(graph[stage.module], stage.index, world.rank, seed) for stage in modules}
        self.device_module = device_module(world.device)
        self.recording: Recording | None = None
        self.live_bytes: LiveBytes | None = None
        world.connect()
        channels = job_channels(graph) if world.backend.by_order else None
        if channels is not None:
            world.open(channels.all)
        for ranks in edge_groups(stage_graph(graph), transport, world.link, channels):
            world.group(ranks)
        self.channels = {} if channels is None else channels.of_edge

    def run(
        self,
        schedule: Schedule,
        plan: BatchPlan,
        load_batch: LoadBatch,
        observe: Observe | None = None,
        *,
        step: int,
        transfers: StepTransfers | None = None,
    ) -> Tensor:
        """Run one step on this rank.

        Args:
            step: its number; what is random differs from step to step, and is the same if a step is run again.
            transfers: of this step and rank, where they were prepared; None: they are worked out on the way.

        Returns:
            The summed loss of this rank's lane over all microbatches, detached, float64 on the CPU; 0 on ranks
            outside the sink. Gradients, if the schedule trains, are added to `.grad` as sums over the whole batch.

        Raises:
            BoundaryTimeout: a wait outlasted the timeout; names boundary or action, microbatch and rank.
        """
        runner = StepRunner(self, schedule, plan, load_batch, observe, step, transfers)
        reductions = []
        with self.world.backend.step(), torch.set_grad_enabled(schedule.training):
            for action in schedule.of_rank(self.world.rank):
                started = time.perf_counter()
                with self._guarded(action), self._counted(action):
                    if action.kind is Kind.REDUCE:
                        assert isinstance(action.target, Stage)
                        reductions.append((action, self.reducers[action.target]()))
                    else:
                        runner.execute(action)
                if self.recording is not None:
                    self.recording.append((action, started, time.perf_counter()))
            for action, finish in reductions:
                started = time.perf_counter()
                with self._guarded(action):
                    finish()
                if self.recording is not None:
                    self.recording.append((action, started, time.perf_counter()))
            if schedule.training and self.finish is not None:
                self.finish()
            runner.drain()
        return runner.loss_sum

    def _counted(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.live_bytes is None else self.live_bytes.span(action)

    @contextmanager
    def _guarded(self, action: Action) -> Iterator[None]:
        rank = self.world.rank
        try:
            with self.world.watchdog.watching(f"{action} on rank {rank}"):
                yield
        except BoundaryError as error:
            raise BoundaryError(f"{action}: {error}") from error
        except Exception as error:
            if isinstance(error, RuntimeError) and timed_out(error):
                raise BoundaryTimeout(
                    f"{action}: rank {rank} waited {self.world.timeout:g} s in a collective of the module"
                ) from error
            error.add_note(f"during {action} on rank {rank}")
            raise
