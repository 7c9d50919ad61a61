"""A dry run: one rank's real training steps on a fake device, at full size, in one process without a GPU; of one rank,
or of one of each group of equal ranks beside what the simulator predicts for it.

The trainer, the runtime, torch's autograd, FSDP and optimizer are those of training; only tensors of the device have no
values (`dryrun/fake_tensors.py`), and the other ranks do not exist (torch's "fake" process group).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetmesh._torch_compat import fake_process_group, tree_leaves
from hetmesh.balance import BatchPlan
from hetmesh.boundary.world import init
from hetmesh.cost import Machine, load_machine
from hetmesh.dryrun.device_work import DeviceWork, WorkCount
from hetmesh.dryrun.fake_device import FakeAccelerator, FakeBackend, fake_device
from hetmesh.dryrun.fake_kernels import NAME
from hetmesh.dryrun.fake_tensors import FakeTensors
from hetmesh.dryrun.host_waits import HostWait, HostWaits
from hetmesh.errors import UsageError
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import RunFolder
from hetmesh.resolve.predictions import step_memory
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.runtime.live_bytes import SpanBytes
from hetmesh.simulate import RankMemory, simulate
from hetmesh.training.trainer import Trainer

MACHINE = "h100"
"""Whose memory counts where neither the command nor the recipe names a machine."""


@dataclass(frozen=True)
class EdgeTraffic:
    """Messages of one rank along one boundary in one direction (`edge` names both), and bytes `sent` and `received`."""

    edge: str
    messages: int
    sent: int
    received: int


@dataclass(frozen=True)
class DryRun:
    """What a step of one rank did. Bytes are of tensors on the device.

    Attributes:
        rank: whose step it was.
        microbatches: of the step.
        built, built_peak: alive after its modules were built, and the most while they were built.
        state: parameters, buffers and optimizer state.
        live: alive after the step; what exceeds `state` is left over by a step.
        peak: the most in a step.
        first_checks: the most while the gradients of the first step are compared between replicas.
        actions: alive before and after each action, and the most in it; the first is before all actions, the last after
            them (sums, norm, optimizer).
        work: per module, and `""` for what is in no action.
        waits: where the host waits for the device in a step.
        timed_waits: waits with a timeout, for which NCCL holds up the host.
        build_seconds, seconds: how long building and the step took here.
    """

    rank: int
    microbatches: int
    built: int
    built_peak: int
    state: int
    live: int
    peak: int
    first_checks: int
    actions: tuple[SpanBytes, ...]
    work: Mapping[str, WorkCount]
    waits: tuple[tuple[HostWait, int], ...]
    timed_waits: int
    traffic: tuple[EdgeTraffic, ...]
    build_seconds: float
    seconds: float

    def waiting(self, direction: str, *, within: bool = False) -> int:
        """How often the host waits in a step for `direction` (`device_to_host` or `host_to_device`); `within`: only
        from the beginning of the first action to the end of the last."""
        return sum(n for w, n in self.waits if w.direction == direction and (w.within or not within))


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same stages, and the step of the one with most to do in this batch. `predicted`: the memory
    that `hetmesh explain` predicts for that rank and batch."""

    ranks: tuple[int, ...]
    run: DryRun
    predicted: RankMemory

    @property
    def memory_error(self) -> float:
        """Error of the prediction, as a share of the peak."""
        return abs(self.predicted.tensors - self.run.peak) / self.run.peak

    @property
    def peak(self) -> int:
        """The most that the rank ever has in tensors."""
        return max(self.run.peak, self.run.first_checks, self.run.built_peak)

    @property
    def beside(self) -> int:
        """Bytes beside tensors, as far as the machine says: the device's context and the rank's communicators."""
        return self.predicted.communicators + self.predicted.context


@dataclass(frozen=True)
class DryRuns:
    """A dry run of some ranks of a recipe, on `machine`, whose devices have `memory_bytes` (0: unknown)."""

    groups: tuple[RankGroup, ...]
    machine: str
    memory_bytes: int

    @property
    def fullest(self) -> RankGroup:
        """The group whose ranks hold most."""
        return max(self.groups, key=lambda group: group.peak + group.beside)

    @property
    def peak(self) -> int:
        """The most that any of them holds."""
        return self.fullest.peak + self.fullest.beside


