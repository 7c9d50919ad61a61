"""The trainer: the training loop of a run, with optimizer, evaluation, checkpoints and metrics."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hetmesh.boundary import World
from hetmesh.data.loader import TRAIN
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.payloads import Payloads
from hetmesh.errors import OutputError
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import RunFolder, claim_folder
from hetmesh.records.events import FAILED, FINISHED, STOPPED
from hetmesh.records.metrics import StepCost, StepMetrics
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.training.checkpoints import Export, Progress, RunCheckpoints
from hetmesh.training.environment import choose_kernels
from hetmesh.training.evaluate import Evaluation
from hetmesh.training.job import Job
from hetmesh.training.loss import CustomLosses, check_values, losses_of_recipe
from hetmesh.training.meter import Meter, device_name
from hetmesh.training.notices import StepNotices, already_finished, next_steps, results
from hetmesh.training.optimizers import learning_rate, take_step
from hetmesh.training.recorder import StepRecorder
from hetmesh.training.step import StepResult
from hetmesh.training.stopping import OnStep, Stopped, StopSignals, stop_requested
from hetmesh.training.upcoming import PlannedStep
from hetmesh.training.validation import RunValidation


def train_in(
    world: World,
    recipe: Recipe,
    payloads: Payloads,
    resolved: ResolvedRecipe | None = None,
    *,
    loss: CustomLosses | None = None,
    on_step: OnStep | None = None,
    export: Export | None = None,
) -> dict[str, Any]:
    """Train what `recipe` describes; every rank of the job calls it.

    Args:
        payloads: where samples are loaded (`environment.open_payloads`).
        resolved: the recipe, if this process has resolved it already.
        loss: custom ones; None: those of the recipe.
        on_step: called after each step, with its metrics.
        export: what `checkpoint.last_save_in_hf` calls on rank 0 (`hetmesh.export.export.export_last`).

    Returns:
        The summary of the run, equal on all ranks; rank 0 has written it to summary.json.

    Raises:
        LossError, NonFiniteError, RecipeError, SampleError, OutputError: see `hetmesh.train`.
        Stopped: SIGTERM or SIGINT came to a rank; the step that ran then is finished and saved.
    """
    folder = claim_folder(recipe, world)
    if folder.summary is not None:
        if world.rank == 0:
            print("\n".join(already_finished(recipe, folder)), flush=True)
        return folder.summary
    try:
        source = payloads.sources[TRAIN]  # the one that workers share
        resolved = resolve(recipe, source) if resolved is None else replace(resolved, source=source)
        trainer = Trainer(resolved, world, folder, payloads, loss=loss, on_step=on_step, export=export)
    except BaseException:
        folder.release()
        raise
    return trainer.run()


class Trainer:
    """One run on one rank.

    Args:
        folder: from `claim_folder`; None claims one.
        payloads: where samples are loaded; None: on this rank, when they are needed.
        loss, on_step, export: see `train_in`.
    """

    def __init__(
        self,
        resolved: ResolvedRecipe,
        world: World,
        folder: RunFolder | None = None,
        payloads: Payloads | None = None,
        *,
        loss: CustomLosses | None = None,
        on_step: OnStep | None = None,
        export: Export | None = None,
    ) -> None:
        recipe = resolved.recipe
        if recipe.checkpoint.last_save_in_hf and export is None:
            raise TypeError("checkpoint.last_save_in_hf: the trainer needs `export`, e.g. hetmesh.export's export_last")
        self.export = export
        torch.manual_seed(recipe.debug.seed)
        choose_kernels(recipe.debug.deterministic, world.device)
        self.on_step, self.stopped = on_step, False
        self.signals, self.signalled = StopSignals(announce=world.rank == 0), False
        self.recipe = recipe
        self.world = world
        self.claimed = folder or claim_folder(recipe, world)
        self.folder = self.claimed.path
        try:
            self._build(resolved, payloads, loss)
        except BaseException:
            self.claimed.release()
            raise

    def _build(self, resolved: ResolvedRecipe, payloads: Payloads | None, loss: CustomLosses | None) -> None:
        recipe, world = self.recipe, self.world
        if world.accelerator.computes:
            check_values(resolved.source, losses_of_recipe(resolved.recipe, resolved.graph, loss), resolved.recipe.llm)
        self.job = Job.assemble(resolved, world, payloads, loss)
        self.job.non_finite.hint = f" Results are in {self.folder}"
        self.optimizers = self.job.optimizers
        self.lr = learning_rate(recipe)
        self.checkpoints = RunCheckpoints(self.job, self.optimizers, self.folder)
        self.checkpointer = self.checkpoints.checkpointer
        progress = self.checkpoints.start_or_resume(self.claimed.step)
        self.step, self.loss, self.samples_skipped = progress.step, progress.loss, progress.samples_skipped
        deferral = resolved.deferral  # decided before the first batch is balanced
        compared = [] if deferral.saved is None else [f"deferral is {deferral}"]
        self.notes = [*self.claimed.describe(), *progress.notes, *compared]
        self.upcoming = self.job.upcoming
        held_out = held_out_source(recipe, None if payloads is None else payloads.sources)
        self.meter, self.recorder = Meter(self.job), StepRecorder(self.job, self.folder)
        self.claimed.begin(recipe)
        self.reporter = Reporter(
            self.folder,
            recipe.training.steps,
            rank=world.rank,
            resumed_at=self.step,
            keys=recipe.metrics,
            config=recipe.model_dump(mode="json", by_alias=True),
            claim=self.claimed.claim,
        )
        self.checkpointer.on_saved = partial(self.reporter.saved, asynchronous=self.checkpointer.asynchronous)
        self.reporter.started(
            self.step,
            ranks=world.size,
            device=device_name(world.device),
            changed=progress.changed or None,
            deferral=str(deferral),
        )
        self.notices = StepNotices(recipe, self.reporter)
        self.validation = RunValidation(self.job, held_out, self.reporter)

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and show some answers. Returns the summary of the run."""
        recipe, started = self.recipe, time.perf_counter()
        try:
            self.reporter.print("\n".join([*self.notes, *self.meter.describe()]))
            with self.signals:
                self._steps()
                seconds = time.perf_counter() - started
                self.validate()
                self.checkpointer.wait()
                if recipe.checkpoint.enable:
                    self.checkpointer.remove_old()
            summary = self._summary(seconds)
            shown, how = self.validation.shown()
            commands = next_steps(recipe, self.folder, self.step, self.validation.source)
            end_lines = [results(recipe, self.folder), *commands]
            self.reporter.answers(shown, how)
            self.reporter.print("\n".join(end_lines))
            if recipe.checkpoint.last_save_in_hf and self.export is not None:
                self.reporter.print("\n".join(self.checkpoints.export(self.step, self.export)))
            self.reporter.summary(summary)  # with it the run is finished: started again, it does nothing
            self.reporter.ended(self.step, FINISHED)
            return summary
        except Stopped as stopped:
            self._report_end(STOPPED, stopped.name)
            raise
        except BaseException as error:
            self._report_end(FAILED, str(error) or type(error).__name__)
            raise
        finally:
            self.checkpointer.close()
            self.upcoming.close()
            self.reporter.close()

    def _summary(self, seconds: float) -> dict[str, Any]:
        """What summary.json says of a run that this start has trained for `seconds`; what is none or 0 is left out."""
        known = {
            "loss": self.loss,
            "stopped_by_on_step": True if self.stopped and self.step < self.recipe.training.steps else None,
            "skipped_steps": self.job.non_finite.count or None,
            "samples_skipped": self.samples_skipped or None,
        }
        summary = {"steps": self.step, "ranks": self.world.size, "train_seconds": round(seconds, 3)}
        return {**summary, **{k: v for k, v in known.items() if v is not None}, **self.validation.summary()}

    def _steps(self) -> None:
        recipe, world, first = self.recipe, self.world, True
        while not self._done:
            if self.validation.due(self.step) and not (first and self.claimed.evaluated):
                self.validate()  # the last start may have ended between a step and its evaluation
            metrics = self.train_step()
            if first:  # connections are made and libraries loaded: from now on a slow rank is a stalled one
                world.set_timeout(recipe.comm.train_timeout_seconds)
                first = False
            self.reporter.step(metrics)
            self.stopped = stop_requested(self.on_step, metrics, world)
            self.checkpointer.check()
            if recipe.checkpoint.enable and self._due(recipe.checkpoint.interval):
                self.save()
            if self.signalled:
                self._leave()

    def _leave(self) -> None:
        """End the run here. Collective."""
        self.checkpointer.wait()
        number = self.signals.number or signal.SIGTERM  # it came to another rank
        saved = "checkpoint saved; rerun the same command to resume"
        if not self.recipe.checkpoint.enable:
            saved = "no checkpoint saved, since [checkpoint] enable = false"
        self.reporter.print(f"stopped by {signal.Signals(number).name} after step {self.step}: {saved}")
        raise Stopped(number)

    def train_step(self) -> StepMetrics:
        """One optimizer step over one global batch. Raises RuntimeError: its job was taken to another layout."""
        if self.job.recipe is not self.recipe:  # its optimizers would update what the job no longer has
            raise RuntimeError("Job.relayout is for loops over `open_job`: a Trainer stays in its layout")
        started = time.perf_counter()
        self.world.log.clear()
        planned = self.job.training_step.draw()
        self.notices.batch(planned)
        over_in_flight = self.notices.over_in_flight(planned)
        recorded = self.recorder.begin(planned.number + 1)
        result = self.job.training_step.run(planned, self.recipe.training.max_norm, self._computed)
        lr = self.lr(self.step)
        self._update(result)
        seconds = time.perf_counter() - started
        if recorded:
            self.recorder.end(planned)
        metrics = self._metrics(planned, result, lr, seconds, over_in_flight)
        moved = self.job.expert_placement.after_step(self.step, self.optimizers)  # metrics are of where experts were
        for name, experts in moved.items():
            self.reporter.print(f"step {self.step}: experts of {name}: {experts}")
        return replace(metrics, expert_placement={name: experts.record() for name, experts in moved.items()})

    def _computed(self) -> bool:
        """Called when this rank has computed its part of a step; returns whether a signal asks to stop."""
        self.recorder.computed()
        return self.signals.number > 0

    def _update(self, result: StepResult) -> None:
        """Take the optimizer's step, unless `result` is not finite."""
        if result.skipped:
            self.reporter.print(result.skipped)
        if self.optimizers is not None:
            take_step(*self.optimizers, update=result.finite)
        self.step, self.loss, self.signalled = self.step + 1, result.loss, result.stop_requested
        self.samples_skipped += result.samples_skipped
        if (interval := self.recipe.debug.check_replicas) and self.step % interval == 0:
            self.job.check_replicas(self.step)

    def _metrics(
        self, planned: PlannedStep, result: StepResult, lr: float, seconds: float, over_in_flight: int
    ) -> StepMetrics:
        """What is known about a step. Collective where it is logged."""
        drawn, plan, source = planned.drawn, planned.plan, self.job.loader.source
        active, logged = self.reporter.active, self.reporter.logs(self.step)
        return StepMetrics(
            self.step,
            result.loss,
            result.grad_norm,
            lr,
            len(drawn) / seconds,
            plan.num_tokens / seconds,
            seconds,
            self.meter.cost(plan, seconds) if active else StepCost(),
            self.meter.measure(planned.feed.loaded, plan.num_targets) if logged else None,
            load=self.meter.load(plan) if active and logged else None,
            skipped=not result.finite,
            skipped_steps=self.job.non_finite.count,
            skipped_in_a_row=self.job.non_finite.in_a_row,
            samples_without_target=result.samples_without_target,
            samples_skipped=result.samples_skipped,
            media_dropped=int(drawn.dropped_media.sum()),
            tokens_dropped=int(drawn.dropped_tokens.sum()),
            over_in_flight=over_in_flight,
            losses=result.losses if len(self.job.graph.losses) > 1 else {},
            samples_by_source=source.counts(drawn.indices) if isinstance(source, MixtureSource) else {},
        )

    def validate(self) -> Evaluation | None:
        """Evaluate on the held-out samples, if there are some, and report it. Collective."""
        return self.validation.run(self.step)

    def save(self) -> None:
        """Write a checkpoint of the current step. Collective."""
        self.reporter.sync()
        self.checkpoints.save(self.progress)

    def _report_end(self, how: str, reason: str) -> None:
        """Record why the run ends before its last step, once a save that may still be running is over."""
        with suppress(OutputError):  # the error that ends the run has reported a full disk, say
            self.checkpointer.close()
            self.reporter.ended(self.step, how, reason)

    @property
    def progress(self) -> Progress:
        return Progress(self.step, self.loss, self.samples_skipped)

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self._done or self.signalled

    @property
    def _done(self) -> bool:
        return self.stopped or self.step >= self.recipe.training.steps
