"""The layouts of an elastic run: that all are of one run, which of them a number of ranks has, and the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.errors import HetmeshError, RecipeError, Refusals
from hetmesh.formatting import counted, listed
from hetmesh.recipe.overrides import parse_overrides
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.recipe.section import flat
from hetmesh.resolve.predictions import memory_fit, simulate_recipe
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.resolved import resolve

LAYOUT_TABLES = frozenset({"parallelism", "balance", "activation_checkpoint", "elastic"})
"""Tables in which the layouts of a run may differ, beside `LAYOUT_KEYS`."""

LAYOUT_KEYS = "training.local_batch_size, modules.NAME.activation_checkpoint, job.description"

_N_KEYS = 4  # that an error names of a layout


@dataclass(frozen=True)
class NamedLayout:
    """A layout of a run: the file that says it, and the recipe in it."""

    name: str
    recipe: Recipe

    @property
    def ranks(self) -> int:
        """Processes that it needs."""
        return self.recipe.world_size


def run_layouts(path: Path, recipe: Recipe, overrides: Sequence[str] = ()) -> list[NamedLayout]:
    """The layout of `recipe` itself, and those that its `[elastic]` names.

    Args:
        path: the file of `recipe`, beside which theirs lie.
        overrides: those with which it was read; they hold for the others too, but for what is layout.

    Raises:
        RecipeError: a file cannot be read, its global batch is not divided by its lanes, or it is of another run; a
            line per file and key.
    """
    layouts, refusals, common = [NamedLayout(path.name, recipe)], Refusals(), _of_run_alone(overrides)
    for i, name in enumerate(recipe.elastic.layouts):
        try:
            other = load_recipe(path.parent / name, common)
            if differing := other_run(recipe, other):
                raise RecipeError(f"of another run than {path.name}: {differing}")
        except RecipeError as error:
            for line in str(error).split("\n"):
                refusals.add(f"elastic.layouts[{i}] = {name!r}: {line.removeprefix(f'{path.parent / name}: ')}")
            continue
        layouts.append(NamedLayout(name, other.model_copy(update={"elastic": recipe.elastic})))
    refusals.finish()
    return layouts


def check_layouts(layouts: Sequence[NamedLayout]) -> str:
    """Which there are, in a line. Raises RecipeError: all that is wrong with those beside the first, which is that of
    the recipe itself."""
    refusals = Refusals()
    for layout in layouts[1:]:
        with refusals.collect(f"elastic.layouts: {layout.name}: "):
            resolve(layout.recipe)
    refusals.finish()
    return f"elastic: layouts of {', '.join(f'{layout.ranks} ranks ({layout.name})' for layout in layouts)}"


def other_run(recipe: Recipe, other: Recipe) -> str:
    """In what `other` differs from `recipe` beside its layout, in words; empty: both are of one run."""
    ours, theirs = _said(recipe), _said(other)
    differing = [key for key in sorted(ours.keys() | theirs) if ours.get(key) != theirs.get(key)]
    if not differing:
        return ""
    said = listed([f"{key} = {theirs.get(key)!r} in place of {ours.get(key)!r}" for key in differing], _N_KEYS)
    tables = ", ".join(f"[{name}]" for name in sorted(LAYOUT_TABLES))
    return f"{said}; only {tables}, {LAYOUT_KEYS} may differ"


def layouts_for(layouts: Sequence[NamedLayout], ranks: int) -> list[NamedLayout]:
    """Those of a number of ranks. Raises RecipeError: there is none; it names the nearest."""
    if found := [layout for layout in layouts if layout.ranks == ranks]:
        return found
    nearest = min(layouts, key=lambda layout: (abs(layout.ranks - ranks), layout.ranks))
    there = sorted({layout.ranks for layout in layouts})
    raise RecipeError(
        f"elastic: no layout is of {counted(ranks, 'rank')}; the nearest is {nearest.name} of {nearest.ranks} (there "
        f"are layouts of {', '.join(map(str, there))}): start {nearest.ranks}, name one in elastic.layouts (`hetmesh "
        f"plan {layouts[0].name} --ranks {ranks} --write FILE.toml` finds one), or set elastic.plan = true"
    )


@dataclass(frozen=True)
class PredictedLayout:
    """What is predicted of a layout.

    Attributes:
        step_s: seconds of its first step; None: not known.
        spare_bytes: what the rank that holds most has left, below 0 what it lacks; None: not known.
    """

    layout: NamedLayout
    step_s: float | None = None
    spare_bytes: int | None = None

    @classmethod
    def of(cls, layout: NamedLayout) -> PredictedLayout:
        """By the simulator and the memory model: the same in every process, since nothing is measured."""
        try:
            resolved = resolve(layout.recipe)
            model = agreed_step_model(layout.recipe, resolved.graph, resolved.shapes)
            if model is None:
                return cls(layout)
            step_s, fit = simulate_recipe(resolved, model=model).makespan, memory_fit(resolved, model)
        except HetmeshError:  # what is wrong with the one that is chosen is said when it is checked
            return cls(layout)
        return cls(layout, step_s, fit.spare_bytes if fit.memory_bytes else None)

    @property
    def lacks(self) -> str:
        """How much memory is missing, in words; empty: nothing that is known of."""
        spare = self.spare_bytes or 0
        return f"lacks {-spare / 1e9:.3g} GB on a rank" if spare < 0 else ""

    def __str__(self) -> str:
        step = "step not predicted" if self.step_s is None else f"step predicted {1e3 * self.step_s:.3g} ms"
        return ", ".join(filter(None, (self.layout.name, step, self.lacks)))


def fastest(predicted: Sequence[PredictedLayout]) -> PredictedLayout:
    """The fastest that fits memory; of equally fast ones the first. Raises RecipeError: none fits."""
    if fitting := [layout for layout in predicted if not layout.lacks]:
        return min(fitting, key=lambda own: math.inf if own.step_s is None else own.step_s)
    lacking = ", ".join(f"{of.layout.name} {of.lacks}" for of in predicted)
    raise RecipeError(f"elastic: no layout of {counted(predicted[0].layout.ranks, 'rank')} fits: {lacking}")


def last_layout(layouts: Sequence[NamedLayout], recipe: Recipe) -> NamedLayout:
    """`recipe`, with which a run was last started, under the name of the one of `layouts` that it is."""
    same = (own.name for own in layouts if same_layout(own.recipe, recipe))
    return NamedLayout(next(same, "another layout"), recipe)


def same_layout(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes of one run have the same layout."""
    return _layout(one) == _layout(other)


