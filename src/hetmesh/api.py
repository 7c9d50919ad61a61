"""Training from Python: a whole run of a recipe, or a job to write one's own loop around."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.errors import RecipeError, SelfCheckError
from hetmesh.export.export import export_last
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.refusals import check_run
from hetmesh.training import trainer
from hetmesh.training.job import Job
from hetmesh.training.kernels import choose_kernels
from hetmesh.training.loading import open_payloads
from hetmesh.training.loss import OwnLoss
from hetmesh.training.on_step import OnStep
from hetmesh.training.trainer import train_in
from hetmesh.training.world_of import world_of
from hetmesh.verify.self_check_record import needs_self_check


def train(
    recipe: Recipe, *, loss: OwnLoss | None = None, on_step: OnStep | None = None, self_check: bool = True
) -> dict[str, Any]:
    """Train what `recipe` describes; every rank of the job calls it (torchrun, or `hetmesh.launch`).

    The World of `hetmesh.init` is used where there is one, and left open.

    Args:
        loss: `loss(logits, batch)` gets the logits `[targets, vocab]` of this rank's lane and microbatch and the batch
            of the LLM, and returns their SUM over `batch["targets"]`, a scalar: hetmesh divides once, by the targets of
            the whole global batch. It runs on every rank that computes logits. None: cross-entropy.
        on_step: `on_step(metrics)` is called on every rank after each step with a `StepMetrics` (`step`, `loss` and
            `grad_norm` of the whole batch, ...); the run ends after this step if it returns True on any rank.
        self_check: compare the modules with transformers' own forward, where the recipe's directory was not yet.

    Returns:
        The summary of the run, equal on all ranks; rank 0 has written it to summary.json.

    Raises:
        RecipeError: the recipe does not describe a run, or one of another number of ranks.
        LossError: `loss` is no sum over targets.
        NonFiniteError: a loss or gradient is not finite, and `[training] on_non_finite` says stop.
        SelfCheckError, SampleError, OutputError: weights, a sample or a file are not as they must be.
    """
    _check_type(recipe)
    check_run(recipe)
    _check_forks(recipe)
    with open_payloads(recipe) as payloads, world_of(recipe) as world:
        if self_check:
            _compare_once(recipe, world)
        return train_in(world, recipe, payloads, loss=loss, on_step=on_step, export=export_last)


def run_recipe(recipe: Recipe) -> dict[str, Any]:
    """`hetmesh.training.trainer.train`, exports included, of a recipe that was checked already."""
    return trainer.train(recipe, export=export_last)


@contextmanager
def open_job(recipe: Recipe, *, loss: OwnLoss | None = None, self_check: bool = True) -> Iterator[Job]:
    """The modules of `recipe` on their meshes, its data and schedules, for a loop of one's own with any optimizer:

        with hetmesh.open_job(recipe) as job:
            optimizer = torch.optim.SGD(job.parameters(), lr=0.1, foreach=False)
            for _ in range(steps):
                result = job.forward_backward()
                optimizer.step()

    Every rank of the job enters it. The World of `hetmesh.init` is used where there is one, and left open.
    `[optimizer]`, `[lr_scheduler]`, `[checkpoint]`, `[metrics]` and `[validation]` of the recipe are the trainer's and
    mean nothing here; `job.root` has the modules for torch.distributed.checkpoint.

    Args:
        loss, self_check: as in `train`.

    Raises:
        As `train`.
    """
    _check_type(recipe)
    _check_forks(recipe)
    for name, table in recipe.parallelism.modules.items():
        if interval := table.expert_placement_interval:
            raise RecipeError(
                f"parallelism.{name}.expert_placement_interval = {interval}: experts move between steps of "
                "hetmesh.train, which knows what the optimizer keeps of them; leave it out in a loop of your own"
            )
    with open_payloads(recipe) as payloads, world_of(recipe) as world:
        if self_check:
            _compare_once(recipe, world)
        torch.manual_seed(recipe.debug.seed)
        choose_kernels(recipe, world)
        job = Job.assemble(recipe, world, payloads, loss)
        try:
            yield job
        finally:
            job.upcoming.close()


def _check_type(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"a hetmesh.Recipe is needed: hetmesh.load_recipe(path), or parse_recipe(...); got {recipe!r:.80}"
        )


def _check_forks(recipe: Recipe) -> None:
    if recipe.data.num_workers and dist.is_initialized():
        raise RecipeError(
            f"data.num_workers = {recipe.data.num_workers}: worker processes are forked before this process has "
            "threads, and hetmesh.init() has been called: leave that call out, or set data.num_workers to 0"
        )


_COMPARE = r"""
import pickle, sys
from hetmesh.verify.processor_check import check_processor
from hetmesh.verify.self_check import self_check
from hetmesh.verify.self_check_record import record
recipe = pickle.load(sys.stdin.buffer)
print(*check_processor(recipe), sep="\n")
record(recipe, self_check(recipe))
"""


def _compare_once(recipe: Recipe, world: World) -> None:
    """`hetmesh check --weights` of a directory that was not compared yet, in a process of its own, which rank 0 starts.

    Raises:
        SelfCheckError: on all ranks: they differ, or could not be compared.
    """
    told = [_compared(recipe) if world.rank == 0 and needs_self_check(recipe) else ""]
    with world.waiting("the comparison of the modules with transformers' own forward", "rank 0"):
        dist.broadcast_object_list(told, src=0, group=world.group(range(world.size)), device=world.device)
    if told[0]:
        raise SelfCheckError(f"self-check: {told[0]}. (self_check=False trains all the same)")


def _compared(recipe: Recipe) -> str:
    """What is wrong; empty if nothing is."""
    apart = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    command = [sys.executable, "-c", _COMPARE]
    done = subprocess.run(command, input=pickle.dumps(recipe), env=apart, capture_output=True, check=False)
    if compared := done.stdout.decode(errors="replace").strip():
        print(compared, flush=True)
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return "" if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[0]
