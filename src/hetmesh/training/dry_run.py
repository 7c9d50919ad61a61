"""A dry run: one rank's real training steps on a fake device, at full size, in one process without a GPU.

The trainer, the runtime, torch's autograd, FSDP and optimizer are those of training; only tensors of the device have no
values (`runtime/fake_tensors.py`), and the other ranks do not exist (torch's "fake" process group).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetmesh._torch_compat import fake_process_group
from hetmesh.boundary.world import init
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.runtime.device_work import BEHIND, DeviceWork, Work, moments
from hetmesh.runtime.fake_backend import FakeBackend
from hetmesh.runtime.fake_device import FakeAccelerator
from hetmesh.runtime.fake_tensors import FakeTensors
from hetmesh.runtime.host_waits import HostWait, HostWaits
from hetmesh.runtime.live_bytes import SpanBytes
from hetmesh.training.dump_folder import RunFolder
from hetmesh.training.trainer import Trainer


@dataclass(frozen=True)
class Traffic:
    """What one rank sent and received along one boundary in one direction.

    Attributes:
        edge: the boundary and `forward` or `backward`.
        messages: how many.
        sent, received: bytes.
    """

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
        built, built_peak: alive behind the building of its modules, and the most while they were built.
        state: parameters, buffers and optimizer state.
        live: alive behind the step; more than `state` is what a step leaves behind.
        peak: the most in a step.
        first_checks: the most while the gradients of the first step are compared between replicas.
        actions: alive before and after each action, and the most in it; the first is what is before all actions, the
            last what is behind them (sums, norm, optimizer).
        work: per module, and `""` for what is in no action.
        waits: where the host waits for the device in a step.
        timed_waits: waits with a timeout, for which NCCL holds up the host.
        traffic: messages by boundary.
        build_seconds, seconds: that building and the step took here.
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
    work: dict[str, Work]
    waits: tuple[tuple[HostWait, int], ...]
    timed_waits: int
    traffic: tuple[Traffic, ...]
    build_seconds: float
    seconds: float

    def waiting(self, direction: str, *, within: bool = False) -> int:
        """How often the host waits in a step.

        Args:
            direction: `device_to_host` or `host_to_device`.
            within: only between the begin of the first action and the end of the last.
        """
        return sum(n for w, n in self.waits if w.direction == direction and (w.within or not within))


def dry_run(recipe: Recipe, rank: int = 0, *, microbatches: int | None = None) -> DryRun:
    """Run one step of `rank` on the fake device, after the optimizer has made its state.

    Args:
        microbatches: of the step, by a smaller global batch; None: as many as the recipe says.

    Raises:
        RecipeError: what `hetmesh check` would find; there is no such rank or number of microbatches.
        RuntimeError: a module decides shapes by values that only the device could compute.
    """
    if not 0 <= rank < recipe.world_size:
        raise RecipeError(f"--rank {rank}: the recipe has ranks 0-{recipe.world_size - 1}")
    waits, backend, accelerator = HostWaits(), FakeBackend(), FakeAccelerator.make()
    with fake_process_group(recipe.world_size, rank), tempfile.TemporaryDirectory() as folder:
        prepared = _prepared(recipe, folder, microbatches)
        with FakeTensors(accelerator, waits) as tensors, DeviceWork(waits) as work:
            tensors.observe = work.note
            started = time.perf_counter()
            world = init(backend=backend, accelerator=accelerator)
            trainer = None
            try:
                trainer = Trainer(prepared, world, RunFolder(Path(folder), None, None, None))
                built, built_peak, build_seconds = work.live, work.peak, time.perf_counter() - started
                _prime(trainer)
                return _step(trainer, work, waits, backend, (built, built_peak, build_seconds))
            finally:
                if trainer is not None:
                    trainer.upcoming.close()
                    trainer.reporter.close()
                world.close()


def _prepared(recipe: Recipe, folder: str, microbatches: int | None) -> Recipe:
    """The recipe without checkpoints, and with the batch that is asked for."""
    training = recipe.training
    if microbatches is not None:
        batch = recipe.batch
        rounds = batch.local_batch_size // batch.microbatch_size
        if microbatches < 1 or microbatches % rounds:
            raise RecipeError(f"--microbatches {microbatches}: must be a multiple of {rounds} and above 0")
        size = batch.lanes * batch.microbatch_size * microbatches
        training = training.model_copy(update={"global_batch_size": size})
    return recipe.model_copy(
        update={
            "job": recipe.job.model_copy(update={"dump_folder": folder}),
            "checkpoint": recipe.checkpoint.model_copy(update={"enable": False, "initial_load_path": None}),
            "training": training,
        }
    )


def _prime(trainer: Trainer) -> None:
    """Let the optimizer make its state, as it does in the first step of a run."""
    if trainer.optimizers is None:
        return
    for parameter in trainer.parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizers[0].step()
    trainer.optimizers[0].zero_grad()


def _step(
    trainer: Trainer, work: DeviceWork, waits: HostWaits, backend: FakeBackend, building: tuple[int, int, float]
) -> DryRun:
    job = trainer.job
    job.first_steps.taken = 2  # they are measured by themselves
    job.runtime.live_bytes = work
    work.restart()
    backend.timed.count = 0
    started = time.perf_counter()
    trainer.train_step()
    seconds = time.perf_counter() - started
    peak, actions, waited = work.peak, tuple(work.spans), tuple(waits.counts.items())
    by_action, timed = dict(work.by_action), backend.timed.count
    traffic = _traffic(trainer)
    work.restart()
    job.first_steps.taken = 0
    job.first_steps.check()
    checks = work.peak
    if trainer.optimizers is not None:
        trainer.optimizers[0].zero_grad()
    by_module: dict[str, Work] = {}
    for label, each in by_action.items():
        target = getattr(label, "target", None)
        by_module.setdefault(getattr(target, "module", ""), Work()).add(each)
    return DryRun(
        rank=trainer.world.rank,
        microbatches=max((span.label.microbatch for span in actions if hasattr(span.label, "microbatch")), default=0) + 1,
        built=building[0],
        built_peak=building[1],
        state=moments([*trainer.parameters, *job.root.buffers()], [] if trainer.optimizers is None else trainer.optimizers[0]),
        live=work.live,
        peak=peak,
        first_checks=checks,
        actions=actions,
        work=by_module,
        waits=waited,
        timed_waits=timed,
        traffic=traffic,
        build_seconds=building[2],
        seconds=seconds,
    )


def _traffic(trainer: Trainer) -> tuple[Traffic, ...]:
    totals: dict[str, list[int]] = {}
    for message in trainer.world.log.messages:
        total = totals.setdefault(f"{message.label.boundary} {message.label.direction}", [0, 0, 0])
        total[0] += 1
        total[1 if message.op == "sent" else 2] += message.bytes
    return tuple(Traffic(edge, *each) for edge, each in totals.items())


__all__: Sequence[str] = ["BEHIND", "DryRun", "Traffic", "dry_run"]