def layout_line(now: PredictedLayout, before: PredictedLayout | None = None, step: int = 0, lost: int = 0) -> str:
    """What is said once of the layout in which a run begins, or goes on in place of the one `before`: `step` is that of
    the checkpoint, `lost` how many steps after it are made again."""
    line = f"elastic: {counted(now.layout.ranks, 'rank')} ({now})"
    if before is None:
        return line
    line += f" in place of {before.layout.ranks} ({before}); goes on after step {step}"
    return f"{line}, {counted(lost, 'step')} lost" if lost else line


def _of_run_alone(overrides: Sequence[str]) -> list[str]:
    """Overrides that are no layout's."""
    kept, pending = list[str](), list(overrides)
    while pending:
        own = [pending.pop(0)]
        if "=" not in own[0] and pending and not pending[0].startswith("--"):
            own.append(pending.pop(0))
        ((path, _),) = parse_overrides(own)
        layout = path[0] in LAYOUT_TABLES or path == ("training", "local_batch_size")
        if not layout and path[-1] != "activation_checkpoint":
            kept += own
    return kept


def _layout(recipe: Recipe) -> dict[str, Any]:
    tables, said = flat(recipe.model_dump(mode="json", by_alias=True)), _said(recipe)
    return {k: v for k, v in tables.items() if k not in said and not k.startswith(("job.", "elastic."))}


def _said(recipe: Recipe) -> dict[str, Any]:
    """All but the layout, by dotted key."""
    tables = recipe.model_dump(mode="json", by_alias=True, exclude={*LAYOUT_TABLES})
    del tables["training"]["local_batch_size"], tables["job"]["description"]
    tables["training"]["global_batch_size"] = recipe.batch.global_batch_size
    for module in tables["modules"].values():
        del module["activation_checkpoint"]
    return flat(tables)
