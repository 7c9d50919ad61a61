"""The loss of a run and its evaluations, as parts of its page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetmesh.formatting import counted
from hetmesh.records.metrics import short
from hetmesh.report.page_story import time_text
from hetmesh.report.page_values import Curves, Marks, PageSection, PageTable, Picture
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_series import Series, at, names_in, number, series

MOST_ROWS = 12  # of evaluations: the last ones
MOST_KINDS = 6  # of questions, as curves and columns
MOST_NAMED = 8  # steps
TITLES: Mapping[str, str] = {
    "validation_loss": "loss per target token",
    "answer_accuracy": "right answers",
    "answer_accuracy_by_kind": "right answers",
    "questions": "questions",
    "free_running_accuracy": "right answers, generated freely",
    "free_running_questions": "questions answered freely",
    "free_running_unended": "answers without an end",
    "skipped_steps": "steps left out",
    "samples_skipped": "samples that could not be read",
}
"""Keys of summary.json as a table says them; others are shown as they are."""
NONE_YET = "no validation yet; [validation] freq = N evaluates held-out samples every N steps, else after the last one"
NOT_SHOWN = ("steps", "ranks", "train_seconds", "loss", "stopped_by_on_step")  # the page's head says them


def loss_section(run: RunView, max_norm: float | None = None) -> PageSection:
    """Curves and evaluations.

    Args:
        max_norm: at which gradients were clipped; None: not known, 0: they were not.
    """
    loss, norm = series(run.records, "loss", name="training"), series(run.records, "grad_norm")
    held_out = series(run.evaluations, "validation", "loss", name="held-out samples")
    marks = marks_of(run)
    saved = replace(marks, saved=tuple(dict.fromkeys(each.step for each in run.story.saved)))
    parts: list[Picture | PageTable] = []
    if shown := tuple(each for each in (loss, held_out) if each):
        parts.append(Curves("loss, nats per target token", shown, marks=saved))
    parts += _right(run, marks)
    if norm:
        parts.append(Curves("norm of the gradient, before clipping", (norm,), from_zero=True, marks=marks))
    if rate := series(run.records, "lr"):
        parts.append(Curves("learning rate", (rate,), from_zero=True, marks=marks))
    if run.evaluations:
        parts.append(PageTable("evaluations on held-out samples", _evaluations(run.evaluations)))
    known = ("validation_loss", "answer_accuracy", "answer_accuracy_by_kind", "free_running_accuracy", "questions")
    rows = list(_summary({k: v for k, v in run.summary.items() if k not in known or not run.evaluations}))
    if rows:
        parts.append(PageTable("after the last step (summary.json)", [("", "value"), *rows]))
    missing = () if rows or run.evaluations else (NONE_YET,)
    return PageSection("Loss", " ".join(_lead(run, loss, held_out, norm, max_norm)), tuple(parts), missing)


def _lead(run: RunView, loss: Series, held_out: Series, norm: Series, max_norm: float | None) -> Iterator[str]:
    for name, each in (("Training", loss), ("Held out", held_out)):
        if each:
            lowest = min(each.values)
            ends = f"{short(each.values[0], 4)} to {short(each.values[-1], 4)}"
            yield f"{name}: {ends}, lowest {short(lowest, 4)} at step {each.steps[each.values.index(lowest)]:,}."
    wrong = [record["step"] for record in run.records if "loss" in record and number(record["loss"]) is None]
    if wrong:
        more = " and others" if len(wrong) > MOST_NAMED else ""
        named = ", ".join(f"{step:,}" for step in wrong[:MOST_NAMED])
        yield f"{counted(len(wrong), 'step')} without a finite loss: {named}{more}."
    if norm and max_norm:
        share = sum(value > max_norm for value in norm.values) / len(norm.values)
        yield f"Gradients were clipped to norm {max_norm:g} in {share:.0%} of the steps."
    if run.story.resumed:
        yield "Dashed lines in curves are where the run was resumed."
    if run.story.saved:
        yield "Triangles are checkpoints."


def marks_of(run: RunView) -> Marks:
    """The steps of a run, and where it was resumed."""
    steps = [record["step"] for record in (*run.records[:1], *run.records[-1:])]
    return Marks(min(steps, default=0), max(steps, default=0), run.story.resumed)


def _right(run: RunView, marks: Marks) -> Iterator[Curves]:
    """Shares of right answers, where there are evaluations at several steps."""
    kinds = names_in(run.evaluations, "validation", "answer_accuracy_by_kind")[:MOST_KINDS]
    found = [series(run.evaluations, "validation", "answer_accuracy", name="all")]
    if len(found[0].steps) < 2:
        return
    found += [series(run.evaluations, "validation", "answer_accuracy_by_kind", name) for name in kinds]
    found.append(series(run.evaluations, "validation", "free_running_accuracy", name="generated freely"))
    lines = tuple(Series(each.name, each.steps, tuple(100 * x for x in each.values)) for each in found if each)
    yield Curves("right answers to held-out questions", lines, "%", from_zero=True, marks=marks)


def _evaluations(evaluations: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    """The last ones; columns that none of them has are left out."""
    shown = [(line["step"], line["validation"]) for line in tuple(evaluations)[-MOST_ROWS:]]
    kinds = names_in([dict(found) for _, found in shown], "answer_accuracy_by_kind")[:MOST_KINDS]
    columns: list[tuple[str, tuple[str, ...], str]] = [
        ("loss", ("loss",), ".4g"),
        ("right", ("answer_accuracy",), ".1%"),
        *((name, ("answer_accuracy_by_kind", name), ".1%") for name in kinds),
        ("generated freely", ("free_running_accuracy",), ".1%"),
        ("samples", ("samples",), ",.0f"),
    ]
    columns = [each for each in columns if any(number(at(found, *each[1])) is not None for _, found in shown)]
    rows: list[Sequence[str]] = [("after step", *(title for title, *_ in columns), "took")]
    for step, found in shown:
        values = [(number(at(found, *path)), form) for _, path, form in columns]
        took = number(found.get("time_s"))
        cells = ("-" if value is None else format(value, form) for value, form in values)
        rows.append((f"{step:,}", *cells, "-" if took is None else time_text(took)))
    return rows


def _summary(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        title, share = TITLES.get(key, key), "accuracy" in key
        if key in NOT_SHOWN:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{title}: {name}", _figure(each, share)) for name, each in value.items())
        else:
            yield title, _figure(value, share)


def _figure(value: object, share: bool) -> str:
    found = number(value)
    if found is None:
        return str(value)
    return f"{found:.1%}" if share else f"{found:,.4g}" if isinstance(value, float) else f"{found:,}"
