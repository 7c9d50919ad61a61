"""Whole drawn runs, as `hetmesh train` does them: with checkpoints, evaluations, answers and recordings a run computes
what it does without, and what goes on from its checkpoint in any layout what an uninterrupted run does."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.export.export import export_last
from hetmesh.parallel.linear_cross_entropy import sum_cross_entropy
from hetmesh.recipe import sections
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.checkpoint_folders import complete_steps
from hetmesh.records.dump_folder import TIMELINE_FILE as TIMELINE
from hetmesh.records.metrics import StepMetrics
from hetmesh.resolve.named_loss import named_loss
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.testing.parity import TOLERANCE, Outcome, ParityError, is_split
from hetmesh.testing.pool import WorkerPool
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.one_process import OneProcess
from hetmesh.training.trainer import Trainer
from support.recipe_runs import BEHIND
from support.recipes import OF_RUNS, RecipeCase


@dataclass(frozen=True)
class Ran:
    """What a run has done on one rank.

    Attributes:
        first: the step that it went on from.
        losses, norms: of each step since.
        parameters: full tensors at its end.
        evaluation: its last one: loss, which answers are right, and what was guessed; None where nothing is held out.
        answers: what it answered by itself.
        of_modules: the evaluation's loss by module.
    """

    first: int
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    evaluation: tuple[float, Tensor, Tensor] | None
    answers: tuple[tuple[int, ...], ...]
    of_modules: Mapping[str, float] = field(default_factory=dict)


def run_whole(rank: int, recipe: Recipe, stop: int | None = None) -> Ran:
    """Train `recipe` to its end in worker `rank` of a `WorkerPool`, or only up to step `stop`."""
    steps: list[StepMetrics] = []

    def keep(metrics: StepMetrics) -> bool:
        steps.append(metrics)
        return metrics.step == stop

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(resolve(recipe), World.current(), on_step=keep, export=lambda *_: [])
        job, first = trainer.job, trainer.step
        with exact_dtypes(job.root, every_cast=is_split(job.adapters)):
            trainer.run()
        if recipe.checkpoint.last_save_in_hf:  # not before: `exact_dtypes` changes casts to fp32, which an export means
            trainer.checkpoints.export(trainer.step, export_last)
    job.expert_placement.to_expert_order(trainer.optimizers)
    parameters = {name: _full(p.detach()).clone() for name, p in job.root.named_parameters()}
    last, answered = trainer.validation.last, trainer.validation.answered
    return Ran(
        first,
        tuple(each.loss for each in steps),
        tuple(each.grad_norm for each in steps),
        parameters,
        None if last is None else (last.loss, last.right, last.predicted),
        () if answered is None else answered.answers,
        {} if last is None else last.losses,
    )


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def has_run(recipe: Recipe) -> bool:
    """Whether a drawn recipe has something that only a whole run has."""
    return any(has(recipe) for has in OF_RUNS.values())


def check_runs(
    pool: Callable[[int], WorkerPool], case: RecipeCase, truth: Outcome | None = None, timeout: float = 60.0
) -> None:
    """Run `case` without what it has beside training, with it, and, where it has checkpoints, interrupted and gone on
    with, as `case.then` says.

    Args:
        pool: the workers for so many ranks.
        truth: of one process, which the first loss must be.

    Raises:
        ParityError: they differ, or a file is not there.
        Exception: what a worker raised.
    """
    with tempfile.TemporaryDirectory(prefix="hetmesh-runs-") as folder:
        _Runs(pool, case, Path(folder), timeout).check(truth)


@dataclass(frozen=True)
class _Runs:
    pool: Callable[[int], WorkerPool]
    case: RecipeCase
    folder: Path
    timeout: float

    def run(self, recipe: Recipe, name: str, stop: int | None = None) -> list[Ran]:
        own = recipe.model_copy(update={"job": sections.JobKeys(dump_folder=str(self.folder / name))})
        return self.pool(recipe.world_size).run(run_whole, own, stop, timeout=self.timeout)

    def check(self, truth: Outcome | None) -> None:
        recipe = self.case.recipe
        steps, limit = recipe.training.steps, TOLERANCE[recipe.training.dtype]
        alone = self.run(plain(recipe), "plain")
        if truth is not None:
            _compare("the first loss", truth.losses[0], alone[0].losses[0], limit)
            if truth.norm is not None:
                _compare("the first gradient norm", truth.norm, alone[0].norms[0], limit)
        if not recipe.checkpoint.enable:
            compare_runs(alone, self.run(recipe, "run"), "what runs beside training")
            self.check_files(recipe, steps)
            return
        stop = steps - BEHIND
        interrupted = self.run(recipe, "run", stop)
        compare_runs([_up_to(each, stop) for each in alone], interrupted, "what runs beside training", whole=False)
        self.check_files(recipe, stop)
        resumed = self.case.resumed
        went_on = self.run(resumed, "run")
        if went_on[0].first != stop:
            raise ParityError(f"the run went on from step {went_on[0].first}, not {stop}")
        limit = limit if self.case.then else 0.0
        compare_runs([_from(each, stop) for each in alone], went_on, "going on from a checkpoint", limit)
        self.check_files(resumed, steps)
        self.check_saved(resumed, steps, went_on[0])

    def check_files(self, recipe: Recipe, step: int) -> None:
        keys, run = recipe.checkpoint, self.folder / "run"
        recorded = min(recipe.profiling.timeline_step, recipe.training.steps)
        if recipe.profiling.timeline and recorded <= step:
            found = json.loads((run / TIMELINE).read_text())
            if found["step"] != recorded or not found["measured"]:
                raise ParityError(f"{TIMELINE} is of step {found['step']}, not {recorded}, or empty")
        if keys.enable:
            there, kept = complete_steps(run / keys.folder), keys.keep_latest_k
            stop = recipe.training.steps - BEHIND
            due = [each for each in range(1, step + 1) if each % keys.interval == 0 or each in (stop, step)]
            if there != (expected := due[-kept:] if kept else due):
                raise ParityError(f"there are checkpoints of the steps {there}, not {expected}")

    def check_saved(self, recipe: Recipe, step: int, ran: Ran) -> None:
        """What the last checkpoint holds evaluates in one process as the run did; it has been exported."""
        path = self.folder / "run" / recipe.checkpoint.folder / f"step-{step}"
        if recipe.checkpoint.last_save_in_hf and not any(Path(f"{path}-hf").iterdir()):
            raise ParityError(f"{path}-hf is empty")
        if ran.evaluation is not None:
            loss, right, predicted = evaluate_alone(recipe, path)
            limit = TOLERANCE[recipe.training.dtype]
            _compare("the evaluation in one process", loss, ran.of_modules[recipe.llm], limit)
            if not (torch.equal(right, ran.evaluation[1]) and torch.equal(predicted, ran.evaluation[2])):
                raise ParityError(f"one process guesses {predicted.tolist()}, the run {ran.evaluation[2].tolist()}")
        shutil.rmtree(path)


def plain(recipe: Recipe) -> Recipe:
    """`recipe` with nothing beside training but the evaluation at its end."""
    validation = recipe.validation.model_copy(update={"freq": 0, "free_running": 0})
    debug = recipe.debug.model_copy(update={"check_replicas": 0})
    none = {
        "checkpoint": sections.Checkpoint(),
        "profiling": sections.Profiling(timeline=False),
        "metrics": sections.Metrics(),
    }
    return recipe.model_copy(update={**none, "validation": validation, "debug": debug})


def evaluate_alone(recipe: Recipe, path: Path) -> tuple[float, Tensor, Tensor]:
    """The evaluation of the checkpoint at `path` by the modules' own forward in this process: `Ran.evaluation`."""
    model, source = OneProcess.load(recipe, SavedRun(recipe, path)), held_out_source(recipe)
    assert source is not None
    count = min(len(source), recipe.validation.samples or len(source))
    losses, right, guesses, table = 0.0, [], [], recipe.modules[recipe.llm].loss
    loss = named_loss("", table) if table is not None and ":" in table.kind else sum_cross_entropy
    with exact_dtypes(*model.modules.values(), every_cast=is_split(model.resolved.adapters)):
        for index in range(count):
            logits = model.logits(_Only(source, index))
            (start, stop), *_ = source.meta(index).targets
            targets = source.load(index, ()).tokens[start:stop]
            losses += float(loss(logits, {"targets": targets}))
            guesses.append(logits.argmax(1))
            right.append(bool((guesses[-1] == targets).all()))
    predicted = nn.utils.rnn.pad_sequence(guesses, batch_first=True, padding_value=-1)
    return losses / sum(map(len, guesses)), torch.tensor(right), predicted


