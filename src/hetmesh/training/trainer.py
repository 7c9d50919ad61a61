"""The trainer: one readable training loop. Reads top to bottom like the pseudo-code of a training step."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from hetmesh.boundary import World, init
from hetmesh.data.registry import make_source
from hetmesh.data.source import Source
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.training.checkpoint import Checkpointer
from hetmesh.training.evaluate import Evaluation, evaluate, show
from hetmesh.training.feed import Feed
from hetmesh.training.gradients import clip_factor, counted, reduce_over_ranks, scale, squared_norm
from hetmesh.training.initial_load import load_initial_weights
from hetmesh.training.job import Job
from hetmesh.training.meter import Meter, StepCost
from hetmesh.training.metrics import Reporter, StepMetrics
from hetmesh.training.optimizers import learning_rate, make_optimizers
from hetmesh.training.recorder import StepRecorder


def train(recipe: Recipe) -> dict[str, Any]:
    """Train what `recipe` describes on this rank; every rank of the job calls it.

    Returns:
        The summary of the run, equal on all ranks; rank 0 has written it to summary.json.
    """
    patience = recipe.comm.init_timeout_seconds
    world = init(timeout=patience, init_timeout=patience)
    try:
        if world.size != recipe.world_size:
            raise RecipeError(f"the recipe needs {recipe.world_size} ranks, this job has {world.size}")
        return Trainer(recipe, world).run()
    finally:
        world.close()


class Trainer:
    """One run on one rank."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        torch.manual_seed(recipe.debug.seed)
        if recipe.debug.deterministic:
            torch.use_deterministic_algorithms(True)
        self.recipe, self.world = recipe, world
        self.folder = Path(recipe.job.dump_folder)
        self.job = Job.assemble(recipe, world)
        if recipe.checkpoint.initial_load_path:
            source = Path(recipe.checkpoint.initial_load_path)
            load_initial_weights(world, self.job.root, source, recipe.checkpoint.exclude_from_loading)
        self.parameters = list(self.job.root.parameters())
        self.counted = counted(self.job.parallel.values(), world.rank, self.job.counted_elsewhere)
        self.optimizers = make_optimizers(recipe, self.job.root)
        self.lr = learning_rate(recipe)
        self.held_out = _held_out(recipe)
        kept = recipe.checkpoint
        self.checkpointer = Checkpointer(world, self.folder / kept.folder, kept.keep_latest_k, kept.timeout_seconds)
        self.step = self._resume() if recipe.checkpoint.enable else 0
        self.meter = Meter(self.job)
        self.recorder = StepRecorder(self.job, self.folder)
        self.reporter = Reporter(
            self.folder,
            recipe.training.steps,
            rank=world.rank,
            resumed_at=self.step,
            log_freq=recipe.metrics.log_freq,
            tensorboard=recipe.metrics.enable_tensorboard,
            wandb=recipe.metrics.enable_wandb,
            config=recipe.model_dump(mode="json", by_alias=True),
        )

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and show what was learnt."""
        recipe, started, metrics = self.recipe, time.perf_counter(), None
        try:
            self.reporter.print("\n".join(self.meter.describe()))
            while not self._done:
                first, metrics = metrics is None, self.train_step()
                if first:  # connections stand and libraries are warm: from now on a slow rank is a stalled one
                    self.world.set_timeout(recipe.comm.train_timeout_seconds)
                self.reporter.step(metrics)
                if recipe.checkpoint.enable and self._due(recipe.checkpoint.interval):
                    self.save()
                if recipe.validation.freq and self.step % recipe.validation.freq == 0 and not self._done:
                    self.evaluate()
            seconds = time.perf_counter() - started
            evaluation = self.evaluate()
            summary = self._summary(metrics, evaluation, seconds)
            self.reporter.summary(summary)
            for text in show(self.held_out, evaluation) if evaluation and self.held_out else ():
                self.reporter.print(text)
            return summary
        finally:
            self.reporter.close()

    def train_step(self) -> StepMetrics:
        """One optimizer step over one global batch."""
        started = time.perf_counter()
        self.world.log.clear()
        with self.world.watchdog.watching(f"metadata of the samples of step {self.step + 1}"):
            drawn = next(self.job.loader)
        plan = self.job.plan([d.meta for d in drawn])
        feed = Feed(self.job.loader, drawn, plan, self.job.adapters, self.world.rank)

        if self.optimizers is not None:
            self.optimizers[0].zero_grad()
        schedule = self.job.schedule(plan)
        recorded = self.recorder.begin(self.step + 1)
        loss_sum = self.job.runtime.run(schedule, plan, feed, step=self.step)
        computed = time.perf_counter()

        targets = max(plan.num_targets, 1)
        mine = loss_sum if self.job.counts_loss else 0.0
        total, squares = reduce_over_ranks([mine, squared_norm(self.counted)], self.world)
        # Gradients are sums over the whole batch; this is the only place where they are normalised.
        grad_norm = math.sqrt(squares) / targets
        scale(self.parameters, clip_factor(grad_norm, self.recipe.training.max_norm) / targets)

        lr = self.lr(self.step)
        if self.optimizers is not None:
            self.optimizers[0].step()
            self.optimizers[1].step()
        self.step += 1
        if (every := self.recipe.debug.check_replicas) and self.step % every == 0:
            self.job.check_replicas(self.step)
        seconds = time.perf_counter() - started
        if recorded:
            self.recorder.end(self.step, schedule, plan, computed)
        return StepMetrics(
            self.step,
            total / targets,
            grad_norm,
            lr,
            len(drawn) / seconds,
            plan.num_tokens / seconds,
            seconds,
            self.meter.cost(plan, seconds) if self.reporter.active else StepCost(),
            self.meter.measure() if self.reporter.logs(self.step) else None,
        )

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out samples, if the source has some, and report it."""
        if self.held_out is None:
            return None
        evaluation = evaluate(self.job, self.held_out, self.recipe.validation.samples)
        scores = {"loss": evaluation.loss, "answer_accuracy": evaluation.accuracy, **evaluation.accuracy_by_kind}
        self.reporter.evaluation(self.step, scores)
        return evaluation

    def save(self) -> None:
        """Write a checkpoint of the current step."""
        self.checkpointer.save(self.step, self.job.root, self.optimizers, self._position())

    def _resume(self) -> int:
        self.checkpointer.prepare()
        step = self.checkpointer.latest()
        if step is None:
            return 0
        position = self.checkpointer.load(step, self.job.root, self.optimizers, self._position())
        self.job.loader.load_state_dict(position)
        return step

    def _position(self) -> dict[str, int]:
        return self.job.loader.state_dict()

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self._done

    @property
    def _done(self) -> bool:
        return self.step >= self.recipe.training.steps

    def _summary(self, last: StepMetrics | None, evaluation: Evaluation | None, seconds: float) -> dict[str, Any]:
        summary: dict[str, Any] = {"steps": self.step, "ranks": self.world.size, "train_seconds": round(seconds, 3)}
        if last is not None:
            summary["loss"] = last.loss
        if evaluation is not None:
            summary |= {
                "validation_loss": evaluation.loss,
                "answer_accuracy": evaluation.accuracy,
                "answer_accuracy_by_kind": evaluation.accuracy_by_kind,
                "questions": len(evaluation.right),
            }
        return summary


def _held_out(recipe: Recipe) -> Source | None:
    """The validation split of the data source, or None if it has no splits."""
    options = {**recipe.data.options, "split": "validation"}
    try:
        return make_source(recipe.data.source, **options)
    except RecipeError:
        return None
