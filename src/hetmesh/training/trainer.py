"""The trainer: one readable training loop. Reads top to bottom like the pseudo-code of a training step."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetmesh.boundary import World
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.initial_load import load_initial_weights
from hetmesh.checkpoint.resume import ADVICE, changes, check_changes, described, run_state
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.payloads import Payloads
from hetmesh.errors import OutputError, RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import RunFolder, claim_folder
from hetmesh.records.events import FAILED, FINISHED, STOPPED
from hetmesh.records.metrics import StepMetrics, run_summary
from hetmesh.records.reporter import Reporter
from hetmesh.records.step_values import StepCost
from hetmesh.resolve.held_out import held_out_source
from hetmesh.resolve.references import References, check_references, referenced, references
from hetmesh.runtime.device_peak import device_name
from hetmesh.training.evaluate import Evaluation
from hetmesh.training.gradients import clip_factor, scale
from hetmesh.training.job import Job
from hetmesh.training.kernels import choose_kernels
from hetmesh.training.loading import open_payloads
from hetmesh.training.loss import OwnLoss
from hetmesh.training.meter import Meter
from hetmesh.training.non_finite import describe_non_finite
from hetmesh.training.on_step import OnStep, says_stop
from hetmesh.training.optimizers import keeping_options, learning_rate, make_optimizers, take_step
from hetmesh.training.recorder import StepRecorder
from hetmesh.training.skip import Skipped, leave_out_unreadable
from hetmesh.training.step_notices import StepNotices
from hetmesh.training.stopping import Stopped, StopSignals
from hetmesh.training.validation import RunValidation
from hetmesh.training.what_next import results, what_next, when_finished
from hetmesh.training.world_of import world_of

Export = Callable[[Recipe, Path], list[str]]
"""Writes the checkpoint in a folder as a directory that transformers loads; returns what to print."""


def train(
    recipe: Recipe, *, loss: OwnLoss | None = None, on_step: OnStep | None = None, export: Export | None = None
) -> dict[str, Any]:
    """Train what `recipe` describes on this rank; every rank of the job calls it.

    Where `hetmesh.init` has made a World already it is used, and left open.

    Args:
        loss: summed over targets (`hetmesh.training.loss.OwnLoss`); None: cross-entropy.
        on_step: called after each step, with its metrics.
        export: what `checkpoint.last_save_in_hf` calls on rank 0 (`hetmesh.export.export.export_last`).

    Returns:
        The summary of the run, equal on all ranks; rank 0 has written it to summary.json.

    Raises:
        LossError: `loss` is no sum over targets.
        NonFiniteError: a loss or gradient is not finite, and `[training] on_non_finite` says stop.
        RecipeError, SampleError, OutputError: the recipe, a sample or a file is not as it must be.
        Stopped: SIGTERM or SIGINT came to a rank; the step that ran then is done, and saved.
    """
    # Before anything has a thread: workers that load samples are forked from here.
    with open_payloads(recipe) as payloads, world_of(recipe) as world:
        return train_in(world, recipe, payloads, loss=loss, on_step=on_step, export=export)


def train_in(
    world: World,
    recipe: Recipe,
    payloads: Payloads,
    *,
    loss: OwnLoss | None = None,
    on_step: OnStep | None = None,
    export: Export | None = None,
) -> dict[str, Any]:
    """`train` in a World."""
    folder = claim_folder(recipe, world)
    if folder.summary is not None:
        if world.rank == 0:
            print("\n".join(when_finished(recipe, folder)), flush=True)
        return folder.summary
    return Trainer(recipe, world, folder, payloads, loss=loss, on_step=on_step, export=export).run()


class Trainer:
    """One run on one rank.

    Args:
        folder: what `claim_folder` gave; None claims one.
        payloads: where samples are loaded; None: on this rank, when they are needed.
        loss, on_step, export: see `train`.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        folder: RunFolder | None = None,
        payloads: Payloads | None = None,
        *,
        loss: OwnLoss | None = None,
        on_step: OnStep | None = None,
        export: Export | None = None,
    ) -> None:
        if recipe.checkpoint.last_save_in_hf and export is None:
            raise TypeError("checkpoint.last_save_in_hf: the trainer needs `export`, e.g. hetmesh.export's export_last")
        self.export = export
        self.began = time.perf_counter()
        torch.manual_seed(recipe.debug.seed)
        choose_kernels(recipe, world)
        self.on_step, self.stopped = on_step, False
        self.signals, self.signalled = StopSignals(announce=world.rank == 0), False
        self.recipe, self.world = recipe, world
        self.claimed = folder or claim_folder(recipe, world)
        self.folder, self.notes = self.claimed.path, self.claimed.describe()
        self.loss: float | None = None  # of the last step
        self.skipped = Skipped()
        self.changed = ""  # since the checkpoint that this run goes on from
        try:
            self._build(payloads, loss)
        except BaseException:
            self.claimed.release()
            raise

    def _build(self, payloads: Payloads | None, loss: OwnLoss | None) -> None:
        recipe, world = self.recipe, self.world
        self.job = Job.assemble(recipe, world, payloads, loss)
        kept = recipe.checkpoint
        if kept.initial_load_path and self.claimed.step is None:  # a resumed run has its own weights
            load_initial_weights(world, self.job.root, Path(kept.initial_load_path), kept.exclude_from_loading)
        self.parameters = list(self.job.root.parameters())
        self.optimizers, self.lr = make_optimizers(recipe, self.job.root), learning_rate(recipe)
        held_out = held_out_source(recipe, None if payloads is None else payloads.sources)
        self.checkpointer = Checkpointer(
            world,
            self.folder / kept.folder,
            kept.keep_latest_k,
            kept.timeout_seconds,
            asynchronous=kept.async_mode == "async",
            frozen_once=kept.frozen != "each",
        )
        self.references: References = {}
        if kept.enable:
            self.checkpointer.prepare()
            with self.checkpointer.patience():
                self.references = references(world, recipe, referenced(recipe))
        self.step = self.claimed.step or 0
        if self.claimed.step is not None:
            self._resume()
        self.upcoming = self.job.upcoming
        self.meter, self.recorder = Meter(self.job), StepRecorder(self.job, self.folder)
        redone = self.claimed.begin(recipe)
        self.reporter = Reporter(
            self.folder,
            recipe.training.steps,
            rank=world.rank,
            resumed_at=self.step,
            log_freq=recipe.metrics.log_freq,
            verbose=recipe.metrics.verbose,
            tensorboard=recipe.metrics.enable_tensorboard,
            wandb=recipe.metrics.enable_wandb,
            config=recipe.model_dump(mode="json", by_alias=True),
            claim=self.claimed.claim,
        )
        self.reporter.started(
            self.step,
            ranks=world.size,
            device=device_name(world.device),
            built_s=round(time.perf_counter() - self.began, 3),
            changed=self.changed or None,
            redone=redone,
        )
        self.notices = StepNotices(recipe, self.reporter)
        self.validation = RunValidation(self.job, held_out, self.reporter)

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and show what was learnt."""
        recipe, started = self.recipe, time.perf_counter()
        try:
            self.reporter.print("\n".join([*self.notes, *self.meter.describe()]))
            with self.signals:
                self._steps()
                seconds = time.perf_counter() - started
                self.validate()
                self.checkpointer.wait()
                self._tell_saved()
            summary = run_summary(
                self.step,
                self.world.size,
                seconds,
                loss=self.loss,
                cut_short=self.stopped and self.step < recipe.training.steps,
                skipped_steps=self.job.non_finite.count,
                samples_skipped=self.skipped.samples,
                evaluated=self.validation.summary(),
            )
            self.reporter.answers(*self.validation.shown())
            next_ = what_next(recipe, self.folder, self.step, self.validation.source)
            self.reporter.print("\n".join([results(recipe, self.folder), *next_]))
            if recipe.checkpoint.last_save_in_hf:
                self._export()
            self.reporter.summary(summary)  # with it the run is finished: started again, it does nothing
            self.reporter.ended(self.step, FINISHED)
            return summary
        except Stopped as stopped:
            self._tell_end(STOPPED, stopped.name)
            raise
        except BaseException as error:
            self._tell_end(FAILED, str(error) or type(error).__name__)
            raise
        finally:
            self.checkpointer.close()
            self.upcoming.close()
            self.reporter.close()

    def _steps(self) -> None:
        recipe, world, first = self.recipe, self.world, True
        while not self._done:
            if self.validation.due(self.step) and not (first and self.claimed.evaluated):
                self.validate()  # the last start may have ended between a step and its evaluation
            metrics = self.train_step()
            if first:  # connections stand and libraries are warm: from now on a slow rank is a stalled one
                world.set_timeout(recipe.comm.train_timeout_seconds)
                first = False
            self.reporter.step(metrics)
            self.stopped = says_stop(self.on_step, metrics, world)
            self.checkpointer.check()
            self._tell_saved()
            if recipe.checkpoint.enable and self._due(recipe.checkpoint.interval):
                self.save()
            if self.signalled:
                self._leave()

    def _leave(self) -> None:
        """End the run here, with what is saved. Collective."""
        self.checkpointer.wait()
        self._tell_saved()
        number = self.signals.number or signal.SIGTERM  # it came to another rank
        saved = "saved: the same command goes on from here" if self.recipe.checkpoint.enable else (
            "not saved: [checkpoint] enable = false"
        )  # fmt: skip
        self.reporter.print(f"stopped by {signal.Signals(number).name} after step {self.step}, which is {saved}")
        raise Stopped(number)

    def train_step(self) -> StepMetrics:
        """One optimizer step over one global batch."""
        started = time.perf_counter()
        self.world.log.clear()
        with self.world.watchdog.watching(f"metadata of the samples of step {self.step + 1}"):
            upcoming = self.upcoming.take()
        drawn, plan, schedule, feed = upcoming.drawn, upcoming.plan, upcoming.schedule, upcoming.feed
        left_out: dict[int, str] = {}
        if self.recipe.data.on_bad_sample == "skip":
            plan, left_out = leave_out_unreadable(feed, self.world)
            for text in self.skipped.add(self.step + 1, left_out):
                self.reporter.print(text)
        targets, without = plan.num_targets, self.notices.without_targets(self.step + 1, drawn, left_out)

        if self.optimizers is not None:
            self.optimizers[0].zero_grad()
        over = self.notices.over_in_flight(self.step + 1, schedule)
        recorded = self.recorder.begin(self.step + 1)
        loss_sum = self.job.runtime.run(
            schedule, plan, feed, step=self.step, transfers=upcoming.transfers, settled=False
        )
        computed = time.perf_counter()

        loss, grad_norm, self.signalled = self.job.totals(loss_sum, targets, self.signals.number > 0)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)  # equal on all ranks, so all do the same
        if finite:
            self.job.non_finite.finite()
            self.job.first_steps.check()
            # Gradients are sums over the whole batch; this is the only place where they are normalised.
            scale(self.parameters, clip_factor(grad_norm, self.recipe.training.max_norm) / targets)
        else:
            self._refuse(loss_sum if self.job.counts_loss else 0.0, loss, grad_norm)
        lr = self.lr(self.step)
        if self.optimizers is not None:
            take_step(*self.optimizers, update=finite)
        self.step, self.loss = self.step + 1, loss
        if (every := self.recipe.debug.check_replicas) and self.step % every == 0:
            self.job.check_replicas(self.step)
        seconds, source = time.perf_counter() - started, self.job.loader.source
        if recorded:
            self.recorder.end(self.step, schedule, plan, computed)
        metrics = StepMetrics(
            self.step,
            loss,
            grad_norm,
            lr,
            len(drawn) / seconds,
            plan.num_tokens / seconds,
            seconds,
            self.meter.cost(plan, seconds) if self.reporter.active else StepCost(),
            self.meter.measure(feed.loaded, plan.num_targets) if self.reporter.logs(self.step) else None,
            load=self.meter.load(plan) if self.reporter.active and self.reporter.logs(self.step) else None,
            skipped=not finite,
            skipped_steps=self.job.non_finite.count,
            skipped_in_a_row=self.job.non_finite.in_a_row,
            samples_without_target=without,
            samples_skipped=len(left_out),
            media_dropped=int(drawn.dropped_media.sum()),
            tokens_dropped=int(drawn.dropped_tokens.sum()),
            over_in_flight=over,
            samples_by_source=source.counts(drawn.indices) if isinstance(source, MixtureSource) else {},
        )
        moved = self.job.expert_placement.behind_step(self.step, self.optimizers)  # what was measured is of before
        for name, each in moved.items():
            self.reporter.print(f"step {self.step}: experts of {name}: {each}")
        return replace(metrics, expert_placement={name: each.record() for name, each in moved.items()})

    def _refuse(self, loss_sum: torch.Tensor | float, loss: float, grad_norm: float) -> None:
        """Count this step as skipped, or stop the run. Collective."""
        where = describe_non_finite(self.job.root, loss_sum, self.world)
        told = f"step {self.step + 1}: {where} are not finite (loss {loss:.4g}, grad norm {grad_norm:.4g})"
        self.reporter.print(self.job.non_finite.skip(told, f" Results are in {self.folder}"))

    def validate(self) -> Evaluation | None:
        """Evaluate on the held-out samples, if the source has some, and report it."""
        return self.validation.run(self.step)

    def save(self) -> None:
        """Write a checkpoint of the current step."""
        position = self._position()
        self.reporter.sync()
        with self.job.expert_placement.in_own_places(self.optimizers):
            self.checkpointer.save(self.step, self.job.root, self.optimizers, position, frozenset(self.references))
        self._tell_saved()

    def _tell_saved(self) -> None:
        for each in self.checkpointer.take_saved():
            times = {"held_s": round(each.held_s, 3), "time_s": round(each.time_s, 3)}
            self.reporter.saved(each.step, **times, asynchronous=self.checkpointer.asynchronous)

    def _tell_end(self, how: str, reason: str) -> None:
        """Note why the run ends before its last step, behind the save that may still go on."""
        with suppress(OutputError):  # of a full disk, say, the error that ends it has told
            self.checkpointer.close()
            self._tell_saved()
            self.reporter.ended(self.step, how, reason)

    def _export(self) -> None:
        """Write the last checkpoint once more, as a directory that transformers loads. Collective."""
        assert self.export is not None
        export, path, lines = self.export, self.checkpointer.folder / f"step-{self.step}", list[str]()
        self.checkpointer.on_first_rank(f"{path} cannot be exported", lambda: lines.extend(export(self.recipe, path)))
        self.reporter.print("\n".join(lines))

    def _resume(self) -> None:
        step = self.checkpointer.latest()
        assert step is not None
        self.step = step
        path = self.checkpointer.folder / f"step-{step}"
        saved = self.checkpointer.saved_run(step)
        changed = changes(saved.recipe, self.recipe)
        check_changes(changed, path)
        with self.checkpointer.patience():
            now = references(self.world, self.recipe, tuple(saved.references))
        check_references(path, saved.references, now)
        with keeping_options(self.optimizers):
            try:
                position = self.checkpointer.load(
                    step, self.job.root, self.optimizers, self._position(), frozenset(saved.references)
                )
            except RecipeError as error:
                told = f"; keys that have changed: {described(changed)}; {ADVICE}" if changed else ""
                raise RecipeError(f"{error}{told}") from error
        saved.check_model(self.recipe, self.job.configs, path)
        self.notes += [f"note: {each}" for each in self.job.loader.load_state_dict(position)]
        if held := sorted(self.references.keys() - saved.references.keys()):  # maybe other weights than the directory
            self.references = {k: v for k, v in self.references.items() if k in saved.references}
            self.notes.append(f'checkpoint.frozen = "reference": {path} holds {", ".join(held)}, and so do later ones')
        self.loss, self.skipped.samples = saved.loss, saved.samples_skipped
        self.job.non_finite.count, self.job.non_finite.in_a_row = saved.skipped_steps, saved.skipped_in_a_row
        self.job.expert_placement.restore(saved.experts, self.optimizers)
        if changed:
            self.changed = described(changed)
            self.notes.append(f"changed since, and taken from step {step + 1} on: {self.changed}")
        if others := saved.other_versions():
            self.notes.append(f"other libraries than those that it was saved with: {others}")

    def _position(self) -> dict[str, Any]:
        run = run_state(
            self.recipe,
            step=self.step,
            loss=self.loss,
            skipped_steps=self.job.non_finite.count,
            skipped_in_a_row=self.job.non_finite.in_a_row,
            samples_skipped=self.skipped.samples,
            references=self.references,
            experts=self.job.expert_placement.state(),
            configs=self.job.configs,
        )
        with self.world.watchdog.watching("a look at samples all over the data source", self.checkpointer.timeout):
            return {**self.job.loader.state_dict(), "run": run}

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self._done or self.signalled

    @property
    def _done(self) -> bool:
        return self.stopped or self.step >= self.recipe.training.steps
