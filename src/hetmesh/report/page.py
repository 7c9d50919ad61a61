"""From a run's folder to the values of its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hetmesh.checkpoint.saved_run import run_recipe
from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.formatting import counted
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import ANSWERS_FILE, METRICS_FILE, RECIPE_FILE, SUMMARY_FILE, TIMELINE_FILE
from hetmesh.records.events import EVENTS_FILE
from hetmesh.records.metrics import amount
from hetmesh.report.advice import advice, waits_for_samples
from hetmesh.report.explain import explain
from hetmesh.report.page_sections import sections
from hetmesh.report.page_story import state, time_text, when
from hetmesh.report.page_values import RunPage, Tile
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_series import number, series
from hetmesh.report.values import RecipeView
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import average_bubbles


def run_page(run: RunView, folder: str | Path) -> RunPage:
    """What the page of `run`, which was read from `folder`, shows. Its recipe is read as `hetmesh explain` does, which
    looks at the data.

    Raises:
        RecipeError: no step of it is over.
    """
    folder = Path(folder)
    if not run.records:
        told = f"there is nothing to show: {state(run, None).text}"
        raise RecipeError(f"{folder}: metrics.jsonl holds no step yet; {told}")
    recipe, view, notes = _described(folder)
    title = (recipe.job.description if recipe else "") or folder.resolve().name
    return RunPage(
        title=title,
        run=str(folder),
        state=state(run, _wanted(run, recipe)),
        facts=tuple(_facts(recipe, view)),
        tiles=tuple(_tiles(run)),
        advice=advice(run, recipe, view),
        sections=sections(run, view, recipe),
        notes=(*run.notes, *notes),
        recipe=recipe_text(recipe) if recipe else "",
        written=f"Written {when(run.story.read)} UTC by hetmesh report, from {', '.join(_files(folder))}.",
    )


def _wanted(run: RunView, recipe: Recipe | None) -> int | None:
    """Steps of the whole run."""
    asked = run.story.starts[-1].wanted if run.story.starts else 0
    return asked or (recipe.training.steps if recipe else None)


def _files(folder: Path) -> list[str]:
    names = (METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, ANSWERS_FILE, TIMELINE_FILE, RECIPE_FILE)
    return [name for name in names if (folder / name).exists()]


def _described(folder: Path) -> tuple[Recipe | None, RecipeView | None, tuple[str, ...]]:
    """A run says something without its recipe too, and its data may lie on another machine."""
    if not (folder / RECIPE_FILE).exists():
        return None, None, (f"there is no {RECIPE_FILE} in the folder, so what was trained is not known",)
    try:
        recipe = run_recipe(folder)
    except RecipeError as error:
        return None, None, (f"what was trained is not known: {error}",)
    try:
        return recipe, explain(resolve(recipe)), ()
    except (HetmeshError, OSError) as error:
        return recipe, None, (f"layout and boundaries cannot be worked out here: {error}",)


def _facts(recipe: Recipe | None, view: RecipeView | None) -> Iterator[str]:
    if recipe is None:
        return
    yield counted(recipe.world_size, "rank")
    if view:
        for module in view.modules:
            size = "" if module.parameters is None else f" {amount(module.parameters).strip()}"
            yield f"{module.name}: {module.model}{size}{'' if module.training == 'trained' else ', ' + module.training}"
    batch = recipe.batch
    microbatches = counted(batch.num_microbatches, "microbatch", "microbatches")
    yield f"{counted(batch.global_batch_size, 'sample')} per step in {microbatches}, schedule {recipe.schedule}"
    yield f"{recipe.optimizer.name}, lr {recipe.optimizer.lr:.3g}"


def _tiles(run: RunView) -> Iterator[Tile]:
    loss = series(run.records, "loss")
    if loss:
        first = f"{loss.values[0]:.4g} at step {loss.steps[0]:,}"
        yield Tile("loss", f"{loss.values[-1]:.4g}", f"training, last step; {first}")
    yield from _held_out(run)
    usual = run.usual
    if tokens := series(usual, "tokens_per_s"):
        samples = series(usual, "samples_per_s")
        more = f"; {samples.median:,.4g} samples/s" if samples else ""
        yield Tile("tokens/s", f"{tokens.median:,.4g}", f"median step, all ranks, without padding{more}")
    if seconds := series(usual, "time_s"):
        yield Tile("median step", time_text(seconds.median), f"slowest {time_text(max(seconds.values))}")
    if mfu := series(usual, "mfu"):
        yield Tile("MFU", share_text(mfu.median), "median step, all ranks")
    if "measured" in run.timelines:
        idle = {name: f"{average_bubbles(each).fraction:.0%}" for name, each in run.timelines.items()}
        note = f"; predicted {idle['predicted']}" if "predicted" in idle else ""
        yield Tile("ranks idle", idle["measured"], f"of step {run.step}, the mean rank{note}")
    if memory := series(usual, "memory_bytes"):
        yield Tile("memory", f"{amount(max(memory.values))}B", "most that any rank took")
    if (wait := waits_for_samples(run)) is not None:
        yield Tile("waiting for samples", f"{wait:.1%}", "of the median logged step, the rank that waits longest")


def share_text(share: float) -> str:
    """`"34.5%"`, `"0.0031%"`."""
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def _held_out(run: RunView) -> Iterator[Tile]:
    """What the last evaluation found."""
    if run.evaluations:
        found, behind = run.evaluations[-1]["validation"], f", after step {run.evaluations[-1]['step']:,}"
        keys = ("loss", "answer_accuracy", "samples")
    else:
        found, behind, keys = run.summary, "", ("validation_loss", "answer_accuracy", "questions")
    loss, accuracy, questions = (number(found.get(key)) for key in keys)
    if loss is not None:
        yield Tile("loss, held out", f"{loss:.4g}", f"per target token{behind}")
    if accuracy is not None:
        of = f"{questions:,.0f} held-out questions" if questions else "held-out questions"
        yield Tile("right answers", f"{accuracy:.1%}", f"of {of}{behind}")


def recipe_text(recipe: Recipe) -> str:
    """A recipe's keys with other values than their defaults, as TOML that describes the same run."""
    tables: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    parallelism = tables.get("parallelism", {})
    if "modules" in parallelism:  # as a recipe is written
        tables["parallelism"] = parallelism | parallelism["modules"]
        del tables["parallelism"]["modules"]
    return tomlkit.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
