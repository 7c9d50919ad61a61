"""A BalanceView as text (histograms, a table of balancers, what `auto` chose between)."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest

from hetmesh.balance.policies.auto import EVEN_RATIO, MIN_GAIN
from hetmesh.formatting import counted, table
from hetmesh.records.metrics import amount
from hetmesh.report.balance_values import BalancerResult, BalanceView, ExpertUse, Histogram, ModuleSizes

WIDTH = 120
"""Most characters of a line."""
_BAR_LENGTH = 14  # characters


def balance_text(view: BalanceView) -> str:
    """The whole view, in lines of at most `WIDTH` characters."""
    lines = []
    for line in (line.rstrip() for line in _lines(view)):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += [line] if len(line) <= WIDTH else textwrap.wrap(line, WIDTH, subsequent_indent=indent)
    return "\n".join(lines)


def _lines(view: BalanceView) -> Iterator[str]:
    if view.description:
        yield view.description
    batches = counted(view.batches, "global batch", "global batches")
    yield f"{batches} of {counted(view.samples, 'sample')} from {view.source}"
    for module in view.modules:
        yield from ("", *_module(module))
    yield from ("", *_balancers(view), "", *_choices(view))
    for experts in view.experts:
        yield from ("", *_experts(experts))
    yield from ("",) if view.notes else ()
    yield from (f"note: {note}" for note in view.notes)


def _module(module: ModuleSizes) -> Iterator[str]:
    with_ = f", with {', '.join(module.followers)}" if module.followers else ""
    cap = f", at most {module.cap:,} {module.unit} in each" if module.cap is not None else ""
    yield (
        f"{module.name}{with_}: {counted(module.lanes, 'lane')} x "
        f"{counted(module.microbatches, 'microbatch', 'microbatches')}{cap}; {module.mean:,.1f} {module.unit} per "
        f"sample, {module.largest:,} at most; {amount(module.work)}FLOP per microbatch and lane"
    )
    columns = [_histogram(f"{module.unit} per sample", module.samples, 0)]
    columns += [_histogram(f"load over mean: {name}", loads, 2) for name, loads in module.loads.items()]
    for cells in zip_longest(*columns, fillvalue=""):
        yield "  " + "   ".join(cell.ljust(len(column[0])) for cell, column in zip(cells, columns, strict=True))


def _histogram(title: str, histogram: Histogram, decimals: int) -> list[str]:
    """A title and a line per bar, all equally wide."""
    edges = [f"{edge:,.{decimals}f}" for edge in histogram.edges]
    wide, most = max(map(len, edges)), max(histogram.counts, default=0) or 1
    digits = len(str(most))
    lines = [title]
    for i, count in enumerate(histogram.counts):
        length = max(round(_BAR_LENGTH * count / most), count > 0)
        lines.append(f"{edges[i]:>{wide}}..{edges[i + 1]:<{wide}} {'█' * length:<{_BAR_LENGTH}} {count:>{digits}}")
    width = max(map(len, lines))
    return [line.ljust(width) for line in lines]


def _balancers(view: BalanceView) -> Iterator[str]:
    names = [module.name for module in view.modules]
    yield f"every balancer on these batches; steps simulated under schedule {view.schedule} on machine {view.machine}:"
    shown = [result for result in view.balancers if not result.problem]
    columns = [["policy", *(result.name + " *" * result.recipe for result in shown)]]
    columns += [[title, *map(cell, shown)] for title, cell in _CELLS.items()]
    for name in names:
        even = [result.modules[name] for result in shown]
        columns.append([f"{name} max / std", *(f"{e.max_over_mean:.2f} / {e.std_over_mean:.3f}" for e in even)])
    widths = [2 + max(map(len, column)) for column in columns]
    parts, rest = [0], list(range(1, len(columns)))
    while rest:  # as many tables as it takes
        parts.append(rest.pop(0))
        if not rest or sum(widths[i] for i in (*parts, rest[0])) > WIDTH - 2:
            for line in table([*zip(*(columns[i] for i in parts), strict=True)], numbers=True):
                yield f"  {line}"
            parts = [0]
    best, taken = max(shown, key=lambda result: result.gain), next(result for result in shown if result.recipe)
    if best.gain > (1 + MIN_GAIN) * taken.gain:
        yield f"  fastest here: {best.name}, {best.gain:.3f}x; the recipe's {taken.name}: {taken.gain:.3f}x"
    yield "  max / std: largest load of a microbatch on a lane, and their standard deviation, both over the mean load"
    yield f"  gain: throughput over none; deferred: samples of a batch; padding: of what {names[-1]} computes"
    yield "  to compute: CPU time of one assignment; *: what the recipe trains with"


_CELLS: Mapping[str, Callable[[BalancerResult], str]] = {
    "step": lambda result: _seconds(result.seconds),
    "gain": lambda result: f"{result.gain:.3f}x",
    "deferred": lambda result: f"{result.deferred:.3g}",
    "padding": lambda result: f"{list(result.modules.values())[-1].padding:.1%}",
    "to compute": lambda result: f"{result.milliseconds:.1f} ms",
}


def _choices(view: BalanceView) -> Iterator[str]:
    chosen = Counter(tried.name for batch in view.choices for tried in batch if tried.chosen)
    if not chosen:
        return
    yield "auto picks " + ", ".join(f"{name} ({counted(n, 'batch', 'batches')})" for name, n in chosen.most_common())
    first = view.choices[0]
    if first[0].score is None:
        above = f"{EVEN_RATIO - 1:.0%}"
        yield f"  in the first no microbatch is above the mean by more than {above}, so nothing else is tried"
        return
    yield f"  what it compared for the first batch; a later one is taken if it is faster by {MIN_GAIN:.1%}:"
    rows = [("candidate", "score", "simulated step", "")]
    for tried in first:
        score = "" if tried.score is None else f"{tried.score:.3f}"
        rows.append((tried.name, score, _seconds(tried.seconds), "chosen" if tried.chosen else ""))
    yield from (f"    {line}" for line in table(rows, numbers=True))
    yield "  score: length of the step by the recurrence that it compares with (1F1B, messages free), the first being 1"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"


def _experts(use: ExpertUse) -> Iterator[str]:
    yield (
        f"experts of {use.name}: {counted(use.blocks, 'block')} of {use.count}, of which a token has "
        f"{use.chosen}, over {counted(use.ranks, 'rank')}; {use.tokens:,.1f} tokens per expert and step"
    )
    if not use.steps:
        yield "  not measured by a run of this recipe: routing, which depends on weights, is taken to be even"
        return
    yield (
        f"  max / mean tokens of an expert, as its run measured: {use.max_over_mean:.2f} over "
        f"{counted(use.steps, 'logged step')}, {use.last_max_over_mean:.2f} in step {use.last}, where "
        f"{counted(use.without_tokens, 'expert')} got none"
    )
