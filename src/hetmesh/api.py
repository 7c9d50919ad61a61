"""Training from Python: a whole run of a recipe, or a job for a custom training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.data.loader import TRAIN
from hetmesh.errors import RecipeError, SelfCheckError
from hetmesh.export.export import export_last
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.refusals import check_run
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.training.environment import choose_kernels, open_payloads, world_for
from hetmesh.training.job import Job
from hetmesh.training.loss import CustomLosses, check_values, losses_of_recipe
from hetmesh.training.stopping import OnStep
from hetmesh.training.trainer import train_in
from hetmesh.verify.self_check_process import compare_in_process, needs_self_check


def train(
    recipe: Recipe, *, loss: CustomLosses | None = None, on_step: OnStep | None = None, self_check: bool = True
) -> dict[str, Any]:
    """Train what `recipe` describes; every rank of the job calls it (torchrun, or `hetmesh.launch`).

    A World that `hetmesh.init` has made is used, and left open.

    Args:
        loss: `loss(logits, batch)` gets the logits `[targets, vocab]` of this rank's lane and microbatch and the batch
            of the LLM, and returns their SUM over `batch["targets"]`, a scalar: hetmesh divides once, by the targets of
            the whole global batch. It runs on every rank that computes logits. Of several modules: by their names,
            `loss={"llm": f, "drawer": g}`; `g(output, batch)` gets what the last stage of that module returns, and its
            batch. None, and for modules left out: what the recipe says, of the LLM cross-entropy.
        on_step: `on_step(metrics)` is called on every rank after each step with a `StepMetrics` (`step`, `loss` and
            `grad_norm` of the whole batch, ...); the run ends after this step if it returns True on any rank.
        self_check: compare the modules with transformers' own forward, once for each directory of weights.

    Returns:
        The summary of the run, equal on all ranks; rank 0 has written it to summary.json.

    Raises:
        RecipeError: the recipe does not describe a run, or one of another number of ranks.
        LossError: `loss` is not a sum over targets.
        NonFiniteError: a loss or gradient is not finite, and `[training] on_non_finite` says stop.
        SelfCheckError, SampleError, OutputError: weights, a sample or a file are not valid.
    """
    _check_type(recipe)
    check_run(recipe)
    _check_forks(recipe)
    with open_payloads(recipe) as payloads, world_for(recipe) as world:
        if self_check:
            _compare_once(recipe, world)
        return train_in(world, recipe, payloads, loss=loss, on_step=on_step, export=export_last)


def run_recipe(recipe: Recipe, resolved: ResolvedRecipe | None = None) -> dict[str, Any]:
    """`train` of a recipe that is already checked; `resolved`: the recipe, if this process has resolved it."""
    with open_payloads(recipe) as payloads, world_for(recipe) as world:
        return train_in(world, recipe, payloads, resolved, export=export_last)


@contextmanager
def open_job(recipe: Recipe, *, loss: CustomLosses | None = None, self_check: bool = True) -> Iterator[Job]:
    """The modules of `recipe` on their meshes, its data and schedules, for a custom loop with any optimizer:

        with hetmesh.open_job(recipe) as job:
            optimizer = torch.optim.SGD(job.parameters(), lr=0.1, foreach=False)
            for _ in range(steps):
                result = job.forward_backward()
                optimizer.step()

    Every rank of the job enters it. A World that `hetmesh.init` has made is used, and left open.
    `[checkpoint]`, `[metrics]` and `[validation]` of the recipe are for `train` and ignored here, `[optimizer]` and
    `[lr_scheduler]` too, unless the loop steps `job.optimizers`; `job.root` has the modules for
    torch.distributed.checkpoint.

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
                "hetmesh.train, which knows what the optimizer keeps of them; leave it out in a custom loop"
            )
    with open_payloads(recipe) as payloads, world_for(recipe) as world:
        if self_check:
            _compare_once(recipe, world)
        torch.manual_seed(recipe.debug.seed)
        choose_kernels(recipe.debug.deterministic, world.device)
        resolved = resolve(recipe, payloads.sources[TRAIN])
        check_values(resolved.source, losses_of_recipe(recipe, resolved.graph, loss), recipe.llm)
        job = Job.assemble(resolved, world, payloads, loss)
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


def _compare_once(recipe: Recipe, world: World) -> None:
    """Compare modules with transformers' own, where the recipe's directory was not compared yet; rank 0 starts the
    process that does. Raises SelfCheckError: on all ranks: they differ, or could not be compared."""
    failed = [""]
    if world.rank == 0 and needs_self_check(recipe):
        try:
            print(*compare_in_process(recipe), sep="\n", flush=True)
        except SelfCheckError as error:
            failed = [str(error)]
    with world.waiting("the comparison of the modules with transformers' own forward", "rank 0"):
        dist.broadcast_object_list(failed, src=0, group=world.group(range(world.size)), device=world.device)
    if failed[0]:
        raise SelfCheckError(f"{failed[0]}. (self_check=False trains all the same)")