def dry_runs(
    recipe: Recipe, rank: int | None = 0, *, machine: str | None = None, microbatches: int | None = None
) -> DryRuns:
    """Run one step of `rank`, or of one rank of each group of equal ones.

    Args:
        rank: None: all ranks.
        machine: a name or TOML file; None: `[metrics] machine`, else `MACHINE`.
        microbatches: see `with_microbatches`.

    Raises:
        RecipeError: what `hetmesh check` would find; no such machine.
        UsageError: no such rank or number of microbatches.
        RuntimeError: a module decides shapes by values that only the device could compute.
    """
    if rank is not None and not 0 <= rank < recipe.world_size:
        raise UsageError(f"--rank {rank}: the recipe has ranks 0-{recipe.world_size - 1}, or all")
    found = load_machine(machine or recipe.metrics.machine or MACHINE)
    fake_device()  # before the first backward, a trial of a user's module: autograd counts devices once
    resolved = resolve(with_microbatches(recipe, microbatches))
    groups = []
    for ranks, fullest, memory in _groups(resolved, found):
        if rank is None or rank in ranks:
            taken = fullest if rank is None else rank
            groups.append(RankGroup(ranks, dry_run(resolved, taken), memory[taken]))
    return DryRuns(tuple(groups), found.name, found.memory_bytes)


def fullest_group(recipe: Recipe, *, draws: bool = False) -> RankGroup:
    """Of all groups of equal ranks the one that is predicted to hold most, run; `draws` as in `dry_run`."""
    found = load_machine(recipe.metrics.machine or MACHINE)
    fake_device()  # as above
    resolved = resolve(recipe)
    ranks, fullest, memory = max(_groups(resolved, found), key=lambda group: group[2][group[1]].tensors)
    return RankGroup(ranks, dry_run(resolved, fullest, draws=draws), memory[fullest])


def _groups(resolved: ResolvedRecipe, machine: Machine) -> list[tuple[tuple[int, ...], int, dict[int, RankMemory]]]:
    """Ranks that hold the same stages; which of them has most to do in the first batch; all ranks' predicted memory."""
    plan = resolved.plan(resolved.loader().batch(0).metas)
    model = recipe_step_model(resolved.recipe, resolved.graph, resolved.shapes, machine)
    schedule, memory = resolved.schedules.of(plan), step_memory(resolved, model, plan)
    tracks = simulate(schedule, model.costs(plan, schedule)).tracks
    return [(ranks, max(ranks, key=lambda rank: (_load(plan, rank), -rank)), memory) for ranks in tracks]


def _load(plan: BatchPlan, rank: int) -> tuple[int, ...]:
    """What the lanes of a rank have to do: targets, then rows, of the largest microbatch of each module."""
    most = np.zeros(3, np.int64)
    for name in plan.graph.order:
        lane = plan.graph[name].lane_of(rank)
        if lane is not None:
            most += plan.lane_work(name)[:, lane].max(0)
    rows, pairs, targets = most.tolist()
    return targets, rows, pairs


def dry_run(resolved: ResolvedRecipe, rank: int = 0, *, draws: bool = False) -> DryRun:
    """Run one step of `rank` on the fake device, after the optimizer has made its state.

    The caller's random state is as before. What stays to the end of the process: torch knows the fake device, as one
    that is not available; where there are GPUs it is no longer these that torch pins memory for, so that a process
    which goes on to train there starts this one in a separate process.

    Args:
        draws: draw the weights, which takes seconds for a billion of them, so that `built_peak` is that of training.

    Raises:
        RuntimeError: a module decides shapes by values that only the device could compute.
    """
    waits, backend, accelerator = HostWaits(), FakeBackend(), FakeAccelerator.make(draws=draws)
    around = fake_process_group(resolved.recipe.world_size, rank), torch.random.fork_rng(devices=[])
    with around[0], around[1], tempfile.TemporaryDirectory() as folder:
        recipe = resolved.recipe
        job = recipe.job.model_copy(update={"dump_folder": folder})
        checkpoint = recipe.checkpoint.model_copy(update={"enable": False, "initial_load_path": None})
        prepared = replace(resolved, recipe=recipe.model_copy(update={"job": job, "checkpoint": checkpoint}))
        with FakeTensors(accelerator, waits) as tensors, DeviceWork(waits, tensors.fake) as work:
            tensors.observe = work.note
            started = time.perf_counter()
            world = init(backend=backend, accelerator=accelerator)
            trainer = None
            try:
                trainer = Trainer(prepared, world, RunFolder(Path(folder), None, None, None))
                building = {"built": work.live, "built_peak": work.peak, "build_seconds": time.perf_counter() - started}
                _make_optimizer_state(trainer)
                return _step(trainer, work, waits, backend, building)
            finally:
                if trainer is not None:
                    trainer.upcoming.close()
                    trainer.reporter.close()
                world.close()


