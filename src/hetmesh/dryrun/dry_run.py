"""A dry run: one rank's real training steps on a fake device, at full size, in one process without a GPU.

The trainer, the runtime, torch's autograd, FSDP and optimizer are those of training; only tensors of the device have no
values (`dryrun/fake_tensors.py`), and the other ranks do not exist (torch's "fake" process group).
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hetmesh._torch_compat import fake_process_group, tree_leaves
from hetmesh.boundary.world import init
from hetmesh.dryrun.device_work import DeviceWork, WorkCount
from hetmesh.dryrun.dry_run_values import DryRun, EdgeTraffic
from hetmesh.dryrun.fake_autocast import NAME
from hetmesh.dryrun.fake_backend import FakeBackend
from hetmesh.dryrun.fake_device import FakeAccelerator
from hetmesh.dryrun.fake_tensors import FakeTensors
from hetmesh.dryrun.host_waits import HostWaits
from hetmesh.errors import RecipeError
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import RunFolder
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.training.trainer import Trainer


def dry_run(resolved: ResolvedRecipe, rank: int = 0, *, draws: bool = False) -> DryRun:
    """Run one step of `rank` on the fake device, after the optimizer has made its state.

    The caller's random state is as before. What stays to the end of the process: torch knows the fake device, as one
    that is not available; where there are GPUs it is no longer these that torch pins memory for, so that a process
    which goes on to train there starts this one in a process of its own.

    Args:
        draws: draw the weights, which takes seconds for a billion of them, so that `built_peak` is that of training.

    Raises:
        RuntimeError: a module decides shapes by values that only the device could compute.
    """
    waits, backend, accelerator = HostWaits(), FakeBackend(), FakeAccelerator.make(draws=draws)
    around = fake_process_group(resolved.recipe.world_size, rank), torch.random.fork_rng(devices=[])
    with around[0], around[1], tempfile.TemporaryDirectory() as folder:
        prepared = replace(resolved, recipe=_prepared(resolved.recipe, folder))
        with FakeTensors(accelerator, waits) as tensors, DeviceWork(waits, tensors.fake) as work:
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


def with_microbatches(recipe: Recipe, count: int | None) -> Recipe:
    """The recipe with `count` microbatches per step; None: as many as it says.

    Raises:
        RecipeError: a local batch does not come to so many.
    """
    if count is None:
        return recipe
    batch = recipe.batch
    rounds = recipe.training.local_batch_size // batch.microbatch_size
    if count < 1 or count % rounds:
        raise RecipeError(f"--microbatches {count}: a local batch is {rounds}, so valid are multiples of {rounds}")
    return recipe.with_global_batch_size(batch.lanes * batch.microbatch_size * count)


def _prepared(recipe: Recipe, folder: str) -> Recipe:
    """The recipe without checkpoints, and with a folder that does not stay."""
    return recipe.model_copy(
        update={
            "job": recipe.job.model_copy(update={"dump_folder": folder}),
            "checkpoint": recipe.checkpoint.model_copy(update={"enable": False, "initial_load_path": None}),
        }
    )


def _prime(trainer: Trainer) -> None:
    """Let the optimizer make its state, as it does in the first step of a run."""
    if trainer.optimizers is None:
        return
    for parameter in trainer.job.parameters():
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
    by_module: dict[str, WorkCount] = {}
    for label, each in by_action.items():
        target = getattr(label, "target", None)
        by_module.setdefault(getattr(target, "module", ""), WorkCount()).add(each)
    return DryRun(
        rank=trainer.world.rank,
        microbatches=trainer.recipe.batch.num_microbatches,
        built=building[0],
        built_peak=building[1],
        state=_state(trainer),
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


def _state(trainer: Trainer) -> int:
    """Bytes on the device of parameters, buffers and what the optimizer keeps for them."""
    tensors = [*trainer.job.parameters(), *trainer.job.root.buffers()]
    for optimizer in () if trainer.optimizers is None else trainer.optimizers[0]:
        tensors += [x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, Tensor)]
    storages = {}
    for tensor in map(local_part, tensors):
        if tensor.device.type == NAME:
            storage = tensor.untyped_storage()
            storages[id(storage)] = storage
    return sum(storage.nbytes() for storage in storages.values())


def _traffic(trainer: Trainer) -> tuple[EdgeTraffic, ...]:
    totals: dict[str, list[int]] = {}
    for message in trainer.world.log.messages:
        total = totals.setdefault(f"{message.label.boundary} {message.label.direction}", [0, 0, 0])
        total[0] += 1
        total[1 if message.op == "sent" else 2] += message.bytes
    return tuple(EdgeTraffic(edge, *each) for edge, each in totals.items())
