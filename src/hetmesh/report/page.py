"""From a run's folder to the values of its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.report.advice import advice, waits_for_samples
from hetmesh.report.explain import explain
from hetmesh.report.page_sections import sections
from hetmesh.report.page_values import RunPage, Tile
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_series import number, series
from hetmesh.report.values import RecipeView
from hetmesh.simulate import average_bubbles
from hetmesh.training.dump_folder import RECIPE_FILE
from hetmesh.training.metrics import amount, duration
from hetmesh.training.saved_run import run_recipe
from hetmesh.training.wording import counted


def run_page(run: RunView, folder: str | Path) -> RunPage:
    """What the page of `run`, which was read from `folder`, shows. Its recipe is read as `hetmesh explain` does, which
    looks at the data.

    Raises:
        RecipeError: no step of it is over.
    """
    folder = Path(folder)
    if not run.records:
        raise RecipeError(f"{folder}: metrics.jsonl holds no step yet; there is nothing to show")
    recipe, view, notes = _described(folder)
    title = (recipe.job.description if recipe else "") or folder.resolve().name
    return RunPage(
        title=title,
        run=str(folder),
        state=_state(run, recipe),
        facts=tuple(_facts(recipe, view)),
        tiles=tuple(_tiles(run)),
        advice=advice(run, recipe, view),
        sections=sections(run, view),
        notes=(*run.notes, *notes),
        recipe=recipe_text(recipe) if recipe else "",
    )


def _described(folder: Path) -> tuple[Recipe | None, RecipeView | None, tuple[str, ...]]:
    """A run says something without its recipe too, and its data may lie on another machine."""
    if not (folder / RECIPE_FILE).exists():
        return None, None, (f"there is no {RECIPE_FILE} in the folder, so what was trained is not known",)
    try:
        recipe = run_recipe(folder)
    except RecipeError as error:
        return None, None, (f"what was trained is not known: {error}",)
    try:
        return recipe, explain(recipe), ()
    except (HetmeshError, OSError) as error:
        return recipe, None, (f"layout and boundaries cannot be worked out here: {error}",)


def _state(run: RunView, recipe: Recipe | None) -> str:
    done = run.last["step"]
    seconds = duration(sum(series(run.records, "time_s").values))
    wanted = recipe.training.steps if recipe else done
    if run.summary.get("steps") == done:
        early = f" of {wanted}, as on_step asked" if run.summary.get("stopped_by_on_step") else ""
        return f"finished: {counted(done, 'step')}{early} in {seconds}"
    of = f" of {wanted:,}" if recipe else ""
    return f"not finished: step {done:,}{of} after {seconds}; it still runs, or ended before its time"


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
        yield Tile("loss", f"{loss.values[-1]:.4g}", f"{loss.values[0]:.4g} at step {loss.steps[0]:,}")
    if (held_out := number(run.summary.get("validation_loss"))) is not None:
        yield Tile("loss on held-out samples", f"{held_out:.4g}")
    if (accuracy := number(run.summary.get("answer_accuracy"))) is not None:
        questions = number(run.summary.get("questions"))
        note = f"of {questions:,.0f} held-out questions" if questions else "of held-out questions"
        yield Tile("right answers", f"{accuracy:.1%}", note)
    if tokens := series(run.records, "tokens_per_s"):
        samples = series(run.records, "samples_per_s")
        more = f"; {samples.median:,.4g} samples/s" if samples else ""
        yield Tile("tokens/s", f"{tokens.median:,.4g}", f"median step{more}")
    if seconds := series(run.records, "time_s"):
        yield Tile("median step", time_text(seconds.median), f"slowest {time_text(max(seconds.values))}")
    if mfu := series(run.records, "mfu"):
        yield Tile("MFU", f"{mfu.median:.1%}", "median step, all ranks")
    if "measured" in run.timelines:
        idle = {name: f"{average_bubbles(each).fraction:.0%}" for name, each in run.timelines.items()}
        note = f"; predicted {idle['predicted']}" if "predicted" in idle else ""
        yield Tile("idle ranks", idle["measured"], f"of step {run.step}{note}")
    if memory := series(run.records, "memory_bytes"):
        yield Tile("memory", f"{amount(max(memory.values))}B", "most that any rank took")
    if (wait := waits_for_samples(run)) is not None:
        yield Tile("waiting for samples", f"{wait:.1%}", "of a step, the rank that waits longest")


def time_text(seconds: float) -> str:
    """`"12.3 ms"`, `"4.56 s"`, `"2:03"`."""
    if seconds >= 100:
        return duration(seconds)
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


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
