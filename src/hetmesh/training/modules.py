"""The modules of a recipe before they are parallelised."""

from __future__ import annotations

from torch import nn

from hetmesh.models import Adapter, add_lora, build_empty, build_module, load_weights, pretrained_of, stand_ins
from hetmesh.models.batch_statistics import check_batch_statistics
from hetmesh.recipe.module_options import DTYPES
from hetmesh.recipe.recipe import Recipe


def full_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """Module `name` before it is parallelised: weights from the seed, adapters added, frozen as the recipe says.

    With `initial_load_path` it has no weights yet (they are on the meta device): `load_weights` gives each rank its own
    after the module is parallelised.
    """
    own, dtype = recipe.modules[name], DTYPES[recipe.training.dtype]
    if own.initial_load_path is not None:
        return empty_module(recipe, adapter, name)
    return _adapted(recipe, adapter, name, build_module(adapter, name, recipe.debug.seed, dtype))


def empty_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """`full_module` without weights, wherever they are to come from; adapters have theirs."""
    return _adapted(recipe, adapter, name, build_empty(adapter, DTYPES[recipe.training.dtype]))


def _adapted(recipe: Recipe, adapter: Adapter, name: str, module: nn.Module) -> nn.Module:
    own = recipe.modules[name]
    check_batch_statistics(name, own.model, module)
    if own.lora is not None:
        with stand_ins(module):
            add_lora(module, own.lora, name, recipe.debug.seed, adapter.layers())
    elif not own.trainable:
        module.requires_grad_(False)
    return module


def loaded_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """`full_module` on the CPU with its weights, wherever they come from."""
    module = full_module(recipe, adapter, name)
    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        load_weights(adapter, module, pretrained)
    return module
