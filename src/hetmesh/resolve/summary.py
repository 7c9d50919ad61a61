"""The summary of a recipe: what it means, in a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hetmesh.formatting import counted, ranks_text, table
from hetmesh.models.weights.build import build_on_meta, reason_built_whole
from hetmesh.parallel.random_state import DROPOUT
from hetmesh.recipe.hf_path import prompt_note
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.torchtitan_keys import differing_defaults
from hetmesh.resolve.module_shapes import module_shape_of, notes_on_experts
from hetmesh.resolve.whole_directory import why_not_compared

if TYPE_CHECKING:
    from hetmesh.layout.mesh import MeshSpec
    from hetmesh.models import Adapter


def count_parameters(adapter: Adapter) -> int | None:
    """Parameters of the module, counted without allocating them; None for a module that cannot be built that way."""
    module = build_on_meta(adapter)
    return None if module is None else sum(p.numel() for p in module.parameters())


def drops(recipe: Recipe, name: str, adapter: Adapter) -> bool:
    """Whether a module draws random numbers while it trains, as far as it says so."""
    lora, module = recipe.modules[name].lora, build_on_meta(adapter)
    layers = () if module is None else module.modules()
    own = adapter.abilities.attention_dropout or any(isinstance(each, DROPOUT) and each.p for each in layers)
    return bool(own or (lora is not None and lora.dropout))


def summary(recipe: Recipe, adapters: Mapping[str, Adapter]) -> Iterator[str]:
    """What `recipe` does, one line per item.

    Args:
        adapters: the modules' adapters; one that is missing has no count of parameters.
    """
    batch, wiring = recipe.batch, recipe.wiring
    if recipe.job.description:
        yield recipe.job.description
    yield f"{counted(recipe.world_size, 'rank')}, {recipe.training.steps} steps of {batch.global_batch_size} samples"
    yield (
        f"each step: {counted(batch.lanes, 'lane')} of {recipe.sink} x "
        f"{counted(batch.num_microbatches, 'microbatch', 'microbatches')} x "
        f"{counted(batch.microbatch_size, 'sample')}, schedule {recipe.schedule}"
    )
    lines = [("module", "model", "ranks", "mesh", "parameters")]
    for name, module in recipe.modules.items():
        count = count_parameters(adapters[name]) if name in adapters else None
        lines.append(
            (
                name,
                module.model,
                ranks_text(wiring.meshes[name].ranks),
                _mesh_text(wiring.meshes[name]),
                "" if count is None else f"{count:,}",
            )
        )
    for line in table(lines):
        yield f"  {line}"
    for boundary in recipe.boundaries:
        yield f"  {boundary.source} -> {boundary.destination}" + (f" at {boundary.at!r}" if boundary.at else "")
    if idle := sorted(set(range(recipe.world_size)) - set(wiring.ranks)):
        yield f"note: no module uses rank {ranks_text(tuple(idle))}"
    if note := prompt_note(recipe):
        yield f"note: {note}"
    for name, adapter in adapters.items():
        shape = module_shape_of(recipe, adapter, name) if name in recipe.modules else None
        if shape is not None and shape.uncounted:
            yield from (f"note: {note}" for note in notes_on_experts({name: shape}))
    if why := why_not_compared(recipe):
        yield f"note: its weights are not compared with transformers' own forward: {why}"
    if dropping := [name for name, adapter in adapters.items() if drops(recipe, name, adapter)]:
        yield (
            f"note: dropout of {', '.join(dropping)}: lanes, shards and microbatches draw numbers of their own, so "
            "each layout trains with other ones, and losses of two layouts are not equal"
        )
    for name, module in recipe.modules.items():
        if ":" in module.model and name in adapters and (cause := reason_built_whole(adapters[name], name)):
            yield f"note: each rank of {name} builds it whole: its constructor computes with its weights ({cause})"
    useless = list(recipe.without_effect)
    if recipe.compile.enable and "loss" in recipe.compile.components:
        useless.append("compile.components: the loss is not compiled")
    if useless:
        yield "note: taken, but without effect:"
        yield from (f"  {line}" for line in useless)
    if different := differing_defaults(recipe):
        yield "note: not given, and not torchtitan's default:"
        yield from (f"  {line}" for line in different)


def _mesh_text(mesh: MeshSpec) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
