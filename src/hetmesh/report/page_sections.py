"""The parts of a run's page, each of what the run left; what it did not record, with what would record it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import quantiles
from typing import Any

from hetmesh.formatting import counted, ranks_text
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.metrics import amount, short
from hetmesh.records.run_lines import Series, at, names_in, number, series
from hetmesh.records.run_view import DRAWN, LOAD_KEYS, RunView
from hetmesh.report.gantt import gantt_figure
from hetmesh.report.page_parts import Curves, Marks, PageSection, PageTable, PageText, Part, Picture, pairs_figure
from hetmesh.report.page_story import time_text
from hetmesh.report.picture import recipe_figure
from hetmesh.report.text import contents, module_rows, traffic_text, verdict
from hetmesh.report.timeline_text import action_rows, action_times, bubble_rows, headline
from hetmesh.report.values import RecipeView
from hetmesh.simulate import MemoryFit, Timeline

BESIDE = "the table beside it has its figures"
RECORD = "no step was recorded: [profiling] timeline_step has not come yet, or timeline is false"
LOGGED = "no logged step is there yet; they are every [metrics] log_freq steps, and the last one"
NO_RECIPE = "what the recipe means is not known here (see the note above)"
NO_PREDICTION = "nothing was predicted: a module's sizes or the machine's peak are not known (--metrics.machine NAME)"
NO_VALIDATION = "no validation yet; [validation] freq = N evaluates every N steps, else after the last one"
WAIT_WORDS = {
    "compute": "computes",
    "dp-gather": "gathers parameters",
    "dp-scatter": "sums gradients",
    "pp-warmup": "waits for its first work",
    "pp-cooldown": "waits after its last",
    "pp-other": "waits in between",
    "in-layers": "collectives in layers",
    "peak": "memory",
}
"""Classes of bubbles, as a table's head says them."""
SUMMARY_WORDS = {
    "validation_loss": "loss on held-out samples",
    "answer_accuracy": "right answers",
    "answer_accuracy_by_kind": "right answers",
    "drawn_accuracy": "drawn as asked",
    "questions": "questions",
    "free_running_accuracy": "right answers, generated freely",
    "free_running_questions": "questions answered freely",
    "free_running_unended": "answers without an end",
    "skipped_steps": "steps left out",
    "samples_skipped": "samples that could not be read",
}
"""Keys of summary.json as a table says them; others are shown as they are."""
IN_HEAD = ("steps", "ranks", "train_seconds", "loss", "stopped_by_on_step")  # of the page
IN_EVALUATIONS = (
    *("validation_loss", "validation_losses", "answer_accuracy", "answer_accuracy_by_kind", "drawn_accuracy"),
    *("free_running_accuracy", "questions"),
)
DATA_COUNTS = {
    "samples_skipped": "samples that could not be read",
    "samples_without_target": "samples without a target",
    "media_dropped": "media items that did not fit into seq_len",
    "tokens_dropped": "tokens that did not fit into seq_len",
}
EXPERT_CURVES = {
    "max_over_mean": "tokens of the busiest expert over the mean",
    "without_tokens": "experts without a token, in all blocks",
    "balance_loss": "load-balancing loss, without its coefficient",
}
LOAD_TITLES = ("largest load of a microbatch on a lane, over the mean", "standard deviation, over the mean")
MODULES = (
    "modules; forward and backward: FLOPs of one step over all ranks, in the first global batch; state: parameters, "
    "gradients and the optimizer's; imbalance: rows of the busiest lane over the mean lane's"
)
VISIBLE_SHARE = 0.002  # share of the step: shorter bars cannot be seen
MAX_RANK_ROWS, MAX_NAMED_STEPS = 32, 8
MAX_EVALUATIONS, MAX_KINDS = 12, 6  # the last ones; kinds of questions, as curves and columns


def sections(run: RunView, view: RecipeView | None, recipe: Recipe | None = None) -> tuple[PageSection, ...]:
    """All parts, in the order in which a reader wants them."""
    loss = _loss(run, recipe.training.max_norm if recipe else None)
    parts = (loss, _answers(run), _speed(run), _time(run), _step(run), _load(run), _experts(run))
    more = (_layout(view), _boundaries(run, view), _memory(run, view), _data(run))
    return (*(part for part in parts if part), *more)


