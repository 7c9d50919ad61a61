"""From the recipe's ranks and degrees to one MeshSpec per module, and to the static module graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph.module_graph import BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.graph.module_options import ModuleOptions
from hetmesh.layout.mesh import MeshSpec
from hetmesh.recipe.module_options import module_options
from hetmesh.recipe.sections import MOST_RANKS, ModuleParallelism

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

DEGREE_OF_AXIS: Mapping[str, str] = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Mesh axes in order, outermost first (torchtitan's order), and the recipe key of each."""


def module_graph(recipe: Recipe, layers: Mapping[str, Sequence[str]] | None = None) -> ModuleGraph:
    """The static graph of the recipe's modules on their meshes.

    Args:
        layers: names of each module's layers in execution order, as its adapter gives them.

    Raises:
        RecipeError: the boundaries make no graph with one sink, `at` is missing or out of place, or ranks and degrees
            do not fit.
    """
    graph = _wiring(recipe)
    meshes = _meshes(recipe, graph)
    _check_offload(recipe, meshes)
    modules = tuple(
        ModuleSpec(
            name,
            meshes[name],
            tuple((layers or {}).get(name, ())),
            _media(recipe, graph, name),
            module.trainable,
            token_axes=_token_axes(recipe, graph, meshes, name),
            packed=name == graph.sink.name and packs(recipe, meshes[name]),
            attention_mask=module.attention_mask,
            assignment=_assignment(recipe, name),
            options=_options(recipe, graph, meshes, name),
        )
        for name, module in recipe.modules.items()
    )
    return ModuleGraph(modules, graph.boundaries)


def table_of(recipe: Recipe, graph: ModuleGraph, name: str) -> str | None:
    """The module whose layout table holds for `name`: its own, or that of its nearest consumer that has one."""
    while name not in recipe.parallelism.modules:
        consumers = graph.outputs(name)
        if not consumers:
            return None
        name = consumers[0].destination
    return name


def splits_tokens(recipe: Recipe, meshes: Mapping[str, MeshSpec], name: str) -> bool:
    """Whether module `name` itself asks for sequence parallelism and has tensor parallel ranks to split over."""
    own = recipe.parallelism.modules.get(name)
    return own is not None and own.enable_sequence_parallel and meshes[name].axis_size("tp") > 1


def packs(recipe: Recipe, mesh: MeshSpec) -> bool:
    """Whether the samples of a lane of the sink lie in one row: if the recipe says so, ranks share its tokens, or its
    mask is one that only hetmesh's own attention knows."""
    masked = any(module.attention_mask != "causal" for module in recipe.modules.values())
    return recipe.training.pack_samples or mesh.axis_size("cp") > 1 or masked


def _options(recipe: Recipe, graph: ModuleGraph, meshes: Mapping[str, MeshSpec], name: str) -> ModuleOptions:
    owner = table_of(recipe, graph, name)
    table = ModuleParallelism() if owner is None else recipe.parallelism.modules[owner]
    return module_options(recipe, name, table, splits_tokens(recipe, meshes, name))


def _check_offload(recipe: Recipe, meshes: Mapping[str, MeshSpec]) -> None:
    if recipe.training.enable_cpu_offload and all(mesh.axis_size("dp_shard") == 1 for mesh in meshes.values()):
        raise RecipeError(
            "training.enable_cpu_offload: it moves the shards of modules with a data_parallel_shard_degree above 1 to "
            "the CPU, but no module has one"
        )


def _assignment(recipe: Recipe, name: str) -> str:
    own = recipe.parallelism.modules.get(name)
    given = own.context_parallel_assignment if own is not None else None
    return given or recipe.parallelism.context_parallel_assignment or "balanced"


def _token_axes(recipe: Recipe, graph: ModuleGraph, meshes: Mapping[str, MeshSpec], name: str) -> tuple[str, ...]:
    """Only the sink has tokens, and an encoder those of its media."""
    cp = ("cp",) if meshes[name].axis_size("cp") > 1 else ()
    if name == graph.sink.name:
        return (*cp, "tp") if splits_tokens(recipe, meshes, name) else cp
    return () if graph.inputs(name) else cp


def module_meshes(recipe: Recipe) -> dict[str, MeshSpec]:
    """Each module's mesh: axes in the order of `DEGREE_OF_AXIS`, those of size 1 left out except `dp_replicate` where
    nothing else is left.

    Raises:
        RecipeError: as `module_graph`.
    """
    return _meshes(recipe, _wiring(recipe))


def world_size(recipe: Recipe) -> int:
    """Processes that the recipe needs: 1 + the highest rank that a module has."""
    return 1 + max(max(mesh.ranks) for mesh in module_meshes(recipe).values())


