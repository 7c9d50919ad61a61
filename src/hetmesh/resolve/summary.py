"""What a recipe means, for people: its summary in a few lines, and what `[model] hf_path` stands for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hetmesh.data.source import abilities_of
from hetmesh.formatting import counted, ranks_text, table
from hetmesh.graph import NEXT_TOKEN
from hetmesh.models import Adapter
from hetmesh.models.weights.build import build_on_meta, reason_built_whole
from hetmesh.models.weights.load import saved_tensors
from hetmesh.parallel.random_state import DROPOUT
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.torchtitan_keys import differing_defaults
from hetmesh.resolve.directories import why_not_compared
from hetmesh.resolve.modules import notes_on_experts
from hetmesh.resolve.resolved import ResolvedRecipe


def drops(recipe: Recipe, name: str, adapter: Adapter) -> bool:
    """Whether a module draws random numbers while it trains, as far as its adapter declares it."""
    lora, module = recipe.modules[name].lora, build_on_meta(adapter)
    layers = () if module is None else module.modules()
    own = adapter.abilities.attention_dropout or any(isinstance(layer, DROPOUT) and layer.p for layer in layers)
    return bool(own or (lora is not None and lora.dropout))


def summary(resolved: ResolvedRecipe) -> Iterator[str]:
    """What a recipe does, one line per item."""
    recipe, adapters = resolved.recipe, resolved.adapters
    batch, wiring = recipe.batch, recipe.wiring
    if recipe.job.description:
        yield recipe.job.description
    yield f"{counted(recipe.world_size, 'rank')}, {recipe.training.steps} steps of {batch.global_batch_size} samples"
    yield (
        f"each step: {counted(batch.lanes, 'lane')} of {recipe.llm} x "
        f"{counted(batch.num_microbatches, 'microbatch', 'microbatches')} x "
        f"{counted(batch.microbatch_size, 'sample')}, schedule {recipe.schedule}"
    )
    lines = [("module", "model", "ranks", "mesh", "parameters")]
    for name, module in recipe.modules.items():
        shape = resolved.shapes[name]
        mesh = wiring.meshes[name]
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
        lines.append((name, module.model, ranks_text(mesh.ranks), axes, f"{shape.parameters:,}" if shape else ""))
    for line in table(lines):
        yield f"  {line}"
    for boundary in recipe.boundaries:
        at = (f" at {boundary.at!r}" if boundary.at else "") + (f" after {boundary.layer}" if boundary.layer else "")
        yield f"  {boundary.source} -> {boundary.destination}{at}"
    if len(losses := {recipe.llm: NEXT_TOKEN} | dict(wiring.losses)) > 1:
        units = {"tokens": "target token", "latents": "row of targets", "frames": "frame", "items": "media item"}
        yield "  loss: " + " + ".join(f"{x.weight:g} x {x.kind} of {n} per {units[x.unit]}" for n, x in losses.items())
    if idle := sorted(set(range(recipe.world_size)) - set(wiring.ranks)):
        yield f"note: no module uses rank {ranks_text(tuple(idle))}"
    uncounted = {name: shape for name, shape in resolved.shapes.items() if shape is not None and shape.uncounted}
    for note in notes_on_experts(uncounted):
        yield f"note: {note}"
    if why := why_not_compared(recipe):
        yield f"note: its weights are not compared with transformers' own forward: {why}"
    if names := list(abilities_of(resolved.source).values):
        yield (
            f"note: data.options.values = {names} reach a custom loss, hetmesh.train(recipe, loss=f); a run without "
            "one is refused"
        )
    if dropping := [name for name, adapter in adapters.items() if drops(recipe, name, adapter)]:
        yield (
            f"note: dropout of {', '.join(dropping)}: lanes, shards and microbatches draw numbers of their own, so "
            "each layout trains with other ones, and losses of two layouts are not equal"
        )
    for name, module in recipe.modules.items():
        if ":" in module.model and (cause := reason_built_whole(adapters[name], name)):
            yield f"note: each rank of {name} builds it whole: its constructor computes with its weights ({cause})"
    useless = list(recipe.without_effect)
    if recipe.compile.enable and "loss" in recipe.compile.components:
        useless.append("compile.components: the loss is not compiled")
    if recipe.llm_schedule == "zero_bubble" and recipe.compile.enable and "model" in recipe.compile.components:
        useless.append("zero_bubble: torch.compile makes one function of a backward, so it stays whole, as under 1f1b")
    if useless:
        yield "note: taken, but without effect:"
        yield from (f"  {line}" for line in useless)
    if different := differing_defaults(recipe):
        yield "note: not given, and not torchtitan's default:"
        yield from (f"  {line}" for line in different)


def parameters(resolved: ResolvedRecipe) -> Iterator[str]:
    """Every parameter of each module. Layers that differ in their number are one line."""
    for module_name, adapter in resolved.adapters.items():
        module = build_on_meta(adapter)
        if module is None:
            continue
        names = dict(saved_tensors(module))
        yield f"{module_name} owns {len(names)} tensors of {sum(t.numel() for t in names.values()):,} numbers:"
        alike = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
        yield from (f"  {name}" + (f"  ({count})" if "*" in name else "") for name, count in alike.items())
