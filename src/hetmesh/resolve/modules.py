"""The modules of a recipe before they are parallelised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models import (
    Adapter,
    DeferredModule,
    add_lora,
    build_deferred,
    build_empty,
    load_weights,
    pretrained_of,
    stand_ins,
)
from hetmesh.models.batch_statistics import check_batch_statistics
from hetmesh.models.weights.fill_module import draw_weights, materialize
from hetmesh.models.weights.lora import is_adapter
from hetmesh.recipe.module_options import DTYPES
from hetmesh.recipe.recipe import Recipe


def deferred_module(recipe: Recipe, adapter: Adapter, name: str) -> DeferredModule:
    """Module `name` before it is parallelised: with LoRA adapters, frozen as the recipe says, and without memory for
    its parameters, which `fill_module` gives each rank after the module is parallelised."""
    if recipe.modules[name].initial_load_path is not None:
        return empty_module(recipe, adapter, name)
    dtype = DTYPES[recipe.training.dtype]
    dtype = DTYPES[recipe.training.dtype]
    return _adapted(recipe, adapter, name, build_deferred(adapter, name, recipe.debug.seed, dtype))


def empty_module(recipe: Recipe, adapter: Adapter, name: str) -> DeferredModule:
    """`deferred_module` with values for LoRA adapters only, whose other weights come from elsewhere."""
    return _adapted(recipe, adapter, name, DeferredModule(build_empty(adapter, DTYPES[recipe.training.dtype])))


def _adapted(recipe: Recipe, adapter: Adapter, name: str, deferred: DeferredModule) -> DeferredModule:
    options, module = recipe.modules[name], deferred.module
    check_batch_statistics(name, options.model, module)
    if options.lora is not None:
        seed = recipe.debug.seed
        with stand_ins(module):
            deferred.extend(name, seed, partial(add_lora, module, options.lora, name, seed, adapter.layers()))
    elif not options.trainable:
        module.requires_grad_(False)
    return deferred


def fill_module(
    recipe: Recipe,
    adapter: Adapter,
    name: str,
    deferred: DeferredModule,
    device: torch.device | str = "cpu",
    roots: Sequence[nn.Module] = (),
) -> None:
    """Give a `deferred_module`, sharded or not, memory on `device` for what this rank holds, and its weights: read from
    the module's directory, else drawn.

    Args:
        roots: the modules that wrap it or parts of it, where FSDP was applied to these.

    Raises:
        RecipeError: the directory's tensors are not those of the module, or some parameters have no values.
    """
    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        load_weights(adapter, deferred.module, pretrained, device, roots)
    else:
        materialize(deferred.module, torch.device(device), roots)
    others = draw_weights(deferred.module, deferred.initial)
    lost = [fqn for fqn in others if pretrained is None or is_adapter(fqn)]
    if lost:
        raise RecipeError(
            f"modules.{name}: its parameters {lost[:4]}{' and more' if len(lost) > 4 else ''} were made when it was "
            "parallelised, and have no values; a ParallelStyle may shard the parameters of a module, not make others"
        )


def loaded_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """Module `name` on the CPU with its weights, wherever they come from."""
    deferred = deferred_module(recipe, adapter, name)
    fill_module(recipe, adapter, name, deferred)
    return deferred.module