def with_microbatches(recipe: Recipe, count: int | None) -> Recipe:
    """The recipe with `count` microbatches per step; None: as many as it says. Raises UsageError: a local batch does
    not come to that number."""
    if count is None:
        return recipe
    batch = recipe.batch
    rounds = recipe.training.local_batch_size // batch.microbatch_size
    if count < 1 or count % rounds:
        raise UsageError(f"--microbatches {count}: a local batch is {rounds}, so valid are multiples of {rounds}")
    return recipe.with_global_batch_size(batch.lanes * batch.microbatch_size * count)


def _make_optimizer_state(trainer: Trainer) -> None:
    """As the first step of a run does."""
    if trainer.optimizers is None:
        return
    for parameter in trainer.job.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizers[0].step()
    trainer.optimizers[0].zero_grad()


def _step(
    trainer: Trainer, work: DeviceWork, waits: HostWaits, backend: FakeBackend, building: Mapping[str, Any]
) -> DryRun:
    job = trainer.job
    job.first_steps.taken = 2  # they are measured by themselves
    job.runtime.live_bytes = work
    work.restart()
    backend.arrived.timed_waits = 0
    started = time.perf_counter()
    trainer.train_step()
    seconds = time.perf_counter() - started
    peak, actions, host_waits = work.peak, tuple(work.spans), tuple(waits.counts.items())
    by_module: dict[str, WorkCount] = {}
    for label, count in work.by_action.items():
        target = getattr(label, "target", None)
        by_module.setdefault(getattr(target, "module", ""), WorkCount()).add(count)
    timed_waits, traffic = backend.arrived.timed_waits, _traffic(trainer)
    work.restart()
    job.first_steps.taken = 0
    job.first_steps.check()
    first_checks = work.peak
    if trainer.optimizers is not None:
        trainer.optimizers[0].zero_grad()
    return DryRun(
        rank=trainer.world.rank,
        microbatches=trainer.recipe.batch.num_microbatches,
        state=_state(trainer),
        live=work.live,
        peak=peak,
        first_checks=first_checks,
        actions=actions,
        work=by_module,
        waits=host_waits,
        timed_waits=timed_waits,
        traffic=traffic,
        seconds=seconds,
        **building,
    )


def _state(trainer: Trainer) -> int:
    """Bytes on the device of parameters, buffers and optimizer state."""
    tensors = [*trainer.job.parameters(), *trainer.job.root.buffers()]
    for optimizer in () if trainer.optimizers is None else trainer.optimizers[0]:
        tensors += [x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, Tensor)]
    storages = [tensor.untyped_storage() for tensor in map(local_part, tensors) if tensor.device.type == NAME]
    return sum(storage.nbytes() for storage in {id(storage): storage for storage in storages}.values())


def _traffic(trainer: Trainer) -> tuple[EdgeTraffic, ...]:
    totals: dict[str, list[int]] = {}  # messages, bytes sent and received
    for message in trainer.world.log.messages:
        total = totals.setdefault(f"{message.label.boundary} {message.label.direction}", [0, 0, 0])
        total[0] += 1
        total[1 if message.op == "sent" else 2] += message.bytes
    return tuple(EdgeTraffic(edge, *total) for edge, total in totals.items())
