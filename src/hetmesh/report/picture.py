"""A RecipeView as a PNG: modules on ranks, and beneath each rank what it holds. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetmesh.formatting import rank_runs
from hetmesh.records.metrics import amount
from hetmesh.report.figures import gap_colour, new_figure, plain, save_figure
from hetmesh.report.values import RecipeView

MAX_LABELS = 32  # ranks; with more, coordinates would overlap, and neighbours of one module are one box
MAX_TICKS = 12  # of more ranks than that


def save_picture(view: RecipeView, path: str | Path) -> None:
    """Write the picture of `view` to `path`. Raises UsageError: matplotlib is not installed, or `path` cannot be
    written."""
    save_figure(lambda: recipe_figure(view, whole=True), path)


def recipe_figure(view: RecipeView, whole: bool = False) -> Any:
    """Modules on ranks, and what each rank holds; where `whole`, also the description and boundaries."""
    grid_height, footer = 0.62 * len(view.modules) + 0.3, 0.33 * len(view.boundaries) + 0.2
    heights = [grid_height, 2.0, *([footer] if whole else [])]
    width = min(24.0, max(8.0, 2.2 + 1.15 * view.ranks)) if view.ranks <= MAX_LABELS else 14.0
    figure = new_figure(width, sum(heights) + (1.0 if whole else 0.5))
    grid, bars, *notes = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_grid(grid, view)
    _draw_memory(bars, view)
    if whole:
        figure.suptitle(view.description or f"{view.ranks} ranks", fontsize=11)
        _draw_boundaries(notes[0], view)
    return figure


def _draw_grid(axes: Any, view: RecipeView) -> None:
    """Ranks across, modules down."""
    from matplotlib.patches import Rectangle

    labelled = view.ranks <= MAX_LABELS
    for row, module in enumerate(view.modules):
        frozen = module.training == "frozen"
        look: dict[str, Any] = {"alpha": 0.35, "hatch": "///"} if frozen else {"alpha": 0.85}
        look |= {"facecolor": f"C{row}", "edgecolor": gap_colour(), "linewidth": 1.5 if labelled else 0.0}
        for first, last in [(rank, rank) for rank in module.cells] if labelled else rank_runs(sorted(module.cells)):
            axes.add_patch(Rectangle((first - 0.5, row - 0.42), last - first + 1, 0.84, **look))
        for rank, text in module.cells.items() if labelled else ():
            # where the ink of the rest is light, it suits the pale boxes of what is frozen
            axes.text(rank, row, text, ha="center", va="center", fontsize=8, color=None if frozen else "black")
    axes.set_xlim(-0.5, view.ranks - 0.5)
    axes.set_ylim(len(view.modules) - 0.5, -0.5)
    labels = [f"{module.name}\n{module.summary}" for module in view.modules]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    _rank_ticks(axes, view)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_memory(axes: Any, view: RecipeView) -> None:
    """What each rank holds for the whole run, by module."""
    peak = max((view.memory(rank) for rank in range(view.ranks)), default=0)
    power = max(p for p in (0, 1, 2, 3, 4) if p == 0 or peak >= 1000**p)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    base = [0.0] * view.ranks
    for row, module in enumerate(view.modules):
        memory = [module.memory.get(rank) for rank in range(view.ranks)]
        heights = [held.total / 1000**power if held else 0.0 for held in memory]
        top = [low + high for low, high in zip(base, heights, strict=True)]
        look = {"color": f"C{row}", "alpha": 0.85, "label": module.name}
        if view.ranks <= MAX_LABELS:
            axes.bar(range(view.ranks), heights, 0.7, bottom=base, **look)
        else:
            starts = [i for i in range(view.ranks) if not i or (base[i], top[i]) != (base[i - 1], top[i - 1])]
            heights, low = ([column[i] for i in starts] for column in (top, base))
            axes.stairs(heights, [i - 0.5 for i in (*starts, view.ranks)], baseline=low, fill=True, **look)
        base = top
    axes.set_xlim(-0.5, view.ranks - 0.5)
    axes.set_ylim(0, max(base, default=0) * 1.15 or 1)
    _rank_ticks(axes, view)
    axes.set_ylabel(f"state per rank ({unit})", fontsize=8)
    plain(axes)
    # outside, where no bar can be
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    if view.ranks <= MAX_LABELS:
        for rank, total in enumerate(base):
            axes.text(rank, total, f"{total:.3g}", ha="center", va="bottom", fontsize=7)


def _draw_boundaries(axes: Any, view: RecipeView) -> None:
    axes.set_axis_off()
    lines = []
    for boundary in view.boundaries:
        back = boundary.backward
        moved = f"{amount(boundary.forward.bytes)}B forward, " + (f"{amount(back.bytes)}B" if back else "nothing")
        rows, features = boundary.shape
        lines.append(f"{boundary.source} → {boundary.destination}: {rows:,} rows x {features}; {moved} backward")
        lines.append(f"      {boundary.source_layout}  →  {boundary.destination_layout}")
    axes.text(0, 1, "\n".join(lines), ha="left", va="top", fontsize=8, transform=axes.transAxes)


def _rank_ticks(axes: Any, view: RecipeView) -> None:
    every = -(-view.ranks // (view.ranks if view.ranks <= MAX_LABELS else MAX_TICKS))
    axes.set_xticks(range(0, view.ranks, every), [f"rank {rank}" for rank in range(0, view.ranks, every)], fontsize=8)
