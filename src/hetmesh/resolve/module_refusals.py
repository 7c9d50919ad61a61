"""What the modules of a recipe cannot do of that which it asks of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hetmesh.errors import RecipeError, Refusals
from hetmesh.graph import dense_mesh
from hetmesh.models import Adapter, add_lora, build_empty, check_weights, pretrained_of
from hetmesh.models.batch_statistics import check_batch_statistics
from hetmesh.models.weights.build import build_on_meta, reason_built_whole
from hetmesh.parallel.tensor_parallel import check_plan
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.module_options import module_options, packs, token_axes
from hetmesh.resolve.expert_refusals import check_experts

if TYPE_CHECKING:
    from torch import nn

    from hetmesh.recipe.recipe import Recipe


def check_module(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """What a module cannot do of that which the recipe asks of it: its parallelism, its weights, its adapters."""
    for check in (
        _tensor_parallel,
        _sequence_parallel,
        _packing,
        _context_parallel,
        _zero_bubble,
        _attention_dropout,
        check_experts,
    ):
        check(recipe, name, adapter, refusals)
    with refusals.collect():
        _weights(recipe, name, adapter)
    if (module := build_on_meta(adapter)) is not None:
        with refusals.collect():
            check_batch_statistics(name, recipe.modules[name].model, module)
        _plan(recipe, name, module, refusals)
        _frozen_inside(recipe, name, module, refusals)
        with refusals.collect():
            _lora(recipe, name, adapter, module)


def _tensor_parallel(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    mesh, sizes = recipe.wiring.meshes[name], adapter.tensor_parallel_sizes()
    degree = mesh.axis_size("tp")
    wrong = {size: value for size, value in sizes.items() if value % degree}
    if not wrong:
        return
    owner = recipe.wiring.tables[name]
    takes = "" if owner == name else f" (module {name!r} takes the mesh of {owner!r})"
    valid = divisors(math.gcd(*sizes.values()))
    fitting = [d for d in valid if mesh.size % d == 0]
    limit = "" if fitting == valid else f", of which {fitting} divide its {mesh.size} ranks"
    refusals.add(
        f"parallelism.{owner}.tensor_parallel_degree = {degree}{takes} does not divide "
        + " and ".join(f"{size} = {value}" for size, value in wrong.items())
        + f" of modules.{name}; valid degrees are {valid}{limit}"
    )


def _sequence_parallel(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    if not module_options(recipe, name).sequence_parallel:
        return
    key = f"parallelism.{name}.enable_sequence_parallel"
    if not adapter.abilities.token_sharded:
        hint = "" if name == recipe.sink else f"; write the key in [parallelism.{recipe.sink}]"
        why = adapter.abilities.because("token_sharded")
        refusals.add(f"{key}: this {recipe.modules[name].model} cannot split its tokens{why}{hint}")
    elif recipe.modules[name].lora is not None:
        refusals.add(f"{key}: not together with modules.{name}.lora")


def _packing_key(recipe: Recipe, name: str) -> str:
    """The key because of which a module takes its samples in one row."""
    if (mask := recipe.modules[name].attention_mask) != "causal":
        return f"modules.{name}.attention_mask = {mask!r}"
    if recipe.training.pack_samples:
        return "training.pack_samples"
    return f"parallelism.{name}.context_parallel_degree = {recipe.wiring.meshes[name].axis_size('cp')}"


def _packing(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    if packs(recipe, name) and adapter.abilities.use_packed is None:
        refusals.add(
            f"{_packing_key(recipe, name)}: this {recipe.modules[name].model} cannot take its samples in one row"
            f"{adapter.abilities.because('use_packed')}"
        )


def _context_parallel(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    degree = recipe.wiring.meshes[name].axis_size("cp")
    shares = "cp" in token_axes(recipe, name) and (name == recipe.sink or adapter.abilities.tokens_per_row)
    if degree > 1 and not shares:
        refusals.add(
            f"parallelism.{name}.context_parallel_degree = {degree}: of the modules only {recipe.sink!r}, which reads "
            "tokens, and encoders of model 'qwen3_vl_vision' can share theirs; make it 1 and give the module more data "
            "parallel ranks"
        )


def _zero_bubble(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """What a backward in two parts cannot be combined with."""
    if recipe.sink_schedule != "zero_bubble" or (recipe.fills_bubbles and name != recipe.sink):
        return
    written = "bubble_fill_schedule" if recipe.fills_bubbles else "pipeline_parallel_schedule"
    key = f'parallelism.{written} = "zero_bubble" splits the backward'
    if (degree := dense_mesh(recipe.wiring.meshes[name]).axis_size("dp_shard")) > 1:
        refusals.add(
            f"{key}, of which FSDP learns nothing: module {name!r} has a data_parallel_shard_degree of "
            f"{degree}; make it 1, or take the schedule 1f1b or interleaved"
        )
    if module_options(recipe, name).activation_checkpoint != "none":
        refusals.add(
            f"{key}, and module {name!r} would be computed again for each part: set its activation_checkpoint to "
            "'none', or take the schedule 1f1b or interleaved"
        )


def _attention_dropout(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    if not (dropout := adapter.abilities.attention_dropout):
        return
    key = f"modules.{name}.config.attention_dropout = {dropout}"
    if packs(recipe, name):
        refusals.add(
            f"{key}: hetmesh's own attention, which {_packing_key(recipe, name)} needs, drops nothing; set it to 0"
        )


def _plan(recipe: Recipe, name: str, module: nn.Module, refusals: Refusals) -> None:
    for pattern, style in recipe.modules[name].plan.items():
        try:
            check_plan(module, {pattern: style})
        except RecipeError as error:
            refusals.add(f"modules.{name}.plan: {error}")


def _frozen_inside(recipe: Recipe, name: str, module: nn.Module, refusals: Refusals) -> None:
    """A module that has frozen all of its weights by itself: the graph would send gradients back for nothing."""
    own, encoder = recipe.modules[name], not recipe.wiring.topology.inputs(name) and name != recipe.sink
    if not own.trainable or own.lora is not None or any(p.requires_grad for p in module.parameters()):
        return
    if encoder or any(True for _ in module.parameters()):
        refusals.add(
            f"modules.{name}.trainable = true, but {type(module).__name__} has no parameter with requires_grad = True: "
            f"write trainable = false in [modules.{name}], or let the class leave something to train"
        )


def _lora(recipe: Recipe, name: str, adapter: Adapter, module: nn.Module) -> None:
    """Put adapters beside the layers of a module without memory: what has no such layers says so."""
    if (lora := recipe.modules[name].lora) is not None:
        with torch.device("meta"):
            add_lora(module, lora, name, recipe.debug.seed, adapter.layers())


def _weights(recipe: Recipe, name: str, adapter: Adapter) -> None:
    """Compare the headers of the module's checkpoint with its parameters; else its constructor sets them."""
    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        check_weights(adapter, build_empty(adapter), pretrained)
    elif ":" in recipe.modules[name].model:
        reason_built_whole(adapter, name)  # which says what its constructor leaves without values