def _curves(run: RunView, caption: str, lines: Sequence[Series], unit: str = "") -> tuple[Curves, ...]:
    """From 0; none where no step has any of the numbers."""
    shown = tuple(line for line in lines if line)
    return (Curves(caption, shown, unit, from_zero=True, marks=_marks(run)),) if shown else ()


def _marks(run: RunView) -> Marks:
    steps = [record["step"] for record in (*run.records[:1], *run.records[-1:])]
    return Marks(min(steps, default=0), max(steps, default=0), run.story.resumed)


def _loss(run: RunView, max_norm: float | None) -> PageSection:
    """Curves and evaluations; gradients were clipped at `max_norm`: None: not known, 0: they were not."""
    loss, norm = series(run.records, "loss", name="training"), series(run.records, "grad_norm")
    held_out = series(run.evaluations, "validation", "loss", name="held-out samples")
    saved = _marks(run)._replace(saved=tuple(dict.fromkeys(run.story.saved)))
    several = names_in(run.records, "losses")
    parts: list[Part] = []
    if shown := tuple(line for line in (loss, held_out) if line):
        caption = "loss, the weighted sum of all" if several else "loss, nats per target token"
        parts.append(Curves(caption, shown, marks=saved))
    each = [series(run.records, "losses", name) for name in several]
    each += [series(run.evaluations, "validation", "losses", name, name=f"{name}, held-out") for name in several]
    parts += _curves(run, "each loss, per unit that it counts, without its weight", each)
    kinds = names_in(run.evaluations, "validation", "answer_accuracy_by_kind")[:MAX_KINDS]
    right = [series(run.evaluations, "validation", "answer_accuracy", name="all")]
    if len(right[0].steps) > 1:
        right += [series(run.evaluations, "validation", "answer_accuracy_by_kind", name) for name in kinds]
        right.append(series(run.evaluations, "validation", "free_running_accuracy", name="generated freely"))
        parts += _curves(run, "right answers to held-out questions", [line.times(100) for line in right], "%")
    parts += _curves(run, "norm of the gradient, before clipping", [norm])
    parts += _curves(run, "learning rate", [series(run.records, "lr")])
    if run.evaluations:
        parts.append(PageTable("evaluations on held-out samples", _evaluations(run.evaluations, kinds)))
    hidden = (*IN_HEAD, *(IN_EVALUATIONS if run.evaluations else ()))
    rows = list(_summary({key: value for key, value in run.summary.items() if key not in hidden}))
    if rows:
        parts.append(PageTable("after the last step (summary.json)", [("", "value"), *rows]))
    missing = () if rows or run.evaluations else (NO_VALIDATION,)
    return PageSection("Loss", " ".join(_loss_lead(run, loss, held_out, norm, max_norm)), tuple(parts), missing)


def _loss_lead(run: RunView, loss: Series, held_out: Series, norm: Series, max_norm: float | None) -> Iterator[str]:
    for name, line in (("Training", loss), ("Held out", held_out)):
        if line:
            lowest = min(line.values)
            ends = f"{short(line.values[0], 4)} to {short(line.values[-1], 4)}"
            yield f"{name}: {ends}, lowest {short(lowest, 4)} at step {line.steps[line.values.index(lowest)]:,}."
    wrong = [record["step"] for record in run.records if "loss" in record and number(record["loss"]) is None]
    if wrong:
        more = " and others" if len(wrong) > MAX_NAMED_STEPS else ""
        named = ", ".join(f"{step:,}" for step in wrong[:MAX_NAMED_STEPS])
        yield f"{counted(len(wrong), 'step')} without a finite loss: {named}{more}."
    if norm and max_norm:
        share = sum(value > max_norm for value in norm.values) / len(norm.values)
        yield f"Gradients were clipped to norm {max_norm:g} in {share:.0%} of the steps."
    if run.story.resumed:
        yield "Dashed lines in curves are where the run was resumed."
    if run.story.saved:
        yield "Triangles are checkpoints."