def _wiring(recipe: Recipe) -> ModuleGraph:
    """The graph with every module on rank 0: who feeds whom is known before the meshes are."""
    anywhere = MeshSpec((0,), ("dp_replicate",), (1,))
    boundaries = tuple(BoundarySpec(b.source, b.destination, b.at) for b in recipe.boundaries)
    try:
        graph = ModuleGraph(tuple(ModuleSpec(name, anywhere) for name in recipe.modules), boundaries)
    except GraphError as error:
        raise RecipeError(f"boundaries: {error}") from error
    sink = graph.sink.name
    seen: dict[str | None, str] = {}
    for i, b in enumerate(boundaries):
        key = f"boundaries[{i}].at"
        if b.destination != sink and b.at is not None:
            raise RecipeError(
                f"{key}: rows replace placeholders only in {sink!r}, but {b.name} ends elsewhere; leave it out"
            )
        if b.destination == sink and b.at is None:
            raise RecipeError(
                f'{key} is missing: name the placeholder that the rows of {b.name} replace, e.g. at = "image"'
            )
        if b.destination == sink and b.at in seen:
            raise RecipeError(f"{key}: the rows of {seen[b.at]} already replace placeholder {b.at!r}; name another one")
        seen[b.at] = b.name
    for name, module in recipe.modules.items():
        if module.attention_mask != "causal" and name != sink:
            raise RecipeError(f"modules.{name}.attention_mask: only {sink!r}, which reads tokens, has one")
        if module.media is not None and (graph.inputs(name) or name == sink):
            raise RecipeError(
                f"modules.{name}.media: only a module that no boundary leads to reads media, except the sink"
            )
    return graph


def _media(recipe: Recipe, graph: ModuleGraph, name: str) -> str | None:
    """The media that an encoder reads: as the recipe says, else the placeholder where its rows end up first."""
    if graph.inputs(name) or name == graph.sink.name:
        return None
    if (media := recipe.modules[name].media) is not None:
        return media
    boundary = graph.outputs(name)[0]
    while boundary.destination != graph.sink.name:
        boundary = graph.outputs(boundary.destination)[0]
    return boundary.at


def _meshes(recipe: Recipe, graph: ModuleGraph) -> dict[str, MeshSpec]:
    tables = recipe.parallelism.modules
    everywhere = _all_ranks(tables)
    meshes: dict[str, MeshSpec] = {}
    for name in reversed(graph.order):  # consumers first
        if name in tables:
            meshes[name] = _mesh(f"parallelism.{name}", tables[name], everywhere)
        elif consumers := graph.outputs(name):
            meshes[name] = _first_stage(meshes[consumers[0].destination])
        else:
            meshes[name] = MeshSpec(everywhere, ("dp_replicate",), (len(everywhere),))
    return {name: meshes[name] for name in recipe.modules}


def _first_stage(mesh: MeshSpec) -> MeshSpec:
    """Where a module lies that takes its consumer's mesh: on the ranks that its rows go to. Those that share a lane's
    tokens are lanes of their own to it, which has no tokens."""
    mesh = mesh.slice("pp", 0)
    if "cp" in mesh.axes:
        lanes = "dp_shard" if "dp_shard" in mesh.axes else "dp_replicate"
        mesh = mesh.merge((lanes, "cp"), lanes)
    return MeshSpec(mesh.ranks, ("dp_replicate",), (1,)) if mesh.axes == ("pp",) else mesh


def _all_ranks(tables: Mapping[str, ModuleParallelism]) -> tuple[int, ...]:
    """What "all" stands for: every rank that some module names; where none does, as many as the degrees need."""
    if named := {rank for table in tables.values() for rank in table.ranks or ()}:
        return tuple(sorted(named))
    needed = max((math.prod(d or 1 for d in _degrees(t).values()) for t in tables.values()), default=1)
    if needed > MOST_RANKS:
        raise RecipeError(f"parallelism: the degrees need {needed} ranks; there can be {MOST_RANKS} at most")
    return tuple(range(needed))


def _degrees(table: ModuleParallelism) -> dict[str, int | None]:
    return {axis: getattr(table, key) for axis, key in DEGREE_OF_AXIS.items()}


def _mesh(key: str, table: ModuleParallelism, everywhere: tuple[int, ...]) -> MeshSpec:
    ranks = everywhere if table.ranks is None else table.ranks
    degrees = _degrees(table)
    if degrees["dp_shard"] is None and degrees["dp_replicate"] is None:
        degrees["dp_replicate"] = 1  # torchtitan's default beside an automatic shard degree
    product = math.prod(d or 1 for d in degrees.values())
    sizes = {axis: d or len(ranks) // product for axis, d in degrees.items()}
    if math.prod(sizes.values()) != len(ranks):
        given = ", ".join(f"{DEGREE_OF_AXIS[axis]} {d}" for axis, d in degrees.items() if d and d > 1) or "all 1"
        fit = "must multiply to" if None not in degrees.values() else "must divide"
        raise RecipeError(
            f"{key}: the degrees ({given}: {product} together) {fit} its number of ranks, {len(ranks)} (ranks "
            f"{','.join(map(str, ranks))}); its divisors are {_divisors(len(ranks))}"
        )
    kept = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_replicate": 1}
    return MeshSpec(ranks, tuple(kept), tuple(kept.values()))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
