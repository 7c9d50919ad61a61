"""The page of a run as one HTML file, from its template page.html.j2."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from hetmesh.checkpoint.saved_run import run_recipe
from hetmesh.errors import HetmeshError, RecipeError, UsageError
from hetmesh.files import writing
from hetmesh.formatting import counted
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.rewrite import recipe_toml
from hetmesh.records.dump_folder import ANSWERS_FILE, METRICS_FILE, RECIPE_FILE, SUMMARY_FILE, TIMELINE_FILE
from hetmesh.records.events import EVENTS_FILE
from hetmesh.records.metrics import amount
from hetmesh.records.run_lines import at, names_in, number, series
from hetmesh.records.run_view import RunView
from hetmesh.report.explain import explain
from hetmesh.report.figures import figure_svg
from hetmesh.report.page_parts import Curves, Picture, Tile
from hetmesh.report.page_sections import sections
from hetmesh.report.page_story import state, time_text, when
from hetmesh.report.values import RecipeView
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import average_bubbles

FOLDER_FILES = (METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, ANSWERS_FILE, TIMELINE_FILE, RECIPE_FILE)
CONTROL = dict.fromkeys([*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0), 0xFFFE, 0xFFFF])
"""Characters that HTML and SVG have no word for, to be stripped."""
MIN_STEPS = 20  # that say where work goes
SHIFT = 0.1  # of a step's work that has gone from some modules to others, from which a layout is outgrown


def save_page(run: RunView, folder: str | Path, path: str | Path) -> None:
    """Write the page of `run`, which was read from `folder`, to `path`. Raises UsageError: see `page_html`;
    OutputError: `path` cannot be written."""
    text = page_html(run, folder)
    with writing(path):
        Path(path).write_bytes(text.encode("utf-8", errors="replace"))


def page_html(run: RunView, folder: str | Path) -> str:
    """The page of `run`, which was read from `folder`. Its recipe is read as `hetmesh explain` does, which looks at the
    data. Raises UsageError: no step of it is over, or jinja2 or matplotlib is not installed."""
    folder = Path(folder)
    if not run.records:
        reason = f"there is nothing to show: {state(run, None).text}"
        raise UsageError(f"{folder}: metrics.jsonl holds no step yet; {reason}")
    recipe, view, notes = _described(folder)
    wanted = run.story.starts[-1].wanted if run.story.starts else 0
    files = ", ".join(name for name in FOLDER_FILES if (folder / name).exists())
    return render(
        title=(recipe.job.description if recipe else "") or folder.resolve().name,
        run=str(folder),
        state=state(run, wanted or (recipe.training.steps if recipe else None)),
        facts=tuple(_facts(recipe, view)),
        tiles=tuple(_tiles(run)),
        sections=sections(run, view, recipe),
        notes=(*run.notes, *notes, *outgrown(run)),
        recipe=recipe_toml(recipe) if recipe else "",
        written=f"Written {when(run.story.read)} UTC by hetmesh report, from {files}.",
    )


def render(**values: Any) -> str:
    """The page of some values: those of its template. Raises UsageError: jinja2 or matplotlib is not installed."""
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError as error:
        hint = "pip install 'hetmesh[report]', or leave the page out with --no-html"
        raise UsageError(f"the page needs jinja2: {hint}") from error
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters["image"] = _image
    return environment.get_template("page.html.j2").render(**values).translate(CONTROL) + "\n"


def _image(picture: Curves | Picture, style: str) -> str:
    """A picture as the address of an image that holds it."""
    svg = figure_svg(picture.figure, style).translate(CONTROL)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', errors='replace')).decode()}"


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
        yield from (f"{module.name}: {module.summary}" for module in view.modules)
    batch = recipe.batch
    microbatches = counted(batch.num_microbatches, "microbatch", "microbatches")
    yield f"{counted(batch.global_batch_size, 'sample')} per step in {microbatches}, schedule {recipe.schedule}"
    yield f"{recipe.optimizer.name}, lr {recipe.optimizer.lr:.3g}"


def outgrown(run: RunView) -> Iterator[str]:
    """Whether modules share the work of a step in another way than when the run began in its layout."""
    work = {name: series(run.usual, "flops", name).values for name in names_in(run.usual, "flops")}
    if (fifth := min(map(len, work.values()), default=0) // 5) < MIN_STEPS // 5:
        return
    first, last = ({name: mean(v[part]) for name, v in work.items()} for part in (slice(fifth), slice(-fifth, None)))
    before, now = ({name: v / (sum(work.values()) or 1.0) for name, v in work.items()} for work in (first, last))
    name = max(work, key=lambda name: now[name] - before[name])
    if now[name] - before[name] > SHIFT:
        found = f"{name} does {now[name]:.0%} of the work of a step, and did {before[name]:.0%}: the layout is outgrown"
        how = "hetmesh plan RECIPE (--phase N) finds one for it: resume in that, or call `Job.relayout(recipe)`"
        yield f"{found}; {how}"


def waits_for_samples(run: RunView) -> float | None:
    """Share of the median logged step that the rank which waited longest for samples did."""
    shares = [
        {"step": record["step"], "share": wait / seconds}
        for record in run.usual
        if (wait := number(at(record, "data", "wait_s"))) is not None and (seconds := number(record.get("time_s")))
    ]
    found = series(shares, "share")
    return found.median if found else None


def _tiles(run: RunView) -> Iterator[Tile]:
    if loss := series(run.records, "loss"):
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
        share = f"{mfu.median:.1%}" if mfu.median >= 0.01 else f"{100 * mfu.median:.2g}%"
        yield Tile("MFU", share, "median step, all ranks")
    if "measured" in run.timelines:
        idle = {name: f"{average_bubbles(timeline).fraction:.0%}" for name, timeline in run.timelines.items()}
        note = f"; predicted {idle['predicted']}" if "predicted" in idle else ""
        yield Tile("ranks idle", idle["measured"], f"of step {run.step}, the mean rank{note}")
    if memory := series(usual, "memory_bytes"):
        yield Tile("memory", f"{amount(max(memory.values))}B", "most that any rank took")
    if (wait := waits_for_samples(run)) is not None:
        yield Tile("waiting for samples", f"{wait:.1%}", "of the median logged step, the rank that waits longest")


def _held_out(run: RunView) -> Iterator[Tile]:
    """What the last evaluation found."""
    if run.evaluations:
        scores, after = run.evaluations[-1]["validation"], f", after step {run.evaluations[-1]['step']:,}"
        keys = ("loss", "answer_accuracy", "samples")
    else:
        scores, after, keys = run.summary, "", ("validation_loss", "answer_accuracy", "questions")
    loss, accuracy, questions = (number(scores.get(key)) for key in keys)
    if loss is not None:
        per = "weighted sum of all losses" if names_in(run.records, "losses") else "per target token"
        yield Tile("loss, held out", f"{loss:.4g}", per + after)
    if accuracy is not None:
        of = f"{questions:,.0f} held-out questions" if questions else "held-out questions"
        yield Tile("right answers", f"{accuracy:.1%}", f"of {of}{after}")
