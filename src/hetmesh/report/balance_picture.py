"""A BalanceView as a PNG: how large samples are, how even microbatches, what steps gain. Needs matplotlib."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hetmesh.report.balance_values import BalanceView, Histogram, ModuleSizes
from hetmesh.report.figures import new_figure, save_figure
from hetmesh.report.picture import COLOURS


def save_balance(view: BalanceView, path: str | Path) -> None:
    """Write the picture of `view` to `path`.

    Raises:
        RecipeError: matplotlib is not installed, or `path` cannot be written.
    """
    shown = [result for result in view.balancers if not result.problem]
    heights = [*(2.2 for _ in view.modules), 0.28 * len(shown) + 0.8]
    figure = new_figure((12, sum(heights) + 0.8))
    figure.suptitle(f"{view.description or 'balance'}: {view.batches} batches of {view.samples} samples", fontsize=11)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    for part, module in zip(parts, view.modules, strict=False):
        _draw_module(part, module)
    gains, spread = parts[-1].subplots(1, 2, sharey=True)
    places = range(len(shown))
    gains.barh(places, [result.gain for result in shown], color=COLOURS[0])
    gains.axvline(1.0, color="black", linewidth=0.8)
    gains.set_yticks(places, [result.name + (" *" if result.recipe else "") for result in shown], fontsize=8)
    gains.invert_yaxis()
    gains.set_title(f"throughput over none, simulated on {view.machine}", fontsize=9, loc="left")
    for place, result in enumerate(shown):
        gains.text(result.gain, place, f" {result.gain:.2f}x", va="center", fontsize=7)
    height = 0.8 / len(view.modules)
    for i, module in enumerate(view.modules):
        values = [result.modules[module.name].max_over_mean for result in shown]
        spread.barh([p + (i + 0.5) * height - 0.4 for p in places], values, height, label=module.name, color=_colour(i))
    spread.axvline(1.0, color="black", linewidth=0.8)
    spread.set_title("largest load of a microbatch on a lane, over the mean", fontsize=9, loc="left")
    spread.legend(fontsize=8, frameon=False)
    for axes in (gains, spread):
        _plain(axes)
    save_figure(figure, Path(path), "png")


def _draw_module(part: Any, module: ModuleSizes) -> None:
    samples, loads = part.subplots(1, 2)
    _steps(samples, module.samples, COLOURS[0], f"{module.mean:,.0f} on average, {module.largest:,} at most")
    samples.set_title(f"{module.name}: {module.unit} per sample", fontsize=9, loc="left")
    for i, (policy, histogram) in enumerate(module.loads.items()):
        _steps(loads, histogram, _colour(i), policy)
    loads.set_title(f"{module.name}: load of a microbatch on a lane, over the mean", fontsize=9, loc="left")
    for axes in (samples, loads):
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)


def _steps(axes: Any, histogram: Histogram, colour: str, label: str) -> None:
    widths = [b - a for a, b in itertools.pairwise(histogram.edges)]
    if max(widths) > 2 * min(widths):
        axes.set_xscale("symlog", base=2, linthresh=1)
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=colour, alpha=0.55, label=label)


def _plain(axes: Any) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]
