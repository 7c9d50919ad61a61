"""The summary of a recipe: what it means, in a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hetmesh.models.build import build_on_meta
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.torchtitan_defaults import differing_defaults

if TYPE_CHECKING:
    from hetmesh.layout.mesh import MeshSpec
    from hetmesh.models import Adapter


def count_parameters(adapter: Adapter) -> int | None:
    """Parameters of the module, counted without allocating them; None for a module that cannot be built that way."""
    module = build_on_meta(adapter)
    return None if module is None else sum(p.numel() for p in module.parameters())


def summary(recipe: Recipe, adapters: Mapping[str, Adapter]) -> Iterator[str]:
    """What `recipe` does, one line per item.

    Args:
        adapters: the modules' adapters; one that is missing has no count of parameters.
    """
    batch, wiring = recipe.batch, recipe.wiring
    if recipe.job.description:
        yield recipe.job.description
    yield f"{_count(recipe.world_size, 'rank')}, {recipe.training.steps} steps of {batch.global_batch_size} samples"
    yield (
        f"each step: {_count(batch.lanes, 'lane')} of {recipe.sink} x "
        f"{_count(batch.num_microbatches, 'microbatch', 'microbatches')} x {_count(batch.microbatch_size, 'sample')}, "
        f"schedule {recipe.schedule}"
    )
    rows = [("module", "model", "ranks", "mesh", "parameters")]
    for name, module in recipe.modules.items():
        count = count_parameters(adapters[name]) if name in adapters else None
        rows.append(
            (
                name,
                module.model,
                ranks_text(wiring.meshes[name].ranks),
                _mesh_text(wiring.meshes[name]),
                "" if count is None else f"{count:,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for boundary in recipe.boundaries:
        yield f"  {boundary.source} -> {boundary.destination}" + (f" at {boundary.at!r}" if boundary.at else "")
    if idle := sorted(set(range(recipe.world_size)) - set(wiring.ranks)):
        yield f"note: no module uses rank {ranks_text(tuple(idle))}"
    if different := differing_defaults(recipe):
        yield "note: not given, and not torchtitan's default: " + "; ".join(different)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks as a recipe may write them: `(0, 1, 2, 5)` -> `"0-2,5"`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _mesh_text(mesh: MeshSpec) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