class _Only:
    """One sample of a source."""

    def __init__(self, source: Any, index: int) -> None:
        self.index, self.source = index, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return 1

    def meta(self, _: int) -> Any:
        return self.source.meta(self.index)

    def load(self, _: int, kinds: Any = None) -> Any:
        return self.source.load(self.index, kinds)


def _up_to(ran: Ran, step: int) -> Ran:
    return Ran(0, ran.losses[:step], ran.norms[:step], {}, None, ())


def _from(ran: Ran, step: int) -> Ran:
    return replace(ran, first=step, losses=ran.losses[step:], norms=ran.norms[step:])


def compare_runs(expected: list[Ran], given: list[Ran], what: str, limit: float = 0.0, *, whole: bool = True) -> None:
    """Raise ParityError unless all ranks' losses, gradient norms, parameters and evaluations are equal up to a relative
    error of `limit`, and 0.0 means to the last bit.

    Args:
        whole: whether parameters and evaluations are compared too.
    """
    first = expected[0]
    for rank, ran in enumerate(given):
        for name, one, other in (("loss", first.losses, ran.losses), ("gradient norm", first.norms, ran.norms)):
            if len(one) != len(other):
                raise ParityError(f"{what}: {len(other)} steps on rank {rank}, not {len(one)}")
            for i, (a, b) in enumerate(zip(one, other, strict=True)):
                _compare(f"{what}: the {name} of step {first.first + i + 1} on rank {rank}", a, b, limit)
        if whole and first.evaluation is not None:
            if ran.evaluation is None:
                raise ParityError(f"{what}: no evaluation on rank {rank}")
            _compare(f"{what}: the evaluation's loss on rank {rank}", first.evaluation[0], ran.evaluation[0], limit)
            for name, loss in first.of_modules.items():
                _compare(f"{what}: the evaluation's loss of {name} on rank {rank}", loss, ran.of_modules[name], limit)
            if not all(map(torch.equal, first.evaluation[1:], ran.evaluation[1:])):
                raise ParityError(
                    f"{what}: other guesses: {ran.evaluation[2].tolist()}, not {first.evaluation[2].tolist()}"
                )
        if ran.answers != given[0].answers:
            raise ParityError(f"{what}: rank {rank} answers {ran.answers}, rank 0 {given[0].answers}")
    if whole:
        truth = {name: tensor for ran in expected for name, tensor in ran.parameters.items()}
        for rank, ran in enumerate(given):
            for name, tensor in ran.parameters.items():
                off, size = float((tensor - truth[name]).norm()), float(truth[name].norm())
                if not off <= limit * max(size, 1e-3 * math.sqrt(tensor.numel())):
                    raise ParityError(f"{what}: parameter {name} on rank {rank} is off by {off:.2e} of {size:.2e}")


def _compare(what: str, expected: float, given: float, limit: float) -> None:
    if not abs(given - expected) <= limit * abs(expected):
        raise ParityError(f"{what} is {given!r}, not {expected!r} (at most {limit:g} of it)")
