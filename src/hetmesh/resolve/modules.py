"""The modules of a recipe before they are parallelised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models import (
    Adapter,
    Unfilled,
    add_lora,
    build_empty,
    build_unfilled,
    load_weights,
    pretrained_of,
    stand_ins,
)
from hetmesh.models.batch_statistics import check_batch_statistics
from hetmesh.models.weights.fill import draw_weights, materialize
from hetmesh.models.weights.lora import is_adapter
from hetmesh.recipe.module_options import DTYPES
from hetmesh.recipe.recipe import Recipe


def unfilled_module(recipe: Recipe, adapter: Adapter, name: str) -> Unfilled:
    """Module `name` before it is parallelised: adapters added, frozen as the recipe says, and no memory for its
    parameters yet. `fill_module` gives each rank its own after the module is parallelised."""
    own, dtype = recipe.modules[name], DTYPES[recipe.training.dtype]
    if own.initial_load_path is not None:
        return empty_module(recipe, adapter, name)
    return _adapted(recipe, adapter, name, build_unfilled(adapter, name, recipe.debug.seed, dtype))


def empty_module(recipe: Recipe, adapter: Adapter, name: str) -> Unfilled:
    """`unfilled_module` without values but those of adapters, wherever the others are to come from."""
    return _adapted(recipe, adapter, name, Unfilled(build_empty(adapter, DTYPES[recipe.training.dtype])))


def _adapted(recipe: Recipe, adapter: Adapter, name: str, unfilled: Unfilled) -> Unfilled:
    own, module = recipe.modules[name], unfilled.module
    check_batch_statistics(name, own.model, module)
    if own.lora is not None:
        seed = recipe.debug.seed
        with stand_ins(module):
            unfilled.extend(name, seed, partial(add_lora, module, own.lora, name, seed, adapter.layers()))
    elif not own.trainable:
        module.requires_grad_(False)
    return unfilled


def fill_module(
    recipe: Recipe,
    adapter: Adapter,
    name: str,
    unfilled: Unfilled,
    device: torch.device | str = "cpu",
    roots: Sequence[nn.Module] = (),
) -> None:
    """Give an `unfilled_module`, sharded or not, memory on `device` for what this rank holds, and its weights: from the
    module's directory, else drawn.

    Args:
        roots: the modules that wrap it or parts of it, where FSDP was applied to these.

    Raises:
        RecipeError: the directory's tensors are not those of the module, or some parameters have no values.
    """
    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        load_weights(adapter, unfilled.module, pretrained, device, roots)
    else:
        materialize(unfilled.module, torch.device(device), roots)
    others = draw_weights(unfilled.module, unfilled.initial)
    lost = [fqn for fqn in others if pretrained is None or is_adapter(fqn)]
    if lost:
        raise RecipeError(
            f"modules.{name}: its parameters {lost[:4]}{' and more' if len(lost) > 4 else ''} were made when it was "
            "parallelised, and have no values; a ParallelStyle may shard the parameters of a module, not make others"
        )


def loaded_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """Module `name` on the CPU with its weights, wherever they come from."""
    unfilled = unfilled_module(recipe, adapter, name)
    fill_module(recipe, adapter, name, unfilled)
    return unfilled.module
