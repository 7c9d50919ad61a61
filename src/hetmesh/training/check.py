"""What can be wrong with a recipe beyond its text: its models, its tensor parallel degrees, its placeholders."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe

if TYPE_CHECKING:
    from hetmesh.layout.mesh import MeshSpec
    from hetmesh.models import Adapter


def check_recipe(
    recipe: Recipe,
    adapters: Mapping[str, Adapter] | None = None,
    placeholders: Collection[str] | None = None,
) -> list[str]:
    """Check `recipe` in one process, without process groups, weights or data.

    Keys, ranks, degrees, boundaries and batch sizes were checked when the recipe was loaded.

    Args:
        adapters: the modules' adapters (`hetmesh.training.job.describe`); None leaves out what needs them.
        placeholders: the placeholders that the data source knows; None leaves them unchecked.

    Returns:
        A summary for people, one line per item.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    if adapters is not None:
        for name, adapter in adapters.items():
            _check_tensor_parallel(recipe, name, adapter.tensor_parallel_sizes())
            _check_weights(recipe, name, adapter)
    if placeholders is not None:
        _check_placeholders(recipe, placeholders)
    parameters = {} if adapters is None else {name: count_parameters(a) for name, a in adapters.items()}
    return list(_summary(recipe, parameters))


def count_parameters(adapter: Adapter) -> int | None:
    """Parameters of the module, counted without allocating them; None for a module that cannot be built that way."""
    try:
        with torch.device("meta"):
            module = adapter.build()
    except Exception:  # a user's constructor may compute with its weights
        return None
    return sum(p.numel() for p in module.parameters())


def _check_weights(recipe: Recipe, name: str, adapter: Adapter) -> None:
    """Compare the headers of the module's checkpoint with its parameters, if it has one."""
    from hetmesh.models import build_empty, check_weights, pretrained_of

    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        check_weights(adapter, build_empty(adapter), pretrained)


def _check_tensor_parallel(recipe: Recipe, name: str, sizes: Mapping[str, int]) -> None:
    degree = recipe.graph[name].mesh.axis_size("tp")
    wrong = {size: value for size, value in sizes.items() if value % degree}
    if not wrong:
        return
    owner = _table_of(recipe, name)
    takes = "" if owner == name else f" (module {name!r} takes the mesh of {owner!r})"
    ranks = recipe.graph[name].mesh.size
    valid = _divisors(math.gcd(*sizes.values()))
    fitting = [d for d in valid if ranks % d == 0]
    limit = "" if fitting == valid else f", of which {fitting} divide its {ranks} ranks"
    raise RecipeError(
        f"parallelism.{owner}.tensor_parallel_degree = {degree}{takes} does not divide "
        + " and ".join(f"{size} = {value}" for size, value in wrong.items())
        + f" of modules.{name}; valid degrees are {valid}{limit}"
    )


def _table_of(recipe: Recipe, name: str) -> str:
    """The module whose layout table `name` uses: its own, or that of its nearest consumer that has one."""
    while name not in recipe.parallelism.modules and (consumers := recipe.graph.outputs(name)):
        name = consumers[0].destination
    return name


def _check_placeholders(recipe: Recipe, placeholders: Collection[str]) -> None:
    source = f"data source {recipe.data.source!r} has the placeholders {sorted(placeholders)}"
    for i, boundary in enumerate(recipe.boundaries):
        if boundary.at is not None and boundary.at not in placeholders:
            raise RecipeError(f"boundaries[{i}].at = {boundary.at!r}: {source}")
    for module in recipe.graph.modules:
        if module.media is not None and module.media not in placeholders:
            raise RecipeError(f"modules.{module.name}.media = {module.media!r}: {source}")


def _summary(recipe: Recipe, parameters: Mapping[str, int | None]) -> Iterator[str]:
    batch, graph = recipe.batch, recipe.graph
    if recipe.job.description:
        yield recipe.job.description
    yield f"{_count(recipe.world_size, 'rank')}, {recipe.training.steps} steps of {batch.global_batch_size} samples"
    yield (
        f"each step: {_count(batch.lanes, 'lane')} of {graph.sink.name} x "
        f"{_count(batch.num_microbatches, 'microbatch', 'microbatches')} x {_count(batch.microbatch_size, 'sample')}, "
        f"schedule {recipe.schedule}"
    )
    rows = [("module", "model", "ranks", "mesh", "parameters")]
    for module in graph.modules:
        count = parameters.get(module.name)
        rows.append(
            (
                module.name,
                recipe.modules[module.name].model,
                ranks_text(module.mesh.ranks),
                _mesh_text(module.mesh),
                "" if count is None else f"{count:,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for boundary in graph.boundaries:
        yield f"  {boundary.source} -> {boundary.destination}" + (f" at {boundary.at!r}" if boundary.at else "")
    if idle := sorted(set(range(recipe.world_size)) - set(graph.ranks)):
        yield f"note: no module uses rank {ranks_text(tuple(idle))}"


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


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
