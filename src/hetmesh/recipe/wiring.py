"""Wiring: what a recipe alone says about its graph: which modules there are, who feeds whom, and where each lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hetmesh.errors import GraphError, RecipeError, Refusals
from hetmesh.graph.module_graph import LANE_AXES, expert_axis, experts_mesh, first_stage_mesh
from hetmesh.graph.topology import BoundarySpec, Topology
from hetmesh.layout.mesh import MeshSpec
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.sections import ModuleParallelism
from hetmesh.recipe.values import MAX_RANKS

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

EXPERT_DEGREE = "expert_parallel_degree"
"""The recipe key of the axis `ep`, which is taken out of others."""


def module_meshes(tables: Mapping[str, ModuleParallelism], topology: Topology) -> dict[str, MeshSpec]:
    """Each module's mesh: axes in the order of `DEGREE_OF_AXIS`, those of size 1 left out except `dp_replicate` where
    nothing else is left; with experts an axis `ep` after the data-parallel ones. A module without a table takes its
    consumer's. Raises RecipeError: of all modules whose degrees do not fit their ranks."""
    everywhere = _all_ranks(tables)
    meshes: dict[str, MeshSpec] = {}
    refusals = Refusals()
    for name in reversed(topology.order):  # consumers first
        consumers = [b.destination for b in topology.outputs(name)]
        if name in tables:
            with refusals.collect():
                meshes[name] = _mesh(f"parallelism.{name}", tables[name], everywhere)
        elif not consumers:
            meshes[name] = MeshSpec(everywhere, ("dp_replicate",), (len(everywhere),))
        elif consumers[0] in meshes:
            meshes[name] = first_stage_mesh(meshes[consumers[0]])
    refusals.finish()
    return {name: meshes[name] for name in topology.names}


def _all_ranks(tables: Mapping[str, ModuleParallelism]) -> tuple[int, ...]:
    """What "all" stands for: every rank that some module names; where none does, as many as the degrees need."""
    if named := {rank for table in tables.values() for rank in table.ranks or ()}:
        return tuple(sorted(named))
    needed = max((math.prod(d or 1 for d in _degrees(t).values()) for t in tables.values()), default=1)
    if needed > MAX_RANKS:
        raise RecipeError(f"parallelism: the degrees need {needed} ranks; there can be {MAX_RANKS} at most")
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
            f"{','.join(map(str, ranks))}); its divisors are {divisors(len(ranks))}"
        )
    kept = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_replicate": 1}
    return _with_experts(key, table.expert_parallel_degree, MeshSpec(ranks, tuple(kept), tuple(kept.values())))


def _with_experts(key: str, degree: int, mesh: MeshSpec) -> MeshSpec:
    """`mesh` with an axis `ep`, which `degree` must fit."""
    taken = expert_axis(mesh)
    size = mesh.axis_size(taken)
    if size % degree:
        shards = DEGREE_OF_AXIS["dp_shard"]
        why = "" if taken == "dp_shard" else f", as {shards} is 1"
        raise RecipeError(
            f"{key}.{EXPERT_DEGREE} = {degree}: it is taken out of {DEGREE_OF_AXIS[taken]}{why}, and must "
            f"divide that: {size}; valid are {divisors(size)}"
        )
    return experts_mesh(mesh, degree)


