"""A RecipeView as a PNG: modules on ranks. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetmesh.formatting import rank_runs
from hetmesh.report.figures import gap_colour, new_figure, save_figure
from hetmesh.report.values import RecipeView

MAX_LABELS = 32  # ranks; with more, coordinates would overlap, and neighbours of one module are one box
MAX_TICKS = 12  # of more ranks than that


def save_picture(view: RecipeView, path: str | Path) -> None:
    """Write the picture of `view` to `path`. Raises UsageError: matplotlib is not installed, or `path` cannot be
    written."""
    save_figure(lambda: recipe_figure(view), path)


def recipe_figure(view: RecipeView) -> Any:
    """Ranks across, modules down."""
    from matplotlib.patches import Rectangle

    labelled = view.ranks <= MAX_LABELS
    width = min(24.0, max(8.0, 2.2 + 1.15 * view.ranks)) if labelled else 14.0
    figure = new_figure(width, 0.62 * len(view.modules) + 0.8)
    axes = figure.subplots()
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
    every = -(-view.ranks // (view.ranks if labelled else MAX_TICKS))
    axes.set_xticks(range(0, view.ranks, every), [f"rank {rank}" for rank in range(0, view.ranks, every)], fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
