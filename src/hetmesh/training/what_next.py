"""The last lines of a run: where its weights are, and which commands do something with them."""

from __future__ import annotations

import shlex
from pathlib import Path

from hetmesh.data.mixture import MixtureSource
from hetmesh.data.source import PromptSource, Source
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import SUMMARY_FILE, RunFolder


def results(recipe: Recipe, folder: Path) -> str:
    """Where what a run has written is."""
    files = "summary.json, metrics.jsonl" + (", tensorboard/" if recipe.metrics.enable_tensorboard else "")
    saved = f", {recipe.checkpoint.folder}/" if recipe.checkpoint.enable else ""
    return f"results are in {folder}: {files}{saved}"


def what_next(recipe: Recipe, folder: Path, step: int | None, held_out: Source | None = None) -> list[str]:
    """Lines for people; commands as they can be typed.

    Args:
        step: of the last checkpoint.
        held_out: the run's held-out samples, if it has some.
    """
    if not recipe.checkpoint.enable or step is None:
        return ["its weights are not kept; [checkpoint] enable = true (--checkpoint.enable true) keeps them"]
    lines = [f"its weights are in {folder / recipe.checkpoint.folder / f'step-{step}'}"]
    run = shlex.quote(str(folder))
    parts = held_out.parts.values() if isinstance(held_out, MixtureSource) else (held_out,)
    if held_out is not None:
        lines.append(f"ask it: hetmesh generate {run} --sample 0")
    if held_out is None or any(isinstance(part, PromptSource) for part in parts):
        lines.append(f"ask it: hetmesh generate {run} QUESTION --image FILE")
    return [*lines, f"take it elsewhere: hetmesh export {run} DIR"]


def when_finished(recipe: Recipe, folder: RunFolder) -> list[str]:
    """Lines for people who start a run that has nothing left to do; see `RunFolder.summary`."""
    return [
        f"the run in {folder.path} is finished: step {folder.step} of {recipe.training.steps}, results in "
        f"{folder.path / SUMMARY_FILE}; raise training.steps to go on, or give another job.dump_folder to start anew",
        *_not_exported(recipe, folder),
        *what_next(recipe, folder.path, folder.step),
    ]


def _not_exported(recipe: Recipe, folder: RunFolder) -> list[str]:
    exported = folder.path / recipe.checkpoint.folder / f"step-{folder.step}-hf"
    if not recipe.checkpoint.last_save_in_hf or exported.exists():
        return []
    return ["checkpoint.last_save_in_hf was not set when it ended, and exports nothing now; hetmesh export does"]
