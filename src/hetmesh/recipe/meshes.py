"""From the recipe's ranks and degrees to one MeshSpec per module."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetmesh.errors import RecipeError, Refusals
from hetmesh.graph.module_graph import expert_axis, experts_mesh, first_stage_mesh
from hetmesh.graph.topology import Topology
from hetmesh.layout.mesh import MeshSpec
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.sections import MOST_RANKS, ModuleParallelism

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
    nothing else is left; with experts an axis `ep` behind the data-parallel ones. A module without a table takes its
    consumer's.

    Raises:
        RecipeError: the degrees of a module do not fit its ranks; of all such modules.
    """
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
