"""The parts of a run's page, each of what the run left; what it did not record, with what would record it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import quantiles
from typing import Any

from hetmesh.report.by_action import KINDS, action_rows, action_times
from hetmesh.report.gantt_text import bubble_rows, headline
from hetmesh.report.memory_text import contents, verdict
from hetmesh.report.page_values import Curves, PageSection, PageTable, Pairs, Picture, Ranks, Steps
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_load import DRAWN, KEYS, TITLES
from hetmesh.report.run_series import Series, at, names_in, number, series
from hetmesh.report.text import module_rows, traffic_text
from hetmesh.report.values import RecipeView
from hetmesh.simulate import MemoryFit, Timeline
from hetmesh.training.metrics import amount, short
from hetmesh.training.wording import counted, ranks_text

RECORD = "no step was recorded; train with --profiling.timeline true"
LOGGED = "no logged step is there yet; they are every [metrics] log_freq steps, and the last one"
NO_RECIPE = "what the recipe means is not known here (see the note above)"
WORDS = {
    "compute": "computes",
    "dp-gather": "gathers parameters",
    "dp-scatter": "sums gradients",
    "pp-warmup": "waits for its first work",
    "pp-cooldown": "waits after its last",
    "pp-other": "waits in between",
    "tp": "collectives in layers",
    "peak": "memory",
}
"""Classes of bubbles, as a table's head says them."""
SEEN = 0.002  # of the step: shorter bars cannot be seen
MOST_ROWS = 32  # of a table of ranks


def sections(run: RunView, view: RecipeView | None) -> tuple[PageSection, ...]:
    """All parts, in the order in which a reader wants them."""
    parts = (_loss(run), _speed(run), _time(run), _step(run), _load(run), _experts(run))
    return (*(part for part in parts if part), _layout(view), _boundaries(run, view), _memory(run, view), _data(run))


def _curves(caption: str, lines: Sequence[Series], unit: str = "", from_zero: bool = False) -> tuple[Curves, ...]:
    """None where no step has any of the numbers."""
    shown = tuple(each for each in lines if each)
    return (Curves(caption, shown, unit, from_zero),) if shown else ()


def _loss(run: RunView) -> PageSection:
    loss = series(run.records, "loss")
    parts: list[Picture | PageTable] = [
        *_curves("loss per target token", [loss]),
        *_curves("norm of the gradient, before clipping", [series(run.records, "grad_norm")], from_zero=True),
        *_curves("learning rate", [series(run.records, "lr")], from_zero=True),
    ]
    if rows := list(_scores(run.summary)):
        parts.append(PageTable("after the last step, on held-out samples", [("", "value"), *rows]))
    missing = [] if rows else ["no validation is recorded; it is in summary.json once the run is over"]
    lead = ""
    if loss:
        lowest = min(loss.values)
        lead = (
            f"From {short(loss.values[0], 4)} to {short(loss.values[-1], 4)}, lowest {short(lowest, 4)} at step "
            f"{loss.steps[loss.values.index(lowest)]:,}."
        )
    if wrong := sum("loss" in record and number(record["loss"]) is None for record in run.records):
        lead += f" {counted(wrong, 'step')} without a finite loss."
    return PageSection("Loss", lead, tuple(parts), tuple(missing))


def _scores(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in summary.items():
        if key in ("steps", "ranks", "train_seconds", "loss"):
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}: {name}", _figure(each)) for name, each in value.items())
        else:
            yield key, _figure(value)


def _figure(value: object) -> str:
    found = number(value)
    return str(value) if found is None else f"{found:,.4g}" if isinstance(value, float) else f"{found:,}"


