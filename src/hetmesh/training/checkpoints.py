"""The checkpoints of a run: what it saves beside modules and optimizers, and how it starts from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.initial_load import load_initial_weights
from hetmesh.checkpoint.resume import (
    ADVICE,
    LAYOUT,
    RunState,
    changes,
    check_changes,
    configs,
    described,
    run_state,
)
from hetmesh.errors import RecipeError
from hetmesh.resolve.deferral import DeferralChoice
from hetmesh.resolve.directories import References, check_references, referenced, references
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.training.job import Job
from hetmesh.training.optimizers import keeping_options

Export = Callable[[ResolvedRecipe, Path], list[str]]
"""Writes the checkpoint in a folder as a directory that transformers loads; returns what to print."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps that were taken.
        loss: of the last one.
        samples_skipped: so far, as they could not be read.
        notes: of a run that was resumed: what is other than when the checkpoint was saved.
        changed: of a run that was resumed: the keys of the recipe that have changed.
    """

    step: int
    loss: float | None = None
    samples_skipped: int = 0
    notes: list[str] = field(default_factory=list)
    changed: str = ""


class RunCheckpoints:
    """Saves the checkpoints of a run, and resumes it.

    Args:
        optimizers: of `make_optimizers`.
        folder: of the run.

    Raises:
        CheckpointError: the folder of checkpoints cannot be written.
    """

    def __init__(self, job: Job, optimizers: tuple[Any, Any] | None, folder: Path) -> None:
        self.job = job
        self.optimizers = optimizers
        self.configs = configs(job.recipe.modules)
        self.references: References = {}
        keys = job.recipe.checkpoint
        self.checkpointer = Checkpointer(
            job.world,
            folder / keys.folder,
            keys.keep_latest_k,
            keys.timeout_seconds,
            asynchronous=keys.async_mode == "async",
            frozen_once=keys.frozen != "each",
        )
        if keys.enable:
            self.checkpointer.prepare()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the current step. Collective."""
        state, frozen = self.state(progress), frozenset(self.references)
        with self.job.expert_placement.in_expert_order(self.optimizers):
            self.checkpointer.save(progress.step, self.job.root, self.optimizers, state, frozen)

    def export(self, step: int, export: Export) -> list[str]:
        """Export a checkpoint as a directory that transformers loads; returns what to print. Collective."""
        path, lines = self.checkpointer.folder / f"step-{step}", list[str]()
        resolved = self.job.resolved
        self.checkpointer.on_first_rank(f"{path} cannot be exported", lambda: lines.extend(export(resolved, path)))
        return lines

    def start_or_resume(self, step: int | None) -> Progress:
        """Load the checkpoint of `step`; None: the weights of another run, if the recipe names one. Collective.

        Raises:
            RecipeError: the recipe does not continue the run that saved it, or the other run's weights do not fit.
            CheckpointError: it cannot be read, nor can directories that checkpoints refer to, or these have changed.
        """
        job, recipe, keys = self.job, self.job.recipe, self.job.recipe.checkpoint
        if not keys.enable and not keys.initial_load_path:
            return Progress(0)
        path = self.checkpointer.folder / f"step-{step}"
        own = referenced(recipe) if keys.enable else ()
        with self.checkpointer.patience():
            saved = RunState() if step is None else self.checkpointer.saved_run(step)
            changed = changes(saved.recipe, recipe)
            if step is not None and saved.profile != job.resolved.profile_digest:
                changed["profiling.profile"] = saved.profile or None, job.resolved.profile_digest or None
            check_changes(changed, path)
            if saved.deferral and not any(key.startswith(LAYOUT) for key in changed):
                job.resolved.keep_deferral(DeferralChoice(**saved.deferral))
            if keys.initial_load_path and step is None:  # a resumed run has its own weights
                load_initial_weights(job.world, job.root, Path(keys.initial_load_path), keys.exclude_from_loading)
            now = references(recipe, dict.fromkeys([*own, *saved.references]), job.world)
        check_references(path, saved.references, now)
        self.references = {name: now[name] for name in own if step is None or name in saved.references}
        if step is None:
            return Progress(0)
        state, differing = self.state(Progress(step)), described(changed)
        with keeping_options(self.optimizers):
            try:
                loaded = self.checkpointer.load(step, job.root, self.optimizers, state, saved.references)
            except RecipeError as error:
                hint = f"; keys that have changed: {differing}; {ADVICE}" if changed else ""
                raise RecipeError(f"{error}{hint}") from error
        saved.check_model(recipe, self.configs, path)
        notes = [f"note: {note}" for note in job.loader.load_state_dict(loaded)]
        if held := sorted({*own} - saved.references.keys()):  # maybe other weights than the directory
            notes.append(f'checkpoint.frozen = "reference": {path} holds {", ".join(held)}, and so do later ones')
        job.non_finite.count, job.non_finite.in_a_row = saved.skipped_steps, saved.skipped_in_a_row
        job.expert_placement.restore(saved.experts, self.optimizers)
        if changed:
            notes.append(f"changed since, and taken from step {step + 1} on: {differing}")
        if others := saved.other_versions():
            notes.append(f"other libraries than those that it was saved with: {others}")
        return Progress(step, saved.loss, saved.samples_skipped, notes, differing)

    def state(self, progress: Progress) -> dict[str, Any]:
        """What a checkpoint holds beside modules and optimizers: the position in the data, and the run. Collective."""
        job = self.job
        run = run_state(
            job.recipe,
            step=progress.step,
            loss=progress.loss,
            skipped_steps=job.non_finite.count,
            skipped_in_a_row=job.non_finite.in_a_row,
            samples_skipped=progress.samples_skipped,
            references=self.references,
            experts=job.expert_placement.state(),
            configs=self.configs,
            profile=job.resolved.profile_digest,
            deferral=asdict(job.resolved.deferral),
        )
        with job.world.watchdog.watching("a look at samples all over the data source", self.checkpointer.timeout):
            return {**job.loader.state_dict(), "run": run}
