"""The runtime: each rank runs its own subsequence of a schedule. The autograd graph is cut at the edges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._torch_compat import abandon_fsdp_step
from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator, Event
from hetmesh.boundary.collective_clock import CollectiveClock
from hetmesh.boundary.process_groups import edge_groups, job_channels
from hetmesh.boundary.watchdog import timed_out
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.graph import ModuleGraph, Stage, stage_graph
from hetmesh.parallel import Reduction
from hetmesh.parallel.compute_copies import ComputeCopies
from hetmesh.parallel.fully_shard import WholeInStep
from hetmesh.parallel.gaps import GapTime, lending
from hetmesh.parallel.random_state import random_place
from hetmesh.runtime.batches_ahead import LoadBatch
from hetmesh.runtime.live_bytes import LiveBytes
from hetmesh.runtime.side import Side, Stops
from hetmesh.runtime.step_runner import Loss, Observe, StepRunner
from hetmesh.runtime.step_transfers import StepTransfers
from hetmesh.schedule import Action, Kind, Schedule

Reducer = Callable[[], Callable[[], None]]
"""Begins to sum the gradients of a stage over its mesh; what it returns waits for the sums."""

Recording = list[tuple[Action, float, float]]
"""What a rank did: action, start and stop by `time.perf_counter`. A REDUCE comes twice: begun, and waited for."""

Collectives = list[tuple[bool, float, float]]
"""Collectives inside its modules: whether one gathers parameters, start and stop as in `Recording`."""


class Runtime:
    """Executes schedules on this rank.

    Args:
        world: this process.
        graph: the modules.
        modules: the stages that this rank holds, parallelised; called with a batch and the rows by source, they return
            a tensor, or several outputs by name (`BoundarySpec.output`).
        reducers: per such stage with something trainable, the REDUCE action.
        losses: the summed loss of each module that has one and whose last stage is here.
        seed: of everything random; see `hetmesh.parallel.random_state`.
        finish: called after the last action of a training step, when this rank's gradients are summed over their lanes.
        whole: of its stages those whose parameters FSDP keeps whole during a step.

    Build it on every rank of the job: it creates the process groups that boundaries may need.

    Attributes:
        places: per stage of this rank, where it draws random numbers.
        device_module: whose generator is seeded as well as the CPU's; None where the device is the CPU.
        copying, beside, first: streams for batches, for slices in gaps, and, of high priority, for the stages in whose
            collectives slices run; None where the device has no streams.
        clock: of the newest step, if it was recorded.
        recording: set it to a list to have the actions of the next steps recorded, and in
        collectives: the collectives inside them. On streams of their own (FSDP's on GPUs) they may run beside actions.
        live_bytes: set it to a `LiveBytes` that is entered to have a span of it for each action of the next steps.
    """

    def __init__(
        self,
        world: World,
        graph: ModuleGraph,
        modules: Mapping[Stage, nn.Module],
        *,
        reducers: Mapping[Stage, Reducer],
        losses: Mapping[str, Loss],
        seed: int = 0,
        finish: Callable[[], None] | None = None,
        whole: Mapping[Stage, WholeInStep | ComputeCopies] = MappingProxyType({}),
    ) -> None:
        self.world, self.graph, self.modules = world, graph, modules
        self.reducers, self.losses, self.finish, self.whole = reducers, losses, finish, whole
        self.places = {stage: random_place(graph[stage.module], stage.index, world.rank, seed) for stage in modules}
        self.device_module = world.accelerator.random_module
        self.copying, self.beside = world.accelerator.stream(), world.accelerator.stream()
        self.first = world.accelerator.stream(high_priority=True)
        self.reductions = tuple(reducer for reducer in reducers.values() if isinstance(reducer, Reduction))
        self.stops, self.gap_time = Stops(), GapTime()
        self.clock: ActionClock | None = None
        self.recording: Recording | None = None
        self.collectives: Collectives = []
        self.live_bytes: LiveBytes | None = None
        self._everyone = world.group(range(world.size))
        world.connect()
        channels = job_channels(graph) if world.backend.by_order else None
        if channels is not None:
            world.open(channels.all)
        for ranks in edge_groups(stage_graph(graph), world.link, channels):
            world.group(ranks)
        self.channels = {} if channels is None else channels.of_edge

    def run(
        self,
        schedule: Schedule,
        plan: BatchPlan,
        load_batch: LoadBatch,
        observe: Mapping[str, Observe] = MappingProxyType({}),
        *,
        step: int,
        transfers: StepTransfers | None = None,
        weights: Mapping[str, float] = MappingProxyType({}),
        settled: bool = True,
    ) -> dict[str, Tensor]:
        """Run one step on this rank. On an asynchronous accelerator the host only queues it.

        Args:
            observe: by module with a loss, what sees the output of its last stage.
            step: its number; what is random differs from step to step, and is the same if a step is run again.
            transfers: of this step and rank, if they were prepared; None: they are worked out on the way.
            weights: by which the summed losses of modules are multiplied in gradients; 1 where left out.
            settled: whether gradients are final when this returns, for which the host waits for the device. False: the
                caller sums `changed` over all ranks, and calls `settle` on all if the sum is not 0.

        Returns:
            Per module with a loss its sum over all microbatches of this rank's lane, detached, float64, 0-d, on the
            device; 0 on ranks outside its last stage. Gradients of their weighted sum, if the schedule trains, are
            added to `.grad`, over the whole batch.

        Raises:
            BoundaryTimeout: a wait outlasted the timeout; names boundary or action, microbatch and rank.
        """
        runner = StepRunner(self, schedule, plan, load_batch, observe, step, transfers, weights)
        reductions = []
        clock = self.clock = None if self.recording is None else ActionClock(self.world.accelerator)
        ticking = nullcontext() if clock is None else clock.collectives.ticking()
        graded = torch.set_grad_enabled(schedule.training)
        early = runner.transfers.windows if schedule.in_collectives and self._lends else {}
        beginning = deque(early.items())
        places = {place for place, action in enumerate(runner.actions) if action in early} if early else set()
        last = {place for place in places if place + 1 not in places}  # behind these the first flow goes on
        with (
            self.world.backend.step(),
            self._forgotten_if_it_fails(),
            graded,
            ticking,
            self._side(runner, early) as side,
        ):
            for place, action in enumerate(runner.actions):
                while side is not None and beginning and beginning[0][1] <= place:
                    side.submit(beginning.popleft()[0])
                with self._guarded(action), self._counted(action), runner.streams.of(action), _timed(clock, action):
                    if side is not None and place in places:
                        side.due()
                        if place in last:
                            side.finish()
                    elif action.kind is Kind.REDUCE:
                        assert isinstance(action.target, Stage)
                        reductions.append((action, self.reducers[action.target]()))
                    else:
                        runner.execute(action)
            runner.streams.join()
            for action, finish in reductions:
                with self._guarded(action), _timed(clock, action):
                    finish()
            if schedule.training and self.finish is not None:
                self.finish()
            runner.drain()
        if clock is not None and self.recording is not None:
            self.recording += clock.read()
            self.collectives += clock.read_collectives()
        if schedule.training and settled and self._changed_anywhere():
            self.settle()
        return runner.loss_sums

    @property
    def changed(self) -> float:
        """The number of this rank's stages in which other parameters had a gradient in this step than when ranks last
        agreed which ones have one. If it is above 0 on any rank, gradients are final only after `settle`."""
        return float(sum(reduction.changed for reduction in self.reductions))

    def settle(self) -> None:
        """Complete gradients where other parameters have one than in the steps before: make them sums, or None where no
        rank has one. Collective over all ranks, after a training step; the host waits."""
        with self.world.waiting("which parameters have a gradient"):
            for reduction in self.reductions:
                reduction.settle()

    def _changed_anywhere(self) -> bool:
        changed = torch.full((), self.changed, device=self.world.device)
        with self.world.waiting("whether gradients are those of the steps before"):
            dist.all_reduce(changed, group=self._everyone)
            return bool(changed)

    def _counted(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.live_bytes is None else self.live_bytes.span(action)

    @property
    def _lends(self) -> bool:
        """Whether this rank may run actions in its collectives. What is recorded or counted comes one by one, and on an
        asynchronous device streams overlap."""
        device = self.world.accelerator
        return self.recording is None and self.live_bytes is None and device.computes and not device.asynchronous

    @contextmanager
    def _side(self, runner: StepRunner, early: Collection[Action]) -> Iterator[Side | None]:
        """What runs the actions `early` of a step; None where there are none."""
        self.gap_time = GapTime()
        if not early:
            yield None
            return

        def run(action: Action) -> None:
            with self._named(action):
                runner.execute(action)

        for stage in {action.stage for action in early if action.kind is Kind.FORWARD}:
            self.stops.watch(self.modules[stage])
        side = Side(run, self.world.rank, self.world.watchdog)
        with side, self.stops.of(side), lending(side.lend) as self.gap_time:
            yield side

    @contextmanager
    def _forgotten_if_it_fails(self) -> Iterator[None]:
        """A step that ends in the middle leaves nothing to the next one."""
        try:
            yield
        except BaseException:
            for whole in self.whole.values():
                whole.abandon()
            for module in self.modules.values():
                abandon_fsdp_step(module)
            raise

    @contextmanager
    def _guarded(self, action: Action) -> Iterator[None]:
        with self.world.watchdog.watching(f"{action} on rank {self.world.rank}"), self._named(action):
            yield

    @contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        """Errors of the body name the action."""
        rank = self.world.rank
        try:
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


class ActionClock:
    """Times the actions of one step: on the CPU as the host runs them, on an asynchronous accelerator as the device
    does. The host waits for the device before the first action and after the last."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._timed: list[tuple[Action, Event, Event]] = []
        self.collectives = CollectiveClock(self.now)
        self._zero, self._zero_at = accelerator.zero()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """The body is `action`, or a part of it, on the current stream."""
        started = self.now()
        yield
        self._timed.append((action, started, self.now()))

    def read(self) -> Recording:
        """What was timed, in order. The host waits for it."""
        self.accelerator.synchronize()
        return [(action, self.seconds(started), self.seconds(stopped)) for action, started, stopped in self._timed]

    def read_collectives(self) -> Collectives:
        """Those inside the actions; after `read`."""
        return [(gathers, self.seconds(start), self.seconds(stop)) for gathers, start, stop in self.collectives.spans]

    def now(self) -> Event:
        event = self.accelerator.event(timing=True)
        event.record()
        return event

    def seconds(self, event: Event) -> float:
        return self._zero_at + 1e-3 * self._zero.elapsed_time(event)


def _timed(clock: ActionClock | None, action: Action) -> AbstractContextManager[None]:
    return nullcontext() if clock is None else clock.timing(action)
