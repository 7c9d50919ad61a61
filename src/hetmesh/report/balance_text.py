"""A BalanceView as text: histograms, a table of balancers, what `auto` chose between."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from hetmesh.balance.imbalance import ModuleLoad
from hetmesh.balance.policies.auto import EVEN, MARGIN
from hetmesh.formatting import counted, table
from hetmesh.records.metrics import amount
from hetmesh.report.balance_values import BalancerResult, BalanceView, Candidate, Histogram, ModuleSizes

WIDTH = 120
"""Most characters of a line."""
_BAR = 14


def balance_text(view: BalanceView) -> str:
    """The whole view, in lines of at most `WIDTH` characters."""
    return "\n".join(part for line in _lines(view) for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    line = line.rstrip()
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return [line] if len(line) <= WIDTH else textwrap.wrap(line, WIDTH, subsequent_indent=indent)


def _lines(view: BalanceView) -> Iterator[str]:
    if view.description:
        yield view.description
    batches = counted(view.batches, "global batch", "global batches")
    yield f"{batches} of {counted(view.samples, 'sample')} from {view.source}"
    for module in view.modules:
        yield ""
        yield from _module(module)
    yield ""
    yield from _balancers(view)
    yield ""
    yield from _choices(view)
    for experts in view.experts:
        yield ""
        yield from experts.as_text()
    if view.notes:
        yield ""
    for note in view.notes:
        yield f"note: {note}"


def _module(module: ModuleSizes) -> Iterator[str]:
    with_ = f", with {', '.join(module.followers)}" if module.followers else ""
    cap = f", at most {module.cap:,} {module.unit} in each" if module.cap is not None else ""
    yield (
        f"{module.name}{with_}: {counted(module.lanes, 'lane')} x "
        f"{counted(module.microbatches, 'microbatch', 'microbatches')}{cap}; {module.mean:,.1f} {module.unit} per "
        f"sample, {module.largest:,} at most; {amount(module.work)}FLOP per microbatch and lane"
    )
    columns = [_histogram(f"{module.unit} per sample", module.samples, 0)]
    columns += [_histogram(f"load over mean: {name}", each, 2) for name, each in module.loads.items()]
    for cells in zip_longest(*columns, fillvalue=""):
        yield "  " + "   ".join(cell.ljust(len(column[0])) for cell, column in zip(cells, columns, strict=True))


def _histogram(title: str, histogram: Histogram, decimals: int) -> list[str]:
    """A title and a line per bar, all equally wide."""
    edges = [f"{edge:,.{decimals}f}" for edge in histogram.edges]
    wide, most = max(map(len, edges)), max(histogram.counts, default=0) or 1
    digits = len(str(most))
    lines = [title]
    for i, count in enumerate(histogram.counts):
        length = max(round(_BAR * count / most), count > 0)
        lines.append(f"{edges[i]:>{wide}}..{edges[i + 1]:<{wide}} {'█' * length:<{_BAR}} {count:>{digits}}")
    width = max(map(len, lines))
    return [line.ljust(width) for line in lines]


def _balancers(view: BalanceView) -> Iterator[str]:
    names = [module.name for module in view.modules]
    yield (
        f"every balancer on these batches; steps as simulated under schedule {view.schedule} on machine {view.machine}:"
    )
    shown = [each for each in view.balancers if not each.problem]
    columns = [[each.name + " *" * each.recipe for each in shown]]
    columns += [[cell(each) for each in shown] for cell in _CELLS.values()]
    columns += [[_even(each.modules[name]) for each in shown] for name in names]
    titles = ["policy", *_CELLS, *(f"{name} max / std" for name in names)]
    first, width = 0, 0
    for i, each in enumerate((*columns, None)):  # as many tables as it takes
        wide = 0 if each is None else 2 + max(map(len, [titles[i], *each]))
        if each is None or width + wide > WIDTH - 2:
            own = range(first, i)
            parts = [0, *own] if first else own
            for line in table(
                [[titles[j] for j in parts], *zip(*(columns[j] for j in parts), strict=True)], numbers=True
            ):
                yield f"  {line}"
            first, width = i, 2 + max(map(len, columns[0]))
        width += wide
    best, taken = max(shown, key=lambda result: result.gain), next(result for result in shown if result.recipe)
    if best.gain > (1 + MARGIN) * taken.gain:
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


def _even(load: ModuleLoad) -> str:
    return f"{load.max_over_mean:.2f} / {load.std_over_mean:.3f}"


def _choices(view: BalanceView) -> Iterator[str]:
    chosen = Counter(each.name for batch in view.choices for each in batch if each.chosen)
    if not chosen:
        return
    yield "auto picks " + ", ".join(f"{name} ({counted(n, 'batch', 'batches')})" for name, n in chosen.most_common())
    first = view.choices[0]
    if first[0].score is None:
        yield f"  in the first no microbatch is above the mean by more than {EVEN - 1:.0%}, so nothing else is tried"
        return
    yield f"  what it compared for the first batch; a later one is taken if it is faster by {MARGIN:.1%}:"
    for line in table([("candidate", "score", "simulated step", ""), *map(_candidate, first)], numbers=True):
        yield f"    {line}"
    yield "  score: length of the step by the recurrence that it compares with (1F1B, messages free), the first being 1"


def _candidate(each: Candidate) -> Sequence[str]:
    score = "" if each.score is None else f"{each.score:.3f}"
    return (each.name, score, _seconds(each.seconds), "chosen" if each.chosen else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"
