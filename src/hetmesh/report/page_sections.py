"""The parts of a run's page, each of what the run left; what it did not record, with what would record it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import quantiles
from typing import Any

from hetmesh.formatting import counted, ranks_text
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.metrics import amount
from hetmesh.report.by_action import KINDS, action_rows, action_times
from hetmesh.report.gantt_text import bubble_rows, headline
from hetmesh.report.memory_text import contents, verdict
from hetmesh.report.page_loss import loss_section, marks_of
from hetmesh.report.page_story import story_section, time_text
from hetmesh.report.page_values import Curves, PageSection, PageTable, PageText, Pairs, Picture, Ranks, Steps
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_load import DRAWN, KEYS, TITLES
from hetmesh.report.run_series import Series, at, names_in, series
from hetmesh.report.text import module_rows, traffic_text
from hetmesh.report.values import RecipeView
from hetmesh.simulate import MemoryFit, Timeline

RECORD = "no step was recorded: [profiling] timeline_step has not come yet, or timeline is false"
LOGGED = "no logged step is there yet; they are every [metrics] log_freq steps, and the last one"
NO_RECIPE = "what the recipe means is not known here (see the note above)"
WORDS = {
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
MODULES = (
    "modules; forward and backward: FLOPs of one step over all ranks, in the first global batch; state: parameters, "
    "gradients and the optimizer's; imbalance: rows of the busiest lane over the mean lane's"
)
SEEN = 0.002  # of the step: shorter bars cannot be seen
MOST_ROWS = 32  # of a table of ranks


def sections(run: RunView, view: RecipeView | None, recipe: Recipe | None = None) -> tuple[PageSection, ...]:
    """All parts, in the order in which a reader wants them."""
    loss = loss_section(run, recipe.training.max_norm if recipe else None)
    parts = (loss, _answers(run), _speed(run), _time(run), _step(run), _load(run), _experts(run))
    more = (_layout(view), _boundaries(run, view), _memory(run, view), _data(run), story_section(run))
    return (*(part for part in parts if part), *more)


def _curves(run: RunView, caption: str, lines: Sequence[Series], unit: str = "") -> tuple[Curves, ...]:
    """From 0; none where no step has any of the numbers."""
    shown = tuple(each for each in lines if each)
    return (Curves(caption, shown, unit, from_zero=True, marks=marks_of(run)),) if shown else ()


def _answers(run: RunView) -> PageSection | None:
    how, text = (str(run.answers.get(key, "")) for key in ("how", "text"))
    if not text:
        return None
    lead = f"Held-out questions with their pictures, as the run answered them at its end: {how}."
    return PageSection("Answers", lead, (PageText("held-out questions and answers", text),))


def _speed(run: RunView) -> PageSection:
    seconds, usual = series(run.records, "time_s"), series(run.usual, "time_s")
    modules = names_in(run.records, "module_mfu")
    mfu = [series(run.records, "module_mfu", name) for name in modules]
    mfu.append(series(run.records, "mfu", name="all ranks"))
    percent = [Series(each.name, each.steps, tuple(100 * value for value in each.values)) for each in mfu]
    parts: list[Picture | PageTable] = [
        *_curves(run, "tokens per second of all ranks, without padding", [series(run.records, "tokens_per_s")]),
        *_curves(run, "seconds per step", [seconds], "s"),
        *_curves(run, "model FLOPs utilisation (MFU); of a module: on its own ranks", percent, "%"),
    ]
    lead = ""
    if len(seconds.values) > 1:
        tenths = quantiles(usual.values if len(usual.values) > 1 else seconds.values, n=10, method="inclusive")
        since = f" since the run went on after step {run.story.resumed[-1]:,}" if run.story.resumed else ""
        lead = f"A step takes {time_text(tenths[4])} (median{since}), nine of ten at most {time_text(tenths[8])}"
        first = f"; the first, which also starts everything, {time_text(seconds.values[0])}"
        lead += (first if seconds.steps[0] == 1 else "") + "."
    missing = () if any(percent) else ("no MFU: the peak of the machine is not known; --metrics.machine NAME",)
    return PageSection("Throughput", lead, tuple(parts), missing)


def _time(run: RunView) -> PageSection:
    name = "Where the time went"
    if not run.timelines:
        return PageSection(name, missing=(RECORD,))
    lead = "; ".join(f"{which} {headline(each)}" for which, each in run.timelines.items())
    longest = max(each.makespan for each in run.timelines.values())
    rows = tuple(
        (f"{each.module} {KINDS[each.kind]}".strip(), _ms(each.predicted), _ms(each.measured))
        for each in action_times(run.timelines)
        if each.kind != "SEND"  # they run beside computation
        and max(each.predicted or 0.0, each.measured or 0.0) > SEEN * longest
    )
    tables = [PageTable("predicted beside measured", list(action_rows(run.timelines)))]
    tables += [
        PageTable(f"who waits, and why: {which}, shares of the step", _waits(each))
        for which, each in run.timelines.items()
    ]
    missing = [f"no {which} step" for which in ("predicted", "measured") if which not in run.timelines]
    if missing == ["no predicted step"]:
        missing = [
            "nothing was predicted: sizes of a module, or the machine's peak, are not known (--metrics.machine NAME)"
        ]
    pairs = Pairs("computation, mean of the ranks that do it", rows, "ms")
    lead = f"Step {run.step}: {lead}."
    if any(each.kind == "SEND" and each.measured for each in action_times(run.timelines)):
        lead += " Measured transfers last until the rank that receives looks, so they hold its own work too."
    return PageSection(name, lead, (*([pairs] if rows else []), *tables), tuple(missing))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _waits(timeline: Timeline) -> list[Sequence[str]]:
    """Shares of the step per rank, without columns that hold nothing, in words."""
    head, *rows = bubble_rows(timeline)
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if not i or set(column) - {"-", "?"}]
    return [[row[i] for i in used] for row in ([WORDS.get(name, name) for name in head], *rows)]


def _step(run: RunView) -> PageSection:
    name = "A recorded step"
    if not run.timelines:
        return PageSection(name, missing=(RECORD,))
    return PageSection(name, "", (Steps(f"step {run.step}: who computed when", run.timelines),))


def _load(run: RunView) -> PageSection:
    name = "Load balance"
    if run.load is None:
        return PageSection(name, missing=(LOGGED,))
    lead = f"How even microbatches were: 1.0 is even. {counted(len(run.load.steps), 'logged step')}."
    steps, modules = run.load.steps, run.load.modules
    curves = (
        Curves(
            f"{title}; dotted: as drawn",
            tuple(Series(name, steps, each[key]) for name, each in modules.items()),
            dotted=tuple(Series(name, steps, each[DRAWN + key]) for name, each in modules.items()),
            marks=marks_of(run),
        )
        for key, title in zip(KEYS, TITLES, strict=False)
    )
    return PageSection(name, lead, (*curves, PageTable("means", run.load.rows())))


def _experts(run: RunView) -> PageSection | None:
    modules = names_in(run.records, "experts")
    if not modules:
        return None
    busiest = [series(run.records, "experts", name, "max_over_mean", name=name) for name in modules]
    balance = [series(run.records, "experts", name, "balance_loss", name=name) for name in modules]
    none = [series(run.records, "experts", name, "without_tokens", name=name) for name in modules]
    last = "; ".join(f"{each.name} {each.values[-1]:.2f}" for each in busiest if each)
    return PageSection(
        "Experts",
        f"Tokens of the busiest expert over those of the mean one, at the end: {last}.",
        (
            *_curves(run, "tokens of the busiest expert over the mean", busiest),
            *_curves(run, "experts without a token, in all blocks", none),
            *_curves(run, "load-balancing loss, without its coefficient", balance),
        ),
    )


def _layout(view: RecipeView | None) -> PageSection:
    if view is None:
        return PageSection("Layout", missing=(NO_RECIPE,))
    parts = (Ranks("modules on ranks, and what each rank holds for the whole run", view),)
    lead = f"{counted(view.ranks, 'rank')}; {view.optimizer}'s state is counted in {view.dtype}."
    if view.idle_ranks:
        lead += f" No module uses rank {ranks_text(view.idle_ranks)}."
    return PageSection("Layout", lead, (*parts, PageTable(MODULES, module_rows(view), numbers=False)))


def _boundaries(run: RunView, view: RecipeView | None) -> PageSection:
    planned = {boundary.name: boundary for boundary in view.boundaries} if view else {}
    names = dict.fromkeys((*planned, *names_in(run.records, "boundary_bytes")))
    if not names:
        return PageSection("Boundaries", missing=("there is one module" if view else LOGGED,))
    records = run.usual if _measured(run.usual) else run.records
    seconds = series(records, "time_s")
    rows: list[Sequence[str]] = [("boundary", "received forward", "backward", "longest wait", "of a step")]
    for name in names:
        sizes = [series(records, "boundary_bytes", name, way) for way in ("forward", "backward")]
        wait = series(records, "wait_s", name)
        rows.append(
            (
                name,
                *(f"{amount(each.median)}B" if each else "-" for each in sizes),
                f"{1e3 * wait.median:,.3g} ms" if wait else "-",
                f"{wait.median / seconds.median:.1%}" if wait and seconds and seconds.median else "-",
            )
        )
    plan: list[Sequence[str]] = [("boundary", "rows", "from", "to", "forward", "backward")]
    for boundary in planned.values():
        back = traffic_text(boundary.backward) if boundary.backward else "none: nothing upstream is trained"
        layouts = boundary.source_layout, boundary.destination_layout
        shape = f"{boundary.shape[0]:,} x {boundary.shape[1]:,}"
        plan.append((boundary.name, shape, *layouts, traffic_text(boundary.forward), back))
    caption = "measured in the median logged step: bytes over all ranks, and the rank that waited longest"
    parts = [PageTable(caption, rows)] if _measured(records) else []
    parts += [PageTable("planned: the first microbatch", plan, numbers=False)] if planned else []
    missing = [] if _measured(records) else [LOGGED]
    return PageSection("Boundaries", "", tuple(parts), tuple(missing if planned else [*missing, NO_RECIPE]))


def _measured(records: Iterable[Mapping[str, Any]]) -> bool:
    return any(at(record, "boundary_bytes") is not None for record in records)


def _memory(run: RunView, view: RecipeView | None) -> PageSection:
    memory = series(run.records, "memory_bytes")
    parts: list[Picture | PageTable] = []
    lead = ""
    fit = view.fit if view else None
    if memory:
        most = max(series(run.usual, "memory_bytes").values, default=max(memory.values))
        lead = f"Measured: at most {amount(most)}B on any rank{_measured_of(run)}."
        gigabytes = Series("measured", memory.steps, tuple(value / 1e9 for value in memory.values))
        parts += _curves(run, "most that any rank has taken since the run's start", [gigabytes], "GB")
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
    for rank, each in fit.ranks.items():
        alike.setdefault(each, []).append(rank)
    rows: list[Sequence[str]] = [("ranks", "bytes", "in", "of what")]
    for each, ranks in list(alike.items())[:MOST_ROWS]:
        rows.append((ranks_text(tuple(ranks)), f"{amount(each.total)}B", each.at, contents(each)))
    return rows


def _data(run: RunView) -> PageSection:
    wait = series(run.records, "data", "wait_s")
    usual = run.usual
    waits = Series("wait", wait.steps, tuple(1e3 * value for value in wait.values))
    read, needed = (series(usual, "data", key) for key in ("bytes_read", "bytes_needed"))
    sources = [series(run.records, "samples_by_source", name) for name in names_in(run.records, "samples_by_source")]
    rows = [
        (text, f"{sum(found.values):,.0f}")
        for text, key in (
            ("samples that could not be read", "samples_skipped"),
            ("samples without a target", "samples_without_target"),
            ("media items that did not fit into seq_len", "media_dropped"),
            ("tokens that did not fit into seq_len", "tokens_dropped"),
        )
        if (found := series(run.records, key))
    ]
    rows += [(f"samples of {each.name}", f"{sum(each.values):,.0f}") for each in sources]
    if read and needed and any(read.values):
        rows += [("bytes read in the median logged step", f"{amount(read.median)}B")]
        rows += [("bytes needed in it", f"{amount(needed.median)}B")]
    parts: list[Picture | PageTable] = [
        *_curves(run, "the longest wait of any rank for its samples, in a step", [waits], "ms")
    ]
    parts += [PageTable("over all steps", [("", "number"), *rows])] if rows else []
    lead = "" if rows else "Nothing was cut off, left out or without a target."
    return PageSection("Data", lead, tuple(parts), () if wait else (LOGGED,))