def _evaluations(evaluations: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[Sequence[str]]:
    """The last ones; columns that none of them has are left out."""
    shown = [(line["step"], line["validation"]) for line in evaluations[-MAX_EVALUATIONS:]]
    columns: list[tuple[str, tuple[str, ...], str]] = [
        ("loss", ("loss",), ".4g"),
        *((f"loss of {name}", ("losses", name), ".4g") for name in names_in(evaluations, "validation", "losses")),
        ("drawn as asked", ("drawn_accuracy",), ".1%"),
        ("right", ("answer_accuracy",), ".1%"),
        *((name, ("answer_accuracy_by_kind", name), ".1%") for name in kinds),
        ("generated freely", ("free_running_accuracy",), ".1%"),
        ("samples", ("samples",), ",.0f"),
    ]
    columns = [column for column in columns if any(number(at(scores, *column[1])) is not None for _, scores in shown)]
    rows: list[Sequence[str]] = [("after step", *(title for title, *_ in columns), "took")]
    for step, scores in shown:
        values = [(number(at(scores, *path)), form) for _, path, form in columns]
        took = number(scores.get("time_s"))
        cells = ("-" if value is None else format(value, form) for value, form in values)
        rows.append((f"{step:,}", *cells, "-" if took is None else time_text(took)))
    return rows


def _summary(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        title = SUMMARY_WORDS.get(key, key)
        inner = {f"{title}: {name}": score for name, score in value.items()} if isinstance(value, Mapping) else None
        for name, score in ({title: value} if inner is None else inner).items():
            if (found := number(score)) is None:
                yield name, str(score)
            elif "accuracy" in key:
                yield name, f"{found:.1%}"
            else:
                yield name, f"{found:,.4g}" if isinstance(found, float) else f"{found:,}"


def _answers(run: RunView) -> PageSection | None:
    how, text = (str(run.answers.get(key, "")) for key in ("how", "text"))
    lead = f"Held-out questions with their pictures, as the run answered them at its end: {how}."
    return PageSection("Answers", lead, (PageText("held-out questions and answers", text),)) if text else None


def _speed(run: RunView) -> PageSection:
    seconds, usual = series(run.records, "time_s"), series(run.usual, "time_s")
    mfu = [series(run.records, "module_mfu", name) for name in names_in(run.records, "module_mfu")]
    mfu.append(series(run.records, "mfu", name="all ranks"))
    percent = [line.times(100) for line in mfu]
    lending = [series(run.records, "lending", f"{name}_s", name=name) for name in ("gap", "lent")]
    parts = (
        *_curves(run, "tokens per second of all ranks, without padding", [series(run.records, "tokens_per_s")]),
        *_curves(run, "seconds per step", [seconds], "s"),
        *_curves(run, "seconds in collectives beside which encoders may run (gap), and did (lent)", lending, "s"),
        *_curves(run, "model FLOPs utilisation (MFU); of a module: on its own ranks", percent, "%"),
    )
    lead = ""
    if len(seconds.values) > 1:
        tenths = quantiles(usual.values if len(usual.values) > 1 else seconds.values, n=10, method="inclusive")
        since = f" since the run went on after step {run.story.resumed[-1]:,}" if run.story.resumed else ""
        lead = f"A step takes {time_text(tenths[4])} (median{since}), nine of ten at most {time_text(tenths[8])}"
        first = f"; the first, which also starts everything, {time_text(seconds.values[0])}"
        lead += (first if seconds.steps[0] == 1 else "") + "."
    missing = () if any(percent) else ("no MFU: the peak of the machine is not known; --metrics.machine NAME",)
    return PageSection("Throughput", lead, parts, missing)


def _time(run: RunView) -> PageSection:
    name = "Where the time went"
    if not run.timelines:
        return PageSection(name, missing=(RECORD,))
    longest = max(timeline.makespan for timeline in run.timelines.values())
    times = action_times(run.timelines)
    milliseconds = lambda seconds: None if seconds is None else 1e3 * seconds  # noqa: E731
    bars = tuple(
        (time.label, milliseconds(time.predicted), milliseconds(time.measured))
        for time in times
        if time.kind != "SEND"  # they run beside computation
        and max(time.predicted or 0.0, time.measured or 0.0) > VISIBLE_SHARE * longest
    )
    caption = "computation, mean of the ranks that do it"
    parts: list[Part] = [Picture(caption, f"{caption}; {BESIDE}", partial(pairs_figure, bars, "ms"), "pairs")]
    parts = parts if bars else []
    parts.append(PageTable("predicted beside measured", list(action_rows(run.timelines))))
    for which, timeline in run.timelines.items():
        parts.append(PageTable(f"who waits, and why: {which}, shares of the step", _waits(timeline)))
    missing = [f"no {which} step" for which in ("predicted", "measured") if which not in run.timelines]
    missing = [NO_PREDICTION] if missing == ["no predicted step"] else missing
    lead = f"Step {run.step}: {'; '.join(f'{which} {headline(line)}' for which, line in run.timelines.items())}."
    if any(time.kind == "SEND" and time.measured for time in times):
        lead += " Measured transfers last until the rank that receives looks, so they hold its own work too."
    return PageSection(name, lead, tuple(parts), tuple(missing))


def _waits(timeline: Timeline) -> list[Sequence[str]]:
    """Shares of the step per rank, without columns that hold nothing, in words."""
    head, *rows = bubble_rows(timeline)
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if not i or set(column) - {"-", "?"}]
    return [[row[i] for i in used] for row in ([WAIT_WORDS.get(name, name) for name in head], *rows)]


def _step(run: RunView) -> PageSection:
    if not run.timelines:
        return PageSection("A recorded step", missing=(RECORD,))
    caption = f"step {run.step}: who computed when"
    alt = f"Gantt chart of {' and '.join(run.timelines)}, {caption}; the tables before it have its figures"
    return PageSection("A recorded step", "", (Picture(caption, alt, partial(gantt_figure, run.timelines), "wide"),))


def _load(run: RunView) -> PageSection:
    if run.load is None:
        return PageSection("Load balance", missing=(LOGGED,))
    steps, modules = run.load.steps, run.load.modules
    curves = [
        Curves(
            f"{title}; dotted: as drawn",
            tuple(Series(name, steps, numbers[key]) for name, numbers in modules.items()),
            dotted=tuple(Series(name, steps, numbers[DRAWN + key]) for name, numbers in modules.items()),
            marks=_marks(run),
        )
        for key, title in zip(LOAD_KEYS, LOAD_TITLES, strict=False)
    ]
    lead = f"How even microbatches were: 1.0 is even. {counted(len(steps), 'logged step')}."
    return PageSection("Load balance", lead, (*curves, PageTable("means", run.load.rows())))


def _experts(run: RunView) -> PageSection | None:
    modules = names_in(run.records, "experts")
    if not modules:
        return None
    lines = lambda key: [series(run.records, "experts", name, key, name=name) for name in modules]  # noqa: E731
    last = "; ".join(f"{line.name} {line.values[-1]:.2f}" for line in lines("max_over_mean") if line)
    lead = f"Tokens of the busiest expert over those of the mean one, at the end: {last}."
    curves = (_curves(run, caption, lines(key)) for key, caption in EXPERT_CURVES.items())
    return PageSection("Experts", lead, tuple(chain.from_iterable(curves)))


def _layout(view: RecipeView | None) -> PageSection:
    if view is None:
        return PageSection("Layout", missing=(NO_RECIPE,))
    caption = "modules on ranks"
    picture = Picture(caption, f"{caption}; {BESIDE}", partial(recipe_figure, view), "ranks")
    lead = f"{counted(view.ranks, 'rank')}; {view.optimizer}'s state is counted in {view.dtype}."
    if view.idle_ranks:
        lead += f" No module uses rank {ranks_text(view.idle_ranks)}."
    return PageSection("Layout", lead, (picture, PageTable(MODULES, module_rows(view), numbers=False)))


def _boundaries(run: RunView, view: RecipeView | None) -> PageSection:
    planned = {boundary.name: boundary for boundary in view.boundaries} if view else {}
    names = dict.fromkeys((*planned, *names_in(run.records, "boundary_bytes")))
    if not names:
        return PageSection("Boundaries", missing=("there is one module" if view else LOGGED,))
    records = run.usual if names_in(run.usual, "boundary_bytes") else run.records
    measured = bool(names_in(records, "boundary_bytes"))
    seconds = series(records, "time_s")
    rows: list[Sequence[str]] = [("boundary", "received forward", "backward", "longest wait", "of a step")]
    for name in names:
        sizes = [series(records, "boundary_bytes", name, way) for way in ("forward", "backward")]
        received = [f"{amount(size.median)}B" if size else "-" for size in sizes]
        wait = series(records, "wait_s", name)
        share = f"{wait.median / seconds.median:.1%}" if wait and seconds and seconds.median else "-"
        rows.append((name, *received, f"{1e3 * wait.median:,.3g} ms" if wait else "-", share))
    plan: list[Sequence[str]] = [("boundary", "rows", "from", "to", "forward", "backward")]
    for boundary in planned.values():
        back = traffic_text(boundary.backward) if boundary.backward else "none: nothing upstream is trained"
        layouts = boundary.source_layout, boundary.destination_layout
        shape = f"{boundary.shape[0]:,} x {boundary.shape[1]:,}"
        plan.append((boundary.name, shape, *layouts, traffic_text(boundary.forward), back))
    caption = "measured in the median logged step: bytes over all ranks, and the rank that waited longest"
    parts = [PageTable(caption, rows)] if measured else []
    parts += [PageTable("planned: the first microbatch", plan, numbers=False)] if planned else []
    missing = [*([] if measured else [LOGGED]), *([] if planned else [NO_RECIPE])]
    return PageSection("Boundaries", "", tuple(parts), tuple(missing))


def _memory(run: RunView, view: RecipeView | None) -> PageSection:
    memory, fit, parts, lead = series(run.records, "memory_bytes"), view.fit if view else None, list[Part](), ""
    if memory:
        most = max(series(run.usual, "memory_bytes").values, default=max(memory.values))
        lead = f"Measured: at most {amount(most)}B on any rank{_measured_of(run)}."
        parts += _curves(run, "most that any rank has taken since the run's start", [memory.times(1e-9)], "GB")
    if fit is not None:
        lead += f" Predicted: {verdict(fit)}."
        parts.append(PageTable("predicted: when each rank is fullest, and of what", _rank_rows(fit), numbers=False))
    missing = [] if memory else [LOGGED]
    missing += [] if fit else ["nothing is predicted: " + ("sizes of a module are not known" if view else NO_RECIPE)]
    return PageSection("Memory", lead.strip(), tuple(parts), tuple(missing))


def _measured_of(run: RunView) -> str:
    """What is measured, which depends on the device."""
    device = run.story.starts[-1].device if run.story.starts else ""
    if not device:
        return ": tensors on a GPU, the whole process on a CPU"
    whole = ": the whole process with Python and libraries, which no prediction counts"
    return whole if device == "cpu" else f" ({device}): what tensors took at once"


def _rank_rows(fit: MemoryFit) -> list[Sequence[str]]:
    """Ranks that hold the same share a row."""
    alike: dict[Any, list[int]] = {}
    for rank, memory in fit.ranks.items():
        alike.setdefault(memory, []).append(rank)
    rows: list[Sequence[str]] = [("ranks", "bytes", "in", "of what")]
    for memory, ranks in list(alike.items())[:MAX_RANK_ROWS]:
        rows.append((ranks_text(tuple(ranks)), f"{amount(memory.total)}B", memory.at, contents(memory)))
    return rows


def _data(run: RunView) -> PageSection:
    wait = series(run.records, "data", "wait_s")
    read, needed = (series(run.usual, "data", key) for key in ("bytes_read", "bytes_needed"))
    sources = [series(run.records, "samples_by_source", name) for name in names_in(run.records, "samples_by_source")]
    counts = [(words, series(run.records, key)) for key, words in DATA_COUNTS.items()]
    counts = [(words, count) for words, count in counts if count]
    counts += [(f"samples of {source.name}", source) for source in sources]
    rows = [(words, f"{sum(count.values):,.0f}") for words, count in counts]
    if read and needed and any(read.values):
        rows.append(("bytes read in the median logged step", f"{amount(read.median)}B"))
        rows.append(("bytes needed in it", f"{amount(needed.median)}B"))
    if load := series(run.usual, "data", "load_s"):
        rows.append(("seconds of preparing samples in it, on the rank that took longest", f"{load.median:.3g}"))
    decoded, wanted = (series(run.records, "data", key) for key in ("frames_decoded", "frames_needed"))
    if decoded and wanted:
        over = sum(decoded.values) / max(sum(wanted.values), 1)
        rows.append(("frames of videos decoded in logged steps, over those needed", f"{over:.3f}"))
    caption = "the longest wait of any rank for its samples, in a step"
    parts: list[Part] = [*_curves(run, caption, [wait.times(1e3)], "ms")]
    parts += [PageTable("over all steps", [("", "number"), *rows])] if rows else []
    lead = "" if rows else "Nothing was cut off, left out or without a target."
    return PageSection("Data", lead, tuple(parts), () if wait else (LOGGED,))
