"""The modules of a recipe before they are parallelised: their sizes, without allocating a weight, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from hetmesh.cost import ModuleShape
from hetmesh.errors import RecipeError
from hetmesh.models import (
    Adapter,
    DeferredModule,
    add_lora,
    build_deferred,
    build_empty,
    freeze_by_name,
    load_weights,
    lora_plan,
    pretrained_of,
    stand_ins,
)
from hetmesh.models.module_shape import check_batch_statistics, module_shape
from hetmesh.models.weights.fill_module import draw_weights, materialize
from hetmesh.models.weights.lora import is_adapter
from hetmesh.parallel.compute_copies import cast_parameters
from hetmesh.recipe.module_options import module_options
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.optimizer_choice import with_optimizer_needs

Shapes = Mapping[str, ModuleShape | None]
"""The sizes of each module; None of one that cannot be built on the meta device."""


def deferred_module(recipe: Recipe, adapter: Adapter, name: str, *, empty: bool = False) -> DeferredModule:
    """Module `name` before it is parallelised: with LoRA adapters, frozen as the recipe says, and without memory for
    its parameters, which `fill_module` gives each rank after the module is parallelised. `empty`: only LoRA adapters
    have values; the other weights come from elsewhere, as with an `initial_load_path`."""
    options, seed, how = recipe.modules[name], recipe.debug.seed, module_options(recipe, name)
    dtype = how.parameter_dtype
    if empty or options.initial_load_path is not None:
        deferred = DeferredModule(build_empty(adapter, dtype))
    else:
        deferred = build_deferred(adapter, name, seed, dtype)
    module = deferred.module
    check_batch_statistics(name, options.model, module)
    if options.lora is not None:
        with stand_ins(module):
            deferred.extend(name, seed, partial(add_lora, module, options.lora, name, seed, adapter.layers()))
    elif not options.trainable:
        module.requires_grad_(False)
    elif not isinstance(options.trainable, bool):
        freeze_by_name(module, options.trainable, f"modules.{name}.trainable")
    if how.compute_copies and how.compute_dtype is not None:
        cast_parameters((p for p in module.parameters() if not p.requires_grad), how.compute_dtype)
    return deferred


def empty_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """Module `name` without values but those of LoRA adapters."""
    return deferred_module(recipe, adapter, name, empty=True).module


def fill_module(
    recipe: Recipe,
    adapter: Adapter,
    name: str,
    deferred: DeferredModule,
    device: torch.device | str = "cpu",
    roots: Sequence[nn.Module] = (),
) -> None:
    """Give a `deferred_module`, sharded or not, memory on `device` for what this rank holds, and its weights. `roots`:
    the modules that wrap it or parts of it, where FSDP was applied to these. Raises RecipeError: the directory's
    tensors are not those of the module, or some parameters have no values."""
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


@dataclass(eq=False)
class ModuleShapes(Mapping[str, ModuleShape | None]):
    """Per module its sizes, adapters and frozen parts included, found when they are first asked for; None for a module
    that cannot be built on the meta device."""

    recipe: Recipe
    adapters: Mapping[str, Adapter]
    _shapes: dict[str, ModuleShape | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ModuleShape | None:
        if name not in self._shapes:
            self._shapes[name] = _shape(self.recipe, self.adapters[name], name)
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.adapters)

    def __len__(self) -> int:
        return len(self.adapters)


def _shape(recipe: Recipe, adapter: Adapter, name: str) -> ModuleShape | None:
    try:
        with torch.device("meta"):
            module = empty_module(recipe, adapter, name)
    except Exception:  # a user's constructor may compute with its weights
        return None
    plan = lora_plan(module, {**adapter.tensor_parallel_plan(), **recipe.modules[name].plan})
    shape, loss = module_shape(name, adapter, module, plan), recipe.modules[name].loss
    if loss is not None and ":" in loss.kind:  # a loss of one's own reads all logits, whole
        whole = (replace(layer, by_chunks=False, shares_logits=False) for layer in shape.layers)
        shape = replace(shape, layers=tuple(whole))
    return with_optimizer_needs(recipe, shape)


def notes_on_experts(shapes: Shapes) -> tuple[str, ...]:
    """What is assumed of the experts of modules, and what of them is not counted."""
    notes = []
    for name, shape in shapes.items():
        if shape is not None and any(weight.expert for weight in shape.weights):  # whose products are counted
            notes.append(f"experts of {name}: their routing, which depends on weights, is taken to be even")
        if shape is not None and shape.uncounted:
            notes.append(
                f"not counted in FLOPs and seconds: the products of the experts of {name} ({shape.uncounted[0]}, ...), "
                "whose model does not say how many a token chooses"
            )
    return tuple(notes)
