"""How even the microbatches of a run were, step by step: from the `load` of its metrics, as means and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.formatting import table
from hetmesh.report.figures import new_figure, save_figure
from hetmesh.report.picture import COLOURS
from hetmesh.report.run_series import at, number

KEYS = ("max_over_mean", "std_over_mean", "padding")
TITLES = ("largest load of a microbatch on a lane, over the mean", "standard deviation, over the mean")
DRAWN = "drawn_"
"""What the key of a number begins with that holds for samples where they were drawn."""


@dataclass(frozen=True)
class RunLoad:
    """The logged steps of a run.

    Attributes:
        steps: their numbers.
        modules: per module and key (`KEYS`, and those with `DRAWN` before them) a number for each step.
        deferred: samples of each step that the LLM took late.
    """

    steps: tuple[int, ...]
    modules: Mapping[str, Mapping[str, tuple[float, ...]]]
    deferred: tuple[int, ...]

    def means(self) -> dict[str, Any]:
        """Over all steps."""
        load = {
            name: {key: sum(values) / len(values) for key, values in each.items()}
            for name, each in self.modules.items()
        }
        return {"load": load, "deferred_samples": sum(self.deferred) / len(self.deferred)}

    def as_text(self) -> str:
        """The means, a line per module."""
        lines = table(self.rows(), numbers=True)
        return "\n".join([*lines, f"deferred samples per step: {self.means()['deferred_samples']:.3g}"])

    def rows(self) -> list[Sequence[str]]:
        """The cells of that table, its head first."""
        first = ("mean load of logged steps", "max / mean", "as drawn", "std / mean", "as drawn", "padding", "as drawn")
        lines: list[Sequence[str]] = [first]
        for name, each in self.means()["load"].items():
            keys = [key for own in KEYS for key in (own, DRAWN + own)]
            lines.append([name, *(f"{each[key]:.1%}" if "padding" in key else f"{each[key]:.3f}" for key in keys)])
        return lines


def run_load(records: Iterable[Mapping[str, Any]]) -> RunLoad | None:
    """From lines of metrics.jsonl; those without a `load` are passed over. None: there is no other."""
    logged = [record for record in records if isinstance(record.get("load"), Mapping) and record["load"]]
    names = logged[-1]["load"] if logged else ()
    keys = [prefix + key for key in KEYS for prefix in ("", DRAWN)]
    logged = [
        record
        for record in logged
        if all(number(at(record, "load", name, key)) is not None for name in names for key in keys)
    ]
    if not logged:
        return None
    modules = {name: {key: tuple(each["load"][name][key] for each in logged) for key in keys} for name in names}
    deferred = tuple(int(number(each.get("deferred_samples")) or 0) for each in logged)
    return RunLoad(tuple(each["step"] for each in logged), modules, deferred)


def save_run_load(load: RunLoad, path: str | Path, title: str) -> None:
    """Draw the largest load and the deviation over the steps, as drawn and balanced, to `path` (PNG).

    Raises:
        RecipeError: matplotlib is not installed, or `path` cannot be written.
    """
    figure = new_figure((12, 4), "leave it out")
    figure.suptitle(title, fontsize=11)
    axes: Any = figure.subplots(1, len(TITLES))
    for each, key, what in zip(axes, KEYS, TITLES, strict=False):
        for i, (name, values) in enumerate(load.modules.items()):
            colour = COLOURS[i % len(COLOURS)]
            each.plot(load.steps, values[DRAWN + key], color=colour, linewidth=0.9, linestyle=":")
            each.plot(load.steps, values[key], color=colour, linewidth=1.4, label=name)
        each.set_title(f"{what}; dotted: as drawn", fontsize=9, loc="left")
        each.set_xlabel("step", fontsize=8)
        each.legend(fontsize=8, frameon=False)
        each.tick_params(labelsize=8)
        each.spines[["top", "right"]].set_visible(False)
    save_figure(figure, Path(path), "png")
