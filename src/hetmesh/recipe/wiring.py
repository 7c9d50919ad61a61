"""Wiring: what a recipe alone says about its graph: which modules there are, who feeds whom, and where each lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hetmesh.errors import GraphError, RecipeError, Refusals
from hetmesh.graph.module_graph import (
    LANE_AXES,
    NEXT_TOKEN,
    LossSpec,
    Unit,
    expert_axis,
    experts_mesh,
    with_neighbours_meshes,
)
from hetmesh.graph.topology import BoundarySpec, Topology
from hetmesh.layout.mesh import MeshSpec
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.keys import unknown
from hetmesh.recipe.sections import Loss, ModuleParallelism
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
    neighbour's. Raises RecipeError: of all modules whose degrees do not fit their
    ranks."""
    everywhere = _all_ranks(tables)
    meshes: dict[str, MeshSpec] = {}
    refusals = Refusals()
    for name in reversed(topology.order):
        if name in tables:
            with refusals.collect():
                meshes[name] = _mesh(f"parallelism.{name}", tables[name], everywhere)
        elif topology.neighbour(name) is None:
            meshes[name] = MeshSpec(everywhere, ("dp_replicate",), (len(everywhere),))
    refusals.finish()
    return with_neighbours_meshes(topology, meshes)


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
        media: per module, the kind of media it reads, or has its targets from; None for one that reads rows or tokens.
        losses: of the modules that say theirs.
    """

    topology: Topology
    meshes: Mapping[str, MeshSpec]
    tables: Mapping[str, str | None]
    media: Mapping[str, str | None]
    losses: Mapping[str, LossSpec]

    @property
    def llm(self) -> str:
        """The module that reads tokens."""
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
    """The wiring of `recipe`. Raises RecipeError: all of this that holds: the boundaries make no graph with one LLM, a
    loss, `at` or `media` is missing or out of place, or ranks and degrees do not fit."""
    refusals = Refusals()
    losses: dict[str, LossSpec] = {}
    for name, module in recipe.modules.items():
        if module.loss is not None:
            with refusals.collect():
                losses[name] = _loss(f"modules.{name}.loss", module.loss)
    refusals.finish()
    topology = _topology(recipe, losses)
    with refusals.collect():  # where `at` is wrong, what follows from it is no news
        _check_ends(recipe, topology)
        _check_losses(losses, topology)
    media: dict[str, str | None] = {}
    if not refusals.said:
        for name in recipe.modules:
            with refusals.collect():
                media[name] = _media(recipe, topology, losses, name)
    for b in topology.boundaries:
        made, read = media.get(b.destination), media.get(b.source)
        if b.destination in topology.after_llm and read is not None and made not in (None, read):
            refusals.add(
                f"modules.{b.source}.media: {b.source!r} reads {read!r}, and its rows are the targets of "
                f"{b.destination!r}, which makes {made!r}; take an encoder of these"
            )
    tables = {name: _table(recipe, topology, name) for name in recipe.modules}
    meshes: Mapping[str, MeshSpec] = {}
    with refusals.collect():
        meshes = module_meshes(recipe.parallelism.modules, topology)
    refusals.finish()
    return Wiring(topology, meshes, tables, media, losses)


def _loss(key: str, table: Loss) -> LossSpec:
    units: Mapping[str, Unit] = {"cross_entropy": "tokens", "mse": "latents", "flow_matching": "latents"}
    if table.kind not in units and ":" not in table.kind:
        raise RecipeError(f"{key}.kind: {unknown('kind', table.kind, [*units, 'package.module:function'])}")
    unit = table.unit or units.get(table.kind)
    if unit is None:
        raise RecipeError(
            f"{key}.unit is missing: say what {table.kind!r} is divided by: tokens (of the LLM), or latents, frames or "
            "items of the media that the module makes"
        )
    if table.kind in units and (unit == "tokens") != (table.kind == "cross_entropy"):
        raise RecipeError(f"{key}.unit = {unit!r}: {table.kind} counts {units[table.kind]}")
    return LossSpec(table.kind, table.weight, unit)


def _topology(recipe: Recipe, losses: Mapping[str, LossSpec]) -> Topology:
    others = frozenset(name for name, loss in losses.items() if loss.unit != "tokens")
    boundaries = tuple(BoundarySpec(b.source, b.destination, b.at, layer=b.layer) for b in recipe.boundaries)
    try:
        llm = Topology(tuple(recipe.modules), boundaries, others).llm
        named = (replace(b, output=_output(b)) if b.source == llm else b for b in boundaries)
        return Topology(tuple(recipe.modules), tuple(named), others)
    except GraphError as error:
        raise RecipeError(f"boundaries: {error}") from error


def _output(boundary: BoundarySpec) -> str:
    """What the LLM calls hidden states: by their placeholder, and their layer."""
    return ".".join(filter(None, (boundary.at, boundary.layer)))


def _check_losses(losses: Mapping[str, LossSpec], topology: Topology) -> None:
    refusals = Refusals()
    for name in topology.names:
        key, loss = f"modules.{name}.loss", losses.get(name)
        if loss is None:
            if name != topology.llm and not topology.outputs(name):
                refusals.add(
                    f"{key} is missing: no module reads what {name!r} computes, so it needs a loss of its own; "
                    f"{topology.llm!r} is the LLM, to which rows with `at` go, or from which they come"
                )
        elif name in topology.after_llm and topology.outputs(name):
            refusals.add(
                f"{key}: {name!r} hands its rows on to {topology.outputs(name)[0].destination!r}; after "
                f"{topology.llm!r} only modules that none reads have losses"
            )
        elif loss.unit == "tokens" and name != topology.llm:
            where = f"{key}.kind = {loss.kind!r}" if loss.kind == "cross_entropy" else f"{key}.unit = 'tokens'"
            refusals.add(
                f"{where}: only {topology.llm!r}, the LLM, has target tokens; others count latents, frames or items"
            )
        elif loss.kind in ("mse", "flow_matching") and name not in topology.after_llm:
            refusals.add(
                f"{key}.kind = {loss.kind!r}: only a module after {topology.llm!r} has targets to compare with"
            )
        elif loss.unit != "tokens" and name == topology.llm:
            refusals.add(f"{key}.unit = {loss.unit!r}: {name!r}, the LLM, has target tokens; write 'tokens'")
        elif loss.unit == "latents" and name not in topology.after_llm:
            refusals.add(
                f"{key}.unit = 'latents': only a module after {topology.llm!r} makes any; take frames or items"
            )
    if not any(loss.weight for loss in ({topology.llm: NEXT_TOKEN} | dict(losses)).values()):
        keys = ", ".join(f"modules.{name}.loss.weight" for name in losses)
        refusals.add(f"{keys} = 0: no loss trains anything; give one of them a weight above 0")
    refusals.finish()


def _check_ends(recipe: Recipe, topology: Topology) -> None:
    """Check `at` and `layer` of the boundaries, and what only the LLM or only encoders have."""
    refusals, llm = Refusals(), topology.llm
    seen: dict[str, str] = {}
    unnamed = {b.source for b in topology.boundaries if b.destination == llm and b.at is None}
    for i, b in enumerate(topology.boundaries):
        key = f"boundaries[{i}].at"
        if b.layer is not None and b.source != llm:
            refusals.add(f"boundaries[{i}].layer: only hidden states of {llm!r} are of a layer; leave it out")
        if b.at is None and (b.source == llm or b.destination == llm in topology.others):
            refusals.add(
                f"{key} is missing: name the placeholder of the tokens whose hidden states {b.destination!r} reads, "
                f'e.g. at = "image_out"; {b.source!r}, the LLM, emits nothing else'
            )
        elif llm not in (b.source, b.destination) and b.at is not None and b.destination not in unnamed:
            refusals.add(f"{key}: rows replace placeholders only in {llm!r}, but {b.name} ends elsewhere; leave it out")
        elif b.destination == llm and b.at is None:
            after = f"; if {llm!r} is no LLM but a module after it, [modules.{llm}.loss] is missing"
            refusals.add(
                f'{key} is missing: name the placeholder that the rows of {b.name} replace, e.g. at = "image"'
                + after * (not topology.outputs(llm) and recipe.modules[llm].loss is None)
            )
        elif b.source != llm and b.at is not None and seen.setdefault(b.at, b.name) != b.name:
            refusals.add(f"{key}: the rows of {seen[b.at]} already replace placeholder {b.at!r}; name another one")
    for name, module in recipe.modules.items():
        if module.attention_mask != "causal" and name != llm:
            refusals.add(f"modules.{name}.attention_mask: only {llm!r}, which reads tokens, has one")
        if module.media is not None and name not in topology.after_llm and (topology.inputs(name) or name == llm):
            refusals.add(f"modules.{name}.media: only a module that no boundary leads to reads media, except the LLM")
    refusals.finish()


def _table(recipe: Recipe, topology: Topology, name: str) -> str | None:
    while name not in recipe.parallelism.modules:
        if (neighbour := topology.neighbour(name)) is None:
            return None
        name = neighbour
    return name


def _media(recipe: Recipe, topology: Topology, losses: Mapping[str, LossSpec], name: str) -> str | None:
    """The media that an encoder reads, or a module with a loss after the LLM has its targets from: as the recipe says,
    else the one placeholder where its rows end up, or come from."""
    after = name in topology.after_llm
    if name == topology.llm or (name not in losses if after else bool(topology.inputs(name))):
        return None
    if (media := recipe.modules[name].media) is not None:
        return media
    if after:
        return topology.generated(name)
    placeholders = topology.placeholders(name)
    if not placeholders:  # it feeds modules after the LLM alone
        targets = [topology.generated(b.destination) for b in topology.outputs(name)]
        placeholders = tuple(dict.fromkeys(kind for kind in targets if kind is not None))
    if len(placeholders) != 1:
        valid = f" the placeholders {list(placeholders)}" if placeholders else " none"
        example = placeholders[0] if placeholders else "image"
        raise RecipeError(
            f"modules.{name}.media is missing: the rows of {name!r} replace{valid}; say which media it reads, e.g. "
            f'media = "{example}"'
        )
    return placeholders[0]