def _speed(run: RunView) -> PageSection:
    seconds = series(run.records, "time_s")
    modules = names_in(run.records, "module_mfu")
    mfu = [series(run.records, "module_mfu", name) for name in modules]
    mfu.append(series(run.records, "mfu", name="all ranks"))
    percent = [Series(each.name, each.steps, tuple(100 * value for value in each.values)) for each in mfu]
    parts: list[Picture | PageTable] = [
        *_curves("tokens per second, without padding", [series(run.records, "tokens_per_s")], from_zero=True),
        *_curves("model FLOPs utilisation", percent, "%", from_zero=True),
    ]
    lead = ""
    if len(seconds.values) > 1:
        later = seconds.values[1:] if len(seconds.values) > 2 else seconds.values
        tenths = quantiles(later, n=10, method="inclusive")
        lead = (
            f"A step takes {tenths[4]:.3g} s (median), nine of ten at most {tenths[8]:.3g} s; the first, which also "
            f"starts everything, {seconds.values[0]:.3g} s."
        )
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
    pairs = Pairs("computation of the mean rank", rows, "ms")
    return PageSection(name, f"Step {run.step}: {lead}.", (*([pairs] if rows else []), *tables), tuple(missing))


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
            *_curves("tokens of the busiest expert over the mean", busiest, from_zero=True),
            *_curves("experts without a token, in all blocks", none, from_zero=True),
            *_curves("load-balancing loss, without its coefficient", balance, from_zero=True),
        ),
    )


def _layout(view: RecipeView | None) -> PageSection:
    if view is None:
        return PageSection("Layout", missing=(NO_RECIPE,))
    parts = (Ranks("modules on ranks, and what each rank holds for the whole run", view),)
    lead = f"{counted(view.ranks, 'rank')}; {view.optimizer}'s state is counted in {view.dtype}."
    if view.idle_ranks:
        lead += f" No module uses rank {ranks_text(view.idle_ranks)}."
    return PageSection("Layout", lead, (*parts, PageTable("modules", module_rows(view), numbers=False)))


def _boundaries(run: RunView, view: RecipeView | None) -> PageSection:
    planned = {boundary.name: boundary for boundary in view.boundaries} if view else {}
    names = dict.fromkeys((*planned, *names_in(run.records, "boundary_bytes")))
    if not names:
        return PageSection("Boundaries", missing=("there is one module" if view else LOGGED,))
    seconds = series(run.records, "time_s")
    rows: list[Sequence[str]] = [("boundary", "received forward", "backward", "longest wait", "of a step")]
    for name in names:
        sizes = [series(run.records, "boundary_bytes", name, way) for way in ("forward", "backward")]
        wait = series(run.records, "wait_s", name)
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
    parts = [PageTable("measured: the median logged step, over all ranks", rows)] if _measured(run) else []
    parts += [PageTable("planned: the first microbatch", plan, numbers=False)] if planned else []
    missing = [] if _measured(run) else [LOGGED]
    return PageSection("Boundaries", "", tuple(parts), tuple(missing if planned else [*missing, NO_RECIPE]))


def _measured(run: RunView) -> bool:
    return any(at(record, "boundary_bytes") is not None for record in run.records)


def _memory(run: RunView, view: RecipeView | None) -> PageSection:
    memory = series(run.records, "memory_bytes")
    parts: list[Picture | PageTable] = []
    lead = ""
    if memory:
        lead = f"At most {amount(max(memory.values))}B on any rank: tensors on a GPU, the whole process on a CPU."
    fit = view.fit if view else None
    if fit is not None:
        lead += f" Predicted: {verdict(fit)}."
        parts.append(PageTable("predicted: when each rank is fullest, and of what", _rank_rows(fit), numbers=False))
    missing = [] if memory else [LOGGED]
    missing += [] if fit else ["nothing is predicted: " + ("sizes of a module are not known" if view else NO_RECIPE)]
    return PageSection("Memory", lead.strip(), tuple(parts), tuple(missing))


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
    waits = Series("wait", wait.steps, tuple(1e3 * value for value in wait.values))
    read, needed = (series(run.records, "data", key) for key in ("bytes_read", "bytes_needed"))
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
        *_curves("the longest wait for samples of any rank", [waits], "ms", from_zero=True)
    ]
    parts += [PageTable("over all steps", [("", "number"), *rows])] if rows else []
    lead = "" if rows else "Nothing was cut off, left out or without a target."
    return PageSection("Data", lead, tuple(parts), () if wait else (LOGGED,))