@dataclass(frozen=True)
class Wiring:
    """The modules of a recipe, without what only their models know (layers, widths, side outputs).

    Attributes:
        topology: names and boundaries, as the recipe gives them.
        meshes: where each module lies.
        tables: per module, whose `[parallelism.<module>]` table holds for it: its own, or that of its nearest consumer
            that has one, whose mesh it takes; None where there is none.
        media: per module, the kind of media it reads; None for one that reads rows or tokens.
    """

    topology: Topology
    meshes: Mapping[str, MeshSpec]
    tables: Mapping[str, str | None]
    media: Mapping[str, str | None]

    @property
    def llm(self) -> str:
        """The module that computes the loss."""
        return self.topology.llm

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all modules, ascending."""
        return tuple(sorted({rank for mesh in self.meshes.values() for rank in mesh.ranks}))

    @property
    def world_size(self) -> int:
        """Processes that are needed: 1 + the highest rank that a module has."""
        return 1 + self.ranks[-1]

    def lanes(self, name: str) -> int:
        """Data-parallel coordinates of a module."""
        return math.prod(self.meshes[name].axis_size(axis) for axis in LANE_AXES)


def wiring(recipe: Recipe) -> Wiring:
    """The wiring of `recipe`. Raises RecipeError: all of this that holds: the boundaries make no graph with one llm,
    `at` or `media` is missing or out of place, or ranks and degrees do not fit."""
    boundaries = tuple(BoundarySpec(b.source, b.destination, b.at) for b in recipe.boundaries)
    try:
        topology = Topology(tuple(recipe.modules), boundaries)
    except GraphError as error:
        raise RecipeError(f"boundaries: {error}") from error
    refusals = Refusals()
    with refusals.collect():
        _check_ends(recipe, topology)
    media: dict[str, str | None] = {}
    if not refusals.said:  # where `at` is wrong, what follows from it is no news
        for name in recipe.modules:
            with refusals.collect():
                media[name] = _media(recipe, topology, name)
    tables = {name: _table(recipe, topology, name) for name in recipe.modules}
    meshes: Mapping[str, MeshSpec] = {}
    with refusals.collect():
        meshes = module_meshes(recipe.parallelism.modules, topology)
    refusals.finish()
    return Wiring(topology, meshes, tables, media)


def _check_ends(recipe: Recipe, topology: Topology) -> None:
    """Check `at` of the boundaries, and what only the LLM or only encoders have."""
    refusals, llm = Refusals(), topology.llm
    seen: dict[str, str] = {}
    unnamed = {b.source for b in topology.boundaries if b.destination == llm and b.at is None}
    for i, b in enumerate(topology.boundaries):
        key = f"boundaries[{i}].at"
        if b.destination != llm and b.at is not None and b.destination not in unnamed:
            refusals.add(f"{key}: rows replace placeholders only in {llm!r}, but {b.name} ends elsewhere; leave it out")
        elif b.destination == llm and b.at is None:
            refusals.add(
                f'{key} is missing: name the placeholder that the rows of {b.name} replace, e.g. at = "image"; '
                f"{llm!r}, after which no module comes, must be the LLM: modules after it are not supported"
            )
        elif b.at is not None and seen.setdefault(b.at, b.name) != b.name:
            refusals.add(f"{key}: the rows of {seen[b.at]} already replace placeholder {b.at!r}; name another one")
    for name, module in recipe.modules.items():
        if module.attention_mask != "causal" and name != llm:
            refusals.add(f"modules.{name}.attention_mask: only {llm!r}, which reads tokens, has one")
        if module.media is not None and (topology.inputs(name) or name == llm):
            refusals.add(f"modules.{name}.media: only a module that no boundary leads to reads media, except the LLM")
    refusals.finish()


def _table(recipe: Recipe, topology: Topology, name: str) -> str | None:
    while name not in recipe.parallelism.modules:
        consumers = topology.outputs(name)
        if not consumers:
            return None
        name = consumers[0].destination
    return name


def _media(recipe: Recipe, topology: Topology, name: str) -> str | None:
    """The media that an encoder reads: as the recipe says, else the one placeholder where its rows end up."""
    if topology.inputs(name) or name == topology.llm:
        return None
    if (media := recipe.modules[name].media) is not None:
        return media
    placeholders = topology.placeholders(name)
    if len(placeholders) > 1:
        raise RecipeError(
            f"modules.{name}.media is missing: the rows of {name!r} replace the placeholders {list(placeholders)}; say "
            f'which media it reads, e.g. media = "{placeholders[0]}"'
        )
    return placeholders[0]
